"""The job for a hospital that joins after a run: what is exported, who must consent, what leaves, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode
from typer.testing import CliRunner

from feddp import protocol
from feddp.adaptation import unseen_site
from feddp.adaptation.request import AdaptationRequest
from feddp.cli import app
from feddp.errors import FedDPError
from feddp.files import WEIGHTS
from feddp.flare import messages
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.terms import TERMS
from feddp.networks import NETWORKS
from feddp.networks.weights import fingerprint, save_network
from feddp.plan.resolve import build_network, initial_tensors
from feddp.plan.schema import Plan
from feddp.protocol import rounded
from feddp.training.columns import METRICS, columns
from feddp.training.store import by_site, together
from support.server import SUMMARY, Run
from support.site import FlareSite

JOB = "0af-1"
PRIVATE = ("q.weight", "q.bias")
DONORS, NEWCOMER = ["A", "B"], "N"


def state_of(plan, seed):
    """A whole network whose every tensor is its own: what a site's last stage left."""
    chance = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(value.shape, generator=chance) if value.is_floating_point() else value
        for name, value in build_network(plan).state_dict().items()
    }


@pytest.fixture
def plan(toy, plan_for, request):
    return plan_for(network=toy, sites=("A", "B", "C"), classes=getattr(request, "param", ("lesion",)))


