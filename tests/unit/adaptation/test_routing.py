"""Routed layers: one-hot, mean, sample by sample; what is held in memory and what is trained."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn, tensor

from feddp.adaptation.routing import Routed, Router, route
from feddp.errors import FedDPError
from feddp.networks import build

M = 3


class Every(nn.Module):
    """Every kind of layer that routes: strides, groups, depthwise, dilation, other paddings, with and without bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(4, 4, 3, padding="same", dilation=2, groups=4, bias=False)
        self.reflect = nn.Conv2d(4, 6, (3, 1), padding=(1, 0), padding_mode="reflect")
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.up_plain = nn.ConvTranspose2d(4, 4, 2, stride=2, bias=False)
        self.tokens = nn.Linear(4, 5)
        self.layer_norm = nn.LayerNorm(5)
        self.vector = nn.Linear(5, 3, bias=False)
        self.grid = nn.Linear(4, 3)

    def forward(self, x):
        x = self.up_plain(self.up(torch.relu(self.norm(self.reflect(self.depthwise(self.first(x)))))))
        tokens = self.layer_norm(self.tokens(x.flatten(2).transpose(1, 2)))
        return self.grid(x.permute(0, 2, 3, 1)) + self.vector(tokens.mean(dim=1))[:, None, None]


LAYERS = ("first", "depthwise", "reflect", "up", "up_plain", "tokens", "vector", "grid")


class Fixed(nn.Module):
    """In a router's place: r (B, M) of our choice; keeps what it was given."""

    def __init__(self, r):
        super().__init__()
        self.r, self.pooled = r, None

    def forward(self, pooled):
        self.pooled = pooled
        return self.r.to(pooled)


def every(seed):
    torch.manual_seed(seed)
    network = Every().double().eval()
    for norm in (network.norm, network.layer_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias)
    network.norm.running_mean.uniform_()
    network.norm.running_var.uniform_(0.5, 1.5)
    return network


def stacks_of(networks):
    states = [network.state_dict() for network in networks]
    return {key: torch.stack([state[key] for state in states]) for key in states[0]}


def inject(network, r):
    for layer in network.modules():
        if isinstance(layer, Routed):
            layer.router = Fixed(r)
    return network


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.fixture
def models():
    return [every(seed) for seed in range(M)]


@pytest.mark.parametrize("chosen", range(M))
def test_one_hot_is_that_model_in_every_layer_type(models, chosen):
    """With that model's own normalisations; every tensor of weights differs between the models."""
    x = images(4, 2, 8, 8)
    wanted = models[chosen](x)
    network = inject(route(every(chosen), stacks_of(models)), torch.eye(M)[chosen].expand(4, M))
    assert sum(isinstance(layer, Routed) for layer in network.modules()) == len(LAYERS)
    torch.testing.assert_close(network(x), wanted, rtol=0, atol=1e-12)
    assert not torch.allclose(models[(chosen + 1) % M](x), wanted, atol=1e-2)


@pytest.mark.parametrize("name", ["pvt_v2_b0-fpn", "resnet18-fpn", "unet"])
@pytest.mark.parametrize("chosen", [0, 1])
def test_one_hot_is_that_model_on_whole_networks(name, chosen):
    networks = [build(name, 3, 2, seed=seed).eval() for seed in (1, 2)]
    x = images(2, 3, 32, 32).float()
    with torch.no_grad():
        wanted, other = networks[chosen](x), networks[1 - chosen](x)
        found = inject(route(build(name, 3, 2, seed=1 + chosen).eval(), stacks_of(networks)), torch.eye(2)[[chosen, chosen]])(x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())
    assert (other - wanted).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
def test_equal_shares_of_a_linear_layer_are_the_mean_model(layer):
    """W_1 = (1, 0; 0, 1), W_2 = (3, 2; 0, 1), b = (0, 1) and (2, 1): the mean (2, 1; 0, 1), (1, 1). x = (1, 2):
    (2 + 2, 2) + (1, 1) = (5, 3); without bias (4, 2)."""
    stacks = {"0.weight": tensor([[[1.0, 0], [0, 1]], [[3, 2], [0, 1]]])}
    if layer.bias is not None:
        stacks["0.bias"] = tensor([[0.0, 1], [2, 1]])
    network = inject(route(nn.Sequential(layer), stacks), torch.full((1, 2), 0.5))
    assert network(tensor([[1.0, 2]])).tolist() == [[5, 3] if "0.bias" in stacks else [4, 2]]


