"""Test-time training by hand, the ways to a network, and what none of them changes."""

import inspect
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn, tensor

from feddp.adaptation import unseen_site
from feddp.adaptation.choices import GLOBAL, STRATEGY_NAMES, AdaptationOptions, Settings
from feddp.adaptation.fitting import fit
from feddp.adaptation.models import Models, completed
from feddp.adaptation.routing import Routed
from feddp.adaptation.strategies import STRATEGIES, predict, probabilities
from feddp.cli.adapt import adapt
from feddp.data.folder import write_site
from feddp.data.pixels import write_png
from feddp.errors import FedDPError
from feddp.networks import build
from feddp.partition import NORM, resolve
from feddp.training.columns import METRICS, columns

LN3 = math.log(3)
CPU = torch.device("cpu")
ON_ANY = [how for how in STRATEGIES if how != "ttt"]  # that one needs a rotation head: test_ttt.py
REQUIRED = {"channels": "1", "classes": '["a", "b"]', "labels": "nested", "size": "32"}


def test_every_strategy_that_a_request_may_name_exists():
    """The names are kept apart, because a job is admitted without torch."""
    assert tuple(STRATEGIES) == STRATEGY_NAMES


def silent(epoch, loss):
    """Reports nothing."""


class Weight(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(tensor(float(w)))
        self.still = nn.Parameter(tensor(3.0), requires_grad=False)


def squared(network, images, chance):
    return network.w.square() * images.mean()


IMAGES = [torch.ones(1, 2, 2)]


def test_the_epoch_of_the_lowest_loss_is_kept():
    """L = w², w = 1, Adam at a rate of 1, one step an epoch. Step 1: g = 2, m̂/√v̂ = 1: w = 0, L = 0. Step 2: g = 0,
    m̂ = 0.9 · 0.2/0.19 = 0.947368, v̂ = 0.999 · 0.004/0.001999 = 1.998999: w = −0.670056, L = 0.448975. Epoch 1 is kept."""
    network, reports = Weight(1), []
    done = fit(network, IMAGES, squared, Settings(epochs=2, lr=1.0), lambda *metadata: reports.append(metadata))
    assert done.losses == pytest.approx([1, 0, 0.448975], abs=1e-5)
    assert done.kept == 1
    assert network.w.item() == pytest.approx(0, abs=1e-6)
    assert reports == [(1, done.losses[1]), (2, done.losses[2])]
    assert network.still.item() == 3


def test_the_start_is_kept_to_the_bit_where_every_epoch_is_worse():
    """At a rate of 10, w = 1 goes to −9, L = 81."""
    network = Weight(1)
    done = fit(network, IMAGES, squared, Settings(epochs=1, lr=10.0))
    assert done.losses == pytest.approx([1, 81], rel=1e-5)
    assert done.kept == 0
    assert network.w.item() == 1


class Stairs(nn.Module):
    """A parameter that falls by Adam's rate per step, because its gradient is always 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(tensor(0.0))


def test_a_lower_loss_than_the_last_epoch_s_is_not_enough():
    """The gradient is 1 whatever the loss, so Adam at a rate of 1 takes 1 off w per epoch: 0, −1, −2, −3. The losses there
    are 5, 1, 3 and 2. Epoch 3 is better than epoch 2, but epoch 1 is the lowest: w = −1 is kept."""

    def loss(network, images, rng):
        return tensor([5.0, 1.0, 3.0, 2.0])[-round(network.w.item())] + network.w - network.w.detach()

    network = Stairs()
    done = fit(network, IMAGES, loss, Settings(epochs=3, lr=1.0))
    assert done.losses == [5, 1, 3, 2]
    assert done.kept == 1
    assert network.w.item() == pytest.approx(-1, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "epochs"),
    [
        (0.9e-5, 3),  # each of the first three epochs changes the loss, 1, by less than its hundred-thousandth part
        (1.2e-5, 9),  # by more: all nine epochs are run
        (-0.9e-5, 3),  # the loss may fall so slowly too; the last, lowest one is kept
    ],
)
def test_a_loss_that_stands_still_ends_the_training(change, epochs):
    """The parameter falls by Adam's rate, 1, in every epoch (`Stairs`); the loss there is 1 + change · epoch."""

    def loss(network, images, rng):
        return 1 - change * network.w.detach().double() + (network.w - network.w.detach())

    done = fit(Stairs(), IMAGES, loss, Settings(epochs=9, lr=1.0))
    assert len(done.losses) == 1 + epochs
    assert done.kept == (epochs if change < 0 else 0)


def test_a_loss_that_moves_again_in_time_is_trained_on():
    """1, 1, 1, 2, 2, 2, 2: two epochs without a change, then one with; the three after it end the training at epoch 6 of 9."""

    def loss(network, images, rng):
        return (1.0 + (network.w.detach() < -2.5)) + (network.w - network.w.detach())

    assert fit(Stairs(), IMAGES, loss, Settings(epochs=9, lr=1.0)).losses == [1, 1, 1, 2, 2, 2, 2]


def test_of_equal_losses_the_first_is_kept():
    """The parameter falls by 1 in every epoch (`Stairs`), but the loss is 1 throughout: the start is kept."""
    network = Stairs()
    done = fit(network, IMAGES, lambda network, *_: 1 + network.w - network.w.detach(), Settings(epochs=2, lr=1.0))
    assert (done.losses, done.kept, network.w.item()) == ([1, 1, 1], 0, 0)


def test_every_image_counts_once_in_the_loss():
    """Images 1, 2, 6 in batches of 2: (2 · 1.5 + 6)/3 = 3, not (1.5 + 6)/2."""
    images = [torch.full((1, 1, 1), value) for value in (1.0, 2.0, 6.0)]
    assert fit(Weight(1), images, squared, Settings(epochs=0, batch=2)).losses == [3]


def test_the_noise_is_the_same_at_every_measurement_and_another_at_every_step():
    drawn = []

    def loss(network, images, chance):
        drawn.append(torch.rand(1, generator=chance).item())
        return network.w * 0

    fit(Weight(1), IMAGES * 2, loss, Settings(epochs=2, batch=1))
    measured, trained = [drawn[0:2], drawn[4:6], drawn[8:10]], drawn[2:4] + drawn[6:8]
    assert measured[0] == measured[1] == measured[2]
    assert len({*measured[0], *trained}) == 6
    fit(Weight(1), IMAGES * 2, loss, Settings(epochs=2, batch=1, seed=1))
    assert not {*drawn[:10]} & {*drawn[10:]}, "another seed, other noise"


def test_routers_start_as_the_seed_says(toy):
    """All as the mean model, but their first layers are drawn."""
    starts = []
    for seed in (0, 0, 1):
        (network,) = STRATEGIES["routing"](models_of(toy), pictures(), Settings(epochs=0, seed=seed), CPU, silent).networks
        starts.append(network.q.router.squeeze.weight)
    assert starts[0].equal(starts[1])
    assert not starts[0].equal(starts[2])


def test_a_loss_that_is_not_finite_is_said():
    with pytest.raises(FedDPError, match="unsupervised loss is nan; lower --lr"):
        fit(Weight(float("nan")), IMAGES, squared, Settings())


@pytest.mark.parametrize("wrong", [{"epochs": -1}, {"lr": 0}, {"noise": -1}, {"mix": "max"}, {"norm": "none"}, {"batch": 0}])
def test_settings_are_checked(wrong):
    with pytest.raises(FedDPError, match=next(iter(wrong))):
        Settings(**wrong)


def models_of(name, count=2):
    """`count` personal models of a network from different seeds, and a global one; normalisations differ too."""
    states = []
    for seed in range(count + 1):
        network, chance = build(name, 1, 2, seed=seed), torch.Generator().manual_seed(seed)
        state = network.state_dict()
        for key in resolve(network, (NORM,)).private:
            if state[key].is_floating_point():
                state[key].add_(0.2 * torch.rand(state[key].shape, generator=chance))
        states.append(state)
    return Models.of({f"site-{i}": state for i, state in enumerate(states[:-1])}, states[-1], REQUIRED | {"network": name})


def pictures(count=3, size=16):
    return list(torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(1)))


