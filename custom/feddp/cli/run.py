"""`feddp run`, `feddp job`, which exports the same as a FLARE job, `feddp predict` and `feddp methods`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.config import from_file, merged
from feddp.cli.models import HERE, RegistryFolder
from feddp.cli.options import (
    BLACK_WHITE,
    SLICES,
    Device,
    Devices,
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
    Voxels,
    Weights,
    given,
    words,
)
from feddp.cli.report import after
from feddp.errors import FedDPError, InputError
from feddp.limits import VOXELS
from feddp.networks import DEFAULT as NETWORK
from feddp.run.defaults import METHOD, ROUNDS, SIZE
from feddp.terminal import note, say


def run(
    context: typer.Context,
    data: Annotated[Path | None, typer.Option(help="The root of the sites' folders.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the results, or an unfinished run.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="The run.yaml of a run, which it repeats; what is typed wins.", is_eager=True, callback=from_file),
    ] = None,
    sites: Annotated[str, typer.Option(help="The sites that take part, comma-separated; default: all below DATA.")] = "",
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
    device: Devices = "cpu",
    threads: Threads = None,
    without_consent: Annotated[str, typer.Option(help="Sites that refuse all exchanges between sites, comma-separated.")] = "",
    resume: Annotated[
        Path | None, typer.Option(help="Continue the unfinished run in this folder; takes --retries and --verbose, no other.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="Continue a run that fails, at most so often.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what FLARE writes to its logs.")] = False,
) -> None:
    """Run a method over all sites below DATA on this machine; OUT gets tables and each site's own network."""
    from feddp.reporting.page import table
    from feddp.reporting.screen import show
    from feddp.run.options import Options, resume_here, run_here
    from feddp.run.retry import retried

    if resume is not None:
        if others := given(context, "resume", "retries", "verbose"):
            raise InputError(
                f"--resume continues the run in {resume} as it began; leave out {', '.join(others)}. A run with other options,"
                " or with more rounds, is a new one: name its folder with --out"
            )
        folder = resume
        show(table(retried(lambda: resume_here(folder, verbose), folder, retries)))
        after(folder)
        return
    if config is not None:
        settings = merged(context, config, settings)
    if data is None or out is None:
        raise InputError("name the sites' folders with --data and a new folder with --out, or a run to continue with --resume")
    options = Options(method, rounds, calibration_epochs, network, size, seed, tuple(settings), then, weights)
    silent, some = words(without_consent), words(sites) or None
    show(table(retried(lambda: run_here(data, out, options, env.value, device, threads, silent, some, verbose), out, retries)))
    after(out)


def job(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The job folder to write; its name is the job's.")],
    data: Annotated[Path | None, typer.Option(help="Take sites, channels and classes from the folders below.")] = None,
    sites: Annotated[
        str | None, typer.Option(help="The sites' names, comma-separated; with --data, only these of its sites.")
    ] = None,
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
    gpus: Annotated[int, typer.Option(min=0, help="The number of GPUs that each site gives the job; 0 asks for none.")] = 0,
    gpu_memory: Annotated[float, typer.Option(min=0, help="With --gpus: GiB that each of them must have free.")] = 0,
) -> None:
    """Export a job folder for the FLARE admin console's `submit_job`."""
    from feddp.jobs.folder import export, federation_of
    from feddp.plan.resolve import idle_queries
    from feddp.run.options import Options

    metadata = {"channels": channels, "classes": words(classes), "labels": labels}
    names = list(words(sites or ""))
    if data is not None:
        if others := [name for name in given(context) if name in ("--channels", "--classes", "--labels")]:
            raise InputError(f"{', '.join(others)}: the folders below {data} say this; leave it out")
        if sites is None or names:
            names, metadata = federation_of(data, names or None)
    if not names:
        raise InputError("the job has no sites: name them with --sites A,B,... or take them from --data ROOT")
    options = Options(method, rounds, calibration_epochs, network, size, seed, tuple(settings), then, weights)
    plan = options.plan(metadata, names)
    if gpu_memory and not gpus:
        raise InputError(f"--gpu-memory {gpu_memory:g} is the memory of the GPUs of --gpus; name their number")
    memory = {"mem_per_gpu_in_GiB": gpu_memory} if gpu_memory else {}
    asked = {site: {"num_of_gpus": gpus, **memory} for site in plan.sites} if gpus else {}
    replaced = out.is_dir() and any(out.iterdir())
    say(export(plan, out, scope, options.initial(plan), resume, asked))
    if idle := idle_queries(plan):
        note(f"warning: {idle}")
    if replaced:
        note(f"{out} held another export, which this one replaced; plan {plan.digest()[:12]}")


