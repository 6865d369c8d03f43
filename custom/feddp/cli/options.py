"""The options that several commands share, and how lists are read."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from feddp.errors import InputError


class Env(str, Enum):
    """Where a run runs."""

    local = "local"
    sim = "sim"
    poc = "poc"


Data = Annotated[Path, typer.Option(help="The root of the sites' folders.")]
Models = Annotated[Path, typer.Option(help="The --out folder of a finished `feddp run`.")]
Method = Annotated[str, typer.Option("--method", help="A method's name; `feddp methods` lists them.")]
Network = Annotated[str, typer.Option(help="A network's name.")]
Rounds = Annotated[int, typer.Option(help="Communication rounds (the paper: 200).")]
Epochs = Annotated[
    int | None, typer.Option(help="Epochs of the calibration stage (the paper: 20, the default); 0 leaves the stage out.")
]
Size = Annotated[int, typer.Option(help="Images are resized to SIZE x SIZE pixels, a multiple of 32; the paper: 384.")]
Seed = Annotated[int, typer.Option(min=0, help="The seed of every random draw.")]
Settings = Annotated[list[str], typer.Option("--set", help="A hyper-parameter, key=value; `feddp methods` lists them.")]
Then = Annotated[str | None, typer.Option(help="`igc` appends the calibration stage to any method.")]
Weights = Annotated[str | None, typer.Option(help="Start from a local checkpoint file, or from the weights of `timm`.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Devices = Annotated[
    str, typer.Option("--device", help="The sites' cpu, cuda or cuda:N; of several, comma-separated, one per site in turn.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Sites that run at once; default: in the simulator all, with --env local 1 (in this process)."),
]
Environment = Annotated[
    Env, typer.Option("--env", help="Without FLARE, FLARE's simulator, or POC mode with real certificates.")
]
Scope = Annotated[str, typer.Option(help="The scope of the sites' privacy.json under which the job runs.")]
Voxels = Annotated[
    int,
    typer.Option(
        min=1,
        help="The most voxels of a volume or series. Each takes 4 bytes of a temporary file in TMPDIR, and 2 to 4 of memory:"
        " 2000 slices of 512 x 512 take 2 GiB of disk and 1 to 2 of memory.",
    ),
]
SLICES = "The slices of NIfTI volumes: axial, coronal or sagittal."
BLACK_WHITE = "LOW,HIGH: the values that become black and white."
Strategy = Annotated[str, typer.Option(help="routing, global, average, ensemble, tent or ttt.")]


def given(context: typer.Context, *but: str) -> list[str]:
    """The options that the user wrote, without those of the parameters `but`."""
    others = [parameter for parameter in context.command.params if parameter.name not in but]
    # by its name: the class of a source is click's or, in later versions, typer's own
    sources = [getattr(context.get_parameter_source(parameter.name or ""), "name", None) for parameter in others]
    return [parameter.opts[0] for parameter, source in zip(others, sources, strict=True) if source == "COMMANDLINE"]


def words(text: str) -> tuple[str, ...]:
    """A comma-separated list without its blanks; nothing is an empty list.

    Raises:
        InputError: an entry is empty.
    """
    found = tuple(word.strip() for word in text.split(",")) if text.strip() else ()
    if "" in found:
        raise InputError(f"{text!r} has an empty entry; remove a comma, or write the name that is missing")
    return found
