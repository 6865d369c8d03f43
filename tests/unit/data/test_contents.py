"""What `feddp data check` tells of images and masks that a run takes and that can hardly be meant."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from feddp.cli.data import app
from feddp.data.check import examined
from feddp.data.folder import write_site

SPLITS = ("train",) * 5 + ("val",) * 5 + ("test",) * 5
NONE = np.zeros((8, 8), np.uint8)
SMALL = np.pad(np.ones((2, 2), np.uint8), 3)


def noise(number, channels=1):
    """An image that no other number gives."""
    shape = (8, 8) if channels == 1 else (8, 8, channels)
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def moved(number):
    """A mask of four pixels, elsewhere in the next image."""
    return np.roll(SMALL, number % 8, axis=1)


def site(root, name="A", image=noise, mask=moved, splits=SPLITS, classes=("lesion",), labels="nested", **more):
    """A site's folder of images and masks that are functions of their number."""
    dataset = {"name": "toy", "channels": 1, "classes": list(classes), "labels": labels} | more
    samples = [(f"i{n}", f"p{n}", split, image(n), mask(n)) for n, split in enumerate(splits)]
    write_site(root / name, dataset, samples)
    return root / name


def warned(folder, least=5):
    found = examined(folder)
    assert found.problems == []
    return [(warning.file.relative_to(folder).as_posix(), warning.what) for warning in found.warnings(least)]


def of(split, value, other=moved):
    """`value` in the images of a split, and the other function's elsewhere."""
    return lambda n: value if SPLITS[n] == split else other(n)


FEW = (
    "split val has 5 images, fewer than min_images=6 of a site's policy: its scores over these images are withheld,"
    " so it has no part in the choice of the best round"
)
EMPTY = "masks are empty: no pixel is lesion"
# what is done: (arguments of `site`, the file, what is said)
ODD = {
    "all masks are empty": ({"mask": lambda n: NONE}, "masks", f"all {EMPTY}"),
    "of two classes": (
        {"mask": lambda n: NONE, "classes": ("disc", "cup")},
        "masks",
        "all masks are empty: no pixel is disc or cup",
    ),
    "those to train on": ({"mask": of("train", NONE)}, "masks", f"all train {EMPTY}"),
    "those to select by": ({"mask": of("val", NONE)}, "masks", f"all val {EMPTY}"),
    "all masks are full": ({"mask": lambda n: NONE + 1}, "masks", "all masks are full: no pixel is background"),
    "full of several classes": (
        {"mask": lambda n: NONE + 1 + n % 2, "classes": ("fat", "muscle"), "labels": "exclusive"},
        "masks",
        "all masks are full: no pixel is background",
    ),
    "full in a split": ({"mask": of("test", NONE + 1)}, "masks", "all test masks are full: no pixel is background"),
    "all masks are inverted": (
        {"mask": lambda n: 1 - moved(n)},
        "masks",
        "lesion covers more than half of each image and of its border, so it may be the background, and the masks inverted",
    ),
    "inverted in a split": (
        {"mask": lambda n: 1 - moved(n) if SPLITS[n] == "val" else moved(n)},
        "masks",
        "lesion covers more than half of each val image and of its border, so it may be the background, and the masks inverted",
    ),
    "a class that is nowhere": ({"classes": ("disc", "cup")}, "masks", "no mask shows cup"),
    "a class that the last one hides": (
        {"mask": lambda n: moved(n) * 2, "classes": ("disc", "cup"), "labels": "exclusive"},
        "masks",
        "no mask shows disc",
    ),
    "a class that two splits lack": (
        {"mask": lambda n: moved(n) * (1 + (n < 5)), "classes": ("disc", "cup")},
        "masks",
        "no val or test mask shows cup, and others do",
    ),
    "the same mask everywhere": ({"mask": lambda n: SMALL}, "masks", "all 15 masks are the same"),
    "all images are black": (
        {"image": lambda n: NONE},
        "images",
        "all images are of one colour each, as black ones are",
    ),
    "grey, each another": ({"image": lambda n: NONE + n}, "images", "all images are of one colour each, as black ones are"),
    "black with a little noise": (
        {"image": lambda n: noise(n) % 4},
        "images",
        "all images are of one colour each, as black ones are",
    ),
    "red": (
        {"image": lambda n: np.full((8, 8, 3), (200, 0, 9), np.uint8), "channels": 3},
        "images",
        "all images are of one colour each, as black ones are",
    ),
    "black in a split": (
        {"image": of("val", NONE, noise)},
        "images",
        "all val images are of one colour each, as black ones are",
    ),
    "black where a structure is drawn": (
        {"image": lambda n: NONE if n in (3, 9) else noise(n)},
        "images/i3.png",
        "is of one colour, but its mask shows a structure (and 1 more alike)",
    ),
    "the same image everywhere": ({"image": lambda n: noise(0)}, "images", "all 15 images are the same"),
    "images that are masks": (
        {"image": lambda n: moved(n) * 255},
        "images/i0.png",
        "shows nothing but its mask (and 14 more alike)",
    ),
    "an image in two splits": (
        {"image": lambda n: noise(0 if n == 12 else n)},
        "images/i12.png",
        "is pixel for pixel an image of split train",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_can_hardly_be_meant_is_one_warning(tmp_path, name):
    changed, file, what = ODD[name]
    found = warned(site(tmp_path, **changed))
    if name == "images that are masks":  # of which there are eight, so some are in two splits
        found = [warning for warning in found if "pixel for pixel" not in warning[1]]
    assert found == [(file, what)]


def test_what_is_usual_is_none(tmp_path):
    """Some masks are empty and one is full, some slices are black, and an image shows more than its mask."""
    masks = {0: NONE, 5: NONE, 6: NONE + 1}
    images = {0: NONE, 5: NONE, 1: np.where(moved(1), noise(1), 0).astype(np.uint8)}
    assert warned(site(tmp_path, mask=lambda n: masks.get(n, moved(n)), image=lambda n: images.get(n, noise(n)))) == []
    colour = site(tmp_path, "B", image=lambda n: noise(n, 3), channels=3)
    assert warned(colour) == []


def test_too_few_images_to_select_by(tmp_path):
    folder = site(tmp_path)
    assert warned(folder, least=6) == [("split.csv", FEW)]
    unseen = site(tmp_path, "B", splits=("test",) * 4, unseen=True)
    assert warned(unseen, least=6) == [], "no round is selected by it"
    published = site(tmp_path, "C", splits=("train",) * 5 + ("test",) * 6, split="published")
    assert warned(published, least=6) == [], "a run of it selects by the test images"
    assert [what for _, what in warned(published, least=7)] == [FEW.replace("val has 5", "test has 6").replace("=6", "=7")]


def test_a_federation_in_which_no_site_has_enough(tmp_path):
    nobody = "no site has 6 images by which a round is selected, so a job that needs the best one is refused"
    site(tmp_path, "A"), site(tmp_path, "B")
    assert warned(tmp_path, least=6) == [("A/split.csv", FEW), ("B/split.csv", FEW), (".", nobody)]
    assert warned(tmp_path) == []
    site(tmp_path, "C", splits=(*SPLITS, "val"))
    assert warned(tmp_path, least=6) == [("A/split.csv", FEW), ("B/split.csv", FEW)]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"channels": 3, "image": lambda n: noise(n, 3)}, "channels is 3, and 1 at A"),
        ({"classes": ("tumour",)}, 'classes is ["tumour"], and ["lesion"] at A'),
        ({"classes": ("lesion", "core"), "mask": lambda n: moved(n) + moved(n + 1)}, "classes is"),
        ({"labels": "exclusive"}, 'labels is "exclusive", and "nested" at A'),
    ],
)
def test_sites_that_no_run_takes_together_are_a_problem_of_each_that_differs_from_the_first(tmp_path, changed, what):
    for name in "AB":
        site(tmp_path, name)
    site(tmp_path, "C", **changed)
    (problem,) = examined(tmp_path).problems
    assert problem.file == tmp_path / "C/dataset.json"
    assert problem.what.startswith(what)
    assert problem.what.endswith(" at A: no run takes both")
    assert examined(tmp_path / "C").problems == []


