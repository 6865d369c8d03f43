"""Each kind of problem is found, named with its file, and stops nothing."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from feddp.cli.data import app
from feddp.data.check import check
from feddp.data.folder import write_site
from feddp.data.names import site_problem
from feddp.errors import InputError
from support.scans import deep_png, shallow_png

REQUIRED = {"name": "toy", "channels": 3, "classes": ["tumour"], "labels": "nested"}
LINES = ["i0,p0,train", "i1,p0,train", "i2,p1,val", "i3,p2,test"]


@pytest.fixture
def site(tmp_path):
    image, mask = np.full((6, 8, 3), 90, np.uint8), np.eye(6, 8, dtype=np.uint8)
    write_site(tmp_path / "A", REQUIRED, [(*line.split(","), image, mask) for line in LINES])
    return tmp_path / "A"


def png(file, shape, value=0):
    Image.fromarray(np.full(shape, value, np.uint8)).save(file)


def split(site, lines):
    (site / "split.csv").write_text("\n".join(["image,patient,split", *lines]) + "\n")


def metadata(site, **changed):
    (site / "dataset.json").write_text(json.dumps(REQUIRED | changed))


# name: (what is done to the folder, the file it shows in, what is said of it); each gives exactly one problem
PROBLEMS = {
    "missing mask": (lambda s: (s / "masks/i1.png").unlink(), "masks/i1.png", "is missing"),
    "extra mask": (lambda s: png(s / "masks/y.png", (6, 8)), "masks/y.png", "is not in split.csv"),
    "missing image": (lambda s: (s / "images/i2.png").unlink(), "images/i2.png", "is missing"),
    "extra image": (lambda s: png(s / "images/x.png", (6, 8, 3)), "images/x.png", "is not in split.csv"),
    "not a png": (lambda s: png(s / "images/i0.jpg", (6, 8, 3)), "images/i0.jpg", "is not a .png file"),
    "size mismatch": (lambda s: png(s / "masks/i0.png", (6, 7)), "images/i0.png", "has 8 x 6 pixels, but its mask 7 x 6"),
    "unreadable image": (lambda s: (s / "images/i0.png").write_bytes(b"no"), "images/i0.png", "(its content is not PNG)"),
    "truncated mask": (
        lambda s: (s / "masks/i0.png").write_bytes((s / "masks/i0.png").read_bytes()[:45]),
        "masks/i0.png",
        "not a readable image",
    ),
    "mask value": (lambda s: png(s / "masks/i3.png", (6, 8), 255), "masks/i3.png", "has the value(s) 255"),
    "multi-channel mask": (lambda s: png(s / "masks/i3.png", (6, 8, 3)), "masks/i3.png", "has 3 channel(s)"),
    "channel count": (lambda s: png(s / "images/i3.png", (6, 8)), "images/i3.png", "dataset.json has 3"),
    "an image of 16 bits": (
        lambda s: deep_png(s / "images/i3.png", np.full((6, 8, 3), 256, np.uint16)),
        "images/i3.png",
        "has 16 bits in colour or with transparency",
    ),
    "a mask of 16 bits": (
        lambda s: Image.fromarray(np.ones((6, 8), np.uint16)).save(s / "masks/i3.png"),
        "masks/i3.png",
        "(PNG mode I;16)",
    ),
    "a mask of 2 bits": (
        lambda s: shallow_png(s / "masks/i3.png", np.ones((6, 8), np.uint8), 2),
        "masks/i3.png",
        "has 1 channel(s) of 2 bits",
    ),
    "patient in two splits, once with a blank": (
        lambda s: split(s, ["i0,p0,train", "i1,p0 ,val", *LINES[2:]]),
        "split.csv",
        "patient p0 is in train and val",
    ),
    "patient in two splits": (
        lambda s: split(s, ["i0,p0,train", "i1,p0,val", *LINES[2:]]),
        "split.csv",
        "patient p0 is in train and val",
    ),
    "empty train": (lambda s: split(s, ["i0,p0,val", "i1,p0,val", *LINES[2:]]), "split.csv", "split train is empty"),
    "empty val": (lambda s: split(s, [*LINES[:2], "i2,p1,train", LINES[3]]), "split.csv", "split val is empty"),
    "empty test": (lambda s: split(s, [*LINES[:3], "i3,p2,train"]), "split.csv", "split test is empty"),
    "duplicate stem": (lambda s: split(s, [*LINES, LINES[0]]), "split.csv", "i0 is listed more than once"),
    "bad header": (lambda s: (s / "split.csv").write_text("a,b\n"), "split.csv", "has the header 'a,b'"),
    "no split.csv": (lambda s: (s / "split.csv").unlink(), "split.csv", "is missing"),
    "no dataset.json": (lambda s: (s / "dataset.json").unlink(), "dataset.json", "is missing"),
    "bad json": (lambda s: (s / "dataset.json").write_text("{"), "dataset.json", "is not readable JSON"),
    "bad labels": (lambda s: metadata(s, labels="other"), "dataset.json", 'labels is "other"'),
    "bad volumes": (lambda s: metadata(s, volumes=True), "dataset.json", "volumes is true"),
    "bad unseen": (lambda s: metadata(s, unseen="yes"), "dataset.json", 'unseen is "yes"'),
}


def test_a_good_folder_has_no_problem(site):
    assert check(site) == []
    assert check(site.parent) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_is_found_in_site_and_root(site, name):
    spoil, file, what = PROBLEMS[name]
    spoil(site)
    for path in (site, site.parent):
        (problem,) = check(path)
        assert problem.file == site / file
        assert what in problem.what
        assert problem.remedy
        assert "\n" not in str(problem)


def test_an_unknown_split_word_is_one_problem_however_many_images_have_it(site):
    split(site, ["i0,p0,trian", "i1,p0,trian", "i2,p3,train", "i3,p1,val"])
    said = [problem for problem in check(site) if "is empty" not in problem.what]
    assert [str(p) for p in said] == [f"{site / 'split.csv'}: image i0 (and 1 more) has split 'trian'. Use train, val or test."]


def test_a_misspelt_image_is_two_problems_and_not_four(site):
    split(site, ["x0,p0,train", *LINES[1:]])
    assert [problem.what for problem in check(site)] == ["and its mask are not in split.csv", "and its mask are missing"]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("Zürich", "Zurich"),
        ("St Mary's hospital", "St-Marys-hospital"),
        ("server", "server-1"),
        ("Average", "Average-1"),
        ("ISBI_1.5", "ISBI_1-5"),
        ("医院", "site-1"),
        ("x" * 65, "x" * 64),
    ],
)
def test_a_name_that_flare_refuses_is_found_with_one_that_it_takes(site, name, suggestion):
    """FLARE's own rules: `nvflare.apis.utils.format_check` for sites, and its server's name."""
    from nvflare.apis.utils.format_check import type_pattern_mapping

    renamed = site.rename(site.parent / name)
    for path in (renamed, renamed.parent):
        (problem,) = check(path)
        assert (problem.file, problem.remedy) == (renamed, f"Rename the folder, for example to {suggestion}")
    assert re.match(type_pattern_mapping["site"], suggestion)
    assert site_problem(site, suggestion) is None
    assert check(renamed, named=False) == []


@pytest.mark.parametrize(
    "name", ["lesion", "2 cm", "T1-w_x.y+z", "x" * 64, "Läsion", "x|y", "$HOME", "{core}", "x" * 65, " x", ""]
)
def test_the_names_of_classes_are_those_that_a_plan_accepts(site, plan_for, name):
    metadata(site, classes=["tumour", name])
    try:
        plan_for(classes=("tumour", name))
    except InputError:
        (problem,) = check(site)
        assert problem.what.startswith('classes is ["tumour", "')
        assert "distinct names, at most 255, each of at most 64 letters A to Z, digits, spaces and" in problem.remedy
    else:
        assert check(site) == []


def test_a_run_refuses_such_a_name_before_it_starts(site, feddp):
    site.rename(site.parent / "server")
    code, _, err = feddp("run", "--env", "local", "--data", site.parent, "--out", site.parent / "run", "--size", 32)
    assert code == 2
    assert "'server' is no name of a site" in err


def test_many_alike_are_one_line_with_an_example(site, tmp_path):
    """Six masks of 0 and 255, and six JPEGs: one line each, which names a way out; a mask of another fault stays its own."""
    image, mask = np.full((6, 8, 3), 90, np.uint8), np.eye(6, 8, dtype=np.uint8)
    words = ["train"] * 4 + ["val", "test"]
    write_site(tmp_path / "B", REQUIRED, [(f"i{n}", f"p{n}", word, image, mask) for n, word in enumerate(words)])
    for number in range(6):
        png(tmp_path / f"B/masks/i{number}.png", (6, 8), 255 - number)
        png(tmp_path / f"B/images/j{number}.jpg", (6, 8, 3))
    png(tmp_path / "B/masks/i2.png", (6, 7), 1)
    said = {problem.file.name: str(problem) for problem in check(tmp_path / "B")}
    assert said.keys() == {"j0.jpg", "i0.png", "i2.png"}
    assert (
        "is not a .png file (and 5 more in images/ alike). Convert it to PNG, or remove it; `feddp data prepare"
        in said["j0.jpg"]
    )
    assert "has the value(s) 255 (and 4 more in masks/ alike). Use 0 to 1 only; `feddp data prepare folder`" in said["i0.png"]


def test_stray_folders_are_found(site):
    (site / "mask").mkdir()
    (site / "images/old").mkdir()
    (site.parent / "notes").mkdir()
    said = {problem.file: problem.what for problem in check(site.parent)}
    assert said == {
        site / "mask": "is neither images nor masks, and is not read",
        site / "images/old": "is a folder",
        site.parent / "notes": "is no site's folder",
    }


def test_images_that_differ_in_case_only_are_found(site):
    for part in ("images", "masks"):
        (site / part / "I0.png").write_bytes((site / part / "i0.png").read_bytes())
    split(site, [*LINES, "I0,p0,train"])
    (problem,) = check(site)
    assert problem.what == "images i0 and I0 differ in case only"


@pytest.mark.parametrize("part", ["dataset.json", "split.csv", "images/i1.png", "masks/i1.png", "images"])
def test_what_only_root_can_read_is_found_by_root_and_by_others(site, part):
    (site / part).chmod(0)
    try:
        (problem,) = check(site)
    finally:
        (site / part).chmod(0o700)
    assert problem.file == site / part
    assert "read" in problem.what


def test_all_problems_of_all_sites_come_at_once(site):
    """Everything that can be wrong side by side in one folder, and a second site with one more."""
    together = ["missing mask", "extra mask", "missing image", "extra image", "mask value", "size mismatch"]
    for name in together:
        PROBLEMS[name][0](site)
    write_site(site.parent / "B", REQUIRED | {"unseen": True}, [])
    said = " ".join(map(str, check(site.parent)))
    for name in together:
        assert f"{site / PROBLEMS[name][1]}: " in said
        assert PROBLEMS[name][2] in said
    assert len(check(site.parent)) == len(together) + 1


def test_sites_that_were_prepared_in_different_ways_are_found(site):
    """Against the first that says it: B says nothing, C another plane, D another window and plane, E has pictures of 8 bits."""
    said = {
        "A": {"axis": "axial", "window": [-160, 240], "stretched": True},
        "C": {"axis": "coronal", "window": [-160, 240], "stretched": True},
        "D": {"axis": "sagittal", "window": [0, 80], "stretched": True},
        "E": {"axis": "", "window": None, "stretched": False},
    }
    for name in "BCDE":
        shutil.copytree(site, site.parent / name)
    for name, prepared in said.items():
        metadata(site.parent / name, prepared=prepared)
    assert [(problem.file.parent.name, problem.what) for problem in check(site.parent)] == [
        ("C", "was prepared with the axis coronal, and A with axial"),
        ("D", "was prepared with the axis sagittal, and A with axial"),
        ("D", "was prepared with the window 0,80, and A with -160,240"),
    ]


@pytest.mark.parametrize("splitting", ["1:1", "published"])
def test_the_papers_splits_without_validation_images_are_no_problem(site, splitting):
    split(site, [*LINES[:2], "i2,p1,train", LINES[3]])
    metadata(site, split=splitting)
    assert check(site) == []
    split(site, [*LINES[:3], "i3,p2,train"])
    assert [str(p).partition(": ")[2] for p in check(site)] == ["split test is empty. Give every split at least one patient."]
    metadata(site, split="60/20/20")
    split(site, [*LINES[:2], "i2,p1,train", LINES[3]])
    assert len(check(site)) == 1, "the control"


def test_an_unseen_site_needs_test_images_only(site):
    lines = [line.rsplit(",", 1)[0] + ",test" for line in LINES]
    split(site, lines)
    assert len(check(site)) == 2
    metadata(site, unseen=True)
    assert check(site) == []


def test_a_folder_without_sites_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    for name, what in (("", "holds no site's folder"), ("nowhere", "does not exist"), ("file", "is a file")):
        (problem,) = check(tmp_path / name)
        assert (problem.file, problem.what) == (tmp_path / name, what)


def test_the_command_prints_one_line_a_problem_and_exits_2(site):
    good = CliRunner().invoke(app, ["check", str(site.parent)])
    summary = f"{site.parent}: A 2 train 1 val 1 test"
    printed = [line for line in good.stdout.splitlines() if not line.startswith("warning: ")]
    assert (good.exit_code, printed[0]) == (0, summary)
    assert [line.split(":")[0] for line in printed[1:]] == ["A train, 2 images", "A val, 1 image", "A test, 1 image"]
    (site / "masks" / "i1.png").unlink()
    png(site / "masks/i3.png", (6, 8), 7)
    bad = CliRunner().invoke(app, ["check", str(site)])
    assert bad.exit_code == 2
    assert [line for line in bad.stdout.splitlines() if not line.startswith("warning: ")] == [
        f"{site / 'masks/i1.png'}: is missing. Add it, or remove its line from split.csv.",
        f"{site / 'masks/i3.png'}: has the value(s) 7. Use 0 to 1 only.",
    ]
