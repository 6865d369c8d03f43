"""`feddp data prepare folder`: every format, its masks, spacing and splits; what is wrong is one line."""

import csv
import json
import shutil
import unicodedata

import nibabel
import numpy as np
import pytest
import tifffile
from PIL import Image

from feddp.data.check import check
from feddp.data.folder import SiteFolder
from feddp.data.formats.pictures import read_labels, read_picture
from feddp.data.preparation import Preparation
from feddp.data.prepare.source import Source
from feddp.errors import InputError
from feddp.limits import SIDE
from support.scans import APART, SHAPE, SPACING, contours, deep_png, nifti, series, square

BOX = np.zeros((12, 10), np.uint8)
BOX[2:6, 3:9] = 1
NAMES = [f"p{n}" for n in range(6)]


@pytest.fixture
def source(tmp_path):
    """Makes a source of one site, clinic: every image 12 x 10 with the mask BOX, changed by functions of name and pixels."""

    def make(image=None, mask=None, names=NAMES, site="clinic"):
        folders = [tmp_path / "source" / site / part for part in ("images", "masks")]
        for folder in folders:
            folder.mkdir(parents=True)
        grey = np.arange(120, dtype=np.uint8).reshape(12, 10)
        for name in names:
            (image or (lambda f, p: Image.fromarray(p).save(f"{f}.png")))(folders[0] / name, grey)
            (mask or (lambda f, p: Image.fromarray(p * 255).save(f"{f}.png")))(folders[1] / name, BOX)
        return tmp_path / "source"

    return make


@pytest.fixture
def prepare(feddp, tmp_path):
    """Runs the command; returns the site's folder."""

    def run(source, *options, site="clinic"):
        code, out, err = feddp("data", "prepare", "folder", "--source", source, "--out", tmp_path / "out", *options)
        assert code == 0, err
        return tmp_path / "out" / site

    return run


@pytest.fixture
def refused(feddp, tmp_path):
    """Runs the command, which must say what is wrong in one line; returns the line."""

    def run(source, *options):
        code, out, err = feddp("data", "prepare", "folder", "--source", source, "--out", tmp_path / "out", *options)
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1), err
        assert not list((tmp_path / "out").rglob("*.png"))
        return err

    return run


def png(site, name, part="images"):
    return np.asarray(Image.open(site / part / f"{name}.png"))


def table(site):
    with open(site / "split.csv", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("image", "holds no image of a known format. Convert source/clinic/images/p0.gif to PNG"),
        ("mask", "first; of kinds that are not read: source/clinic/masks/p0.gif. Add masks of the same names, as PNG"),
    ],
)
def test_files_of_kinds_that_are_not_read_are_named(source, refused, part, said):
    """Masks in GIF were said to be missing."""
    assert said in refused(source(**{part: lambda f, p: Image.fromarray(p).save(f"{f}.gif")}, names=["p0"]))


# -- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "name"), [(".", "source"), ("../source", "source"), ("{source}", "source"), ("../link", "link")]
)
def test_a_data_set_has_its_folder_s_name_however_that_is_typed(source, prepare, monkeypatch, typed, name):
    """`.` too, in which no name is written; a link's is its own."""
    folder = source()
    folder.with_name("link").symlink_to(folder)
    monkeypatch.chdir(folder)
    site = prepare(typed.format(source=folder), "--classes", "polyp")
    assert json.loads((site / "dataset.json").read_text())["name"] == name
    assert check(site) == []


def test_pngs_with_masks_of_0_and_255_become_a_site_that_passes_the_check(source, prepare):
    site = prepare(source(), "--classes", "polyp")
    assert check(site) == []
    assert (png(site, "p0", "masks") == BOX).all()
    assert (png(site, "p0") == np.arange(120).reshape(12, 10)).all()
    assert sorted(row["split"] for row in table(site)) == ["test", "train", "train", "train", "train", "val"]
    metadata = json.loads((site / "dataset.json").read_text())
    assert (metadata["channels"], metadata["classes"], metadata["labels"]) == (1, ["polyp"], "nested")
    assert "volumes" not in metadata


def test_jpegs_and_masks_with_values_in_between_are_thresholded(source, prepare):
    """Of a JPEG mask, values above 127 count; a ramp of 0, 10, ..., 250 is foreground from 130, and from 210 above 200."""
    ramp = np.tile(np.arange(0, 260, 10, dtype=np.uint8), (12, 1))[:, :10] + 100  # 100, 110, ..., 190
    folder = source(
        image=lambda f, p: Image.fromarray(np.stack([p] * 3, -1)).save(f"{f}.jpg"),
        mask=lambda f, p: Image.fromarray(ramp).save(f"{f}_mask.png"),
    )
    site = prepare(folder)
    assert png(site, "p0").shape == (12, 10, 3)
    assert (png(site, "p0", "masks") == (np.arange(100, 200, 10) > 127)).all()


def test_the_threshold_is_the_one_given(source, prepare):
    ramp = np.tile(np.arange(100, 200, 10, dtype=np.uint8), (12, 1))
    site = prepare(source(mask=lambda f, p: Image.fromarray(ramp).save(f"{f}.png")), "--threshold", 160)
    assert (png(site, "p0", "masks") == (np.arange(100, 200, 10) > 160)).all()


def test_a_jpeg_mask_is_what_was_drawn(source, prepare):
    """A square of 8 x 8, JPEG's block, so that its edge stays sharp."""
    drawn = np.zeros((16, 16), np.uint8)
    drawn[8:16, 8:16] = 1
    folder = source(
        image=lambda f, p: Image.fromarray(np.zeros((16, 16), np.uint8)).save(f"{f}.bmp"),
        mask=lambda f, p: Image.fromarray(drawn * 255).save(f"{f}.jpg", quality=60),
    )
    assert (png(prepare(folder), "p0", "masks") == drawn).all()


