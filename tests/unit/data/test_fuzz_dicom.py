"""Every attribute of a series, an RTSTRUCT and a SEG, missing, empty or of another type: the right result, or one message."""

import os
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from pydicom import DataElement, Dataset, Sequence
from pydicom.filewriter import dcmwrite

from feddp.data.formats.dicom import load
from feddp.data.formats.dicom_masks import class_maps
from feddp.data.formats.find import find
from feddp.data.prepare.own_masks import truths_of
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from support.scans import contours, series
from unit.data.test_studies import SQUARES, segmentation

# ContourSequence: a structure without contours is empty
OPTIONAL = (0x30060040,)
CODE = re.compile(
    r"object|attribute|None|force|dtype|literal|ufunc|operand|\(\)|index|NoneType|Traceback|array|tuple|sequence item"
)
EVERY = "FEDDP_FUZZ" in os.environ  # all changes of every element: minutes
CHANGES = ("missing", "empty", "text", "item", "bytes")


def places(dataset, path=()):
    """The paths of all elements: (tag, index of the item, tag, ...). Pixels are not among them."""
    for element in dataset:
        if element.tag.group >= 0x7FE0:
            continue
        yield (*path, element.tag)
        for number, item in enumerate(element.value if element.VR == "SQ" else ()):
            yield from places(item, (*path, element.tag, number))


@contextmanager
def spoilt(dataset, path, change):
    """Has one element changed."""
    owner = dataset
    for tag, number in zip(path[:-1:2], path[1::2], strict=True):
        owner = owner[tag].value[number]
    tag, before = path[-1], owner[path[-1]]
    wrong = {"text": ("LO", "x"), "item": ("SQ", Sequence([Dataset()])), "bytes": ("OB", b"\xff\xfe\x00\x01")}
    del owner[tag]
    if change != "missing":
        empty = (before.VR, [] if before.VR == "SQ" else None)
        owner[tag] = DataElement(tag, *wrong.get(change, empty))
    yield dataset
    owner[tag] = before


def same(value, other):
    return value is other if value is None else value.shape == other.shape and np.array_equal(value, other)


def each_change(file, dataset, read, optional=()):
    """Rewrites a file with one change of each of its elements; returns how many were refused.

    Without an `optional` element, the file says something else.
    """
    wanted, refused = read(), 0
    for number, path in enumerate([*places(dataset)]):
        for change in CHANGES if EVERY else CHANGES[number % 5 : number % 5 + 1]:
            with spoilt(dataset, path, change) as changed:
                dcmwrite(file, changed)
            try:
                assert same(read(), wanted) or path[-1] in optional, (path, change)
            except FedDPError as error:
                refused += 1
                message = str(error).replace(str(file.parent), "")
                assert len(message.splitlines()) == 1
                assert file.name in message, (path, change, message)
                assert not CODE.search(message), (path, change, message)
    return refused


@pytest.mark.filterwarnings("ignore")
def test_fuzz_elements_of_an_image(tmp_path):
    (image,) = series(tmp_path / "s", slices=1)
    image.PixelPaddingValue, image.WindowCenter, image.ImageType = -1, [40, 50], ["ORIGINAL", "PRIMARY"]
    image.preamble = bytes(128)

    def read():
        tree = Source(tmp_path / "s")
        found = find(tree, "s")
        for wrong in found.refused:
            raise wrong
        (entry,) = found.entries
        return entry.read(tree, "axial").pixels

    assert each_change(tmp_path / "s/1.dcm", image, read) > 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["RTSTRUCT", "SEG"])
def test_fuzz_elements_of_masks(tmp_path, kind):
    """Of a file that is no longer known as a mask, the series is told to have none."""
    images = series(tmp_path / "top/images/s", slices=1)
    file = tmp_path / "top/masks/m.dcm"
    contours(file, images, [(0, [(4, 6), (4, 19), (11, 19), (11, 6)])])
    if kind == "SEG":
        segmentation(images, SQUARES[:1].astype(np.uint8)).save_as(file)
    tree = Source(tmp_path / "top")
    entries = find(tree, "top/images")
    origin = entries.entries[0].read(tree, "axial").origin
    dataset = load(tree, "top/masks/m.dcm")
    dataset.preamble = bytes(128)

    def read():
        found = find(Source(tmp_path / "top"), "top/masks")
        for wrong in found.refused:
            raise wrong
        try:
            truths_of(tree, entries, found, ["lesion"])
        except FedDPError as error:
            raise FedDPError(f"{error} m.dcm") from None
        return class_maps(Path("m.dcm"), load(tree, "top/masks/m.dcm"), origin, ["lesion"])

    assert each_change(file, dataset, read, OPTIONAL) > 5
