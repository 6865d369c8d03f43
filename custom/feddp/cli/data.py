"""`feddp data`: prepare public sets or your own images, make synthetic ones, check any."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.options import BLACK_WHITE, SLICES, Voxels, given, words
from feddp.data.prepare import FOLDER, PREPARE
from feddp.data.prepare.split import SPLITTINGS
from feddp.errors import InputError
from feddp.limits import SIDE, VOXELS
from feddp.terminal import note, say

app = typer.Typer(no_args_is_help=True, help="Prepare, make and check the folders of sites.")
Out = Annotated[Path, typer.Option(help="Where the sites' folders go.")]


@app.command()
def prepare(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(PREPARE)}; {FOLDER}: your own images.")],
    source: Annotated[Path, typer.Option(help="The data set as downloaded, or your own: a folder or a zip.")],
    out: Out,
    size: Annotated[int | None, typer.Option(min=8, max=SIDE, help="Pixels of a side; as they are if left out.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides which patient goes to which split.")] = 0,
    split: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(SPLITTINGS)}: train/val/test in per cent of the patients, train:test, or the papers'"
            " own numbers or cases. If left out: 60/20/20, and the data set's own test images where they are published."
        ),
    ] = None,
    classes: Annotated[
        str, typer.Option(help=f"{FOLDER}: the classes, comma-separated, in the order of their values.")
    ] = "lesion",
    labels: Annotated[
        str | None,
        typer.Option(help=f"{FOLDER}: nested or exclusive classes. Default: nested, unless the masks show otherwise."),
    ] = None,
    colour: Annotated[
        list[str], typer.Option(help=f"{FOLDER}: CLASS=RED,GREEN,BLUE of each class, if masks are coloured.")
    ] = [],  # noqa: B006
    threshold: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=254,
            help=f"{FOLDER}: masks of one class with other values than 0 and 1 are foreground above it."
            " Default: 127, for masks of two levels alone.",
        ),
    ] = None,
    axis: Annotated[str, typer.Option(help=f"{FOLDER}: {SLICES}")] = "axial",
    window: Annotated[
        str | None,
        typer.Option(help=f"{FOLDER}: {BLACK_WHITE} Default: the least and the 99th percentile of each picture or volume."),
    ] = None,
    spacing: Annotated[
        str | None, typer.Option(help=f"{FOLDER}: millimetres between a picture's pixels, or ROWS,COLUMNS.")
    ] = None,
    channels: Annotated[int | None, typer.Option(help=f"{FOLDER}: convert all images to 1 (grey) or 3 (RGB) channels.")] = None,
    voxels: Voxels = VOXELS,
) -> None:
    """Turn a public data set, or your own images, into sites' folders."""
    if name not in PREPARE:
        raise InputError(f"{name}: not a known data set. Use one of {', '.join(PREPARE)}.")
    more = {}
    if name == FOLDER:
        from feddp.data.prepare.folder_options import FolderOptions

        given_classes = words(classes)
        more["options"] = FolderOptions.of(given_classes, labels, colour, threshold, axis, window, spacing, channels, voxels)
    elif others := given(context, "name", "source", "out", "size", "seed", "split"):
        raise InputError(f"{', '.join(others)}: only for feddp data prepare {FOLDER}. Leave it out.")
    for line in PREPARE[name](source, out, size, seed, split, **more):
        say(line)
    from feddp.data.preview import write_preview

    page = write_preview(out)
    note(f"{page} shows some images of each site with their outlines; look at it before you train")
    say(_summary(out))


@app.command()
def synthesize(
    out: Out,
    sites: Annotated[int, typer.Option(min=1, help="How many sites.")] = 4,
    images: Annotated[int, typer.Option(min=6, help="Images per site.")] = 60,
    size: Annotated[int, typer.Option(min=32, help="Pixels of a side.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same images.")] = 0,
    appearance: Annotated[float, typer.Option(help="How far colours, texture, noise and contrast differ, 0 to 1.")] = 1.0,
    prevalence: Annotated[float, typer.Option(help="How far the lesions' sizes differ, 0 to 1.")] = 1.0,
    style: Annotated[float, typer.Option(help="How far the raters' outlines differ, 0 to 1.")] = 1.0,
    label_noise: Annotated[float, typer.Option(help="Random errors of every outline, at all sites alike, 0 to 1.")] = 0.0,
    thin: Annotated[bool, typer.Option("--thin", help="Draw curves as thin as vessels instead of lesions.")] = False,
) -> None:
    """Make synthetic sites that differ from each other as hospitals do."""
    from feddp.data.habits import Dials
    from feddp.data.synthesize import synthesize as make_sites

    make_sites(out, sites, images, size, seed, Dials(appearance, prevalence, style, label_noise), thin)
    say(_summary(out))


@app.command()
def check(path: Annotated[Path, typer.Argument(help="A site's folder, or the folder that holds them.")]) -> None:
    """Print every problem of a folder, one per line; exit code 2 if there is any. Warn of images and masks that can hardly be
    meant so; without a problem, print the share of images and of pixels of each class by split."""
    from feddp.data.check import examined
    from feddp.flare.policy import SitePolicy

    found = examined(path)
    for problem in found.problems:
        say(problem)
    for warning in found.warnings(SitePolicy.min_images):
        say(f"warning: {warning}")
    if found.problems:
        raise typer.Exit(2)
    say(_summary(path))
    for line in (line for site in found.sites for line in site.lines()):
        say(line)


def _summary(path: Path) -> str:
    """One line: images per site and split."""
    from feddp.data.description import SPLITS
    from feddp.data.folder import SiteFolder, find_sites

    own = (path / "dataset.json").exists()
    parts = []
    for folder in map(SiteFolder.open, [path] if own else find_sites(path)):
        count = Counter(row.split for row in folder.rows)
        parts.append(f"{folder.site} " + " ".join(f"{count[split]} {split}" for split in SPLITS))
    return f"{path}: " + "; ".join(parts)
