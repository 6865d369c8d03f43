"""Synthetic sites: the same bits from the same seed, and hospitals that differ in what they see and how they draw."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from feddp.cli.data import app
from feddp.data.check import check
from feddp.data.folder import SiteFolder
from feddp.data.habits import KINDS, MOVED, Dials, habits_of, rng_of
from feddp.data.synthesize import EMPTY, _annotate, draw, synthesize, synthesize_site
from feddp.data.vessels import vessel
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
    assert rng_of(0, 1).random() != rng_of(0, 1, 0).random()


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


# --- dials ---------------------------------------------------------------------------------------------------------------


def test_without_dials_the_bits_are_those_of_the_published_figures():
    """A regression record, written with the code of 0.1.0, which had no dials: it says that bits changed, not which are right.

    Golden results and the figures in README and docs are of these images.
    """
    digest = hashlib.sha256()
    for site, number in [(site, number) for site in range(4) for number in range(3)]:
        for array in draw(habits_of(site, 0), 48, rng_of(0, site, number)):
            digest.update(array.tobytes())
    assert digest.hexdigest() == "090d4f96617846bc8b29d9785218145113b6533c75a6ece1f3d276ce67ae39d0"


@pytest.mark.parametrize(
    ("dial", "field", "expected"),
    [
        ("appearance", "texture", [0.06, 0.0575, 0.055]),
        ("appearance", "contrast", [0.1625, 0.161875, 0.16125]),
        ("prevalence", "lesion_radius", [(0.1025, 0.195), (0.104375, 0.19625), (0.10625, 0.1975)]),
        ("style", "margin", [0.0, -0.0075, -0.015]),
    ],
)
def test_a_dial_moves_a_site_from_what_is_common_to_what_is_its_own(dial, field, expected):
    """Site 2 at 0, 1/4 and 1/2: own + (1 - dial) (common - own), where common is the mean of the four kinds, for style 0.

    texture: mean of 0.05, 0.05, 0.08, 0.06 is 0.06, own 0.05; contrast: of 0.16, 0.16, 0.2, 0.13 is 0.1625, own 0.16;
    smallest radius: of 0.1, 0.11, 0.07, 0.13 is 0.1025, own 0.11; largest: of 0.2, 0.2, 0.14, 0.24 is 0.195, own 0.2;
    margin: own -0.03.
    """
    moved = [habits_of(1, 0, Dials(**{dial: value})) for value in (0, 0.25, 0.5)]
    assert [getattr(habits, field) for habits in moved] == expected
    others = {name for names in MOVED.values() for name in names} - set(MOVED[dial])
    assert all(getattr(habits, name) == getattr(habits_of(1, 0), name) for habits in moved for name in others)


def test_every_field_has_its_dial_and_at_0_all_sites_are_alike():
    assert sorted(name for names in MOVED.values() for name in names) == sorted(vars(KINDS[0]))
    alike = [habits_of(index, 0, Dials(appearance=0, prevalence=0, style=0)) for index in range(8)]
    assert alike == [alike[0]] * 8
    assert (alike[0].margin, alike[0].smoothing) == (0, 0)


def test_raters_style_and_errors_change_no_image():
    image, mask = draw(habits_of(0, 0), 64, rng_of(0, 0, 1))
    exact = draw(habits_of(0, 0, Dials(style=0)), 64, rng_of(0, 0, 1))
    noisy = [draw(habits_of(0, 0), 64, rng_of(0, 0, 1), label_noise) for label_noise in (0.25, 1)]
    assert all(np.array_equal(image, other) for other, _ in (exact, *noisy))
    assert mask.sum() > exact[1].sum() > 0  # site 1 draws wide
    wrong = [(mask != other).sum() for _, other in noisy]
    assert 0 < wrong[0] < wrong[1]


def test_an_error_moves_the_outline_by_as_much():
    """A square of 20 pixels in 100. By 0.045 of the side outwards on its left half, where 4 columns are gained; none right."""
    square = np.zeros((100, 100), bool)
    square[40:60, 40:60] = True
    error = np.where(np.arange(100) < 50, 0.045, 0.0) * np.ones((100, 1))
    drawn = _annotate(square, KINDS[2], error)
    assert drawn[50].nonzero()[0].tolist() == list(range(36, 60))
    assert drawn[:, 45].sum() == 28
    assert drawn[:, 55].sum() == 20


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_dial_out_of_range_is_refused(value):
    with pytest.raises(FedDPError, match=f"style is {value}: a dial goes from 0 to 1"):
        Dials(style=value)


def test_a_vessel_is_as_thin_as_it_says():
    """Radius 0.2: half a width of 0.07 · 0.2 = 0.014, on a grid of 400. Its area is at most 0.028 · 1.3 and two half discs.

    It passes through the middle quarter of the image, from which the border is at least 0.25 away, so at least 0.5 of it is
    inside; half of that may lie on itself: 0.028 · 0.25.
    """
    y, x = np.mgrid[:400, :400] / 399
    for number in range(5):
        depth, outside = vessel((0.2, 0.2), x, y, rng_of(number))
        area = (outside < 0).mean()
        assert 0.028 * 0.25 < area < 1.05 * (0.028 * 1.3 + np.pi * 0.014**2)
        assert outside.min() == pytest.approx(-0.014, abs=0.005)
        assert (outside[100:300, 100:300] < 0).any()
        assert np.array_equal(outside < 0, depth > 0.5)


def test_the_command_s_dials_and_thin_structures_are_in_dataset_json(tmp_path):
    words = ["synthesize", "--out", str(tmp_path), "--sites", "2", "--images", "12", "--size", "64"]
    dials = ["--appearance", "0", "--prevalence", "0.5", "--style", "0.25", "--label-noise", "0.1"]
    made = CliRunner().invoke(app, [*words, *dials, "--thin"])
    assert made.exit_code == 0, made.output
    written = json.loads((tmp_path / "site-1/dataset.json").read_text())
    assert (written["dials"], written["thin"]) == (vars(Dials(0, 0.5, 0.25, 0.1)), True)
    assert check(tmp_path) == []
    masks = [np.array(Image.open(file)) > 0 for file in (tmp_path / "site-1").glob("masks/**/*.png")]
    assert 0.01 < np.mean(masks) < 0.08


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
    checked = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert checked.exit_code == 0
    assert made.stdout.strip() in checked.stdout.splitlines()  # beside warnings: nobody can score rounds with so few images
    assert Image.open(tmp_path / "site-2/images/image-005.png").size == (32, 32)
