"""A job's process ends when its parent process has ended: it could reach no server, and would hold the run's files."""

import os
import signal
import threading
import time

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ProcessType
from nvflare.apis.fl_context import FLContext

from feddp.flare.audit import audit

PERIOD = 1.0  # seconds between two looks at the parent
_JOBS = (ProcessType.CLIENT_JOB, ProcessType.SERVER_JOB)


class EndsWithParent(FLComponent):
    """For resources.json of the server and of every site, whose components FLARE also builds in a job's process.

    FLARE's own watch only stops the runner: a process that waits for an answer never ends. A process that is killed loses
    nothing, since every file is written whole or not at all. In a container the parent is another container; there it does
    nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parent = os.getppid()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN and fl_ctx.get_prop(FLContextKey.PROCESS_TYPE) in _JOBS:
            threading.Thread(target=self._watch, args=(fl_ctx,), daemon=True).start()

    def _watch(self, fl_ctx: FLContext) -> None:
        while os.getppid() == self.parent:
            time.sleep(PERIOD)
        self.logger.warning(audit(fl_ctx, "its parent process has ended; this process ends too"))
        # the group: FLARE starts each job's process in a group of its own, together with its data loaders
        os.killpg(os.getpgrp(), signal.SIGKILL)
