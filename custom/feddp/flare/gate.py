"""The cell gate: a filter before every cell of a kit's process, which lets in what a federation needs (`cells`), nothing else.

FLARE 2.9's server hands a client's messages on to any other client, and its client believes who a message says it comes from.
So a site has a gate of its own, which holds whatever the server's does; and the server one that keeps clients apart.
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


class SiteGate(Gate):
    """A site's. What passes is `cells.AT_SITE` and `ADMIN` at the parent process, `AT_SITE_JOB` at a job's."""

    def covers(self, name: str) -> bool:
        return FQCN.get_root(name) != SERVER and not is_valid_admin_client_name(name)

    def judge(self, cell: CoreCell, message: Message, arrival: Arrival) -> None:
        me = cell.get_fqcn()
        site, job = cells.split(me)
        sender = self._sender(me, site, job, arrival)
        if arrival.destination != me:
            self._forwards(site, job, sender, arrival)
            return
        if arrival.kind == MessageType.REQ:
            table = cells.AT_BOOTSTRAP if cells.is_bootstrap(me) else cells.AT_SITE_JOB if job else cells.AT_SITE
            if not table.passes(arrival.channel, arrival.topic, arrival.stream, sender):
                raise Refused(f"{shown(arrival.topic)} of {shown(arrival.channel)} is answered by no site")
        require_awaited(cell, message, arrival)

    @staticmethod
    def _sender(me: str, site: str, job: str, arrival: Arrival) -> str:
        """Who of those that a site listens to has sent it. Nobody else's word passes, whoever hands it on."""
        origin, endpoint = arrival.origin, arrival.endpoint
        if origin == endpoint:
            if job and origin == site:
                return cells.PARENT
            if not job and origin != me and cells.split(origin)[0] == site:
                return cells.BOOTSTRAP if cells.is_bootstrap(origin) else cells.CHILD
        # the server by its certificate, for a site also listens to its own machine, without TLS; or by way of the parent
        if (endpoint == SERVER and arrival.person) or endpoint == FQCN.get_parent(me):
            if origin == SERVER:
                return cells.SERVER
            if origin == f"{SERVER}.{job}" or (not job and cells.split(origin)[0] == SERVER):
                return cells.SERVER_JOB
        raise Refused(f"{shown(origin)} is not whom this site listens to")

    @staticmethod
    def _forwards(site: str, job: str, sender: str, arrival: Arrival) -> None:
        """A site's parent process hands on between its own jobs and the server; their gates judge."""
        to, of = cells.split(arrival.destination), cells.split(arrival.origin)
        inwards = sender in (cells.SERVER, cells.SERVER_JOB) and to[0] == site and to[1] and of[1] in ("", to[1])
        outwards = sender == cells.CHILD and to[0] == SERVER and to[1] in ("", of[1])
        if job or not (inwards or outwards):
            raise Refused(f"this site hands nothing on to {shown(arrival.destination)}")

    def _decoded(self, message: Message, cell: CoreCell) -> Message | None:
        """A command that does not pass is answered with a sentence, which the console shows."""
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
        """Raises Refused for what `cells.ADMIN` does not name, or not like this."""
        if not isinstance(request, AdminMessage) or not isinstance(request.headers, dict) or not isinstance(request.topic, str):
            raise Refused("it is no command")
        command, job = request.get_header(RequestHeader.ADMIN_COMMAND), request.get_header(RequestHeader.JOB_ID)
        _, of = cells.split(message.get_header(MessageHeaderKey.ORIGIN))
        if of:  # the table has let in one topic of the own jobs, and each speaks for itself
            if request.topic != message.get_header(MessageHeaderKey.TOPIC) or job != of:
                raise Refused("a job tells its own status, and nothing else")
            return
        known = cells.ADMIN.get(request.topic)
        if known is None:
            raise Refused(f"{shown(command or request.topic)} is answered by no site")
        if known.job and not cells.is_job(job):
            raise Refused(f"{shown(request.topic)} names no job's id")
        if known.right and (command != known.right or request.get_header(RequestHeader.REQUIRE_AUTHZ) != "true"):
            raise Refused(f"{shown(request.topic)} is answered to who has the right to {known.right}")
        if request.topic == TrainingTopic.DEPLOY:  # FLARE unpacks an app, without bounds, before any deployer sees it
            try:
                require_small(request.body)
            except FedDPError as error:
                raise Refused(str(error)) from None


