"""FedDP in FLARE's simulator: right to the bit, private on the wire, and free of what a process remembers."""

import json
import os
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from nvflare.recipe import SimEnv
from safetensors.torch import load_file

from feddp.data.folder import SiteFolder
from feddp.data.loading import batches, load
from feddp.files import ARTIFACTS, NETWORK, PROGRESS, RECORD, RESULTS, RUN, SHARED, TENSORBOARD, read_events, site_folder
from feddp.flare.kept import kept_below
from feddp.jobs import folder as jobs
from feddp.jobs.folder import SIMULATED_JOB
from feddp.methods.aggregation import average
from feddp.networks import build
from feddp.networks.weights import fingerprint, save_network
from feddp.partition import QUERY, resolve
from feddp.plan.schema import Plan
from feddp.recipe import PersonalizedRecipe
from feddp.run import session
from feddp.run.local import local
from feddp.stages.server import nbytes
from feddp.stages.site import Site
from feddp.stages.train import train
from feddp.training.losses import auxiliary_loss, segmentation_loss
from feddp.training.metrics import measure, summarize
from feddp.training.seeds import seed_of
from feddp.training.store import Store
from support import CAPTURE
from support.brought import brought_by
from support.captured import Capture, those_in
from support.command import ended
from support.curves import curves_of
from support.request import SITES, request_for

pytestmark = pytest.mark.simulator

ROUNDS = 2
SERVER = "feddp.run.patient_simulator"  # its process is the server's, too
SIZE = 64  # at 32 pixels PVTv2's attention has a single key: the queries would do nothing, and no site would differ


@pytest.fixture(scope="module")
def run(tiny_root, tmp_path_factory):
    """One FedDP run, which a recipe starts in FLARE's SimEnv (recipes.md), with every frame that a site's process sends
    captured, and with the executor as the only wall: the job's filter is taken out, and FLARE's simulator applies no site's
    policy filter."""
    folder = tmp_path_factory.mktemp("sim")
    capture = folder / "capture"
    capture.mkdir()
    settings = {"size": SIZE, "rounds": ROUNDS, "calibration_epochs": 1, "settings": {"batch": 4}}
    recipe = PersonalizedRecipe(method="feddp", name="unfiltered", data=tiny_root, **settings)
    export, taken_out = jobs.export, []
    watched = Capture(folder / "watched")

    def unfiltered(*given, **options) -> Path:
        job = export(*given, **options)
        config = job / "app_client/config/config_fed_client.json"
        content = json.loads(config.read_text())
        taken_out.append(content.pop("task_result_filters"))
        config.write_text(json.dumps(content))
        return job

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDP_CAPTURE", str(capture))
        patch.setenv("PYTHONPATH", str(CAPTURE), prepend=os.pathsep)
        patch.setattr(jobs, "export", unfiltered)
        patch.setenv("FEDDP_MODULES", str(watched.modules))
        out = Path(recipe.execute(SimEnv(clients=list(SITES), workspace_root=str(folder / "recipe"))).get_result())
    assert all(taken_out)
    assert len(taken_out) == 1
    return {
        "out": out,
        "server": out / "workspace/server" / SIMULATED_JOB,
        "stores": {site: kept_below(out / session.SIMULATOR / site) / SIMULATED_JOB for site in SITES},
        "capture": capture,
        "watched": watched,
        "results": json.loads((out / RESULTS).read_text()),
        "log": (out / "simulator.log").read_text(),
    }


@pytest.fixture(scope="module")
def plain(tiny_root, plan_for):
    """FedDP again, as a plain loop over the sites in one process: no FLARE, no Site, no Store, no tune()."""
    return plain_feddp(tiny_root, plan_for(rounds=ROUNDS, size=SIZE))


