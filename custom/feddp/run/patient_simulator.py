"""FLARE's simulator as a program (`feddp.run.simulator`), which gives a site's process more time to start.

A site's process imports torch first. FLARE 2.9 waits 60 s for it, too short on a busy machine, and its program has no option
for this limit: the simulator reads it from the variables (`args.set`) that FLARE's other programs take.
"""

import argparse
import os
import sys

from nvflare.fuel.utils.log_utils import FL_LOG_LEVEL, LogMode
from nvflare.private.fed.app.simulator.simulator import define_simulator_parser
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

STARTS = 300  # seconds; FLARE waits as long for a process that has died
LIMIT = "simulator_worker_timeout"  # FLARE's name of the limit


class PatientSimulator(SimulatorRunner):
    """FLARE's simulator with the limit STARTS."""

    def setup(self) -> bool:
        ready = bool(super().setup())
        self.args.set = [f"{LIMIT}={STARTS}"]
        return ready


def main() -> None:
    parser = argparse.ArgumentParser()
    define_simulator_parser(parser)
    options = vars(parser.parse_args())
    options["log_config"] = options["log_config"] or os.environ.get(FL_LOG_LEVEL, LogMode.CONCISE)  # as FLARE's program
    sys.exit(PatientSimulator(**options).run())


if __name__ == "__main__":
    main()
