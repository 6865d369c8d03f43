"""`feddp export`."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from feddp.terminal import say, working


class Format(str, Enum):
    """Its members are the names in `feddp.export.FORMATS`."""

    onnx = "onnx"
    bundle = "bundle"
    card = "card"


def export(
    network: Annotated[Path, typer.Option(help="A site's network.safetensors.")],
    to: Annotated[Format, typer.Option(help="ONNX, a MONAI bundle, or a model card (Markdown, JSON, XML).")],
    out: Annotated[Path, typer.Option(help="A new folder for the export.")],
) -> None:
    """Write a finished network in a format of others. Afterwards onnxruntime alone runs OUT/network.onnx, MONAI alone runs the
    bundle (in OUT: `python -m monai.bundle run --config_file configs/inference.json`), and a committee reads OUT/card.md."""
    from feddp.export import export as written

    with working(f"Exporting {network}"):
        first = written(network, to.value, out)
    say(first)
