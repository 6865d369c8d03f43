"""`feddp join`: from a finished run to a new hospital's own network; what is frozen, what is kept, what is refused."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.errors import FedDPError, InputError
from feddp.files import WEIGHTS
from feddp.networks.weights import fingerprint, load_personal, save_network
from feddp.partition import DECODER, ENCODER, HEAD, NORM, chosen
from feddp.plan.resolve import build_network, partition_of
from feddp.run.join import join
from feddp.run.predict import predict
from feddp.stages.results import gathered
from feddp.training import loop
from feddp.training.columns import METRICS
from feddp.training.metrics import measure, summarize
from feddp.training.seeds import seeded

FEW = {"fedavg": "resnet", "pflfe": "unet"}  # batch normalisation in the encoder; in unet's decoder too
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture
def finished(plan_for, tmp_path, pvt, resnet):
    """Makes the folder of a finished run of site-1 and site-2, whose shared tensors no seed gives."""

    def make(method, **changes):
        plan = plan_for(method=method, **{"network": FEW.get(method, resnet), "rounds": 1, "seed": 3} | changes)
        network = build_network(plan)
        shared = partition_of(plan, network).split(network.state_dict())[0]
        with seeded(torch.device("cpu"), "federated"):
            shared = {n: v + 0.01 * torch.rand(v.shape) if v.is_floating_point() else v + 7 for n, v in shared.items()}
        run = tmp_path / "run"
        save_network(run / "shared.safetensors", shared, {"round": "1"})
        cell = {"mean": 0.5, "std": 0.0, "n": 2}
        summary = {when: dict.fromkeys(METRICS, cell) for when in ("before_calibration", "final")}
        results = gathered(plan, {"site-1": summary}, 1, 1, {"site-2": "site site-2 was lost"})
        (run / "results.json").write_text(json.dumps(results))
        return run, plan, shared

    return make


@pytest.fixture
def hospital(tiny_root, tmp_path):
    """Another site's images, under a name of its own."""
    return shutil.copytree(tiny_root / "site-2", tmp_path / "data/hospital")


@pytest.fixture
def ious(monkeypatch):
    """Makes the validation IoUs of the tuning be these, the start's first."""

    def make(*values):
        scores = iter(values)
        monkeypatch.setattr("feddp.training.calibration.mean_scores", lambda *_: {"iou": next(scores), "dice": 0.0})

    return make


@pytest.mark.parametrize("method", FEW)
def test_decoder_and_head_are_tuned_and_the_encoder_stays_to_the_bit(finished, hospital, ious, tmp_path, method):
    """The start is γ and, for pFLFE, whose decoder no server has, the decoder of the run's seed. After two epochs, the last
    kept, every tensor of the encoder is γ's, running statistics and counters too; of decoder and head every parameter moved."""
    run, plan, shared = finished(method)
    ious(0.1, 0.2, 0.3)
    join(run, hospital, tmp_path / "out", epochs=2, lr=1e-3)
    start, final = (load_file(tmp_path / "out" / name) for name in ("workspace/start.safetensors", "network.safetensors"))
    first = build_network(plan)
    fresh = first.state_dict()
    assert all(start[name].equal(shared.get(name, fresh[name])) for name in start)
    encoder, tuned = chosen(first, (ENCODER,)), chosen(first, (DECODER, HEAD))
    assert encoder <= shared.keys()
    assert (method == "fedavg") == (tuned <= shared.keys())
    assert any(name.endswith(STATISTICS) for name in encoder)
    assert all(final[name].equal(shared[name]) for name in encoder)
    assert all(not final[name].equal(start[name]) for name in tuned)
    assert all(final[name].equal(start[name]) for name in final.keys() - tuned)
    if method == "pflfe":
        assert any(name.endswith(STATISTICS) for name in tuned)


