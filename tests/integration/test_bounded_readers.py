"""A site's folder from somebody who means harm: what is too large, too deep, broken or elsewhere ends in one line."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddp.data.check import check
from feddp.data.folder import SiteFolder, find_sites
from feddp.data.images import Images
from feddp.data.loading import load
from feddp.data.pixels import extent, read_image, read_mask
from feddp.data.synthesize import synthesize
from feddp.errors import BadFile, FedDPError
from feddp.limits import IMAGE_PIXELS, JSON_BYTES, JSON_DEPTH, TABLE_LINE, TABLE_ROWS
from feddp.reading import parse, read
from support.hostile_files import cost, one_line, png

SIDE = int(IMAGE_PIXELS**0.5)


@pytest.fixture
def site(tmp_path):
    synthesize(tmp_path / "root", sites=1, images=6, size=32)
    return next((tmp_path / "root").iterdir())


def first(site: Path, part: str = "images") -> Path:
    return min((site / part).iterdir())


# -- pictures --------------------------------------------------------------------------------------------------------


def reading(file: Path, lifted: bool = False) -> tuple[str, float]:
    lift = "; pixels.IMAGE_PIXELS = 10**12; import warnings; warnings.resetwarnings()" if lifted else ""
    read = f"pixels.read_image(Path({str(file)!r}), 1, Path({str(file.parent)!r}))"
    return cost(f"import feddp.data.pixels as pixels{lift}", read)


def test_a_picture_of_a_few_bytes_and_billions_of_pixels_is_refused_by_its_header(tmp_path):
    (tmp_path / "huge.png").write_bytes(png(60_000, 60_000, b"nothing"))
    error, grown = reading(tmp_path / "huge.png")
    assert "huge.png" in error
    assert "Scale it down" in error
    assert grown < 30


def test_a_picture_that_pillow_would_only_warn_of_is_refused_and_would_cost_hundreds_of_mebibytes(tmp_path):
    """13000 x 13000 grey pixels are 161 MiB, and again as an array; the file has 160 KiB. Lifting the limit shows it."""
    file = tmp_path / "large.png"
    file.write_bytes(png(13_000, 13_000))
    assert file.stat().st_size < 1024**2
    error, grown = reading(file)
    assert "large.png" in error
    assert grown < 30
    error, grown = reading(file, lifted=True)
    assert error == ""
    assert grown > 300


def test_the_extent_of_a_picture_of_too_many_pixels_is_one_line(tmp_path):
    (tmp_path / "large.png").write_bytes(png(20_000, 20_000, b"nothing"))
    with pytest.raises(BadFile, match="large.png: is not a readable image .*400000000 pixels"):
        extent(tmp_path / "large.png", tmp_path)


def test_the_largest_picture_is_read_and_one_row_more_is_not(tmp_path):
    (tmp_path / "most.png").write_bytes(png(SIDE, SIDE))
    assert read_image(tmp_path / "most.png", 1, tmp_path).shape == (SIDE, SIDE)
    (tmp_path / "more.png").write_bytes(png(SIDE, SIDE + 1))
    with pytest.raises(BadFile, match=rf"more.png: has {SIDE} x {SIDE + 1} pixels; the limit is {SIDE**2}. Scale it down"):
        read_image(tmp_path / "more.png", 1, tmp_path)


def _as(kind):
    def spoil(file):
        Image.new("RGB", (32, 32)).save(file, kind)

    return spoil


BROKEN = {
    "half": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
    "animated": lambda f: f.write_bytes(png(32, 32, frames=3)),
    "a JPEG": _as("JPEG"),
    "PostScript, which Pillow hands to another program": _as("EPS"),
    "nothing": lambda f: f.write_bytes(b""),
    "no chunk whole": lambda f: f.write_bytes(f.read_bytes()[:33] + b"\xff" * 40),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_picture_that_is_none_or_several_is_named(site, spoil):
    file = first(site)
    spoil(file)
    with pytest.raises(BadFile, match=rf"{file.name}: (is not a readable image|holds several pictures)"):
        read_image(file, 3, site)
    assert [problem.file for problem in check(site)] == [file]


def test_whatever_bytes_are_changed_a_picture_is_read_or_named(site):
    """Any other exception than BadFile fails the test. The file as it was is read."""
    file, rng, named = first(site), np.random.default_rng(0), 0
    content = file.read_bytes()
    read_image(file, 3, site)
    for _ in range(300):
        changed = bytearray(content)
        for place in rng.integers(0, 120, 3):
            changed[place] = rng.integers(256)
        file.write_bytes(changed)
        try:
            read_image(file, 3, site)
        except BadFile:
            named += 1
    assert named > 200


def test_a_pipe_is_not_waited_for(site):
    file = first(site)
    file.unlink()
    os.mkfifo(file)
    started = time.monotonic()
    with pytest.raises(BadFile, match=rf"{file.name}: is not a regular file"):
        read_image(file, 3, site)
    assert time.monotonic() - started < 5


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["images", "masks"])
def test_an_image_that_is_a_link_out_of_the_folder_is_refused_and_one_within_is_not(site, tmp_path, part):
    file = first(site, part)
    elsewhere = file.rename(tmp_path / "elsewhere.png")
    file.symlink_to(elsewhere)
    problems = check(site)
    assert [problem.file for problem in problems] == [file]
    assert "is a link that leads out of" in str(problems[0])
    assert "Put the file itself there" in str(problems[0])
    file.unlink()
    elsewhere.rename(site / ".elsewhere.png")
    file.symlink_to("../.elsewhere.png")
    assert check(site) == []


@pytest.mark.parametrize("name", ["dataset.json", "split.csv"])
def test_a_description_that_is_a_link_out_of_the_folder_is_refused(site, tmp_path, name):
    (site / name).rename(tmp_path / name)
    (site / name).symlink_to(tmp_path / name)
    with pytest.raises(FedDPError, match=rf"{name}: is a link that leads out of"):
        SiteFolder.open(site)


def test_a_whole_folder_of_images_that_is_a_link_is_one_problem(site, tmp_path):
    (site / "images").rename(tmp_path / "images")
    (site / "images").symlink_to(tmp_path / "images")
    assert [(problem.file, "leads out of" in problem.what) for problem in check(site)] == [(site / "images", True)]
    with pytest.raises(FedDPError, match="leads out of"):
        load(SiteFolder.open(site), "train", 32)


def test_a_site_s_folder_may_itself_be_reached_through_a_link(site, tmp_path):
    (tmp_path / "link").symlink_to(site)
    assert check(tmp_path / "link") == []
    assert load(SiteFolder.open(tmp_path / "link"), "train", 32)


@pytest.mark.parametrize("part", ["images", "masks", "dataset.json", "split.csv"])
def test_a_loop_of_links_is_one_line(feddp, site, part):
    file = site / part if "." in part else first(site, part)
    file.unlink()
    file.symlink_to(file.name)
    code, out, _ = feddp("data", "check", site)
    assert code == 2
    assert f"{file}: is a loop of links" in out
    said = [line for line in out.strip().splitlines() if not line.startswith("warning: ")]  # that a split is small
    assert len(said) == 1 if "." not in part else "Traceback" not in out


def test_names_that_no_file_can_have_end_in_one_line(feddp, site):
    table = site / "split.csv"
    table.write_text(table.read_text() + f"{'x' * 252},p,train\n" + "a\0b,p,train\nc\x1b[2J,p,train\n")
    code, out, err = feddp("data", "check", site)
    assert code == 2
    lines = [line for line in out.splitlines() if "shorter, plain name" in line]
    assert len(lines) == 3
    assert "\x1b" not in out
    assert "\0" not in out
    assert err == ""
    for command in (["data", "check"], ["features", "--data", "d", "--out", "o", "--models"]):
        one = one_line(*feddp(*command, "y" * 300)[::2])
        assert "too long" in one or "not a finished run" in one


def test_a_folder_with_a_name_that_none_can_have_is_refused(tmp_path):
    for name in ("y" * 300, "y\0"):
        for reader in (SiteFolder.open, find_sites, Images.of):
            with pytest.raises(FedDPError, match="no such folder|no site's folder|no PNG|does not exist"):
                reader(tmp_path / name)


def test_a_name_as_long_as_a_file_s_may_be_is_read(site):
    row = (site / "split.csv").read_text().splitlines()[1].split(",")
    long = "x" * 251
    for part in ("images", "masks"):
        (site / part / f"{row[0]}.png").rename(site / part / f"{long}.png")
    table = site / "split.csv"
    table.write_text(table.read_text().replace(f"{row[0]},", f"{long},", 1))
    assert check(site) == []


# -- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [JSON_DEPTH + 1, 900, 100_000])
def test_a_description_nested_too_deep_is_named(feddp, site, deep):
    """900 is deep enough to fail in what walks through it later, and not in Python's parser."""
    (site / "dataset.json").write_text("[" * deep + "]" * deep)
    code, out, _ = feddp("data", "check", site)
    assert code == 2
    assert f"{site / 'dataset.json'}: is " in out
    with pytest.raises(FedDPError, match="dataset.json: is (nested more|not readable)"):
        SiteFolder.open(site)


