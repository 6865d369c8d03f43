"""A process with one cell of FLARE's network that sends in streams, as all tensors travel: `python stream_process.py ours NAME
URL`, or `flare`, which leaves FLARE's streams as they are. A line of JSON tells when it is connected. For each size that it
reads, a site's cell asks the server's for so many bytes, and tells the seconds, what came, and the bytes that moved.
"""

import json
import sys
import time

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.endpoint import EndpointMonitor

from feddp.flare.configuration import COMMUNICATION
from feddp.flare.dead_connections import close_dead_connections
from feddp.flare.streams import by_progress, moved

SERVER = "server"


def tell(**what) -> None:
    print(json.dumps(what), flush=True)


class Told(EndpointMonitor):
    def state_change(self, endpoint) -> None:
        tell(other=endpoint.name, state=endpoint.state.name)


def main() -> None:
    whose, name, url = sys.argv[1:]
    CommConfigurator._config_loaded, CommConfigurator._configuration = True, COMMUNICATION if whose == "ours" else None
    if whose == "ours":
        by_progress()
        close_dead_connections()
    cell = Cell(name, root_url=url, secure=False, credentials={}, create_internal_listener=False)
    cell.core_cell.communicator.register_monitor(Told())
    cell.register_request_cb(channel="tensors", topic="part", cb=lambda asked: make_reply("ok", body=bytes(asked.payload)))
    cell.core_cell.start()
    for line in sys.stdin:
        began, asked = time.monotonic(), new_cell_message({}, int(line))
        reply = cell.send_request(channel="tensors", target=SERVER, topic="part", request=asked, timeout=120.0)
        status = reply.get_header(MessageHeaderKey.RETURN_CODE)
        tell(seconds=time.monotonic() - began, status=status, came=len(reply.payload or b""), moved=moved(SERVER).back)


if __name__ == "__main__":
    main()
