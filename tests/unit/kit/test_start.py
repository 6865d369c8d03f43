"""Starting a kit: what a power cut left does not keep it down, its end has a code for systemd, and nothing runs twice.

In the place of FLARE's script stands a line of shell; the kit's other files are such as provisioning writes.
"""

import configparser
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from feddp.cli import app
from feddp.errors import BadFile, InputError
from feddp.flare.service import COMMAND, KIT, USER, units
from feddp.kit.files import LOCAL, file_problems
from feddp.kit.processes import FILES, noted, running, runs, stale_problems
from feddp.kit.start import RESTART, SHUTDOWN, start
from feddp.kit.startup import startup_problems
from feddp.sealing.kit import Kit
from support.certificates import Office, kit_of
from support.docs_pages import blocks_for


@pytest.fixture(scope="module")
def issued():
    office = Office()
    return office, office.issue("A"), office.issue("B", since=-9, until=-2)


@pytest.fixture
def made(tmp_path, issued):
    """A site's kit, whose `sub_start.sh` runs one line of bash in the kit's folder."""

    def make(line: str, name: str = "A"):
        office, *both = issued
        kit = kit_of(tmp_path / "kit", name, office, *both[name == "B"])
        (kit / "local").mkdir()
        (kit / "local/resources.json.default").write_text('{"components": []}')
        (kit / "startup/sub_start.sh").write_text(f'cd "{kit}"; echo "$@" >> ran; {line}\n')
        kit.chmod(0o700)
        return kit

    return make


@pytest.fixture
def stranger():
    """A process that has nothing to do with the kit."""
    with subprocess.Popen(["sleep", "60"]) as process:
        while not psutil.Process(process.pid).cmdline():  # while it becomes another program, it has none
            time.sleep(0.01)
        yield process
        process.kill()


def quiet(line: str) -> None:
    """Takes a line that the test does not look at."""


def test_it_starts_in_the_kits_folder(made, tmp_path, monkeypatch):
    """FLARE is `python3 -m nvflare...`, for which Python looks first where it is started: here, in a folder of another user."""
    kit = made("true")
    (kit / "startup/sub_start.sh").write_text(
        f'export PYTHONPATH=/local/custom:; python3 -m planted; touch "{kit}/shutdown.fl"\n'
    )
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "planted.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(theirs)
    assert start(kit, quiet) == 0
    assert not (theirs / "ran").exists()
    subprocess.run(["bash", str(kit / "startup/sub_start.sh")], check=True)
    assert (theirs / "ran").exists(), "the control"


# what a power cut left


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", ["{pid}", "{pid}\n", "0", "-1", "x", ""])
def test_a_number_that_is_not_the_kits_is_named_and_removed(made, stranger, name, content):
    """FLARE's script asks `kill -0`, to which 0 and -1 are processes that may be signalled. An empty file it removes itself."""
    kit = made("touch shutdown.fl")
    (kit / name).write_text(content.format(pid=stranger.pid))
    problems = stale_problems(Kit.open(kit))
    if content:
        (problem,) = problems
        known = f"names process {stranger.pid}, which is not of this kit (sleep 60)" if "pid" in content else "holds "
        assert str(problem).startswith(f"{kit / name}: {known}")
    else:
        assert problems == []
    lines = []
    assert start(kit, lines.append) == 0
    assert len(lines) == 1
    assert lines[0].startswith(f"{kit / name} ")
    assert lines[0].endswith("; removed")
    assert (kit / "ran").read_text() == "--once\n"
    assert not [path for path in kit.iterdir() if path.suffix == ".fl"]


def test_a_number_of_a_process_that_has_ended_keeps_nothing_down(made, stranger):
    kit = made("touch shutdown.fl")
    stranger.kill()
    stranger.wait()
    (kit / "pid.fl").write_text(str(stranger.pid))
    assert stale_problems(Kit.open(kit)) == []
    assert [each.why for each in noted(Kit.open(kit))] == [f"names process {stranger.pid}, which has ended"]


def test_what_is_no_file_with_a_number_is_removed_or_named(made):
    """A link goes, not what it leads to; a folder, which nobody may miss, stays and is named."""
    kit = made("touch shutdown.fl")
    (kit / "pid.fl").symlink_to(kit / "nothing")
    (kit / "daemon_pid.fl").symlink_to(kit / "startup/client.key")
    assert [problem.what for problem in stale_problems(Kit.open(kit))] == ["is a link"] * 2
    assert start(kit, quiet) == 0
    assert (kit / "startup/client.key").is_file()
    for name in (*FILES, SHUTDOWN, RESTART):
        (kit / name).mkdir()
        with pytest.raises(BadFile, match=f"{name}: is not a file, which FLARE expects there. Remove it."):
            start(kit, quiet)
        (kit / name).rmdir()


