"""`feddp job-outside`: exports the FLARE job that adapts a finished run's models at an unseen site."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from feddp.adaptation.choices import AdaptationOptions, read_settings
from feddp.adaptation.models import Models, plan_of, refuse_layers, some
from feddp.adaptation.request import AdaptationRequest
from feddp.adaptation.strategies import STRATEGIES
from feddp.errors import InputError
from feddp.files import RESULTS, SHARED, read_results
from feddp.flare.configuration import SCOPE
from feddp.jobs.folder import LOCAL, SIMULATED_JOB, write_job
from feddp.networks.weights import fingerprint, read_network
from feddp.partition import Tensors
from feddp.plan.resolve import build_network
from feddp.plan.schema import Plan
from feddp.protocol import Sent
from feddp.stages.memory import start_file
from feddp.stages.tensors import Expected
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
    """Writes a ready-to-submit job folder, replacing an earlier job; returns it.

    Only the server's app contains tensors: γ. The unseen site receives them and the donors' models after it consents.

    Args:
        run: the folder of the finished run, with results.json and γ, in shared.safetensors or as the server left it.
        newcomer: the name of the unseen site.
        donors: the sites of the run that give their models; None: all.
        settings: of `feddp.adaptation.fitting.Settings`, as `key=value`.
        score: whether the unseen site evaluates afterwards, with its own masks.
        job: the finished run's id; None: the id in its results.json.

    Raises:
        InputError: the run is not a finished federation, a donor took no part in it, an option is invalid, the method has
            layers per site, the strategy does not fit the network, or the folder holds something else.
    """
    asked = pairs(settings)
    AdaptationOptions(how, read_settings(asked), score)  # refuses a wrong option before the run is read
    results = read_results(run)
    plan, shared = _plan(run, results)
    donors = sorted(set(results["sites"]) - {newcomer} if donors is None else set(donors))
    if unknown := [site for site in donors if site not in results["sites"]]:
        raise InputError(f"--donors {unknown[0]}: not a site of {run}; its sites are {', '.join(sorted(results['sites']))}")
    if not donors or newcomer in donors:
        named = f"--newcomer {newcomer} --donors {','.join(donors)}"
        raise InputError(f"{named}: name other sites as donors, or leave --donors out")
    job = job or results.get("job")
    if job in (None, SIMULATED_JOB, LOCAL):
        why = "ran in the simulator or in one process, not at hospitals" if job else "has no job's id (an older run)"
        raise InputError(f"{run} {why}; name the id of the job whose networks the donors hold with --job-id")
    request = AdaptationRequest(newcomer, tuple(donors), job, how, asked, score)
    _rehearse(plan, request.request)
    return write_job(folder, scope, plan, request, shared)


def _plan(run: Path, results: dict[str, Any]) -> tuple[Plan, Tensors]:
    """Returns the run's plan for this job, and γ."""
    if not results.get("federated"):
        raise InputError(f"{run} is not a federated run, so no site holds a model; name another run")
    plan = plan_of(run, results)
    file = _shared_file(run, results)
    shared, network = some(read_network(file)[0], run), build_network(plan)
    refuse_layers(plan.metadata, network.state_dict(), shared, run)
    Expected(plan, network).check(Sent.SHARED, str(file), shared)
    # one donor is enough, and an adaptation may take longer than a round; `weights` is now γ, not the run's initial network
    settings = plan.settings | {"min_sites": 1, "task_timeout": 0}
    return replace(plan, weights=fingerprint(shared), settings=settings), shared


def _shared_file(run: Path, results: dict[str, Any]) -> Path:
    """Returns the file with γ of the selected round, as `feddp run` or as the server left it."""
    if (run / SHARED).exists():
        return run / SHARED
    if results.get("start_round") is None:
        raise InputError(f"{run / RESULTS} does not say which round was selected, and {SHARED} is missing; name another run")
    return start_file(run, results["start_round"])


def _rehearse(plan: Plan, request: AdaptationOptions) -> None:
    """Raises InputError if the strategy does not fit the network (TTT without its head), before any model travels."""
    state = build_network(plan).state_dict()
    models, blank = Models.of({"donor": state}, state, plan.metadata), torch.zeros(2, plan.channels, 64, 64)
    once = replace(request.settings, epochs=0)
    STRATEGIES[request.how](models, list(blank), once, torch.device("cpu"), lambda epoch, loss: None)
