"""The tables of messages that pass the gate before a cell of FLARE 2.9. The gate refuses all others, from any sender.

A cell is an endpoint of FLARE's message network: a site's or the server's parent process, or one of its jobs' processes.
FLARE finds a cell's callback by channel and topic. Most messages are frames of a stream and carry the stream's channel and
topic. A console's commands use one channel; the command is a message inside the message (`ADMIN`).
"""

import uuid
from dataclasses import dataclass
from functools import lru_cache

from nvflare.apis.fl_constant import AdminCommandNames as Command
from nvflare.apis.fl_constant import ReservedTopic, ServerCommandNames
from nvflare.app_opt.job_launcher import workspace_cell_transfer as transfer
from nvflare.fuel.f3.cellnet.defs import CellChannel as Channel
from nvflare.fuel.f3.cellnet.defs import CellChannelTopic as Topic
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC
from nvflare.fuel.f3.streaming.stream_const import STREAM_ACK_TOPIC, STREAM_CHANNEL, STREAM_ERROR_TOPIC
from nvflare.private.defs import SysCommandTopic, TrainingTopic
from nvflare.private.stream_runner import TOPIC_STREAM_ABORT, TOPIC_STREAM_REQUEST

SERVER = "server"  # FLARE's name of the server's parent process, in every federation
# senders as a receiving cell sees them; "server's job" and "site's job" are processes of the receiver's own job
SERVER_JOB, PARENT, CHILD, BOOTSTRAP = "server's job", "own parent", "own job", "own container's start"
SITE, SITE_JOB, CONSOLE = "site", "site's job", "console"
ANY = ""  # any topic
_BOOTSTRAP = transfer.make_workspace_transfer_fqcn("", "").removeprefix(".")  # the prefix before the job's id


@dataclass(frozen=True)
class Route:
    """Topics of a channel that pass, their senders, and whether they come as frames of a stream."""

    channel: str
    topics: tuple[str, ...]
    senders: tuple[str, ...]
    stream: bool = False


class Routes:
    """The rows of one kind of cell."""

    def __init__(self, *routes: Route):
        self._senders = {(route.channel, topic, route.stream): route.senders for route in routes for topic in route.topics}

    def passes(self, channel: str, topic: str, stream: bool, sender: str) -> bool:
        anything = self._senders.get((channel, ANY, stream), ())
        return sender in self._senders.get((channel, topic, stream), anything)


def _frames(*senders: str) -> Route:
    """A stream's receiver reports progress and errors."""
    return Route(STREAM_CHANNEL, (STREAM_ACK_TOPIC, STREAM_ERROR_TOPIC), senders)


def _answers(*senders: str) -> Route:
    """Streamed answers; they pass only if the cell waits for them."""
    return Route(Channel.RETURN_ONLY, (ANY,), senders, stream=True)


def _downloads(*senders: str) -> Route:
    """Requests for parts of the tensors that this cell offers under random names."""
    return Route(OBJ_DOWNLOADER_CHANNEL, (OBJ_DOWNLOADER_TOPIC,), senders, stream=True)


def _bye(*senders: str) -> Route:
    """Ends only the connection on which it arrives."""
    return Route(Channel.CELLNET, (Topic.Bye,), senders)


def _workspace(*senders: str) -> Route:
    """A job in a Kubernetes pod downloads its workspace from its parent and uploads its results, with a secret."""
    return Route(
        transfer.WORKSPACE_TRANSFER_CHANNEL, (transfer.TOPIC_PREPARE_DOWNLOAD, transfer.TOPIC_PUBLISH_RESULTS), senders
    )


