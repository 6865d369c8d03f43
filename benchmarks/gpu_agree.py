"""CPU and GPU agree: two rounds of every method with exact operations, and every network's gradient in float32.

*Rounds*. Each method runs its rounds' stages in one process on the CPU and on the device (no dropout, whose masks each device
draws for itself), with every operation in double precision and rounded to float32 (`benchmarks.exact`), so that nothing parts
the two but a wrong computation. Two rounds, because some methods' terms begin in the second one. The images have 64 px, where
attention in the encoder has several keys. Later stages are left out: they choose among epochs, and a choice can turn on the
last bit. A deviation is ‖a − b‖ / ‖a − w‖ over a site's whole network: w are the initial weights, a the CPU's result. A
thousandth of what training changed is allowed.

Where the deviation is larger, one initial weight in 4096 is made larger by 2^-22 of itself, and the rounds run on the CPU
once more. If that deviates as much, the method is not decided: pFedMe and FedProx, which train a distance between two networks.

*Gradients*. The logits of a training batch, and the gradient of its cross-entropy, that the device computes in float32 with its
own kernels, launched one by one and as CUDA graphs. An error is ‖a − b‖ / ‖b‖, with b in double precision on the CPU. Of the
logits, it may be four times that of the CPU's own float32, because another order of sums gives one of its size; TF32 gave 1100
times. A gradient jumps where a value changes its sign before a ReLU: on the CPU by 0.00014 in one network, on an H200 by up to
0.0013 in four. Less than 0.004 is allowed; TF32 gave 0.0047. A deviation is the larger share of what is allowed.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import FP32, apart, caught, computing, count, images, line, parser
from benchmarks.exact import Exact
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
from feddp.run import local, pooled, session
from feddp.run.options import Options
from feddp.run.session import Request
from feddp.terminal import note
from feddp.training.device import asked_for
from feddp.training.graphs import replayed
from feddp.training.settings import defaults

ROUNDS, GRADIENTS = "rounds", "gradients"  # what is compared
TOLERANCES = {ROUNDS: 1e-3, GRADIENTS: 1.0}
FACTOR, JUMP = 4.0, 2.0**-8  # of the logits' error, times the CPU's; of the gradient's
AGREES, DISAGREES, UNDECIDED, FAILED = "agrees", "disagrees", "not decided", "failed"
MOVED, PLACE = 2.0**-12, 2.0**-22  # the share of initial weights that are moved for a method's own sensitivity, and how far
TURNS, IMAGES, PIXELS, BATCH = 2, 12, 64, 4
USUAL, FITTING = "pvt_v2_b0_s-fpn", {"silobn": "resnet18-fpn"}  # SiloBN needs batch normalisation
Networks = dict[str, Tensors]  # {site: network}
STILL = "still"  # the name of the network without dropout
LONG = "pfedme", "ditto", "fedprox"  # begin first: on an H200 they needed the other run on the CPU, or too long
PATIENCE = 170  # seconds until a comparison in a process of its own has failed: Ditto's had no answer after 120
SHORTER = {"inner_steps": 1}  # where a method has such a setting: pFedMe would take five times as long


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_agree", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--methods", nargs="+", default=list(OWN), choices=list(OWN))
    options.add_argument("--network", help=f"default: {USUAL}, or what fits the method; gradients of all")
    options.add_argument("--processes", type=count, default=1, help="at once, one a comparison; without it, all are made here")
    given = options.parse_args(arguments)
    asked_for(given.device)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(data, sites=2, images=IMAGES, size=PIXELS)
        of = {method: given.network or FITTING.get(method, USUAL) for method in given.methods}
        networks = [given.network] if given.network else list(NETWORKS)
        calls: dict[str, tuple[Any, ...]] = {f"{GRADIENTS} of {name}": (GRADIENTS, name, given.device) for name in networks}
        longest_first = sorted(of, key=lambda method: method not in LONG)
        calls |= {name: (ROUNDS, of[name], given.device, name, data, Path(folder) / name) for name in longest_first}
        one_by_one = ((name, caught(judged, call)) for name, call in calls.items())
        note("| compared | network | deviation | tolerance | outcome |")
        note("|---|---|---|---|---|")
        with closing(one_by_one if given.processes == 1 else apart(judged, calls, given.processes, PATIENCE)) as answers:
            for name, answer in answers:
                compared, network = calls[name][:2]
                found: dict[str, Any] = {"outcome": FAILED, "tolerance": TOLERANCES[compared]} | answer
                about = {"compared": compared, "name": name, "network": network, "device": given.device, "size": PIXELS}
                line("gpu_agree", about | found, given.device)
                deviation = f"{found['deviation']:.2g}" if "deviation" in found else ""
                cells = (name, network, deviation, f"{found['tolerance']:.2g}", found["outcome"])
                note(f"| {' | '.join(cells)} |")  # stdout has JSON alone
                wrong += [f"{name} ({found['outcome']})"] if found["outcome"] in (DISAGREES, FAILED) else []
    if wrong:
        raise FedDPError(f"{given.device} and the CPU were not found to agree in {', '.join(wrong)}; the lines above say more")


def judged(compared: str, network: str, device: str, *more: Any) -> dict[str, str | float]:
    """Returns the outcome of a comparison and its figures."""
    asked_for(device)  # a process of its own has not been without TF32 yet
    with patch.dict(NETWORKS, {STILL: partial(still, network)}):
        found = after_both(device, *more) if compared == ROUNDS else gradients(device)
    return {"outcome": outcome(found["deviation"], TOLERANCES[compared], found.get("sensitivity", 0.0)), **found}


def outcome(deviation: float, tolerance: float, sensitivity: float = 0.0) -> str:
    """Returns what a deviation shows. One that is not a number disagrees."""
    if deviation <= tolerance:
        return AGREES
    return UNDECIDED if deviation <= sensitivity else DISAGREES


def still(name: str, channels: int, classes: int, pretrained: bool = False) -> nn.Module:
    """Builds the network `name` without dropout."""
    network = build(name, channels, classes)
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return network


def gradients(device: str) -> dict[str, float]:
    """Returns the errors of the device's float32 and of the CPU's, and the largest share of what is allowed."""
    start = build(STILL, 3, 1, seed=0).state_dict()
    samples = images(BATCH, PIXELS)
    image, mask = (torch.stack([sample[name] for sample in samples]) for name in ("image", "mask"))

    def computed(device: str, dtype: torch.dtype, graphs: bool = False) -> tuple[Tensor, Tensor]:
        network = build(STILL, 3, 1).train().to(device, dtype)
        network.load_state_dict(start)
        forward = replayed(network, image.shape, mixed=False) if graphs else network
        logits = forward(image.to(device, dtype))
        F.binary_cross_entropy_with_logits(logits, mask.to(device, dtype)).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None])
        return gradient.double().cpu(), logits.detach().double().cpu()

    wanted = computed("cpu", torch.float64)

    def errors(device: str, graphs: bool = False) -> list[float]:
        found = computed(device, torch.float32, graphs)
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]

    runs = {"": errors(device), " by graphs": errors(device, graphs=True), " of the CPU": errors("cpu")}
    named = {f"{what}{run}": both[at] for run, both in runs.items() for at, what in enumerate(("gradient", "logits"))}
    allowed = FACTOR * max(named["logits of the CPU"], 2.0**-24)  # a single rounding
    shares = [
        share for run in ("", " by graphs") for share in (named[f"gradient{run}"] / JUMP, named[f"logits{run}"] / allowed)
    ]
    return {"deviation": max(shares)} | named


def after_both(device: str, method: str, data: Path, folder: Path) -> dict[str, float]:
    """Returns the largest deviation of a site's network after the rounds, and the number of the device's exact operations.

    Where the deviation is not allowed, also the method's own sensitivity, the deviation of another run on the CPU.
    """
    plan, first = plan_of(method, data, device)
    cpu, _ = exactly(partial(after_rounds, plan, first, data, folder / "cpu", "cpu"))
    other, counted = exactly(partial(after_rounds, plan, first, data, folder / "device", device))
    if not (operations := counted.get(torch.device(device).type, 0)):
        raise FedDPError(f"no exact operation on {device} was counted: what ran there is not known")
    found = {"deviation": deviation(cpu, other, first), "operations": operations}
    if found["deviation"] > TOLERANCES[ROUNDS]:
        near, _ = exactly(partial(after_rounds, plan, moved(first), data, folder / "near", "cpu"))
        found["sensitivity"] = deviation(cpu, near, first)
    return found


def moved(first: Tensors) -> Tensors:
    """Returns the initial tensors with some of their weights a few places of float32 larger."""
    rng = torch.Generator().manual_seed(0)

    def larger(value: Tensor) -> Tensor:
        return value * (1 + PLACE * (torch.rand(value.shape, generator=rng) < MOVED)) if value.is_floating_point() else value

    return {name: larger(value) for name, value in first.items()}


def exactly(call: Callable[[], Networks]) -> tuple[Networks, dict[str, int]]:
    """Returns a run's result; its server and sites, in this process, compute exactly. And the operations by device."""
    exact, real = Exact(), local.followed

    def followed(out: Path, serve: Callable[..., None]) -> AbstractContextManager[local.LocalRun]:
        def inside(*given: Any) -> None:  # in the server's thread: a mode is of its thread
            with exact, sdpa_kernel(SDPBackend.MATH):
                serve(*given)

        return real(out, inside)

    with patch.object(local, "followed", followed), patch.object(pooled, "followed", followed):
        return call(), exact.counted


