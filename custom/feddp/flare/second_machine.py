"""A kit runs on one machine: while the connection of a name lives, no cell takes a second one of that name.

FLARE takes the newest connection and closes the one before it. If the same kit ran on two machines, each would close the
other's connection for ever, and only the server's log would name it.
"""

import logging
import time
from collections.abc import Callable

from nvflare.fuel.f3.connection import Connection
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint, EndpointMonitor, EndpointState
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint

from feddp.flare.arrival import Refused
from feddp.flare.cells import SERVER
from feddp.flare.dead_connections import answers

# seconds: a living connection has had a packet within these, also if a probe of an idle one was lost. A site whose connection
# broke without a word cannot come back sooner
LIVES = 15.0
# seconds that a connection lasts which the server has not taken; so many in a row are no accident: FLARE tries again after 1,
# 2, 4, 8 and then every 10 s, so the fourth comes after LIVES. Then it is said every hundredth time, about 17 minutes
SHORT, OFTEN, SELDOM = 15.0, 5, 100


def require_first(held: SfmEndpoint | None, new: Connection) -> None:
    """Raises Refused if another cell has connected under the name before and its connection lives; a dead one makes way."""
    living = [one.conn for one in held.connections if answers(one.conn, LIVES)] if held else []
    if living and new.connector.mode == Mode.PASSIVE:
        raise Refused(f"it is connected from {peer(living[0])}. If its kit runs on two machines, one of them must stop")


def peer(connection: Connection) -> str:
    """Returns the address of the connection's other end; FLARE's log takes a connection's own text out of a message."""
    return str(connection.get_conn_properties().get(DriverParams.PEER_ADDR.value))


class SecondMachine(EndpointMonitor):
    """At a site: says that the server closes every connection at once, as it does to a second machine with the same kit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._clock, self._since, self._short = clock, 0.0, 0

    def state_change(self, endpoint: Endpoint) -> None:
        """FLARE calls it when the connection to another cell is ready, and when it is gone."""
        if endpoint.name != SERVER:
            return
        if endpoint.state == EndpointState.READY:
            self._since = self._clock()
        elif endpoint.state == EndpointState.DISCONNECTED:
            self._short = self._short + 1 if self._clock() - self._since < SHORT else 0
            if self._short >= OFTEN and (self._short - OFTEN) % SELDOM == 0:
                self.logger.error(
                    f"the server has closed {self._short} connections of this site in a row, each within {SHORT:.0f} s: another"
                    " machine or process runs with the same kit. Stop one of the two; if there is none, see the server's log"
                )
