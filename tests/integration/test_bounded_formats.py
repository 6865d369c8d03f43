"""Pictures, series and masks from somebody who means harm: `feddp.data.formats` refuses them by their headers, in one line."""

import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile
from pydicom import Dataset, dcmread
from pydicom.uid import generate_uid

from feddp.data.formats.dicom import load
from feddp.data.formats.dicom_masks import class_maps
from feddp.data.formats.dicom_series import read_series
from feddp.data.formats.find import find
from feddp.data.formats.pictures import read_labels, read_picture
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from feddp.limits import CONTOUR_BYTES
from support.hostile_files import cost
from support.scans import contours, series

START = "from feddp.data.formats.find import find; from feddp.data.prepare.source import Source"


def reading(folder: Path) -> tuple[str, float]:
    """What is said of the only image of a folder, and the memory in MiB that it took."""
    return cost(
        f"{START}; import feddp.data.formats.dicom_series, feddp.data.formats.pictures, tifffile",
        f"tree = Source(Path({str(folder)!r})); found = find(tree, 'set')\n"
        "    for error in found.refused: raise error\n"
        "    found.entries[0].read(tree, 'axial')",
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def test_a_tiff_of_16_bits_and_billions_of_pixels_is_refused_by_its_header(folder):
    """A TIFF that tifffile has to read, with its width and length (tags 256 and 257) changed to 60000."""
    file = folder / "a.tif"
    tifffile.imwrite(file, np.zeros((8, 8, 3), np.uint16), photometric="rgb")
    content = bytearray(file.read_bytes())
    with tifffile.TiffFile(file) as tiff:
        for tag in (256, 257):
            place = tiff.pages[0].tags[tag].valueoffset
            content[place : place + 2] = struct.pack("<H", 60_000)
    file.write_bytes(content)
    error, grown = reading(folder)
    assert "a.tif" in error
    assert "Scale it down" in error
    assert grown < 60


def test_a_series_whose_headers_say_gibibytes_is_refused_before_they_are_made(folder):
    """Rows and columns of 60000, in four files of a few kilobytes."""
    for dataset, file in zip(series(folder), sorted(folder.iterdir()), strict=True):
        dataset.Rows = dataset.Columns = 60_000
        dataset.save_as(file, enforce_file_format=True)
    error, grown = reading(folder)
    assert "60000 x 60000 pixels, too many" in error
    assert grown < 60


def test_sequences_nested_without_end_are_one_line(folder):
    series(folder, slices=1)
    item = struct.pack("<HHL", 0xFFFE, 0xE000, 0xFFFFFFFF) + struct.pack("<HH2sHL", 0x0008, 0x1140, b"SQ", 0, 0xFFFFFFFF)
    content = (folder / "1.dcm").read_bytes()
    start = struct.pack("<HH2sHL", 0x7FE1, 0x1010, b"SQ", 0, 0xFFFFFFFF)
    (folder / "1.dcm").write_bytes(content + start + item * 20_000)
    with pytest.raises(FedDPError, match="1.dcm: is not a readable DICOM file"):
        load(Source(folder), "set/1.dcm")


def test_contours_of_too_many_bytes_are_not_parsed(folder, monkeypatch):
    images = series(folder / "images")
    contours(folder / "masks/a.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])])
    tree = Source(folder)
    assert load(tree, "set/masks/a.dcm").Modality == "RTSTRUCT"
    monkeypatch.setattr("feddp.data.formats.dicom.CONTOUR_BYTES", 100)
    with pytest.raises(FedDPError, match=r"a.dcm: has \d+ bytes of contours; the limit is 100"):
        load(tree, "set/masks/a.dcm")
    assert CONTOUR_BYTES > 2**20


def test_a_contour_far_outside_its_series_fills_nothing_and_costs_nothing(folder):
    images = series(folder / "images")
    contours(folder / "masks/a.dcm", images, [(0, [(-1e9, -1e9), (-1e9, -1e8), (-1e8, -1e8)])])
    tree = Source(folder)
    scan = read_series(tree, [f"set/images/{n}.dcm" for n in range(1, 5)])
    maps = class_maps(Path("a.dcm"), load(tree, "set/masks/a.dcm"), scan.origin, ["lesion"])
    assert not maps.any()
    elsewhere = dcmread(folder / "masks/a.dcm")
    points = elsewhere.ROIContourSequence[0].ContourSequence[0]
    points.ContourData = [0, 0, 500, 1, 0, 500, 1, 1, 500]
    with pytest.raises(FedDPError, match="a.dcm: has a contour 486.0 mm away from the nearest slice"):
        class_maps(Path("a.dcm"), elsewhere, scan.origin, ["lesion"])


def test_a_seg_of_another_series_is_named(folder):
    """A file that says it is a SEG and holds nothing."""
    images = series(folder / "images")
    scan = read_series(Source(folder), [f"set/images/{n}.dcm" for n in range(1, 5)])
    empty = Dataset()
    empty.Modality, empty.SeriesInstanceUID = "SEG", generate_uid()
    with pytest.raises(FedDPError, match="x.dcm: does not fit its series, or is not readable"):
        class_maps(Path("x.dcm"), empty, scan.origin, ["lesion"])
    assert images


@pytest.mark.parametrize("kind", ["tif", "dcm"])
def test_whatever_bytes_are_changed_a_file_is_read_or_named(folder, kind):
    """Any other exception than FedDPError fails the test. The file as it was is read."""
    if kind == "tif":
        tifffile.imwrite(folder / "1.tif", np.arange(192, dtype=np.uint16).reshape(8, 8, 3), photometric="rgb")
    else:
        series(folder, slices=1)
    file, tree, rng, named = folder / f"1.{kind}", Source(folder), np.random.default_rng(0), 0
    content = file.read_bytes()
    whole = find(tree, "set").entries[0].read(tree, "axial")
    assert whole.pixels.size == (192 if kind == "tif" else 64 * 32)
    for _ in range(150):
        changed = bytearray(content)
        for place in rng.integers(0, 220 if kind == "tif" else 900, 3):
            changed[place] = rng.integers(256)
        file.write_bytes(changed)
        try:
            found = find(tree, "set")
            for error in found.refused:
                raise error
            for entry in found.entries:
                entry.read(tree, "axial")
                if kind == "tif":
                    read_labels(tree, entry.files[0])
        except FedDPError:
            named += 1
    assert named > 20
    file.write_bytes(content)
    if kind == "tif":
        assert (read_picture(tree, "set/1.tif").pixels == whole.pixels).all()
