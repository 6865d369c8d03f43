"""The server's arithmetic: check what a site sent, and average it in a fixed order."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from feddp.errors import ContributionError
from feddp.partition import Tensors


@dataclass(frozen=True)
class Spec:
    """The expected tensors: {name: (shape, dtype)}."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]]

    @classmethod
    def of(cls, state: Mapping[str, Tensor], names: tuple[str, ...]) -> "Spec":
        return cls({name: (state[name].shape, state[name].dtype) for name in names})

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors, without the overhead of the transport."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    @property
    def halved(self) -> "Spec":
        """Returns the spec of the same tensors in half precision."""
        return Spec({n: (s, torch.float16 if d == torch.float32 else d) for n, (s, d) in self.tensors.items()})

    def check(self, site: str, tensors: Mapping[str, Tensor]) -> None:
        """Checks that `state` has exactly these tensors, with finite values.

        Raises:
            ContributionError: it does not; names the site, the tensor and the fault.
        """
        missing = sorted(self.tensors.keys() - tensors.keys())
        extra = sorted(tensors.keys() - self.tensors.keys())
        if missing or extra:
            wrong = [f"{name} is missing" for name in missing] + [f"{name} is not expected" for name in extra]
            raise ContributionError(f"site {site}: {len(wrong)} wrong tensor names: {'; '.join(wrong[:3])}")
        for name, (shape, dtype) in self.tensors.items():
            value = tensors[name]
            if not isinstance(value, Tensor):
                raise ContributionError(f"site {site}: {name} is a {type(value).__name__}, not a tensor")
            if value.shape != shape or value.dtype != dtype:
                got, want = f"{tuple(value.shape)} {value.dtype}", f"{tuple(shape)} {dtype}"
                raise ContributionError(f"site {site}: {name} is {got}, expected {want}")
            # a float64 sum of finite values is finite, and is ten times faster than a check of each value
            if not torch.isfinite(value.sum(dtype=torch.float64)):
                raise ContributionError(f"site {site}: {name} holds values that are not finite")


def average(contributions: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]) -> Tensors:
    """Returns Σ_k w_k γ_k / Σ_k w_k, summed in float64 in the sites' alphabetical order, in the dtypes of the tensors.

    Because of this order, the bits do not depend on the order of arrival. Integer counters (`num_batches_tracked` of batch
    normalisation) are averaged too, and rounded. The inputs do not change.

    Raises:
        ContributionError: there is no contribution, or the sites' tensor names differ.
    """
    if not contributions:
        raise ContributionError("there is no contribution to average")
    sites = sorted(contributions)
    names = contributions[sites[0]].keys()
    for site in sites:
        if contributions[site].keys() != names:
            raise ContributionError(f"site {site}: its tensor names differ from those of site {sites[0]}")
    total = sum(weights[site] for site in sites)
    result = {}
    for name in names:
        first = contributions[sites[0]][name]
        mean = first.to(torch.float64, copy=True).mul_(weights[sites[0]] / total)
        for site in sites[1:]:
            mean.add_(contributions[site][name], alpha=weights[site] / total)
        result[name] = (mean if first.is_floating_point() else mean.round()).to(first.dtype)
    return result
