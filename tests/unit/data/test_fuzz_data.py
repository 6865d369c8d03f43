"""A site's folder drawn at random: each file is refused by its name, or holds what the format says."""

import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddp.data.check import check
from feddp.data.description import SPLITS
from feddp.data.folder import SiteFolder, write_site
from feddp.data.pixels import read_image, read_mask
from feddp.errors import BadFile, InputError
from feddp.limits import IMAGE_PIXELS
from support.fuzz import ANY, TEXT, cases, changed, tried
from support.hostile_files import png

GOOD = {"name": "toy", "channels": 3, "classes": ["disc", "cup"], "labels": "nested", "volumes": "patient", "unseen": False}
LINES = ["image,patient,split", "i0,p0,train", "i1,p1,val", "i2,p2,test"]


@pytest.fixture
def site(tmp_path):
    rng = np.random.default_rng(0)
    mask = np.eye(6, 8, dtype=np.uint8)
    samples = [(*line.split(","), rng.integers(256, size=(6, 8, 3), dtype=np.uint8), mask) for line in LINES[1:]]
    write_site(tmp_path / "A", GOOD, samples)
    return tmp_path / "A"


def opened(site):
    """The folder, or None if it is refused; the check never raises, and finds a problem where the folder is refused."""
    problems = check(site)
    folder, error = tried(InputError, SiteFolder.open, site)
    if folder is None:
        assert str(site) in error
        assert problems
        return None
    assert all(row.split in SPLITS for row in folder.rows)
    return folder


@cases(100)
@given(content=changed(GOOD) | ANY)
def test_dataset_json(site, content):
    (site / "dataset.json").write_text(json.dumps(content))
    if folder := opened(site):
        assert type(folder.channels) is int
        assert folder.channels in (1, 3)
        assert folder.labels in ("nested", "exclusive")
        assert 1 <= len(set(folder.classes)) == len(folder.classes) <= 255
        for name in (folder.dataset, *folder.classes):
            assert isinstance(name, str)
            assert name.encode()
            assert "\n" not in name


@cases(60)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-16", "surrogatepass")))
def test_dataset_json_of_any_bytes(site, content):
    (site / "dataset.json").write_bytes(content)
    assert opened(site) is None


@pytest.mark.parametrize("depth", [33, 1000, 100_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":|}'])
def test_dataset_json_of_any_depth(site, depth, pair):
    start, end = pair.split("|") if "|" in pair else pair
    (site / "dataset.json").write_text(start * depth + "1" + end * depth)
    assert opened(site) is None


FIELD = TEXT | st.sampled_from(["i0", "p0", "train", "val", "test", '"', "a,b", "\ufeff", "../x", "é" * 126])


@cases(120)
@given(st.data())
def test_split_csv(site, data):
    lines = LINES.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines)))
        lines[place : place + data.draw(st.integers(0, 1))] = [",".join(data.draw(st.lists(FIELD, min_size=1, max_size=4)))]
    text = data.draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines)
    (site / "split.csv").write_bytes(text.encode("utf-8", "surrogatepass"))
    folder = opened(site)
    if folder is None:
        return
    stems = [row.image for row in folder.rows]
    assert len(set(stems)) == len(stems)
    splits = {}
    for row in folder.rows:
        assert splits.setdefault(row.patient, row.split) == row.split
        assert len(f"{row.image}.png".encode()) <= 255
        assert folder.image_path(row.image).parent == site / "images"
        assert not set("/\\\0\n\r") & set(row.image + row.patient)


@cases(60)
@given(content=st.binary(max_size=80))
def test_split_csv_of_any_bytes(site, content):
    (site / "split.csv").write_bytes(content)
    opened(site)
    (site / "split.csv").write_bytes(b"image,patient,split\n" + content)
    opened(site)


def both(site, content):
    """Reads bytes as an image and as a mask: BadFile, or pixels as the format says."""
    file = site / "images/i0.png"
    file.write_bytes(content)
    for channels in (1, 3):
        pixels, error = tried(BadFile, read_image, file, channels, site)
        if pixels is None:
            assert str(file) in error
            continue
        assert pixels.dtype == np.uint8
        assert pixels.shape[2:] == ((3,) if channels == 3 else ())
        assert pixels.shape[0] * pixels.shape[1] <= IMAGE_PIXELS
    mask, error = tried(BadFile, read_mask, file, 2, site)
    if mask is None:
        assert str(file) in error
        return
    assert mask.dtype == np.uint8
    assert mask.ndim == 2
    assert mask.max(initial=0) <= 2


@cases(150)
@given(data=st.data())
def test_a_png_with_changed_bytes(site, data):
    content = bytearray((site / "images/i1.png").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    both(site, bytes(content))


CHUNKS = (b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT", b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"gAMA")


@cases(150)
@given(data=st.data())
def test_a_png_of_any_header_and_chunks(site, data):
    """Headers and chunks with valid checksums: only the header's own numbers can warn the reader."""
    side = st.integers(0, 9) | st.sampled_from([0, 1, 6000, 6001, 2**16, 2**31 - 1, 2**32 - 1])
    byte = st.integers(0, 8) | st.sampled_from([16, 255])
    width, height = data.draw(side), data.draw(side)
    header = struct.pack(">IIBBBBB", width, height, *(data.draw(byte) for _ in range(2)), 0, 0, data.draw(st.integers(0, 2)))
    chunks = [(b"IHDR", header)]
    for kind in data.draw(st.lists(st.sampled_from(CHUNKS), max_size=4)):
        content = data.draw(st.binary(max_size=30))
        chunks.append((kind, zlib.compress(content) if kind == b"IDAT" else content))
    chunks.append((b"IEND", b""))
    written = b"".join(struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    both(site, b"\x89PNG\r\n\x1a\n" + written)


def test_the_drawn_files_have_a_good_one_among_them(site):
    """The control of the tests above."""
    assert opened(site)
    both(site, png(4, 4))
    assert read_image(site / "images/i0.png", 1, site).shape == (4, 4)
