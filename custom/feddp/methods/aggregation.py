"""The server's arithmetic: check what a site sent, and combine the contributions in a fixed order.

Source of the robust rules, the coordinate-wise median and trimmed mean: (Yin et al., ICML 2018, Definitions 1 and 2).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from feddp.domains import Domain
from feddp.errors import ContributionError
from feddp.methods.base import LEAST, MEDIAN, TRIMMED
from feddp.partition import Tensors
from feddp.reading import short


@dataclass(frozen=True)
class Spec:
    """The expected tensors: {name: (shape, dtype)}, and for those in `domains` the values that they may hold."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    domains: Mapping[str, Domain] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Tensor], names: tuple[str, ...], domains: Mapping[str, Domain] | None = None) -> "Spec":
        return cls({name: (state[name].shape, state[name].dtype) for name in names}, domains or {})

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors, without the overhead of the transport."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    @property
    def halved(self) -> "Spec":
        """Returns the spec of the same tensors in half precision."""
        return Spec({n: (s, torch.float16 if d == torch.float32 else d) for n, (s, d) in self.tensors.items()}, self.domains)

    def check(self, site: str, tensors: Mapping[str, Tensor]) -> None:
        """Checks that `tensors` are exactly these, with finite values in their domains.

        Raises:
            ContributionError: it does not; names the site, the tensor and the fault.
        """
        missing = sorted(self.tensors.keys() - tensors.keys())
        extra = sorted(tensors.keys() - self.tensors.keys(), key=str)  # a site may have sent names that are not texts
        if missing or extra:
            wrong = [f"{name} is missing" for name in missing] + [f"{short(str(name))} is not expected" for name in extra]
            raise ContributionError(f"site {site}: {len(wrong)} wrong tensor names: {'; '.join(wrong[:3])}")
        for name, (shape, dtype) in self.tensors.items():
            value = tensors[name]
            if not isinstance(value, Tensor):
                raise ContributionError(f"site {site}: {name} is a {type(value).__name__}, not a tensor")
            if value.shape != shape or value.dtype != dtype:
                got, want = f"{tuple(value.shape)} {value.dtype}", f"{tuple(shape)} {dtype}"
                raise ContributionError(f"site {site}: {name} is {got}, expected {want}")
            if value.layout != torch.strided or value.is_meta:
                raise ContributionError(f"site {site}: {name} is not a plain tensor with values")
            if not value.numel():
                continue
            # nan if a value is nan; one pass, and the fastest of those that see every value
            low, high = (end.item() for end in value.aminmax())
            if not math.isfinite(low) or not math.isfinite(high):
                raise ContributionError(f"site {site}: {name} holds values that are not finite")
            if (domain := self.domains.get(name)) and not domain.holds(low, high):
                beyond = low if low < domain.least else high
                raise ContributionError(f"site {site}: {name} holds {beyond:g}, but {domain}")


def average(contributions: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]) -> Tensors:
    """Returns Σ_k w_k γ_k / Σ_k w_k, summed in float64 in the sites' alphabetical order, in the dtypes of the tensors.

    Because of this order, the bits do not depend on the order of arrival. Integer counters (`num_batches_tracked` of batch
    normalisation) are averaged too, and rounded. The inputs do not change.

    Raises:
        ContributionError: there is no contribution, or the sites' tensor names differ.
    """
    sites, names = _alike(contributions)
    total = sum(weights[site] for site in sites)
    result = {}
    for name in names:
        first = contributions[sites[0]][name]
        mean = first.to(torch.float64, copy=True).mul_(weights[sites[0]] / total)
        for site in sites[1:]:
            mean.add_(contributions[site][name], alpha=weights[site] / total)
        result[name] = _as(first, mean)
    return result


def towards(previous: Mapping[str, Tensor], mean: Mapping[str, Tensor], step: float) -> Tensors:
    """Returns (1 − step) · previous + step · mean of every tensor; a step above 1 goes beyond the mean."""
    return {name: value.lerp(mean[name], step) for name, value in previous.items()}


def combine(rule: str, contributions: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]) -> Tensors:
    """Returns the contributions combined by `rule`, one of `feddp.methods.base.AGGREGATIONS`; only the means use `weights`.

    Raises:
        ContributionError: as `average` and `trimmed_mean`.
    """
    if rule == MEDIAN:
        return trimmed_mean(contributions, (len(contributions) - 1) // 2)
    return trimmed_mean(contributions, 1) if rule == TRIMMED else average(contributions, weights)


def trimmed_mean(contributions: Mapping[str, Mapping[str, Tensor]], dropped: int) -> Tensors:
    """Returns, for every coordinate, the mean over the sites without the `dropped` lowest and the `dropped` highest values.

    Of m sites, dropping (m − 1) // 2 on each side leaves one or two values: the coordinate-wise median. Dropping one is the
    trimmed mean with β = 1/m. If at most `dropped` sites are malicious, each result lies between two honest values. Types and
    counters are treated as in `average`; no order of arrival changes a bit.

    Raises:
        ContributionError: there are fewer than three contributions of tensors, or the sites' tensor names differ.
    """
    sites, names = _alike(contributions)
    _require_several(sites, names)
    result = {}
    for name in names:
        ordered = torch.stack([contributions[site][name] for site in sites]).sort(dim=0).values
        mean = ordered[dropped : len(sites) - dropped].to(torch.float64).mean(dim=0)
        result[name] = _as(ordered, mean)
    return result


def outliers(
    contributions: Mapping[str, Mapping[str, Tensor]], shared: Mapping[str, Tensor], factor: float
) -> dict[str, tuple[float, float]]:
    """Returns {site: (‖γ_k − γ‖, the largest accepted norm)} of the norms above `factor` times their median.

    The norm is over all floating-point tensors together, in float64; integer counters are left out.

    Raises:
        ContributionError: there are fewer than three contributions of tensors.
    """
    _require_several(sorted(contributions), shared)
    norms = {site: _distance(tensors, shared) for site, tensors in sorted(contributions.items())}
    most = factor * median(norms.values())
    return {site: (norm, most) for site, norm in norms.items() if norm > most}


def _distance(tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> float:
    changes = (value.to(torch.float64) - shared[name] for name, value in tensors.items() if value.is_floating_point())
    return math.hypot(*(torch.linalg.vector_norm(change).item() for change in changes))


def _as(like: Tensor, mean: Tensor) -> Tensor:
    """Converts a float64 mean to the type of `like`; integers are rounded."""
    return (mean if like.is_floating_point() else mean.round()).to(like.dtype)


def _alike(contributions: Mapping[str, Mapping[str, Tensor]]) -> tuple[list[str], list[str]]:
    """Returns the sites in alphabetical order and the names of their tensors; raises as `average`."""
    if not contributions:
        raise ContributionError("there is no contribution to average")
    sites = sorted(contributions)
    names = contributions[sites[0]].keys()
    for site in sites:
        if contributions[site].keys() != names:
            raise ContributionError(f"site {site}: its tensor names differ from those of site {sites[0]}")
    return sites, list(names)


def _require_several(sites: list[str], names: Collection[str]) -> None:
    if names and len(sites) < LEAST:  # where nothing is shared, nothing is combined
        raise ContributionError(
            f"{len(sites)} contributions ({', '.join(sites)}), but aggregation=median, aggregation=trimmed and norm_factor need"
            f" {LEAST}; start the other sites again, or begin a run with aggregation=uniform and norm_factor=0"
        )
