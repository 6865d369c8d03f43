"""CPU and GPU agree over two rounds of every method.

Each method runs its rounds' stages in one process in float32 (no TF32; no dropout, whose masks each device draws for itself):
on the CPU, again on the CPU from slightly changed weights, and on the device. Two rounds, because some methods' terms begin in
the second one. The images have 64 px, where attention in the encoder has several keys. Later stages are left out: they choose
among epochs, and a choice can turn on the last bit.

The tolerance. A deviation is ‖a − b‖ / ‖a − w‖ over a site's whole network: w are the initial weights, a the CPU's result.
Float32 rounds by at most u = 2^-24, relative. A number of the network's output has passed fewer than 256 roundings that add up
as a random walk does, so their sum is below √256 u = 2^-20. So one run on the CPU starts from weights with a relative error
drawn evenly from ±2^-20, which shows what errors of this size become over the rounds: AdamW turns a gradient near 0 of either
sign into a whole step. The device may deviate FACTOR times as much, because the one draw of errors is a matter of chance.

The device runs twice. How much its runs deviate from each other, `of repeat`, is its own noise (sums in no fixed order), and
decides nothing.

A tolerance of WEAK or more says nothing about a device that stays within it: a wrong computation may too. It is not decided.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.common import FP32, apart, caught, compute_settings, count, line, parser
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.files import NETWORK, site_folder
from feddp.jobs.folder import federation_of
from feddp.methods import METHODS, OWN
from feddp.methods.base import SPECTRA, TRAIN
from feddp.networks import NETWORKS, build
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
WEAK = 0.1  # bfloat16, which is no float32, deviated by 0.26 in FedAvg
AGREES, DISAGREES, UNDECIDED, FAILED = "agrees", "disagrees", "weak: not decided", "failed"
ROUNDS, IMAGES, PIXELS = 2, 12, 64
USUAL, FITTING = "pvt_v2_b0_s-fpn", {"silobn": "resnet18-fpn"}  # SiloBN needs batch normalisation
STILL = "still"  # the name of the network without dropout
PATIENCE = 80  # seconds until a method in a process of its own has failed: the step has 180 for all


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_agree", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--methods", nargs="+", default=list(OWN), choices=list(OWN))
    options.add_argument("--network", help=f"of every method; without it {USUAL}, or one that fits the method")
    options.add_argument("--processes", type=count, default=1, help="at once, one a method; without it, all are compared here")
    given = options.parse_args(arguments)
    asked_for(given.device)
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(data, sites=2, images=IMAGES, size=PIXELS)
        networks = {method: given.network or FITTING.get(method, USUAL) for method in given.methods}
        calls = {method: (method, networks[method], data, Path(folder) / method, given.device) for method in networks}
        here = ((method, caught(judged, call)) for method, call in calls.items())
        with closing(here if given.processes == 1 else apart(judged, calls, given.processes, PATIENCE)) as answers:
            for method, answer in answers:
                found = {"outcome": FAILED} | answer
                about = {
                    "method": method,
                    "network": networks[method],
                    "rounds": ROUNDS,
                    "size": PIXELS,
                    "device": given.device,
                }
                line("gpu_agree", about | found, given.device)
                numbers = [f"{found[key]:.2g}" if key in found else "" for key in ("deviation", "tolerance")]
                rows.append((method, networks[method], *numbers, found["outcome"]))
                wrong += [f"{method} ({found['outcome']})"] if found["outcome"] in (DISAGREES, FAILED) else []
    for row in (("method", "network", "deviation", "tolerance", "outcome"), ["---"] * 5, *rows):
        print("|", " | ".join(row), "|", file=sys.stderr)  # stdout has JSON alone
    if wrong:
        raise FedDPError(f"{given.device} and the CPU were not found to agree in {', '.join(wrong)}; the lines above say more")


def judged(method: str, network: str, data: Path, folder: Path, device: str) -> dict[str, str | float]:
    """Returns the outcome of a method and its figures. `folder` is for its runs."""
    with patch.dict(NETWORKS, {STILL: partial(still, network)}):
        found = compared(method, data, folder, device)
    tolerance = FACTOR * found["of rounding"]
    return {"outcome": outcome(found["deviation"], tolerance), "tolerance": tolerance, **found}


def outcome(deviation: float, tolerance: float) -> str:
    """Returns what a deviation shows. One that is not a number disagrees."""
    if not deviation <= tolerance:
        return DISAGREES
    return AGREES if tolerance < WEAK else UNDECIDED


def still(name: str, channels: int, classes: int, pretrained: bool = False) -> nn.Module:
    """Builds the network `name` without dropout."""
    network = build(name, channels, classes)
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return network


def compared(method: str, data: Path, folder: Path, device: str) -> dict[str, float]:
    """Returns the largest deviations of a site's network: the device's, its second run's, and that of rounding on the CPU."""
    plan, first = plan_of(method, data, device)
    rng = torch.Generator().manual_seed(0)
    errors = {name: 1 + ERROR * (2 * torch.rand(value.shape, generator=rng) - 1) for name, value in first.items()}
    changed = {name: value * errors[name] if value.is_floating_point() else value for name, value in first.items()}
    cpu = after_rounds(plan, first, data, folder / "cpu", "cpu")
    near = after_rounds(plan, changed, data, folder / "near", "cpu")
    other, again = (after_rounds(plan, first, data, folder / name, device) for name in ("device", "again"))
    found = {"deviation": deviation(cpu, other, first), "of rounding": deviation(cpu, near, first)}
    return found | {"of repeat": deviation(other, again, first)}


def plan_of(method: str, data: Path, device: str) -> tuple[Plan, Tensors]:
    """Returns the plan of the method's rounds, without later stages, and the initial tensors."""
    sites, metadata = federation_of(data)
    settings = {"batch": 4, "start": "last", **compute_settings(FP32, device)}
    words = tuple(f"{name}={value}" for name, value in settings.items())
    plan = Options(method, rounds=ROUNDS, network=STILL, size=PIXELS, settings=words).plan(metadata, sites)
    kept = tuple(stage for stage in plan.stages if stage in (SPECTRA, TRAIN))
    plan = replace(plan, stages=kept)
    return plan, build_network(plan).state_dict()


def after_rounds(plan: Plan, first: Tensors, data: Path, out: Path, device: str) -> dict[str, Tensors]:
    """Returns every site's network after the last round."""
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
