"""How far honest rounds can move the shared tensors: what a site accepts as γ, and what the server accepts as a contribution.

Whoever chooses γ can otherwise make the network a trap that copies training images into its gradients, and a site whose
contribution may lie anywhere can do the same through an honest server: with three sites, 3C − 2γ makes their mean C.

A step of AdamW (Loshchilov and Hutter, ICLR 2019, Algorithm 2) moves a parameter p by lr · (|m̂| / (√v̂ + ε) + λ |p|), where λ
is the weight decay. |m̂| / √v̂ is 1 for equal gradients, less for gradients that change their sign, and at most
(1 − β₁) / √(1 − β₂) = 3.2 for a gradient after zeros (Kingma and Ba, ICLR 2015, section 2.1). So n steps stay within 4 lr n.
Only gradients that grow by a tenth in every step could move a parameter further, by 7.3 lr in each (Cauchy and Schwarz); the
clipping ends that. A mean, a median or a trimmed mean of contributions is no further away than the furthest contribution.

Running statistics have no such bound: a site cannot know the batches of another one. They may not leave the scale of the ones
before: a standard deviation may grow to `statistics` times the larger of the one before and 1, its first value, and a mean may
move by as many standard deviations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from feddp.data.loading import in_an_epoch
from feddp.limits import MOVEMENT, STATISTICS
from feddp.partition import constants
from feddp.plan.resolve import build_method
from feddp.plan.schema import Plan

# the largest believed ratio of a site's number of images to the sites' median: one number sets the bound of all
SIZES = 100
# of rounding: twice float16's, on the way to the server and back; float32's sums; and other processors' draws of γ⁰
_HALF, _SINGLE, _DRAWN, _LEAST = 2**-10, 2**-20, 2**-13, 2**-20


@dataclass(frozen=True)
class Movement:
    """The bounds of a policy: `parameters` in units of lr · steps, `statistics` in standard deviations."""

    parameters: float = MOVEMENT
    statistics: float = STATISTICS


@dataclass(frozen=True)
class Furthest:
    """The tensor that moved furthest: by how much, and how many times its bound that is."""

    name: str
    moved: float
    share: float

    def __str__(self) -> str:
        return f"{self.name} moved by {self.moved:.3g}, {self.share:.3g} times as far as honest training can"


class Reach:
    """How far one phase of a round can move a plan's shared tensors.

    Args:
        network: the plan's, for the kinds of its tensors.
        samples: the number of training images of the site with most.
    """

    def __init__(self, plan: Plan, network: nn.Module, samples: int, movement: Movement = Movement()):
        training = plan.training
        batches = -(-in_an_epoch(samples, training.batch) // training.batch)
        self.steps = build_method(plan).passes(plan) * batches
        self._movement, self._rate, self._decay = movement, training.lr, training.weight_decay
        self._rounding = _HALF if plan.federation.half else _SINGLE
        self._fixed = constants(network).keys()
        norms = [path for path, each in network.named_modules() if isinstance(getattr(each, "running_var", None), Tensor)]
        self._means = {f"{path}.running_mean": f"{path}.running_var" for path in norms}
        self._variances = set(self._means.values())

    def beyond(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], times: int = 1) -> Furthest | None:
        """Returns the tensor that is furthest beyond its bound; None if none is. The arguments are as for `furthest`."""
        found = self.furthest(before, after, times)
        return None if found is None or found.share <= 1 else found

    def furthest(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], times: int = 1) -> Furthest | None:
        """Returns the tensor that moved furthest in units of its bound; None if there is no tensor.

        Args:
            before, after: shared tensors. Constant buffers are not compared: no site uses those that it receives.
            times: the number of phases between them; 0 for initial tensors: `before` are those that this machine has computed.
        """
        worst: Furthest | None = None
        for name in after.keys() - self._fixed:
            moved = (_plain(after[name]) - _plain(before[name])).abs_().flatten()
            if not moved.numel():
                continue
            shares = (moved / self._most(name, before, times).flatten()).nan_to_num_(nan=math.inf)
            place = int(shares.argmax())
            if worst is None or shares[place] > worst.share:
                worst = Furthest(name, moved[place].item(), shares[place].item())
        return worst

    def _most(self, name: str, before: Mapping[str, Tensor], times: int) -> Tensor:
        """Returns how far each value of a tensor may be from the one before."""
        old, free = _plain(before[name]).abs(), self._movement
        if name in self._variances:
            most = free.statistics**2 * times * old.clamp(min=1)
        elif name in self._means:
            most = free.statistics * times * _plain(before[self._means[name]]).clamp(min=1).sqrt()
        elif before[name].is_floating_point():
            most = self._rate * self.steps * times * (free.parameters + self._decay * old)
        else:
            most = torch.full_like(old, free.parameters * self.steps * times)  # a counter of batches
        rounding = self._rounding if times else max(_DRAWN, self._rounding)
        return most * (1 + rounding) + rounding * old + _LEAST


def _plain(value: Tensor) -> Tensor:
    return value.cpu() if value.is_floating_point() else value.cpu().double()


def most_samples(samples: Mapping[str, float]) -> int:
    """Returns the largest number of training images among sites, which sets the bound for all of them.

    A number above SIZES times the sites' median counts as so many times it: otherwise one false number would end all bounds.
    """
    return int(min(max(samples.values()), SIZES * median(samples.values())))
