"""Networks by name: shape, size, seeds, and attention with separate key and value layers."""

import copy

import pytest
import segmentation_models_pytorch as smp
import torch
from timm.models.pvt_v2 import Attention
from torch import nn

from feddp import networks
from feddp.errors import FedDPError
from feddp.networks import DEFAULT, NETWORKS, build
from feddp.networks.attention import SplitAttention, split_kv
from feddp.partition import DECODER, ENCODER, HEAD, KEY, NORM, QUERY, VALUE, resolve

RESNET = "resnet18-fpn"


@pytest.fixture(scope="module")
def network():
    return build(DEFAULT, 3, 2, seed=0).eval()


def count(network, names):
    state = network.state_dict()
    return sum(state[name].numel() for name in names)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_gives_logits_of_the_image_s_size(name):
    logits = build(name, 1, 2, seed=0).eval()(torch.randn(1, 1, 64, 96))
    assert logits.shape == (1, 2, 64, 96)
    assert logits.min() < 0  # no sigmoid has been applied


def test_the_default_has_the_paper_s_size():
    """FedDP's network: 5.2 M parameters, 19.7 MiB in fp32. Ours, with one class: 5,165,793 · 4 / 2²⁰ = 19.706."""
    parameters = sum(p.numel() for p in build(DEFAULT, 3, 1, seed=0).parameters())
    assert parameters == 5_165_793
    assert parameters * 4 / 2**20 == pytest.approx(19.7, abs=0.05)


def test_local_query_is_sixteen_tensors(network):
    """pvt_v2_b0 has 2 blocks at each of 4 stages, 32, 64, 160 and 256 wide; a query layer has dim² + dim parameters:

    2·(32² + 32) + 2·(64² + 64) + 2·(160² + 160) + 2·(256² + 256) = 2,112 + 8,320 + 51,520 + 131,584 = 193,536.
    """
    private = resolve(network, (QUERY,)).private
    assert len(private) == 16
    assert count(network, private) == 193_536
    assert private[0] == "encoder.model.stages_0.blocks.0.attn.q.weight"
    for role in (KEY, VALUE):
        assert count(network, resolve(network, (role,)).private) == 193_536


def test_the_roles_of_a_network_cover_it_once(network):
    parts = [set(resolve(network, (role,)).private) for role in (ENCODER, DECODER, HEAD)]
    assert sum(len(part) for part in parts) == len(set().union(*parts)) == len(network.state_dict())
    assert parts[2] == {"segmentation_head.0.weight", "segmentation_head.0.bias"}


def test_norm_takes_a_convolutional_network_s_counters_along():
    """ResNet-18 has 20 batch normalisations (2 in each of 8 blocks, the stem, 3 in shortcuts) of 5 tensors each.

    The decoder has 7 group normalisations (3 + 2 + 1 + 1 convolutions) of 2.
    """
    private = resolve(build(RESNET, 3, 1, seed=0), (NORM,)).private
    assert len(private) == 20 * 5 + 7 * 2
    assert "encoder.model.bn1.num_batches_tracked" in private


def test_a_network_without_attention_has_no_query():
    with pytest.raises(FedDPError, match="'query' found no tensor in FPN"):
        resolve(build(RESNET, 3, 1, seed=0), (QUERY,))


@pytest.fixture(scope="module")
def fused():
    torch.manual_seed(1)
    return smp.FPN("tu-pvt_v2_b0", encoder_weights=None, in_channels=3, classes=2).eval()


def test_a_fused_network_is_refused(fused):
    with pytest.raises(FedDPError, match=r"stages_0\.blocks\.0\.attn\.kv' .*fused"):
        resolve(fused, (QUERY,))


def test_splitting_keeps_the_function(fused):
    """128 pixels: all four ratios of spatial reduction (8, 4, 2, 1) see more than one token."""
    image = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    split = split_kv(copy.deepcopy(fused))
    assert sum(isinstance(module, SplitAttention) for module in split.modules()) == 8
    assert not any(type(module) is Attention for module in split.modules())
    with torch.no_grad():
        expected, got = fused(image), split(image)
    torch.testing.assert_close(got, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    assert sum(p.numel() for p in split.parameters()) == sum(p.numel() for p in fused.parameters())


def test_key_is_the_first_half(fused):
    """The outputs' equality could not tell a swap where softmax is flat; the tensors can."""
    name = "encoder.model.stages_3.blocks.1.attn"
    split = split_kv(copy.deepcopy(fused)).state_dict()
    both = torch.cat([split[f"{name}.k.weight"], split[f"{name}.v.weight"]])
    assert torch.equal(both, fused.state_dict()[f"{name}.kv.weight"])


@pytest.mark.parametrize("arguments", [{"sr_ratio": 2}, {"linear_attn": True}, {"qkv_bias": False}])
def test_every_kind_of_attention_splits_gradients_too(arguments):
    torch.manual_seed(2)
    whole = Attention(8, num_heads=2, **arguments).double()
    nn.init.normal_(whole.kv.weight)  # timm's small start would hide key and value behind a flat softmax
    split = split_kv(nn.Sequential(copy.deepcopy(whole)))[0]
    tokens = torch.randn(2, 16 * 16, 8, dtype=torch.float64)
    for attention in (whole, split):
        attention(tokens, (16, 16)).square().sum().backward()
    gradient = torch.cat([split.k.weight.grad, split.v.weight.grad])
    torch.testing.assert_close(gradient, whole.kv.weight.grad)
    torch.testing.assert_close(split.q.weight.grad, whole.q.weight.grad)


def test_a_split_network_can_be_copied(network):
    copied = copy.deepcopy(network)
    assert resolve(copied, (QUERY, HEAD)) == resolve(network, (QUERY, HEAD))
    assert copied.state_dict().keys() == network.state_dict().keys()


def test_a_seed_fixes_the_network_and_leaves_torch_alone(network):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again, other = build(DEFAULT, 3, 2, seed=0).state_dict(), build(DEFAULT, 3, 2, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    name = "encoder.model.stages_0.blocks.0.attn.k.weight"
    assert all(torch.equal(again[key], value) for key, value in network.state_dict().items())
    assert not torch.equal(other[name], again[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("unet9000", 3, 1), "unknown network 'unet9000'; the networks are pvt_v2_b0-fpn, resnet18-fpn"),
        ((DEFAULT, 3, 1, "imagenet"), "unknown weights 'imagenet'"),
        ((DEFAULT, 3, 0), "at least one channel and one class"),
    ],
)
def test_bad_requests_are_answered(arguments, message):
    with pytest.raises(FedDPError, match=message):
        build(*arguments)


def test_weights_that_cannot_be_fetched_are_answered_with_the_remedy(monkeypatch):
    def offline(*_, encoder_weights, **__):
        assert encoder_weights
        raise OSError("no route to host")

    monkeypatch.setattr(networks.smp, "FPN", offline)
    with pytest.raises(FedDPError, match="'pvt_v2_b0' cannot be fetched .*load_checkpoint"):
        build(DEFAULT, 3, 1, weights="timm")