@pytest.mark.parametrize("kind", ["Pillow", "tifffile", "three channels"])
def test_16_bit_tiffs_go_from_the_least_value_to_the_99th_percentile(source, prepare, kind):
    """Values 1000 + 0..119: the 99th percentile of 120 values in steps of 1 is 0.99 · 119 = 117.81 above the least.

    A pixel of 1000 + v becomes round(v / 117.81 · 255), at most 255. With three equal channels, place 0.99 · 359 = 355.41 of
    the 360 values lies between two of 118.
    """

    def write(f, p):
        values = p.astype(np.uint16) + 1000
        if kind == "Pillow":
            Image.fromarray(values).save(f"{f}.tif")
        else:
            tifffile.imwrite(f"{f}.tiff", values if kind == "tifffile" else np.stack([values] * 3, -1))

    site = prepare(source(image=write))
    white = 118 if kind == "three channels" else 117.81
    wanted = np.rint(np.arange(120) / white * 255).clip(0, 255).reshape(12, 10)
    got = png(site, "p0").astype(float)
    assert got.ndim == (3 if kind == "three channels" else 2)
    assert (got.reshape(12, 10, -1) == wanted[..., None]).all()


@pytest.mark.parametrize(
    ("kind", "photometric", "stored", "expected"),
    [
        ("u2", "miniswhite", lambda ramp: 65535 - ramp, lambda ramp: ramp),
        ("i1", "minisblack", lambda ramp: ramp - 60, lambda ramp: ramp - 60),
        ("u4", "minisblack", lambda ramp: 3 * 2**30 + 256 * ramp, lambda ramp: 3 * 2**30 + 256 * ramp),
    ],
    ids=["16 bits with white as 0", "8 bits with a sign", "32 bits without a sign"],
)
def test_values_of_a_tiff_are_what_was_stored(source, prepare, kind, photometric, stored, expected):
    """Where 0 is white, black is 65535, and 65535 - v has the brightness v.

    All are ramps of 120 equal steps: step n becomes round(n / (0.99 · 119) · 255), at most 255, as above. At 3 · 2^30, float32
    has steps of 256.
    """
    seen = []

    def write(f, p):
        tifffile.imwrite(f"{f}.tif", stored(p.astype(np.int64)).astype(kind), photometric=photometric)
        seen.append(read_picture(Source(f.parent), f"images/{f.name}.tif").pixels[0])

    site = prepare(source(image=write))
    ramp = np.arange(120).reshape(12, 10)
    assert all((each == expected(ramp)).all() for each in seen)
    assert (png(site, "p0") == np.rint(ramp / 117.81 * 255).clip(0, 255)).all()


def test_a_label_image_of_32_bits_in_lzw_is_read(tmp_path):
    """Pillow reads this compression and tifffile alone does not; Pillow takes the values for signed."""
    values = np.array([[0, 1], [2**31 + 1, 2**32 - 1]], np.uint32)
    (tmp_path / "images").mkdir()
    file = tmp_path / "images/x.tif"
    Image.fromarray(values.view(np.int32)).save(file, compression="tiff_lzw")
    signed, unsigned = (b"\x53\x01\x03\x00\x01\x00\x00\x00" + kind for kind in (b"\x02\x00", b"\x01\x00"))  # SampleFormat
    assert file.read_bytes().count(signed) == 1
    file.write_bytes(file.read_bytes().replace(signed, unsigned))
    found = read_labels(Source(tmp_path / "images"), "images/x.tif").values
    assert (found == values).all()


def test_a_hidden_folder_is_not_entered(source, prepare):
    """Of an editor or an environment, whose links do not concern the images."""
    folder = source()
    (folder / ".venv").mkdir()
    (folder / ".venv/lib64").symlink_to(folder)
    assert png(prepare(folder), "p0").shape == (12, 10)


def test_a_window_says_what_is_black_and_white(source, prepare):
    """0 to 119 in the window 20 to 71: (v - 20) · 255 / 51 = 5 (v - 20), cut at 0 and 255."""
    site = prepare(source(), "--window", "20,71")
    assert (png(site, "p0") == ((np.arange(120) - 20) * 5).clip(0, 255).reshape(12, 10)).all()


