"""The command line opens at once: help, completion and the list of methods load no library that only a run needs."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "monai", "timm", "nvflare", "numpy", "scipy", "matplotlib", "tensorboard")
SECONDS, MEBIBYTES = 0.6, 120
FEDDP = "import sys; sys.argv[0] = 'feddp'; from feddp.cli import main; main()"
LOADED = f"""
import sys
from typer.testing import CliRunner
from feddp.cli import app
for command in sys.argv[1:]:
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    print(command, "loaded:", *[name for name in {HEAVY} if name in sys.modules])
"""
# a process of its own between the test and the command: what was resident before exec counts as the command's
COST = """
import json, resource, subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


def python(*arguments, **environment):
    command, found = [sys.executable, "-c", *arguments], os.environ | environment
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_helps_and_the_list_of_methods_load_nothing_heavy():
    """One after the other in one process: the first line that names something is that of the command which loaded it."""
    names = ["", "run", "report", "job", "compare", "adapt", "features", "data prepare", "kit", "kit check", "export", "models"]
    commands = [*(f"{name} --help" for name in names), "methods"]
    assert python(LOADED, *commands).splitlines() == [f"{command} loaded:" for command in commands]


def test_a_terminal_without_greek_letters_lists_the_methods():
    """α is U+03B1; neither encoding has it."""
    for encoding in ("ascii", "latin-1"):
        assert r"\u03b1" in python(FEDDP, "methods", PYTHONIOENCODING=encoding)
    assert "α" in python(FEDDP, "methods", PYTHONIOENCODING="utf-8")


def test_what_loads_something_heavy_is_noticed():
    assert python("import numpy" + LOADED, "--help").splitlines() == ["--help loaded: numpy"]


COMPLETING = {"_FEDDP_COMPLETE": "complete_bash", "COMP_WORDS": "feddp da", "COMP_CWORD": "1"}


@pytest.mark.parametrize(
    ("command", "environment"),
    [("--help", {}), ("run --help", {}), ("methods", {}), ("", COMPLETING)],
    ids=["help", "run", "methods", "completion"],
)
def test_it_opens_at_once(command, environment):
    """The best of three, if the first one does not: other processes on the machine cost time, never save it."""
    for last in (False, False, True):
        seconds, resident = json.loads(python(COST, FEDDP, *command.split(), **environment))
        if last or (seconds < SECONDS and resident < MEBIBYTES):
            break
    assert seconds < SECONDS
    assert resident < MEBIBYTES


def test_completion_is_installed_and_completes(tmp_path):
    """With the shell named: which one runs the tests is not known."""
    named = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    python(FEDDP, "--install-completion", "bash", **named)
    assert (tmp_path / ".bash_completions/feddp.sh").exists()
    assert "feddp.sh" in (tmp_path / ".bashrc").read_text()
    assert python(FEDDP, **COMPLETING).split() == ["data"]
