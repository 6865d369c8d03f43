"""Who may be a cell's neighbour: judged when a connection names the cell at its other end, and for every message that leaves.

FLARE 2.9 believes that name where the connection has no mutual TLS, as between a participant's own processes by default. It
gives the name to the newest connection and closes the one before it. So any user of the machine could take the place of the
server, of a site or of a job. Here a name needs the certificate to which it belongs before FLARE gives it to a connection, and
a message leaves only over such a connection. Every kit has mutual TLS between its processes (`configuration.INTERNAL`).
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.identity import get_param, is_mtls_connection
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.connection import Connection
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.constants import HandshakeKeys
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection
from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name

from feddp.flare import cells
from feddp.flare.arrival import Arrival, Refused, shown
from feddp.flare.cells import SERVER
from feddp.flare.dead_connections import cut
from feddp.flare.second_machine import peer, require_first
from feddp.flare.unnamed import Unnamed

NONE = (None, "", "N/A")  # what FLARE's drivers give where they show no certificate
REMEDY = "`internal` of local/comm_config.json is not what provisioning writes; `feddp kit check` has the remedy"
Note = Callable[[CoreCell, Message, str], None]
NoteConnection = Callable[[CoreCell, str, str], None]


class Neighbours:
    """The judge of one cell's connections; it stands before FLARE's own functions for a name and for a message that leaves.

    Args:
        refused: called with the cell, a message that does not leave, and the reason.
        turned_away: called with the cell, the name that a connection claims, and its other end with the reason.
    """

    def __init__(self, cell: CoreCell, refused: Note, turned_away: NoteConnection):
        self.cell, self.manager, self.resolver = cell, cell.communicator.conn_manager, cell.identity_resolver
        self._refused, self._turned_away = refused, turned_away
        self._proved: WeakSet[SfmConnection] = WeakSet()  # the connections that got their names here, for good
        self._unnamed = Unnamed(self.manager, lambda connection, why: self._turn_away("", connection, why))
        self._name, self.manager.update_endpoint = self.manager.update_endpoint, self._named
        self._send, cell._send_to_endpoint = cell._send_to_endpoint, self._leaves

    @staticmethod
    def of(cell: CoreCell) -> "Neighbours | None":
        """Returns the judge of a cell; None if it has none."""
        judge = getattr(cell.communicator.conn_manager.update_endpoint, "__self__", None)
        return judge if isinstance(judge, Neighbours) else None

    def certificate(self, name: str) -> str:
        """Returns the common name of the certificate that a cell of this name has, by the kit."""
        return str(self.resolver.resolve(name))

    def is_unseen(self, name: str) -> bool:
        """Whether this cell has connected to `name` with gRPC, whose driver shows nobody the other end's certificate."""
        held = self.manager.sfm_endpoints.get(name)
        return held is not None and bool(held.connections) and all(_hides(one.conn) for one in held.connections)

    def _named(self, connection: SfmConnection, said: dict[str, Any]) -> None:
        """In place of FLARE's function for the first frame of a connection, in which its other end says its name.

        Raises:
            CommError: the name is not given to the connection, which is closed; nothing else has changed.
        """
        given = said.get(HandshakeKeys.ENDPOINT_NAME) if isinstance(said, dict) else None
        name = FQCN.normalize(given) if isinstance(given, str) else ""
        try:
            self._require_neighbour(name, connection)
            self._name(connection, said)
        except (Refused, CommError) as refused:  # FLARE refuses a console's name at the port for jobs
            cut(connection.conn)
            self._turn_away(name, connection.conn, str(refused))
            raise CommError(CommError.CLOSED, f"{shown(name)} is refused from {peer(connection.conn)}: {refused}") from None
        self._proved.add(connection)
        self._unnamed.named(connection.conn)

    def _turn_away(self, name: str, connection: Connection, why: str) -> None:
        person = get_param(connection.get_conn_properties(), DriverParams.PEER_CN)
        self._turned_away(self.cell, name, f"from {shown(peer(connection))} {shown(person)}: {why}")

    def _require_neighbour(self, name: str, connection: SfmConnection) -> None:
        if connection.sfm_endpoint is not None and connection.sfm_endpoint.endpoint.name != name:
            raise Refused("the connection has said another name before")
        self._require_direction(name, connection.conn)
        self._require_certificate(name, connection.conn)
        require_first(self.manager.sfm_endpoints.get(name), connection.conn)

    def _require_direction(self, name: str, connection: Connection) -> None:
        """A cell connects to the cells above it, and waits for those below it."""
        me = self.cell.get_fqcn()
        if connection.connector.mode == Mode.ACTIVE:
            fits = name in self._above()
        else:
            parent, job = cells.split(name)
            fits = name not in ("", me) and (me == SERVER or (parent == me and bool(job)))
        if not fits:
            raise Refused(f"no cell of this name connects to {me} so")

    def _require_certificate(self, name: str, connection: Connection) -> None:
        if not is_mtls_connection(connection.connector.params):
            raise Refused(f"the connection has no mutual TLS: {REMEDY}")
        if _hides(connection):  # gRPC itself has compared the certificate with the root and with the host's name
            return
        person = get_param(connection.get_conn_properties(), DriverParams.PEER_CN)
        if person in NONE:
            raise Refused("the connection shows no certificate")
        # a console's name is drawn for each session; FLARE lets such a name in at the consoles' port alone
        if not is_valid_admin_client_name(name) and person != self.certificate(name):
            raise Refused(f"the name belongs to the certificate of {self.certificate(name)}")

    def _leaves(self, to_endpoint: Endpoint, message: Message) -> str:
        """In place of FLARE's function for every message that leaves, its own or one that it forwards."""
        try:
            self._require_way(to_endpoint.name, message)
        except Refused as refused:
            self._refused(self.cell, message, str(refused))
            return str(ReturnCode.COMM_ERROR)
        return str(self._send(to_endpoint, message))

    def _require_way(self, hop: str, message: Message) -> None:
        """Raises Refused if `hop` is not on the way to the receiver, or a connection to it is another's."""
        me, to = self.cell.get_fqcn(), str((message.headers or {}).get(MessageHeaderKey.DESTINATION) or hop)
        if hop == me or hop in CoreCell.ALL_CELLS:  # in this process, over no connection
            return
        inside = FQCN.get_root(to) == FQCN.get_root(me)
        up = hop in self._above() and (hop == FQCN.get_parent(me) or not inside)
        if not (up or hop == to or to.startswith(f"{hop}.")):
            raise Refused(f"{shown(hop)} is not on the way from {me} to {shown(to)}")
        held = self.manager.sfm_endpoints.get(hop)
        connections = list(held.connections) if held else []  # without one FLARE sends nothing
        for connection in (one for one in connections if one not in self._proved):  # it is older than the gate
            self._require_direction(hop, connection.conn)
            self._require_certificate(hop, connection.conn)

    def _above(self) -> set[str]:
        """The cells to which this one connects: its parent, and a site's the server."""
        me = self.cell.get_fqcn()
        return {SERVER, FQCN.get_parent(me)} - {me, ""}


def require_proved(cell: CoreCell, arrival: Arrival) -> None:
    """Raises Refused if a message's connection has not shown the certificate to which the neighbour's name belongs.

    Also after the connection's name has been judged: FLARE hands no connection with a message, and that connection may be older
    than the gate, in a container. It takes 0.002 to 0.006 ms of the processor (docs/results/speed.md).
    """
    endpoint, judge = arrival.endpoint, Neighbours.of(cell)
    proved = arrival.person == str(cell.identity_resolver.resolve(endpoint))
    if arrival.person in NONE:
        proved = judge is not None and judge.is_unseen(endpoint)
    elif is_valid_admin_client_name(endpoint):
        proved = True
    if not proved:
        raise Refused(f"{shown(arrival.person)} is not the certificate of {shown(endpoint)}")


def _hides(connection: Connection) -> bool:
    """Whether the connection is one to another's gRPC, of which FLARE knows no certificate."""
    scheme = str(get_param(connection.connector.params, DriverParams.SCHEME))
    unknown = get_param(connection.get_conn_properties(), DriverParams.PEER_CN) in NONE
    return unknown and connection.connector.mode == Mode.ACTIVE and scheme.removesuffix("s").removeprefix("a") == "grpc"