def predict(
    context: typer.Context,
    images: Annotated[Path, typer.Option(help="A folder of PNG, JPEG, TIFF, NIfTI or DICOM.")],
    out: Annotated[Path, typer.Option(help="Where the masks go, under the images' names.")],
    network: Annotated[Path | None, typer.Option(help="A site's network.safetensors.")] = None,
    device: Device = "cpu",
    format: Annotated[str, typer.Option(help="png, nifti (of NIfTI images) or dicom-seg (of DICOM images).")] = "png",
    overlay: Annotated[bool, typer.Option("--overlay", help="Write the images too, with the masks over them.")] = False,
    axis: Annotated[str | None, typer.Option(help=f"{SLICES} Default: as the training images.")] = None,
    window: Annotated[str | None, typer.Option(help=f"{BLACK_WHITE} Default: as the training images.")] = None,
    convert: Annotated[bool, typer.Option("--convert", help="Convert images to the network's channels, grey or RGB.")] = False,
    deployed: Annotated[bool, typer.Option("--deployed", help="Use the network of `feddp models deploy`.")] = False,
    registry: RegistryFolder = HERE,
    threshold: Annotated[Path | None, typer.Option(help="A file of `feddp calibrate-threshold`; default: 0.5.")] = None,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Also write where flips and turns of an image, or networks, disagree.")
    ] = False,
    also: Annotated[list[Path], typer.Option(help="With --uncertainty: another site's network; may be repeated.")] = [],  # noqa: B006
    voxels: Voxels = VOXELS,
) -> None:
    """Write a mask for every image, with a network that a run has left, or with the deployed one; exit code 1 if some files
    could not be read."""
    from feddp.adaptation.models import prepared
    from feddp.data.formats.scan import window_of
    from feddp.reading import counted
    from feddp.run.images import Reading
    from feddp.run.predict import PredictOptions
    from feddp.run.predict import predict as write_masks
    from feddp.run.registry import chosen
    from feddp.run.threshold import read_threshold
    from feddp.run.uncertainty import require_alike, write_uncertainty
    from feddp.training.metrics import THRESHOLD

    if also and not uncertainty:
        raise InputError("--also names networks for --uncertainty; add --uncertainty")
    if not deployed and "--registry" in given(context):
        raise InputError(f"--registry {registry} is for --deployed; add that, or leave --registry out")
    file = chosen(network, deployed, registry)
    reading = Reading(axis, window_of(window), convert, prepared(file), voxels)
    require_alike(file, also)
    above = read_threshold(threshold, file) if threshold else THRESHOLD
    done = write_masks(file, images, out, device, PredictOptions(reading, format, overlay, above))
    say(f"{counted(done.masks, 'mask')} in {out}")
    for line in done.warnings:
        note(f"warning: {line}")
    if uncertainty:
        say(f"the images to look at first: {write_uncertainty(file, also, images, out, device, reading)}")
    for line in done.refused:
        note(line)
    if done.refused:
        raise typer.Exit(1)


def methods() -> None:
    """List the methods, and every hyper-parameter that --set can change with its default."""
    from feddp.methods import METHODS
    from feddp.plan.schema import Plan

    found = {}
    for name in METHODS:
        try:
            found[name] = METHODS[name]
        except FedDPError as error:
            note(f"{name}: {error}")
    for name, method in found.items():
        about = (method.__doc__ or sys.modules[method.__module__].__doc__ or "").strip().splitlines()
        say(f"{name}: {about[0] if about else method.__qualname__}")
        beside = "; a whole personal model beside" if method.personal else ""
        say(f"  private: {', '.join(method.private)}{beside}; stages: {', '.join(method.stages)}")
    say("settings:")
    meanings = {name: text for method in found for name, text in Plan.meanings(method).items()}
    for name, value in sorted({k: v for m in found for k, v in Plan.known_settings(m).items()}.items()):
        say(f"  {name}={'' if value is None else value}: {meanings[name]}")
