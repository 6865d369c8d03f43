"""`feddp calibrate-threshold`."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.options import Device
from feddp.terminal import say


def calibrate_threshold(
    network: Annotated[Path, typer.Option(help="A site's network.safetensors.")],
    data: Annotated[Path, typer.Option(help="The site's folder, with masks; its split val is used.")],
    out: Annotated[Path, typer.Option(help="The JSON file for the threshold.")],
    alpha: Annotated[float, typer.Option(help="The largest expected false-negative rate.")] = 0.1,
    device: Device = "cpu",
) -> None:
    """Choose the threshold under which masks miss at most ALPHA of a new patient's foreground, in expectation (conformal risk
    control). Afterwards: `feddp predict --threshold OUT`."""
    from feddp.run.threshold import calibrate

    done = calibrate(network, data, alpha, out, device)
    say(
        f"threshold {done['threshold']:.4f} in {out}: expected false-negative rate at most {alpha:g}"
        f" ({done['false_negative_rate']:.4f} on {done['patients']} validation patients)"
    )