def test_json_as_deep_as_it_may_be_is_read():
    text = "[" * JSON_DEPTH + "]" * JSON_DEPTH
    assert json.dumps(parse(text, Path("x"))) == text
    with pytest.raises(BadFile):
        parse(f"[{text}]", Path("x"))


def test_a_description_that_is_too_large_is_not_read(site):
    metadata = json.loads((site / "dataset.json").read_text())
    (site / "dataset.json").write_text(json.dumps(metadata | {"more": "x" * (JSON_BYTES - 1000)}))
    assert check(site) == []
    (site / "dataset.json").write_text(json.dumps(metadata | {"more": "x" * JSON_BYTES}))
    with pytest.raises(FedDPError, match=r"dataset.json: has \d+ bytes; the limit is 1 MiB. Make it smaller"):
        SiteFolder.open(site)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", [f"c{i}" for i in range(256)]),
        ("classes", ["x" * 256]),
        ("classes", ["\ud800"]),
        ("classes", ["a\nb"]),
        ("name", "\ud800"),
        ("name", "x" * 256),
    ],
)
def test_names_in_a_description_can_be_printed_and_are_not_endless(feddp, site, key, value):
    metadata = json.loads((site / "dataset.json").read_text())
    (site / "dataset.json").write_text(json.dumps(metadata | {key: value}))
    code, out, _ = feddp("data", "check", site)
    assert code == 2
    assert out.startswith(f"{site / 'dataset.json'}: {key} is ")
    assert len(out) < 1000
    (site / "dataset.json").write_text(json.dumps(metadata | {"classes": [f"c{i}" for i in range(255)], "name": "é" * 255}))
    assert check(site) == []


