"""FedDP on NVIDIA FLARE: personalized federated segmentation."""

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from feddp.data.cli import app as data_app
from feddp.errors import FedDPError
from feddp.methods import METHODS
from feddp.networks import DEFAULT as NETWORK

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(data_app, name="data")


class Env(str, Enum):
    """Where a run runs."""

    sim = "sim"
    poc = "poc"


Method = Annotated[str, typer.Option("--method", help=f"One of {', '.join(METHODS)}.")]
Network = Annotated[str, typer.Option(help="A network's name.")]
Rounds = Annotated[int, typer.Option(help="Communication rounds (the paper: 200).")]
Epochs = Annotated[
    int | None, typer.Option(help="Epochs of the calibration stage (the paper: 20, the default); 0 leaves it out.")
]
Size = Annotated[int, typer.Option(help="Images are resized to SIZE x SIZE pixels, a multiple of 32 (the paper: 384).")]
Seed = Annotated[int, typer.Option(help="Every random draw comes from it.")]
Settings = Annotated[list[str], typer.Option("--set", help="A hyper-parameter, key=value; `feddp methods` lists them.")]
Then = Annotated[str | None, typer.Option(help="`igc` appends the calibration stage to any method.")]
Weights = Annotated[str | None, typer.Option(help="Start from a local checkpoint file, or from `timm`'s own weights.")]


def _plan(
    facts: dict[str, Any], method: str, network: str, rounds: int, epochs: int | None, size: int, seed: int,
    settings: list[str], then: str | None, weights: str | None, sites: int,
):  # fmt: skip
    from feddp.methods.base import CALIBRATE
    from feddp.methods.plan import WEIGHTS, Plan

    values: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise FedDPError(f"--set {text}: write key=value")
        values[name] = value
    if sites == 1:
        values.setdefault("min_sites", 1)
    if method not in METHODS:
        raise FedDPError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    stages = METHODS[method].stages
    if then is not None:
        if then != "igc":
            raise FedDPError(f"--then {then}: the only stage that can follow is igc")
        stages = tuple(dict.fromkeys((*stages, CALIBRATE)))
    if epochs is not None and CALIBRATE not in stages:
        raise FedDPError(f"--calibration-epochs {epochs}: {method} has no calibration; append it with --then igc")
    if epochs == 0:
        if then is not None:
            raise FedDPError("--then igc asks for the calibration, --calibration-epochs 0 leaves it out; drop one")
        stages = tuple(stage for stage in stages if stage != CALIBRATE)
    elif epochs is not None:
        values["calibration_epochs"] = epochs
    return Plan(
        method=method, network=network, rounds=rounds, size=size, seed=seed, stages=stages, settings=values,
        weights=WEIGHTS if weights else "", **facts,
    )  # fmt: skip


def _initial(plan, weights: str | None):
    if weights is None:
        return None
    from feddp.networks import build
    from feddp.networks.weights import load_checkpoint
    from feddp.training.seeds import seed_of

    seed = seed_of(plan.seed, "network")
    network = build(plan.network, plan.channels, len(plan.classes), "timm" if weights == "timm" else None, seed)
    if weights != "timm":
        load_checkpoint(network, Path(weights))
    return network.state_dict()


