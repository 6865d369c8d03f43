"""TTT: the rotation loss by hand, the head that is trained beside the task, and what adapting by it changes."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, tensor

from feddp.adaptation.choices import GLOBAL, Settings
from feddp.adaptation.models import Models, read_models
from feddp.adaptation.strategies import STRATEGIES, predict
from feddp.errors import FedDPError
from feddp.networks import build
from feddp.networks.rotation import rotation_logits
from feddp.networks.weights import load_personal, save_network
from feddp.plan.resolve import build_network, partition_of
from feddp.stages.train import train
from feddp.training.rotation import every_turn, rotation_loss, turned

CPU = torch.device("cpu")
HEAD = {"rotation_head.2.weight", "rotation_head.2.bias"}


def silent(epoch, loss):
    """Reports nothing."""


def pictures(count=3, size=32):
    return list(torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)))


class Part(nn.Module):
    """A part of a network that does what a function does."""

    def __init__(self, does):
        super().__init__()
        self.does = does

    def forward(self, given):
        return self.does(given)


def of_parts(encoder, rotation_head):
    """A network whose encoder and rotation head are these functions."""
    return nn.ModuleDict({"encoder": Part(encoder), "rotation_head": Part(rotation_head)})


def fixed():
    """Its rotation head says the same of every image: probabilities 1/2, 1/6, 1/6, 1/6."""
    logits = tensor([math.log(3), 0.0, 0.0, 0.0])
    return of_parts(lambda images: [images], lambda features: logits.expand(len(features), 4))


def test_turns_are_quarters_anticlockwise():
    """1 2 / 3 4: by a quarter 2 4 / 1 3, by two 4 3 / 2 1, by three 3 1 / 4 2."""
    images = tensor([[[[1, 2], [3, 4]]]]).repeat(4, 1, 1, 1)
    wanted = [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2]]
    assert [image.flatten().tolist() for image in turned(images, torch.arange(4))] == wanted


def test_the_rotation_loss_by_hand():
    """Softmax of (ln 3, 0, 0, 0) is 1/2 and three times 1/6: −ln ½ = ln 2 of no turn, ln 6 of any other. Of all four turns of
    every image (ln 2 + 3 ln 6)/4."""
    images = torch.zeros(2, 3, 4, 4)
    assert rotation_loss(fixed(), images, tensor([0, 0])).item() == pytest.approx(math.log(2))
    assert rotation_loss(fixed(), images, tensor([0, 3])).item() == pytest.approx((math.log(2) + math.log(6)) / 2)
    assert every_turn(fixed(), images).item() == pytest.approx((math.log(2) + 3 * math.log(6)) / 4)


def test_every_turn_shows_each_image_in_each_turn_under_its_name():
    seen = {}
    network = of_parts(lambda images: [seen.setdefault("images", images)], lambda features: torch.zeros(len(features), 4))
    images = torch.arange(8.0).view(2, 1, 2, 2)
    every_turn(network, images)
    for i, image in enumerate(seen["images"]):
        assert image.equal(images[i // 4].rot90(i % 4, dims=(-2, -1)))


def test_the_head_is_a_part_of_the_network_and_changes_no_prediction():
    """512 deepest features of ResNet-18 to 4 turns: 2048 weights and 4 biases."""
    with_head, without = (build("resnet18-fpn", 3, 1, seed=0, layers=layers).eval() for layers in ({"rotation": {}}, None))
    assert with_head.state_dict().keys() - without.state_dict().keys() == HEAD
    assert sum(with_head.state_dict()[name].numel() for name in HEAD) == 2052
    images = torch.stack(pictures(2))
    with torch.no_grad():
        assert with_head(images).equal(without(images))
        assert rotation_logits(with_head, images).shape == (2, 4)


@pytest.mark.usefixtures("toy")
def test_a_network_without_an_encoder_is_refused():
    with pytest.raises(FedDPError, match="Toy has no encoder; TTT needs one"):
        build("toy", 3, 1, seed=0, layers={"rotation": {}})


# --- in the federation ------------------------------------------------------------------------------------------------------


def gamma(site):
    return site.partition.split(build_network(site.plan).state_dict())[0]


def test_the_head_is_shared_and_trained_and_the_loss_is_in_the_encoder(open_site, pvt):
    """With weight 0 the head stays, but for weight decay, and the encoder goes another way."""
    sent = {}
    for weight in (1.0, 0.0):
        site = open_site(at=str(weight), method="ttt", network=pvt, rotation=weight, weight_decay=0)
        assert set(site.partition.shared) > HEAD
        start = gamma(site)
        sent[weight] = train(site, start, 0)[0]
        assert [sent[weight][name].equal(start[name]) for name in HEAD] == [weight == 0] * 2
    name = "encoder.model.stages_3.blocks.0.mlp.fc1.weight"
    assert not sent[1.0][name].equal(sent[0.0][name])


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_loss_by_hand_and_on_upright_images(open_site, pvt, monkeypatch, weight):
    """A head of zeros is at ln 4 whatever the turn: L = L_seg + weight · ln 4. What it sees are the batch's images as the data
    have them, by their names, though the batch itself is augmented: turned at random, it would hold no answer."""
    site = open_site(method="ttt", network=pvt, rotation=weight)
    nn.init.zeros_(site.network.rotation_head[2].weight)
    nn.init.zeros_(site.network.rotation_head[2].bias)
    seen = []

    def spy(network, upright, turns):
        seen.append((upright, turns))
        return rotation_loss(network, upright, turns)

    monkeypatch.setattr("feddp.training.rotation.rotation_loss", spy)
    chosen = [site.samples[i] for i in (5, 2, 0)]
    batch = {"image": torch.zeros(3, 3, 32, 32), "mask": torch.stack([s["mask"] for s in chosen])}
    batch["stem"] = [s["stem"] for s in chosen]
    logits = torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    found = site.method.loss(site, logits, batch).item()
    assert found == pytest.approx(site.segmentation_loss(logits, batch["mask"]).item() + weight * math.log(4), rel=1e-5)
    assert seen[0][0].equal(torch.stack([s["image"] for s in chosen]))
    for _ in range(20):
        site.method.loss(site, logits, batch)
    assert {int(k) for _, turns in seen for k in turns} == {0, 1, 2, 3}


# --- outside ----------------------------------------------------------------------------------------------------------------


def metadata_of(method, layers, network):
    metadata = {
        "network": network,
        "channels": "3",
        "classes": '["lesion"]',
        "labels": "nested",
        "size": "32",
        "method": method,
    }
    return metadata | ({"layers": json.dumps(layers)} if layers else {})


def run_of(plan, folder):
    """A finished run of two sites, whose networks and the shared tensors differ in every floating-point tensor."""
    network = build(plan.network, 3, 1, seed=0, layers=plan.layers)
    for seed, name in enumerate(("A", "B")):
        chance = torch.Generator().manual_seed(seed)
        state = {
            n: v + torch.rand(v.shape, generator=chance) / 10 if v.is_floating_point() else v
            for n, v in network.state_dict().items()
        }
        metadata = metadata_of(plan.method, plan.layers, plan.network) | {"site": name}
        save_network(folder / "sites" / name / "network.safetensors", state, metadata)
    save_network(folder / "shared.safetensors", partition_of(plan, network).split(network.state_dict())[0], {"round": "1"})
    (folder / "results.json").write_text(json.dumps({"sites": {"A": {}, "B": {}}}))
    return folder


def test_adapting_trains_the_encoder_and_nothing_else(plan_for, resnet, tmp_path):
    """Of a ResNet also every running statistic stays; the epoch of the lowest loss is kept."""
    models = read_models(run_of(plan_for(method="ttt", network=resnet), tmp_path / "run"))
    adapted = STRATEGIES["ttt"](models, pictures(), Settings(epochs=3, lr=1e-4, batch=2), CPU, silent)
    (network,) = adapted.networks
    given = models.state(GLOBAL)
    changed = {name for name, value in network.state_dict().items() if not value.equal(given[name])}
    encoder = {name for name, _ in network.named_parameters() if name.startswith("encoder.")}
    assert changed <= encoder
    assert len(changed) > 0.9 * len(encoder)
    assert adapted.fit.losses[adapted.fit.kept] == min(adapted.fit.losses) < adapted.fit.losses[0]
    with torch.no_grad():
        assert every_turn(network, torch.stack(pictures())).item() == pytest.approx(min(adapted.fit.losses), abs=1e-4)
    again = STRATEGIES["ttt"](models, pictures(), Settings(epochs=3, lr=1e-4, batch=2), CPU, silent)
    assert again.fit == adapted.fit


@pytest.mark.parametrize("how", STRATEGIES)
def test_common_layers_are_mixed_and_averaged_like_all_else(plan_for, resnet, tmp_path, how):
    run = run_of(plan_for(method="ttt", network=resnet), tmp_path / "run")
    models = read_models(run)
    states = [load_personal(run / "sites" / name / "network.safetensors").state_dict() for name in "AB"]
    states.append(load_file(run / "shared.safetensors"))
    assert models.state(GLOBAL)["rotation_head.2.weight"].equal(states[2]["rotation_head.2.weight"])
    mean = sum(state["rotation_head.2.weight"] for state in states) / 3
    torch.testing.assert_close(models.mean()["rotation_head.2.weight"], mean)
    adapted = STRATEGIES[how](models, pictures(2), Settings(epochs=1, lr=1e-4, neighbourhood=2), CPU, silent)
    (first, _) = predict(adapted.networks, pictures(2), 2, CPU)
    assert first.isfinite().all()


def test_another_method_s_run_has_no_head_to_adapt_by(tmp_path, feddp, plan_for, resnet, tiny_root):
    """One line, exit code 2, what to do."""
    run = run_of(plan_for(method="fedavg", network=resnet), tmp_path / "run")
    code, _, said = feddp("adapt", "--models", run, "--images", tiny_root / "site-1", "--out", tmp_path / "out", "--how", "ttt")
    assert code == 2
    assert said == "feddp: --how ttt: fedavg trains no rotation head; name a run of `feddp run --method ttt`\n"


@pytest.mark.parametrize(
    ("method", "settings", "own"),
    [
        ("pflfe", {}, "projector.2.bias"),
        ("fc_pflfe", {}, "projector.2.bias"),
        ("virtual_class", {}, "decoder.p2.affinity.conv_m.bias"),
        ("virtual_class", {"paa": False}, None),
        ("virtual_class", {"private": "none"}, None),
        ("fedoap", {}, "adapter.body.0.bias"),
        ("fedrod", {}, "personal_head.0.bias"),
        ("lora", {}, "encoder.model.stages_0.blocks.0.attn.k.lora_a.weight"),
    ],
)
def test_only_layers_that_each_site_has_for_itself_are_refused(plan_for, pvt, tmp_path, method, settings, own):
    """pFLFE's projector, virtual classes' private convolutions, FedRoD's second heads, LoRA's and FedOAP's adapters; not where
    a setting shares them all. Then ways predict."""
    run = run_of(plan_for(method=method, network=pvt, **settings), tmp_path / "run")
    if own is None:
        models = read_models(run)
        for how in ("routing", "average"):
            adapted = STRATEGIES[how](models, pictures(2), Settings(epochs=1, lr=1e-4, neighbourhood=2), CPU, silent)
            assert all(logits.isfinite().all() for logits in predict(adapted.networks, pictures(2), 2, CPU))
    else:
        with pytest.raises(FedDPError, match=f"{method} gives every site layers of its own .{own}, ...., which an unseen site"):
            read_models(run)


def test_adapters_that_the_sites_share_are_averaged_and_not_routed(plan_for, pvt, tmp_path):
    """Routing mixes the weight of a layer of a kind that it knows, and beside W an adapted layer has B A."""
    models = read_models(run_of(plan_for(method="lora", network=pvt, private="none"), tmp_path / "run"))
    settings = Settings(epochs=1, lr=1e-4, neighbourhood=2)
    with pytest.raises(FedDPError, match=r"attn\.q is a AdaptedLinear, which cannot be routed; choose another --how"):
        STRATEGIES["routing"](models, pictures(2), settings, CPU, silent)
    adapted = STRATEGIES["average"](models, pictures(2), settings, CPU, silent)
    assert all(logits.isfinite().all() for logits in predict(adapted.networks, pictures(2), 2, CPU))


def test_models_of_facts_without_layers_are_as_before(resnet):
    metadata = metadata_of("fedavg", {}, resnet)
    state = build(resnet, 3, 1, seed=0).state_dict()
    assert Models.of({"A": state}, state, metadata).network(state).state_dict().keys() == state.keys()
