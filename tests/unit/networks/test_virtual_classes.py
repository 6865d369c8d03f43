"""Virtual classes: the head, its losses, the affinity aggregation and what is private, against numbers worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn, tensor

from feddp.data.loading import class_index, class_maps
from feddp.errors import FedDPError
from feddp.methods.virtual_class import VirtualClass, VirtualClassSettings
from feddp.networks import build
from feddp.networks.virtual_classes import AffinityAggregation, Similarities, SimilarityHead, foreground_logits
from feddp.partition import constants
from feddp.plan.resolve import build_network, partition_of
from feddp.stages.train import adopt, train
from feddp.training.metrics import measure
from feddp.training.virtual import real_loss, virtual_loss
from support.driven import drive

VIRTUAL = "segmentation_head.0.virtual"
OPTIONS = {"virtual": 4, "temperature": 0.1, "nested": True, "paa": True}


# --- the head --------------------------------------------------------------------------------------------------------------


def head(temperature=0.5) -> SimilarityHead:
    """Two features; real kernels (3, 4) and (0, 2), a virtual one (−1, 0)."""
    first = Similarities(2, real=2, virtual=1)
    first.weight.data = tensor([[3.0, 4.0], [0.0, 2.0]])[:, :, None, None]
    first.virtual.copy_(tensor([[-1.0, 0.0]])[:, :, None, None])
    return SimilarityHead([first, nn.Identity()], temperature, nested=True)


def pixels(*vectors):
    """Feature vectors as the pixels of one row: (1, 2, 1, n)."""
    return tensor(vectors).T[None, :, None, :]


def test_similarities_are_cosines():
    """Kernels at unit length: (0.6, 0.8), (0, 1), (−1, 0). The pixel (6, 8) is (0.6, 0.8): 1, 0.8, −0.6; (0, 5) is (0, 1): 0.8,
    1, 0. Over a temperature of 1/2 the maps are twice that; the class's logit is the second real map less the first."""
    layer, features = head(), pixels([6.0, 8.0], [0.0, 5.0])
    wanted = [[1.0, 0.8], [0.8, 1.0], [-0.6, 0.0]]
    assert layer[0](features)[0, :, 0].tolist() == [pytest.approx(row, abs=1e-6) for row in wanted]
    assert layer(features).flatten().tolist() == pytest.approx([-0.4, 0.4], abs=1e-6)
    assert layer.maps[0, :, 0].tolist() == [pytest.approx([2 * s for s in row], abs=1e-6) for row in wanted]


