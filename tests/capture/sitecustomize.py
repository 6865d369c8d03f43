"""Python runs this at start-up when its folder is on PYTHONPATH: in a simulated site's process, every frame that leaves
through a socket is also appended to $FEDDP_CAPTURE/<site>.bin. Messages, streams and tensor downloads all leave here."""

import os
import sys

if "nvflare.private.fed.app.simulator.simulator_worker" in sys.orig_argv:
    from nvflare.fuel.f3.drivers.socket_conn import SocketConnection

    site = sys.orig_argv[sys.orig_argv.index("--client") + 1]
    path = os.path.join(os.environ["FEDDP_CAPTURE"], f"{site}.bin")
    send_frame = SocketConnection.send_frame

    def captured(self, frame):
        with open(path, "ab") as file:
            file.write(frame)
        send_frame(self, frame)

    SocketConnection.send_frame = captured
