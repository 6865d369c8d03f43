"""The FLARE job of a hospital that joins a consortium after a run: what `feddp job-outside` exports."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from feddp.adaptation.adapt import read_settings
from feddp.adaptation.models import Models, plan_of, refuse_layers, some
from feddp.adaptation.request import AdaptationRequest
from feddp.adaptation.strategies import STRATEGIES
from feddp.adaptation.unseen_site import Request
from feddp.errors import InputError
from feddp.files import SHARED, read_results
from feddp.jobs.folder import LOCAL, SCOPE, SIMULATED, write_job
from feddp.methods.aggregation import Spec, Tensors
from feddp.networks.weights import fingerprint, read_network
from feddp.plan.resolve import build_network, partition_of
from feddp.plan.schema import Plan
from feddp.stages.memory import start_file
from feddp.training.settings import pairs


def export(
    run: Path,
    newcomer: str,
    donors: Sequence[str] | None,
    folder: Path,
    how: str,
    settings: Sequence[str],
    score: bool,
    job: str | None = None,
    scope: str = SCOPE,
) -> Path:
    """Writes a ready-to-submit job folder, replacing an earlier one of ours; returns it.

    The server's app brings γ along; a site's brings nothing: what the newcomer gets, it gets after it has consented.

    Args:
        run: the folder of the finished run, with results.json and γ: in shared.safetensors, or as the server left it.
        newcomer: the name of the hospital that joins.
        donors: the sites of the run whose models it gets; None for all of them.
        settings: of `feddp.adaptation.adapt.Settings`, as `key=value`.
        score: whether the newcomer measures afterwards, against its own masks.
        job: the finished run's id; what its results.json says if None.

    Raises:
        InputError: no finished federation's run, a donor that had no part in it, an option that cannot be, a method that
            gives each site layers of its own, a network that cannot go this way, or the folder holds something else.
    """
    asked = pairs(settings)
    Request(how, read_settings(asked), score)  # a wrong option is said before the run is read
    results = read_results(run)
    plan, shared = _plan(run, results)
    donors = sorted(set(results["sites"]) - {newcomer} if donors is None else set(donors))
    if unknown := [site for site in donors if site not in results["sites"]]:
        raise InputError(f"--donors {unknown[0]}: no site of {run}; there are {', '.join(sorted(results['sites']))}")
    if not donors or newcomer in donors:
        raise InputError(f"--newcomer {newcomer} --donors {','.join(donors)}: name a donor beside it, or leave --donors out")
    job = job or results.get("job")
    if job in (None, SIMULATED, LOCAL):
        why = "was the simulator's, whose sites are no hospitals" if job else "does not say its job's id (an older run)"
        raise InputError(f"{run} {why}; name the id of the job whose networks the donors hold with --job-id")
    request = AdaptationRequest(newcomer, tuple(donors), job, how, asked, score)
    _rehearse(plan, request.request)
    return write_job(folder, scope, plan, request, shared)


def _plan(run: Path, results: dict[str, Any]) -> tuple[Plan, Tensors]:
    """The run's plan as this job carries it, and γ."""
    if not results.get("federated"):
        raise InputError(f"{run} is no federation's run, so no site holds a model; name another")
    plan = plan_of(run, results)
    file = run / SHARED if (run / SHARED).exists() else start_file(run, results["start_round"])
    shared, network = some(read_network(file)[0], run), build_network(plan)
    refuse_layers(plan.facts, network.state_dict(), shared, run)
    Spec.of(network.state_dict(), partition_of(plan, network).shared).check(str(file), shared)
    # one donor is enough, and an adaptation may take longer than a round was given; what this job brings is γ, not the network
    # that the run itself may have started from
    settings = plan.settings | {"min_sites": 1, "task_timeout": 0}
    return replace(plan, weights=fingerprint(shared), settings=settings), shared


def _rehearse(plan: Plan, request: Request) -> None:
    """InputError for a way that this network cannot go (TTT without its head): said here, before any model travels for it."""
    state = build_network(plan).state_dict()
    models, blank = Models.of({"donor": state}, state, plan.facts), torch.zeros(2, plan.channels, 64, 64)
    once = replace(request.settings, epochs=0)
    STRATEGIES[request.how](models, list(blank), once, torch.device("cpu"), lambda epoch, loss: None)
