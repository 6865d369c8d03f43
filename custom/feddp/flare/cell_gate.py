"""A gate before every cell of a process: there before the cell starts, asked before all other filters. It notes refusals."""

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
from feddp.flare.wire import holds_no_files, no_files


class First(Registry):
    """A cell's filters with the gate before them. FLARE's registry finds the most specific entry alone, and would pass by one
    for everything wherever there is one for a channel."""

    def __init__(self, gate: Callback, others: Registry):
        super().__init__()
        self.gate, self.reg = gate, others.reg

    def find(self, channel: str, topic: str) -> list[Callback]:
        return [self.gate, *(super().find(channel, topic) or [])]


class Gate(FLComponent):
    """For a kit's resources.json, whose components FLARE builds in the parent process and in each job's before their cells.

    No event of FLARE's lies between a cell's making and its start. So a gate puts itself on the cells that are there (a
    container's job has fetched its workspace by one), and has every later one made with it.
    """

    def __init__(self) -> None:
        super().__init__()
        no_files()
        plain_lines()
        self.refusals = Refusals()
        for cell in list(CoreCell.ALL_CELLS.values()):
            self._guard(cell)
        make = CoreCell.__init__

        @functools.wraps(make)
        def guarded(cell: CoreCell, *args: Any, **kwargs: Any) -> None:
            make(cell, *args, **kwargs)
            self._guard(cell)

        CoreCell.__init__ = guarded

    def covers(self, name: str) -> bool:
        """Whether a cell is of those that this gate stands before."""
        raise NotImplementedError

    def judge(self, cell: CoreCell, message: Message, arrival: Arrival) -> None:
        """Raises Refused for a message that does not pass."""
        raise NotImplementedError

    def _guard(self, cell: CoreCell) -> None:
        name = cell.get_fqcn()
        if self.covers(name) and not isinstance(cell.in_filter_reg, First):
            cell.in_filter_reg = First(Callback(self._arrived, (cell,), {}), cell.in_filter_reg)
            cell.in_req_filter_reg = First(Callback(self._decoded, (cell,), {}), cell.in_req_filter_reg)

    def _arrived(self, message: Message, cell: CoreCell) -> Message | None:
        """FLARE's incoming filter: what it returns stops the message. An exception would as well."""
        try:
            self.judge(cell, message, Arrival.of(message))
        except Refused as refused:
            self._note(cell, message, str(refused))
            return make_reply(ReturnCode.INVALID_REQUEST)  # sent to nobody: an answer would carry the site's own token
        return None

    def _note(self, cell: CoreCell, message: Message, why: str, inside: str = "") -> None:
        """A line in the audit file: who sends, as claimed and as proved, where to, why it does not pass; no value."""
        headers = message.headers or {}
        names = [MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC, StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC]
        where = "/".join(shown(headers[name]) for name in names if headers.get(name))
        endpoint, person = message.get_prop(MessagePropKey.ENDPOINT), message.get_prop(MessagePropKey.COMMON_NAME)
        via = f"{shown(endpoint.name if endpoint else None)} {shown(person)}"
        origin = shown(headers.get(MessageHeaderKey.ORIGIN))
        self.refusals.add(cells.split(cell.get_fqcn())[1], origin, f"{where} {inside}from {origin} over {via}: {why}")

    def _decoded(self, message: Message, cell: CoreCell) -> Message | None:
        """FLARE's filter of decoded requests; only sites look into one."""
        return None


def require_gate(site: str) -> None:
    """PolicyError where a cell of this site's in this process stands without the gate, or takes messages that hold files."""
    cells = {name: cell for name, cell in CoreCell.ALL_CELLS.items() if site in FQCN.split(name)}
    if bare := sorted(name for name, cell in cells.items() if not (_is_guarded(cell) and holds_no_files())):
        raise PolicyError(
            f"site {site}: no gate stands before {', '.join(bare)}, so the server can reach past the policy; add"
            f' {{"id": "cell_gate", "path": "feddp.flare.gate.SiteGate", "args": {{}}}} to `components` of local/resources.json'
        )


def _is_guarded(cell: CoreCell) -> bool:
    return isinstance(cell.in_filter_reg, First) and isinstance(cell.in_req_filter_reg, First)
