"""`feddp features`."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.options import Device, Seed
from feddp.terminal import say


def features(
    models: Annotated[list[Path], typer.Option(help="The --out folder of a finished `feddp run`; again for a run beside it.")],
    data: Annotated[Path, typer.Option(help="The root of the sites' folders that it was run on.")],
    out: Annotated[Path, typer.Option(help="Where the table and the picture go; a new folder.")],
    site: Annotated[list[str], typer.Option(help="A site; again for more. Default: all of the runs'.")] = [],  # noqa: B006
    layer: Annotated[str, typer.Option(help="decoder: what the head is given; encoder: its deepest map.")] = "decoder",
    pixels: Annotated[int, typer.Option(min=2, help="Of each class at each site, at most.")] = 500,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Show the features that runs have of test pixels: a t-SNE, and how far foreground lies from background (KL)."""
    from feddp.features.report import FeaturesRequest
    from feddp.features.report import features as compare_features
    from feddp.reporting.screen import on_screen, show

    request = FeaturesRequest(models, data, out, site, layer, pixels, seed, device)
    show(on_screen(compare_features(request)))
    say(f"table_kl.csv, table_kl.tex and tsne.png: {out}")