SHORT = Settings(epochs=2, lr=0.05, neighbourhood=2, batch=2)


def copies(states):
    return {name: value.clone() for name, value in states.items()}


@pytest.mark.parametrize("how", ON_ANY)
def test_the_given_models_are_bit_identical_afterwards(toy, how):
    models = models_of(toy)
    before = copies(models.stacks)
    adapted = STRATEGIES[how](models, pictures(), SHORT, CPU, silent)
    list(predict(adapted.networks, pictures(), 2, CPU))
    assert all(models.stacks[name].equal(value) for name, value in before.items())


@pytest.mark.parametrize("how", ON_ANY)
def test_the_same_seed_gives_the_same_bits_and_leaves_torch_s_own(toy, how):
    torch.manual_seed(11)
    wanted = torch.rand(1)
    torch.manual_seed(11)
    runs = []
    for seed in (0, 0, 1):
        settings = Settings(epochs=2, lr=0.05, neighbourhood=2, seed=seed)
        adapted = STRATEGIES[how](models_of(toy), pictures(), settings, CPU, silent)
        runs.append((adapted.fit.losses, torch.stack(list(predict(adapted.networks, pictures(), 2, CPU)))))
    assert torch.rand(1).equal(wanted)
    assert runs[0][0] == runs[1][0]
    assert runs[0][1].equal(runs[1][1])
    if how == "routing":
        assert runs[0][0] != runs[2][0]


