"""What a job that continues a run (`--resume`) may do at a site: not more than the run, not again what is long past, not for
free. Against a lead who submits such jobs, also with a server's app that begins anew."""

import json

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.lighter.constants import AdminRole

from feddp import protocol
from feddp.errors import PolicyError
from feddp.flare.terms import TERMS
from feddp.stages.heads import HEADS
from feddp.stages.order import behind
from support.server import SITES, Run, good

ROUNDS = 6


@pytest.fixture
def begun(hospital, plan_for, toy):
    """A site with a run of six rounds, all of them trained."""

    def make(**policy):
        plan = plan_for(network=toy, rounds=ROUNDS)
        site = hospital(plan=plan, **policy)
        for round in range(ROUNDS):
            assert answered(site, round)
        return site

    return make


def answered(site, round) -> bool:
    return site.executed(protocol.TRAIN, site.shared, round=round, phase=0).get_return_code("") == ""


def test_the_last_two_rounds_can_be_asked_for_again_and_no_earlier_one(begun):
    """A server that lost its latest file asks for the round before the last. One that asks for round 0 would see, in a run
    with the draws of the first one, what a changed image changes."""
    site = begun()
    site.submitted(site.plan, "again", resume="job")
    assert [answered(site, round) for round in range(ROUNDS)] == [False] * (ROUNDS - 2) + [True, True]
    assert "a job that continues the run asked it for round 0 again, 6 steps back" in "\n".join(site.audited())


def test_a_server_behind_by_the_heads_epochs(plan_for):
    """An extended run begins at its former last round; the states of FedLC's epochs after it are further."""
    plan = plan_for(method="fedlc")
    assert HEADS in plan.stages
    assert behind(plan) == 2 * plan.phases + plan.heads.heads_epochs


def test_each_job_counts(begun):
    site = begun(budget={"jobs": 2})
    site.submitted(site.plan, "again", resume="job")
    assert answered(site, ROUNDS - 1)
    site.submitted(site.plan, "once-more", resume="job")
    assert not answered(site, ROUNDS - 1)


WIDER = {
    "consent": {"consent": ["calibration", "spectra"]},
    "recipients": {"recipients": ["site-2", "site-3"]},
    "senders": {"senders": ["site-2", "site-3"]},
    "private": {"private": []},
}


@pytest.mark.parametrize("name", WIDER)
def test_a_wider_policy_is_for_new_runs(begun, name):
    site = begun(consent=["calibration"], recipients=["site-2"], senders=["site-2"], private=["query"])
    site.submitted(site.plan, "again", resume="job", **WIDER[name])
    with pytest.raises(PolicyError, match=f"belongs to a run that began under another {name} in privacy.json"):
        site.open()


def test_other_data_are_for_new_runs(begun, tiny_root):
    site = begun()
    site.submitted(site.plan, "again", resume="job", data=tiny_root / "site-2")
    with pytest.raises(PolicyError, match="began under another data"):
        site.open()


def test_a_narrower_policy_is_for_this_run_too(begun):
    """A hospital may withdraw consent at any time."""
    site = begun(consent=["calibration"])
    site.submitted(site.plan, "again", resume="job", consent=[], recipients=["site-2"], senders=[])
    assert answered(site, ROUNDS - 1)


def test_the_terms_of_an_earlier_version_name_no_senders(begun):
    """It used those of all sites, so any `senders` of today is no wider."""
    site = begun()
    terms = json.loads((site.store.folder / TERMS).read_text())
    assert terms.pop("senders") is None
    (site.store.folder / TERMS).write_text(json.dumps(terms))
    site.submitted(site.plan, "again", resume="job", senders=["site-2"])
    assert answered(site, ROUNDS - 1)


WRONG_TYPES = [
    '{"data": "x", "private": [], "consent": [], "recipients": null, "senders": "site-2"}',
    '{"data": "x", "private": [], "consent": 7, "recipients": null}',
    '{"data": "x", "private": [], "consent": [], "recipients": [[]]}',
]


@pytest.mark.parametrize("content", ["{", "[]", '{"data": "x"}', *WRONG_TYPES])
def test_damaged_terms_are_no_terms(begun, content):
    site = begun()
    (site.store.folder / TERMS).write_text(content)
    site.submitted(site.plan, "again", resume="job")
    with pytest.raises(PolicyError, match=r"terms\.json (is|holds|does not hold) .*; submit the job as a new one"):
        site.open()


def test_a_run_is_continued_by_who_began_it(tmp_path, plan_for):
    """A lead may download his own jobs only; a job that continues another lead's run would hold its tensors and events."""

    def opened(resume, name, role="lead"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        run = Run(tmp_path, plan_for(method="fedavg"), SITES, good)
        run.persistor.resume = resume
        run.fl_ctx.set_prop(FLContextKey.JOB_META, {"submitter_name": name, "submitter_role": role}, private=True, sticky=False)
        return run.memory

    opened("", "a@one.org")
    opened("job", "a@one.org")
    opened("job", "admin@consortium.org", AdminRole.PROJECT_ADMIN)
    with pytest.raises(PolicyError, match="run job was submitted by another person; only that person continues it"):
        opened("job", "b@two.org")
