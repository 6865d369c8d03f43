"""A `feddp` command in this process: in another its imports take seconds."""

import os
import sys

import pytest

from feddp.cli import main


def ended(words: list[str]) -> int:
    """Runs it as if `words` had been typed; its exit code. What it writes is for its user alone, and what follows is not."""
    mask = os.umask(0o077)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as exit:
                main()
    finally:
        os.umask(mask)
    return exit.value.code or 0