def test_similarities_stay_in_float32_under_mixed_precision():
    with torch.autocast("cpu", torch.bfloat16):
        assert head()[0](pixels([6.0, 8.0]).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(("width", "blocks"), [(8, [8]), (4, [4, 4])])
def test_kernels_start_orthonormal(width, blocks):
    """8 kernels of 8 features: K Kᵀ = 1. Of 4 features no more than 4 can be orthogonal: each 4 are, and every norm is 1."""
    layer = Similarities(width, real=2, virtual=6)
    kernels = torch.cat((layer.weight, layer.virtual)).flatten(1).detach()
    for block in kernels.split(blocks):
        torch.testing.assert_close(block @ block.T, torch.eye(width), atol=1e-5, rtol=0)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_the_kernels_are_the_seed_s():
    one, two, other = (build("unet", 1, 1, seed=s, layers={"virtual_classes": OPTIONS}).state_dict() for s in (0, 0, 1))
    assert one[VIRTUAL].equal(two[VIRTUAL])
    assert not one[VIRTUAL].equal(other[VIRTUAL])


@pytest.mark.parametrize(("nested", "wanted"), [(True, [7 / 8, 5 / 8]), (False, [2 / 8, 5 / 8])])
def test_a_sigmoid_of_the_logits_is_the_class_s_probability(nested, wanted):
    """Maps (ln 1, ln 2, ln 5): p = 1/8, 2/8, 5/8. Nested: P(≥1) = 7/8 and P(≥2) = 5/8, the outer never less than the inner;
    exclusive: p_1 and p_2, which with the background's 1/8 sum to 1. Maps as far apart as 2e4 still give finite logits."""
    maps = tensor([1.0, 2.0, 5.0]).log().view(1, 3, 1, 1)
    logits = foreground_logits(maps, nested)
    assert torch.sigmoid(logits).flatten().tolist() == pytest.approx(wanted, abs=1e-6)
    assert foreground_logits(tensor([-1e4, 1e4, 0.0]).view(1, 3, 1, 1), nested).isfinite().all()


@pytest.mark.parametrize("labels", ["nested", "exclusive"])
def test_a_softmax_s_index_is_the_mask_again(labels):
    mask = tensor([[0, 1, 2], [3, 2, 0]])
    maps = class_maps(mask, 3, labels)[None]
    assert class_index(maps, labels).equal(mask[None])


@pytest.mark.parametrize(
    ("labels", "truth", "said", "wanted"),
    [
        ("nested", [1, 1, 1, 2, 2, 0], [1, 1, 1, 2, 0, 0], {"dice": (8 / 9 + 2 / 3) / 2, "iou": (4 / 5 + 1 / 2) / 2}),
        ("exclusive", [1, 1, 1, 2, 0, 0], [1, 1, 2, 2, 0, 0], {"dice": (4 / 5 + 2 / 3) / 2, "iou": (2 / 3 + 1 / 2) / 2}),
    ],
)
def test_sigmoid_and_softmax_are_measured_on_the_same_masks(labels, truth, said, wanted):
    """One row of pixels, and what two networks say and are sure of: one as two sigmoid maps, one as a softmax over three, the
    background's too, which is in no mean. Nested: class 1 (with 2 in it) is 4 of 5 pixels, Dice 8/9, IoU 4/5; class 2 is 1 of
    2, 2/3 and 1/2. Exclusive: class 1 is 2 of 3, 4/5 and 2/3; class 2 is the one and one too many, 2/3 and 1/2."""
    mask, maps = (class_maps(tensor([row]), 2, labels)[None] for row in (truth, said))
    real = 40 * nn.functional.one_hot(class_index(maps, labels), 3).permute(0, 3, 1, 2).float()
    for logits in (40 * maps - 20, foreground_logits(real, labels == "nested")):
        row = measure(torch.sigmoid(logits), mask)[0]
        assert {metric: row[metric] for metric in wanted} == pytest.approx(wanted)


# --- the losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [("excluded", (math.log(4 / 3) + math.log(8 / 7)) / 2), ("literal", (math.log(2) + math.log(10 / 7)) / 2)],
)
def test_a_pixel_goes_to_its_nearest_virtual_class(mask, wanted):
    """e^maps of two pixels: (3, 1), the first is nearest, and (1, 7), the second. Without the real maps −ln 3/4 and −ln 7/8;
    with a zero for each of 2 real maps, e⁰ = 1 twice more below: −ln 3/6 and −ln 7/10."""
    virtual = tensor([[3.0, 1.0], [1.0, 7.0]]).log().view(1, 2, 1, 2)
    assert virtual_loss(virtual, 2, mask).item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 4 / 7 + math.log(4 / 3) + math.log(6 / 5)),
        ({"mask": "literal"}, 4 / 7 + math.log(4 / 3) + math.log(8 / 5)),
        ({"lambda_r": 2.0, "lambda_v": 3.0}, 4 / 7 + 2 * math.log(4 / 3) + 3 * math.log(6 / 5)),
        ({"virtual": 0.0}, 4 / 7 + math.log(4 / 3)),
    ],
)
def test_the_loss_adds_up(options, wanted):
    """Eq. 8. One pixel of class 1, its real maps (0, ln 3): p = (1/4, 3/4). Dice of the background: 1 − 0/(1/4 + 0) = 1, of
    the class: 1 − 2 · (3/4)/(3/4 + 1) = 1/7; their mean 4/7. L_r = −ln 3/4. Virtual maps (ln 5, 0): L_v = −ln 5/6, though a
    real map of a greater one would change its arg max; with literal zeros −ln 5/8."""
    maps = tensor([1.0, 3.0, 5.0, 1.0]).log().view(1, 4, 1, 1)
    head = SimilarityHead([Similarities(1, real=2, virtual=2)], 1.0, nested=True)
    head.maps = maps
    network = SimpleNamespace(segmentation_head=head)
    site = SimpleNamespace(network=network, plan=SimpleNamespace(classes=("lesion",), labels="nested"))
    found = VirtualClass(VirtualClassSettings(**options)).loss(site, None, {"mask": torch.ones(1, 1, 1, 1)})
    assert found.item() == pytest.approx(wanted, abs=1e-4)  # Dice is smoothed by 1e-5


