"""A job's process ends when its parent process has ended: it could reach no server, and would hold the run's files."""

import os
import signal
import sys
import threading
import time

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from feddp.flare.audit import audit_if_possible
from feddp.lean import JOBS

PERIOD = 1.0  # seconds between two looks at the parent
PARENT = "FEDDP_PARENT"  # environment variable: the parent's process id, for the job's processes that it starts


class EndsWithParent(FLComponent):
    """For resources.json of the server and of every site, whose components FLARE also builds in a job's process.

    FLARE's own watch only stops the runner: a process that waits for an answer never ends, and one that has not begun its run
    tells its parent so for ever, 2,000 times a second. So the watch begins when the process builds its components, and the
    parent has said before who it is. A process that is killed loses nothing, since every file is written whole or not at all.
    In a container the parent is another container; there it does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fl_ctx: FLContext | None = None
        if set(JOBS) & set(sys.orig_argv):
            parent = int(os.environ.get(PARENT, os.getppid()))
            threading.Thread(target=self._watch, args=(parent,), daemon=True).start()
        else:
            os.environ[PARENT] = str(os.getpid())

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            self._fl_ctx = fl_ctx

    def _watch(self, parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(PERIOD)
        line = "its parent process has ended; this process ends too"
        self.logger.warning(line if self._fl_ctx is None else audit_if_possible(self._fl_ctx, line))
        # the group: FLARE starts each job's process in a group of its own, together with its data loaders
        os.killpg(os.getpgrp(), signal.SIGKILL)
