"""MONAI without packages that it takes if they are there (lean.py); what is imported is looked at in a process of its own."""

import subprocess
import sys

import pytest

from feddp.lean import UNUSED

IMPORTED = f"import sys; print(*[name for name in {UNUSED} if name in sys.modules])"
MODULES = "import monai, sys; print(*sorted(name for name in sys.modules if name.split('.')[0] == 'monai'))"


def said(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("first", "there"),
    [
        pytest.param("import monai", list(UNUSED), id="the control"),
        pytest.param("from feddp.lean import import_monai; import_monai()", [], id="lean"),
        pytest.param("import sklearn; from feddp.lean import import_monai; import_monai()", ["sklearn"], id="imported before"),
        pytest.param(
            "from feddp.lean import import_monai; import_monai(); import matplotlib, scipy.signal, sklearn",
            list(UNUSED),
            id="imported after",
        ),
    ],
)
def test_only_monai_misses_them(first, there):
    assert said(f"{first}; {IMPORTED}") == there


def test_all_modules_of_monai_are_there_as_ever():
    assert said(f"from feddp.lean import import_monai; import_monai(); {MODULES}") == said(MODULES)
