"""The options of a run, which `feddp run`, `feddp job` and `feddp compare` share, and a run on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from feddp.data.folder import SiteFolder
from feddp.data.pixels import MODES
from feddp.errors import InputError
from feddp.files import RUN, WEIGHTS
from feddp.flare.bounds import LEAST_SITES, Bounds
from feddp.flare.configuration import APPS, SERVER
from feddp.flare.policy import PLAN
from feddp.jobs.folder import federation_of, jobs_in
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA
from feddp.networks import DEFAULT
from feddp.networks.weights import fingerprint, load_checkpoint, read_network
from feddp.plan.resolve import build_network
from feddp.plan.schema import Plan
from feddp.protocol import CONSENTS
from feddp.run import pooled, session
from feddp.run.config import write_config
from feddp.run.defaults import METHOD, ROUNDS, SIZE
from feddp.run.session import Environment, Request
from feddp.training.claim import hold
from feddp.training.device import dealt
from feddp.training.settings import as_name, pairs


def environment(name: str) -> Environment:
    """The environment named "local", "sim" or "poc". No other one is imported: a local run imports no FLARE."""
    if name == "local":
        from feddp.run.local import local

        return local
    if name == "sim":
        from feddp.run.simulator import simulator

        return simulator
    from feddp.run.poc import poc

    return poc


@dataclass(frozen=True)
class Options:
    """The options of a run, without its data.

    Args:
        method: one of METHODS.
        calibration_epochs: of the last stage at a site; 0 leaves the stage out, None is the setting's default. A
            setting of that stage itself goes before it.
        settings: hyper-parameters as `key=value`.
        then: "igc" appends the calibration to any method.
        weights: a checkpoint file to start from, or "timm".
    """

    method: str = METHOD
    rounds: int = ROUNDS
    calibration_epochs: int | None = None
    network: str = DEFAULT
    size: int = SIZE
    seed: int = 0
    settings: tuple[str, ...] = ()
    then: str | None = None
    weights: str | None = None

    def typed(self) -> dict[str, Any]:
        """Returns the options by their names on the command line, for run.yaml."""
        file = self.weights not in (None, "timm")
        return {
            "method": self.method,
            "rounds": self.rounds,
            "calibration-epochs": self.calibration_epochs,
            "network": self.network,
            "size": self.size,
            "seed": self.seed,
            "set": pairs(self.settings),
            "then": self.then,
            "weights": Path(self.weights or "").resolve() if file else self.weights,
        }

    def plan(self, metadata: Mapping[str, Any], sites: Sequence[str]) -> Plan:
        """The plan for these sites, whose channels, classes and labels are `metadata`.

        Raises:
            InputError: an option is unknown, cannot be read or contradicts another; or as `initial`.
        """
        values: dict[str, Any] = pairs(self.settings)
        values.setdefault("min_sites", min(LEAST_SITES, len(sites)))  # what hospitals ask of a job (`flare.bounds`)
        if self.method not in METHODS:
            raise InputError(f"unknown method {self.method!r}; known: {', '.join(METHODS)}")
        if metadata["channels"] not in MODES:
            raise InputError(f"channels={metadata['channels']}: images of sites have {' or '.join(map(str, MODES))}")
        stages = METHODS[self.method].stages
        if self.then is not None:
            if self.then != "igc":
                raise InputError(f"--then {self.then}: the only stage that can follow is igc")
            stages = tuple(dict.fromkeys((*stages, CALIBRATE)))
        epochs = self.calibration_epochs
        if epochs is not None and not {HEADS, CALIBRATE} & set(stages):
            raise InputError(f"--calibration-epochs {epochs}: {self.method} has no calibration; append it with --then igc")
        if epochs == 0:
            if self.then is not None:
                raise InputError("--then igc asks for the calibration, --calibration-epochs 0 leaves it out; drop one")
            stages = tuple(stage for stage in stages if stage not in (HEADS, CALIBRATE))
        elif epochs is not None:
            names = {HEADS: "heads_epochs", CALIBRATE: "calibration_epochs"}
            values = {name: epochs for stage, name in names.items() if stage in stages} | values
        plan = Plan(
            method=self.method,
            network=self.network,
            rounds=self.rounds,
            size=self.size,
            seed=self.seed,
            stages=stages,
            sites=tuple(sorted(sites)),
            settings=values,
            **metadata,
        )
        initial = self.initial(plan)
        return plan if initial is None else replace(plan, weights=fingerprint(initial))

    def initial(self, plan: Plan) -> dict[str, Tensor] | None:
        """The tensors that every participant starts from, where they come from a file or from timm.

        Raises:
            InputError: the file does not fit the network, or timm's weights cannot be fetched.
        """
        if self.weights is None:
            return None
        network = build_network(plan, "timm" if self.weights == "timm" else None)
        if self.weights != "timm":
            load_checkpoint(network, Path(self.weights))
        return network.state_dict()


def run_here(
    data: Path,
    out: Path,
    options: Options,
    env: str = "sim",
    device: str = "cpu",
    threads: int | None = None,
    without_consent: Sequence[str] = (),
    sites: Sequence[str] | None = None,
    verbose: bool = False,
    rounds: Path | None = None,
) -> dict[str, Any]:
    """Runs over sites below `data` on this machine; leaves tables and networks in `out`, returns the results.

    Args:
        env: "local", without FLARE, "sim", FLARE's simulator, or "poc".
        device: each site's; of several, comma-separated, the sites get one each in turn.
        threads: sites at once, in "local" each in a process. If None, all of them in the simulator, and one in "local", which
            computes in this process.
        without_consent: sites that refuse every exchange among sites.
        sites: those that take part; all of them if None.
        verbose: shows the lines of the logs too.
        rounds: where runs with equal rounds keep and find them (`feddp.run.rounds`), if `env` is "local".

    Raises:
        InputError: an option is wrong, `out` is taken, or the run failed; says which, and where its log is.
    """
    sites, metadata = federation_of(data, sites)
    plan = options.plan(metadata, sites)
    if threads is not None and env == "poc":
        raise InputError("--threads is not for --env poc, where every site has processes of its own")
    if unknown := sorted(set(without_consent) - set(sites)):
        raise InputError(f"--without-consent {','.join(unknown)}: not below {data}; there are {', '.join(sites)}")
    policies = policies_of(plan, data, device, without_consent)
    where = {"env": env, "device": device, "threads": threads, "without-consent": list(without_consent)}
    config = write_config({"data": data.resolve(), "sites": list(sites), **options.typed(), **where}, plan.digest()[:12])
    request = Request(plan, policies, out, threads, options.initial(plan), env, config=config, verbose=verbose, rounds=rounds)
    if not METHODS[options.method].federated:
        if env == "poc" or threads is not None or without_consent:
            raise InputError(
                f"{options.method} runs outside FLARE, in one process: no --env poc, --threads or --without-consent"
            )
        return pooled.run(request)
    return session.run(request, environment(env), job_name(options.method, data))


def job_name(method: str, data: Path) -> str:
    """Returns the name of a job that a method runs over the sites below `data`: both names, in a job's letters."""
    return as_name(f"{method}_{data.resolve().name}")