def test_a_number_that_is_now_its_own_keeps_nothing_down(made):
    """As in a container, where the first process always has the same number."""
    kit, lines = made("touch shutdown.fl"), []
    (kit / "pid.fl").write_text(f"{os.getpid()}")
    assert start(kit, lines.append) == 0
    assert len(lines) == 1


@pytest.mark.parametrize("how", ["sub_start.sh", "relative", "client_train"])
def test_the_kits_own_process_is_told_from_anothers(made, tmp_path, how):
    """By its command line, whatever folder it was started in; another kit's is a stranger."""
    kit, other = made("sleep 60; true"), tmp_path / "other"
    words = {
        "sub_start.sh": ["bash", str(kit / "startup/sub_start.sh")],
        "relative": ["bash", "startup/sub_start.sh"],
        "client_train": ["bash", "-c", "sleep 60; true", "-m", "nvflare.private.fed.app.client.client_train", "-m", str(kit)],
    }[how]
    with subprocess.Popen(words, cwd=kit, start_new_session=True) as process:
        try:
            (kit / "daemon_pid.fl").write_text(str(process.pid))
            assert stale_problems(Kit.open(kit)) == []
            assert running(Kit.open(kit)).pid == process.pid
            with pytest.raises(InputError, match=f"runs already, as process {process.pid}; stop it first"):
                start(kit, quiet)
            kit.rename(other)
            moved = Kit.open(other)
            assert runs(moved, psutil.Process(process.pid)) is (how == "relative"), "its folder is that of the moved kit"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "words",
    [
        ["tail", "-f", "{kit}/startup/sub_start.sh"],
        ["bash", "-c", "sleep 60; true", "{kit}/startup/sub_start.sh"],
        ["bash", "-c", "sleep 60; true", "feddp", "kit", "check", "{kit}", "start"],
        ["bash", "-c", "sleep 60; true", "grep", "nvflare.private.fed.app.client.client_train", "-r", "{kit}"],
    ],
)
def test_who_only_names_the_kit_does_not_run_it(made, words):
    kit = made("touch shutdown.fl")
    given = [word.format(kit=kit) for word in words]
    with subprocess.Popen(given, cwd=kit, start_new_session=True) as process:
        try:
            (kit / "daemon_pid.fl").write_text(str(process.pid))
            (problem,) = stale_problems(Kit.open(kit))
            assert f"names process {process.pid}, which is not of this kit" in problem.what
            assert start(kit, quiet) == 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_of_two_that_start_at_once_one_starts(made):
    """The one that has the kit; that the other is on its way, by its command line, does not keep it down."""
    kit, errors = made("until [ -e told ]; do sleep 0.05; done; touch shutdown.fl"), []
    waiting = ["bash", "-c", "sleep 60; true", "feddp", "kit", "start", str(kit)]
    with subprocess.Popen(waiting, start_new_session=True) as process:

        def second():
            while not (kit / "ran").exists():
                time.sleep(0.05)
            try:
                start(kit, quiet)
            except InputError as error:
                errors.append(str(error))
            (kit / "told").touch()

        thread = threading.Thread(target=second)
        thread.start()
        try:
            assert start(kit, quiet) == 0
        finally:
            thread.join()
            os.killpg(process.pid, signal.SIGKILL)
    assert errors == [f"{kit} runs already, by another `feddp kit start`; stop it first"]
    assert (kit / "ran").read_text() == "--once\n"


def test_the_kit_runs_where_it_lies(made, monkeypatch):
    """With this variable, FLARE's script runs a copy, whose files of commands nobody looks at."""
    monkeypatch.setenv("NVFL_WORKSPACE", "/elsewhere")
    assert start(made('[ -z "$NVFL_WORKSPACE" ] && touch shutdown.fl'), quiet) == 0


# how it ends


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("touch shutdown.fl; exit 1", 0),  # a command of FLARE's
        ("exit 3", 3),
        ("exit 0", 1),  # it ended, and nobody asked it to
        ("kill -9 $$", 137),
    ],
)
def test_the_code_is_0_only_if_somebody_stopped_it(made, line, code):
    assert start(made(line), quiet) == code


def test_a_restart_is_one(made):
    kit = made("if [ -e again ]; then touch shutdown.fl; else touch again restart.fl; fi")
    assert start(kit, quiet) == 0
    assert (kit / "ran").read_text() == "--once\n" * 2


def test_what_an_earlier_process_asked_for_does_not_hold(made):
    kit = made("exit 4")
    (kit / "shutdown.fl").touch()
    assert start(kit, quiet) == 4


def test_systemd_stops_it_and_its_process(made):
    """And FLARE's own script would meanwhile be told that the kit runs."""
    kit, seen = made("exec sleep 60"), []

    def stop():
        while not (kit / "ran").exists():
            time.sleep(0.05)
        seen.append(int((kit / "daemon_pid.fl").read_text()))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    began = time.monotonic()
    assert start(kit, quiet) == 0
    assert time.monotonic() - began < 15
    assert seen == [os.getpid()]
    assert not [child for child in psutil.Process().children() if "sleep" in child.cmdline()]


