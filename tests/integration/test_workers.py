"""`--env local --threads N`: with real workers. The network is a real one: a test's own would be unknown to a worker."""

import os
import shutil

import psutil
import pytest
from safetensors.torch import load_file

from feddp.errors import FedDPError
from feddp.files import read_events
from feddp.run.options import Options, resume_here, run_here
from feddp.run.workers import Worker

OPTIONS = Options("feddp", 2, 1, "pvt_v2_b0-fpn", 32, 0, ("batch=4",))


def outcome(out):
    """Results, tables and networks."""
    files = {path.relative_to(out): path.read_text() for path in (*out.glob("results.*"), *out.glob("sites/*/images.csv"))}
    networks = {path.relative_to(out): load_file(path) for path in out.glob("**/*.safetensors")}
    return files, networks


def answers(out):
    """Who answered what, in order, without times; and whether the run began or was continued there."""
    kinds = ("answer", "resumed")
    return [(e["event"], e.get("task"), e.get("site")) for e in read_events(out / "progress.jsonl") if e["event"] in kinds]


def workers():
    """This process's; of a child that has ended and was not waited for, the command is None."""
    processes = [process.info for process in psutil.process_iter(["ppid", "cmdline"])]
    return [info for info in processes if info["ppid"] == os.getpid() and "feddp.run.worker" in (info["cmdline"] or ())]


def test_two_workers_leave_what_one_process_leaves(tiny_root, tmp_path, monkeypatch, capture):
    """To the bit, although one of them is killed in the second round and the run is continued.

    None of the run's four workers has loaded what `feddp.lean` leaves out; torch and MONAI are the control.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    run_here(tiny_root, one, OPTIONS, "local", threads=1)
    give, given = Worker.give, []

    def killed(self, content, packed):
        given.append(content.get("task"))
        give(self, content, packed)
        if given.count("train") == 3:  # the second round of the first site
            self._process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "give", killed)
        with pytest.raises(FedDPError, match="the process of site-1 was ended by SIGKILL.*to go on: feddp run --resume"):
            run_here(tiny_root, two, OPTIONS, "local", threads=2)
    assert not workers()
    resume_here(two)
    assert not workers()
    (files, networks), (other_files, other_networks) = outcome(one), outcome(two)
    assert len(files) == 4
    assert other_files == files
    assert other_networks.keys() == networks.keys()
    assert all(value.equal(other_networks[file][name]) for file, own in networks.items() for name, value in own.items())
    before, after = answers(one), answers(two)
    resumed = after.index(("resumed", None, None))
    first = [("answer", task, site) for task in ("initial", "train") for site in ("site-1", "site-2")]
    assert after[:resumed] == [event for event in first if event in before]
    assert after[resumed + 1 :] == before[resumed:]
    assert capture.loaded("feddp.run.worker", str(two / "local.log")) == [{"torch", "monai"}] * 4


def test_a_site_that_fails_says_why(tiny_root, tmp_path):
    """The message is that of one process."""
    data = tmp_path / "data"
    shutil.copytree(tiny_root, data)
    shutil.rmtree(data / "site-2" / "masks")
    said = []
    for threads in (1, 2):
        with pytest.raises(FedDPError) as raised:
            run_here(data, tmp_path / str(threads), OPTIONS, "local", threads=threads)
        said.append(str(raised.value).replace(str(tmp_path / str(threads)), "OUT"))
    assert said[0] == said[1]
    assert str(data / "site-2" / "masks") in said[0]
