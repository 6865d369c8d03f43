"""`feddp compare`."""

import re
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.options import Data, Devices, Rounds, Settings, Size, Threads, Weights, words
from feddp.cli.report import after
from feddp.errors import FedDPError, InputError
from feddp.networks import DEFAULT
from feddp.run.defaults import ROUNDS, SIZE
from feddp.terminal import say


class ManyRuns(str, Enum):
    """Where the runs of a comparison run."""

    local = "local"
    sim = "sim"


def compare(
    data: Data,
    out: Annotated[Path, typer.Option(help="The comparison's folder; the same command continues where it stopped.")],
    methods: Annotated[
        str, typer.Option(help="Variants, comma-separated: feddp, fedbabu+igc, feddp@lambda=0, feddp@when=before.")
    ] = "",
    studies: Annotated[
        str,
        typer.Option(
            help="Of ablation, backbones, private, lambda, igc, local_epochs, tau, enhancement, vc_components, vc_paa,"
            " vc_private, vc_number, vc_lambda; comma-separated."
        ),
    ] = "",
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Every site in turn outside the federation (IOP-FL's Table II).")
    ] = False,
    outside_studies: Annotated[
        str,
        typer.Option(
            help="The same for inside_sites, losses, tau, time (IOP-FL's Figs. 6 to 8), joined (pFLFE's Table 7);"
            " comma-separated."
        ),
    ] = "",
    folds: Annotated[int, typer.Option(help="Cross-validation in this many parts of each site's patients.")] = 0,
    unseen: Annotated[Path | None, typer.Option(help="An unseen site's folder, not below DATA, to test --methods on.")] = None,
    seeds: Annotated[str, typer.Option(help="Every run is repeated with each of these seeds, comma-separated.")] = "0",
    rounds: Rounds = ROUNDS,
    calibration_epochs: Annotated[int | None, typer.Option(help="Epochs of each stage after training (paper: 20).")] = None,
    network: Annotated[str, typer.Option(help="A network's name; a variant's own is @network=NAME.")] = DEFAULT,
    size: Size = SIZE,
    settings: Settings = [],  # noqa: B006
    weights: Weights = None,
    env: Annotated[ManyRuns, typer.Option("--env", help="Without FLARE, or in FLARE's simulator.")] = ManyRuns.sim,
    device: Devices = "cpu",
    threads: Threads = None,
) -> None:
    """Run methods and studies over all sites below DATA, and leave the paper's tables and figures in OUT."""
    from feddp.compare.comparison import compare as run
    from feddp.compare.request import ComparisonRequest
    from feddp.compare.runs import Place
    from feddp.compare.studies import TABLE_II
    from feddp.compare.variants import Common
    from feddp.reporting.screen import on_screen, show

    common = Common(rounds, calibration_epochs, network, size, tuple(settings), weights)
    command = shlex.join(["feddp", *sys.argv[1:]])
    outside = tuple(dict.fromkeys([*([TABLE_II] if leave_one_out else []), *words(outside_studies)]))
    studied = tuple(dict.fromkeys(words(studies)))
    place = Place(env.value, device, threads)
    done = run(
        ComparisonRequest(words(methods), data, out, common, _whole(seeds), studied, unseen, place, command, outside, folds)
    )
    show(on_screen(done.summary))
    say(f"Tables and figures: {out}")
    after(out)
    if done.failed:
        raise FedDPError(f"{len(done.failed)} runs failed, the same command tries them again: {'; '.join(done.failed)}")


def _whole(text: str) -> tuple[int, ...]:
    numbers = words(text)
    if not all(re.fullmatch("[0-9]{1,18}", number) for number in numbers):
        raise InputError(f"--seeds {text}: write whole numbers from 0 on, comma-separated")
    return tuple(map(int, numbers))
