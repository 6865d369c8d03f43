"""FLARE recipes: a run as a Python object, for the environments of `nvflare.recipe` (FLARE 2.7.2 and later).

The job is the folder that `feddp job` writes. A recipe of FLARE's adds components, filters and files to its job; ours refuses
them, because sites accept only the folder that follows from the plan.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from nvflare.apis.filter import Filter
from nvflare.app_common.logging.job_log_streamer import JobLogStreamer
from nvflare.app_common.widgets.streaming import AnalyticsReceiver
from nvflare.job_config.api import FedJob
from nvflare.recipe import PocEnv
from nvflare.recipe.run import Run
from nvflare.recipe.spec import ExecEnv, Recipe
from torch import Tensor

from feddp.errors import FedDPError, InputError
from feddp.files import write_text
from feddp.flare.configuration import SCOPE
from feddp.jobs.folder import export, federation_of
from feddp.networks import DEFAULT
from feddp.plan.schema import Plan
from feddp.run import session
from feddp.run.defaults import METHOD, ROUNDS, SIZE
from feddp.run.options import Options, job_name, policies_of
from feddp.run.poc import PROJECT, WORKSPACE, connect, free_ports, project
from feddp.run.session import Request
from feddp.run.simulator import simulator
from feddp.terminal import note

POC_FOLDER = "feddp_poc"  # of a PocEnv without NVFLARE_POC_WORKSPACE, below the current folder
# the metadata that `nvflare.recipe.utils.set_recipe_meta` may set
_META = ("scope", "resource_spec")
_REFUSED: tuple[tuple[Any, str], ...] = (
    (Filter, "the filters of a site are those of its own privacy.json"),
    (AnalyticsReceiver, "every run has TensorBoard files; MLflow and W&B are configured at the server (docs/how-to/track.md)"),
    (JobLogStreamer, "no log leaves a site"),
    (object, "its folder follows from the plan; change the plan with the recipe's arguments and `settings`"),
)


class PersonalizedRecipe(Recipe):
    """A run of any federated method.

    Args:
        method: a method's name; `feddp methods` lists them.
        data: the root of the sites' folders, which gives sites, channels and classes. SimEnv and PocEnv need it.
        sites: the sites' names; with `data`, those of its sites that take part.
        channels: of the images, 3 by default; as `classes` and `labels`, only where there is no `data`, which says them.
        classes: the foreground classes, ("lesion",) by default.
        labels: nested (the default) or exclusive classes.
        network: a network's name.
        rounds: communication rounds.
        size: images are resized to size x size pixels.
        seed: the seed of every random draw.
        calibration_epochs: of the last stage at a site; 0 leaves the stage out, None is the setting's default.
        then: "igc" appends the calibration to any method.
        weights: a checkpoint file to start from, or "timm".
        settings: hyper-parameters as {key: value} (`feddp run --set`).
        device: the sites' device in SimEnv and PocEnv; of several, comma-separated, the sites get one each in turn.
        name: the job's name.
        scope: the scope of the sites' privacy.json under which the job runs.
        resume: the id of a run's first job, which the job continues after its last completed round. In SimEnv the same recipe
            again continues an unfinished run by itself.

    Raises:
        InputError: an argument is wrong or contradicts another; says which.
    """

    def __init__(
        self,
        *,
        method: str = METHOD,
        data: str | Path | None = None,
        sites: Sequence[str] | None = None,
        channels: int | None = None,
        classes: Sequence[str] | None = None,
        labels: str | None = None,
        network: str = DEFAULT,
        rounds: int = ROUNDS,
        size: int = SIZE,
        seed: int = 0,
        calibration_epochs: int | None = None,
        then: str | None = None,
        weights: str | None = None,
        settings: Mapping[str, Any] | None = None,
        device: str = "cpu",
        name: str = "",
        scope: str = SCOPE,
        resume: str = "",
    ):
        for argument, value in (("sites", sites), ("classes", classes)):
            if isinstance(value, str):  # also a sequence, of letters
                raise InputError(f"{argument}={value!r} is a text, not a list; write {argument}=[{value!r}]")
        if settings is not None and not isinstance(settings, Mapping):
            raise InputError(f"settings={settings!r} is no dict; write settings={{'batch': 8}}")
        root = None if data is None else Path(data)
        said = {"channels": channels, "classes": classes and tuple(classes), "labels": labels}
        said = {name: value for name, value in said.items() if value is not None}
        metadata: dict[str, Any] = {"channels": 3, "classes": ("lesion",), "labels": "nested"} | said
        names = list(sites or ())
        if root is not None:
            if said:
                raise InputError(f"{', '.join(said)}: the folders below {root} say this; leave it out")
            names, metadata = federation_of(root, names or None)
        if not names:
            raise InputError("the recipe has no sites: name them with sites=[...], or take them from data=ROOT")
        pairs = tuple(f"{key}={_word(value)}" for key, value in (settings or {}).items())
        options = Options(method, rounds, calibration_epochs, network, size, seed, pairs, then, weights)
        plan = options.plan(metadata, names)
        name = name or (job_name(method, root) if root else method)
        self.plan = plan
        super().__init__(PlannedJob(name, plan, options.initial(plan), scope, resume, root, device))

    def run(
        self,
        env: ExecEnv,
        server_exec_params: dict[str, Any] | None = None,
        client_exec_params: dict[str, Any] | None = None,
    ) -> Run:
        """Runs the recipe; in a PocEnv, once all sites have joined.

        Raises:
            FedDPError: a site of a PocEnv has not joined in time; the federation is then stopped.
        """
        self._job.submits = True
        try:
            return super().run(env, server_exec_params, client_exec_params)
        finally:
            self._job.submits = False

    def process_env(self, env: ExecEnv) -> None:
        """Gives a PocEnv a project with our allow-lists and policies, which approve this plan alone."""
        self._job.joined = None  # that of another environment
        if isinstance(env, PocEnv):
            self._job.prepare(env)

    def _apply_per_site_config(self, config: Mapping[str, Any]) -> None:
        raise InputError("a FedDP job has no configuration per site: each site's is its own privacy.json")


class FedDPRecipe(PersonalizedRecipe):
    """FedDP (Wang et al., TMI 2024); takes the arguments of `PersonalizedRecipe` without `method`."""

    def __init__(self, **arguments: Any):
        super().__init__(method="feddp", **arguments)


class PlannedJob(FedJob):
    """The job of a plan, as FLARE's environments take it; the arguments are those of `PersonalizedRecipe`."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        initial: dict[str, Tensor] | None,
        scope: str,
        resume: str,
        data: Path | None,
        device: str,
    ):
        super().__init__(name=name, min_clients=plan.federation.min_sites)
        self.plan, self._initial, self._resume, self._data, self._device = plan, initial, resume, data, device
        self.job.meta_props = JobMetadata(scope=scope)
        self.submits = False  # whether the folder that is exported next is submitted
        self.joined: Callable[[], None] | None = None  # waits for the sites of a PocEnv

    def export_job(self, job_root: str) -> None:
        """Writes the job's folder `job_root`/<name>."""
        if self.submits and self.joined:
            self.joined()
        meta = self.job.meta_props
        asked = meta.get("resource_spec")
        export(self.plan, Path(job_root) / self.name, meta["scope"], self._initial, self._resume, asked)

    def simulator_run(
        self,
        workspace: str,
        n_clients: int | None = None,
        clients: list[str] | None = None,
        threads: int | None = None,
        gpu: str | None = None,
        log_config: str | None = None,
    ) -> None:
        """Runs the job as `feddp run --env sim --out WORKSPACE`, which continues an unfinished run of this plan."""
        _without("SimEnv", gpu_config=gpu, log_config=log_config)
        if self._resume:
            raise InputError("SimEnv continues an unfinished run by itself: leave resume= out, and name the same workspace")
        self._require_sites("SimEnv", clients, n_clients)
        out = Path(workspace)
        _drop_default_policy(out)
        few = threads if threads is not None and threads < len(self.plan.sites) else None
        session.run(self._request("SimEnv", out, few), simulator, self.name)

    def prepare(self, env: PocEnv) -> None:
        """Writes the project of a POC beside its workspace, and names it to `env`."""
        _without("PocEnv", use_he=env.use_he, docker_image=env.docker_image, gpu_ids=env.gpu_ids)
        self._require_sites("PocEnv", env.clients, None)
        if not os.environ.get(WORKSPACE):
            env.poc_workspace = str(Path(POC_FOLDER).resolve())
            note(f"PocEnv: the federation lies in {env.poc_workspace}, and not in FLARE's default folder")
        workspace = Path(env.poc_workspace)
        path = workspace.with_name(f"{workspace.name}.project.yml")
        if env.project_conf_path in ("", str(path)):  # the user's own, or that of an earlier recipe
            # PocEnv ends the sites' processes with the lead's rights
            content = project(self._request("PocEnv", workspace), free_ports(), env.username, org="consortium")
            write_text(path, yaml.safe_dump(content, sort_keys=False))
            env.project_conf_path = str(path)
            self.joined = partial(_await_sites, env, workspace / PROJECT, list(self.plan.sites))

    def to(self, obj: Any, target: str, id: str | None = None, **options: Any) -> None:
        """Raises InputError: nothing can be added to the job."""
        reason = next(reason for kind, reason in _REFUSED if isinstance(obj, kind))
        raise InputError(f"a FedDP job carries no {type(obj).__name__} for {target}: {reason}")

    def add_file_to(self, src_path: str, target: str, dest_dir: str | None = None, app_folder_type: str | None = None) -> None:
        """Raises InputError: nothing can be added to the job."""
        self.to(src_path, target)

    def _request(self, env: str, out: Path, threads: int | None = None) -> Request:
        if self._data is None:
            raise InputError(f"{env} needs the sites' images on this machine; name their root with data=ROOT")
        policies = policies_of(self.plan, self._data, self._device)
        return Request(self.plan, policies, out, threads, self._initial)

    def _require_sites(self, env: str, clients: Sequence[str] | None, number: int | None) -> None:
        sites = list(self.plan.sites)
        if clients is not None and sorted(clients) != sites:
            raise InputError(f"{env} has the clients {', '.join(clients)}, but the plan's sites are {', '.join(sites)}")
        if number is not None and number != len(sites):
            raise InputError(f"{env} has {number} clients, but the plan's sites are {', '.join(sites)}")


