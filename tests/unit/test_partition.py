"""The privacy rule: exact keys, nothing left to chance, every doubtful rule refused."""

import re

import pytest
import torch
from torch import nn

from feddp.errors import FedDPError
from feddp.networks import DEFAULT, NETWORKS, build
from feddp.partition import (
    ALL,
    DECODER,
    ENCODER,
    HEAD,
    KEY,
    NONE,
    NORM,
    NORM_STATISTICS,
    QUERY,
    VALUE,
    WORDS,
    Partition,
    resolve,
    select,
)


class Attention(nn.Module):
    roles = {QUERY: ("q",), KEY: ("k",), VALUE: ("v",)}

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2, 2) for _ in range(3))
        self.q_norm = nn.LayerNorm(2)  # a name that a substring rule would take for the query


class Network(nn.Module):
    roles = {HEAD: ("head",), ENCODER: ("body", "bn")}

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 1), Attention())
        self.bn = nn.BatchNorm2d(2)
        self.head = nn.Conv2d(2, 1, 1)
        self.head_scale = nn.Conv2d(1, 1, 1)  # likewise, for the head


BATCH_NORM = ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked")


@pytest.mark.parametrize(
    ("rule", "private"),
    [
        ((NONE,), ()),
        ((QUERY,), ("body.1.q.weight", "body.1.q.bias")),
        ((HEAD,), ("head.weight", "head.bias")),
        ((HEAD, QUERY), ("body.1.q.weight", "body.1.q.bias", "head.weight", "head.bias")),
        ((QUERY, KEY), ("body.1.q.weight", "body.1.q.bias", "body.1.k.weight", "body.1.k.bias")),
        ((VALUE,), ("body.1.v.weight", "body.1.v.bias")),
        ((NORM,), ("body.1.q_norm.weight", "body.1.q_norm.bias", *BATCH_NORM)),
        ((NORM_STATISTICS,), BATCH_NORM[2:]),
    ],
)
def test_a_rule_selects_exactly_these_keys(rule, private):
    network = Network()
    partition = resolve(network, rule)
    assert partition.private == private
    assert partition.shared == tuple(key for key in network.state_dict() if key not in private)


def test_all_is_everything_buffers_too():
    network = Network()
    assert resolve(network, (ALL,)) == Partition((), tuple(network.state_dict()))
    assert set(BATCH_NORM) <= set(resolve(network, (ENCODER,)).private)


def test_a_rule_from_json_is_a_list():
    assert resolve(Network(), [QUERY]) == resolve(Network(), (QUERY,))
    assert resolve(Network(), [NONE]).private == ()


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm2d(2, affine=True)],
)
def test_norm_selects_by_type_and_by_subclass(norm):
    class Own(type(norm)):
        pass

    norm.__class__ = Own
    network = nn.Sequential(nn.Conv2d(1, 2, 1), norm)
    assert resolve(network, (NORM,)).private == tuple(f"1.{key}" for key in norm.state_dict())


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm2d(2, affine=True)])
def test_a_normalisation_without_statistics_has_none(norm):
    assert select(nn.Sequential(norm), NORM_STATISTICS) == set()


def test_who_needs_statistics_is_told_networks_that_have_them():
    """The default network has layer and group normalisations; the message is as true as the networks that it names."""
    with pytest.raises(FedDPError) as raised:
        resolve(build(DEFAULT, 3, 1), (NORM_STATISTICS,))
    said = str(raised.value)
    assert said.startswith("the role 'norm_statistics' selects no tensor of FPN; choose a network with batch normalisation")
    named = [name for name in NETWORKS if re.search(rf"\b{re.escape(name)}\b", said)]
    assert named == ["resnet18-fpn", "unet"]
    for name in named:
        assert resolve(build(name, 3, 1), (NORM_STATISTICS,)).private


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ((DECODER,), "'decoder' selects no tensor of Network"),
        ((QUERY, DECODER), "'decoder' selects no tensor"),
        (("querry",), "unknown private role 'querry'"),
        ((NONE, HEAD), "'none' must be the only word"),
        ((HEAD, ALL), "'all' must be the only word"),
        ((), "a tuple of role words"),
        ("head", "a tuple of role words"),
    ],
)
def test_doubtful_rules_are_refused(rule, message):
    with pytest.raises(FedDPError, match=message):
        resolve(Network(), rule)


