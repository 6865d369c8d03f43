"""Continues a run that failed, after a pause that doubles; says how to continue one that Ctrl-C ended."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feddp.errors import FedDPError, InputError, PolicyError
from feddp.files import RESULTS, RUN
from feddp.run.session import to_go_on
from feddp.terminal import note

PAUSE, LONGEST = 5.0, 300.0  # seconds before the second attempt, and at most


def retried(attempt: Callable[[], dict[str, Any]], out: Path, retries: int) -> dict[str, Any]:
    """Returns the results of `attempt`, which is called again, at most `retries` times, when the run in `out` fails.

    If Ctrl-C ends it, the command that continues the run is printed.

    Raises:
        FedDPError: the last attempt failed, or the first one did before the run began.
    """
    try:
        return _retried(attempt, out, retries)
    except KeyboardInterrupt:
        if (out / RUN).exists() and not (out / RESULTS).exists():
            note(to_go_on(out))
        raise


def _retried(attempt: Callable[[], dict[str, Any]], out: Path, retries: int) -> dict[str, Any]:
    for number in range(retries):
        try:
            return attempt()
        except (InputError, PolicyError):  # it would be refused again
            raise
        except FedDPError as error:
            if not (out / RUN).exists():
                raise
            pause = min(PAUSE * 2**number, LONGEST)
            note(f"{error}; attempt {number + 2} of {retries + 1} in {pause:.0f} s")
            time.sleep(pause)
    return attempt()
