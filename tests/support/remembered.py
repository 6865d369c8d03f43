"""The images of data sets that no test writes, decoded once: most tests train on the same few.

Decoding and resizing takes 5 ms an image and mask, more than a step of a small network. Every site is given tensors of its own.
A test that replaces `read_image` sees every reading; one that replaces another function of `feddp.data.loading` would not.
"""

from pathlib import Path

import torch

from feddp.data import loading
from feddp.data.folder import SiteFolder
from feddp.data.loading import Sample, mapped

_plain, _reader = loading.load, loading.read_image
_roots: set[Path] = set()
_found: dict[tuple, list[Sample]] = {}


def never_written(root: Path) -> Path:
    """The same root, whose sites' images are decoded once from now on."""
    _roots.add(root)
    return root


def load(folder: SiteFolder, split: str, size: int, normalise: str = "zscore") -> list[Sample]:
    """As `feddp.data.loading.load`. Under a pretended GPU images are decoded anew, as each makes tensors of its own."""
    if folder.path.parent not in _roots or loading.read_image is not _reader:
        return _plain(folder, split, size, normalise)
    rows = folder.rows_of(split)
    gpu = torch.cuda.is_available  # each pretended GPU's is a function of its own
    key = folder.path, split, rows, size, normalise, folder.channels, folder.classes, folder.labels, gpu
    if key not in _found:
        _found[key] = _plain(folder, split, size, normalise)
    return [mapped(sample, torch.clone) for sample in _found[key]]