@app.command()
def run(
    data: Annotated[Path, typer.Option(help="The root of the sites' folders.")],
    out: Annotated[Path, typer.Option(help="A new folder for the results.")],
    method: Method = "feddp",
    rounds: Rounds = 20,
    calibration_epochs: Epochs = None,
    network: Network = NETWORK,
    size: Size = 96,
    seed: Seed = 0,
    settings: Settings = [],  # noqa: B006
    then: Then = None,
    weights: Weights = None,
    env: Annotated[Env, typer.Option(help="FLARE's simulator, or POC mode: real certificates, one process a site.")] = Env.sim,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Sites at once in the simulator; default: all.")] = None,
    without_consent: Annotated[str, typer.Option(help="Sites that refuse the calibration exchange, comma-separated.")] = "",
) -> None:
    """Run a method over all sites below DATA on this machine, and leave tables and every site's own network in OUT."""
    from feddp.flare.policy import CALIBRATION
    from feddp.jobs import federation_of
    from feddp.report import table
    from feddp.run.poc import poc
    from feddp.run.session import Request
    from feddp.run.session import run as run_request
    from feddp.run.simulator import simulator

    sites, facts = federation_of(data)
    plan = _plan(facts, method, network, rounds, calibration_epochs, size, seed, settings, then, weights, len(sites))
    if threads is not None and env is Env.poc:
        raise FedDPError("--threads is the simulator's; in POC mode every site has a process of its own")
    refusing = set(filter(None, without_consent.split(",")))
    if unknown := sorted(refusing - set(sites)):
        raise FedDPError(f"--without-consent {','.join(unknown)}: not below {data}; there are {', '.join(sites)}")
    policies = {
        site: {
            "data": str((data / site).resolve()),
            "device": device,
            "consent": [] if site in refusing else [CALIBRATION],
        }
        for site in sites
    }
    request = Request(plan, policies, out, threads, _initial(plan, weights))
    results = run_request(request, poc if env is Env.poc else simulator, name=f"{method}_{data.resolve().name}")
    Console().print(table(results))


@app.command()
def job(
    out: Annotated[Path, typer.Option(help="The job folder to write; its name is the job's.")],
    data: Annotated[Path | None, typer.Option(help="Take sites, channels and classes from the folders below.")] = None,
    sites: Annotated[str | None, typer.Option(help="The sites' names, comma-separated.")] = None,
    channels: Annotated[int, typer.Option(help="Channels of the images.")] = 3,
    classes: Annotated[str, typer.Option(help="The foreground classes, comma-separated.")] = "lesion",
    labels: Annotated[str, typer.Option(help="nested or exclusive classes.")] = "nested",
    scope: Annotated[str, typer.Option(help="The scope of the sites' privacy.json under which the job runs.")] = "feddp",
    method: Method = "feddp",
    rounds: Rounds = 20,
    calibration_epochs: Epochs = None,
    network: Network = NETWORK,
    size: Size = 96,
    seed: Seed = 0,
    settings: Settings = [],  # noqa: B006
    then: Then = None,
    weights: Weights = None,
) -> None:
    """Export a job folder for the FLARE admin console's `submit_job`."""
    from feddp.jobs import export, federation_of

    facts = {"channels": channels, "classes": tuple(classes.split(",")), "labels": labels}
    names = [name.strip() for name in sites.split(",") if name.strip()] if sites else []
    if data is not None:
        names, facts = federation_of(data)
    if not names:
        raise FedDPError("which sites? name them with --sites A,B,... or take them from --data ROOT")
    plan = _plan(facts, method, network, rounds, calibration_epochs, size, seed, settings, then, weights, len(names))
    print(export(plan, names, out, scope, _initial(plan, weights)))


@app.command()
def predict(
    network: Annotated[Path, typer.Option(help="A site's network.safetensors.")],
    images: Annotated[Path, typer.Option(help="A folder of PNGs.")],
    out: Annotated[Path, typer.Option(help="Where the masks go, under the images' names.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Write a mask for every image, with a network that a run has left."""
    from feddp.predict import predict as write_masks

    print(f"{write_masks(network, images, out, device)} masks in {out}")


@app.command()
def methods() -> None:
    """List the methods and every hyper-parameter that --set reaches, with its default."""
    from feddp.methods.plan import Plan

    for name, method in METHODS.items():
        print(f"{name}: {(method.__doc__ or sys.modules[method.__module__].__doc__).strip().splitlines()[0]}")
        print(f"  private: {', '.join(method.private)}; stages: {', '.join(method.stages)}")
    print("settings:")
    meanings = {name: text for method in METHODS for name, text in Plan.meanings(method).items()}
    for name, value in sorted({k: v for m in METHODS for k, v in Plan.known_settings(m).items()}.items()):
        print(f"  {name}={'' if value is None else value}: {meanings[name]}")


def main() -> None:
    """The command; a user's mistake ends in one line and exit code 2."""
    try:
        app()
    except (FedDPError, OSError) as error:
        print(f"feddp: {error}", file=sys.stderr)
        sys.exit(2)
