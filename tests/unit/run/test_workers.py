"""Runs without FLARE whose sites are divided among processes."""

import os
import threading
from io import FileIO
from tempfile import TemporaryFile
from types import SimpleNamespace

import pytest
import torch

from feddp.errors import ContributionError, Stopped
from feddp.flare.policy import SitePolicy
from feddp.run.answering import LocalSites
from feddp.run.pipe import Closed, get, pack, put
from feddp.run.workers import WorkersServer, started, workers_of
from feddp.stages.message import Message

SITES = ("a", "b", "c", "d")


class Fake:
    """A worker in this process; its answers come after a while, or never (None)."""

    def __init__(self, sites, said, seconds):
        self.sites, self._said, self._seconds = sites, said, seconds
        read, write = os.pipe()
        self.answers, self._write, self._site = FileIO(read), FileIO(write, "w"), ""

    def give(self, content, packed):
        self._said.append(f"ask {content['site']}")
        self._site = content["site"]
        if self._seconds is not None:
            threading.Timer(self._seconds, self._write.write, (b".",)).start()

    def answer(self):
        self.answers.read(1)
        return f"site {self._site} is broken" if self._site == "c" else Message(scalars={"of": self._site})


def server(tmp_path, *fakes, stopped=None):
    memory = SimpleNamespace(plan=None)
    return WorkersServer(memory, fakes, stopped or threading.Event(), tmp_path / "log")


def test_answers_are_received_in_the_order_of_the_sites(tmp_path):
    """The second worker is faster: its first answer waits, and while it does, it is not asked for a second one."""
    said = []

    def received(site, reply):
        try:
            said.append(f"{site}: {reply().scalars['of']}")
        except ContributionError as error:
            said.append(f"{site}: {error}")

    asked = server(tmp_path, Fake(("a", "c"), said, 0.5), Fake(("b", "d"), said, 0))
    assert sorted(asked.joined()) == [*SITES]
    assert asked.send("train", SITES, Message(), received) == {}
    assert said == ["ask a", "ask b", "a: a", "b: b", "ask c", "ask d", "c: site c is broken", "d: d"]


def test_a_stop_does_not_wait_for_an_answer(tmp_path):
    stopped, said = threading.Event(), []
    asked = server(tmp_path, Fake(("a",), said, None), stopped=stopped)
    threading.Timer(0.1, stopped.set).start()
    with pytest.raises(Stopped):
        asked.send("train", ("a",), Message(), lambda site, reply: pytest.fail("there is no answer"))
    assert said == ["ask a"]


@pytest.mark.parametrize(("threads", "wanted"), [(None, 1), (1, 1), (3, 3), (9, 4)])
def test_how_many(threads, wanted):
    """As many as were asked for, at most one a site."""
    assert workers_of(SimpleNamespace(threads=threads, policies=dict.fromkeys(SITES, {}))) == wanted


@pytest.fixture
def three_threads():
    """Of torch's on the CPU, which no site asks for; a test has one otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("device", "wanted"), [("cpu", True), ("cuda:1", False)])
def test_the_run_s_process_is_settled_for_the_sites_device(tmp_path, device, wanted):
    """A comparison goes on in it, with Table V and adaptations; a GPU's deterministic algorithms are slow, or missing."""
    memory = SimpleNamespace(plan=SimpleNamespace(to_json=dict), folder=tmp_path)
    with started(memory, {site: {"device": device} for site in SITES}, tmp_path, 0, tmp_path / "log") as workers:
        assert workers == []
        assert torch.are_deterministic_algorithms_enabled() is wanted
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("policy", "wanted"), [({}, 1), ({"threads": 2}, 2)])
def test_a_site_computes_with_its_policy_s_threads(plan_for, tmp_path, policy, wanted):
    """One unless the policy says more: sites of one machine leave each other a core, and bits do not depend on their number."""
    plan = plan_for()
    sites = LocalSites(plan, {"site-1": {"data": "nowhere", **SitePolicy.admitting(plan), **policy}}, tmp_path)
    sites["site-1"].enter()
    assert torch.get_num_threads() == wanted


def test_a_message_arrives_as_it_was_sent(tmp_path):
    """Names in their order, types, shapes, tensors that share memory or are not contiguous; not a number; then the end."""
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {"z": whole, "a": whole.T, "half": whole.half(), "count": torch.tensor(3), "none": torch.zeros(0, 2)}
    scalars = {"loss": 0.1 + 0.2, "peers": ["x", "y"], "table": {"a": None, "b": True}, "nan": float("nan")}
    read, write = os.pipe()
    with FileIO(read) as end, FileIO(write, "w") as start, TemporaryFile(dir=tmp_path) as file:
        put(start, file.fileno(), scalars, pack(tensors))
        found, arrived = get(end, file.fileno())
        put(start, file.fileno(), {}, pack({}))
        put(start, file.fileno(), {"shorter": True}, pack({"one": torch.ones(1)}))  # the one before it leaves the file alone
        assert get(end, file.fileno()) == ({}, {})
        assert get(end, file.fileno()) == ({"shorter": True}, {"one": torch.ones(1)})
        start.close()
        with pytest.raises(Closed):
            get(end, file.fileno())
    assert found.pop("nan") != scalars.pop("nan")
    assert found == scalars
    assert list(arrived) == list(tensors)
    assert all(value.dtype == tensors[name].dtype and value.equal(tensors[name]) for name, value in arrived.items())


def test_a_message_to_nobody(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with FileIO(write, "w") as start, TemporaryFile(dir=tmp_path) as file, pytest.raises(Closed):
        put(start, file.fileno(), {"task": "train"}, pack({}))