@pytest.fixture
def run(plan, tmp_path):
    """The lead's folder of a finished FedDP run of three sites: results and γ, no network of a site."""
    folder = tmp_path / "run"
    save_network(folder / "shared.safetensors", gamma(plan), {"round": "2"})
    results = plan.to_json() | {"sites": dict.fromkeys("ABC", {}), "federated": True, "start_round": 2, "job": JOB}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def export(run, out, *words):
    arguments = ["job-outside", "--run", run, "--newcomer", NEWCOMER, "--out", out, *words]
    done = CliRunner().invoke(app, [str(word) for word in arguments])
    if isinstance(done.exception, FedDPError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return out


def configs(job):
    return [json.loads((job / f"app_{side}/config/config_fed_{side}.json").read_text()) for side in ("server", "client")]


def gamma(plan):
    """What the finished run's sites share."""
    return {name: value for name, value in state_of(plan, 0).items() if name not in PRIVATE}


def brings(plan):
    """The plan of the exported job, which says what γ it brings."""
    return replace(plan, weights=fingerprint(gamma(plan)))


# --- export --------------------------------------------------------------------------------------------------------


def test_the_folder_names_who_takes_part_and_only_the_server_brings_the_shared_tensors(run, tmp_path, plan):
    """FLARE starts the job with the newcomer and any donor. γ waits at the server for the newcomer's consent."""
    job = export(
        run, tmp_path / "late", "--donors", "A,B", "--how", "tent", "--set", "epochs=3", "--set", "lr=0.001", "--score"
    )
    meta = json.loads((job / "meta.json").read_text())
    assert meta["name"] == "late"
    assert meta["scope"] == "feddp"
    assert (meta["min_clients"], meta["mandatory_clients"]) == (2, [NEWCOMER])
    assert meta["deploy_map"] == {"app_server": ["server"], "app_client": ["A", "B", "N"]}
    server, client = configs(job)
    assert [workflow["args"] for workflow in server["workflows"]] == [{"stage": "ready"}, {"stage": "adapt"}]
    (executor,) = client["executors"]
    assert executor["tasks"] == ["ready", "join", "give_model", "adapt"]
    # 0.001 is the default
    asked = {"job": JOB, "how": "tent", "settings": {"epochs": 3}, "score": True}
    for config in (server, client):
        assert config["components"][0]["args"]["adaptation"] == {"newcomer": NEWCOMER, "donors": DONORS, **asked}
    carried = [Plan.from_json(config["components"][0]["args"]["plan"]) for config in (server, client)]
    assert carried[0] == carried[1]
    assert carried[0].metadata == plan.metadata
    assert carried[0].federation.min_sites == 1
    assert carried[0].weights == fingerprint(gamma(plan))
    assert initial_tensors(carried[0], job / "app_server/config").keys() == state_of(plan, 0).keys() - set(PRIVATE)
    assert [p.name for p in job.rglob("*.safetensors")] == [WEIGHTS]


def test_the_folder_names_only_classes_that_participants_allow(run, tmp_path):
    for config, allowed in zip(configs(export(run, tmp_path / "late")), (SERVER_CLASSES, SITE_CLASSES), strict=True):
        paths = {part.split('"')[0] for part in json.dumps(config).split('"path": "')[1:]}
        assert len(paths) == 2
        assert paths <= set(allowed.values())


def test_donors_are_all_the_runs_sites_unless_named_but_never_the_newcomer(run, tmp_path):
    def asked(name, *arguments):
        server, _ = configs(export(run, tmp_path / name, *arguments))
        return server["components"][0]["args"]["adaptation"]

    assert asked("a")["donors"] == ["A", "B", "C"]
    named = {"newcomer": "C", "donors": DONORS, "job": "another"}
    assert asked("b", "--newcomer", "C", "--job-id", "another").items() >= named.items()


def test_what_download_job_brought_is_a_runs_folder_too(run, tmp_path):
    """The server leaves its latest round and its best: the one that stage 1 selected is taken, round 2."""
    (run / "shared.safetensors").rename(run / "shared_best.safetensors")
    save_network(run / "shared_latest.safetensors", {"other": torch.zeros(1)}, {"round": "3"})
    job = export(run, tmp_path / "late")
    carried = (job / "app_server/config" / WEIGHTS).read_bytes()
    assert b"head.weight" in carried
    assert b"other" not in carried


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--donors", "A,X"], "--donors X: not a site of .*; its sites are A, B, C"),
        (["--newcomer", "A", "--donors", "A"], "name other sites as donors"),
        (["--donors", ""], "name other sites as donors"),
        (["--newcomer", "global"], "'global' is no name of a site: it is the global model's name"),
        (["--newcomer", "server"], "'server' is no name of a site: .*; call the site, for example, server-1"),
        (["--newcomer", " "], "newcomer ' ' must have at most 64 letters"),
        (["--newcomer", "../N"], "newcomer '../N' must have at most 64"),
        (["--how", "magic"], "--how magic: unknown strategy; choose one of routing, global"),
        (["--how", "ttt"], "--how ttt: feddp trains no rotation head"),
        (["--set", "speed=1"], "unknown setting 'speed'; known: epochs, lr"),
        (["--set", "epochs"], "--set epochs: write key=value"),
        (["--set", "epochs=-1"], "epochs=-1"),
        (["--job-id", "../other"], "'../other' is not a job's id"),
    ],
)
def test_a_wrong_job_is_refused_before_it_is_written(run, tmp_path, words, message):
    with pytest.raises(FedDPError, match=message):
        export(run, tmp_path / "x", *words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"job": None}, "has no job's id .* --job-id"),
        ({"job": "simulate_job"}, "ran in the simulator or in one process, not at hospitals; .* --job-id"),
        ({"federated": False}, "is not a federated run"),
        ({"method": "fedlc", "settings": {}, "stages": ["train"]}, "fedlc gives every site layers of its own"),
        ({"method": "fedavg", "settings": {}, "stages": ["train"]}, "2 wrong tensor names: q.bias is missing"),
    ],
)
def test_a_run_that_nobody_outside_can_use_is_refused(run, tmp_path, plan_for, change, message):
    results = json.loads((run / "results.json").read_text()) | change
    if change.get("method") == "fedlc":
        results["network"] = plan_for().network  # the toy has no decoder to calibrate
    (run / "results.json").write_text(json.dumps(results))
    with pytest.raises(FedDPError, match=message):
        export(run, tmp_path / "x")


