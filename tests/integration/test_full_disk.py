"""A full disk in FLARE: a site answers with a code of its own and its administrator reads why; the server ends the job."""

import errno
from contextlib import nullcontext

import pytest
import torch
from nvflare.apis.shareable import make_reply

from feddp.files import half_written
from feddp.flare import executor, messages
from feddp.flare.messages import STORAGE_FAILED
from feddp.stages.memory import ServerMemory
from support.disk import full, read_only
from support.server import SITES, Run, good


def trained(site, round):
    return messages.unpack(site.answer("train", site.shared, round=round, phase=0))[0]


@pytest.mark.parametrize("disk", [full, read_only])
def test_a_site_says_so_in_its_audit_log_and_sends_the_code_alone(disk, hospital, monkeypatch):
    """The second round fails and leaves no state; with space it is trained as if nothing had been."""
    site, answer = hospital(seed="plan"), executor._answer
    trained(site, 0)

    def answered(*arguments):
        with disk(site.store.folder):
            return answer(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "_answer", answered)
        reply = site.answer("train", site.shared, round=1, phase=0)
    assert reply.get_return_code() == STORAGE_FAILED
    assert str(site.folder) not in repr(dict(reply)), "where a site keeps its files is not the server's business"
    (line,) = [line for line in site.audited() if "task failed" in line]
    assert f"task failed: {site.store.folder}: state_00002.safetensors was not written" in line
    assert site.last_error() in line
    assert not list(half_written(site.store.folder))
    assert site.store.latest() == 1
    again = trained(site, 1)
    other = hospital(seed="plan").submitted(site.plan, "other")
    trained(other, 0)
    undisturbed = trained(other, 1)
    assert again.keys() == undisturbed.keys()
    assert all(torch.equal(again[name], undisturbed[name]) for name in again)


def test_a_site_on_a_file_system_without_locks_says_so(hospital, monkeypatch):
    """Its first task takes the run's folder for this process."""

    def flock(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    site = hospital()
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", flock)
        assert site.answer("train", site.shared, round=0, phase=0).get_return_code() == STORAGE_FAILED
    (line,) = [line for line in site.audited() if "task failed" in line]
    assert "its file system has no locks (No locks available)" in line
    assert "put the kit, the workspace, or the run's folder, on a local disk" in line


def test_a_site_whose_own_files_take_nothing_answers_all_the_same(hospital, caplog):
    """Neither its record nor its audit file takes a line; FLARE's log does."""
    site = hospital()
    trained(site, 0)
    with full(site.folder):
        reply = site.executed("train", site.shared, round=1, phase=0)
    assert reply.get_return_code() == STORAGE_FAILED
    said = [record.getMessage() for record in caplog.records]
    assert any(f"task train: {site.store.folder}: state_00002.safetensors was not written" in line for line in said)
    assert any("its failure was not written down" in line for line in said)


def test_the_round_goes_on_with_the_others(tmp_path, plan_for):
    def answer(site, task, tensors, scalars):
        full = site == "B" and task == "train" and scalars["round"] == 1
        return make_reply(STORAGE_FAILED) if full else good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=3, min_sites=2), SITES, answer).run("train")
    assert run.panics == []
    assert [event["reason"] for event in run.progress("refused")] == [
        "site B: train ended with STORAGE_FAILED; the site's audit.log has the reason"
    ]
    assert [event["round"] for event in run.progress("round")] == [1, 2, 3]


@pytest.mark.parametrize("disk", [full, read_only])
def test_the_server_ends_the_job_with_one_message(disk, tmp_path, plan_for, monkeypatch):
    """γ of two rounds is written, γ of the third is not."""
    write = ServerMemory._write

    def writing(self, shared):
        with disk(self.kept) if self.round == 3 else nullcontext():
            write(self, shared)

    monkeypatch.setattr(ServerMemory, "_write", writing)
    run = Run(tmp_path, plan_for(method="fedavg", rounds=3), SITES, good).run("train")
    (panic,) = run.panics
    assert panic.startswith(f"{run.memory.kept}: shared_")
    assert "was not written" in panic
    assert panic.endswith("; then submit the job again, exported with `feddp job --resume job`")
    assert run.memory.load("shared_latest")[1] == 2
    assert not list(half_written(run.memory.kept))


def test_the_servers_disk_is_no_sites_fault(tmp_path, plan_for, monkeypatch):
    """It fills up while the server writes down an answer, in a callback of FLARE's, which keeps what is raised there."""
    note = ServerMemory.progress

    def progress(self, event, **metadata):
        if event == "answer" and metadata["site"] == "B":
            with full(self.folder):
                return note(self, event, **metadata)
        return note(self, event, **metadata)

    monkeypatch.setattr(ServerMemory, "progress", progress)
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, good).run("train")
    (panic,) = run.panics
    assert panic.startswith(f"{tmp_path}: progress.jsonl was not written")
    assert run.progress("refused") == []
    assert [event["message"] for event in run.progress("error")] == [panic.split("; then")[0]]
