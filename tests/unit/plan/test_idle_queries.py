"""The warning where private queries have no effect, because every attention has one key."""

import pytest
import torch

from feddp.networks import build
from feddp.networks.attention import keys_of
from feddp.plan.resolve import idle_queries


@pytest.mark.parametrize(
    ("network", "size", "keys"),
    [
        ("pvt_v2_b0-fpn", 32, [1] * 8),  # feature maps of 8, 4, 2, 1 pixels, reduced by 8, 4, 2, 1; two layers each
        ("pvt_v2_b0-fpn", 96, [9] * 8),  # 24, 12, 6, 3 pixels: 3 x 3 keys
        ("pvt_v2_b0_s-fpn", 32, [16, 16, 16, 16, 4, 4, 1, 1]),  # 8, 4, 2, 1 pixels, reduced by 2, 1, 1, 1
        ("resnet18-fpn", 32, []),
    ],
)
def test_the_keys_by_hand(network, size, keys):
    with torch.device("meta"):
        assert keys_of(build(network, 3, 1, seed=0), 3, size) == keys


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "private query can show nothing"),
        ({"method": "lora"}, "private adapters of q and k can show nothing of them there (those of v act); raise"),
        ({"private": "query,head"}, "private query can show nothing"),
        ({"size": 64}, ""),
        ({"network": "pvt_v2_b0_s-fpn"}, ""),
        ({"method": "fedavg"}, ""),
        ({"method": "fedper"}, ""),
    ],
)
def test_who_is_warned(plan_for, changes, said):
    warning = idle_queries(plan_for(**changes))
    assert (said in warning) if said else warning == ""


def test_queries_have_no_effect_there():
    """What the warning says: other queries, the same prediction to the bit; at 64 pixels another one."""
    network = build("pvt_v2_b0-fpn", 3, 1, seed=0).eval()
    images = {size: torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0)) for size in (32, 64)}
    with torch.no_grad():
        before = {size: network(image) for size, image in images.items()}
        for name, parameter in network.named_parameters():
            if ".attn.q." in name:
                parameter.add_(1.0 + parameter)
        after = {size: network(image) for size, image in images.items()}
    assert after[32].equal(before[32])
    assert not after[64].equal(before[64])


def test_of_lora_s_adapters_those_of_v_act_there():
    """One key has the weight 1, so that other adapters of q and k give the same prediction to the bit, and of v another."""
    network = build("pvt_v2_b0-fpn", 3, 1, seed=0, layers={"lora": {"rank": 2}}).eval()
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = {}
    with torch.no_grad():
        before = network(image)
        for layer in ("q", "k", "v"):
            for name, parameter in network.named_parameters():
                if f".attn.{layer}.lora_b." in name:
                    parameter.fill_(1.0)
            found[layer] = network(image).equal(before)
    assert found == {"q": True, "k": True, "v": False}