def test_the_best_epoch_is_kept_the_start_among_them(finished, hospital, ious, tmp_path):
    run, _, shared = finished("fedavg")
    ious(0.5, 0.4, 0.5)
    join(run, hospital, tmp_path / "worse", epochs=2)
    assert all(value.equal(shared[name]) for name, value in load_file(tmp_path / "worse/network.safetensors").items())
    ious(0.5, 0.6, 0.4)
    join(run, hospital, tmp_path / "best", epochs=2)
    ious(0.5, 0.6)
    join(run, hospital, tmp_path / "one", epochs=1)
    best, one = (load_file(tmp_path / name / "network.safetensors") for name in ("best", "one"))
    assert all(value.equal(one[name]) for name, value in best.items())
    assert not best["segmentation_head.0.weight"].equal(shared["segmentation_head.0.weight"])


def test_only_the_roles_that_are_asked_for_are_tuned(finished, hospital, ious, tmp_path):
    run, plan, shared = finished("fedavg")
    ious(0.1, 0.2)
    done = join(run, hospital, tmp_path / "out", train=("head",), epochs=1)
    final = load_file(tmp_path / "out/network.safetensors")
    changed = {name for name, value in final.items() if not value.equal(shared[name])}
    assert changed == chosen(build_network(plan), (HEAD,))
    assert done["joined"] == {"run": str(run), "train": ["head"]}


def test_the_command_leaves_a_network_that_predicts_and_its_results(finished, hospital, tmp_path, feddp):
    """The metrics of start and final are those of the two files on the test images; `feddp predict` takes the network."""
    run, plan, _ = finished("fedavg")
    out = tmp_path / "out"
    arguments = ["join", "--models", run, "--data", hospital, "--out", out, "--epochs", 2, "--lr", 0.01, "--seed", 5]
    arguments += ["--train", "decoder, head"]
    code, said, err = feddp(*arguments)
    assert code == 0, err
    assert err.count("validation IoU: ") == 2
    assert "hospital" in said
    results = json.loads((out / "results.json").read_text())
    assert results["stages"] == ["train", "tune"]
    assert (results["method"], results["seed"]) == ("fedavg", 5)
    assert results["settings"] == plan.settings | {"tune_epochs": 2, "tune_lr": 0.01}
    test = load(SiteFolder.open(hospital), "test", 32)
    for when, file in (("before_calibration", "workspace/start"), ("final", "network")):
        network = load_personal(out / f"{file}.safetensors")
        found = summarize([row for maps, batch in loop.predict(network, test) for row in measure(maps, batch["mask"])])
        assert results["sites"]["hospital"][when] == found
    assert "| before |" in (out / "results.md").read_text()
    assert len((out / "images.csv").read_text().splitlines()) == 1 + 2 * 2
    assert predict(out / "network.safetensors", hospital / "images", tmp_path / "masks").masks == 12


def test_the_same_seed_gives_the_same_bits_and_another_gives_others(finished, hospital, ious, tmp_path):
    run, _, _ = finished("pflfe", network="resnet")
    found, starts = [], []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        ious(0.1, 0.2)
        torch.manual_seed(len(found))
        join(run, hospital, tmp_path / name, epochs=1, seed=seed)
        found.append(load_file(tmp_path / name / "network.safetensors"))
        starts.append(load_file(tmp_path / name / "workspace/start.safetensors"))
    assert all(value.equal(found[1][name]) for name, value in found[0].items())
    assert not found[2]["segmentation_head.0.weight"].equal(found[0]["segmentation_head.0.weight"])
    assert all(value.equal(starts[2][name]) for name, value in starts[0].items())  # the start is the run's seed's


