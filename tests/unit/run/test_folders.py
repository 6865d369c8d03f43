"""`feddp runs list` and `feddp runs delete`. How-to: continue.md."""

import subprocess
import sys

import pytest

from feddp.errors import ContributionError, FedDPError
from feddp.run import local
from feddp.run.options import Options, run_here
from feddp.training.claim import release


@pytest.fixture
def runs(toy, tiny_root, tmp_path, monkeypatch):
    """One finished run of two rounds; one of three, broken off in the third. This process holds neither."""
    root = tmp_path / "runs"
    run_here(tiny_root, root / "done", Options("fedavg", 2, None, toy, 32, 0, ("batch=4",)), "local")
    send, left = local.LocalServer.send, [3]  # a job's first question, and two rounds

    def failing(self, *arguments):
        left[0] -= 1
        if left[0] < 0:
            raise ContributionError("the connection broke")
        return send(self, *arguments)

    monkeypatch.setattr(local.LocalServer, "send", failing)
    with pytest.raises(FedDPError):
        run_here(tiny_root, root / "deep" / "half", Options("fedavg", 3, None, toy, 32, 0, ("batch=4",)), "local")
    release(root)
    return root


def test_the_list(runs, feddp):
    code, said, _ = feddp("runs", "list", runs)
    half, again, done = said.splitlines()
    assert code == 0
    assert half.split()[:7] == [str(runs / "deep" / "half"), "fedavg", "local", "2", "of", "3", "rounds"]
    assert "  broken off  " in half
    assert again.strip() == f"to go on: feddp run --resume {runs / 'deep' / 'half'}"
    assert done.split()[3:8] == ["2", "of", "2", "rounds", "finished"]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ('{"event": "round", "time"', None),  # its writer was killed; it is no damage
        ('{"event": "round", "ti\n', "is not readable JSON"),
        (
            '{"event": "round", "time": 1.0, "round": "two", "of": 3, "seconds": 1}\n',
            "has an event whose round is missing or is none",
        ),
    ],
)
def test_a_run_with_damaged_progress_hides_no_other(runs, feddp, damage, what):
    """It is listed last, with the reason; the others as before. `delete` refuses it, and deletes none."""
    half, done = runs / "deep" / "half", runs / "done"
    before = feddp("runs", "list", runs)[1].splitlines()
    with open(done / "progress.jsonl", "a") as file:
        file.write(damage)
    code, said, _ = feddp("runs", "list", runs)
    if what is None:
        assert (code, [line.split()[:5] for line in said.splitlines()]) == (0, [line.split()[:5] for line in before])
        return
    *others, last = said.splitlines()
    assert code == 2
    assert [line.split() for line in others] == [line.split() for line in before[:2]]
    assert last.startswith(f"{done}  damaged: {done / 'progress.jsonl'}: {what}")
    code, _, error = feddp("runs", "delete", done, half, "--yes")
    assert (code, error.startswith(f"feddp: {done / 'progress.jsonl'}: {what}"), error.count("\n")) == (2, True, 1)
    assert half.exists()


def test_a_running_one_is_refused_and_none_is_deleted(runs, feddp):
    lock = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    half = runs / "deep" / "half"
    with subprocess.Popen([sys.executable, "-c", lock, half / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert "  running " in feddp("runs", "list", runs)[1]
        code, _, said = feddp("runs", "delete", runs / "done", half, "--yes")
        other.communicate()
    assert code == 2
    assert f"{half} is in use" in said
    assert (runs / "done" / "results.json").exists()


def test_what_is_deleted_and_what_links_point_to(runs, feddp, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    (runs / "done" / "link").symlink_to(tmp_path / "other")
    code, said, _ = feddp("runs", "delete", runs / "done", runs / "deep" / "half", "--yes")
    assert (code, f"deleted {runs / 'done'}" in said) == (0, True)
    assert [path.name for path in runs.iterdir()] == ["deep"]
    assert (tmp_path / "other" / "file").read_text() == "mine"


def test_no_answer_deletes_nothing(runs, feddp, monkeypatch):
    monkeypatch.setattr("typer.confirm", lambda text: False)
    assert feddp("runs", "delete", runs / "done")[0] == 1
    assert (runs / "done" / "results.json").exists()


@pytest.mark.parametrize("kind", ["no run", "link", "foreign"])
def test_another_folder_is_refused(kind, tmp_path, feddp):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("mine")
    named = folder
    if kind == "link":
        named = tmp_path / "link"
        named.symlink_to(folder)
    if kind == "foreign":
        (folder / "run.json").write_text("{}")
    code, _, said = feddp("runs", "delete", named, "--yes")
    assert code == 2
    assert str(named) in said
    assert (folder / "file").read_text() == "mine"