@pytest.mark.parametrize(
    ("maps", "labels", "wanted"),
    [
        ((0.0, 1.0), "exclusive", 29 / 39 + math.log(8 / 5)),
        ((1.0, 1.0), "nested", 29 / 39 + math.log(8 / 5)),
        ((1.0, 0.0), "exclusive", 13 / 15 + math.log(8 / 2)),
    ],
)
def test_the_loss_of_several_classes_is_of_the_pixel_s_own(maps, labels, wanted):
    """Three real maps (ln 1, ln 2, ln 5), p = (1/8, 2/8, 5/8), and virtual ones (ln 3, 0): L_v = −ln 3/4.

    One pixel of class 2, in exclusive maps (0, 1), in nested ones (1, 1). Its Dice is 1 − 2 · (5/8)/(5/8 + 1) = 3/13, that of
    the two others 1: mean (2 + 3/13)/3 = 29/39. L_r = −ln 5/8. Of class 1: Dice 1 − 2 · (2/8)/(2/8 + 1) = 3/5, mean
    (2 + 3/5)/3 = 13/15 and L_r = −ln 2/8. (Exclusive maps read as nested ones would make class 2 class 1.)"""
    head = SimilarityHead([Similarities(1, real=3, virtual=2)], 1.0, nested=labels == "nested")
    head.maps = tensor([1.0, 2.0, 5.0, 3.0, 1.0]).log().view(1, 5, 1, 1)
    plan = SimpleNamespace(classes=("disc", "cup"), labels=labels)
    site, mask = SimpleNamespace(network=SimpleNamespace(segmentation_head=head), plan=plan), tensor(maps).view(1, 2, 1, 1)
    found = VirtualClass(VirtualClassSettings()).loss(site, None, {"mask": mask})
    assert found.item() == pytest.approx(wanted + math.log(4 / 3), abs=1e-4)  # Dice is smoothed by 1e-5


@pytest.mark.parametrize("mask", ["excluded", "literal"])
def test_the_virtual_loss_trains_features_and_no_kernel(mask):
    """Of L_v: a gradient by the features, exactly none by the real kernels, and the virtual ones can have none. L_r moves the
    real kernels: the control."""
    layer = SimilarityHead([Similarities(4, real=2, virtual=3)], 0.5, nested=True)
    features = torch.rand(1, 4, 2, 2, requires_grad=True)
    layer(features)
    virtual_loss(layer.maps[:, 2:], 2, mask).backward(retain_graph=True)
    assert features.grad.abs().sum() > 0
    assert (layer[0].weight.grad == 0).all()
    assert not layer[0].virtual.requires_grad
    real_loss(layer.maps[:, :2], torch.ones(1, 2, 2, dtype=torch.long)).backward()
    assert (layer[0].weight.grad != 0).all()


# --- personalized affinity aggregation -------------------------------------------------------------------------------------


def test_affinity_by_hand():
    """D = 2, Q = 3 · 2 + 1 = 7, upsampled to both pixels of E = (5, 9). K = −E: relu(7 − 5) = 2 and relu(7 − 9) = 0;
    M = 4 · 2 − 3 = 5 and −3; Q · M = 35 and −21."""
    layer = AffinityAggregation(deep=1, skip=1)
    for convolution, weight, bias in ((layer.conv_q, 3.0, 1.0), (layer.conv_k, -1.0, 0.0), (layer.conv_m, 4.0, -3.0)):
        nn.init.constant_(convolution.weight, weight)
        nn.init.constant_(convolution.bias, bias)
    found = layer(torch.full((1, 1, 1, 1), 2.0), tensor([5.0, 9.0]).view(1, 1, 1, 2))
    assert found.flatten().tolist() == [35, -21]


@pytest.mark.parametrize(
    ("network", "levels", "widths"),
    [
        ("resnet18-fpn", ("p4", "p3", "p2"), ((256, 256), (256, 128), (256, 64))),
        ("unet", ("stages.0", "stages.1", "stages.2", "stages.3"), ((512, 256), (256, 128), (128, 64), (64, 32))),
    ],
)
def test_every_level_of_the_decoder_is_given_it_in_place_of_the_skip(network, levels, widths):
    """A level called with (D, E) is what its own forward makes of (D, Q · M), and not of (D, E)."""
    decoder = build(network, 3, 1, seed=0, layers={"virtual_classes": OPTIONS}).decoder.eval()
    assert sum(isinstance(module, AffinityAggregation) for module in decoder.modules()) == len(levels)
    for name, (deep, skip) in zip(levels, widths, strict=True):
        level, d, e = decoder.get_submodule(name), torch.rand(1, deep, 2, 2), torch.rand(1, skip, 4, 4)
        found = level(d, e)
        torch.testing.assert_close(found, level.forward(d, level.affinity(d, e)))
        assert not torch.allclose(found, level.forward(d, e))


# --- the plan: layers, rules, what is refused ------------------------------------------------------------------------------


def keys(*layers):
    """On the default network, in state_dict order."""
    kinds = ("weight", "bias")
    return tuple(f"decoder.{p}.affinity.conv_{layer}.{kind}" for p in ("p4", "p3", "p2") for layer in layers for kind in kinds)