def test_what_is_private_starts_from_the_job_s_initial_tensors_where_it_had_some(finished, hospital, ious, plan_for, tmp_path):
    options = {"method": "pflfe", "network": "resnet"}
    initial = {name: value + 1 for name, value in build_network(plan_for(**options)).state_dict().items()}
    run, plan, shared = finished(**options, weights=fingerprint(initial))
    with pytest.raises(FedDPError, match="its job/ with these tensors is missing"):
        join(run, hospital, tmp_path / "out", epochs=1)
    carried = run / "job/pflfe_data/app_server/config" / WEIGHTS
    save_network(carried, initial | {"segmentation_head.0.bias": torch.zeros(1)}, {})
    with pytest.raises(FedDPError, match="tensors of SHA-256 [0-9a-f]{64}, but the job's plan has tensors of SHA-256"):
        join(run, hospital, tmp_path / "out", epochs=1)
    save_network(carried, initial, {})
    ious(0.1, 0.2)
    join(run, hospital, tmp_path / "out", epochs=1)
    start = load_file(tmp_path / "out/workspace/start.safetensors")
    assert all(value.equal(shared.get(name, initial[name])) for name, value in start.items())


@pytest.mark.parametrize("method", ["feddp", "ttt", "feddg", "virtual_class", "ditto", "finetune", "fedbn"])
def test_other_methods_runs_can_be_joined_too(finished, hospital, tmp_path, method):
    """Their layers, losses and private tensors are the run's; the encoder's shared tensors stay."""
    run, plan, shared = finished(method, network="pvt")
    done = join(run, hospital, tmp_path / "out", epochs=1)
    final = load_file(tmp_path / "out/network.safetensors")
    assert final.keys() == build_network(plan).state_dict().keys()
    encoder = chosen(build_network(plan), (ENCODER,))
    assert all(final[name].equal(shared[name]) for name in encoder & shared.keys())
    assert done["sites"]["hospital"]["final"]["dice"]["n"] == 2


def _fill(out):
    out.mkdir()
    (out / "mine").write_text("")


@pytest.mark.parametrize(
    ("method", "changes", "spoil", "message"),
    [
        ("fedavg", {"train": ("decoders",)}, None, "unknown private role 'decoders'"),
        ("fedavg", {"train": ("query",)}, None, "the role 'query' selects no tensor"),
        ("fedavg", {"epochs": 0}, None, "tune_epochs=0"),
        ("fedavg", {"lr": 0.0}, None, "tune_lr=0"),
        ("fedavg", {"device": "cuda:99"}, None, "device cuda:99 cannot be used"),
        ("local", {}, None, "shares nothing"),
        ("fedlc", {}, None, "fedlc has its own layers for every site of the federation"),
        ("fedavg", {}, lambda run, data, out: (run / "results.json").unlink(), "is not a finished run"),
        ("fedavg", {}, lambda run, data, out: (run / "shared.safetensors").unlink(), "has no shared.safetensors"),
        ("fedavg", {}, lambda run, data, out: _fill(out), "not empty"),
        ("fedavg", {}, lambda run, data, out: shutil.rmtree(data), "there is no such folder"),
        ("fedavg", {}, lambda run, data, out: _other_classes(data), "submit a job for this data set"),
    ],
)
def test_what_is_wrong_is_said(finished, hospital, tmp_path, method, changes, spoil, message):
    run, _, _ = finished(method)
    if spoil:
        spoil(run, hospital, tmp_path / "out")
    with pytest.raises(FedDPError, match=message):
        join(run, hospital, tmp_path / "out", **changes)
    assert not (tmp_path / "out/results.json").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: _other_classes(data), "submit a job for this data set"),
        (lambda data: _without(data, "train"), "no image in split train"),
        (lambda data: _without(data, "val"), "no image in split val, which local post-training needs; add some$"),
        (lambda data: _without(data, "test"), "no image in split test"),
        (lambda data: shutil.rmtree(data / "masks"), "masks/.*: is missing"),
    ],
)
def test_wrong_data_leave_nothing_and_the_same_command_works_once_they_are_mended(
    finished, hospital, ious, tmp_path, spoil, message
):
    """Said before the first epoch, of the test images too, which are needed only after the last."""
    run, _, _ = finished("fedavg")
    whole = shutil.copytree(hospital, tmp_path / "whole")
    spoil(hospital)
    epochs = []
    with pytest.raises(FedDPError, match=message):
        join(run, hospital, tmp_path / "out", epochs=1, report=lambda *epoch: epochs.append(epoch))
    assert not epochs
    assert not (tmp_path / "out").exists()
    shutil.rmtree(hospital)
    whole.rename(hospital)
    ious(0.1, 0.2)
    join(run, hospital, tmp_path / "out", epochs=1)
    assert (tmp_path / "out/results.json").exists()


