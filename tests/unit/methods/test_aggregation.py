"""The server's arithmetic, against numbers worked out by hand."""

from itertools import permutations

import pytest
import torch
from torch import tensor

from feddp.errors import FedDPError
from feddp.methods.aggregation import Spec, average

EVEN = {"a": 1.0, "b": 1.0, "c": 1.0}


def test_the_uniform_mean():
    """(1 + 2 + 6)/3 = 3 and (−4 + 0 + 1)/3 = −1."""
    mean = average({"a": {"w": tensor([1.0, -4.0])}, "b": {"w": tensor([2.0, 0.0])}, "c": {"w": tensor([6.0, 1.0])}}, EVEN)
    assert mean["w"].tolist() == pytest.approx([3, -1], abs=1e-6)
    assert mean["w"].dtype == torch.float32


def test_the_mean_weighed_by_samples():
    """10 samples at 1 and 30 at 5: (10·1 + 30·5)/40 = 4, where the uniform mean is 3."""
    mean = average({"a": {"w": tensor([1.0])}, "b": {"w": tensor([5.0])}}, {"a": 10.0, "b": 30.0})
    assert mean["w"].item() == 4


@pytest.mark.parametrize(("counts", "mean"), [((3, 4, 6), 4), ((5, 6, 6), 6)])
def test_counters_are_averaged_and_rounded(counts, mean):
    """13/3 = 4.33 gives 4; 17/3 = 5.67 gives 6, where cutting off would give 5."""
    result = average({site: {"n": tensor(count)} for site, count in zip(EVEN, counts, strict=True)}, EVEN)["n"]
    assert result.item() == mean
    assert result.dtype == torch.int64


def test_the_order_of_arrival_does_not_change_a_bit():
    """2^60, 1, −2^60 and 0 with weights 1/4, in alphabetical order: 2^58 + 1/4 is 2^58 in float64, so the sum is 0.

    Any order in which 1 comes first or last gives another sum: (2^58 − 2^58) + 1/4 = 1/4.
    """
    values = {"a": 2.0**60, "b": 1.0, "c": -(2.0**60), "d": 0.0}
    for order in permutations(values):
        contributions = {site: {"w": tensor([values[site]])} for site in order}
        assert average(contributions, dict.fromkeys(reversed(order), 1.0))["w"].item() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("sites", ["a", "ab"])
def test_the_inputs_stay_as_they_are(dtype, sites):
    given = {site: {"w": tensor([8, 4], dtype=dtype) * (i + 1)} for i, site in enumerate(sites)}
    before = {site: part["w"].clone() for site, part in given.items()}
    mean = average(given, dict.fromkeys(sites, 2.0))["w"]
    mean.zero_()
    for site in sites:
        assert given[site]["w"].equal(before[site])


@pytest.mark.parametrize("sites", [2, 3, 7])
def test_equal_tensors_average_to_themselves(sites):
    """As virtual classes' frozen kernels must: w/3 three times is w to about 1e-16 in float64, and float32 has 1e-7."""
    kernels = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    given = {f"site-{i}": {"virtual": kernels.clone()} for i in range(sites)}
    for weights in (dict.fromkeys(given, 1.0), {site: 5.0 + 7 * i for i, site in enumerate(given)}):
        assert average(given, weights)["virtual"].equal(kernels)


def test_half_precision_is_summed_in_full():
    """256 + 1 + 1 + ... (eight ones) = 264, /9 = 29.33, in bfloat16 29.375; summed in bfloat16, 256 + 1 stays 256."""
    sites = "abcdefghi"
    contributions = {s: {"w": tensor([256.0 if s == "a" else 1.0], dtype=torch.bfloat16)} for s in sites}
    mean = average(contributions, dict.fromkeys(sites, 1.0))["w"]
    assert mean.dtype == torch.bfloat16
    assert mean.item() == 29.375


def test_no_contribution_is_an_error():
    with pytest.raises(FedDPError, match="no contribution"):
        average({}, {})


@pytest.mark.parametrize("other", [{}, {"v": tensor(1.0)}, {"w": tensor(1.0), "v": tensor(1.0)}])
def test_differing_names_are_an_error(other):
    with pytest.raises(FedDPError, match="site b"):
        average({"a": {"w": tensor(1.0)}, "b": other}, {"a": 1.0, "b": 1.0})


STATE = {"w": torch.ones(2, 3), "n": tensor(3), "h": torch.ones(4, dtype=torch.bfloat16), "private": torch.ones(9)}
SPEC = Spec.of(STATE, ("w", "n", "h"))
GOOD = {name: STATE[name] for name in ("h", "n", "w")}


def test_a_spec_takes_what_it_expects_in_any_order():
    SPEC.check("site-1", GOOD)


def test_bytes():
    """Six of 4 bytes, one of 8, four of 2: 24 + 8 + 8 = 40."""
    assert SPEC.nbytes == 40


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (without("w"), "w is missing"),
        (GOOD | {"private": STATE["private"]}, "private is not expected"),
        (GOOD | {"w": torch.ones(3, 2)}, r"w is \(3, 2\) torch.float32, expected \(2, 3\) torch.float32"),
        (GOOD | {"n": torch.ones(1, dtype=torch.int64)}, r"n is \(1,\) torch.int64, expected \(\) torch.int64"),
        (GOOD | {"w": torch.ones(2, 3).double()}, r"w is \(2, 3\) torch.float64"),
        (GOOD | {"n": tensor(3.0)}, r"n is \(\) torch.float32"),
        (GOOD | {"w": tensor([[0, 0, 0], [0, 0, float("nan")]])}, "w holds values that are not finite"),
        (GOOD | {"w": tensor([[0, 0, 0], [0, float("inf"), 0]])}, "w holds values that are not finite"),
        (GOOD | {"h": tensor([0, -float("inf"), 0, 0]).bfloat16()}, "h holds values that are not finite"),
        (GOOD | {"w": [[1.0] * 3] * 2}, "w is a list, not a tensor"),
        (GOOD | {"n": None}, "n is a NoneType, not a tensor"),
        ({}, "3 wrong tensor names: h is missing; n is missing; w is missing"),
    ],
)
def test_a_spec_refuses_anything_else_and_names_site_and_tensor(sent, message):
    with pytest.raises(FedDPError, match=f"site site-1: .*{message}|site site-1: {message}"):
        SPEC.check("site-1", sent)
