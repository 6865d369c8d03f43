"""MONAI without packages that it takes if they are there (lean.py); what is imported is looked at in a process of its own."""

import subprocess
import sys

import pytest

from feddp.lean import UNUSED

LEAN = "from feddp.lean import import_monai; import_monai()"
IMPORTED = f"print(*[name for name in {UNUSED} if name in sys.modules])"
MODULES = "print(*sorted(name for name in sys.modules if name.split('.')[0] == 'monai'))"


def said(*code: str) -> list[str]:
    """The lines that a process of its own prints, which takes seconds: MONAI imports torch."""
    command = [sys.executable, "-c", "; ".join(("import sys", *code))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def usual() -> list[str]:
    return said("import monai", IMPORTED, MODULES)


@pytest.fixture(scope="module")
def lean() -> list[str]:
    return said(LEAN, IMPORTED, MODULES, "import matplotlib, scipy.signal, sklearn", IMPORTED)


def test_only_monai_misses_them(usual, lean):
    """Others import them as ever afterwards."""
    every = " ".join(UNUSED)
    assert usual[0] == every, "the control"
    assert [lean[0], lean[2]] == ["", every]


def test_what_was_imported_before_stays():
    assert said("import sklearn", LEAN, IMPORTED) == ["sklearn"]


def test_all_modules_of_monai_are_there_as_ever(usual, lean):
    assert usual[1] == lean[1] != ""
