"""A network that a job brings."""

from dataclasses import replace

import torch
from torch import Tensor

from feddp.networks.weights import fingerprint
from feddp.plan.resolve import build_network
from feddp.plan.schema import Plan


def brought_by(plan: Plan) -> tuple[dict[str, Tensor], Plan]:
    """A whole network that no seed gives, and the plan of a job that brings it."""
    chance = torch.Generator().manual_seed(17)
    state = {
        name: value + torch.rand(value.shape, generator=chance) / 10 if value.is_floating_point() else value
        for name, value in build_network(plan).state_dict().items()
    }
    return state, replace(plan, weights=fingerprint(state))