def test_an_unknown_word_is_answered_with_the_list():
    with pytest.raises(FedDPError, match=", ".join(WORDS)):
        resolve(Network(), ("bn",))


def test_selecting_everything_must_be_said():
    network = nn.Sequential(nn.LayerNorm(2))
    with pytest.raises(FedDPError, match="selects every tensor"):
        resolve(network, (NORM,))


def test_a_declared_child_must_exist():
    network = Network()
    network.roles = {HEAD: ("segmentation_head",)}
    with pytest.raises(FedDPError, match="declares 'segmentation_head' as its head"):
        resolve(network, (HEAD,))


class Fused(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.attention = Attention()
        self.other = nn.ModuleDict({name: nn.Linear(2, 4)})


@pytest.mark.parametrize("word", [QUERY, KEY, VALUE])
@pytest.mark.parametrize("name", ["qkv", "kv"])
def test_a_fused_attention_is_refused_by_name(word, name):
    """One declared attention is not enough: the fused one beside it would be shared with its query in it."""
    with pytest.raises(FedDPError, match=f"'other.{name}' fuses query, key or value"):
        resolve(Fused(name), (word,))


def test_torchs_own_fused_attention_is_refused():
    network = nn.Sequential(Attention(), nn.MultiheadAttention(2, 1))
    with pytest.raises(FedDPError, match=r"'1\.in_proj_weight'"):
        resolve(network, (QUERY,))


def test_a_fused_attention_does_not_matter_to_other_roles():
    assert resolve(Fused("kv"), (NORM,)).private == ("attention.q_norm.weight", "attention.q_norm.bias")


def test_tied_tensors_may_not_be_shared_under_another_name():
    network = Network()
    network.body[1].k.weight = network.body[1].q.weight
    with pytest.raises(FedDPError, match=r"'body.1.k.weight' is shared but is the same tensor .* 'body.1.q.weight'"):
        resolve(network, (QUERY,))
    assert len(resolve(network, (QUERY, KEY)).private) == 4


def test_a_module_registered_twice_is_private_under_both_names():
    attention = Attention()
    network = nn.ModuleDict({"a": attention, "b": attention})
    assert resolve(network, (QUERY,)).private == ("a.q.weight", "a.q.bias", "b.q.weight", "b.q.bias")


def test_split_and_join_are_inverse_and_clone():
    network = Network()
    partition = resolve(network, (QUERY, NORM))
    before = {key: value.clone() for key, value in network.state_dict().items()}
    shared, private = partition.split(network.state_dict())
    assert (tuple(shared), tuple(private)) == (partition.shared, partition.private)
    joined = partition.join(shared, private)
    with torch.no_grad():
        for value in (*network.parameters(), *shared.values(), *private.values()):
            value.add_(1)
    assert joined.keys() == before.keys()
    assert all(torch.equal(joined[key], before[key]) and not joined[key].requires_grad for key in before)
    network.load_state_dict(joined)


def test_split_and_join_name_what_does_not_fit():
    network = Network()
    partition = resolve(network, (HEAD,))
    shared, private = partition.split(network.state_dict())
    lacking = dict(list(network.state_dict().items())[4:]) | {"intruder": torch.zeros(1)}
    with pytest.raises(FedDPError, match=r"missing body.0.weight, body.0.bias, body.1.q.weight and 1 more.*intruder"):
        partition.split(lacking)
    with pytest.raises(FedDPError, match=r"shared part .* unexpected head.weight"):
        partition.join(shared | private, private)
    with pytest.raises(FedDPError, match=r"private part .* missing head.weight, head.bias"):
        partition.join(shared, {})
