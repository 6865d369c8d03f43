"""The server's arithmetic, against numbers worked out by hand."""

from itertools import permutations

import pytest
import torch
from torch import tensor

from feddp.errors import FedDPError
from feddp.methods.aggregation import Spec, average, combine, outliers, trimmed_mean

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


def numbered(*values):
    return {site: {"w": tensor([value])} for site, value in zip("abcdefg", values, strict=False)}


@pytest.mark.parametrize(
    ("rule", "values", "result"),
    [
        ("median", (1.0, 7.0, 2.0), 2.0),
        ("median", (1.0, 7.0, 2.0, 3.0), 2.5),
        ("median", (1.0, 7.0, 2.0, 3.0, -9.0), 2.0),
        ("trimmed", (1.0, 7.0, 2.0), 2.0),
        ("trimmed", (1.0, 7.0, 2.0, 3.0), 2.5),
        ("trimmed", (1.0, 7.0, 2.0, 3.0, -9.0), 2.0),
        ("trimmed", (1.0, 7.0, 2.0, 3.0, -9.0, 6.0), 3.0),
        ("median", (1.0, 7.0, 2.0, 3.0, -9.0, 6.0), 2.5),
        ("uniform", (1.0, 7.0, 2.0, 3.0, -9.0, 6.0), 5 / 3),
    ],
)
def test_median_and_trimmed_mean(rule, values, result):
    """1, 2, 7: the middle is 2. 1, 2, 3, 7: (2 + 3)/2, for both rules. −9, 1, 2, 3, 7: median 2, trimmed (1 + 2 + 3)/3 = 2.

    −9, 1, 2, 3, 6, 7: median (2 + 3)/2 = 2.5, trimmed (1 + 2 + 3 + 6)/4 = 3, mean 10/6.
    """
    contributions = numbered(*values)
    combined = combine(rule, contributions, dict.fromkeys(contributions, 1.0))["w"]
    assert combined.item() == pytest.approx(result)
    assert combined.dtype == torch.float32


def test_a_robust_rule_takes_each_coordinate_by_itself():
    """Columns (1, 5, 2) and (30, 10, 20): medians 2 and 20, of two different sites."""
    given = {"a": {"w": tensor([1.0, 30.0])}, "b": {"w": tensor([5.0, 10.0])}, "c": {"w": tensor([2.0, 20.0])}}
    assert combine("median", given, EVEN)["w"].tolist() == [2, 20]


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_weights_do_not_change_a_robust_rule(rule):
    given = numbered(1.0, 7.0, 2.0)
    assert combine(rule, given, {"a": 100.0, "b": 1.0, "c": 1.0})["w"].item() == 2


@pytest.mark.parametrize(
    ("rule", "counts", "result"),
    [("median", (3, 900, 4), 4), ("trimmed", (3, 900, 4), 4), ("median", (3, 4, 6, 7), 5), ("median", (3, 4, 5, 7), 4)],
)
def test_counters_keep_their_type_in_a_robust_rule(rule, counts, result):
    """The middle of 3, 4, 900 is 4; (4 + 6)/2 = 5; (4 + 5)/2 = 4.5 is rounded to the even 4."""
    given = {site: {"n": tensor(count)} for site, count in zip("abcd", counts, strict=False)}
    found = combine(rule, given, dict.fromkeys(given, 1.0))["n"]
    assert (found.item(), found.dtype, found.shape) == (result, torch.int64, ())


