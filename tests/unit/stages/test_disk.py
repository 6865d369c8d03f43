"""A full disk or a read-only folder: at one site it is that site's failure; at the server the run stops and can go on."""

import errno
import json
from contextlib import nullcontext

import pytest

from feddp.errors import StorageError
from feddp.files import append_event, half_written, read_events, write_text
from feddp.flare.kept import files_of, kept_below
from feddp.networks.weights import save_network
from feddp.stages.memory import ServerMemory
from support.broken_off import RUN, Mortal, outcome, same, start
from support.disk import full, read_only

DISKS = {full: "free space|raise the limit of a file's size", read_only: "make the folder writable"}
# a task in the first stage, one in a later stage
MOMENTS = [("train", 1), ("calibrate", None)]


class Refused(Exception):
    """The site fails, and its disk is as good as any."""


@pytest.fixture
def run(plan_for, toy, tiny_root, tmp_path):
    """Starts a job of a run of three rounds and a calibration, which goes on with one site."""
    plan = plan_for(network=toy, rounds=3, calibration_epochs=1, min_sites=1)

    def run(name, job="job", made=Mortal):
        return start(plan, tiny_root, tmp_path / name, job, made=made)

    return run


@pytest.fixture(scope="module")
def ended():
    """How runs end that no disk disturbs, made once: what is in it names no folder."""
    return {}


def at_site(moment, broken):
    """A federation in which site-2 answers one task within `broken(its folder)`."""

    class Broken(Mortal):
        def _answer(self, task, context, message):
            asked = (task, message.scalars.get("round")) == moment and context.name == "site-2"
            with broken(context.store.folder) if asked else nullcontext():
                return super()._answer(task, context, message)

    return Broken


def refuses(folder):
    raise Refused


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_at_one_site_it_is_that_sites_failure(moment, disk, run, ended, tmp_path):
    """The run ends with the bits of one in which the site fails for another reason, before it does anything."""
    root, folder = run("disk", made=at_site(moment, disk))
    if moment not in ended:
        ended[moment] = outcome(*run("control", made=at_site(moment, refuses)))
    same(outcome(root, folder), ended[moment])
    mine = files_of(kept_below(root / "site-2"), RUN)
    (refused,) = (event for event in read_events(folder / "progress.jsonl") if event["event"] == "refused")
    assert (refused["site"], refused["task"]) == ("site-2", moment[0])
    assert refused["reason"].startswith(f"site site-2: {mine}: ")
    assert any(remedy in refused["reason"] for remedy in DISKS[disk].split("|"))
    assert not list(half_written(mine))


def at_server(monkeypatch, method, moment, broken):
    """From the `moment`-th call of a method of the server's memory on, the disk is `broken`."""
    write, calls = getattr(ServerMemory, method), []

    def writing(self, *arguments):
        calls.append(method)
        with broken(self.kept if method == "_write" else self.folder) if len(calls) >= moment else nullcontext():
            write(self, *arguments)

    monkeypatch.setattr(ServerMemory, method, writing)


# the second round; the end of the calibration, after three rounds and the end of stage 1; the results
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize(("method", "moment"), [("_write", 2), ("_write", 5), ("write_results", 1)])
def test_at_the_server_the_run_stops_and_goes_on(method, moment, disk, run, ended, tmp_path, monkeypatch):
    if "whole" not in ended:
        ended["whole"] = outcome(*run("whole"))
    with monkeypatch.context() as patch:
        at_server(patch, method, moment, disk)
        with pytest.raises(StorageError) as raised:
            run("disk", "first")
    folder = tmp_path / "disk" / "server"
    kept = files_of(kept_below(folder), RUN) if method == "_write" else folder / "first"
    assert str(raised.value).startswith(f"{kept}: ")
    assert any(remedy in str(raised.value) for remedy in DISKS[disk].split("|"))
    assert not [*half_written(kept), *half_written(folder / "first")]
    same(outcome(*run("disk", "second")), ended["whole"])


@pytest.mark.parametrize("disk", DISKS)
def test_a_file_of_tensors_stays_as_it_was(disk, tmp_path, toy, plan_for):
    import torch

    save_network(tmp_path / "a.safetensors", {"w": torch.zeros(1000)}, {})
    before = (tmp_path / "a.safetensors").read_bytes()
    with disk(tmp_path), pytest.raises(StorageError, match=f"{tmp_path}: a.safetensors was not written .*({DISKS[disk]})"):
        save_network(tmp_path / "a.safetensors", {"w": torch.ones(1000)}, {})
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "free space"), (errno.EROFS, "writable"), (errno.EIO, "check its disk")],
)
def test_what_the_system_says_has_a_remedy(code, remedy, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(code, "x")))
    with pytest.raises(StorageError, match=remedy):
        write_text(tmp_path / "a", "text")
    assert not list(tmp_path.iterdir())


def test_a_line_is_written_whole_or_not_at_all(tmp_path):
    """64 bytes are taken of a file; the second line needs more, and its part is cut off again."""
    path = tmp_path / "progress.jsonl"
    path.write_text('{"event": "a"}\n')
    with full(tmp_path), pytest.raises(StorageError, match="progress.jsonl was not written"):
        append_event(path, "b", message="x" * 100)
    append_event(path, "c")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["a", "c"]


def test_a_line_that_a_killed_process_left_torn_gives_way(tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text('{"event": "a"}\n{"event": "to')
    append_event(path, "b")
    assert [event["event"] for event in read_events(path)] == ["a", "b"]