@pytest.mark.parametrize("said", [{}, {"start_round": None}], ids=["lacks", "null"])
def test_results_that_do_not_say_the_selected_round_are_refused(run, tmp_path, said):
    """Where `shared.safetensors` is missing, the round alone tells the server's files apart: the latest may be another."""
    (run / "shared.safetensors").rename(run / "shared_latest.safetensors")
    results = json.loads((run / "results.json").read_text())
    del results["start_round"]
    (run / "results.json").write_text(json.dumps(results | said))
    with pytest.raises(FedDPError, match="results.json does not say which round was selected.*; name another run"):
        export(run, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_run_that_shared_nothing_is_refused(run, tmp_path):
    """Local Train's: the mean of the sites' networks would be a network that nobody trained."""
    save_network(run / "shared.safetensors", {}, {"round": "2"})
    with pytest.raises(FedDPError, match="its method shares nothing"):
        export(run, tmp_path / "x")


# --- a site --------------------------------------------------------------------------------------------------------


def left(site, state, slot="calibrated", **metadata):
    """What an earlier job left at a site; gives the site."""
    save_network(site.folder / "feddp" / JOB / f"{slot}.safetensors", state, site.plan.metadata | metadata)
    return site


@pytest.fixture
def hospital(plan, tmp_path):
    """Makes a site of the job, named so."""

    def make(name, plan=plan, data="nowhere", consent=(), private=(), **task):
        asked = {"job": JOB, "how": "routing", "settings": {"epochs": 1}, "score": False} | task
        request = AdaptationRequest(NEWCOMER, tuple(DONORS), **asked).to_json()
        policy = {"data": data, "consent": list(consent), "private": list(private), "min_images": 1}  # two test images
        return FlareSite(plan, tmp_path / name, name, "late", request, simulated=True, **policy)

    return make


def test_a_consenting_donor_gives_the_network_of_its_last_stage(hospital, plan):
    donor = left(left(hospital("A", consent=["outside"]), state_of(plan, 1), "start"), state_of(plan, 2))
    tensors, scalars = messages.unpack(donor.answer(protocol.GIVE_MODEL))
    assert scalars == {"consent": True}
    expected = state_of(plan, 2)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def begun(site, private):
    """The terms under which the earlier job began at the site: without consent, under other data."""
    terms = {"data": "/elsewhere", "private": private, "consent": [], "recipients": []}
    (site.folder / "feddp" / JOB / TERMS).write_text(json.dumps(terms))
    return site


def test_a_donor_gives_no_network_of_a_run_that_keeps_more_private(hospital, plan):
    """In another scope, or after a change of `private`: the guard knows the present words alone. Consent after the run is the
    usual case."""
    donor = begun(left(hospital("A", consent=["outside"]), state_of(plan, 1)), ["query"])
    assert donor.answer(protocol.GIVE_MODEL).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "belongs to a run that keeps query private here, and `private` in privacy.json no longer" in donor.last_error()
    kept = begun(left(hospital("B", consent=["outside"], private=["query"]), state_of(plan, 1)), ["query"])
    assert kept.answer(protocol.GIVE_MODEL).get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "2 tensors that may not leave" in kept.guard_error
    assert messages.unpack(begun(donor, []).answer(protocol.GIVE_MODEL))[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [("plan.json", "{}"), (TERMS, "{"), (TERMS, '{"data": "x", "private": 0, "consent": [], "recipients": null}')],
)
def test_a_donor_gives_no_network_of_a_run_whose_terms_are_not_known(hospital, plan, file, text):
    donor = left(hospital("A", consent=["outside"]), state_of(plan, 1))
    (donor.folder / "feddp" / JOB / file).write_text(text)
    assert donor.answer(protocol.GIVE_MODEL).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert donor.last_error().endswith("; leave this site out of the adaptation")


@pytest.mark.parametrize("consent", [[], ["calibration"]])
def test_a_donor_without_consent_gives_nothing(hospital, plan, consent):
    """The word for the calibration exchange is another."""
    donor = left(hospital("A", consent=consent), state_of(plan, 1))
    assert messages.unpack(donor.executed(protocol.GIVE_MODEL)) == ({}, {"consent": False})
    assert messages.unpack(donor.executed(protocol.JOIN)) == ({}, {"consent": False})


def test_a_newcomer_without_consent_refuses_what_it_is_sent(hospital, plan, tiny_root):
    newcomer = hospital(NEWCOMER, consent=["calibration"], data=tiny_root / "site-1")
    sent = together({"A": state_of(plan, 1), "global": state_of(plan, 2)})
    assert newcomer.executed(protocol.ADAPT, sent).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "site N does not consent" in newcomer.last_error()
    assert not (newcomer.folder / "feddp/late/masks").exists()


def folder(at, root):
    """A site's folder of `tiny_root`, to be spoilt."""
    shutil.copytree(root / "site-1", at)
    return at


def without_test(at):
    split = at / "split.csv"
    split.write_text(split.read_text().replace(",test", ",val"))


def grey(at):
    described = json.loads((at / "dataset.json").read_text())
    (at / "dataset.json").write_text(json.dumps(described | {"channels": 1}))


def polyps(at):
    described = json.loads((at / "dataset.json").read_text())
    (at / "dataset.json").write_text(json.dumps(described | {"classes": ["polyp"]}))


@pytest.mark.parametrize(
    ("spoil", "score", "message"),
    [
        (lambda at: shutil.rmtree(at), False, "does not exist; name a folder of PNG images"),
        (lambda at: (at / "split.csv").unlink(), False, "split.csv"),
        (without_test, False, "has no image in split test"),
        (grey, False, r"has channels = (1,), but the models have (3,)"),
        (polyps, True, "('polyp',)"),
        (lambda at: shutil.rmtree(at / "masks"), True, "--score needs masks, but"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_before_a_donor_sends(
    server, hospital, plan, tiny_root, tmp_path, spoil, score, message
):
    """The unseen site's own record says what is wrong. The control, a folder that fits, is
    test_the_job_is_feddp_adapt_bit_for_bit."""
    data = folder(tmp_path / "data", tiny_root)
    spoil(data)
    newcomer = hospital(NEWCOMER, plan=brings(plan), consent=["outside"], data=data, score=score)
    done = server(good(plan, N_join=lambda *_: newcomer.executed(protocol.JOIN)))
    assert [task for task, _, _ in done.sent] == ["join"]
    assert "join: 0 of 1 sites answered well" in done.panics[0]
    assert message in newcomer.last_error()


def test_without_consent_no_folder_is_looked_at(hospital):
    """The answer is no, whatever lies there."""
    assert messages.unpack(hospital(NEWCOMER, data="nowhere").executed(protocol.JOIN)) == ({}, {"consent": False})


def test_without_scores_other_classes_are_no_misfit(hospital, plan, tiny_root, tmp_path):
    data = folder(tmp_path / "data", tiny_root)
    polyps(data)
    newcomer = hospital(NEWCOMER, plan=brings(plan), consent=["outside"], data=data)
    assert messages.unpack(newcomer.executed(protocol.JOIN)) == ({}, {"consent": True})


@pytest.mark.parametrize("late", [brings, lambda plan: plan], ids=["says another", "says none"])
def test_a_newcomer_adapts_no_other_global_model_than_the_jobs(hospital, plan, tiny_root, late):
    """The control, the job's own γ, is test_the_job_is_feddp_adapt_bit_for_bit."""
    newcomer = hospital(NEWCOMER, plan=late(plan), consent=["outside"], data=tiny_root / "site-1")
    sent = together({"A": state_of(plan, 1), "global": {name: value + 1 for name, value in gamma(plan).items()}})
    assert newcomer.executed(protocol.ADAPT, sent).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "site N was sent as the global model: tensors of SHA-256" in newcomer.last_error()
    assert not (newcomer.folder / "feddp/late/masks").exists()


def test_a_donor_whose_network_is_unusable_is_left_out_by_name(hospital, plan, tiny_root, monkeypatch):
    """C's holds a value that no training gives. B's values are in their domains, and its network gives NaN for these images.
    A's is adapted alone. Without A, the newcomer does not go on as if no donor had given."""
    network = NETWORKS[plan.network]
    forward = network.forward

    def spoiling(self, x):
        bias = getattr(self.q, "bias", torch.zeros(1))  # a layer that routes between models has others
        return forward(self, x) * (float("nan") if bias[0] == 7 else 1)

    monkeypatch.setattr(network, "forward", spoiling)
    spoilt = {"B": {"q.bias": torch.full((4,), 7.0)}, "C": {"norm.running_var": torch.full((4,), -1.0)}}
    models = {name: state_of(plan, i) | spoilt.get(name, {}) for i, name in enumerate("ABC", 1)}
    newcomer = hospital(NEWCOMER, plan=brings(plan), consent=["outside"], data=tiny_root / "site-1")
    none = together({"B": models["B"], "C": models["C"], "global": gamma(plan)})
    assert newcomer.executed(protocol.ADAPT, none).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "site B: its network's maps of this site's images are not finite" in newcomer.last_error()
    newcomer.answer(protocol.ADAPT, together(models | {"global": gamma(plan)}))
    masks = newcomer.folder / "feddp/late/masks"
    assert json.loads((masks / "adapt.json").read_text())["models"] == ["A", "global"]
    told = [(e["peer"], e["message"]) for e in newcomer.events() if e["event"] == "left_out"][-2:]
    assert [peer for peer, _ in told] == ["C", "B"]
    assert "norm.running_var holds -1, but a running variance is from 0 to 65504" in told[0][1]


@pytest.mark.parametrize(
    ("metadata", "message"), [(None, "job 0af-1 left no network here"), ({"classes": '["polyp"]'}, 'classes=["polyp"], not')]
)
def test_a_donor_that_cannot_give_says_why_at_home_alone(hospital, plan, metadata, message):
    donor = hospital("A", consent=["outside"])
    if metadata:
        left(donor, state_of(plan, 1), **metadata)
    assert donor.executed(protocol.GIVE_MODEL).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert message in donor.last_error()
    assert bool(metadata) == (donor.folder / "feddp" / JOB).exists(), "asking made no folder"


@pytest.mark.parametrize("wrong", [{"job": "../../elsewhere"}, {"how": "magic"}, {"settings": {"speed": 1}}])
def test_a_job_edited_by_hand_is_refused_by_the_site(hospital, wrong):
    with pytest.raises(FedDPError, match="elsewhere|magic|speed"):
        hospital("A", consent=["outside"], **wrong)


def _without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state | {"pixels": torch.zeros(3)}, r"1 tensors that may not leave \(pixels"),
        (lambda state: _without(state, "q.bias"), "q.bias is missing"),
        (lambda state: state | {"q.bias": torch.zeros(5)}, r"q.bias is \(5,\)"),
        (lambda state: state | {"q.bias": torch.full((4,), float("nan"))}, "not finite"),
        (lambda state: state | {"q.bias": b"patient 17"}, "not a plain tensor"),
    ],
)
def test_the_guard_lets_exactly_a_network_out(hospital, plan, edit, message):
    donor = hospital("A", consent=["outside"])
    with pytest.raises(FedDPError, match=message):
        donor.guarded(protocol.GIVE_MODEL, messages.pack(edit(state_of(plan, 1)), consent=True))


def test_the_guard_asks_for_this_consent_and_heeds_what_never_leaves(hospital, plan):
    message = messages.pack(state_of(plan, 1), consent=True)
    assert messages.unpack(hospital("A", consent=["outside"]).guarded(protocol.GIVE_MODEL, message))[0]
    with pytest.raises(FedDPError, match="does not consent to the outside exchange"):
        hospital("A", consent=["calibration"]).guarded(protocol.GIVE_MODEL, message)
    with pytest.raises(FedDPError, match="2 tensors that may not leave"):
        hospital("A", consent=["outside"], private=["query"]).guarded(protocol.GIVE_MODEL, message)
    with pytest.raises(FedDPError, match="does not consent to the calibration exchange"):
        hospital("A", consent=["outside"]).guarded(protocol.COLLECT, message)


@pytest.mark.parametrize("task", [protocol.JOIN, protocol.ADAPT])
def test_the_guard_lets_no_tensor_of_the_newcomer_out(hospital, task):
    newcomer = hospital(NEWCOMER, consent=["outside", "calibration"])
    with pytest.raises(FedDPError, match=f"task {task} tried to send 1 tensors"):
        newcomer.guarded(task, messages.pack({"q.bias": torch.zeros(4)}, images=2))
    with pytest.raises(FedDPError, match="'patient' among its scalars"):
        newcomer.guarded(task, messages.pack(patient=17))


# --- the server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(run, tmp_path):
    """Runs the workflow of the exported job against `answer(site, task, tensors, scalars)`."""

    def start(answer, sites=("A", "B", "N")):
        job = export(run, tmp_path / "late", "--donors", "A,B")
        args = configs(job)[0]["components"][0]["args"]
        carried, asked = Plan.from_json(args["plan"]), args["adaptation"]
        return Run(job / "app_server", carried, list(sites), answer, request=asked).run("adapt")

    return start


def good(plan, **changes):
    """Everyone consents; `changes` are functions of the site's answer, by site and task."""

    def answer(site, task, tensors, scalars):
        if task == protocol.JOIN:
            reply = messages.pack(consent=True)
        elif task == protocol.GIVE_MODEL:
            reply = messages.pack(state_of(plan, ord(site)), consent=True)
        else:
            reply = messages.pack(images=3, empty_masks=1, seconds=0.5, loss_before=0.7, loss=0.25, epoch=2)
        change = changes.get(f"{site}_{task}")
        return reply if change is None else change(*messages.unpack(reply))

    return answer


def no(tensors, scalars):
    return messages.pack(consent=False)


def test_the_newcomer_is_sent_the_donors_models_and_the_shared_tensors_and_answers_in_numbers(server, plan):
    """C took part in the run and is no donor. Nothing of a donor's is in the server's folder afterwards."""
    done = server(good(plan))
    assert done.panics == []
    sent = [(task, target) for task, targets, _ in done.sent for target in targets]
    assert sent == [("join", "N"), ("give_model", "A"), ("give_model", "B"), ("adapt", "N")]
    models = by_site(messages.unpack(done.sent[-1][2])[0])
    assert models.keys() == {"A", "B", "global"}
    assert models["global"].keys() == state_of(plan, 0).keys() - set(PRIVATE)
    for site in DONORS:
        assert all(torch.equal(models[site][name], value) for name, value in state_of(plan, ord(site)).items())
    assert all(not messages.unpack(data)[0] for task, _, data in done.sent if task != "adapt")
    results = json.loads((done.folder / "results.json").read_text())
    assert results == {
        **{"job": "job", "run": JOB, "newcomer": "N", "donors": DONORS, "without": {}},
        **{"sealed": False, "rounded": False},
        **{"images": 3, "empty_masks": 1, "seconds": 0.5, "loss_before": 0.7, "loss": 0.25, "epoch": 2},
    }
    files = [path.read_bytes() for path in done.folder.rglob("*") if path.is_file()]
    assert any(state_of(plan, 0)["head.weight"].numpy().tobytes() in content for content in files), "the control"
    for site in DONORS:
        value = state_of(plan, ord(site))["head.weight"].numpy().tobytes()
        assert not any(value in content for content in files)


def test_without_the_newcomers_consent_no_donor_is_asked_and_nothing_is_sent(server, plan):
    done = server(good(plan, N_join=no))
    assert [task for task, _, _ in done.sent] == ["join"]
    assert "the unseen site N does not consent: it was sent nothing" in done.panics[0]
    assert not (done.folder / "results.json").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no, "does not consent"),
        (lambda tensors, scalars: messages.pack(_without(tensors, "q.bias"), consent=True), "refused"),
        (lambda tensors, scalars: messages.pack({}, consent=True), "refused"),
        (lambda tensors, scalars: messages.pack(tensors | {"q.bias": torch.full((4,), torch.inf)}, consent=True), "refused"),
        (lambda tensors, scalars: messages.pack(tensors | {"q.bias": torch.zeros(3)}, consent=False), "refused"),
        (lambda tensors, scalars: None, "refused"),
    ],
)
def test_a_donor_that_gives_nothing_or_the_wrong_thing_is_left_out(server, plan, change, reason):
    done = server(good(plan, A_give_model=change))
    assert done.panics == []
    models = by_site(messages.unpack(done.sent[-1][2])[0])
    assert models.keys() == {"B", "global"}
    results = json.loads((done.folder / "results.json").read_text())
    assert results["donors"] == ["B"]
    assert results["without"].keys() == {"A"}
    assert results["without"]["A"].startswith(reason)
    assert len(done.progress("refused")) == (reason == "refused")