def test_routing_trains_the_routers_and_lowers_the_loss(toy):
    models = models_of(toy)
    adapted = STRATEGIES["routing"](models, pictures(), SHORT, CPU, silent)
    (network,) = adapted.networks
    assert not network.training
    assert adapted.fit.losses[adapted.fit.kept] == min(adapted.fit.losses) < adapted.fit.losses[0]
    mean = models.mean()
    assert {key for key, value in network.state_dict().items() if ".router." not in key} == {k for k in mean if "norm" in k}
    assert all(value.equal(mean[key]) for key, value in network.state_dict().items() if ".router." not in key)
    assert all(layer.router.choose.weight.abs().sum() > 0 for layer in network.modules() if isinstance(layer, Routed))


@pytest.mark.parametrize(("mix", "shares"), [("softmax", (3 / 5, 1 / 5, 1 / 5)), ("sigmoid", (3 / 4, 1 / 2, 1 / 2))])
def test_routers_mix_as_the_settings_say(toy, mix, shares):
    """Two sites' models and the global one, and routers whose last layer gives (ln 3, 0, 0): e to these is (3, 1, 1), a softmax
    of (3, 1, 1)/5; the sigmoid of ln 3 is 3/(3 + 1), that of 0 is ½. No weight of that layer lets the input change them."""
    (network,) = STRATEGIES["routing"](models_of(toy), pictures(), Settings(epochs=0, mix=mix), CPU, silent).networks
    routers = [layer.router for layer in network.modules() if isinstance(layer, Routed)]
    assert len(routers) > 1
    for router in routers:
        with torch.no_grad():
            router.choose.bias.copy_(tensor([LN3, 0.0, 0.0]))
            assert router(torch.rand(1, router.squeeze.in_features))[0].tolist() == pytest.approx(shares, abs=1e-6)


def test_the_command_has_the_settings_defaults():
    given = {name: parameter.default for name, parameter in inspect.signature(adapt).parameters.items()}
    assert {name: given[name] for name in asdict(Settings())} == asdict(Settings())


