"""Synthetic sites: the same bits from the same seed, and hospitals that differ in what they see and how they draw."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from feddp.cli.data import app
from feddp.data.check import check
from feddp.data.folder import SiteFolder
from feddp.data.synthesize import EMPTY, KINDS, _annotate, _rng, draw, habits_of, synthesize, synthesize_site
from feddp.errors import FedDPError


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("synthetic")
    synthesize(root, sites=4, images=20, size=48, seed=0)
    return root


def test_folders_are_whole_and_splits_are_of_patients(root):
    """20 images are 10 patients of two: a fifth, 2 patients = 4 images, to val and to test, 12 images to train."""
    assert check(root) == []
    for number in range(1, 5):
        folder = SiteFolder.open(root / f"site-{number}")
        assert (folder.classes, folder.labels, folder.channels) == (("lesion",), "nested", 3)
        assert [len(folder.rows_of(split)) for split in ("train", "val", "test")] == [12, 4, 4]
        assert len({row.patient for row in folder.rows}) == 10


def test_same_seed_same_bits_and_a_site_alone_is_the_same(root, tmp_path):
    synthesize_site(tmp_path / "site-3", 2, 20, 48, 0)
    assert contents(tmp_path / "site-3") == contents(root / "site-3")


def test_seed_site_and_image_each_matter(root, tmp_path):
    synthesize(tmp_path, sites=1, images=6, size=48, seed=1)
    pictures = [tmp_path / "site-1/images/image-000.png"]
    pictures += [root / f"site-{s}/images/image-{i:03d}.png" for s in range(1, 5) for i in range(20)]
    assert len({file.read_bytes() for file in pictures}) == 81


def test_a_sites_habits_and_its_first_image_draw_from_different_chance():
    """numpy seeds [0, 1] and [0, 1, 0] alike, which would tie the two."""
    assert _rng(0, 1).random() != _rng(0, 1, 0).random()


def test_every_parameter_is_in_dataset_json(root):
    for index in range(4):
        written = json.loads((root / f"site-{index + 1}" / "dataset.json").read_text())
        assert written["habits"] == json.loads(json.dumps(vars(habits_of(index, 0))))
        assert (written["seed"], written["index"]) == (0, index)


def test_a_fifth_site_is_of_the_first_kind_yet_not_its_twin():
    assert habits_of(4, 0).margin == habits_of(0, 0).margin
    assert habits_of(4, 0).tint != habits_of(0, 0).tint


def test_raters_draw_wide_tight_and_as_it_is():
    """A square of 20 pixels in 100: in its middle 20 + 2 * 4 rows where drawn 4.5 out, 20 - 2 * 3 where drawn 3 in."""
    square = np.zeros((100, 100), bool)
    square[40:60, 40:60] = True
    rows = [_annotate(square, kind)[:, 50].sum() for kind in KINDS[:3]]
    assert rows == [28, 14, 20]
    smooth = _annotate(square, KINDS[3])
    assert not smooth[40, 40]  # a corner is rounded off
    assert smooth[40:60, 50].all()


def test_about_one_image_in_ten_is_empty_and_lesions_are_seen():
    """400 draws: 40 empty expected, standard deviation 6; 15 to 65 is four of them either way."""
    drawn = [draw(KINDS[2], 32, np.random.default_rng(n)) for n in range(400)]
    assert pytest.approx(0.1) == EMPTY
    assert 15 <= sum(not mask.any() for _, mask in drawn) <= 65
    contrast = [image[mask == 0, 1].mean() - image[mask == 1, 1].mean() for image, mask in drawn if mask.any()]
    assert np.median(contrast) > 8  # grey levels of green, against a pixel noise of 13 averaged over a whole lesion


def test_occupied_folders_are_refused_before_anything_is_written(root, tmp_path):
    (tmp_path / "site-2").mkdir()
    (tmp_path / "site-2" / "x").write_text("mine")
    with pytest.raises(FedDPError, match="site-2: not empty"):
        synthesize(tmp_path, sites=2, images=6, size=32)
    assert not (tmp_path / "site-1").exists()


def test_the_command_makes_what_check_accepts(tmp_path):
    """6 images are 3 patients: one of two images to each split."""
    made = CliRunner().invoke(app, ["synthesize", "--out", str(tmp_path), "--sites", "2", "--images", "6", "--size", "32"])
    assert made.exit_code == 0, made.output
    assert made.stdout.strip() == f"{tmp_path}: site-1 2 train 2 val 2 test; site-2 2 train 2 val 2 test"
    assert CliRunner().invoke(app, ["check", str(tmp_path)]).stdout == made.stdout
    assert Image.open(tmp_path / "site-2/images/image-005.png").size == (32, 32)
