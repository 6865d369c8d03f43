"""Python runs this at start-up when its folder is on PYTHONPATH. Messages, streams and tensor downloads all pass here.

In a simulated site's process, every frame that leaves through a socket is also appended to $FEDDP_CAPTURE/<site>.bin. In a
server's process of a job, every frame that comes or leaves is appended to $FEDDP_CAPTURE/server.bin, where that folder exists
when the job starts.
"""

import os
import sys


def append(path, *parts):
    with open(path, "ab") as file:
        file.writelines(part for part in parts if part)


if "nvflare.private.fed.app.simulator.simulator_worker" in sys.orig_argv:
    from nvflare.fuel.f3.drivers.socket_conn import SocketConnection

    site = sys.orig_argv[sys.orig_argv.index("--client") + 1]
    path = os.path.join(os.environ["FEDDP_CAPTURE"], f"{site}.bin")
    send_frame = SocketConnection.send_frame

    def captured(self, frame):
        append(path, frame)
        send_frame(self, frame)

    SocketConnection.send_frame = captured

if "nvflare.private.fed.app.server.runner_process" in sys.orig_argv and os.path.isdir(os.environ["FEDDP_CAPTURE"]):
    from nvflare.fuel.f3.sfm.conn_manager import SfmFrameReceiver
    from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection

    path = os.path.join(os.environ["FEDDP_CAPTURE"], "server.bin")
    receive, send = SfmFrameReceiver.process_frame, SfmConnection.send_frame

    def received(self, frame):
        append(path, frame)
        receive(self, frame)

    def sent(self, prefix, headers, payload):
        append(path, payload)
        send(self, prefix, headers, payload)

    SfmFrameReceiver.process_frame, SfmConnection.send_frame = received, sent
