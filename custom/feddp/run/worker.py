"""A worker: a process that answers for some sites of a run without FLARE (`feddp.run.workers`).

Tasks come on stdin, answers go to stdout, their tensors lie in a file that it inherits open (`feddp.run.pipe`); its arguments
are the run's log and the file's number. The process ends when stdin does, because then the command has ended, in whatever
way. It loses nothing: every file of a site is written whole or not at all.
"""

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from feddp.errors import FedDPError
from feddp.lean import import_monai
from feddp.partition import Tensors
from feddp.plan.schema import Plan
from feddp.run.answering import Answering, LocalSites
from feddp.run.pipe import Closed, get, pack, put
from feddp.stages.message import Message


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which then ends its workers
    answers = FileIO(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    tasks: SimpleQueue[tuple[dict[str, Any], Tensors]] = SimpleQueue()
    file = int(sys.argv[2])
    threading.Thread(target=_receive, args=(tasks, file), daemon=True).start()
    import_monai()
    run, _ = tasks.get()
    plan = Plan.from_json(run["plan"])
    sites = LocalSites(plan, run["policies"], Path(run["root"]))
    answering = Answering(sites, plan.federation.half, threading.Event(), Path(sys.argv[1]))
    with suppress(Closed):  # the command has ended: so does this process
        while True:
            asked, tensors = tasks.get()
            try:
                answer = answering.reply(asked["task"], asked["site"], Message(tensors, asked["scalars"]))
            except FedDPError as error:
                put(answers, file, {"error": str(error)}, pack({}))
            else:
                put(answers, file, {"scalars": answer.scalars}, pack(answer.tensors))


def _receive(tasks: SimpleQueue[tuple[dict[str, Any], Tensors]], file: int) -> None:
    """Reads while a site computes, because only a reader notices that the command has ended; then ends the process."""
    pipe = FileIO(sys.stdin.fileno(), "rb", closefd=False)
    try:
        with suppress(Closed):
            while True:
                tasks.put(get(pipe, file))
    except Exception:  # of any type: without a reader, the command would wait for an answer for ever
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
