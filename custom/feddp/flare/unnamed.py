"""What a connection may do before it has a name (`neighbours`): little, so that whoever has any certificate of the project
cannot use up a process by connecting.

FLARE 2.9 takes frames of 2 GiB from a connection that has said nothing, gives memory for each when its length is announced, and
keeps such connections for ever. It queues whatever they send in front of the messages of others.
"""

from collections import Counter
from collections.abc import Callable

from nvflare.fuel.f3.connection import Connection, ConnState
from nvflare.fuel.f3.drivers import aio_http_driver, grpc_driver, socket_conn
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection

from feddp.flare.dead_connections import cut
from feddp.flare.waiting import Waiting

MOST = 64  # connections without a name, of one cell at once; a genuine one says its name within milliseconds
FRAMES = 64  # from one of them; a genuine one sends its name, and may send more until that has been judged
# bytes of any frame. Streams come in frames of 256 KiB (`configuration.CHUNK`), an app in one of at most 1 MiB
# (`archive.LARGEST`) and a little
LARGEST = 4 << 20


class Unnamed:
    """The connections without a name to one cell: those from others to where it listens.

    Args:
        closed: called with a connection that is closed for one of these limits, and the reason.
    """

    def __init__(self, manager: ConnManager, closed: Callable[[Connection, str], None]):
        self._closed, self._frames = closed, Counter[str]()
        self._waiting: Waiting[Connection] = Waiting(MOST, self._makes_way)
        self._opened, manager.handle_new_connection = manager.handle_new_connection, self._opens
        self._gone, manager.close_connection = manager.close_connection, self._closes
        self._framed, manager.process_frame = manager.process_frame, self._frame

    def named(self, connection: Connection) -> None:
        """Says that the connection has got a name."""
        self._waiting.leave(connection)
        self._frames.pop(connection.name, None)

    def _opens(self, connection: Connection) -> None:
        """In place of FLARE's function for a new connection."""
        self._opened(connection)
        if connection.connector.mode == Mode.PASSIVE:
            self._waiting.enter(connection)

    def _closes(self, connection: Connection) -> None:
        """In place of FLARE's function for a connection that is closed."""
        self.named(connection)
        self._gone(connection)

    def _frame(self, connection: SfmConnection, frame: bytes) -> None:
        """In place of FLARE's function for a frame, which is called in the thread that reads from the connection."""
        if connection.sfm_endpoint is None and connection.conn.connector.mode == Mode.PASSIVE:
            self._frames[connection.get_name()] += 1
            if (sent := self._frames[connection.get_name()]) > FRAMES:
                if sent == FRAMES + 1:  # later ones were under way
                    self._end(connection.conn, f"it sent more than {FRAMES} frames and no name")
                return
        self._framed(connection, frame)

    def _makes_way(self, connection: Connection) -> None:
        self._end(connection, f"more than {MOST} connections at once have said no name, of which it was the oldest")

    def _end(self, connection: Connection, why: str) -> None:
        if connection.state != ConnState.CLOSED:
            cut(connection)
            self._closed(connection, why)


def bound_frames() -> None:
    """Limits the frames that FLARE's drivers take in this process, http, tcp and grpc; gRPC's are those built from now on."""
    socket_conn.MAX_FRAME_SIZE = aio_http_driver.MAX_FRAME_SIZE = LARGEST
    key = "grpc.max_receive_message_length"
    grpc_driver.GRPC_DEFAULT_OPTIONS[:] = [(k, LARGEST if k == key else v) for k, v in grpc_driver.GRPC_DEFAULT_OPTIONS]
