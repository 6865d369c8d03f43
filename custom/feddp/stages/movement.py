"""How far honest rounds can move the shared tensors: what a site accepts as γ, and what the server accepts as a contribution.

Whoever chooses γ can otherwise make the network a trap that copies training images into its gradients, and a site whose
contribution may lie anywhere can do the same through an honest server: with three sites, 3C − 2γ makes their mean C.

A step of AdamW (Loshchilov and Hutter, ICLR 2019, Algorithm 2) moves a parameter p by lr · (|m̂| / (√v̂ + ε) + λ |p|), where λ
is the weight decay. |m̂| / √v̂ is 1 for equal gradients and less for gradients that change their sign. After many zeros, as of
a unit that was dead, equal gradients give (1 − β₁^k) / √(1 − β₂^k) in step k: 3.2 in the first (Kingma and Ba, ICLR 2015,
section 2.1), up to 6.6 later, and 5.5 in the mean of ten. No gradients give more than
(1 − β₁) / √((1 − β₂) (1 − β₁² / β₂)) = 7.27 (Cauchy and Schwarz, for the two sums of past gradients). So n steps stay within
`movement` · lr · n with 7.3, its default. A mean, a median or a trimmed mean is no further away than the furthest contribution.

Running statistics have no such bound: a site cannot know the batches of another one. They may not leave the scale of the ones
before: a standard deviation may grow to `statistics` times the larger of the one before and 1, its first value, and a mean may
move by as many standard deviations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, median_low

from torch import Tensor

from feddp.data.loading import steps_in_an_epoch
from feddp.domains import MEAN, VARIANCE
from feddp.methods.base import UNIFORM
from feddp.partition import constants
from feddp.plan.resolve import build_method
from feddp.plan.schema import Plan
from feddp.stages.tensors import Expected

# a site's number of images counts as at most so many times the sites' median, and at a site as so many times its own: one false
# number would end all bounds, and two of three or four are a median. An honest round of many steps, a sixth of the bound, still
# fits at a site with a hundred times the others' images
SIZES = 18
# once in LOOKS steps a site compares γ with the first tensors, and warns of more than DRIFT of the bound of all steps. AdamW
# moves by lr in its first step and after equal gradients, a seventh of the bound, and honest runs stayed near it
# (docs/results/movement.md); one step at the whole bound and seven at a seventh give 1/4. A server that goes straight to a
# trap gives 1. One that goes at less than DRIFT of that speed on the average since the first round is not seen: it needs three
# times the rounds, or begins later
LOOKS, DRIFT = 8, 0.3
DRIFTED = "drifted"  # the event in the site's record
_FORWARDS = 8  # a counter of batches counts at most so many in a step: FedDG's two, and the room that parameters have
# of rounding: twice float16's, on the way to the server and back; float32's sums; and other processors' draws of γ⁰
_HALF, _SINGLE, _DRAWN, _LEAST = 2**-10, 2**-20, 2**-13, 2**-20


@dataclass(frozen=True)
class Furthest:
    """The tensor that moved furthest: by how much, and how many times its bound that is."""

    name: str
    moved: float
    share: float

    def __str__(self) -> str:
        return f"{self.name} moved by {self.moved:.3g}, {self.share:.3g} times as far as the job allows"


class Reach:
    """How far one phase of a round can move a plan's shared tensors.

    Args:
        expected: the plan's tensors, for their kinds.
        steps: of AdamW in one epoch: at a site (`steps_at`) for its contribution, or of the combination (`steps_of`), which
            may be the server's own step further than the furthest contribution.
    """

    def __init__(self, expected: Expected, steps: float):
        self._plan, self.kinds, plan = expected.plan, expected.domains, expected.plan
        self._steps = build_method(plan).passes(plan) * steps
        self._rounding = _HALF if plan.federation.half else _SINGLE
        self._fixed = constants(expected.network).keys()

    def beyond(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], times: int = 1) -> Furthest | None:
        """Returns the tensor that is furthest beyond its bound; None if none is. The arguments are as for `furthest`."""
        found = self.furthest(before, after, times)
        return None if found is None or found.share <= 1 else found

    def drifted(self, first: Mapping[str, Tensor], after: Mapping[str, Tensor], step: int, since: int) -> Furthest | None:
        """Returns the tensor that is furthest from the first ones if honest training was never seen to go so far; None if none
        is, or if the site has looked at most LOOKS steps ago.

        Args:
            first: the tensors before step 0; `after` those before `step`.
            since: the steps since the site's last one. They count, since who sends the tensors also chooses when.
        """
        if step // LOOKS == (step - since) // LOOKS:
            return None
        # without counters of batches, which lead to no trap
        found = self.furthest(first, {name: value for name, value in after.items() if value.is_floating_point()}, step)
        return None if found is None or found.share <= DRIFT else found

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
            shares = moved / self._most(name, before, times).flatten()
            place = int(shares.argmax())  # NaN counts as the largest
            share = shares[place].nan_to_num(nan=math.inf).item()
            if worst is None or share > worst.share:
                worst = Furthest(name, moved[place].item(), share)
        return worst

    def _most(self, name: str, before: Mapping[str, Tensor], times: int) -> Tensor:
        """Returns how far each value may be from the one before: constant + factor · scale, and what rounding adds."""
        old, free, training = _plain(before[name]).abs(), self._plan.federation, self._plan.training
        rounding = self._rounding if times else max(_DRAWN, self._rounding)
        scale, constant, factor = old, 0.0, 0.0
        if self.kinds[name] is VARIANCE:
            scale, factor = old.clamp(min=1), free.statistics**2 * times
        elif self.kinds[name] is MEAN:
            variance = before[f"{name.rpartition('.')[0]}.running_var".lstrip(".")]
            scale, factor = _plain(variance).clamp(min=1).sqrt(), free.statistics * times
        elif before[name].is_floating_point():  # a parameter, or a buffer of a layer of ours, which is a weight too
            constant = training.lr * self._steps * times * free.movement
            factor = training.lr * self._steps * times * training.weight_decay
        else:
            constant = _FORWARDS * self._steps * times
        most = scale * (factor * (1 + rounding)) + (constant * (1 + rounding) + _LEAST)
        return most.add_(old, alpha=rounding)


def _plain(value: Tensor) -> Tensor:
    return value.cpu() if value.is_floating_point() else value.cpu().double()


def steps_at(plan: Plan, site: str, samples: Mapping[str, float]) -> int:
    """Returns the steps of an epoch at a site, by its number of training images, within SIZES times the sites' median.

    Of an even number of sites the lower of the two in the middle counts: their mean would follow one liar of two.
    """
    believed = min(samples[site], SIZES * median_low(samples.values()))
    return steps_in_an_epoch(int(believed), plan.training.batch)


def steps_of(plan: Plan, samples: Mapping[str, float], own: float = math.inf) -> float:
    """Returns the steps of an epoch that bound the combination of the sites' contributions, whoever of them takes part.

    At a site, `own` is its own number of images, the only one that it knows: no site counts as more than SIZES times it.

    Where all sites weigh the same, the mean is furthest if `min_sites` sites with most images are its only ones. Any other
    combination is no further than the furthest contribution.
    """
    believed = {site: min(count, SIZES * own) for site, count in samples.items()}
    most = sorted((steps_at(plan, site, believed) for site in samples), reverse=True)
    few = plan.federation.min_sites if plan.federation.aggregation == UNIFORM else 1
    return mean(most[:few]) * build_method(plan).server_step
