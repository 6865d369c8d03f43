"""Pictures, series and masks from somebody who means harm: `feddp.data.formats` refuses them by their headers, in one line."""

import io
import struct
import sys
import zlib
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image
from pydicom import Dataset, dcmread
from pydicom.encaps import encapsulate
from pydicom.uid import (
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)

from feddp.data.formats import decoding
from feddp.data.formats.dicom import load
from feddp.data.formats.dicom_masks import class_maps
from feddp.data.formats.dicom_series import read_series
from feddp.data.formats.find import find
from feddp.data.formats.pictures import read_labels, read_picture
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from feddp.limits import HEAD_BYTES
from support.hostile_files import cost
from support.scans import contours, deflated, enhanced, series

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
    start, pixels = struct.pack("<HH2sHL", 0x7001, 0x1010, b"SQ", 0, 0xFFFFFFFF), content.index(b"\xe0\x7f\x10\x00OW")
    (folder / "1.dcm").write_bytes(content[:pixels] + start + item * 20_000)
    with pytest.raises(FedDPError, match="1.dcm: is not a readable DICOM file"):
        load(Source(folder), "set/1.dcm")


def test_contours_of_too_many_bytes_are_not_parsed(folder, monkeypatch):
    images = series(folder / "images")
    contours(folder / "masks/a.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])])
    tree = Source(folder)
    assert load(tree, "set/masks/a.dcm").Modality == "RTSTRUCT"
    monkeypatch.setattr("feddp.data.formats.dicom.HEAD_BYTES", 600)
    with pytest.raises(FedDPError, match=r"a.dcm: has more than 600 bytes besides pixels, which is the limit"):
        load(tree, "set/masks/a.dcm")
    assert HEAD_BYTES > 2**20


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
    with pytest.raises(FedDPError, match="x.dcm: has no structure of the classes; it has: none"):
        class_maps(Path("x.dcm"), empty, scan.origin, ["lesion"])
    assert images


def tiff(tags: dict[int, tuple[int, ...]], pixels: bytes, pages: int = 1) -> bytes:
    """A TIFF of one strip of 16-bit RGB of 8 x 8 pixels, whose pages all show it; `tags` replace its own."""
    place = 8 + len(pixels)
    own = {256: (8,), 257: (8,), 258: (16,) * 3, 259: (1,), 262: (2,), 273: (8,), 277: (3,), 278: (8,), 279: (len(pixels),)}
    content = b"II*\0" + struct.pack("<L", place + 6) + pixels + struct.pack("<3H", 16, 16, 16)
    for page in range(pages):
        found = sorted((own | tags).items())
        content += struct.pack("<H", len(found))
        for tag, values in found:  # the three bits a sample do not fit into a tag
            content += struct.pack("<HHLL", tag, 3 if tag == 258 else 4, len(values), place if len(values) > 1 else values[0])
        content += struct.pack("<L", len(content) + 4 if page + 1 < pages else 0)
    return content


def test_a_strip_that_unpacks_to_more_than_the_picture_is_refused(folder):
    """tifffile has a strip unpacked whole: 200 KiB would become 200 MiB. As many bytes as the picture has are read."""
    (folder / "a.tif").write_bytes(tiff({259: (8,)}, zlib.compress(bytes(384))))
    assert read_picture(Source(folder), "set/a.tif").pixels.shape == (1, 8, 8, 3)
    (folder / "a.tif").write_bytes(tiff({259: (8,)}, zlib.compress(bytes(200 * 2**20))))
    error, grown = reading(folder)
    assert "a.tif: unpacks to more than the 384 bytes of a part" in error
    assert grown < 60
    (folder / "a.tif").write_bytes(tiff({259: (32773,)}, b"\x81\0" * (200 * 2**20 // 128)))  # PackBits, 128 bytes each
    error, grown = reading(folder)
    assert "a.tif: is not a readable image (its content is damaged)" in error
    assert grown < 60
    (folder / "a.tif").write_bytes(tiff({259: (34925,)}, bytes(9)))
    assert "is compressed by LZMA. Save it uncompressed, or compressed by deflate or LZW" in reading(folder)[0]


@pytest.mark.parametrize("samples", [1, 3])
def test_the_pages_of_a_tiff_are_not_counted(folder, samples, monkeypatch):
    """Counting a chain of a million takes Pillow two days; tifffile never ends on a ring. Here the third page leads beyond the
    file: Pillow, if it counts, cannot read that, and tifffile would log it."""
    monkeypatch.setattr(tifffile.tifffile, "logger", lambda: pytest.fail("tifffile has followed the chain"))
    one = {258: (8,), 262: (1,), 277: (1,)} if samples == 1 else {}
    (folder / "a.tif").write_bytes(tiff(one, bytes(384), pages=3)[:-4] + struct.pack("<L", 10**6))
    with pytest.raises(FedDPError, match=r"a.tif: holds several pictures"):
        read_picture(Source(folder), "set/a.tif")


def test_values_that_are_no_numbers_are_refused_in_every_format(folder):
    """They would become a picture of any values, without a word."""
    tree = Source(folder)
    for values in (np.nan, np.inf, 1e38):
        Image.fromarray(np.full((8, 8), values, np.float32)).save(folder / "a.tif")
        with pytest.raises(FedDPError, match=r"a.tif: has values that are not finite, or huge"):
            read_picture(tree, "set/a.tif")
    tifffile.imwrite(folder / "a.tif", np.full((8, 8, 3), -1e300), photometric="rgb")
    with pytest.raises(FedDPError, match=r"a.tif: has values that are not finite, or huge"):
        read_picture(tree, "set/a.tif")
    series(folder, slices=1)
    rescaled = dcmread(folder / "1.dcm")
    rescaled.RescaleSlope = "1e300"
    rescaled.save_as(folder / "1.dcm")
    with pytest.raises(FedDPError, match=r"1.dcm: has values that are not finite, or huge"):
        read_series(tree, ["set/1.dcm"])


def test_places_that_are_no_numbers_are_refused(folder):
    """Of a slice and of a contour's corner: comparisons with them are all false, so the checks of distances passed."""
    series(folder, slices=2)
    changed(folder / "1.dcm", b"\x20\x00\x32\x00DS", b"nan\\nan\\nan")
    with pytest.raises(FedDPError, match=r"1.dcm: lies at a place that is no number"):
        read_series(Source(folder), ["set/1.dcm", "set/2.dcm"])
    images = series(folder / "images")
    contours(folder / "masks/a.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])])
    for corner in (b"nan\\0\\5", b"1\\1\\nan", b"1\\1e99\\5"):
        tree = Source(folder)
        scan = read_series(tree, [f"set/images/{n}.dcm" for n in range(1, 5)])
        changed(folder / "masks/a.dcm", b"\x06\x30\x50\x00DS", b"1\\1\\5\\1\\2\\5\\" + corner)
        with pytest.raises(FedDPError, match="with a corner that is no number"):
            class_maps(Path("a.dcm"), load(tree, "set/masks/a.dcm"), scan.origin, ["lesion"])


def changed(file: Path, element: bytes, value: bytes) -> None:
    """Replaces the value of an element of a DICOM file by another text."""
    content = file.read_bytes()
    place = content.index(element) + len(element)
    (length,) = struct.unpack("<H", content[place : place + 2])
    assert len(value) <= length
    file.write_bytes(content[: place + 2] + value.ljust(length) + content[place + 2 + length :])


def packed(folder: Path, syntax: str, content: bytes) -> None:
    """Writes a series of one slice of 8 bits that has this frame."""
    dataset = series(folder, slices=1)[0]
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.HighBit, dataset.PixelRepresentation = 7, 0
    dataset.file_meta.TransferSyntaxUID, dataset.PixelData = syntax, encapsulate([content])
    dataset["PixelData"].is_undefined_length = True
    dataset.save_as(folder / "1.dcm", enforce_file_format=True)


def test_pixels_that_unpack_to_more_than_the_header_says_are_refused(folder):
    """One million runs of 128 bytes in a slice of 2 KiB, and a JPEG of 144 million pixels; such a slice of RLE is read."""
    written = io.BytesIO()
    Image.new("L", (12_000, 12_000)).save(written, "JPEG")
    start = struct.pack("<16L", 1, 64, *[0] * 14)
    for syntax, pixels, said in (
        (RLELossless, start + b"\x81\0" * 16, ""),
        (RLELossless, start + b"\x81\0" * 10**6, "1.dcm: unpacks to far more than its 2048 bytes"),
        (JPEGBaseline8Bit, written.getvalue(), "holds a packed picture of 12000 x 12000 pixels"),
    ):
        packed(folder, syntax, pixels)
        error, grown = reading(folder)
        assert said in error
        assert bool(said) == bool(error)
        assert grown < 60


def test_a_jpeg_of_thousands_of_passes_is_refused_wherever_it_is(folder):
    """Each pass of 60 bytes is a pass over all pixels: 100 KiB of them took minutes. A progressive picture is read."""
    written = io.BytesIO()
    Image.new("L", (32, 64), 128).save(written, "JPEG", progressive=True)
    content, tree = written.getvalue(), Source(folder)
    (folder / "a.jpg").write_bytes(content)
    assert read_picture(tree, "set/a.jpg").pixels.shape == (1, 64, 32)
    content = content[:-2] + content[content.rfind(b"\xff\xda") : -2] * 1000 + content[-2:]
    (folder / "a.jpg").write_bytes(content)
    with pytest.raises(FedDPError, match=r"a.jpg: has 10\d\d scans; the limit is 100"):
        read_picture(tree, "set/a.jpg")
    packed(folder, JPEGBaseline8Bit, content)
    with pytest.raises(FedDPError, match=r"1.dcm: has 10\d\d scans; the limit is 100"):
        read_series(Source(folder), ["set/1.dcm"])


STAND_IN = """
import os, signal, sys, time, numpy
import feddp.data.formats.codec as codec
codec.DECODER_SECONDS = 1
codec.decoded = lambda number, components, frame: {does}
codec.serve(sys.stdin.buffer, sys.stdout.buffer)
"""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "1.dcm: has packed pixels that break the decoder off"),
        ("time.sleep(60)", "1.dcm: takes more than 120 seconds to decode"),
        ("int('no number')", r"1.dcm: has packed pixels that are damaged \(invalid literal"),
        ("numpy.zeros((64, 33), 'u1')", "1.dcm: is decoded to another size"),
        ("numpy.zeros((64, 32), 'f8')", "1.dcm: is decoded to another size"),
        ("numpy.zeros((64, 32, 1, 1), 'u1')[:32]", "1.dcm: is decoded to another size"),
    ],
)
def test_a_decoder_that_crashes_or_hangs_or_lies_is_one_line_and_the_next_file_is_read(folder, monkeypatch, does, said):
    """In place of the decoder, a process that does this; then the real one."""
    encoded = io.BytesIO()
    Image.fromarray(np.full((64, 32), 100, np.uint8)).save(encoded, "JPEG")
    packed(folder, JPEGBaseline8Bit, encoded.getvalue())
    decoding._DECODER.close()
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "COMMAND", [sys.executable, "-c", STAND_IN.format(does=does)])
        with pytest.raises(FedDPError, match=said):
            read_series(Source(folder), ["set/1.dcm"])
    decoding._DECODER.close()
    assert abs(read_series(Source(folder), ["set/1.dcm"]).pixels + 800).max() <= 4  # 2 · 100 - 1000


CODERS = {
    "jpeg8": (JPEGLosslessSV1, {"lossless": True}),
    "jpegls": (JPEGLSLossless, {}),
    "jpeg2k": (JPEG2000Lossless, {"codecformat": "j2k"}),
}


@pytest.mark.parametrize("codec", CODERS)
def test_whatever_bytes_of_a_packed_frame_are_changed_it_is_read_or_named(folder, codec):
    """Any other exception than FedDPError fails the test, and so does a decoder that takes the reader with it."""
    rng, values, named = np.random.default_rng(0), np.arange(2048, dtype=np.uint8).reshape(64, 32), 0
    syntax, options = CODERS[codec]
    content = getattr(imagecodecs, f"{codec}_encode")(values, **options)
    packed(folder, syntax, content)
    assert (read_series(Source(folder), ["set/1.dcm"]).pixels[0] == 2.0 * values - 1000).all()
    for _ in range(60):
        changed = bytearray(content)
        for place in rng.integers(0, min(len(content), 200), 3):
            changed[place] = rng.integers(256)
        packed(folder, syntax, bytes(changed))
        try:
            read_series(Source(folder), ["set/1.dcm"])
        except FedDPError:
            named += 1
    assert 10 < named <= 60


@pytest.mark.parametrize("codec", CODERS)
def test_a_frame_that_is_cut_off_is_no_picture(folder, codec):
    """A decoder of JPEG makes grey pixels of what is missing, without a word."""
    syntax, options = CODERS[codec]
    content = getattr(imagecodecs, f"{codec}_encode")(np.arange(2048, dtype=np.uint8).reshape(64, 32), **options)
    for part in (0.3, 0.6, 0.9):
        packed(folder, syntax, content[: int(part * len(content))])
        with pytest.raises(FedDPError, match="1.dcm: has packed pixels that are (cut off|damaged)|has no readable pixels"):
            read_series(Source(folder), ["set/1.dcm"])


def test_a_frame_whose_tiles_have_one_pixel_is_refused(folder):
    """Of 64 x 32 pixels they would be 2048; a decoder makes 7 KB for each before it reads one."""
    content = bytearray(imagecodecs.jpeg2k_encode(np.zeros((64, 32), np.uint8), codecformat="j2k"))
    content[24:32] = struct.pack(">2I", 1, 1)
    packed(folder, JPEG2000Lossless, bytes(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "JPEG_TILES", 2047)
        with pytest.raises(FedDPError, match="1.dcm: has 2048 tiles; the limit is 2047"):
            read_series(Source(folder), ["set/1.dcm"])


def test_a_deflated_file_that_unpacks_to_more_than_its_limit_is_refused(folder):
    """192 MiB of zeros in 190 KiB, of a source whose volumes have few voxels; pydicom would inflate whatever there is."""
    start, _ = deflated(folder)
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    part = packer.compress(bytes(16 * 2**20)) + packer.flush(zlib.Z_FULL_FLUSH)  # then each part can be repeated
    (folder / "1.dcm").write_bytes(start + part * 12 + packer.flush())
    _, grown = cost(START, f"find(Source(Path({str(folder)!r}), voxels=9), 'set')")
    assert grown < 200
    (refused,) = find(Source(folder, voxels=9), "set").refused
    assert "1.dcm: unpacks to more than 160 MiB" in str(refused)


def test_elements_that_are_no_pixels_have_a_limit_and_those_behind_are_not_read(folder, monkeypatch):
    """An element of eight bytes takes 320 in memory: a million of them behind the pixels cost nothing."""
    series(folder, slices=1)
    content, many = (folder / "1.dcm").read_bytes(), np.zeros(10**6, [("tag", "<u2", 2), ("vr", "S2"), ("length", "<u2")])
    number = np.arange(10**6)
    many["tag"] = np.stack([0x7FE1 + 2 * (number // 0xE000), 0x1000 + number % 0xE000], axis=1)
    many["vr"] = b"LO"
    (folder / "1.dcm").write_bytes(content + many.tobytes())
    error, grown = reading(folder)
    assert error == ""
    assert grown < 60
    monkeypatch.setattr("feddp.data.formats.dicom.HEAD_BYTES", 600)
    with pytest.raises(FedDPError, match="has more than 600 bytes besides pixels"):
        read_series(Source(folder), ["set/1.dcm"])


def test_the_headers_of_a_series_have_a_limit_together(folder, monkeypatch):
    """They stay in memory, each slice's; the pixels do not."""
    series(folder, slices=3)
    names = [f"set/{n}.dcm" for n in (1, 2, 3)]
    heads = [file.read_bytes().index(b"\xe0\x7f\x10\x00") + 12 for file in folder.iterdir()]
    monkeypatch.setattr("feddp.data.formats.dicom_series.SERIES_BYTES", sum(heads))
    assert read_series(Source(folder), names).pixels.shape[0] == 3
    monkeypatch.setattr("feddp.data.formats.dicom_series.SERIES_BYTES", sum(heads) - 1)
    with pytest.raises(FedDPError, match=r"3.dcm: is of a series of more than \d+ bytes besides pixels"):
        read_series(Source(folder), names)


def test_the_frames_of_a_file_have_the_limit_of_a_series_of_files(folder, monkeypatch):
    """20,000 frames of one pixel are a file of 21 KB, and took 9 s: as many voxels as a volume may have would take hours."""
    images = series(folder / "single")
    enhanced(folder / "a.dcm", images, range(4))
    monkeypatch.setattr("feddp.data.formats.dicom_frames.SERIES_FILES", 4)
    assert read_series(Source(folder), ["set/a.dcm"]).pixels.shape[0] == 4
    monkeypatch.setattr("feddp.data.formats.dicom_frames.SERIES_FILES", 3)
    with pytest.raises(FedDPError, match="a.dcm: is one of 4 images of .* pixels, too many"):
        read_series(Source(folder), ["set/a.dcm"])


def test_corners_and_structures_have_a_limit(folder, monkeypatch):
    """5 x 5 pixels, and five edges in at most 5 rows and 5 columns each: 25 + 5 · (5 + 5) = 75 steps."""
    images = series(folder / "images")
    contours(folder / "masks/a.dcm", images, [(0, [(1, 1), (1, 3), (1, 5), (5, 5), (5, 1)])])
    tree = Source(folder)
    scan, dataset = read_series(tree, [f"set/images/{n}.dcm" for n in range(1, 5)]), load(tree, "set/masks/a.dcm")
    for module, name, most in (("contours", "CONTOUR_STEPS", 75), ("masks", "STRUCTURES", 1)):
        limit = f"feddp.data.formats.dicom_{module}.{name}"
        monkeypatch.setattr(limit, most)
        assert class_maps(Path("a.dcm"), dataset, scan.origin, ["lesion"]).any()
        monkeypatch.setattr(limit, most - 1)
        with pytest.raises(FedDPError, match="too many corners|has 1 structures of the classes; the limit is 0"):
            class_maps(Path("a.dcm"), dataset, scan.origin, ["lesion"])
        monkeypatch.setattr(limit, most)


def test_names_of_deep_folders_have_room_for_what_follows(folder):
    """255 bytes are a file's longest name; the mask of slice 4 of class 2 has eleven more than its image."""
    deep = folder / ("a" * 150) / ("ü" * 100)
    deep.mkdir(parents=True)
    Image.new("L", (8, 8)).save(deep / "x.png")
    assert len(f"{find(Source(folder), 'set').entries[0].name}_004-002.png".encode()) <= 255


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