def plain_feddp(root: Path, plan):
    training = plan.training
    data = {
        site: {split: load(SiteFolder.open(root / site), split, plan.size) for split in ("train", "val", "test")}
        for site in SITES
    }
    start = build(plan.network, plan.channels, 1, seed=seed_of(plan.seed, "network"))
    networks = {site: build(plan.network, plan.channels, 1, seed=seed_of(plan.seed, "network")) for site in SITES}
    private = set(resolve(start, (QUERY,)).private)
    loss_of = segmentation_loss(training.loss)
    optimizers = {
        s: torch.optim.AdamW(n.parameters(), lr=training.lr, weight_decay=training.weight_decay, fused=True)
        for s, n in networks.items()
    }
    shared = {name: value.clone() for name, value in start.state_dict().items() if name not in private}
    contributions = []
    for t in range(ROUNDS):
        for site in SITES:
            networks[site].load_state_dict(networks[site].state_dict() | shared)
            epoch(networks[site], optimizers[site], data[site]["train"], training, seed_of(plan.seed, site, t, 0), loss_of)
        states = [networks[site].state_dict() for site in SITES]
        contributions.append({site: {k: networks[site].state_dict()[k].clone() for k in shared} for site in SITES})
        shared = {name: ((states[0][name].double() * 0.5) + states[1][name].double() * 0.5).float() for name in shared}
    for site in SITES:
        networks[site].load_state_dict(networks[site].state_dict() | shared)
    before = {site: {k: v.clone() for k, v in networks[site].state_dict().items()} for site in SITES}
    maps = {site: [forward(networks[model], data[site]["train"]) for model in SITES] for site in SITES}
    final = {}
    for site, network in networks.items():
        delta = (maps[site][0] - maps[site][1]) ** 2  # K = 2: the mean over one peer
        samples = [{**sample, "delta": delta[i]} for i, sample in enumerate(data[site]["train"])]
        lr = plan.calibration.calibration_lr
        optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=training.weight_decay, fused=True)
        best, final[site] = iou(network, data[site]["val"]), before[site]
        for e in range(1, plan.calibration.calibration_epochs + 1):
            seed = seed_of(plan.seed, site, "calibrated", e)
            epoch(network, optimizer, samples, training, seed, loss_of, plan.calibration.lambda_)
            if iou(network, data[site]["val"]) > best:
                best, final[site] = iou(network, data[site]["val"]), {k: v.clone() for k, v in network.state_dict().items()}
    results = {}
    for site, network in networks.items():
        network.load_state_dict(final[site])
        test = data[site]["test"]
        results[site] = summarize(measure(forward(network, test), torch.stack([s["mask"] for s in test])))
    return {"before": before, "final": final, "results": results, "private": private, "contributions": contributions}


def epoch(network, optimizer, samples, training, seed, loss_of, lambda_=None):
    network.train()
    torch.manual_seed(seed_of(seed, "dropout"))
    for batch in batches(samples, training.batch, seed=seed_of(seed, "order"), augment=True):
        logits = network(batch["image"])
        loss = loss_of(logits, batch["mask"])
        if lambda_ is not None:
            loss = loss + lambda_ * auxiliary_loss(logits, batch["mask"], batch["delta"])
        optimizer.zero_grad()
        loss.backward()
        for parameter in network.parameters():
            parameter.grad.clamp_(-training.clip, training.clip)
        optimizer.step()


@torch.no_grad()
def forward(network, samples):
    network.eval()
    images = torch.stack([sample["image"] for sample in samples])
    return torch.cat([torch.sigmoid(network(part)) for part in images.split(8)])


