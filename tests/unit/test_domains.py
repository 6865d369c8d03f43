"""The values that tensors may hold: from the type of the module and its role, not from a name; bounds are derived."""

import numpy as np
import pytest
import torch
from torch import nn

from feddp.data.loading import network_input
from feddp.domains import BUFFER, COUNTER, HALF, MEAN, VARIANCE, WEIGHT, amplitudes, domains
from feddp.errors import FedDPError
from feddp.methods import METHODS
from feddp.methods.aggregation import Spec
from feddp.plan.resolve import build_network
from feddp.protocol import Sent
from feddp.stages.tensors import Expected
from feddp.training.spectra import windows


class Named(nn.Module):
    """Its buffer has the name of a running variance, and is none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_var", torch.zeros(2))


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True)],
    ids=lambda norm: type(norm).__name__,
)
def test_the_type_of_a_module_decides_and_not_a_name(norm):
    network = nn.Sequential(norm, Named())
    network.add_module("again", norm)  # a module registered twice has two names
    known = {"weight": WEIGHT, "bias": WEIGHT, "running_mean": MEAN, "running_var": VARIANCE, "num_batches_tracked": COUNTER}
    twice = {f"{path}.{name}": domain for path in ("0", "again") for name, domain in known.items()}
    assert domains(network) == twice | {"1.running_var": BUFFER}
    assert domains(norm) == known, "a network may be one layer"


BATCHES = nn.BatchNorm2d(2)
SPEC = Spec.of(BATCHES.state_dict(), tuple(BATCHES.state_dict()), domains(BATCHES))


@pytest.mark.parametrize(
    ("name", "inside", "outside", "what"),
    [
        ("running_var", (0.0, HALF), (-1e-6, -1.0, 65600.0), "a running variance is from 0 to 65504"),
        ("running_mean", (-HALF, HALF), (-65600.0, 1e38), "a running mean is from -65504 to 65504"),
        ("weight", (-HALF, HALF), (-1e38, 65600.0), "a weight is from -65504 to 65504"),
        ("bias", (-HALF, HALF), (-1e38, 65600.0), "a weight is from -65504 to 65504"),
        ("num_batches_tracked", (0, 2**53), (-1, 2**53 + 1, 2**62), "a counter is from 0 to"),
    ],
)
def test_each_edge_passes_and_one_value_beyond_it_is_refused_by_name(name, inside, outside, what):
    state = BATCHES.state_dict()

    def with_one(value):
        changed = state[name].clone()
        changed.view(-1)[-1] = value
        return state | {name: changed}

    for value in inside:
        SPEC.check("B", with_one(value))
    for value in outside:
        with pytest.raises(FedDPError, match=f"site B: {name} holds .*, but {what}"):
            SPEC.check("B", with_one(value))


def test_what_half_precision_can_send_is_in_the_domain():
    """65504 is the largest number of float16; a variance below its smallest rounds to 0."""
    assert torch.tensor(HALF).half().item() == HALF
    assert torch.tensor(HALF * 1.001).half().isinf()
    assert VARIANCE.holds(torch.tensor(1e-9).half().item(), HALF)


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_of_every_method_s_network_has_a_domain_and_starts_in_it(plan_for, pvt, method):
    """On narrow layers of the default network, with the layers that the method adds."""
    plan = plan_for(method=method, network=pvt)
    network = build_network(plan)
    state, expected = network.state_dict(), Expected(plan, network)
    assert expected.domains.keys() == state.keys()
    expected.check(Sent.MODEL, "A", state)


@pytest.mark.parametrize("normalise", ["zscore", "scale"])
@pytest.mark.parametrize("size", [32, 96])
def test_no_image_has_an_amplitude_above_the_bound(size, normalise):
    """Noise, one black half and one white half (|x| = 1 everywhere after z-scores), one bright pixel, and white, which has the
    mean 1 with `scale`: its middle amplitude is size², so the bound is no larger than it must be."""
    columns = np.arange(size)
    one = np.zeros((size, size, 3), np.uint8)
    one[size // 2, size // 2] = 255
    images = [
        np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8),
        np.broadcast_to(np.where(columns < size // 2, 0, 255)[None, :, None], (size, size, 3)).astype(np.uint8),
        one,
        np.full((size, size, 3), 255, np.uint8),
    ]
    found = windows(torch.stack([network_input(image, size, normalise) for image in images]))
    domain = amplitudes(size)
    assert domain.holds(found.min().item(), found.max().item())
    most = found.amax(dim=(1, 2, 3))
    # of a square wave of ±1 the first frequency has 2/π · N (the discrete sum is a little larger)
    which, wanted = (1, 2 / np.pi * size**2) if normalise == "zscore" else (3, size**2)
    assert most[which].item() == pytest.approx(wanted, rel=0.01)
    assert domain.most == pytest.approx(size**2, rel=0.02)
    assert not domain.holds(0, 1000 * most[0].item())
