"""Python runs this at start-up when its folder is on PYTHONPATH. Messages, streams and tensor downloads all pass here.

A process of a job, of the simulator too, and a worker of `--env local --threads N`, writes its command into a file of its own
in $FEDDP_MODULES, if that is set, and then each of WATCHED when it is looked for, which is before it is loaded.

In a simulated site's process, every frame that leaves through a socket is also appended to $FEDDP_CAPTURE/<site>.bin. In a
server's process of a job, every frame that comes or leaves is appended to $FEDDP_CAPTURE/server.bin, where that folder exists
when the job starts.
"""

import os
import sys

PROGRAMS = {
    "feddp.run.patient_simulator",
    "feddp.run.worker",
    "nvflare.private.fed.app.client.worker_process",
    "nvflare.private.fed.app.server.runner_process",
    "nvflare.private.fed.app.simulator.simulator_worker",
}
# what lean.py keeps out of such a process, and a control; the compiler's stand-in has no module below it
WATCHED = {"torch", "monai", "torch._dynamo.config", "torch._refs", "matplotlib", "scipy.signal", "sklearn"}


def append(path, *parts):
    with open(path, "ab") as file:
        file.writelines(part for part in parts if part)


class Watch:
    """Finds no module. Python asks it first for each that is to be loaded: not if the module is there, or hidden by None."""

    def __init__(self, path):
        self._path = path
        append(path, f"{' '.join(sys.orig_argv)}\n".encode())

    def find_spec(self, name, *_):
        if name in WATCHED:
            append(self._path, f"{name}\n".encode())


if "FEDDP_MODULES" in os.environ and not PROGRAMS.isdisjoint(sys.orig_argv):
    sys.meta_path.insert(0, Watch(os.path.join(os.environ["FEDDP_MODULES"], str(os.getpid()))))

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
