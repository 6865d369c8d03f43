"""The values that a tensor of a network, or of an exchange, may hold: one table, from a tensor's module type and its role.

`feddp.methods.aggregation.Spec` checks them where a tensor leaves a site, where it reaches the server, and where it arrives at
a site. The bounds are wide: they refuse values that mean nothing, not values that are wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

HALF = torch.finfo(torch.float16).max  # 65504
WHOLE = 2**53
ROUNDING = 1.01


@dataclass(frozen=True)
class Domain:
    """The values that a tensor may hold: `what` it is, for messages, and the least and the largest value."""

    what: str
    least: float
    most: float

    def holds(self, low: float, high: float) -> bool:
        """Whether all values from `low` to `high` are in the domain; not if one of them is no number."""
        return self.least <= low and high <= self.most

    def __str__(self) -> str:
        return f"{self.what} is from {self.least:g} to {self.most:g}"


# ±65504 is the range of float16. A plan may send the shared tensors in half precision, and a site refuses to send there what
# float16 cannot hold (`feddp.stages.precision.narrow`). So a network outside this range is useless in half of the settings, and
# the range is wide: the largest weight that a network here draws at its start is 2.3, and a step of AdamW is about the rate.
WEIGHT = Domain("a weight", -HALF, HALF)
MEAN = Domain("a running mean", -HALF, HALF)
# a mean of squares cannot be negative; 0 is the variance of a channel that is constant, or that float16 rounds to 0
VARIANCE = Domain("a running variance", 0, HALF)
# the server averages whole numbers in float64, which holds them exactly up to 2^53 (`feddp.methods.aggregation.average`)
COUNTER = Domain("a counter", 0, WHOLE)
BUFFER = Domain("a buffer", -HALF, HALF)  # of our own layers: kernels, heads and marks of a site, which are weights too

# buffers by the type of their module; _NormBase: batch and instance normalisations
BUFFERS: Mapping[type[nn.Module], Mapping[str, Domain]] = {
    _NormBase: {"running_mean": MEAN, "running_var": VARIANCE, "num_batches_tracked": COUNTER},
}


def domains(network: nn.Module) -> dict[str, Domain]:
    """Returns {name: domain} of all tensors in the network's state_dict. A buffer that BUFFERS does not have is a BUFFER."""
    weights = dict(network.named_parameters(remove_duplicate=False))  # a module registered twice has two names
    found = {name: WEIGHT if name in weights else BUFFER for name in network.state_dict()}
    for path, module in network.named_modules(remove_duplicate=False):
        for kind, buffers in BUFFERS.items():
            named = {f"{path}.{name}".lstrip("."): domain for name, domain in buffers.items() if isinstance(module, kind)}
            found |= {name: domain for name, domain in named.items() if name in found}
    return found


def amplitudes(size: int) -> Domain:
    """Returns the domain of the amplitude spectra of inputs of `size` x `size` pixels (`feddp.training.spectra.windows`).

    The transform is not normalised: |F(u)| = |Σ x e^(−iuw)| ≤ Σ |x| = N · mean |x| of N = size² pixels. With `normalise=scale`
    every |x| is at most 1. With `zscore` the mean of x² is 1 (0 without contrast), and mean |x| ≤ √(mean x²) (Cauchy–Schwarz).
    So N bounds both, and a mean over images too. One percent more covers float32 and a site's rounding.
    """
    return Domain("an amplitude", 0, ROUNDING * size**2)