def iou(network, samples):
    rows = measure(forward(network, samples), torch.stack([sample["mask"] for sample in samples]))
    return summarize(rows)["iou"]["mean"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_exchange_is_in_the_clear_and_says_so(run):
    assert run["results"]["sealed"] is False
    assert "no certificates: the server can read the tensors that sites exchange" in run["log"]


def test_a_run_equals_a_plain_loop_to_the_bit(run, plain):
    """Two sites, two rounds, both stages: every tensor of both networks before and after calibration, and the metrics."""
    for site in SITES:
        assert equal(load_file(run["stores"][site] / "start.safetensors"), plain["before"][site])
        assert equal(load_file(run["stores"][site] / "calibrated.safetensors"), plain["final"][site])
        assert run["results"]["sites"][site]["final"] == plain["results"][site]


def test_flares_simenv_leaves_what_a_run_leaves(run, plain):
    """And not FLARE's own allow-list, which SimEnv writes."""
    out = run["out"]
    assert not (out / "local").exists()
    for site in SITES:
        assert equal(load_file(site_folder(out, site) / NETWORK), plain["final"][site])
    assert [step for step, _ in curves_of(out / TENSORBOARD)["train/loss/mean"]] == list(range(1, ROUNDS + 1))
    assert json.loads((out / ARTIFACTS / "metrics_summary.json").read_text())["final_round"] == ROUNDS


def test_the_simulator_s_processes_load_no_compiler(run):
    """As those of a POC (test_poc.py); torch, and MONAI at the sites, are the control."""
    sites, (server,) = map(run["watched"].loaded, ("nvflare.private.fed.app.simulator.simulator_worker", SERVER))
    assert sites == [{"torch", "monai"}] * 2
    assert server & {"torch", "torch._dynamo.config", "torch._refs"} == {"torch"}


def test_every_site_is_personalised_the_first_one_too(run):
    """The released code writes the mean into the first site's live tensors, private ones included (methods.md)."""
    states = [load_file(run["stores"][site] / "start.safetensors") for site in SITES]
    private = resolve(build("pvt_v2_b0-fpn", 3, 1, seed=0), (QUERY,)).private
    for state in states:
        differing = [name for name in private if not torch.equal(state[name], (states[0][name] + states[1][name]) / 2)]
        assert differing == list(private)


def windows(tensor: torch.Tensor) -> list[bytes]:
    """Some runs of 64 bytes of a tensor (all of it where it is shorter): a frame's end may cut one of them in two."""
    raw = tensor.contiguous().numpy().tobytes()
    return [raw[start : start + 64] for start in range(0, max(1, len(raw) - 63), max(64, len(raw) // 4))]


def test_the_executor_alone_keeps_private_tensors_off_the_wire(run, plain):
    """Wall 1, on the bytes of every frame that a site's process sent, tensor downloads included.

    Stage 1 is everything up to the last bytes of the last contribution. In it, no private tensor's name, and no 64 bytes
    of its values after any round. Positive controls: each shared tensor's name and values as contributed are found there;
    and past it the private ones are, which the site gave with consent in stage 2: the capture would have seen them.
    """
    for site in SITES:
        sent = (run["capture"] / f"{site}.bin").read_bytes()
        contributed = plain["contributions"][-1][site]
        end = max(sent.find(window) for value in contributed.values() for window in windows(value)[-1:])
        stage1, rest = sent[: end + 64], sent[end + 64 :]
        given = {(t, name): windows(value) for t in range(ROUNDS) for name, value in plain["contributions"][t][site].items()}
        states = [load_file(run["stores"][site] / f"state_{r:05d}.safetensors") for r in (1, 2)]
        kept = {name: [windows(state[f"private/{name}"]) for state in states] for name in plain["private"]}
        everything = {window for group in (*given.values(), *sum(kept.values(), [])) for window in group}
        early, late = those_in(stage1, everything), those_in(rest, everything)
        for (t, name), values in given.items():
            assert sum(window in early for window in values) >= len(values) - 1, (t, name)
            assert name.encode() in stage1
        for name, values in kept.items():
            assert name.encode() not in stage1
            assert not early & {window for state in values for window in state}, name
            assert name.encode() in rest
            assert values[-1][0] in late


def test_no_file_the_server_holds_contains_private_values(run):
    """Every file below the server's folder, and what was moved from it to the run's, after a whole run with the exchange: the
    server relays, it does not keep."""
    folders = (run["server"].parent, *(run["out"] / name for name in (TENSORBOARD, ARTIFACTS)))
    contents = [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]
    states = [load_file(run["stores"][site] / f"state_{r:05d}.safetensors") for site in SITES for r in (1, 2)]
    private = {w for state in states for name, value in state.items() if name.startswith("private/") for w in windows(value)}
    assert len(private) > 50
    latest = load_file(run["server"] / "shared_latest.safetensors")
    control = windows(max(latest.values(), key=torch.Tensor.numel))[1]
    found = set().union(*(those_in(content, private | {control}) for content in contents))
    assert found == {control}, "shared values are found, and no private ones"


@pytest.fixture(scope="module")
def forgetful(tiny_root, plan_for, tmp_path_factory):
    """`feddp run` on one thread for two sites, for which FLARE starts a new process for each task; and in one process.

    One round in half precision of a network that the job brings, StripPrivate in the chain. A validation image of site-2 is
    broken: it is first read when the site adopts the round, so both runs fail there. Every frame that a site's process sent is
    captured.
    """
    root = tmp_path_factory.mktemp("forgetful")
    data, capture, weights = root / "data", root / "capture", root / "brought.safetensors"
    shutil.copytree(tiny_root, data)
    broken = SiteFolder.open(data / "site-2").rows_of("val")[0].image
    (data / f"site-2/images/{broken}.png").write_bytes(b"not an image")
    capture.mkdir()
    state, plan = brought_by(plan_for(size=SIZE))
    save_network(weights, state, {})
    settings = ("--set", "batch=4", "--set", "start=last", "--set", "precision=float16", "--calibration-epochs", 0)
    options = ("--rounds", 1, "--size", SIZE, "--weights", weights, *settings)
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDP_CAPTURE", str(capture))
        patch.setenv("PYTHONPATH", str(CAPTURE), prepend=os.pathsep)
        for env, where in {"local": ("--env", "local"), "sim": ()}.items():
            words = ("run", *where, "--data", data, "--out", root / env, "--threads", 1, *options)
            with redirect_stderr(StringIO()) as error:
                assert ended(["feddp", *map(str, words)]) == 2
            said[env] = error.getvalue()
    plan = Plan.from_json(json.loads((root / "sim" / RUN).read_text())["plan"])
    assert (plan.stages, plan.weights, plan.federation.half) == (("train",), fingerprint(state), True)
    return {
        "out": {env: root / env for env in said},
        "server": root / "sim/workspace/server/simulate_job",
        "data": data,
        "broken": broken,
        "capture": capture,
        "state": state,
        "plan": plan,
        "said": said,
    }


def only(folder: Path, pattern: str) -> Path:
    """The folder of the one file below `folder` that fits."""
    (found,) = folder.rglob(pattern)
    return found.parent


def numbers_in(server: Path) -> dict[tuple[str, str], dict[str, float]]:
    """What sites answered to each task, without times."""
    answers = [event for event in read_events(server / PROGRESS) if event["event"] == "answer"]
    scalars = {(event["task"], event["site"]): event["scalars"] for event in answers}
    return {asked: {n: value for n, value in found.items() if "seconds" not in n} for asked, found in scalars.items()}


def test_a_new_process_for_every_task_gives_the_same_bits(forgetful):
    """All memory is on disk: the tensors that the job brought, private ones too, and the state after a round, which the next
    process adopts. In one process it stays in memory. What sites exchange after the rounds is on disk in
    test_a_site_that_forgets_after_every_task_comes_to_the_same_bits (test_methods), and a site that was just opened evaluates
    what it adopted in test_a_run_with_weights_is_the_plain_loop_to_the_bit (test_initial)."""
    for site, written in (("site-1", ("initial", "state_00001", "start")), ("site-2", ("initial", "state_00001"))):
        here, there = (only(forgetful["out"][env], f"{site}/**/{RECORD}") for env in ("local", "sim"))
        assert {f"{name}.safetensors" for name in written} <= {path.name for path in there.iterdir()}
        for name in written:
            assert equal(*(load_file(store / f"{name}.safetensors") for store in (here, there))), (site, name)
        assert equal(load_file(there / "initial.safetensors"), forgetful["state"])
    private = resolve(build("pvt_v2_b0-fpn", 3, 1, seed=0), (QUERY,)).private
    adopted = load_file(only(forgetful["out"]["sim"], f"site-1/**/{RECORD}") / "start.safetensors")
    assert not any(torch.equal(adopted[name], forgetful["state"][name]) for name in private), "they were trained"
    assert numbers_in(forgetful["server"]) == numbers_in(forgetful["out"]["local"] / "workspace/server")


def test_a_run_in_half_precision(forgetful, tiny_root, plan_for, toy, tmp_path):
    """FLARE's simulator, one round, StripPrivate in the chain: the server's γ¹ is the mean of float16 contributions that were
    trained from float16's γ⁰, to the bit, and not float32's. Every frame that a site's process sent is counted."""
    plan, state = forgetful["plan"], forgetful["state"]
    found = load_file(forgetful["server"] / "shared_latest.safetensors")

    def mean_of(travel, folder):
        """γ¹ and the contributions of a plain loop whose tensors travel as `travel` says."""
        folders = {name: SiteFolder.open(forgetful["data"] / name) for name in SITES}
        sites = [Site(n, where, plan, Store(tmp_path / folder / n), initial=state) for n, where in folders.items()]
        first = {name: travel(value) for name, value in sites[0].partition.split(sites[0].copy())[0].items()}
        sent = {site.name: {n: travel(v) for n, v in train(site, first, 0)[0].items()} for site in sites}
        return average(sent, dict.fromkeys(SITES, 1.0)), sent

    half, sent = mean_of(lambda value: value.half().float(), "half")
    full, _ = mean_of(lambda value: value, "full")
    assert found.keys() == half.keys() == full.keys()
    assert all(torch.equal(found[name], half[name]) for name in half)
    assert any(not torch.equal(found[name], full[name]) for name in full)
    # the wire: 2 bytes a number, and less than a twentieth of that beside them; float16's values are found and not float32's
    numbers = sum(value.numel() for value in half.values())
    for site in SITES:
        frames = (forgetful["capture"] / f"{site}.bin").read_bytes()
        assert 2 * numbers < len(frames) < 2.1 * numbers
        largest = max(sent[site].values(), key=torch.Tensor.numel).flatten()[:32]
        assert largest.half().numpy().tobytes() in frames
        assert largest.numpy().tobytes() not in frames
    events = read_events(forgetful["server"] / PROGRESS)
    answers = {event["site"]: event["bytes"] for event in events if event["event"] == "answer" and event["task"] == "train"}
    assert answers == dict.fromkeys(SITES, 2 * numbers)
    asked = {event["task"]: event["bytes"] for event in events if event["event"] == "ask"}
    assert asked["train"] == asked["adopt"] == answers
    # a run that ends says it in its results
    short = plan_for(network=toy, rounds=1, start="last", stages=("train",), precision="float16")
    results = session.run(request_for(tiny_root, tmp_path / "toy", short), local, "toy")
    assert results["bytes"]["shared"] == nbytes(load_file(tmp_path / "toy" / SHARED), half=True)


def test_a_failed_run_ends_with_the_first_real_error_and_the_log(forgetful, feddp):
    """A site whose image is broken refuses a task; two sites are the minimum, so the job fails. What is said is the site's own
    error, which stays on its machine: in the simulator that is this one."""
    said, out, broken = forgetful["said"]["sim"], forgetful["out"]["sim"], forgetful["broken"]
    last = said.strip().splitlines()[-1]
    assert f"{broken}.png" in last
    assert "not a readable image" in last
    assert str(out / "simulator.log") in last
    assert "Traceback" not in said
    code, _, again = feddp("run", "--data", forgetful["data"], "--out", out)
    assert code == 2
    assert "unfinished run with another plan (" in again
    refusals = [event for event in read_events(forgetful["server"] / PROGRESS) if event["event"] == "refused"]
    assert [(event["site"], event["task"]) for event in refusals] == [("site-2", "adopt")]
    assert not any(broken in event["reason"] for event in refusals), "a file's name does not leave the site"