def test_the_shares_by_hand(tmp_path):
    """Of 64 pixels, the disc has 16 and the cup in it 4. In four training images: both, the disc, nothing, everything is disc:
    disc in 3 of 4 and (16 + 16 + 64) / 256 = 37.5 %, cup in 1 of 4 and 4 / 256 = 1.56 %."""
    disc = np.pad(np.ones((4, 4), np.uint8), 2)
    masks = {0: disc + SMALL, 1: disc, 2: NONE, 3: NONE + 1}
    splits = ("train",) * 4 + ("val",) * 5 + ("test",)
    folder = site(tmp_path, mask=lambda n: masks.get(n, np.roll(disc + SMALL, n, 0)), splits=splits, classes=("disc", "cup"))
    (contents,) = examined(folder).sites
    assert list(contents.lines()) == [
        "A train, 4 images: disc in 75.0% of images, 37.50% of pixels; cup in 25.0% of images, 1.56% of pixels",
        "A val, 5 images: disc in 100.0% of images, 25.00% of pixels; cup in 100.0% of images, 6.25% of pixels",
        "A test, 1 image: disc in 100.0% of images, 25.00% of pixels; cup in 100.0% of images, 6.25% of pixels",
    ]


def test_exclusive_classes_share_no_pixel(tmp_path):
    folder = site(tmp_path, mask=lambda n: moved(n) + moved(n) * (n % 2), classes=("fat", "bone"), labels="exclusive")
    first = next(examined(folder).sites[0].lines())
    assert first == "A train, 5 images: fat in 60.0% of images, 3.75% of pixels; bone in 40.0% of images, 2.50% of pixels"


def test_the_command_warns_shows_the_shares_and_exits_with_0_where_there_is_no_problem(tmp_path):
    folder = site(tmp_path, mask=lambda n: NONE)
    said = CliRunner().invoke(app, ["check", str(folder)])
    assert said.exit_code == 0
    warning, summary, *lines = said.stdout.splitlines()
    assert warning.startswith(f"warning: {folder / 'masks'}: all {EMPTY}. Look at some of them")
    assert summary == f"{folder}: A 5 train 5 val 5 test"
    assert lines == [f"A {split}, 5 images: lesion in 0.0% of images, 0.00% of pixels" for split in ("train", "val", "test")]
    (folder / "dataset.json").write_text(json.dumps({"name": "toy"}))
    broken = CliRunner().invoke(app, ["check", str(folder)])
    assert (broken.exit_code, "warning" in broken.stdout) == (2, False), "what it shows is not known"