def test_a_layer_by_hand_sample_by_sample():
    """A 1 x 1 convolution, weights 1 and 10, biases 0 and 100. r = (1, 0) gives x; (½, 2) gives 20.5 x + 200; x = 1, 2."""
    stacks = {"0.weight": tensor([1.0, 10]).view(2, 1, 1, 1, 1), "0.bias": tensor([[0.0], [100]])}
    network = inject(route(nn.Sequential(nn.Conv2d(1, 1, 1)), stacks), tensor([[1, 0], [0.5, 2]]))
    assert network(tensor([1.0, 2]).view(2, 1, 1, 1)).flatten().tolist() == [1, 241]


@pytest.mark.parametrize("layer", LAYERS)
def test_two_samples_with_different_r_are_two_separate_passes(models, layer):
    x = images(2, 2, 8, 8)
    network, seen = route(every(0), stacks_of(models)).double(), {}
    routed = getattr(network, layer)
    hook = routed.register_forward_hook(lambda module, given, result: seen.update(x=given[0]))
    network(x)
    hook.remove()
    r = torch.tensor([[0.9, 0.2, 0.4], [0.1, 1.0, -0.3]], dtype=torch.float64)
    routed.router = Fixed(r)
    together = routed(seen["x"])
    for b in range(2):
        routed.router = Fixed(r[b : b + 1])
        torch.testing.assert_close(together[b : b + 1], routed(seen["x"][b : b + 1]), rtol=0, atol=1e-12)
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("mix", ["sigmoid", "softmax"])
def test_it_starts_as_the_mean_model(models, mix):
    """σ(−ln(M−1)) = 1/M; a softmax of zeros is 1/M."""
    mean = every(0)
    mean.load_state_dict({key: stack.double().mean(dim=0).to(stack.dtype) for key, stack in stacks_of(models).items()})
    wanted = mean(images(3, 2, 8, 8))
    network = route(mean, stacks_of(models), mix).double()
    torch.testing.assert_close(network(images(3, 2, 8, 8)), wanted, rtol=0, atol=1e-6)


def test_a_router_by_hand():
    """One channel, M = 2: the hidden layer has 2 units. Input 2, squeeze (1, −1): (2, −2); choose (1, 0; 0, 1), bias (0, 1):
    (2, −1). Sigmoids 0.880797 and 0.268941; softmax 1/(1 + e⁻³) = 0.952574."""
    for mix, wanted in (("sigmoid", [0.880797, 0.268941]), ("softmax", [0.952574, 0.047426])):
        router = Router(1, 2, mix)
        router.squeeze.load_state_dict({"weight": tensor([[1.0], [-1]]), "bias": torch.zeros(2)})
        router.choose.load_state_dict({"weight": torch.eye(2), "bias": tensor([0.0, 1])})
        assert router(tensor([[2.0]])).flatten().tolist() == pytest.approx(wanted, abs=1e-6)


def test_routers_see_the_pooled_input():
    """A map (1, 2; 3, 6) has the mean 3; tokens (1, 10), (3, 20) have (2, 15); a vector is itself."""
    weight = {"0.weight": torch.zeros(2, 1, 1, 1, 1), "0.bias": torch.zeros(2, 1)}
    network = inject(route(nn.Sequential(nn.Conv2d(1, 1, 1)), weight), torch.ones(1, 2))
    network(tensor([[[[1.0, 2], [3, 6]]]]))
    assert network[0].router.pooled.tolist() == [[3]]
    weight = {"0.weight": torch.zeros(2, 1, 2), "0.bias": torch.zeros(2, 1)}
    network = inject(route(nn.Sequential(nn.Linear(2, 1)), weight), torch.ones(1, 2))
    for given, wanted in ((tensor([[[1.0, 10], [3, 20]]]), [[2, 15]]), (tensor([[4.0, 5]]), [[4, 5]])):
        network(given)
        assert network[0].router.pooled.tolist() == wanted


