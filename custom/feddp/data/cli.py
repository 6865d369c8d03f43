"""`feddp data`: prepare public sets, make synthetic ones, check any."""

from collections import Counter
from pathlib import Path

import typer

from feddp.data.check import check as find_problems
from feddp.data.description import SPLITS
from feddp.data.folder import SiteFolder, find_sites
from feddp.data.prepare import PREPARE
from feddp.data.synthesize import synthesize as make_sites
from feddp.errors import FedDPError

app = typer.Typer(no_args_is_help=True, help="Prepare, make and check sites' folders.")


@app.command()
def prepare(
    name: str = typer.Argument(help=f"One of {', '.join(PREPARE)}."),
    source: Path = typer.Option(help="The data set as downloaded: a folder or a zip."),
    out: Path = typer.Option(help="Where the sites' folders go."),
    size: int | None = typer.Option(None, min=8, help="Pixels of a side; as published if left out."),
    seed: int = typer.Option(0, min=0, help="Decides which patient goes to which split."),
):
    """Turn a public data set into sites' folders."""
    if name not in PREPARE:
        raise FedDPError(f"{name}: not a known data set. Use one of {', '.join(PREPARE)}.")
    for note in PREPARE[name](source, out, size, seed):
        typer.echo(note)
    typer.echo(_summary(out))


@app.command()
def synthesize(
    out: Path = typer.Option(help="Where the sites' folders go."),
    sites: int = typer.Option(4, min=1, help="How many sites."),
    images: int = typer.Option(60, min=6, help="Images a site."),
    size: int = typer.Option(96, min=32, help="Pixels of a side."),
    seed: int = typer.Option(0, min=0, help="Same seed, same bits."),
):
    """Make synthetic sites that differ as hospitals do."""
    make_sites(out, sites, images, size, seed)
    typer.echo(_summary(out))


@app.command()
def check(path: Path = typer.Argument(help="A site's folder, or the folder that holds them.")):
    """Say everything that is wrong with a folder, one line each; exit 2 if anything is."""
    problems = find_problems(path)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(2)
    typer.echo(_summary(path))


def _summary(path: Path) -> str:
    """One line: images per site and split."""
    own = (path / "dataset.json").exists()
    parts = []
    for folder in map(SiteFolder.open, [path] if own else find_sites(path)):
        count = Counter(row.split for row in folder.rows)
        parts.append(f"{folder.site} " + " ".join(f"{count[split]} {split}" for split in SPLITS))
    return f"{path}: " + "; ".join(parts)
