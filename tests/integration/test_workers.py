"""`--env local --threads N`: with real workers. The network is a real one: a test's own would be unknown to a worker."""

import os
import shutil

import psutil
import pytest
from safetensors.torch import load_file

from feddp.errors import FedDPError
from feddp.files import read_events
from feddp.protocol import READY
from feddp.run.options import Options, resume_here, run_here
from feddp.run.workers import Worker

OPTIONS = Options("feddp", 2, 1, "pvt_v2_b0-fpn", 32, 0, ("batch=4", "min_sites=2"))

FIRST = [("answer", "train"), ("answer", "train"), ("refused", "train")]  # what the three sites do in the first round


def outcome(out):
    """Results, tables and networks."""
    files = {path.relative_to(out): path.read_text() for path in (*out.glob("results.*"), *out.glob("sites/*/images.csv"))}
    networks = {path.relative_to(out): load_file(path) for path in out.glob("**/*.safetensors")}
    return files, networks


def answers(out):
    """Who answered what, or why not, in order, without times, beside the first question, which every job asks; and whether the
    run began or was continued there."""
    kinds, told = ("answer", "refused", "resumed"), ("event", "task", "site", "reason")
    events = [event for event in read_events(out / "progress.jsonl") if event["event"] in kinds]
    return [tuple(map(event.get, told)) for event in events if event.get("task") != READY]


def workers():
    """This process's; of a child that has ended and was not waited for, the command is None."""
    processes = [process.info for process in psutil.process_iter(["ppid", "cmdline"])]
    return [info for info in processes if info["ppid"] == os.getpid() and "feddp.run.worker" in (info["cmdline"] or ())]


@pytest.fixture(scope="module")
def data(tiny_root, tmp_path_factory):
    """Two sites that answer, and a third one whose masks are missing."""
    root = tmp_path_factory.mktemp("three") / "data"
    shutil.copytree(tiny_root, root)
    shutil.copytree(root / "site-1", root / "site-3")
    shutil.rmtree(root / "site-3" / "masks")
    return root


def test_two_workers_leave_what_one_process_leaves(data, tmp_path, monkeypatch, capture):
    """To the bit, although one of them is killed in the second round and the run is continued. What a site that fails says is
    what it says in one process.

    None of the run's four workers has loaded what `feddp.lean` leaves out; torch and MONAI are the control.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    run_here(data, one, OPTIONS, "local", threads=1)
    give, given = Worker.give, []

    def killed(self, content, packed):
        given.append(content.get("task"))
        give(self, content, packed)
        if given.count("train") == 4:  # the second round of the first site
            self._process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "give", killed)
        with pytest.raises(FedDPError, match="of site-1, site-3 was ended by SIGKILL.*to go on: feddp run --resume"):
            run_here(data, two, OPTIONS, "local", threads=2)
    assert not workers()
    resume_here(two)
    assert not workers()
    (files, networks), (other_files, other_networks) = outcome(one), outcome(two)
    assert len(files) == 4
    assert other_files == files
    assert other_networks.keys() == networks.keys()
    assert all(value.equal(other_networks[file][name]) for file, own in networks.items() for name, value in own.items())
    before, after = answers(one), answers(two)
    resumed = after.index(("resumed", None, None, None))
    assert [event[:3] for event in after[:resumed]] == [(*said, f"site-{i + 1}") for i, said in enumerate(FIRST)]
    assert after[:resumed] == before[:resumed]
    assert after[resumed + 1 :] == before[resumed:]
    reasons = {reason for event, _, site, reason in before if event == "refused" and site == "site-3"}
    assert any(str(data / "site-3" / "masks") in reason for reason in reasons)
    assert capture.loaded("feddp.run.worker", str(two / "local.log")) == [{"torch", "monai"}] * 4
