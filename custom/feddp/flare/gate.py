"""The cell gate: a filter before every cell of a kit's process. It passes only messages that a federation needs (`cells`).

FLARE 2.9's server forwards a client's messages to any other client, and a client trusts the sender that a message names.
Therefore every site has its own gate, independent of the server's, and the server has one that separates the clients.
"""

from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessageType
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.net_manager import NetManager
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError
from nvflare.fuel.hci.reg import CommandModuleSpec
from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import RequestHeader, TrainingTopic

from feddp.errors import FedDPError
from feddp.flare import cells
from feddp.flare.archive import require_small
from feddp.flare.arrival import Arrival, Refused, require_awaited, shown
from feddp.flare.cell_gate import Gate
from feddp.flare.cells import SERVER
from feddp.flare.claimed import only_own_name
from feddp.flare.documents import require_document
from feddp.flare.neighbours import require_proved
from feddp.flare.second_machine import SecondMachine


class SiteGate(Gate):
    """A site's gate. Passes `cells.AT_SITE` and `ADMIN` at the parent process, `AT_SITE_JOB` at a job's process."""

    def covers(self, name: str) -> bool:
        return FQCN.get_root(name) != SERVER and not is_valid_admin_client_name(name)

    def _guard(self, cell: CoreCell) -> None:
        super()._guard(cell)
        if self.covers(cell.get_fqcn()):
            cell.communicator.register_monitor(SecondMachine())

    def judge(self, cell: CoreCell, message: Message, arrival: Arrival) -> None:
        me = cell.get_fqcn()
        site, job = cells.split(me)
        sender = self._sender(cell, site, job, arrival)
        if arrival.destination != me:
            self._forwards(site, job, sender, arrival)
            return
        if arrival.kind == MessageType.REQ:
            table = cells.AT_BOOTSTRAP if cells.is_bootstrap(me) else cells.AT_SITE_JOB if job else cells.AT_SITE
            if not table.passes(arrival.channel, arrival.topic, arrival.stream, sender):
                raise Refused(f"{shown(arrival.topic)} of {shown(arrival.channel)} is not answered by any site")
        require_awaited(cell, message, arrival)

    @staticmethod
    def _sender(cell: CoreCell, site: str, job: str, arrival: Arrival) -> str:
        """Returns which accepted sender sent the message; refuses all others, also if an accepted cell forwards the message."""
        me, origin, endpoint = cell.get_fqcn(), arrival.origin, arrival.endpoint
        require_proved(cell, arrival)
        if origin == endpoint:
            if job and origin == site:
                return cells.PARENT
            if not job and origin != me and cells.split(origin)[0] == site:
                return cells.BOOTSTRAP if cells.is_bootstrap(origin) else cells.CHILD
        if endpoint in (SERVER, FQCN.get_parent(me)):  # the server itself, or the own parent, which forwards what it says
            if origin == SERVER:
                return cells.SERVER
            if origin == f"{SERVER}.{job}" or (not job and cells.split(origin)[0] == SERVER):
                return cells.SERVER_JOB
        raise Refused(f"{shown(origin)} may not send to this site")

    @staticmethod
    def _forwards(site: str, job: str, sender: str, arrival: Arrival) -> None:
        """A site's parent process forwards messages between its own jobs and the server; the receiver's gate checks them."""
        to, of = cells.split(arrival.destination), cells.split(arrival.origin)
        inwards = sender in (cells.SERVER, cells.SERVER_JOB) and to[0] == site and to[1] and of[1] in ("", to[1])
        outwards = sender == cells.CHILD and to[0] == SERVER and to[1] in ("", of[1])
        if job or not (inwards or outwards):
            raise Refused(f"this site forwards nothing to {shown(arrival.destination)}")

    def _decoded(self, message: Message, cell: CoreCell) -> Message | None:
        """Answers a refused command with the reason, which the console shows."""
        if message.get_header(MessageHeaderKey.CHANNEL) != CellChannel.CLIENT_MAIN:
            return None
        request = message.payload
        try:
            self._judge_admin(request, message)
        except Refused as refused:
            headers = request.headers if isinstance(request, AdminMessage) and isinstance(request.headers, dict) else {}
            names = ", ".join(sorted(shown(name, 30) for name in headers)[:12])
            inside = f"{shown(getattr(request, 'topic', None))} ({names}) for {shown(headers.get(RequestHeader.USER_NAME))} "
            self._note(cell, message, str(refused), inside)
            return new_cell_message({}, error_reply(str(refused)))
        return None

    @staticmethod
    def _judge_admin(request: Any, message: Message) -> None:
        """Raises Refused for a command that `cells.ADMIN` does not name, or that does not meet its `ConsoleCommand`."""
        if not isinstance(request, AdminMessage) or not isinstance(request.headers, dict) or not isinstance(request.topic, str):
            raise Refused("it is not a command")
        command, job = request.get_header(RequestHeader.ADMIN_COMMAND), request.get_header(RequestHeader.JOB_ID)
        _, of = cells.split(message.get_header(MessageHeaderKey.ORIGIN))
        if of:  # from this site's jobs the table passes one topic; a job may use it only for itself
            if request.topic != message.get_header(MessageHeaderKey.TOPIC) or job != of:
                raise Refused("a job reports its own status only")
            return
        known = cells.ADMIN.get(request.topic)
        if known is None:
            raise Refused(f"{shown(command or request.topic)} is not answered by any site")
        if known.job and not cells.is_job(job):
            raise Refused(f"{shown(request.topic)} has no valid job id")
        if known.right and (command != known.right or request.get_header(RequestHeader.REQUIRE_AUTHZ) != "true"):
            raise Refused(f"{shown(request.topic)} needs the right to {known.right}")
        try:  # FLARE writes the meta data to the disk, and unpacks an app before it calls the deployer, both without limits
            require_document("its job meta", request.get_header(RequestHeader.JOB_META))
            if request.topic == TrainingTopic.DEPLOY:
                require_small(request.body)
        except FedDPError as error:
            raise Refused(str(error)) from None