def test_routing_by_the_batch_trains_the_affine_tensors_too(toy):
    """norm=batch is the released code's; a network without batch normalisation has none to train."""
    settings = Settings(epochs=1, lr=0.05, neighbourhood=2, norm="batch")
    (network,) = STRATEGIES["routing"](models_of(toy), pictures(), settings, CPU, silent).networks
    assert network.norm.running_mean is None
    trained = {key for key, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {key for key in dict(network.named_parameters()) if ".router." in key} | {"norm.weight", "norm.bias"}
    with pytest.raises(FedDPError, match="no batch normalisation"):
        STRATEGIES["routing"](models_of("pvt_v2_b0-fpn"), pictures(1, 32), settings, CPU, silent)


@pytest.mark.parametrize("name", ["toy", "pvt_v2_b0-fpn"])
def test_tent_changes_only_the_normalisations_affine_parameters(toy, name):
    models = models_of(name)
    adapted = STRATEGIES["tent"](models, pictures(2, 32), Settings(epochs=1, lr=0.01), CPU, silent)
    (network,) = adapted.networks
    given = models.state(GLOBAL)
    changed = {key for key, value in network.state_dict().items() if not value.equal(given[key])}
    norms = {key for key in resolve(models.network(given), (NORM,)).private if key.endswith((".weight", ".bias"))}
    assert adapted.fit.kept == 1
    assert changed <= norms
    assert len(changed) > len(norms) / 2
    assert adapted.fit.losses[1] < adapted.fit.losses[0]


def test_tent_normalises_by_the_batch(toy):
    (network,) = STRATEGIES["tent"](models_of(toy), pictures(), Settings(epochs=0), CPU, silent).networks
    x = torch.stack(pictures())
    hidden = network.norm(network.q(x)).detach()
    wanted = torch.nn.functional.batch_norm(network.q(x), None, None, network.norm.weight, network.norm.bias, True)
    assert hidden.equal(wanted.detach())


def test_an_image_alone_is_refused_where_it_has_no_statistics():
    """At 32 px a ResNet's deepest map is one pixel: two values a channel are a batch's least, 3 images by 2 leave one."""
    with pytest.raises(FedDPError, match="3 images in batches of 2 leave a batch of one image"):
        STRATEGIES["tent"](models_of("resnet18-fpn"), pictures(3, 32), Settings(epochs=0, batch=2), CPU, silent)
    with pytest.raises(FedDPError, match="3 images in batches of 1 leave a batch of one image"):
        STRATEGIES["tent"](models_of("resnet18-fpn"), pictures(3, 32), Settings(epochs=0, batch=1), CPU, silent)
    assert STRATEGIES["tent"](models_of("resnet18-fpn"), pictures(3, 32), Settings(epochs=0, batch=3), CPU, silent).networks


def test_logits_are_resized_before_they_become_probabilities():
    """Two pixels, logits 0 and ln 81, become four: bilinear weights 0, 1/4, 3/4 and 1 of ln 81 = 4 ln 3 are 0, ln 3, ln 27 and
    ln 81, probabilities 1/2, 3/4, 27/28 and 81/82. A second network says 0, 1/2: the means of both. (Probabilities resized
    would be 0.622 in the second pixel.)"""
    logits = tensor([[[[0.0, math.log(81)]]], [[[0.0, 0.0]]]])
    found = probabilities(logits, (1, 4)).flatten().tolist()
    assert found == pytest.approx([(p + 0.5) / 2 for p in (1 / 2, 3 / 4, 27 / 28, 81 / 82)], abs=1e-6)


def test_the_global_model_has_the_mean_of_what_was_never_shared():
    """γ has `a`; the sites' own `a` do not count, and of their `q`, 1 and 3, the mean is 2."""
    own = {"x": {"a": tensor(5.0), "q": tensor(1.0)}, "y": {"a": tensor(7.0), "q": tensor(3.0)}}
    found = completed({"a": tensor(0.5)}, own)
    assert {name: value.item() for name, value in found.items()} == {"a": 0.5, "q": 2}


def constant(models, *logits):
    """Each model says one logit a class, whatever the image: weights 0, the head's bias."""
    for name, stack in models.stacks.items():
        if name.startswith(("q.", "head.")):
            stack.zero_()
    models.stacks["head.bias"].copy_(tensor(logits))
    return models


def test_global_average_and_ensemble_by_hand(toy):
    """Logits of the two sites ln 3, of the global model 0. Global ½; average σ(⅔ ln 3) = 3^⅔/(1 + 3^⅔) = 0.675333;
    ensemble (¾ + ¾ + ½)/3 = ⅔. The second class, all −ln 3: ¼ each time."""
    models = constant(models_of(toy), [LN3, -LN3], [LN3, -LN3], [0, -LN3])
    for how, wanted in (("global", 0.5), ("average", 0.675333), ("ensemble", 2 / 3)):
        adapted = STRATEGIES[how](models, pictures(1), SHORT, CPU, silent)
        assert adapted.fit.losses == []
        (logits,) = predict(adapted.networks, pictures(1), 1, CPU)
        maps = probabilities(logits, (3, 5))
        assert maps.shape == (2, 3, 5)
        assert maps[0].flatten().tolist() == pytest.approx([wanted] * 15, abs=1e-6)
        assert maps[1].flatten().tolist() == pytest.approx([0.25] * 15, abs=1e-6)


def test_predictions_come_in_the_images_order(toy):
    """Whatever the batch: one network, five images."""
    models = models_of(toy)
    networks = STRATEGIES["ensemble"](models, pictures(5), SHORT, CPU, silent).networks
    one, two = (torch.stack(list(predict(networks, pictures(5), batch, CPU))) for batch in (1, 2))
    assert one.shape == (5, 3, 2, 16, 16)
    torch.testing.assert_close(one, two)


def test_models_are_the_networks_tensors_or_refused(toy):
    state = build(toy, 1, 2, seed=0).state_dict()
    metadata = REQUIRED | {"network": toy}
    models = Models.of({"b": state, "a": state}, state, metadata)
    assert models.names == ("a", "b", GLOBAL)
    assert len(models) == 3
    short = {key: value for key, value in state.items() if key != "q.bias"}
    with pytest.raises(FedDPError, match="site b: .*q.bias is missing"):
        Models.of({"a": state, "b": short}, state, metadata)
    with pytest.raises(FedDPError, match="global: q.bias holds values that are not finite"):
        Models.of({"a": state}, state | {"q.bias": torch.full((4,), float("nan"))}, metadata)


def test_each_of_several_classes_is_scored_alone(toy, tmp_path):
    """A network that says both classes everywhere; `b` lies in `a`. The first image is `a` everywhere and `b` nowhere: Dice 1
    and 0. In the second 256 of 1024 pixels are both: 2 · 256/(1024 + 256) = 0.4 each. As one case: 2 · 1280/(2048 + 1280) =
    10/13 and 2 · 256/(2048 + 256) = 2/9.
    What a job sends is the summary."""
    models = models_of(toy)
    models.stacks["head.weight"].zero_()
    models.stacks["head.bias"].fill_(10)
    whole, quarter = np.ones((32, 32), np.uint8), np.zeros((32, 32), np.uint8)
    quarter[:16, :16] = 2
    samples = [(stem, "p", "test", np.eye(32, dtype=np.uint8), mask) for stem, mask in (("one", whole), ("two", quarter))]
    metadata = {"name": "toy", "channels": 1, "classes": ["a", "b"], "labels": "nested", "volumes": "patient"}
    write_site(tmp_path / "site", metadata, samples)
    done = unseen_site.adapt(
        models, "run", tmp_path / "site", tmp_path / "out", AdaptationOptions(GLOBAL, SHORT, score=True), CPU
    )
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    names = ("dice_a", "dice_b", "dice")
    assert {stem: [row[name] for name in names] for stem, row in scores["images"].items()} == {
        "one": pytest.approx([1, 0, 0.5]),
        "two": pytest.approx([0.4, 0.4, 0.4]),
    }
    assert [scores["summary"][name]["mean"] for name in names] == pytest.approx([0.7, 0.2, 0.45])
    (case,) = scores["cases"].values()
    assert [case[name] for name in names] == pytest.approx([10 / 13, 2 / 9, (10 / 13 + 2 / 9) / 2])
    assert scores["volumes"]["dice_b"]["mean"] == case["dice_b"]
    assert done["scores"] == scores["summary"]
    assert tuple(scores["summary"]) == columns(METRICS, ("a", "b"))


def test_a_prediction_that_is_not_finite_writes_no_mask(toy, tmp_path):
    """It is not above the threshold, so its mask would be empty."""
    models = models_of(toy)
    models.stacks["head.bias"].fill_(torch.nan)
    (tmp_path / "images").mkdir()
    write_png(tmp_path / "images/one.png", np.eye(32, dtype=np.uint8))
    with pytest.raises(FedDPError, match="predictions are not finite"):
        unseen_site.adapt(models, "run", tmp_path / "images", tmp_path / "out", AdaptationOptions(GLOBAL, SHORT), CPU)
    assert not list((tmp_path / "out").iterdir())
