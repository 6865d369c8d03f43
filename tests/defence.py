"""Compares defences against one malicious site of five: what FLARE has, and FedDP's own, by the honest sites' Dice.

    python tests/defence.py --seeds 0 1 2

FedAvg on synthetic images, in one process. Prints a table: the honest sites' mean validation Dice (%) with the last γ, as mean
and population standard deviation over the seeds. FLARE's classes combine the same contributions, as changes γ_k − γ.
"""

import argparse
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from unittest.mock import patch

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import InTimeAccumulateWeightedAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy

from feddp.data.synthesize import synthesize
from feddp.errors import ContributionError
from feddp.flare.kept import kept_below
from feddp.flare.policy import SitePolicy
from feddp.networks import NETWORKS
from feddp.plan.schema import Plan
from feddp.run.answering import LocalSites
from feddp.stages import train
from feddp.stages.memory import ServerMemory
from support.poisoned import ATTACKS, Poisoned
from support.small import Small

SITES = tuple(f"site-{number}" for number in range(1, 6))
MALICIOUS = SITES[-1]


@dataclass(frozen=True)
class Defence:
    settings: dict[str, object] = field(default_factory=dict)  # FedDP's
    filtered: Callable[[str], bool] | None = None  # whose changes FLARE's filter clips; None: FedDP combines
    gamma: float = 0.01  # the filter's bound; its default


@dataclass(frozen=True)
class Case:
    """One run."""

    data: Path
    rounds: int
    lr: float
    defence: str
    attack: str
    seed: int


DEFENCES = {
    "FLARE: mean": Defence(filtered=lambda site: False),
    "FLARE: filter at the honest sites, gamma 0.1": Defence(filtered=lambda site: site != MALICIOUS, gamma=0.1),
    "FLARE: filter at the server, gamma 0.1": Defence(filtered=lambda site: True, gamma=0.1),
    "FLARE: filter at the server, gamma 0.01": Defence(filtered=lambda site: True),
    "FedDP: mean": Defence(),
    "FedDP: median": Defence({"aggregation": "median"}),
    "FedDP: trimmed": Defence({"aggregation": "trimmed"}),
    "FedDP: norm_factor=3": Defence({"norm_factor": 3.0}),
}


def flare_combine(server: Poisoned, defence: Defence):
    """Returns a stand-in for `feddp.methods.aggregation.combine`, of FLARE's aggregator and filter.

    The filter is PercentilePrivacy with its default percentile; it sets the smallest tenth of a change to 0 and clips the
    rest to [-gamma, gamma].
    """

    def combine(rule: str, contributions: Mapping[str, Mapping[str, torch.Tensor]], weights: Mapping[str, float]):
        context = FLContext()
        context.set_prop(AppConstants.CURRENT_ROUND, server.memory.round)
        aggregator = InTimeAccumulateWeightedAggregator(aggregation_weights=dict(weights))
        aggregator.handle_event(EventType.START_RUN, context)
        for site, tensors in sorted(contributions.items()):
            change = {name: (value - server.shared[name]).numpy() for name, value in tensors.items()}
            shareable = DXO(DataKind.WEIGHT_DIFF, change).to_shareable()
            if defence.filtered(site):
                shareable = PercentilePrivacy(gamma=defence.gamma).process(shareable, context)
            shareable.set_peer_props({ReservedKey.IDENTITY_NAME: site})
            shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, server.memory.round)
            if not aggregator.accept(shareable, context):
                raise RuntimeError(f"FLARE's aggregator did not accept the contribution of {site}")
        changes = from_shareable(aggregator.aggregate(context)).data
        result = {name: value + torch.as_tensor(changes[name]) for name, value in server.shared.items()}
        # FLARE's mean of integers is a fraction: counters are rounded, as FedDP's own are
        return {
            name: (mean if shared.is_floating_point() else mean.round()).to(shared.dtype)
            for (name, shared), mean in zip(server.shared.items(), result.values(), strict=True)
        }

    return combine


def dice(case: Case) -> float | None:
    """Returns the honest sites' mean Dice with the last γ, or None if the run broke off: too few sites gave a valid answer."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # FLARE's classes miss its engine at every call; what they refuse raises here
    defence = DEFENCES[case.defence]
    settings = {"start": "last", "min_sites": 3, "batch": 3, "lr": case.lr, **defence.settings}
    with patch.dict(NETWORKS, small=Small), tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        plan = Plan("fedavg", "small", 3, ("lesion",), "nested", 32, case.rounds, case.seed, sites=SITES, settings=settings)
        own = SitePolicy.admitting(plan) | {"seed": "plan", "min_images": 2}
        policies = {site: own | {"data": str(case.data / site)} for site in SITES}
        memory = ServerMemory(plan, "job", folder, kept_below(folder), folder)
        server = Poisoned(memory, LocalSites(plan, policies, folder), threading.Event(), folder / "log")
        server.malicious, server.attack = MALICIOUS, case.attack
        combine = train.combine if defence.filtered is None else flare_combine(server, defence)
        try:
            with patch.object(train, "combine", combine):
                train.serve(server)
        except ContributionError:
            return None
        events = [json.loads(line) for line in (folder / "progress.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {e["site"]: e["scalars"]["dice"] for e in events if e["event"] == "answer" and e["task"] == "adopt"}
    return 100 * mean(found[site] for site in SITES if site != MALICIOUS)


def shown(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    text = f"{mean(found):.1f} ± {pstdev(found):.1f}" if found else ""
    broken = len(values) - len(found)
    return f"{text} ({broken} of {len(values)} broke off)".strip() if broken else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--images", type=int, default=20, help="per site")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        data = Path(root)
        synthesize(data, len(SITES), arguments.images, 32)
        cases = [
            Case(data, arguments.rounds, arguments.lr, defence, attack, seed)
            for seed in arguments.seeds
            for defence in DEFENCES
            for attack in ATTACKS
        ]
        with ProcessPoolExecutor(arguments.jobs) as pool:
            found = {}
            for case, value in zip(cases, pool.map(dice, cases), strict=True):
                found[case] = value
                print(
                    f"{len(found)} of {len(cases)}:", case.seed, case.defence, case.attack, value, file=sys.stderr, flush=True
                )
    print("|", " | ".join(("", *ATTACKS)), "|")
    print("|---" * (len(ATTACKS) + 1) + "|")
    for defence in DEFENCES:
        values = {a: [found[c] for c in cases if (c.defence, c.attack) == (defence, a)] for a in ATTACKS}
        print("|", " | ".join((defence, *map(shown, values.values()))), "|")


if __name__ == "__main__":
    main()