AT_SITE = Routes(
    Route(Channel.CLIENT_MAIN, (Channel.CLIENT_MAIN,), (SERVER,)),  # ADMIN says which of these
    Route(Channel.CLIENT_MAIN, (TrainingTopic.NOTIFY_JOB_STATUS,), (CHILD,)),
    _bye(SERVER, PARENT, CHILD, BOOTSTRAP),
    _workspace(BOOTSTRAP),
    _downloads(BOOTSTRAP),
    _answers(BOOTSTRAP),
    _frames(BOOTSTRAP),
)
AT_SITE_JOB = Routes(
    Route(Channel.AUX_COMMUNICATION, (ReservedTopic.END_RUN,), (SERVER_JOB,), stream=True),
    Route(Channel.CLIENT_COMMAND, (Command.ABORT,), (PARENT,)),
    _bye(SERVER, PARENT),
    _downloads(SERVER_JOB),
    _answers(SERVER_JOB),
    _frames(SERVER, SERVER_JOB),
)
AT_BOOTSTRAP = Routes(_bye(SERVER, PARENT), _downloads(PARENT), _answers(PARENT), _frames(PARENT))
AT_SERVER = Routes(
    Route(Channel.SERVER_MAIN, (Topic.Challenge, Topic.Register), (SITE, CONSOLE)),
    Route(Channel.SERVER_MAIN, (Topic.Quit, Topic.HEART_BEAT, Topic.REPORT_JOB_FAILURE), (SITE,)),
    Route(Channel.HCI, ("command",), (CONSOLE,), stream=True),
    Route(Channel.AUX_COMMUNICATION, (TOPIC_STREAM_REQUEST, TOPIC_STREAM_ABORT), (CONSOLE,), stream=True),  # a job's folder
    Route(
        Channel.SERVER_PARENT_LISTENER,
        (ServerCommandNames.GET_CLIENTS, ServerCommandNames.HEARTBEAT, ServerCommandNames.UPDATE_RUN_STATUS),
        (CHILD,),
    ),
    _bye(SITE, SITE_JOB, CONSOLE, CHILD, BOOTSTRAP),
    _workspace(BOOTSTRAP),
    _downloads(CONSOLE, BOOTSTRAP),
    _answers(CONSOLE, CHILD, BOOTSTRAP),
    _frames(CONSOLE, CHILD, BOOTSTRAP),
)
AT_SERVER_JOB = Routes(
    Route(
        Channel.AUX_COMMUNICATION,
        (ReservedTopic.SYNC_RUNNER, ReservedTopic.TASK_CHECK, ReservedTopic.JOB_HEART_BEAT),
        (SITE_JOB,),
        stream=True,
    ),
    Route(Channel.SERVER_COMMAND, (ServerCommandNames.GET_TASK, ServerCommandNames.SUBMIT_UPDATE), (SITE_JOB,), stream=True),
    Route(
        Channel.SERVER_COMMAND,
        (Command.ABORT, ServerCommandNames.GET_RUN_INFO, ServerCommandNames.HANDLE_DEAD_JOB, ServerCommandNames.SHOW_STATS),
        (PARENT,),
        stream=True,
    ),
    _bye(PARENT),
    _downloads(SITE_JOB),
    _answers(SITE_JOB, PARENT),
    _frames(SITE_JOB, PARENT),
)


@dataclass(frozen=True)
class ConsoleCommand:
    """A request inside a console's or the scheduler's message that a site answers.

    `job`: it must name a job's id. `right`: it must ask FLARE's site to check this right; without that, FLARE checks none. The
    site takes the name of the person from the server.
    """

    job: bool = False
    right: str = ""


ADMIN = {
    TrainingTopic.DEPLOY: ConsoleCommand(job=True, right=Command.SUBMIT_JOB),
    TrainingTopic.START_JOB: ConsoleCommand(job=True),
    TrainingTopic.ABORT: ConsoleCommand(job=True),
    TrainingTopic.CHECK_RESOURCE: ConsoleCommand(job=True),
    TrainingTopic.CANCEL_RESOURCE: ConsoleCommand(),
    TrainingTopic.CHECK_STATUS: ConsoleCommand(),
    TrainingTopic.GET_SCOPES: ConsoleCommand(),
    SysCommandTopic.REPORT_RESOURCES: ConsoleCommand(),
    SysCommandTopic.REPORT_VERSION: ConsoleCommand(),
    TrainingTopic.RESTART: ConsoleCommand(right=Command.RESTART),
    TrainingTopic.SHUTDOWN: ConsoleCommand(right=Command.SHUTDOWN),
}


def is_job(name: object) -> bool:
    """Whether `name` has the form of FLARE's job ids. No folder of a kit has such a name."""
    try:
        return isinstance(name, str) and str(uuid.UUID(name)) == name
    except ValueError:
        return False


@lru_cache(maxsize=1024)  # called several times per message
def split(cell: str) -> tuple[str, str]:
    """Splits a cell's name into the name of its parent process and its job; the job of a parent process is ""."""
    parent, _, last = cell.rpartition(".")
    return (parent, last) if parent and is_job(last.removeprefix(_BOOTSTRAP)) else (cell, "")


def is_bootstrap(cell: str) -> bool:
    """Whether a job in a container downloads its workspace through this cell."""
    return split(cell)[1].startswith(_BOOTSTRAP)
