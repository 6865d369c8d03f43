"""Prepares data sets as sites' folders: one module per public data set, one for any other; imported only when used."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from feddp.data.prepare.split import require_splitting


def _prepare(
    name: str, source: Path, out: Path, size: int | None, seed: int, split: str | None = None, **options: Any
) -> list[str]:
    require_splitting(split)
    notes: list[str] = import_module(f"{__name__}.{name}").prepare(source, out, size, seed, split, **options)
    return notes


FOLDER = "folder"  # the user's own images; the others are public data sets
PREPARE = {name: partial(_prepare, name) for name in ("lgg", "endopolyp", "fundus", "riga", "prostate", "lung")} | {
    FOLDER: partial(_prepare, "own_images")
}
