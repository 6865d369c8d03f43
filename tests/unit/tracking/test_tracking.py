"""TensorBoard files of a run in one process (track.md); a tracker that fails does not end the run."""

import os
import sys
from types import ModuleType

import pytest
from nvflare.apis.analytix import TrackConst
from nvflare.apis.dxo import from_shareable

from feddp.errors import FedDPError
from feddp.files import ARTIFACTS, PROGRESS, TENSORBOARD, read_events
from feddp.flare import tracking as flare_tracking
from feddp.run import pooled, session
from feddp.run.local import local
from feddp.run.session import Request
from feddp.stages import train as stage
from feddp.tracking import VARIABLE, Tracking
from feddp.tracking.board import Board
from feddp.tracking.curves import Scalar
from support.curves import curves_of
from support.disk import full, read_only

SITES = ("site-1", "site-2")


@pytest.fixture
def run(toy, plan_for, tiny_root, tmp_path):
    def run(name="run", **changes):
        plan = plan_for(**{"method": "fedavg", "network": toy, "rounds": 2, "start": "last"} | changes)
        policies = {site: {"data": str(tiny_root / site), "seed": "plan", "consent": ["calibration"]} for site in SITES}
        request = Request(plan, policies, tmp_path / name)
        results = pooled.run(request) if plan.method == "centralized" else session.run(request, local, plan.method)
        return results, tmp_path / name

    return run


def test_a_run_in_one_process_has_its_curves(run):
    """The values are those that the server noted, round by round, as float32."""
    _, out = run(method="feddp", calibration_epochs=1)
    found, events = curves_of(out / TENSORBOARD), read_events(out / PROGRESS)
    assert [step for step, _ in found["train/loss/site-1"]] == [1, 2]
    assert [step for step, _ in found["val/dice/mean"]] == [1, 2]
    assert {"round/seconds", "round/sites", "bytes/to/site-2", "bytes/from/site-2", "calibrate/iou/site-1"} <= found.keys()
    trained = {(e["site"], e["round"]): e for e in events if e["event"] == "answer" and e["task"] == "train"}
    for site in SITES:
        assert [value for _, value in found[f"train/loss/{site}"]] == pytest.approx(
            [trained[site, round]["scalars"]["loss"] for round in (1, 2)], rel=1e-2
        )
        assert [value for _, value in found[f"bytes/from/{site}"]] == [trained[site, round]["bytes"] for round in (1, 2)]
        assert found[f"val/dice/{site}"][0][1] == pytest.approx(trained[site, 2]["scalars"]["dice"], abs=5e-4)
    assert not list(out.rglob("workspace/**/events.out.tfevents*")), "TensorBoard would show the run twice"
    assert not (out / ARTIFACTS).exists(), "FLARE's, of runs in FLARE"


