"""`feddp bench queries`: what exchanging private queries changes, and how far the attention is from equal weights."""

import json
import math
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from timm.models.pvt_v2 import Attention

from benchmarks import queries
from benchmarks.small import shallow
from feddp.networks import NETWORKS
from feddp.networks.attention import SplitAttention
from feddp.networks.weights import save_network
from feddp.training.loop import adamw
from support.brought import brought_by

NETWORK = "pvt_v2_b0_s-fpn"


@pytest.fixture
def layer():
    return SplitAttention(Attention(dim=2, num_heads=1, sr_ratio=1, qkv_bias=True)).eval()


class Alone(torch.nn.Module):
    """A network of one attention layer, whose tokens are the image's pixels."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, image):
        return self.layer(image.flatten(2).transpose(1, 2), [1, 2]).transpose(1, 2).unflatten(2, (1, 2))


def with_query(layer, bias):
    """Its keys are the tokens, and its query is (bias, 0), whatever the token is."""
    with torch.no_grad():
        layer.k.weight.copy_(torch.eye(2))
        layer.k.bias.zero_()
        layer.q.weight.zero_()
        layer.q.bias.copy_(torch.tensor([bias, 0.0]))


def test_how_much_of_the_attention_lies_elsewhere(layer):
    # two tokens (1, 0) and (0, 0), so two keys of the same values; the query (√2 ln 3, 0) and the scale 1/√2 give the logits
    # ln 3 and 0, so the weights 3/4 and 1/4. Equal weights are 1/2 and 1/2: total variation 1/4. With the query (-√2 ln 3, 0)
    # the weights are 1/4 and 3/4: total variation 1/2.
    with_query(layer, 2**0.5 * torch.log(torch.tensor(3.0)).item())
    central = {"weight": torch.zeros(2, 2), "bias": -layer.q.bias.detach().clone()}
    sample = {"image": torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]), "mask": torch.zeros(2, 1, 2), "stem": "a", "patient": "p"}
    keys, mean, equal = queries.shares(Alone(layer), layer, central, [sample] * 3)
    assert keys == 2
    assert mean == pytest.approx(0.5, abs=1e-6)
    assert equal == pytest.approx(0.25, abs=1e-6)


def test_how_far_a_layer_moved(layer):
    # (3, 4, 0, 0 | 0, 0) against (3, 0, 0, 0 | 0, 0): 4 of 3
    other = SplitAttention(Attention(dim=2, num_heads=1, sr_ratio=1, qkv_bias=True))
    for each, second in ((layer, 4.0), (other, 0.0)):
        with torch.no_grad():
            each.v.weight.copy_(torch.tensor([[3.0, second], [0.0, 0.0]]))
            each.v.bias.zero_()
    assert queries.far(layer, other, "v") == pytest.approx(4 / 3)


def test_a_gradient_by_hand(layer, monkeypatch):
    # The loss is the sum of the outputs (B, 2, 1, 2). Values are the tokens, so of tokens (1, 0) and (0, 0) each output is the
    # weight of the first key, w, and 0. q = (b, 0) and the scale 1/√2 give the logits b/√2 and 0: w = σ(b/√2), here b = 0 and
    # w = 1/2. Of the two tokens, (1, 0) alone changes with q's weight: ∂L/∂W_q[0, 0] = w(1 − w)/√2 = 1/(4√2). The other three
    # elements have no gradient, so the root mean square is half of that.
    with_query(layer, 0.0)
    with torch.no_grad():
        for each in (layer.v, layer.proj):
            each.weight.copy_(torch.eye(2))
            each.bias.zero_()
    monkeypatch.setattr(queries, "segmentation_loss", lambda name: lambda logits, mask: logits.sum())
    sample = {"image": torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]), "mask": torch.zeros(2, 1, 2), "stem": "a", "patient": "p"}
    plan = SimpleNamespace(training=SimpleNamespace(loss="dice", batch=1))
    found = queries.gradient(Alone(layer), [sample] * 2, plan)
    assert found["layer"]["q"] == pytest.approx(1 / (8 * 2**0.5))


def test_a_step_of_adam_by_hand():
    """Two steps with β₁ = 0.9. The gradient 1, 1: m = 0.9 · 0.1 + 0.1 = 0.19 and m̂ = 0.19 / (1 − 0.81) = 1. The gradient 1, −1:
    m = 0.9 · 0.1 − 0.1 = −0.01 and m̂ = −1/19. v̂ is 1 of both, and ε of 1e-8 changes nothing here."""
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = adamw(layer, lr=1e-3, weight_decay=0.1)
    for gradient in ((1.0, 1.0), (1.0, -1.0)):
        layer.weight.grad = torch.tensor([gradient])
        optimizer.step()
    assert queries.step(optimizer, layer.weight) == pytest.approx(((1 + 1 / 19**2) / 2) ** 0.5, rel=1e-5)
    assert math.isnan(queries.step(adamw(layer, lr=1e-3, weight_decay=0.1), layer.weight)), "never trained"


@pytest.fixture
def _narrow(monkeypatch):
    monkeypatch.setitem(NETWORKS, NETWORK, partial(shallow, sr_ratios=(2, 1, 1, 1)))


@pytest.mark.usefixtures("_narrow")
def test_a_run(feddp, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    assert feddp("data", "synthesize", "--out", data, "--images", "8", "--size", "32", "--sites", "2")[0] == 0
    options = ("--rounds", "1", "--size", "32", "--network", NETWORK, "--env", "local")
    for method, more in (("feddp", ("--calibration-epochs", "0")), ("fedavg", ())):
        code, _, err = feddp("run", "--method", method, "--data", data, "--out", run / method, *options, *more)
        assert code == 0, err
    code, out, err = feddp("bench", "queries", run / "feddp", "--data", data)
    assert code == 0, err
    tested, trained, layers, gradients, moments = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert (tested["split"], trained["split"]) == ("test", "train")
    for dice in (tested, trained):
        assert {name: set(values) for name, values in dice["dice"].items()} == dict.fromkeys(
            ("own", "mean of the sites", "another site", "start"), {"site-1", "site-2"}
        )
    # 32 pixels: 8 x 8, 4 x 4, 2 x 2 and 1 x 1 tokens in the four stages of a layer each; the first one halves both sides
    assert [row["keys"] for row in layers["layers"].values()] == [16, 16, 4, 1]
    # one key has the weight 1, whatever the query is
    assert [row[name] for row in list(layers["layers"].values())[-1:] for name in ("own / mean", "own / equal")] == [0] * 2
    found = list(gradients["gradients"].values())
    assert set(found[0]) == {f"{name} {when}" for name in "qkv" for when in ("before", "after")}
    # and no gradient but rounding errors reaches queries and keys through it
    assert all(row["q after"] > 1e-7 for row in found[:3])
    assert all(row[name] < 1e-9 for row in found[-1:] for name in ("q before", "k before", "q after", "k after"))
    assert all(row["v after"] > 1e-7 for row in found)
    # 4 training images are one batch, and after a first step m̂ / √v̂ is 1 or -1; ε of 1e-8 takes less than half of it where the
    # gradient is above 1e-8, and nearly all where nothing but rounding errors of some 1e-10 comes through
    steps = list(moments["moments"].values())
    assert all(0.5 < row["v"] <= 1 for row in steps)
    assert all(0.5 < row[name] <= 1 for row in steps[:3] for name in "qk")
    assert all(row[name] < 0.1 for row in steps[-1:] for name in "qk")

    kept = run / "feddp/workspace/site-2/feddp/local_job"
    (kept / "state_00001.safetensors").write_bytes(b"")
    before = sorted(kept.iterdir()), (kept / "record.jsonl").read_bytes()
    code, out, err = feddp("bench", "queries", run / "feddp", "--data", data)
    assert (code, out) == (2, "")
    assert f"feddp: {kept / 'state_00001.safetensors'}" in err
    assert (sorted(kept.iterdir()), (kept / "record.jsonl").read_bytes()) == before, "a command that reads changes nothing"
    (kept / "state_00001.safetensors").unlink()
    code, out, err = feddp("bench", "queries", run / "feddp", "--data", data)
    assert code == 0, err
    assert f"{kept} has no state after step 1: nothing on the steps of site-2's Adam" in err
    shutil.rmtree(run / "feddp" / "workspace")
    code, out, err = feddp("bench", "queries", run / "feddp", "--data", data)
    assert code == 0, err
    assert (
        f"{run / 'feddp/workspace/site-1/feddp/local_job'} has no state after step 1: nothing on the steps of site-1's Adam"
        in err
    )
    assert [json.loads(line) | {"date": ""} for line in out.splitlines() if line.startswith("{")][1]["dice"] == trained["dice"]

    code, _, err = feddp("bench", "queries", run / "fedavg", "--data", data)
    assert code == 2
    assert "the sites' networks of fedavg have the same queries; name a run with private queries" in err


def test_the_start_is_that_of_the_run_also_where_it_brought_weights(feddp, plan_for, tmp_path):
    """A step of Adam moves a weight by about the learning rate, here 1e-7, and an epoch of up to 6 images is one step. A
    brought weight is the seed's, some 0.02, plus up to 0.1: a layer has moved by some 1e-6 of its norm from the brought one,
    and by more than its norm from the seed's."""
    data, run = tmp_path / "data", tmp_path / "run"
    assert feddp("data", "synthesize", "--out", data, "--images", "8", "--size", "32", "--sites", "2")[0] == 0
    options = ("--rounds", "1", "--size", "32", "--network", NETWORK, "--env", "local", "--calibration-epochs", "0")
    brought, _ = brought_by(plan_for(network=NETWORK))
    save_network(tmp_path / "brought.safetensors", brought, {})
    more = ("--weights", tmp_path / "brought.safetensors", "--set", "lr=1e-7", "--set", "augment=false")
    code, _, err = feddp("run", "--method", "feddp", "--data", data, "--out", run, *options, *more)
    assert code == 0, err
    code, out, err = feddp("bench", "queries", run, "--data", data)
    assert code == 0, err
    tested, _, layers, gradients, _ = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert all(row[f"{name} moved"] < 1e-4 for row in layers["layers"].values() for name in "qkv")
    assert tested["dice"]["start"] == pytest.approx(tested["dice"]["own"], abs=0.1)
    assert all(row["v before"] == pytest.approx(row["v after"], rel=1e-2) for row in gradients["gradients"].values())
    shutil.rmtree(run / "job")
    code, out, err = feddp("bench", "queries", run, "--data", data)
    assert (code, out) == (2, "")
    assert err == f"feddp: {run} started from initial tensors, but its job/ with these tensors is missing; name another run\n"