class ServerGate(Gate):
    """The server's gate. It identifies a sender by the neighbouring cell, whose certificate its connection has shown.

    Passes `cells.AT_SERVER` at the parent process, `AT_SERVER_JOB` at a job's process. No message goes from client to client.

    FLARE 2.9 gives every console thirteen hidden commands over its message network and checks no right for them: `route`
    shows bearer tokens, `show_config_vars` a process's settings, `stress` loads all cells. This gate removes them from the
    server; FLARE builds it before the console.
    """

    def __init__(self) -> None:
        super().__init__()
        NetManager.get_spec = _no_commands
        from nvflare.private.fed.server.fed_server import FederatedServer  # not above: a site's processes read this file too

        def refused(server: Any, request: Message, why: str) -> None:
            self._note(server.cell, request, why)

        FederatedServer.authentication_check = only_own_name(FederatedServer.authentication_check, refused)

    def covers(self, name: str) -> bool:
        return bool(FQCN.get_root(name) == SERVER)

    def judge(self, cell: CoreCell, message: Message, arrival: Arrival) -> None:
        me = cell.get_fqcn()
        _, job = cells.split(me)
        if arrival.endpoint == me:  # itself
            return
        require_proved(cell, arrival)
        sender = self._of_job(job, arrival) if job else self._of_parent(arrival)
        to = cells.split(arrival.destination)
        if arrival.destination != me:
            self._forwards(job, sender, to, arrival)
        if arrival.channel == STREAM_CHANNEL and sender not in (cells.PARENT, cells.CHILD):
            self._reports(message, arrival, to)
        table = cells.AT_SERVER_JOB if to[1] else cells.AT_SERVER
        if cells.is_bootstrap(me):
            table = cells.AT_BOOTSTRAP
        passes = table.passes(arrival.channel, arrival.topic, arrival.stream, sender)
        if arrival.kind == MessageType.REQ and to[0] == SERVER and not passes:  # a site checks its own messages
            raise Refused(f"{shown(arrival.topic)} of {shown(arrival.channel)} is not accepted from a {sender}")
        if arrival.destination == me:
            require_awaited(cell, message, arrival)

    @staticmethod
    def _of_parent(arrival: Arrival) -> str:
        """Returns who sent a message to the server's parent process. A site's cells may send for their site only."""
        origin, endpoint = arrival.origin, arrival.endpoint
        if is_valid_admin_client_name(endpoint):
            if origin == endpoint:
                return cells.CONSOLE
        elif FQCN.get_root(endpoint) == SERVER:
            if origin == endpoint and cells.split(origin)[1]:
                return cells.BOOTSTRAP if cells.is_bootstrap(origin) else cells.CHILD
        elif FQCN.get_root(endpoint) == FQCN.get_root(origin):
            return cells.SITE_JOB if cells.split(origin)[1] else cells.SITE
        raise Refused(f"{shown(endpoint)} may not send for {shown(origin)}")

    @staticmethod
    def _of_job(job: str, arrival: Arrival) -> str:
        """Returns who sent a message to a job's process. All come via its parent process, whose gate checked the connection."""
        if arrival.endpoint == SERVER:
            if arrival.origin == SERVER:
                return cells.PARENT
            if FQCN.get_root(arrival.origin) != SERVER and cells.split(arrival.origin)[1] == job:
                return cells.SITE_JOB
        raise Refused(f"{shown(arrival.origin)} does not belong to this job")

    @staticmethod
    def _forwards(job: str, sender: str, to: tuple[str, str], arrival: Arrival) -> None:
        """The parent process forwards messages between a job's process here and the same job's processes at the sites."""
        own = cells.split(arrival.origin)[1]
        inwards = sender == cells.SITE_JOB and to == (SERVER, own) and arrival.kind == MessageType.REQ
        outwards = sender == cells.CHILD and to[0] != SERVER and to[1] == own
        if job or not (inwards or outwards):
            raise Refused(f"no message may go from {shown(arrival.origin)} to {shown(arrival.destination)}")

    @staticmethod
    def _reports(message: Message, arrival: Arrival, to: tuple[str, str]) -> None:
        """Refuses a report of a site or a console about a stream to another one, whose id it can guess. To a job's process,
        also the error "too large", on which FLARE ends the process."""
        headers = message.headers or {}
        if to[1] and headers.get(StreamHeaderKey.ERROR_TYPE) == BlobSizeError.__name__:
            raise Refused("a site may not end the server's job")
        stream = headers.get(StreamHeaderKey.STREAM_ID)
        if type(stream) is not int:  # FLARE would find stream 5 by 5.0 too, and stream 1 by True
            raise Refused("its stream has no number")
        sent = ByteStreamer.tx_task_map.get(stream)
        if sent is not None and sent.target != arrival.origin:
            raise Refused("the stream goes to another receiver")


def _no_commands(manager: NetManager) -> CommandModuleSpec:
    return CommandModuleSpec(name="cellnet", cmd_specs=[])