@pytest.mark.parametrize("name", ["pvt_v2_b0-fpn", "unet"])
def test_only_routers_get_gradients(name):
    stacks = stacks_of([build(name, 3, 1, seed=seed) for seed in range(M)])
    network = route(build(name, 3, 1, seed=0).eval(), stacks)
    for layer in network.modules():
        if isinstance(layer, Routed):
            nn.init.normal_(layer.router.choose.weight, std=0.01)  # zeros would stop the first layer's gradient
    network(images(2, 3, 32, 32).float()).square().mean().backward()
    with_gradient = {key for key, parameter in network.named_parameters() if parameter.grad is not None}
    routers = {key for key, _ in network.named_parameters() if ".router." in key}
    assert with_gradient == routers
    assert not any(tensor.requires_grad for tensor in network.buffers())
    assert all(parameter.grad.abs().sum() > 0 for parameter in network.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("name", ["pvt_v2_b0-fpn", "unet"])
def test_memory_is_m_copies_of_the_weights_and_no_other(name):
    """The stacks themselves are the routed layers' weights; beside them are routers and normalisations only."""
    plain = build(name, 3, 1, seed=0)
    counted = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    weights = sum(p.numel() for m in plain.modules() if isinstance(m, counted) for p in m.parameters(recurse=False))
    rest = sum(p.numel() for p in plain.parameters()) - weights
    stacks = stacks_of([build(name, 3, 1, seed=seed) for seed in range(M)])
    network = route(build(name, 3, 1, seed=0), stacks)
    held = [t for m in network.modules() if isinstance(m, Routed) for t in (m.weights, m.biases) if t is not None]
    assert sum(t.numel() for t in held) == M * weights
    assert {t.data_ptr() for t in held} <= {t.data_ptr() for t in stacks.values()}
    routers = sum(p.numel() for key, p in network.named_parameters() if ".router." in key)
    assert sum(p.numel() for p in network.parameters()) == routers + rest


def test_every_layer_is_applied_once_and_makes_one_activation(monkeypatch):
    """U-Net: as many convolutions as without routing, each with as many outputs, whatever M."""
    made = Counter()

    def watched(function):
        def call(*given, **named):
            result = function(*given, **named)
            made[function.__name__, result.numel()] += 1
            return result

        return call

    for name in ("conv2d", "conv_transpose2d"):
        monkeypatch.setattr(F, name, watched(getattr(F, name)))
    x = images(2, 3, 32, 32).float()
    networks = [build("unet", 3, 1, seed=seed).eval() for seed in range(M)]
    networks[0](x)
    plain = made.copy()
    made.clear()
    network = route(build("unet", 3, 1, seed=0).eval(), stacks_of(networks))
    network(x)
    assert made == plain
    assert sum(made.values()) == sum(isinstance(layer, Routed) for layer in network.modules())


def test_what_cannot_be_routed_is_refused():
    class Own(nn.Linear):
        """A linear layer whose forward nobody knows."""

    for layer in (Own(2, 2), nn.Conv1d(1, 1, 1), nn.MultiheadAttention(2, 1)):
        network = nn.Sequential(layer)
        with pytest.raises(FedDPError, match="0.* cannot be routed; choose another --how"):
            route(network, stacks_of([network, network]))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(FedDPError, match="share a weight"):
        route(tied, stacks_of([tied, tied]))


def test_a_sigmoid_of_two_models_starts_at_a_half():
    assert Router(3, 2, "sigmoid")(torch.zeros(1, 3)).tolist() == [[0.5, 0.5]]
    assert Router(3, 5, "sigmoid")(torch.ones(1, 3)).flatten().tolist() == pytest.approx([0.2] * 5, abs=1e-7)
    assert Router(3, 5, "sigmoid").choose.bias[0].item() == pytest.approx(-math.log(4), abs=1e-6)