# -- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_of_too_many_lines_is_refused(site):
    table = site / "split.csv"
    table.write_text("image,patient,split\n" + "\n" * (TABLE_ROWS - 1))
    assert [problem.what for problem in check(site) if "readable" in problem.what] == []
    table.write_text("image,patient,split\n" + "\n" * TABLE_ROWS)
    with pytest.raises(FedDPError, match=rf"split.csv: is not readable \(it has more than {TABLE_ROWS} lines\)"):
        SiteFolder.open(site)


@pytest.mark.parametrize("line", ["," * TABLE_LINE, '"' + "x\n" * 3 + "x" * TABLE_LINE], ids=["fields", "quotes"])
def test_a_line_without_end_is_refused_and_not_shown(site, line):
    (site / "split.csv").write_text(f"image,patient,split\n{line}\n")
    with pytest.raises(FedDPError, match=f"more than {TABLE_LINE} characters") as error:
        SiteFolder.open(site)
    assert len(str(error.value)) < 1000


def test_a_long_line_of_an_error_is_cut(site):
    (site / "split.csv").write_text("image,patient,split\n" + "x," * 2000 + "\n")
    with pytest.raises(FedDPError, match="does not have three fields") as error:
        SiteFolder.open(site)
    assert len(str(error.value)) < 1000


# -- the two functions that all of these are made of -------------------------------------------------------------------


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert read(tmp_path / "f", 5) == b"12345"
    with pytest.raises(BadFile, match="f: has 5 bytes; the limit is 4 bytes"):
        read(tmp_path / "f", 4)
    with pytest.raises(BadFile, match="is not a regular file"):
        read(tmp_path, 4)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "g", 4)


def test_masks_are_held_to_the_same(site, tmp_path):
    file = first(site, "masks")
    file.write_bytes(png(SIDE, SIDE + 1))
    with pytest.raises(BadFile, match="Scale it down"):
        read_mask(file, 1, site)