def test_without_a_donor_the_job_ends_with_one_error(server, plan):
    """Nobody consents; nobody's network is whole; nobody came; and no newcomer came."""
    done = server(good(plan, A_give_model=no, B_give_model=no))
    assert len(done.panics) == 1
    assert "no donor gave a model (A: does not consent; B: does not consent); a donor's privacy.json" in done.panics[0]
    empty = {f"{site}_give_model": lambda *_: messages.pack(consent=True) for site in DONORS}
    assert "give_model: 0 of 2 sites answered well" in server(good(plan, **empty)).panics[0]
    done = server(good(plan), sites=["N"])
    assert "A: not among the job's sites; B: not among the job's sites" in done.panics[0]
    assert [task for task, _, _ in done.sent] == ["join"]
    assert "the unseen site N is not among the job's sites" in server(good(plan), sites=DONORS).panics[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, scalars: messages.pack({"image": torch.zeros(3)}, **scalars),
        lambda tensors, scalars: messages.pack(**scalars | {"images": "17"}),
        lambda tensors, scalars: messages.pack(**scalars | {"loss": float("nan")}),
        lambda tensors, scalars: messages.pack(**scalars, scores={"dice": {"mean": 0.5}}),
    ],
)
def test_an_answer_of_the_newcomers_that_is_not_numbers_is_refused(server, plan, change):
    done = server(good(plan, N_adapt=change))
    assert "adapt: 0 of 1 sites answered well" in done.panics[0]
    assert not (done.folder / "results.json").exists()