def plan_of(method: str, data: Path, device: str) -> tuple[Plan, Tensors]:
    """Returns the plan of the method's rounds, without later stages, and the initial tensors."""
    sites, metadata = federation_of(data)
    shorter = {name: value for name, value in SHORTER.items() if name in defaults(METHODS[method].Hyper)}
    settings = {"batch": BATCH, "start": "last", **computing(FP32), **shorter}
    words = tuple(f"{name}={value}" for name, value in settings.items())
    plan = Options(method, rounds=TURNS, network=STILL, size=PIXELS, settings=words).plan(metadata, sites)
    kept = tuple(stage for stage in plan.stages if stage in (SPECTRA, TRAIN))
    plan = replace(plan, stages=kept)
    return plan, build_network(plan).state_dict()


def after_rounds(plan: Plan, first: Tensors, data: Path, out: Path, device: str) -> Networks:
    """Returns every site's network after the last round."""
    own = {"device": device, "consent": list(CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1}
    policies = {site: {"data": str(data / site), **own} for site in plan.sites}
    request = Request(replace(plan, weights=fingerprint(first)), policies, out, None, first, "local")
    if METHODS[plan.method].federated:
        session.run(request, local.local, plan.method)
    else:
        pooled.run(request)
    return {site: load_file(site_folder(out, site) / NETWORK) for site in plan.sites}


def deviation(found: Networks, other: Networks, first: Tensors) -> float:
    """Returns the largest ‖a − b‖ / ‖a − w‖ of a site."""

    def norm(a: Tensors, b: Tensors) -> float:
        pairs_of = [(a[name].double(), b[name].double()) for name in first if first[name].is_floating_point()]
        return float(torch.stack([(x - y).square().sum() for x, y in pairs_of]).sum().sqrt())

    return max(norm(a, other[site]) / norm(a, first) for site, a in found.items())
