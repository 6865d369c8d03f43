"""A personal network against FedAvg's: one image at a time, and in batches.

FedDP's network has FedAvg's layers with other numbers in them. Methods that add layers are beside it.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.common import count, interleaved, parser, pixels, ratio, report, shown
from feddp.networks import DEFAULT
from feddp.plan.resolve import build_network
from feddp.plan.schema import Plan
from feddp.training.device import asked_for, settle

AGAINST = "fedavg"
SITES = ("site-1", "site-2", "site-3", "site-4")


def main(arguments: Sequence[str]) -> None:
    options = parser("inference", __doc__)
    options.add_argument("--methods", nargs="+", default=["feddp", "fedlc", "virtual_class"])
    options.add_argument("--size", type=pixels, default=96)
    options.add_argument("--batch", type=count, default=8)
    options.add_argument("--pairs", type=count, default=15)
    options.add_argument("--network", default=DEFAULT)
    options.add_argument("--device", default="cpu")
    given = options.parse_args(arguments)
    device = asked_for(given.device)
    settle(device.type, 1)
    rows, figures, networks = [], {}, {}
    for method in dict.fromkeys((AGAINST, *given.methods)):
        plan = Plan(method, given.network, 3, ("lesion",), "nested", given.size, rounds=1, sites=SITES)
        networks[method] = build_network(plan).to(device).eval()
    for batch in (1, given.batch):
        images = torch.randn(batch, 3, given.size, given.size, device=device)
        calls = {method: partial(network, images) for method, network in networks.items()}
        with torch.inference_mode():
            seconds = interleaved(f"Batches of {batch}", given.pairs, calls, given.device)
        for method, values in seconds.items():
            parameters = sum(value.numel() for value in networks[method].parameters())
            against = ratio(values, seconds[AGAINST])
            times = f"{1000 * median(values):.1f}", f"{batch / median(values):.1f}"
            rows.append((method, parameters, batch, *times, shown(against)))
            figures[f"{method}, {batch}"] = {"parameters": parameters, "seconds": values, "ratio": against}
    heads = ("network of", "parameters", "batch", "ms a batch", "images/s", f"time / {AGAINST}'s, per pair")
    report("inference", heads, rows, {"size": given.size, "network": given.network, "networks": figures}, given.device)