@pytest.mark.parametrize(
    ("method", "train", "usable"),
    [
        ("silobn", ("norm_statistics",), "head, norm, encoder, decoder, decoder.1, decoder.2, decoder.3, decoder.4"),
        ("pflfe", ("projector",), "head, norm, encoder, decoder, decoder.1, decoder.2, decoder.3, decoder.4"),
        ("pflfe", ("projector", "norm_statistics"), "head, norm"),
    ],
)
def test_roles_that_cannot_be_tuned_are_refused_before_files_are_written(finished, hospital, tmp_path, method, train, usable):
    """Buffers have no gradient; pFLFE's projector serves its other phase. Beside another role they are allowed."""
    run, _, _ = finished(method, network="resnet")
    wrong = f"--train {','.join(train)}: the loss depends on no parameter of that; name one of {usable}"
    with pytest.raises(InputError, match=wrong):
        join(run, hospital, tmp_path / "out", train=train)
    assert not (tmp_path / "out").exists()
    join(run, hospital, tmp_path / "out", train=(*train, "head"), epochs=1)


@pytest.mark.parametrize(
    ("method", "train", "role"),
    [
        ("silobn", ("decoder", "head"), "norm_statistics"),
        ("fedbn", ("decoder", "head"), "norm"),
        ("pflfe", ("head",), "decoder"),
        ("fedavg", ("head",), ""),
        ("fedrod", ("head",), "personal_head"),
    ],
)
def test_private_tensors_that_are_not_tuned_are_named(finished, hospital, tmp_path, capfd, method, train, role):
    """SiloBN's statistics, of mean 0 and variance 1, would be those of a network that has seen no image. pFLFE's projector does
    not predict, so that nobody misses it. The proposed roles leave nothing to warn of."""
    run, _, _ = finished(method, network="resnet")
    join(run, hospital, tmp_path / "out", train=train, epochs=1)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: private tensors")]
    assert len(lines) == bool(role)
    if not role:
        return
    said = rf"warning: private tensors, .*: {role} \(\S+ and \d+ more\); to tune them too, --train {','.join((*train, role))}"
    assert re.fullmatch(said, lines[0])
    join(run, hospital, tmp_path / "more", train=(*train, role), epochs=1)
    assert "warning: private tensors" not in capfd.readouterr().err


def _without(data, split):
    lines = (data / "split.csv").read_text().splitlines(keepends=True)
    (data / "split.csv").write_text("".join(line for line in lines if not line.strip().endswith(f",{split}")))


def _other_classes(data):
    description = json.loads((data / "dataset.json").read_text()) | {"classes": ["polyp"]}
    (data / "dataset.json").write_text(json.dumps(description))


def test_shared_statistics_are_not_written_by_frozen_normalisations(finished, hospital, ious, tmp_path):
    """The role `norm` among those tuned: its affine tensors and statistics move, then, of the encoder too."""
    run, plan, shared = finished("fedavg")
    ious(0.1, 0.2)
    join(run, hospital, tmp_path / "out", train=(NORM,), epochs=1)
    final = load_file(tmp_path / "out/network.safetensors")
    changed = {name for name, value in final.items() if not value.equal(shared[name])}
    assert changed == chosen(build_network(plan), (NORM,))
