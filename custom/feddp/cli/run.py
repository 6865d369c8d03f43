"""`feddp run`, `feddp job`, which exports the same as a FLARE job, `feddp predict` and `feddp methods`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.options import (
    Device,
    Env,
    Environment,
    Epochs,
    Method,
    Network,
    Rounds,
    Scope,
    Seed,
    Settings,
    Size,
    Then,
    Threads,
    Weights,
    given,
    words,
)
from feddp.cli.report import after
from feddp.errors import FedDPError, InputError
from feddp.networks import DEFAULT as NETWORK
from feddp.run.defaults import METHOD, ROUNDS, SIZE


def run(
    context: typer.Context,
    data: Annotated[Path | None, typer.Option(help="The root of the sites' folders.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the results, or an unfinished run.")] = None,
    method: Method = METHOD,
    rounds: Rounds = ROUNDS,
    calibration_epochs: Epochs = None,
    network: Network = NETWORK,
    size: Size = SIZE,
    seed: Seed = 0,
    settings: Settings = [],  # noqa: B006
    then: Then = None,
    weights: Weights = None,
    env: Environment = Env.sim,
    device: Device = "cpu",
    threads: Threads = None,
    without_consent: Annotated[str, typer.Option(help="Sites that refuse all exchanges between sites, comma-separated.")] = "",
    resume: Annotated[
        Path | None, typer.Option(help="Continue the unfinished run in this folder; --retries is the only other option.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="Continue a run that fails, at most so often.")] = 0,
) -> None:
    """Run a method over all sites below DATA on this machine; OUT gets tables and each site's own network."""
    from feddp.reporting.page import table
    from feddp.reporting.screen import show
    from feddp.run.options import Options, resume_here, run_here
    from feddp.run.retry import retried

    if resume is not None:
        if others := given(context, "resume", "retries"):
            raise InputError(
                f"--resume continues the run in {resume} as it began; leave out {', '.join(others)}. A run with other options,"
                " or with more rounds, is a new one: name its folder with --out"
            )
        folder = resume
        show(table(retried(lambda: resume_here(folder), folder, retries)))
        after(folder)
        return
    if data is None or out is None:
        raise InputError("name the sites' folders with --data and a new folder with --out, or a run to continue with --resume")
    options = Options(method, rounds, calibration_epochs, network, size, seed, tuple(settings), then, weights)
    silent = words(without_consent)
    show(table(retried(lambda: run_here(data, out, options, env.value, device, threads, silent), out, retries)))
    after(out)


def job(
    out: Annotated[Path, typer.Option(help="The job folder to write; its name is the job's.")],
    data: Annotated[Path | None, typer.Option(help="Take sites, channels and classes from the folders below.")] = None,
    sites: Annotated[str | None, typer.Option(help="The sites' names, comma-separated.")] = None,
    channels: Annotated[int, typer.Option(help="Channels of the images.")] = 3,
    classes: Annotated[str, typer.Option(help="The foreground classes, comma-separated.")] = "lesion",
    labels: Annotated[str, typer.Option(help="nested or exclusive classes.")] = "nested",
    scope: Scope = "feddp",
    method: Method = METHOD,
    rounds: Rounds = ROUNDS,
    calibration_epochs: Epochs = None,
    network: Network = NETWORK,
    size: Size = SIZE,
    seed: Seed = 0,
    settings: Settings = [],  # noqa: B006
    then: Then = None,
    weights: Weights = None,
    resume: Annotated[str, typer.Option(help="The id of a run's first job: continue it after its last round.")] = "",
) -> None:
    """Export a job folder for the FLARE admin console's `submit_job`."""
    from feddp.jobs.folder import export, federation_of
    from feddp.run.options import Options

    metadata = {"channels": channels, "classes": words(classes), "labels": labels}
    names = list(words(sites or ""))
    if data is not None:
        names, metadata = federation_of(data)
    if not names:
        raise InputError("the job has no sites: name them with --sites A,B,... or take them from --data ROOT")
    options = Options(method, rounds, calibration_epochs, network, size, seed, tuple(settings), then, weights)
    plan = options.plan(metadata, names)
    replaced = out.is_dir() and any(out.iterdir())
    print(export(plan, out, scope, options.initial(plan), resume))
    if replaced:
        print(f"{out} held another export, which this one replaced; plan {plan.digest()[:12]}", file=sys.stderr)


def predict(
    network: Annotated[Path, typer.Option(help="A site's network.safetensors.")],
    images: Annotated[Path, typer.Option(help="A folder of PNGs.")],
    out: Annotated[Path, typer.Option(help="Where the masks go, under the images' names.")],
    device: Device = "cpu",
) -> None:
    """Write a mask for every image, with a network that a run has left."""
    from feddp.reading import counted
    from feddp.run.predict import predict as write_masks

    print(f"{counted(write_masks(network, images, out, device), 'mask')} in {out}")


def methods() -> None:
    """List the methods, and every hyper-parameter that --set can change with its default."""
    from feddp.methods import METHODS
    from feddp.plan.schema import Plan

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