def test_scores_are_in_the_results_where_they_were_asked_for(server, plan):
    done = server(good(plan, N_adapt=lambda tensors, scalars: messages.pack(**scalars, scores=SUMMARY)))
    assert json.loads((done.folder / "results.json").read_text())["scores"] == SUMMARY


@pytest.mark.parametrize("plan", [("disc", "cup")], indirect=True)
def test_scores_of_several_classes_have_every_class(server, plan):
    whole = dict.fromkeys(columns(METRICS, plan.classes), SUMMARY["dice"])
    done = server(good(plan, N_adapt=lambda tensors, scalars: messages.pack(**scalars, scores=whole)))
    assert json.loads((done.folder / "results.json").read_text())["scores"] == whole
    whole.pop("assd_cup")
    done = server(good(plan, N_adapt=lambda tensors, scalars: messages.pack(**scalars, scores=whole)))
    assert "adapt: 0 of 1 sites answered well" in done.panics[0]
    assert "scores lack a metric" in done.progress("refused")[0]["reason"]


# --- all of them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [False, True])
def test_the_job_is_feddp_adapt_bit_for_bit(server, hospital, run, plan, tiny_root, tmp_path, score, monkeypatch):
    """Executors behind their guards, in one process. The newcomer's masks are `feddp adapt`'s on the networks that the donors
    took home, γ completed by the mean of these two; its own labels are read only when it is asked for scores."""
    data = tiny_root / "site-1"
    sites = {site: left(hospital(site, consent=["outside"]), state_of(plan, ord(site))) for site in DONORS}
    sites[NEWCOMER] = hospital(NEWCOMER, plan=brings(plan), consent=["outside"], data=data, score=score)
    loaded = []
    load = unseen_site.load
    monkeypatch.setattr(unseen_site, "load", lambda *arguments: loaded.append(arguments) or load(*arguments))
    done = server(lambda site, task, tensors, scalars: sites[site].answer(task, tensors))
    assert done.panics == []
    assert len(loaded) == score

    for site in DONORS:
        save_network(run / "sites" / site / "network.safetensors", state_of(plan, ord(site)), plan.metadata)
    (run / "results.json").write_text(json.dumps({"sites": dict.fromkeys(DONORS)}))
    words = ["adapt", "--models", run, "--images", data, "--out", tmp_path / "masks", "--epochs", 1]
    assert CliRunner().invoke(app, [str(word) for word in words]).exit_code == 0
    masks = sites[NEWCOMER].folder / "feddp/late/masks"
    expected, found = ({p.name: p.read_bytes() for p in folder.glob("*.png")} for folder in (tmp_path / "masks", masks))
    assert found == expected
    assert len(found) == 2
    here, there = (json.loads((folder / "adapt.json").read_text()) for folder in (tmp_path / "masks", masks))
    assert here["losses"] == there["losses"]
    assert there["models"] == ["A", "B", "global"]
    results = json.loads((done.folder / "results.json").read_text())
    assert results["loss"] == rounded("loss", min(here["losses"]))
    assert ("scores" in results) == score