def test_a_file_of_the_users_asks_for_more_in_one_process_too(run, tmp_path, monkeypatch):
    """Named relative to where the command runs: FLARE's processes run elsewhere. MLflow itself: test_server_tracking."""
    received: list[tuple[str, float]] = []

    class Receiver:
        def __init__(self, tracking_uri):
            assert tracking_uri == "mine"

        def initialize(self, context):
            pass

        def save(self, context, shareable, origin):
            data = from_shareable(shareable).data
            received.append((data[TrackConst.TRACK_KEY], data[TrackConst.TRACK_VALUE]))

        def finalize(self, context):
            received.append(("end", 0))

    stand_in = ModuleType("receiver")
    stand_in.Receiver = Receiver
    monkeypatch.setitem(sys.modules, "receiver", stand_in)
    monkeypatch.setitem(flare_tracking.RECEIVERS, "mlflow", "receiver.Receiver")
    (tmp_path / "mine.json").write_text('{"mlflow": {"tracking_uri": "mine"}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "mine.json")
    _, out = run()
    assert os.environ[VARIABLE] == str(tmp_path / "mine.json")
    assert ("round/sites", 2) in received
    assert received[-1] == ("end", 0)
    assert (out / "local.log").read_text() == ""


def test_a_run_without_a_federation_has_them_too(run):
    _, out = run(method="centralized")
    assert len(curves_of(out / TENSORBOARD)["train/loss/mean"]) == 2


def test_a_continued_run_has_every_point_once(run, monkeypatch):
    """The sites fail in the second round, which ends the first attempt; the second one's file has the first round too."""
    trained = stage.train

    def train(site, shared, round, *arguments, **options):
        if round == 1:
            raise RuntimeError("a power cut")
        return trained(site, shared, round, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "train", train)
        with pytest.raises(FedDPError):
            run()
    _, out = run()
    found = curves_of(out / TENSORBOARD)
    assert [step for step, _ in found["train/loss/site-1"]] == [1, 2]
    assert [step for step, _ in found["val/dice/mean"]] == [1, 2]
    assert len(list((out / TENSORBOARD).iterdir())) == 1


@pytest.mark.parametrize("disk", [full, read_only])
def test_a_disk_that_takes_nothing_ends_the_tracking_with_one_line(disk, tmp_path):
    """Of 64 bytes at most, or no file at all."""
    lines: list[str] = []
    tracking = Tracking(tmp_path, lines.append)
    event = {"event": "round", "round": 1, "of": 2, "time": 1.0, "seconds": 1.0}
    with disk(tmp_path):
        tracking(event)
        tracking(event)
        tracking.close()
    (line,) = lines
    assert line.startswith("TensorBoard tracks this run no longer (")
    assert line.endswith("the run goes on, and its curves are in progress.jsonl")


def test_a_tracker_that_fails_changes_no_result(run, monkeypatch):
    whole, _ = run("whole")

    def write(self, scalars):
        raise RuntimeError("a library's error\nof two lines")

    monkeypatch.setattr(Board, "write", write)
    results, out = run("failing")
    assert results == whole
    lines = (out / "local.log").read_text().splitlines()
    assert [
        line for line in lines if "tracks this run no longer (RuntimeError: a library's error of two lines)" in line
    ] == lines
    assert len(lines) == 1
    assert not (out / TENSORBOARD).exists()


def test_the_line_of_a_tracker_that_fails_has_no_password(tmp_path):
    """The server's log of a job is among the files that its lead downloads."""

    def unreachable():
        raise RuntimeError("API request to https://me:p:w@host:5000/api and http://token@host failed, see https://a.b/c@d")

    lines: list[str] = []
    Tracking(tmp_path, lines.append, {"mlflow": unreachable}).close()
    (line,) = lines
    assert "API request to https://host:5000/api and http://host failed, see https://a.b/c@d" in line


def test_events_that_it_does_not_know_end_the_tracking_and_not_the_run(tmp_path):
    """Of an earlier version, in a run that is continued."""
    lines: list[str] = []
    tracking = Tracking(tmp_path, lines.append)
    tracking({"event": "round", "round": 1, "time": 1.0})
    tracking({"event": "answer", "task": "train", "site": "A", "time": 2.0})
    tracking({"event": "answer", "task": "train", "site": "B", "time": 2.5})
    tracking({"event": "round", "round": 2, "time": 3.0})
    (line,) = lines
    assert line.startswith("TensorBoard tracks this run no longer (KeyError")
    assert [step for step, _ in curves_of(tmp_path / TENSORBOARD)["round/sites"]] == [1]


def test_a_file_of_an_earlier_attempt_is_replaced(tmp_path):
    for value in (1.0, 2.0):
        board = Board(tmp_path / TENSORBOARD)
        board.write([Scalar("train/loss/A", 1, value, value)])
        board.close()
    assert curves_of(tmp_path / TENSORBOARD) == {"train/loss/A": [(1, 2.0)]}


def test_a_run_that_measures_nothing_leaves_no_folder(tmp_path):
    tracking = Tracking(tmp_path, print)
    tracking({"event": "done", "time": 1.0})
    tracking.close()
    assert list(tmp_path.iterdir()) == []
