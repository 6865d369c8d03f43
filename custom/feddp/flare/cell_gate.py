"""A gate before every cell of a process, set before the cell starts and called before all other filters. It logs refusals."""

import functools
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.registry import Callback, Registry
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey

from feddp.errors import PolicyError
from feddp.flare import cells
from feddp.flare.arrival import Arrival, Refused, shown
from feddp.flare.audit import Refusals, plain_lines
from feddp.flare.dead_connections import close_dead_connections
from feddp.flare.handshakes import handshake_apart
from feddp.flare.logs import plain_records
from feddp.flare.neighbours import Neighbours
from feddp.flare.own_connections import require_own_connections
from feddp.flare.pods import restrict_pods
from feddp.flare.streams import by_progress
from feddp.flare.unnamed import bound_frames
from feddp.flare.web_handshakes import bound_web_handshakes
from feddp.flare.wire import holds_no_files, no_files


class First(Registry):
    """A cell's filters with the gate before them. FLARE's own registry calls only the most specific filter: it would skip the
    gate on any channel with a filter."""

    def __init__(self, gate: Callback, others: Registry):
        super().__init__()
        self.gate, self.reg = gate, others.reg

    def find(self, channel: str, topic: str) -> list[Callback]:
        return [self.gate, *(super().find(channel, topic) or [])]


class Gate(FLComponent):
    """For a kit's resources.json, whose components FLARE builds before the cells, in the parent process and in each job's.

    FLARE fires no event between the creation of a cell and its start. Therefore the gate adds itself to the existing cells (a
    job in a container has one, to download its workspace) and to the constructor of all later cells.
    """

    def __init__(self) -> None:
        super().__init__()
        require_own_connections()
        no_files()
        bound_frames()
        by_progress()
        plain_lines()
        plain_records()
        restrict_pods()
        close_dead_connections()  # here: every process with cells has a gate, built before FLARE's drivers
        self.refusals = Refusals()
        self.strangers = Refusals()  # apart: whoever connects without a certificate must not crowd the others out
        handshake_apart(self._without_certificate)
        bound_web_handshakes(self._without_certificate)
        for cell in list(CoreCell.ALL_CELLS.values()):
            self._guard(cell)
        make = CoreCell.__init__

        @functools.wraps(make)
        def guarded(cell: CoreCell, *args: Any, **kwargs: Any) -> None:
            make(cell, *args, **kwargs)
            self._guard(cell)

        CoreCell.__init__ = guarded

    def covers(self, name: str) -> bool:
        """Whether this gate checks the messages to the cell `name`."""
        raise NotImplementedError

    def judge(self, cell: CoreCell, message: Message, arrival: Arrival) -> None:
        """Raises Refused if the message does not pass."""
        raise NotImplementedError

    def _guard(self, cell: CoreCell) -> None:
        name = cell.get_fqcn()
        if self.covers(name) and not isinstance(cell.in_filter_reg, First):
            cell.in_filter_reg = First(Callback(self._arrived, (cell,), {}), cell.in_filter_reg)
            cell.in_req_filter_reg = First(Callback(self._decoded, (cell,), {}), cell.in_req_filter_reg)
            Neighbours(cell, refused=self._note, turned_away=self._turned_away)

    def _arrived(self, message: Message, cell: CoreCell) -> Message | None:
        """FLARE's filter for incoming messages: a returned message stops the incoming one. An exception would do the same."""
        try:
            self.judge(cell, message, Arrival.of(message))
        except Refused as refused:
            self._note(cell, message, str(refused))
            return make_reply(ReturnCode.INVALID_REQUEST)  # FLARE does not send it; a reply would contain the site's token
        return None

    def _note(self, cell: CoreCell | None, message: Message, why: str, inside: str = "") -> None:
        """Writes an audit line: the claimed sender, the authenticated sender, channel and topic, and the reason; no values.

        `cell`: None if the process answers already but FLARE has not yet stored its cell.
        """
        headers = message.headers or {}
        names = [MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC, StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC]
        where = "/".join(shown(headers[name]) for name in names if headers.get(name))
        endpoint, person = message.get_prop(MessagePropKey.ENDPOINT), message.get_prop(MessagePropKey.COMMON_NAME)
        via = f"{shown(endpoint.name if endpoint else None)} {shown(person)}"
        origin = shown(headers.get(MessageHeaderKey.ORIGIN))
        job = cells.split(cell.get_fqcn())[1] if cell else ""
        self.refusals.add(job, origin, f"{where} {inside}from {origin} over {via}: {why}")

    def _turned_away(self, cell: CoreCell, name: str, why: str) -> None:
        """Writes an audit line about a connection that claims a name which is not its own."""
        self.refusals.add(cells.split(cell.get_fqcn())[1], shown(name), f"a connection that says it is {shown(name)} {why}")

    def _without_certificate(self, address: str, why: str) -> None:
        """Writes an audit line about a connection without a certificate of the project."""
        self.strangers.add("", "-", f"a connection from {shown(address)} without a valid certificate: {why}")

    def _decoded(self, message: Message, cell: CoreCell) -> Message | None:
        """FLARE's filter for decoded requests; only the sites' gate checks them."""
        return None


def require_gate(site: str) -> None:
    """Raises PolicyError if a cell of this site in this process has no gate or accepts messages with files."""
    cells = {name: cell for name, cell in CoreCell.ALL_CELLS.items() if site in FQCN.split(name)}
    if bare := sorted(name for name, cell in cells.items() if not (_is_guarded(cell) and holds_no_files())):
        raise PolicyError(
            f"site {site}: no gate protects {', '.join(bare)}, so the server can bypass the policy; add"
            f' {{"id": "cell_gate", "path": "feddp.flare.gate.SiteGate", "args": {{}}}} to `components` of local/resources.json'
        )


def _is_guarded(cell: CoreCell) -> bool:
    filtered = isinstance(cell.in_filter_reg, First) and isinstance(cell.in_req_filter_reg, First)
    return filtered and Neighbours.of(cell) is not None