def policies_of(plan: Plan, data: Path, device: str, without_consent: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The policies of a plan's sites, whose folders lie below `data`, on this machine; `device` as in `run_here`.

    Raises:
        InputError: as `_require_images`, or there is no such device.
    """
    _require_images(plan, [SiteFolder.open(data / site) for site in plan.sites])
    devices = dealt(device, plan.sites)  # asked for here, not at every site of a federation that has started
    return {
        site: {
            "data": str((data / site).resolve()),
            "device": devices[site],
            "consent": [] if site in without_consent else list(CONSENTS),
            "seed": PLAN,  # the same run, the same bits
            **({"spectra": plan.hyper.spectra} if SPECTRA in plan.stages else {}),  # one's own images: as many as one asks for
        }
        for site in plan.sites
    }


def _require_images(plan: Plan, folders: Sequence[SiteFolder]) -> None:
    """Raises InputError for a folder that lacks images to select or test with or, in a federation, to train on.

    The site itself would refuse the latter, by the bounds that admit the plan; nobody of a run on this machine edits those.
    """
    trained_on, federated = plan.training.trained_on, METHODS[plan.method].federated
    for folder in folders:
        for splits in ((plan.training.selection,), ("test",), *([trained_on] if federated else [])):
            if lacking := folder.lacking(*splits):
                raise InputError(lacking)
    fewest = min(folders, key=lambda folder: len(folder.rows_of(*trained_on)))
    images, bounds = len(fewest.rows_of(*trained_on)), Bounds(**Bounds.admitting(plan))
    if federated and bounds.too_few(images):
        raise InputError(
            f"{fewest.path} has {images} training images, but a step takes at least {bounds.batch}; add images, name --sites"
            f" without it, or --set batch={images}"
        )


def resume_here(out: Path, verbose: bool = False) -> dict[str, Any]:
    """Continues the unfinished run in `out` after its last completed round; returns its results.

    Raises:
        InputError: there is no unfinished run in `out`, its initial tensors are missing, or as `session.run`.
    """
    if not (out / RUN).exists():
        raise InputError(f"{out} holds no run; start one with `feddp run --data ROOT --out {out}`")
    stored = session.recorded(out)
    try:
        plan = Plan.from_json(stored["plan"])
    except InputError as error:
        raise InputError(f"{out / RUN} holds a plan that cannot be continued here: {error}") from None
    hold(out, patience=0)  # before a job that another process is replacing could be taken for one that was cut off
    jobs = jobs_in(out / session.JOB)
    file = jobs[0] / APPS[SERVER] / "config" / WEIGHTS if jobs else out / WEIGHTS  # a pooled run has no job
    if plan.weights and not file.exists():
        raise InputError(f"{out} lacks {file.name}, the tensors from which this run starts; type the same `feddp run` again")
    initial = read_network(file)[0] if plan.weights else None
    request = Request(plan, stored["policies"], out, stored["threads"], initial, stored["env"], verbose=verbose)
    if not METHODS[plan.method].federated:
        return pooled.run(request)
    return session.run(request, environment(stored["env"]), jobs[0].name if jobs else plan.method)