def test_colours_become_classes_and_blended_ones_the_nearest(source, prepare):
    """Red is disc and green is cup; 200,30,20 is 77 from black, 65 from red: neither is within 64. 220,20,20 is 46 from red."""
    drawn = np.zeros((12, 10, 3), np.uint8)
    drawn[0, 0], drawn[0, 1], drawn[0, 2], drawn[0, 3] = (255, 0, 0), (0, 255, 0), (220, 20, 20), (10, 10, 10)
    folder = source(mask=lambda f, p: Image.fromarray(drawn).save(f"{f}.png"))
    options = ("--classes", "disc,cup", "--labels", "exclusive", "--colour", "disc=255,0,0", "--colour", "cup=0,255,0")
    mask = png(prepare(folder, *options), "p0", "masks")
    assert mask[0].tolist() == [1, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    assert mask[1:].max() == 0


def test_a_colour_of_no_class_is_named(source, refused):
    drawn = np.zeros((12, 10, 3), np.uint8)
    drawn[0, 0] = (0, 0, 255)
    folder = source(mask=lambda f, p: Image.fromarray(drawn).save(f"{f}.png"))
    assert "has colours, and none is declared" in refused(folder)
    assert "has the colour 0,0,255, which is of no class" in refused(folder, "--colour", "lesion=255,0,0")


def test_indices_of_an_indexed_mask_are_its_values(source, prepare):
    def indexed(f, p):
        image = Image.fromarray(p + p[::-1] // 1)
        image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
        image.save(f"{f}.png")

    site = prepare(source(mask=indexed), "--classes", "a,b")
    assert (png(site, "p0", "masks") == BOX + BOX[::-1]).all()


def test_sites_patients_and_given_splits(source, prepare, tmp_path):
    """Two sites; of one, a patient is the first folder below images/; the other has a split.csv."""
    source(names=["a"], site="given")
    folder = source(names=["x"], site="deep")
    for part in ("images", "masks"):
        (folder / "given" / part / "a.png").rename(folder / "given" / part / "b.png")
        (folder / "given" / part / "c.png").write_bytes((folder / "given" / part / "b.png").read_bytes())
        for patient in ("anna", "bert", "cleo"):
            (folder / "deep" / part / patient).mkdir()
            for number in range(2):
                copy = folder / "deep" / part / patient / f"{number}.png"
                copy.write_bytes((folder / "deep" / part / "x.png").read_bytes())
        (folder / "deep" / part / "x.png").unlink()
    (folder / "given/split.csv").write_text("image,patient,split\nb,p,train\nc,q,test\n")
    site = prepare(folder, site="deep")
    assert {(row["image"], row["patient"]) for row in table(site)} == {
        (f"{patient}_{number}", patient) for patient in ("anna", "bert", "cleo") for number in range(2)
    }
    assert len({(row["patient"], row["split"]) for row in table(site)}) == 3
    assert table(site.parent / "given") == [
        {"image": "b", "patient": "p", "split": "train"},
        {"image": "c", "patient": "q", "split": "test"},
    ]


def test_a_given_split_that_does_not_fit_is_named(source, refused):
    folder = source()
    given = folder / "clinic/split.csv"
    given.write_text("image,patient,split\np0,a,train\n")
    assert "split.csv: lacks p1, p2, p3 and 2 more" in refused(folder)
    lines = [f"{name},a,train" for name in NAMES]
    given.write_text("\n".join(["image,patient,split", *lines]))
    assert "its split.csv gives the splits" in refused(folder, "--split", "1:1")
    given.write_text("\n".join(["image,patient,split", *lines[1:], "p0,a,test"]))
    assert "patient a is in train and test" in refused(folder)
    given.write_text("\n".join(["image,patient,split", *lines[1:], "p0,a ,test"]))
    assert "patient a is in train and test" in refused(folder)
    given.write_text("\n".join(["image,patient,split", *lines, "", "p1 ,b,test"]))
    assert "split.csv: lists the image p1 in the lines 3 and 9. Keep one of them" in refused(folder)
    given.write_text("\n".join(["image,patient,split", *lines[1:], "p0, ,train"]))
    error = refused(folder)
    assert f"{given}: line 7 is not an image, its patient and one of train, val and test" in error
    assert ".partial" not in error


def test_a_blank_behind_a_folder_s_name_makes_no_other_patient(source, prepare):
    """A program that fills names up with blanks; one that reads the table may cut them."""

    def write(f, p):
        f.parent.mkdir(exist_ok=True)
        Image.fromarray(p).save(f"{f}.png")

    site = prepare(source(write, write, ["anna/a", "anna /b", "bert/c", "cleo/d"]))
    assert {row["image"]: row["patient"] for row in table(site)} == {
        "anna_a": "anna", "anna_b": "anna", "bert_c": "bert", "cleo_d": "cleo"
    }  # fmt: skip


def test_spacing_is_kept_and_follows_a_resize(source, prepare):
    """12 rows of 0.4 mm at 8 rows are 0.6 mm apart; 10 columns of 0.2 mm at 8 are 0.25 mm apart."""
    site = prepare(source(), "--spacing", "0.4,0.2", "--size", 8)
    assert check(site) == []
    for row in table(site):
        assert (float(row["row_mm"]), float(row["column_mm"])) == pytest.approx((0.6, 0.25))
        assert (row["volume"], row["slice"], row["slice_mm"]) == ("", "", "")


@pytest.mark.parametrize("folders", [True, False], ids=["masks/CLASS/", "_CLASS"])
def test_masks_of_one_class_each_become_one(source, prepare, folders):
    """The disc is BOX; the cup lies inside it and counts, so that nested labels keep both: 5 columns of 4 rows become 2."""
    cup = np.zeros_like(BOX)
    cup[2:6, 4:9] = 1

    def write(f, p):
        for name, drawn in (("disc", p), ("Cup", cup)):
            file = f.parent / name / f"{f.name}.png" if folders else f.with_name(f"{f.name}_{name}.png")
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(drawn * 255).save(file)

    site = prepare(source(mask=write), "--classes", "disc,cup")
    assert (png(site, "p0", "masks") == BOX + cup).all()


def test_a_class_without_its_file_and_an_overlap_of_exclusive_ones_are_named(source, refused):
    folder = source(mask=lambda f, p: [Image.fromarray(p * 255).save(f"{f}_{name}.png") for name in ("a", "b")])
    options = ("--classes", "a,b", "--labels", "exclusive")
    assert "p0_a.png: has structures that overlap" in refused(folder, *options)
    (folder / "clinic/masks/p2_b.png").unlink()
    said = refused(folder, *options)
    assert "p2_a.png: is the mask of one class of source/clinic/images/p2.png, which has none of b. Add one for every" in said


def test_what_was_left_out_or_taken_for_granted_is_said(source, feddp, tmp_path):
    """One line for both sites; a folder per patient says who is who, so the second time only the stray mask is left."""
    source(site="north")
    folder = source(site="south")
    for number in range(4):
        shutil.copy(folder / "north/masks/p0.png", folder / f"north/masks/stray{number}.png")
    (folder / "north/images/readme.txt").touch()
    (folder / "north/images/p9.webp").write_bytes(b"RIFF")
    code, out, _ = feddp("data", "prepare", "folder", "--source", folder, "--out", tmp_path / "out")
    assert code == 0
    assert out.splitlines()[:4] == [
        "north: left out, as neither images nor masks: source/north/images/readme.txt",
        "north: left out, as of kinds that are not read: source/north/images/p9.webp; if they are images, convert them to PNG"
        " or TIFF",
        "north: 4 file(s) in masks/ are of no image, source/north/masks/stray0.png first",
        "north, south: every image counts as a patient; where patients have several, give each a folder, or write split.csv",
    ]
    shutil.rmtree(folder / "south")
    (folder / "north/split.csv").write_text("image,patient,split\n" + "".join(f"{name},{name},train\n" for name in NAMES))
    _, out, _ = feddp("data", "prepare", "folder", "--source", folder, "--out", tmp_path / "again")
    assert "every image counts" not in out
    assert (
        "north: there is no patient left for the split val and test; a site that trains needs one for each" in out.splitlines()
    )


def test_a_class_that_no_mask_holds_is_said(source, feddp, tmp_path):
    """The usual misspelling: nothing else tells that all its masks are empty."""
    images = series(tmp_path / "source/clinic/images/anna")
    contours(tmp_path / "source/clinic/masks/a.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])], name="liver")
    options = ("--source", tmp_path / "source", "--out", tmp_path / "out", "--classes", "liver,tumuor")
    code, out, _ = feddp("data", "prepare", "folder", *options)
    assert code == 0
    assert "clinic: no mask holds tumuor; masks of that class are empty, unless its name or value is another" in out


@pytest.mark.parametrize(("classes", "labels"), [("lesion", "nested"), ("lesion,core", "nested"), ("core,lesion", "exclusive")])
def test_masks_that_may_be_inverted_are_said(source, feddp, tmp_path, classes, labels):
    """96 of 120 pixels with the border; a mask of 80 within a border of background is large, and no more."""
    value = 255 if classes == "lesion" else classes.split(",").index("lesion") + 1
    large, inverted = np.zeros((12, 10), np.uint8), np.full((12, 10), value, np.uint8)
    large[1:11, 1:9], inverted[4:8, 2:8] = value, 0
    if classes == "lesion,core":
        inverted[:4] = 2  # within the lesion, of which no half would be left beside it
    folder = source(mask=lambda file, _: Image.fromarray(inverted if file.name == "p3" else large).save(f"{file}.png"))
    options = ("--out", tmp_path / "out", "--classes", classes, "--labels", labels)
    code, out, err = feddp("data", "prepare", "folder", "--source", folder, *options)
    what = "lesion covers more than half of 1 image(s) and of their borders, p3 first; if that is the background, the masks are"
    assert [line for line in (out + err).splitlines() if "half" in line] == [f"clinic: {what} inverted"]


def test_an_outer_class_that_the_inner_one_fills_is_there(source, feddp, tmp_path):
    """Of nested classes, 2 is also of class 1; of exclusive ones it is not."""
    folder = source(mask=lambda f, p: Image.fromarray(p * 2).save(f"{f}.png"), names=["p0"])
    for labels in ("nested", "exclusive"):
        options = ("--source", folder, "--out", tmp_path / labels, "--classes", "disc,cup", "--labels", labels)
        _, out, _ = feddp("data", "prepare", "folder", *options)
        assert ("no mask holds disc" in out) == (labels == "exclusive")


def test_a_series_without_a_mask_is_told_which_kind_it_needs(refused, tmp_path):
    series(tmp_path / "source/clinic/images/anna")
    assert "1 image(s) have no mask, source/clinic/images/anna/1.dcm first. Add a SEG or" in refused(tmp_path / "source")


# -- masks that can mean two things --------------------------------------------------------------------------------------


def test_a_mask_in_the_transparency_is_refused(source, refused):
    """White everywhere, drawn in the alpha channel: every pixel became foreground."""

    def write(f, p):
        Image.fromarray(np.dstack([np.full_like(p, 255)] * 3 + [p * 255])).save(f"{f}.png")

    folder = source(mask=write)
    assert "p0.png: is transparent in places" in refused(folder)
    assert "p0.png: is transparent in places" in refused(folder, "--colour", "lesion=255,255,255")


def oriented(number, ending="tif", mode="L"):
    def write(f, p):
        exif = Image.Exif()
        exif[274] = number
        image = Image.fromarray(p * (255 if p.max() == 1 else 1)).convert(mode)
        image.save(f"{f}.{ending}", **({"tiffinfo": {274: number}} if ending == "tif" else {"exif": exif}))

    return write


@pytest.mark.parametrize("number", [3, 6, 8])
@pytest.mark.parametrize("ending", ["tif", "png"])
def test_an_image_and_its_mask_of_one_orientation_are_read_as_stored(source, feddp, tmp_path, number, ending):
    folder = source(image=oriented(number, ending), mask=oriented(number))
    code, out, err = feddp("data", "prepare", "folder", "--source", folder, "--out", tmp_path / "out")
    assert code == 0, err
    site = tmp_path / "out/clinic"
    assert (png(site, "p0") == np.arange(120).reshape(12, 10)).all()
    assert (png(site, "p0", "masks") == BOX).all()
    assert "clinic: 6 picture(s) have an orientation in their files, p0 first; their pixels are taken as stored" in out


def test_an_orientation_of_one_of_both_is_refused_unless_the_sizes_decide(source, refused, prepare, tmp_path):
    """A half turn keeps the size: nobody knows whether the mask was drawn on the turned image. A quarter turn of 12 x 10
    pixels would be 10 x 12, so a mask of 12 x 10 is of the stored one."""
    assert "p0.png: has the orientation 1 in its file, and its image 3" in refused(source(image=oriented(3)))
    shutil.rmtree(tmp_path / "source")
    assert "p0.tif: has the orientation 4 in its file, and its image 1" in refused(source(mask=oriented(4)))
    shutil.rmtree(tmp_path / "source")
    assert "p0.tif: has the orientation 3 in its file, and its image 6" in refused(source(image=oriented(6), mask=oriented(3)))
    shutil.rmtree(tmp_path / "source")
    turned = source(image=oriented(6, "png"), mask=lambda f, p: Image.fromarray(np.rot90(p) * 255).save(f"{f}.png"))
    said = refused(turned)
    assert "p0.png: has 12 x 10 pixels, but its image 10 x 12: viewers show its image turned by its orientation tag, 6" in said
    assert "-auto-orient" in said
    shutil.rmtree(tmp_path / "source")
    square = source(
        image=lambda f, p: oriented(6, "png")(f, p[:10]), mask=lambda f, p: Image.fromarray(p[:10] * 255).save(f"{f}.png")
    )
    assert "p0.png: has the orientation 1 in its file, and its image 6" in refused(square)
    shutil.rmtree(tmp_path / "source")
    assert (png(prepare(source(image=oriented(6, "png"))), "p0", "masks") == BOX).all()


@pytest.mark.parametrize("how", ["values", "colours", "files"])
def test_a_kidney_beside_a_spleen_is_not_nested(source, refused, prepare, tmp_path, how):
    """Of 36 and 64 pixels: nested, the kidney's map had all 100."""
    drawn = np.zeros((12, 20), np.uint8)
    drawn[1:7, 1:7], drawn[1:9, 10:18] = 1, 2
    options = ["--classes", "kidney,spleen"]

    def write(f, p):
        if how == "values":
            Image.fromarray(drawn).save(f"{f}.png")
        elif how == "colours":
            Image.fromarray(np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)[drawn]).save(f"{f}.png")
        else:
            for value, name in enumerate(("kidney", "spleen"), 1):
                Image.fromarray((drawn == value).astype(np.uint8)).save(f"{f}_{name}.png")

    if how == "colours":
        options += ["--colour", "kidney=255,0,0", "--colour", "spleen=0,255,0"]
    folder = source(image=lambda f, p: Image.fromarray(np.zeros((12, 20), np.uint8)).save(f"{f}.png"), mask=write)
    said = refused(folder, *options)
    assert "spleen" in said
    assert "give --labels exclusive; if each is inside the one before, --labels nested" in said
    site = prepare(folder, *options, "--labels", "exclusive")
    assert (png(site, "p0", "masks") == drawn).all()
    assert json.loads((site / "dataset.json").read_text())["labels"] == "exclusive"
    shutil.rmtree(tmp_path / "out")
    assert json.loads((prepare(folder, *options, "--labels", "nested") / "dataset.json").read_text())["labels"] == "nested"


def test_an_instance_map_is_refused_and_all_of_it_taken_by_the_threshold(source, refused, prepare):
    """Of the ids 1 to 240, those up to 127 became background."""
    ids = np.kron(np.arange(1, 241).reshape(12, 20), np.pad(np.ones((3, 3)), (0, 1))).astype(np.uint8)
    folder = source(
        image=lambda f, p: Image.fromarray(ids // 2).save(f"{f}.png"), mask=lambda f, p: Image.fromarray(ids).save(f"{f}.png")
    )
    assert "p0.png: has flat areas of the values 0, 1, 2, 3, 4, ..., as labels of classes or of single objects" in refused(
        folder
    )
    assert (png(prepare(folder, "--threshold", 0), "p0", "masks") == (ids > 0)).all()


@pytest.mark.parametrize("grey", [True, False])
def test_indices_of_a_palette_are_no_grey_levels(source, refused, prepare, grey):
    """Of 8 bits and a palette in any order: index 200 is white and 90 red, or a grey; 127 divides no indices."""

    def indexed(f, p):
        image = Image.fromarray(p * 200)
        palette = np.zeros((256, 3), np.uint8)
        palette[200] = 255 if grey else (255, 0, 0)
        palette[1:90] = 255
        image.putpalette(palette.ravel().tolist())
        image.save(f"{f}.png")

    folder = source(mask=indexed)
    if grey:
        assert (png(prepare(folder), "p0", "masks") == BOX).all()
    else:
        said = refused(folder)
        assert "has colours, and none is declared" in said
        assert said.strip().endswith("; where all above 0 is foreground, give --threshold 0.")
        assert (png(prepare(folder, "--threshold", 0), "p0", "masks") == BOX).all()


# -- names and copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("images", "masks"), [("NFC", "NFD"), ("NFD", "NFC"), ("NFD", "NFD")])
def test_a_name_is_one_however_its_accents_are_written(source, prepare, images, masks):
    """macOS writes an accent behind its letter. Of images, masks, patients' folders and split.csv alike."""
    written = {"images": images, "masks": masks}

    def write(f, p):
        part = f.parents[1].name
        file = f.parents[1] / unicodedata.normalize(written[part], str(f.relative_to(f.parents[1])))
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(p * (255 if part == "masks" else 1)).save(f"{file}.png")

    folder = source(write, write, ["Müller/é", "Müller/à", "Jörg/ö"])
    (folder / "clinic/split.csv").write_text(
        "image,patient,split\nMüller_é,Müller,train\nMu\u0308ller_à,Mu\u0308ller,train\nJörg_ö,Jörg,test\n"
    )
    site = prepare(folder)
    assert {(row["image"], row["patient"]) for row in table(site)} == {
        ("Müller_é", "Müller"), ("Müller_à", "Müller"), ("Jörg_ö", "Jörg")
    }  # fmt: skip


def test_two_images_whose_names_differ_in_writing_alone_are_named(source, refused):
    folder = source(names=["é", "e\u0301"])
    assert "which differ in how they write accents (Unicode NFC and NFD). Rename one" in refused(folder)


def test_a_site_s_files_in_another_writing_are_named(source, prepare):
    site = prepare(source(names=["é", "a", "b"]))
    (site / "images/é.png").rename(site / "images/e\u0301.png")
    assert "is in split.csv with its accents written in another way" in " ".join(map(str, check(site)))


def test_an_image_of_two_patients_is_said(source, feddp, tmp_path):
    """p0 and p3 are equal, and p0 and p5 are of one patient; an image of one colour is no copy."""

    def write(f, p):
        number = int(f.name[-1])
        pixels = np.zeros_like(p) if number in (1, 2) else p + (0 if number in (0, 3, 5) else number)
        Image.fromarray(pixels).save(f"{f}.png")

    folder = source(image=write)
    rows = [f"p{n},{'p0' if n == 5 else f'p{n}'},train" for n in range(6)]
    (folder / "clinic/split.csv").write_text("\n".join(["image,patient,split", *rows]))
    code, out, err = feddp("data", "prepare", "folder", "--source", folder, "--out", tmp_path / "out")
    assert code == 0, err
    assert "clinic: 1 image(s) are copies of another patient's, p0 and p3 first; where one trains and one tests" in out


# -- how images were made ----------------------------------------------------------------------------------------------


def made(site):
    return json.loads((site / "dataset.json").read_text())["prepared"]


def test_how_images_were_made_is_kept(source, prepare, tmp_path):
    assert made(prepare(source())) == {"axis": "", "window": None, "stretched": False, "size": None}
    shutil.rmtree(tmp_path / "out")
    site = prepare(volumes(tmp_path / "volumes"), "--axis", "coronal", "--window=-10,200")
    assert made(site) == {"axis": "coronal", "window": [-10, 200], "stretched": True, "size": None}
    assert SiteFolder.open(site).prepared == Preparation("coronal", (-10, 200), True)
    shutil.rmtree(tmp_path / "out")
    assert SiteFolder.open(prepare(tmp_path / "source", "--size", 8)).prepared == Preparation(size=8)


@pytest.mark.parametrize(
    "entry",
    [{}, [], {"axis": "up", "window": None, "stretched": True}, {"axis": "", "window": [2, 1], "stretched": True}]
    + [{"axis": "", "window": value, "stretched": True} for value in (5, [1], ["a", "b"], [True, 2])]
    + [{"axis": "", "window": [0, value], "stretched": True} for value in (float("inf"), 10**400)]
    + [{"axis": "", "window": None, "stretched": True, "size": value} for value in (0, "64", True, SIDE + 1)],
)
def test_another_entry_is_a_problem_of_dataset_json(source, prepare, entry):
    site = prepare(source())
    metadata = json.loads((site / "dataset.json").read_text())
    (site / "dataset.json").write_text(json.dumps(metadata | {"prepared": entry}))
    (problem,) = check(site)
    assert problem.file == site / "dataset.json"
    assert "prepared is" in problem.what


def test_series_in_several_planes_and_incomplete_ones_are_said(feddp, tmp_path):
    """A sagittal series among axial ones leaves no plane to record; one without its third slice has no volume in mm."""
    for patient in ("anna", "bert", "cleo"):
        lying = {"lying": (0, 1, 0, 0, 0, -1), "step": (-3, 0, 0)} if patient == "bert" else {}
        images = series(tmp_path / "source/clinic/images" / patient, patient, **lying)
        contours(tmp_path / f"source/clinic/masks/{patient}.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])])
    (tmp_path / "source/clinic/images/cleo/2.dcm").unlink()
    (tmp_path / "source/clinic/images/DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    code, out, err = feddp("data", "prepare", "folder", "--source", tmp_path / "source", "--out", tmp_path / "out")
    assert code == 0, err
    assert "left out, as neither images nor masks: source/clinic/images/DICOMDIR" in out
    assert "its volumes lie in several planes (axial, sagittal)" in out
    assert "slices are missing, unevenly apart or sheared in 1 volume(s), cleo first" in out
    assert made(tmp_path / "out/clinic")["axis"] == ""
    assert {row["slice_mm"] for row in table(tmp_path / "out/clinic") if row["patient"] == "cleo"} == {""}


# -- volumes and series ------------------------------------------------------------------------------------------------

AFFINE = np.array([[0, 0, 3.0, -7], [-0.5, 0, 0, 11], [0, 0.8, 0, 5], [0, 0, 0, 1]])  # axes: back, head, right


def volumes(folder, count=3):
    """Of 8 x 10 x 5 voxels: voxel (i, j, k) has the value 100 i + 10 j + k."""
    i, j, k = np.mgrid[:8, :10, :5]
    for number in range(count):
        nifti(folder / f"clinic/images/v{number}.nii.gz", (100 * i + 10 * j + k).astype(np.int16), AFFINE)
        nifti(folder / f"clinic/masks/v{number}_seg.nii", ((i < 2) & (j > 6) & (k == 1)).astype(np.uint8), AFFINE)
    return folder


@pytest.mark.parametrize(
    ("axis", "shape", "mm", "apart"),
    [("axial", (8, 5), (0.5, 3.0), 0.8), ("coronal", (10, 5), (0.8, 3.0), 0.5), ("sagittal", (10, 8), (0.8, 0.5), 3.0)],
)
def test_a_volume_is_sliced_along_an_axis_of_the_patient_with_its_spacing(prepare, tmp_path, axis, shape, mm, apart):
    """The first voxel axis runs to the back (0.5 mm), the second to the head (0.8 mm), the third to the right (3 mm)."""
    site = prepare(volumes(tmp_path / "source"), "--axis", axis)
    assert check(site) == []
    rows = [row for row in table(site) if row["volume"] == "v1"]
    assert [int(row["slice"]) for row in rows] == list(range(len(rows)))
    assert {(float(r["row_mm"]), float(r["column_mm"]), float(r["slice_mm"])) for r in rows} == {(*mm, apart)}
    assert png(site, "v1_000").shape == shape
    opened = SiteFolder.open(site)
    assert {opened.case_of(row) for row in opened.rows} == {"v0", "v1", "v2"}


def test_an_axial_slice_has_the_patients_right_on_its_left_and_the_front_on_top(prepare, tmp_path):
    """Slice 9 (head) holds j = 9; its rows go from front to back, i = 0..7; its columns from right to left, k = 4..0.

    The mask is at i < 2, j > 6, k = 1: rows 0 and 1, column 3, slices 7 to 9.
    """
    site = prepare(volumes(tmp_path / "source"), "--window", "0,1000")
    grey = png(site, "v0_009").astype(float)
    i, k = np.mgrid[:8, :5]
    assert (grey == np.rint((100 * i + 90 + (4 - k)) / 1000 * 255)).all()
    found = [png(site, f"v0_{n:03d}", "masks") for n in range(10)]
    assert [int(mask.sum()) for mask in found] == [0] * 7 + [2] * 3
    assert np.argwhere(found[8]).tolist() == [[0, 3], [1, 3]]


def test_a_mask_elsewhere_in_the_patient_is_named(refused, tmp_path):
    folder = volumes(tmp_path / "source")
    moved = AFFINE.copy()
    moved[0, 3] += 4
    nifti(folder / "clinic/masks/v1_seg.nii", np.zeros((8, 10, 5), np.uint8), moved)
    assert "v1_seg.nii: is 4.0 mm away from its image" in refused(folder)


@pytest.mark.parametrize("kind", ["RTSTRUCT", "SEG"])
def test_a_dicom_series_with_masks_is_sorted_by_position_and_keeps_its_spacing(prepare, tmp_path, kind):
    """The structure of slice n is `square(n)`; as contours, half a pixel outside the centres of its outermost pixels."""
    folder = tmp_path / "source/clinic"
    for patient in ("anna", "bert", "cleo"):
        images = series(folder / "images" / patient, patient.upper())
        if kind == "SEG":
            segmentation(folder / f"masks/{patient}", images)
        else:
            polygons = []
            for number in range(4):
                rows, columns = square(number)
                low, high = (rows.start - 0.5, rows.stop - 0.5), (columns.start - 0.5, columns.stop - 0.5)
                polygons.append((number, [(low[0], high[0]), (low[0], high[1]), (low[1], high[1]), (low[1], high[0])]))
            contours(folder / f"masks/{patient}.dcm", images, polygons)
    site = prepare(tmp_path / "source", "--window", "0,200")
    assert check(site) == []
    rows = [row for row in table(site) if row["patient"] == "ANNA"]
    assert [row["image"] for row in rows] == [f"anna_{n:03d}" for n in range(4)]
    assert {(float(r["row_mm"]), float(r["column_mm"]), float(r["slice_mm"])) for r in rows} == {(*SPACING, APART)}
    for number in range(4):
        wanted = np.zeros(SHAPE, np.uint8)
        wanted[square(number)] = 1
        assert (png(site, f"anna_{number:03d}", "masks") == wanted).all()
        # 2 HU per slice; the noise of some pixel is 0
        assert abs(png(site, f"anna_{number:03d}")[-1].min() - 2 * number * 255 / 200) <= 0.5


def segmentation(folder, images):
    from highdicom.seg import Segmentation, SegmentDescription
    from pydicom.sr.codedict import codes
    from pydicom.uid import generate_uid

    pixels = np.zeros((4, *SHAPE, 2), np.uint8)
    for number in range(4):
        pixels[(number, *square(number), 1)] = 1
    described = [
        SegmentDescription(n, label, codes.SCT.Tissue, codes.SCT.Tissue, "MANUAL")
        for n, label in ((1, "something else"), (2, "LESION"))
    ]
    made = Segmentation(images, pixels, "BINARY", described, generate_uid(), 9, generate_uid(), 1, "m", "m", "1", "1")
    folder.mkdir(parents=True)
    made.save_as(folder / "1.2.3")  # without an ending


def test_a_structure_of_another_name_is_named(refused, tmp_path):
    images = series(tmp_path / "source/clinic/images/anna")
    contours(tmp_path / "source/clinic/masks/anna.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])], name="bladder")
    assert "has no structure of the classes; it has: bladder" in refused(tmp_path / "source", "--classes", "a,b")


# -- what is wrong -----------------------------------------------------------------------------------------------------


def rewritten(part, name, change):
    def spoil(folder):
        file = folder / "clinic" / part / name
        file.write_bytes(change(file.read_bytes()))

    return spoil


PICTURES = {
    "zero bytes": (
        rewritten("images", "p2.png", lambda c: b""),
        "p2.png: is not a readable image (its content is not PNG or JPEG or TIFF or BMP). Save or copy it again, or leave",
    ),
    "half a mask": (rewritten("masks", "p2.png", lambda c: c[: len(c) // 2]), "p2.png: is not a readable image"),
    "absurd dimensions": (
        rewritten("images", "p0.png", lambda c: c[:16] + (60000).to_bytes(4, "big") * 2 + c[24:]),
        "p0.png",
    ),
    "no mask": (lambda f: (f / "clinic/masks/p4.png").unlink(), "1 image(s) have no mask, source/clinic/images/p4.png first"),
    "another size": (
        lambda f: Image.fromarray(BOX[1:]).save(f / "clinic/masks/p1.png"),
        "p1.png: has 10 x 11 pixels, but its image 10 x 12",
    ),
    "one of them in colour": (
        lambda f: Image.new("RGB", (10, 12)).save(f / "clinic/images/p3.png"),
        "has 3 channel(s), but the site's first image 1. Convert all of them with --channels",
    ),
    "16 bits in colour": (
        lambda f: deep_png(f / "clinic/images/p3.png", np.full((12, 10, 3), 256, np.uint16)),
        "p3.png: has 16 bits in colour or with transparency. Save it with 8 bits, or as a 16-bit TIFF",
    ),
    "16 bits with transparency": (
        lambda f: deep_png(f / "clinic/images/p3.png", np.full((12, 10, 2), 256, np.uint16)),
        "p3.png: has 16 bits in colour or with transparency",
    ),
    "signed values with white as 0": (
        lambda f: (
            tifffile.imwrite(f / "clinic/masks/p3.tif", BOX.astype("i2"), photometric="miniswhite")
            or (f / "clinic/masks/p3.png").unlink()
        ),
        "p3.tif: has values of int16 with white as 0. Save it with black as 0",
    ),
    "a patient's folder that is a link": (
        lambda f: (f / "clinic/images/anna").symlink_to(f / "clinic/masks"),
        "source/clinic/images/anna: is a link to a folder or to nothing, which is not read. Put a readable copy there",
    ),
    "a site's folder that is a link": (
        lambda f: (f / "south").symlink_to(f / "clinic"),
        "source/south: is a link to a folder",
    ),
    "labels without classes": (
        lambda f: Image.fromarray(BOX * 3).save(f / "clinic/masks/p3.png"),
        "p3.png: has the value(s) 3. Where all above 0 is foreground, give --threshold 0",
    ),
    "a name that FLARE refuses": (
        lambda f: (f / "clinic").rename(f / "Zürich"),
        "'Zürich' is no name of a site",
    ),
    "two of one name": (lambda f: Image.fromarray(BOX).save(f / "clinic/images/P1.bmp"), "would both be"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_wrong_with_pictures_is_one_line(source, refused, name):
    spoil, message = PICTURES[name]
    folder = source()
    spoil(folder)
    assert message in refused(folder)


def wrong_header(content):
    """Says 30000 x 30000 x 30 voxels."""
    changed = bytearray(content)
    changed[40:48] = np.array([3, 30000, 30000, 30], "<i2").tobytes()
    return bytes(changed)


@pytest.mark.parametrize(
    "change",
    [lambda c: b"", lambda c: c[:300], lambda c: c[:-20], wrong_header],
    ids=["no byte", "half a header", "an end cut off", "a wrong header"],
)
def test_what_is_wrong_with_a_volume_is_one_line(refused, tmp_path, change):
    folder = volumes(tmp_path / "source")
    rewritten("masks", "v1_seg.nii", change)(folder)
    assert "v1_seg.nii" in refused(folder)


@pytest.mark.parametrize(
    "change",
    [lambda c: b"", lambda c: c[:100], lambda c: c[:400], lambda c: c[:-100]],
    ids=["zero bytes", "no preamble", "half a header", "half its pixels"],
)
def test_what_is_wrong_with_a_series_is_one_line(refused, tmp_path, change):
    images = series(tmp_path / "source/clinic/images/anna")
    contours(tmp_path / "source/clinic/masks/anna.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])])
    rewritten("images", "anna/2.dcm", change)(tmp_path / "source")
    assert "2.dcm" in refused(tmp_path / "source")


def test_a_slice_twice_and_a_localizer_are_named(refused, tmp_path):
    folder = tmp_path / "source/clinic/images/anna"
    images = series(folder)
    contours(tmp_path / "source/clinic/masks/anna.dcm", images, [(0, [(1, 1), (1, 5), (5, 5)])])
    images[1].PixelData = images[0].PixelData
    images[1].save_as(folder / "again.dcm", enforce_file_format=True)
    assert "lies at the place of another slice" in refused(tmp_path / "source")
    images[1].ImageOrientationPatient = [1, 0, 0, 0, 0, -1]
    images[1].save_as(folder / "again.dcm", enforce_file_format=True)
    assert "lies in another plane than" in refused(tmp_path / "source")


# a plan refuses them, so no run could use the folder
NO_CLASSES = ("Läsion", "x|y", "$HOME", "{core}", "x" * 65)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--classes", "a,a"), "--classes a,a: give 1 to 255 different names"),
        *((("--classes", f"lesion,{name}"), f"{name}: give 1 to 255 different names") for name in NO_CLASSES),
        (("--axis", "oblique"), "--axis oblique: use axial or coronal or sagittal"),
        (("--channels", "2"), "--channels 2: use 1 or 3"),
        (("--window", "3,1"), "--window 3,1: give the values"),
        (("--spacing", "0"), "--spacing 0: give the millimetres"),
        (("--colour", "x=1,2,3"), "the classes are lesion"),
        (("--classes", "a,b", "--colour", "a=1,2,3"), "give the colours of all classes"),
        (("--labels", "other"), "--labels other: use nested or exclusive"),
    ],
)
def test_options_that_make_no_sense_are_one_line(source, refused, options, message):
    assert message in refused(source(), *options)


def test_options_of_folder_are_not_for_public_sets(feddp, tmp_path):
    code, _, err = feddp("data", "prepare", "lgg", "--source", tmp_path, "--out", tmp_path / "o", "--axis", "axial")
    assert code == 2
    assert "--axis: only for feddp data prepare folder" in err


def test_a_source_of_another_layout_is_named(source, refused, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.png").touch()
    assert "has no folder images with files. Make the folders SOURCE/SITE/images and" in refused(tmp_path / "other")
    source(site="clinic")
    assert "at different levels" in refused(source(site="deeper/south"))


@pytest.mark.parametrize("below", ["", "scans"])
def test_one_site_or_a_zip_with_or_without_the_folder_above(source, prepare, tmp_path, below):
    """One site alone is called as the source; in a zip, the site's folder is the source's or lies in it."""
    folder = source(site="scans")
    shutil.make_archive(str(tmp_path / "packed"), "zip", folder if below else folder / "scans")
    site = prepare(tmp_path / "packed.zip", site=below or "packed")
    assert check(site) == []
    assert len(table(site)) == len(NAMES)


def test_nibabel_reads_the_same_affine_that_was_written(tmp_path):
    """The tests' own volumes: as they are meant."""
    volumes(tmp_path)
    assert nibabel.aff2axcodes(nibabel.load(tmp_path / "clinic/images/v0.nii.gz").affine) == ("P", "S", "R")
    with pytest.raises(InputError):
        SiteFolder.open(tmp_path)
