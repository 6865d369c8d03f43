"""What `feddp predict` does with its options, and `feddp calibrate-threshold`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.options import Device
from feddp.errors import InputError


def predict(
    network: Path | None,
    images: Path,
    out: Path,
    device: str,
    deployed: bool,
    registry: Path,
    threshold: Path | None,
    uncertainty: bool,
    also: Sequence[Path],
) -> None:
    """Writes the masks and, with `uncertainty`, what the networks or the symmetries disagree on."""
    from feddp.reading import counted
    from feddp.run.predict import predict as write_masks
    from feddp.run.registry import chosen
    from feddp.run.threshold import read_threshold
    from feddp.run.uncertainty import require_alike, write_uncertainty
    from feddp.training.metrics import THRESHOLD

    if also and not uncertainty:
        raise InputError("--also names networks for --uncertainty; add --uncertainty")
    file = chosen(network, deployed, registry)
    require_alike(file, also)
    above = read_threshold(threshold, file) if threshold else THRESHOLD
    print(f"{counted(write_masks(file, images, out, device, above), 'mask')} in {out}")
    if uncertainty:
        print(f"the images to look at first: {write_uncertainty(file, also, images, out, device)}")


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
    print(
        f"threshold {done['threshold']:.4f} in {out}: expected false-negative rate at most {alpha:g}"
        f" ({done['false_negative_rate']:.4f} on {done['patients']} validation patients)"
    )