# what is not started


def test_an_expired_certificate_starts_nothing(made):
    with pytest.raises(InputError, match="client.crt: expired on"):
        start(made("true", "B"), quiet)


def test_a_person_starts_nothing(made):
    kit = made("true")
    (kit / "startup/fed_client.json").rename(kit / "startup/fed_admin.json")
    admin = '{"admin": {"username": "A", "project_name": "feddp", "host": "x", "port": 1}}'
    (kit / "startup/fed_admin.json").write_text(admin)
    with pytest.raises(InputError, match="is a person's kit, which starts nothing"):
        start(kit, quiet)


def test_a_kit_without_flares_script_starts_nothing(made):
    kit = made("true")
    (kit / "startup/sub_start.sh").unlink()
    with pytest.raises(InputError, match="sub_start.sh: is missing. Ask the consortium for the kit anew."):
        start(kit, quiet)
    assert [problem.what for problem in startup_problems(Kit.open(kit)) if problem.file.suffix == ".sh"] == ["is missing"]


def test_another_users_closed_kit_is_named(made, monkeypatch):
    """As the system answers whoever may not look into it; root, who may, is told that it is another user's."""
    kit, seen = made("true"), Path.exists

    def exists(path):
        if path.is_relative_to(kit / "startup"):
            raise PermissionError(13, "Permission denied", str(path))
        return seen(path)

    monkeypatch.setattr(Path, "exists", exists)
    done = CliRunner().invoke(app, ["kit", "start", str(kit)])
    assert str(done.exception) == f"{kit} is closed to this user; type this as the user to whom the kit belongs"


def test_the_command_ends_with_the_code(made):
    assert CliRunner().invoke(app, ["kit", "start", str(made("exit 7"))]).exit_code == 7


# the units


@pytest.mark.parametrize("kind", ["server", "client"])
def test_a_unit_is_one_and_restarts_only_what_failed(kind):
    """`systemd-analyze verify` was run by hand: no test needs systemd."""
    own, system = (units(kind, "fl.example.org")[name] for name in sorted(units(kind, ""), reverse=True))
    for text, target in ((system, "multi-user.target"), (own, "default.target")):
        unit = configparser.ConfigParser()
        unit.optionxform = str
        unit.read_string(text)
        assert unit["Service"]["ExecStart"] == f'"{COMMAND}" kit start "{KIT}"'
        assert unit["Service"]["Restart"] == "on-failure"
        assert unit["Install"]["WantedBy"] == target
        assert unit["Unit"]["StartLimitIntervalSec"] == "0"
        assert (unit["Service"].get("User") == USER) is (text is system)
    assert units(kind, "").keys() <= LOCAL[kind]


@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_of_the_page_fill_a_unit_in(tmp_path, number):
    """Without systemd, to which the other lines speak; sudo and tee write below the home folder.

    In a unit, systemd reads %% as % (systemd.unit); sed's & would be the word that it replaces.
    """
    block = blocks_for("test_start", "docs/how-to/site-requirements.md")[number].text.replace("/etc/", "home/etc/")
    here = tmp_path / "R&D 100%|x"
    for folder in ("hospital-a/local", "home/etc/systemd/system", "bin"):
        (here / folder).mkdir(parents=True)
    for name, text in units("client", "hospital-a").items():
        (here / "hospital-a/local" / name).write_text(text)
    for name, line in (("sudo", '"$@"'), ("systemctl", "true"), ("loginctl", "true"), ("feddp", "true")):
        (here / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (here / "bin" / name).chmod(0o755)
    env = {"PATH": f"{here}/bin:{os.environ['PATH']}", "HOME": str(here / "home"), "USER": "another"}
    subprocess.run(["bash", "-euc", block], cwd=here, env=env, check=True, capture_output=True)
    (written,) = (here / "home").rglob("feddp-site.service")
    lines, escaped = written.read_text().splitlines(), f"{tmp_path}/R&D 100%%|x"
    assert f'ExecStart="{escaped}/bin/feddp" kit start "{escaped}/hospital-a"' in lines
    assert (f"User={here.owner()}" in lines) is (number == 1)
    assert "@" not in written.read_text()


def test_a_changed_unit_is_found(made):
    kit = made("true")
    for name, text in units("client", "A").items():
        (kit / "local" / name).write_text(text)
    (kit / "startup/client.key").chmod(0o600)
    assert file_problems(Kit.open(kit)) == []
    (kit / "local/feddp-site.service").write_text(units("client", "A")["feddp-site.service"] + "ExecStartPre=/bin/x\n")
    (problem,) = file_problems(Kit.open(kit))
    assert str(problem).startswith(f"{kit}/local/feddp-site.service: differs from the unit that provisioning writes. Restore")
