"""A process with cells of FLARE's network alone: `python cell_process.py LIMITS NAME=URL ...`; a server's cell has one URL for
each driver. It prints what its cells see, in lines of JSON, and sends a message of each size that it reads, on every cell.

LIMITS: JSON of `dead_connections.Limits`; `null` leaves FLARE as it is.
"""

import json
import sys
import threading

from nvflare.fuel.f3.cellnet.core_cell import CoreCell, Message
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.endpoint import EndpointMonitor

from feddp.flare.dead_connections import Limits, close_dead_connections

SERVER = "server"
_ONE = threading.Lock()


def tell(**what) -> None:
    with _ONE:
        print(json.dumps(what), flush=True)


class Told(EndpointMonitor):
    """Tells when the connection to another cell is ready, and when it is gone."""

    def __init__(self, cell: str):
        self.cell = cell

    def state_change(self, endpoint) -> None:
        tell(cell=self.cell, other=endpoint.name, state=endpoint.state.name)


def send(cell: CoreCell, size: int) -> None:
    answer = cell.send_request("channel", "topic", SERVER, Message(payload=bytes(size)), timeout=60)
    tell(cell=cell.get_fqcn(), sent=size, answer=answer.payload)


def main() -> None:
    limits, *places = sys.argv[1:]
    if (values := json.loads(limits)) is not None:
        close_dead_connections(Limits(**values))
    cells = {}
    for name, url in (place.split("=", 1) for place in places):
        urls = url.split(",")
        cell = cells[name] = CoreCell(name, root_url=urls if name == SERVER else url, secure=False, credentials={})
        cell.communicator.register_monitor(Told(name))
        cell.register_request_cb("channel", "topic", lambda message: make_reply("ok", body=len(message.payload)))
        cell.start()
    for line in sys.stdin:
        for cell in cells.values():
            threading.Thread(target=send, args=(cell, int(line)), daemon=True).start()


if __name__ == "__main__":
    main()
