"""CPU and GPU agree over a round of every method.

Each method runs its rounds' stages in one process in float32 (no TF32; no dropout, whose masks each device draws for itself):
on the CPU, again on the CPU from slightly changed weights, and on the device. Later stages are left out: they choose among
epochs, and a choice can turn on the last bit.

The tolerance. A deviation is ‖a − b‖ / ‖a − w‖ over a site's whole network: w are the initial weights, a the CPU's result.
Float32 rounds by at most u = 2^-24, relative. A number of the network's output has passed fewer than 256 roundings that add up
as a random walk does, so their sum is below √256 u = 2^-20. So one run on the CPU starts from weights with a relative error
drawn evenly from ±2^-20, which shows what errors of this size become over the round: AdamW turns a gradient near 0 of either
sign into a whole step. The device may deviate FACTOR times as much, because the one draw of errors is a matter of chance.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.common import FP32, compute_settings, line, parser
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.files import NETWORK, site_folder
from feddp.jobs.folder import federation_of
from feddp.methods import METHODS, OWN
from feddp.methods.base import SPECTRA, TRAIN
from feddp.networks import DEFAULT, NETWORKS, build
from feddp.networks.weights import fingerprint
from feddp.partition import Tensors
from feddp.plan.resolve import build_network
from feddp.plan.schema import Plan
from feddp.protocol import CONSENTS
from feddp.run import pooled, session
from feddp.run.local import local
from feddp.run.options import Options
from feddp.run.session import Request
from feddp.training.device import asked_for

ERROR, FACTOR = 2.0**-20, 4.0
STILL = "still"  # the name of the network without dropout


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_agree", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--methods", nargs="+", default=list(OWN), choices=list(OWN))
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    asked_for(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def still(channels: int, classes: int, pretrained: bool = False) -> nn.Module:
        network = build(given.network, channels, classes)
        for module in network.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return network

    disagreeing = []
    with patch.dict(NETWORKS, {STILL: still}), tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(data, sites=2, images=12, size=32)
        for method in given.methods:
            found = compared(method, data, Path(folder) / method, given.device)
            found["agree"] = found["deviation"] <= FACTOR * found["of rounding"]
            line("gpu_agree", {"method": method, "device": given.device} | found, given.device)
            disagreeing += [] if found["agree"] else [method]
    if disagreeing:
        raise FedDPError(f"{given.device} and the CPU disagree beyond rounding in {', '.join(disagreeing)}")


def compared(method: str, data: Path, folder: Path, device: str) -> dict[str, float]:
    """Returns the largest deviation of a site's network on the device, and that of rounding errors on the CPU."""
    plan, first = plan_of(method, data, device)
    rng = torch.Generator().manual_seed(0)
    errors = {name: 1 + ERROR * (2 * torch.rand(value.shape, generator=rng) - 1) for name, value in first.items()}
    changed = {name: value * errors[name] if value.is_floating_point() else value for name, value in first.items()}
    cpu = after_round(plan, first, data, folder / "cpu", "cpu")
    near = after_round(plan, changed, data, folder / "near", "cpu")
    other = after_round(plan, first, data, folder / "device", device)
    return {"deviation": deviation(cpu, other, first), "of rounding": deviation(cpu, near, first)}


def plan_of(method: str, data: Path, device: str) -> tuple[Plan, Tensors]:
    """Returns the plan of one round of the method, without later stages, and the initial tensors."""
    sites, metadata = federation_of(data)
    settings = {"batch": 4, "start": "last", **compute_settings(FP32, device)}
    words = tuple(f"{name}={value}" for name, value in settings.items())
    plan = Options(method, rounds=1, network=STILL, size=32, settings=words).plan(metadata, sites)
    kept = tuple(stage for stage in plan.stages if stage in (SPECTRA, TRAIN))
    plan = replace(plan, stages=kept)
    return plan, build_network(plan).state_dict()


def after_round(plan: Plan, first: Tensors, data: Path, out: Path, device: str) -> dict[str, Tensors]:
    """Returns every site's network after the round."""
    own = {"device": device, "consent": list(CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1}
    policies = {site: {"data": str(data / site), **own} for site in plan.sites}
    request = Request(replace(plan, weights=fingerprint(first)), policies, out, None, first, "local")
    if METHODS[plan.method].federated:
        session.run(request, local, plan.method)
    else:
        pooled.run(request)
    return {site: load_file(site_folder(out, site) / NETWORK) for site in plan.sites}


def deviation(found: dict[str, Tensors], other: dict[str, Tensors], first: Tensors) -> float:
    """Returns the largest ‖a − b‖ / ‖a − w‖ of a site."""

    def norm(a: Tensors, b: Tensors) -> float:
        pairs_of = [(a[name].double(), b[name].double()) for name in first if first[name].is_floating_point()]
        return float(torch.stack([(x - y).square().sum() for x, y in pairs_of]).sum().sqrt())

    return max(norm(a, other[site]) / norm(a, first) for site, a in found.items())
