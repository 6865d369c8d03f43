"""FedDP on NVIDIA FLARE: personalized federated segmentation."""

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from feddp.compare.cli import compare
from feddp.data.cli import app as data_app
from feddp.errors import FedDPError, is_of_user, written_down
from feddp.features.cli import features
from feddp.kit.cli import app as kit_app
from feddp.methods import METHODS
from feddp.networks import DEFAULT as NETWORK
from feddp.outside.cli import adapt, job_outside, join

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(data_app, name="data")
app.add_typer(kit_app, name="kit")
app.command()(compare)
app.command()(adapt)
app.command()(features)
app.command()(job_outside)
app.command()(join)


class Env(str, Enum):
    """Where a run runs."""

    sim = "sim"
    poc = "poc"


Method = Annotated[str, typer.Option("--method", help="A method's name; `feddp methods` lists them.")]
Network = Annotated[str, typer.Option(help="A network's name.")]
Rounds = Annotated[int, typer.Option(help="Communication rounds (the paper: 200).")]
Epochs = Annotated[
    int | None, typer.Option(help="Epochs of the calibration stage (the paper: 20, the default); 0 leaves it out.")
]
Size = Annotated[
    int,
    typer.Option(help="Images are resized to SIZE x SIZE pixels, a multiple of 32; the paper: 384."),
]
Seed = Annotated[int, typer.Option(help="Every random draw comes from it.")]
Settings = Annotated[list[str], typer.Option("--set", help="A hyper-parameter, key=value; `feddp methods` lists them.")]
Then = Annotated[str | None, typer.Option(help="`igc` appends the calibration stage to any method.")]
Weights = Annotated[str | None, typer.Option(help="Start from a local checkpoint file, or from `timm`'s own weights.")]


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
    without_consent: Annotated[str, typer.Option(help="Sites that refuse every exchange among sites, comma-separated.")] = "",
) -> None:
    """Run a method over all sites below DATA on this machine, and leave tables and every site's own network in OUT."""
    from feddp.report import table
    from feddp.run.options import Options, run_here

    options = Options(method, rounds, calibration_epochs, network, size, seed, tuple(settings), then, weights)
    refusing = tuple(filter(None, without_consent.split(",")))
    Console().print(table(run_here(data, out, options, env.value, device, threads, refusing)))


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
    from feddp.run.options import Options

    facts = {"channels": channels, "classes": tuple(classes.split(",")), "labels": labels}
    names = [name.strip() for name in sites.split(",") if name.strip()] if sites else []
    if data is not None:
        names, facts = federation_of(data)
    if not names:
        raise FedDPError("which sites? name them with --sites A,B,... or take them from --data ROOT")
    options = Options(method, rounds, calibration_epochs, network, size, seed, tuple(settings), then, weights)
    plan = options.plan(facts, names)
    print(export(plan, out, scope, options.initial(plan)))


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

    found = {}
    for name in METHODS:
        try:
            found[name] = METHODS[name]
        except FedDPError as error:
            print(f"{name}: {error}", file=sys.stderr)
    for name, method in found.items():
        about = (method.__doc__ or sys.modules[method.__module__].__doc__ or "").strip().splitlines()
        print(f"{name}: {about[0] if about else method.__qualname__}")
        beside = "; a whole personal model beside" if method.personal else ""
        print(f"  private: {', '.join(method.private)}{beside}; stages: {', '.join(method.stages)}")
    print("settings:")
    meanings = {name: text for method in found for name, text in Plan.meanings(method).items()}
    for name, value in sorted({k: v for m in found for k, v in Plan.known_settings(m).items()}.items()):
        print(f"  {name}={'' if value is None else value}: {meanings[name]}")


def main() -> None:
    """The command; a user's mistake ends in one line and exit code 2. What it writes is for its user alone."""
    os.umask(0o077)
    try:
        app()
    except (FedDPError, OSError) as error:
        mistake = isinstance(error, FedDPError) or is_of_user(error, sys.argv[1:])
        bug = "" if mistake else f" ({type(error).__name__}): this is a bug; please report it with {written_down(error)}"
        print(f"feddp: {error}{bug}", file=sys.stderr)
        sys.exit(2 if mistake else 1)
