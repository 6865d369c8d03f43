"""A folder that `data prepare folder` has written: it passes the check, trains a round, and its distances are in mm too."""

import csv
import json
import shlex

import numpy as np
import pytest
from PIL import Image

from feddp.adaptation.models import prepared
from feddp.data.preparation import KEY, Preparation
from feddp.networks.weights import read_network
from support.docs_pages import commands_for
from support.scans import APART, SPACING, contours, nifti, series, square


@pytest.fixture
def pictures(tmp_path):
    """Two sites of eight pictures of 12 x 10 pixels each, with a blot whose mask is of 0 and 255."""
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        for part in ("images", "masks"):
            (tmp_path / "source" / site / part).mkdir(parents=True)
        for number in range(8):
            mask = np.zeros((12, 10), np.uint8)
            mask[2 + number % 5 : 6 + number % 5, 3:8] = 255
            image = (mask // 2 + rng.integers(0, 50, (12, 10))).astype(np.uint8)
            Image.fromarray(image).save(tmp_path / "source" / site / f"images/p{number}.jpg")
            Image.fromarray(mask).save(tmp_path / "source" / site / f"masks/p{number}_mask.png")
    return tmp_path / "source"


def trained(feddp, tmp_path, source, *options):
    """Prepares a source, checks it and trains one round; returns the run's folder."""
    code, _, err = feddp("data", "prepare", "folder", "--source", source, "--out", tmp_path / "data", *options)
    assert code == 0, err
    assert feddp("data", "check", tmp_path / "data")[0] == 0
    run = ("run", "--env", "local", "--method", "fedavg", "--network", "toy", "--rounds", 1, "--size", 32)
    code, _, err = feddp(*run, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert code == 0, err
    return tmp_path / "run"


def rows(file):
    with open(file, newline="") as stream:
        return list(csv.DictReader(stream))


def names(value):
    """Every name in a JSON value."""
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (set(value) if isinstance(value, dict) else set()).union(*map(names, below))


def test_pictures_become_a_round_whose_distances_are_in_millimetres_too(feddp, toy, tmp_path, pictures):
    """12 rows of 16/3 mm and 10 columns of 6.4 mm span 64 mm: at 32 x 32 a pixel is 2 mm wide, so every distance doubles.

    They stay at the site: results.json names none.
    """
    run = trained(feddp, tmp_path, pictures, "--spacing", f"{16 / 3:.8f},6.4")
    for site in ("north", "south"):
        found = rows(run / f"sites/{site}/images.csv")
        assert found
        for row in found:
            assert float(row["assd-mm"]) == pytest.approx(2 * float(row["assd"]), rel=1e-6)
            assert float(row["hd95-mm"]) == pytest.approx(2 * float(row["hd95"]), rel=1e-6)
    assert not {name for name in names(json.loads((run / "results.json").read_text())) if "mm" in name.split("_")[0].split("-")}


def test_without_spacing_there_are_no_millimetres(feddp, toy, tmp_path, pictures):
    run = trained(feddp, tmp_path, pictures)
    assert prepared(run / "sites/north/network.safetensors") == Preparation()
    assert not [name for name in rows(run / "sites/north/images.csv")[0] if "mm" in name]


def test_series_become_a_round_with_distances_by_volume(feddp, toy, tmp_path):
    """Of a series, all slices are one case; its rows of 0.5 mm are 1 mm apart at half their number."""
    for site in ("north", "south"):
        for patient in ("anna", "bert", "cleo"):
            images = series(tmp_path / "source" / site / "images" / patient, patient)
            polygons = []
            for number in range(4):
                (down, across) = square(number)
                low, high = (down.start - 0.5, across.start - 0.5), (down.stop - 0.5, across.stop - 0.5)
                polygons.append((number, [low, (low[0], high[1]), high, (high[0], low[1])]))
            contours(tmp_path / "source" / site / f"masks/{patient}.dcm", images, polygons)
    run = trained(feddp, tmp_path, tmp_path / "source", "--window", "0,200")
    assert prepared(run / "sites/north/network.safetensors") == Preparation("axial", (0.0, 200.0), True)
    assert KEY not in read_network(run / "shared.safetensors")[1]  # the server knows nothing of it
    placed = rows(tmp_path / "data/north/split.csv")
    assert {(float(r["row_mm"]), float(r["column_mm"]), float(r["slice_mm"])) for r in placed} == {(*SPACING, APART)}
    cases = rows(run / "sites/north/cases.csv")
    assert [row["case"] for row in cases] == sorted({r["volume"] for r in placed if r["split"] == "test"})
    assert all(float(row["assd-mm"]) > 0 and float(row["hd95-mm"]) > 0 for row in cases)


def test_the_commands_of_the_page_work(feddp, tmp_path, pictures, monkeypatch):
    """Of docs/how-to/prepare.md, on small images of the kinds that it names."""
    monkeypatch.chdir(tmp_path)
    pictures.rename(tmp_path / "scans")
    for number in range(3):
        for part, colour in (("images", (90, 80, 70)), ("masks", (255, 0, 0))):
            (tmp_path / "eyes" / part).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), colour).save(tmp_path / f"eyes/{part}/{number}.png")
        images = series(tmp_path / f"ct/images/{number}", f"P{number}")
        contours(tmp_path / f"ct/masks/{number}.dcm", images, [(1, [(1, 1), (1, 5), (5, 5)])], "Liver")
        for part in ("images", "masks"):
            nifti(tmp_path / f"mri/{part}/{number}.nii.gz", np.eye(8)[..., None].repeat(4, axis=2).astype(np.uint8), np.eye(4))
    commands = commands_for("test_own_images", "docs/how-to/prepare.md")
    assert len(commands) == 5
    for command in commands:
        code, _, err = feddp(*shlex.split(command)[1:])
        assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["ct", "eyes", "mri", "polyps"]