class JobMetadata(dict[str, Any]):
    """The job's metadata that `set_recipe_meta` sets."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Raises InputError for a key that a FedDP job does not have."""
        if key not in _META:
            raise InputError(f"a FedDP job has no metadata {key}; it has {' and '.join(_META)}")
        super().__setitem__(key, value)


def _word(value: Any) -> str:
    """A setting's value as it is written after `--set`."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without(env: str, **options: Any) -> None:
    """Raises InputError for an option of an environment that a FedDP run does not take."""
    if given := [name for name, value in options.items() if value]:
        raise InputError(f"{env}: {', '.join(given)} has no effect on a FedDP run; leave it out. The recipe has device=")


def _await_sites(env: PocEnv, folder: Path, sites: list[str]) -> None:
    """Waits until all sites have joined. PocEnv itself waits three seconds, and FLARE begins a job without the late sites.

    Args:
        folder: of the project; where an earlier federation was left, its last prod_NN has the kits.
    """
    note(f"PocEnv: waiting for {', '.join(sites)}")
    try:
        connect(max(folder.glob("prod_*")), sites, env.username).close()
    except FedDPError:
        env.stop()
        raise


def _drop_default_policy(out: Path) -> None:
    """Removes the allow-list of FLARE's own classes, which SimEnv has just written; the run writes ours to its workspace."""
    path = out / "local" / "resources.json.default"
    if path.is_file() and list(path.parent.iterdir()) == [path]:
        path.unlink()
        path.parent.rmdir()