class ServerGate(Gate):
    """The server's: judges by the neighbouring cell, whose name FLARE's mTLS has held against its certificate.

    What passes is `cells.AT_SERVER` at the parent process, `AT_SERVER_JOB` at a job's. From one client nothing goes to another.

    FLARE 2.9 gives every console thirteen hidden commands over its message network and looks up no right for them: `route`
    shows bearer tokens, `show_config_vars` a process's settings, `stress` keeps all busy. The server has none of them where
    this gate was built before its console.
    """

    def __init__(self) -> None:
        super().__init__()
        NetManager.get_spec = _no_commands

    def covers(self, name: str) -> bool:
        return FQCN.get_root(name) == SERVER

    def judge(self, cell: CoreCell, message: Message, arrival: Arrival) -> None:
        me = cell.get_fqcn()
        _, job = cells.split(me)
        if arrival.endpoint == me:  # itself
            return
        sender = self._of_job(job, arrival) if job else self._of_parent(arrival)
        to = cells.split(arrival.destination)
        if arrival.destination != me:
            self._forwards(job, sender, to, arrival)
        if sender == cells.SITE_JOB and arrival.channel == STREAM_CHANNEL:
            self._reports(message, arrival)
        table = cells.AT_SERVER_JOB if to[1] else cells.AT_SERVER
        if cells.is_bootstrap(me):
            table = cells.AT_BOOTSTRAP
        passes = table.passes(arrival.channel, arrival.topic, arrival.stream, sender)
        if arrival.kind == MessageType.REQ and to[0] == SERVER and not passes:  # what goes to a site is that site's to judge
            raise Refused(f"{shown(arrival.topic)} of {shown(arrival.channel)} is not taken from a {sender}")
        if arrival.destination == me:
            require_awaited(cell, message, arrival)

    @staticmethod
    def _of_parent(arrival: Arrival) -> str:
        """Who sends to the server's parent process. All of a site speak for their own site; a console for itself."""
        origin, endpoint = arrival.origin, arrival.endpoint
        if is_valid_admin_client_name(endpoint):
            if origin == endpoint and arrival.person:
                return cells.CONSOLE
        elif FQCN.get_root(endpoint) == SERVER:
            if origin == endpoint and cells.split(origin)[1]:
                return cells.BOOTSTRAP if cells.is_bootstrap(origin) else cells.CHILD
        elif arrival.person == FQCN.get_root(endpoint) == FQCN.get_root(origin):
            return cells.SITE_JOB if cells.split(origin)[1] else cells.SITE
        raise Refused(f"{shown(endpoint)} does not speak for {shown(origin)}")

    @staticmethod
    def _of_job(job: str, arrival: Arrival) -> str:
        """Who sends to a job's process: everything comes by its own parent process, whose gate has judged the connection."""
        if arrival.endpoint == SERVER:
            if arrival.origin == SERVER:
                return cells.PARENT
            if FQCN.get_root(arrival.origin) != SERVER and cells.split(arrival.origin)[1] == job:
                return cells.SITE_JOB
        raise Refused(f"{shown(arrival.origin)} is not of this job")

    @staticmethod
    def _forwards(job: str, sender: str, to: tuple[str, str], arrival: Arrival) -> None:
        """The parent process hands on between a job's process here and those of the same job at the sites."""
        own = cells.split(arrival.origin)[1]
        inwards = sender == cells.SITE_JOB and to == (SERVER, own) and arrival.kind == MessageType.REQ
        outwards = sender == cells.CHILD and to[0] != SERVER and to[1] == own
        if job or not (inwards or outwards):
            raise Refused(f"nothing goes from {shown(arrival.origin)} to {shown(arrival.destination)}")

    @staticmethod
    def _reports(message: Message, arrival: Arrival) -> None:
        """A site reports of the streams that it receives; their numbers can be guessed. FLARE ends a job's process where one is
        reported as too large."""
        headers = message.headers or {}
        if headers.get(StreamHeaderKey.ERROR_TYPE) == BlobSizeError.__name__:
            raise Refused("a site does not end the server's job")
        stream = headers.get(StreamHeaderKey.STREAM_ID)
        sent = ByteStreamer.tx_task_map.get(stream) if isinstance(stream, int) else None
        if sent is not None and sent.target != arrival.origin:
            raise Refused("the stream is another's")


def _no_commands(manager: NetManager) -> CommandModuleSpec:
    return CommandModuleSpec(name="cellnet", cmd_specs=[])