@pytest.mark.parametrize(
    ("settings", "private"),
    [
        ({}, keys("q", "m")),
        ({"private": "none"}, ()),
        ({"private": "affinity_query"}, keys("q")),
        ({"private": "affinity_key,affinity_matrix"}, keys("k", "m")),
        ({"paa": "false"}, ()),
        ({"virtual": "0"}, keys("q", "m")),
    ],
)
def test_what_is_private(plan_for, settings, private):
    plan = plan_for(method="virtual_class", **settings)
    network = build_network(plan)
    partition = partition_of(plan, network)
    assert partition.private == private
    assert (VIRTUAL in partition.shared) == ("virtual" not in settings)
    assert ("decoder.p4.affinity.conv_k.weight" in network.state_dict()) == ("paa" not in settings)


@pytest.mark.parametrize(
    ("changes", "virtual", "nested"),
    [
        ({}, 4, True),
        ({"classes": ("disc", "cup"), "labels": "exclusive"}, 6, False),
        ({"virtual": 0.75}, 3, True),
        ({"virtual": 4.0}, 16, True),
        ({"virtual": 0.1}, 1, True),
        ({"virtual": 0.0, "sites": ()}, 0, True),
    ],
)
def test_as_many_virtual_classes_as_classes_times_sites(plan_for, changes, virtual, nested):
    """One foreground class and the background at two sites: 4; two and the background: 6. A tenth of 4 is rounded up to 1."""
    wanted = {"virtual": virtual, "temperature": 0.1, "nested": nested, "paa": True}
    assert plan_for(method="virtual_class", **changes).layers == {"virtual_classes": wanted}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": ()}, "export it with `feddp job --sites A,B`"),
        ({"network": "toy"}, "Toy has no segmentation head"),
        ({"network": "resunet"}, "PAA does not support the decoder of Unet"),
        ({"paa": False, "private": "affinity_query"}, "the role 'affinity_query' selects no tensor"),
        ({"temperature": 0}, "temperature=0.0 must be a number above 0"),
        ({"virtual": -1}, "virtual=-1.0 must be a number of at least 0"),
        ({"mask": "zeros"}, "mask='zeros' is not one of excluded, literal"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_what_cannot_be_is_refused(plan_for, changes, message):
    def partition():
        plan = plan_for(method="virtual_class", **changes)
        return partition_of(plan, build_network(plan))

    with pytest.raises(FedDPError, match=message):
        partition()


# --- a run -----------------------------------------------------------------------------------------------------------------


def test_virtual_kernels_are_frozen_at_every_site(plan_for, tiny_root, tmp_path):
    """Two rounds at two sites: bit for bit the plan's, in what travels and in what is kept. The real kernels have moved, and
    are the same at both sites after the average; the queries have moved apart."""
    plan = plan_for(method="virtual_class", start="last")
    start = build_network(plan).state_dict()
    sites = drive(plan, tiny_root, tmp_path).values()
    assert start[VIRTUAL].shape == (4, 128, 1, 1)
    for site in sites:
        assert site.copy()[VIRTUAL].equal(start[VIRTUAL])
        assert VIRTUAL in site.partition.shared
    one, two = (site.store.read("start")[0] for site in sites)
    assert one[VIRTUAL].equal(start[VIRTUAL])
    assert two[VIRTUAL].equal(start[VIRTUAL])
    real = "segmentation_head.0.weight"
    assert one[real].equal(two[real])
    assert not one[real].equal(start[real])
    assert not any(one[name].equal(two[name]) for name in keys("q", "m"))


@pytest.mark.parametrize("returned", [lambda kernels: kernels.half().float(), lambda kernels: kernels + 0.5])
def test_a_site_trains_with_its_own_virtual_kernels(open_site, returned):
    """Whatever the server sends in their place, rounded or noisy, what the site sends back and keeps is as without it."""
    sites = [open_site(at=at, method="virtual_class", start="last") for at in ("as sent", "changed")]
    gamma = sites[0].partition.split(sites[0].network.state_dict())[0]
    changed = gamma | {VIRTUAL: returned(gamma[VIRTUAL])}
    assert not changed[VIRTUAL].equal(gamma[VIRTUAL])
    wanted, found = (train(site, sent, 0)[0] for site, sent in zip(sites, (gamma, changed), strict=True))
    assert found[VIRTUAL].equal(gamma[VIRTUAL])
    assert all(found[name].equal(value) for name, value in wanted.items())
    adopt(sites[1], changed, 1)
    assert sites[1].store.read("start")[0][VIRTUAL].equal(gamma[VIRTUAL])


def test_what_is_constant_is_the_virtual_kernels(plan_for):
    """Clones of them; without virtual classes, and in any other method, nothing."""
    network = build_network(plan_for(method="virtual_class"))
    found = constants(network)
    network.segmentation_head[0].virtual.zero_()
    assert found.keys() == {VIRTUAL}
    assert found[VIRTUAL].any()
    assert constants(build_network(plan_for(method="virtual_class", virtual=0))) == {}
    assert constants(build_network(plan_for(method="fedlc"))) == {}
