"""Prepares public data sets as sites' folders: one module per data set, imported only when it is used."""

from functools import partial
from importlib import import_module
from pathlib import Path

from feddp.data.prepare.split import require_splitting


def _prepare(name: str, source: Path, out: Path, size: int | None, seed: int, split: str | None = None) -> list[str]:
    require_splitting(split)
    notes: list[str] = import_module(f"{__name__}.{name}").prepare(source, out, size, seed, split)
    return notes


PREPARE = {name: partial(_prepare, name) for name in ("lgg", "endopolyp", "fundus", "riga", "prostate", "lung")}
