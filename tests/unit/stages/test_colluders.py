"""How far two colluding sites of K can move γ in a round, and what γ then tells them: the figures of the threat model.

Each honest site has 8 images and the two state 18 times as many, which is the most that counts: 2 and 36 steps of a batch of 4.
The unit is the bound of an honest site's own contribution, 2 steps. The honest ones do not move here.
"""

import pytest
import torch

from feddp.methods.aggregation import combine
from feddp.plan.resolve import build_method
from feddp.stages.movement import SIZES, steps_at, steps_of

OWN = 8
TWO = ("X", "Y")


@pytest.fixture
def together(plan_for, toy):
    """Gives a plan of K sites and γ's step, in units of the bound, if the two answer `said` times their own bound."""

    def made(aggregation, sites, said=(1.0, 1.0), honest=0.0):
        names = [f"H{i}" for i in range(sites - 2)]
        plan = plan_for(
            method="fedavg", network=toy, batch=4, min_sites=3, sites=tuple([*names, *TWO]), aggregation=aggregation
        )
        samples = dict.fromkeys(names, OWN) | dict.fromkeys(TWO, SIZES * OWN)
        unit = steps_at(plan, names[0], samples)
        assert unit == 2
        answers = dict.fromkeys(names, honest) | {
            site: by * steps_at(plan, site, samples) / unit for site, by in zip(TWO, said, strict=True)
        }
        tensors = {site: {"w": torch.tensor([value], dtype=torch.float64)} for site, value in answers.items()}
        moved = combine(aggregation, tensors, build_method(plan).weights(plan, samples))["w"].item()
        return moved, steps_of(plan, samples, OWN) / unit

    return made


@pytest.mark.parametrize(
    ("aggregation", "sites", "most"),
    [
        ("uniform", 3, 2 * 18 / 3),
        ("uniform", 4, 2 * 18 / 4),
        ("uniform", 10, 2 * 18 / 10),
        ("samples", 3, 18 * 36 / 37),  # weights 18 and 18 of 18 + 18 + 1
        ("samples", 4, 18 * 36 / 38),
        ("samples", 10, 18 * 36 / 44),
        ("median", 3, 18),  # the two are the majority
        ("median", 4, 18 / 2),  # the mean of an honest one and of one of the two
        ("median", 5, 0),  # the one in the middle is honest
        ("median", 10, 0),  # between honest ones
        ("trimmed", 3, 18),
        ("trimmed", 4, 18 / 2),
        ("trimmed", 10, 18 / 8),  # one of the two is dropped
    ],
)
def test_two_colluders_move_the_result_so_far(together, aggregation, sites, most):
    moved, allowed = together(aggregation, sites)
    assert moved == pytest.approx(most)
    assert moved <= allowed, "the honest sites take it"


@pytest.mark.parametrize("aggregation", ["median", "trimmed"])
def test_around_an_honest_site_of_three_the_two_learn_its_value(together, aggregation):
    """One answers its bound above γ, the other below it."""
    moved, _ = together(aggregation, 3, said=(1.0, -1.0), honest=0.123)
    assert moved == 0.123