@pytest.mark.parametrize("rule", ["median", "trimmed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_robust_rules_leave_inputs_and_order_alone(rule, dtype):
    """Any order of arrival gives the same bits, and writing into the result changes no contribution."""
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    found = []
    for order in permutations(range(4)):
        given = {f"site-{k}": {"w": rows[k].clone()} for k in order}
        found.append(combine(rule, given, {})["w"])
        found[-1].add_(0)
        assert all(given[f"site-{k}"]["w"].equal(rows[k]) for k in order)
    assert found[0].dtype == dtype
    assert all(other.equal(found[0]) for other in found)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_equal_tensors_stay_themselves_under_a_robust_rule(rule):
    kernels = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert combine(rule, {site: {"v": kernels.clone()} for site in "abcde"}, {})["v"].equal(kernels)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_two_contributions_have_no_robust_combination(rule):
    with pytest.raises(FedDPError, match=r"2 contributions \(a, b\), but .* need 3"):
        combine(rule, numbered(1.0, 2.0), {})
    with pytest.raises(FedDPError, match="no contribution"):
        combine(rule, {}, {})
    with pytest.raises(FedDPError, match="site b: its tensor names differ"):
        trimmed_mean({"a": {"w": tensor(1.0)}, "b": {}, "c": {"w": tensor(1.0)}}, 1)


def test_of_no_tensors_two_contributions_are_enough():
    """Local Train shares nothing, so nothing is combined, and nobody's change is too large."""
    nothing = {"a": {}, "b": {}}
    assert combine("median", nothing, {}) == combine("trimmed", nothing, {}) == {}
    assert outliers(nothing, {}, 3.0) == {}


def test_outliers_by_their_norm():
    """γ = (1, 1) and (2); the changes are (3, 4) and 0: norm 5; (0, 0) and 6: 6; (8, 0) and 15: 17. The median is 6.

    At a factor of 2, 17 > 12 and site c is named with both; at 3, 17 < 18 and nobody is. The counter n does not count.
    """
    shared = {"w": tensor([1.0, 1.0]), "v": tensor([2.0]), "n": tensor(0)}

    def sent(w, v):
        return {"w": shared["w"] + tensor(w), "v": shared["v"] + v, "n": tensor(10**6)}

    given = {"a": sent([3.0, 4.0], 0.0), "b": sent([0.0, 0.0], 6.0), "c": sent([8.0, 0.0], 15.0)}
    assert outliers(given, shared, 2.0) == {"c": (17.0, 12.0)}
    assert outliers(given, shared, 3.0) == {}
    with pytest.raises(FedDPError, match="need 3"):
        outliers({site: given[site] for site in "ab"}, shared, 2.0)


def test_no_contribution_is_an_outlier_where_none_changed():
    shared = {"w": tensor([1.0])}
    assert outliers(dict.fromkeys("abc", shared), shared, 1.0) == {}


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
        (GOOD | dict.fromkeys((1, "zz", b"z"), STATE["private"]), "3 wrong tensor names: 1 is not expected"),
        (GOOD | {"w": torch.ones(3, 2)}, r"w is \(3, 2\) torch.float32, expected \(2, 3\) torch.float32"),
        (GOOD | {"n": torch.ones(1, dtype=torch.int64)}, r"n is \(1,\) torch.int64, expected \(\) torch.int64"),
        (GOOD | {"w": torch.ones(2, 3).double()}, r"w is \(2, 3\) torch.float64"),
        (GOOD | {"n": tensor(3.0)}, r"n is \(\) torch.float32"),
        (GOOD | {"w": tensor([[0, 0, 0], [0, 0, float("nan")]])}, "w holds values that are not finite"),
        (GOOD | {"w": tensor([[0, 0, 0], [0, float("inf"), 0]])}, "w holds values that are not finite"),
        (GOOD | {"h": tensor([0, -float("inf"), 0, 0]).bfloat16()}, "h holds values that are not finite"),
        (GOOD | {"w": torch.ones(2, 3).to_sparse()}, "w is not a plain tensor"),
        (GOOD | {"w": torch.ones(2, 3, device="meta")}, "w is not a plain tensor"),
        (GOOD | {"w": [[1.0] * 3] * 2}, "w is a list, not a tensor"),
        (GOOD | {"n": None}, "n is a NoneType, not a tensor"),
        ({}, "3 wrong tensor names: h is missing; n is missing; w is missing"),
    ],
)
def test_a_spec_refuses_anything_else_and_names_site_and_tensor(sent, message):
    with pytest.raises(FedDPError, match=f"site site-1: .*{message}|site site-1: {message}"):
        SPEC.check("site-1", sent)
