"""Public data sets: the real LGG subset, and small trees in the other sets' published layouts."""

import csv
import io
import json
import os
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from feddp.cli.data import app
from feddp.data.check import check
from feddp.data.folder import SiteFolder, find_sites
from feddp.data.prepare import PREPARE, endopolyp, fundus
from feddp.data.prepare.fundus import crop
from feddp.data.prepare.source import resize
from feddp.data.prepare.split import Published, hold_out, split_patients, split_site
from feddp.errors import FedDPError
from support import ROOT

LGG = ROOT.parent / "shared" / "data" / "lgg-mri-segmentation.zip"
# where the data cannot be had the tests say so; on CI they must be there
needs_lgg = pytest.mark.skipif(not LGG.exists() and "CI" not in os.environ, reason=f"{LGG} is not here")


def save(file, pixels):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, **({"quality": 95} if file.suffix == ".jpg" else {}))


def picture(number, height=24, width=32):
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def pixels(folder, stem):
    return np.asarray(Image.open(folder.image_path(stem))), np.asarray(Image.open(folder.mask_path(stem)))


# -- splitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patients", "expected"),
    [
        (3, (1, 1, 1)),
        (4, (2, 1, 1)),
        (10, (6, 2, 2)),
        (16, (10, 3, 3)),
        (45, (27, 9, 9)),
        (1, (1, 0, 0)),
        (2, (1, 0, 1)),
    ],
)
def test_patients_are_split_60_20_20(patients, expected):
    """round(n / 5) each to val and test, at least one of three: 16 -> round(3.2) = 3, 45 -> 9."""
    count = Counter(split_patients([f"p{n}" for n in range(patients)], 0).values())
    assert (count["train"], count["val"], count["test"]) == expected


def test_the_split_follows_from_patients_and_seed_alone():
    patients = [f"p{n}" for n in range(20)]
    assert split_patients(patients, 3) == split_patients(patients[::-1] * 2, 3)
    assert split_patients(patients, 3) != split_patients(patients, 4)
    assert Counter(hold_out(patients, 0).values()) == {"train": 16, "val": 4}


@pytest.mark.parametrize(
    ("splitting", "patients", "expected"),
    [
        ("60/20/20", 16, (10, 3, 3)),
        ("1:1", 6, (3, 0, 3)),
        ("1:1", 9, (5, 0, 4)),
        ("1:1", 2, (1, 0, 1)),
        ("70/10/20", 34, (24, 3, 7)),
        ("70/10/20", 3, (1, 1, 1)),
        ("64/16/20", 25, (16, 4, 5)),
        ("64/16/20", 45, (29, 7, 9)),
    ],
)
def test_patients_are_split_as_in_the_papers(splitting, patients, expected):
    """Shares of val and test, rounded, at least one; the rest trains. 34 patients: 3.4 -> 3, 6.8 -> 7. 45: 7.2 -> 7, 9.

    Half of 9 is 4.5, which rounds to the even 4. 64/16/20 is 20 % of all and then 80/20: 25 -> 5, and 20 -> 16 and 4.
    Every patient has three images, which does not count.
    """
    names = [f"p{n}" for n in range(patients)]
    found = split_site("A", names * 3, 0, splitting)
    assert found.keys() == set(names)
    count = Counter(found.values())
    assert (count["train"], count["val"], count["test"]) == expected
    if patients > 5:
        assert split_site("A", names, 1, splitting) != found


@pytest.mark.parametrize("seed", [0, 5])
def test_without_a_word_the_split_is_that_of_the_seed(seed):
    """Of 10 shuffled patients, the first fifth validates, the second tests; the order is numpy's for this seed."""
    names = [f"p{n}" for n in range(10)]
    order = [names[i] for i in np.random.default_rng(seed).permutation(10)]
    expected = {name: "val" if i < 2 else "test" if i < 4 else "train" for i, name in enumerate(order)}
    assert split_site("A", names, seed, None) == split_site("A", names, seed, "60/20/20") == expected


@pytest.mark.parametrize(
    ("site", "training", "images"),
    [
        *(("Kvasir", 900, 1000), ("ColonDB", 328, 380), ("ETIS", 170, 196), ("ClinicDB", 550, 612)),
        *(("DrishtiGS", 50, 101), ("RIMONEr3", 99, 159), ("REFUGEtrain", 320, 400), ("REFUGEval", 320, 400)),
    ],
)
def test_the_published_numbers_of_training_images(site, training, images):
    """(Wang et al., TMI 2024): EndoPolyp {900, 328, 170, 550}, RIF {50, 99, 320, 320}; there are no validation images."""
    numbers = (endopolyp.NUMBERS | fundus.NUMBERS)[site]
    names = [str(n) for n in range(images)]
    found = split_site(site, names, 0, "published", numbers)
    assert Counter(found.values()) == {"train": training, "test": images - training}
    assert split_site(site, names, 1, "published", numbers) != found
    with pytest.raises(FedDPError, match=f"{site} has {images - 1} images, but --split published divides {images}. Give"):
        split_site(site, names[1:], 0, "published", numbers)


def test_published_numbers_are_of_images_and_patients_stay_whole():
    """Patients of 3, 5, 4 and 2 images. 9 of 14 are b and c (5 + 4), or a, c and d (3 + 4 + 2), nothing else.

    13 would leave a single image for testing, which no patient has.
    """
    images = [name for name, count in {"a": 3, "b": 5, "c": 4, "d": 2}.items() for _ in range(count)]
    found = [split_site("A", images, seed, "published", Published(9, 14)) for seed in range(20)]
    chosen = {frozenset(patient for patient, word in split.items() if word == "train") for split in found}
    assert chosen == {frozenset("bc"), frozenset("acd")}
    assert all(split.keys() == set("abcd") and set(split.values()) == {"train", "test"} for split in found)
    with pytest.raises(FedDPError, match="A: no set of whole patients has the published 13 training images. Use"):
        split_site("A", images, 0, "published", Published(13, 14))


@pytest.mark.parametrize(
    ("splitting", "why"),
    [
        ("70/10/20", "CS has 2 patients, too few for --split 70/10/20. Use the whole data set, or leave --split out"),
        ("published", "CS: no numbers of training images are published for this data set. Use --split 60/20/20, 1:1"),
        ("80/20", "--split 80/20: not a known split. Use one of 60/20/20, 1:1, 70/10/20, 64/16/20, published, or leave it out"),
    ],
)
def test_a_split_that_a_set_cannot_have_is_refused_before_a_file_is_written(tmp_path, splitting, why):
    with pytest.raises(FedDPError) as refused:
        PREPARE["lgg"](lgg_tree(tmp_path / "in", patients=2), tmp_path / "out", None, 0, splitting)
    assert why in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_resized_mask_invents_no_class():
    """Background beside cup, 5 and 3 columns: any averaging on the way to 4 columns would make a disc between them."""
    mask = np.repeat([0, 2], [5, 3])[None].repeat(8, axis=0).astype(np.uint8)
    assert set(np.unique(resize(picture(0, 8, 8), mask, 4, "x")[1])) == {0, 2}


# -- LGG, the real files ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lgg(tmp_path_factory):
    out = tmp_path_factory.mktemp("lgg") / "out"
    PREPARE["lgg"](LGG, out, 32, 0)
    return out


@needs_lgg
def test_lgg_has_its_hospitals_patients_and_slices(lgg):
    """Patients 16, 45, 14, 34 are the source's README; slices are counted here from the zip's own list of masks."""
    assert check(lgg) == []
    names = [Path(name).name for name in zipfile.ZipFile(LGG).namelist() if name.endswith("_mask.tif")]
    slices = Counter(name.split("_")[1] for name in names)
    folders = {path.name: SiteFolder.open(path) for path in find_sites(lgg)}
    assert {site: len(f.rows) for site, f in folders.items()} == slices
    assert sum(slices.values()) == 363
    patients = {site: {row.patient for row in f.rows} for site, f in folders.items()}
    assert {site: len(found) for site, found in patients.items()} == {"CS": 16, "DU": 45, "FG": 14, "HT": 34}
    for folder in folders.values():
        assert all(row.image.startswith(f"{row.patient}_") for row in folder.rows)
        in_split = [{row.patient for row in folder.rows_of(split)} for split in ("train", "val", "test")]
        assert all(in_split)
        assert sum(map(len, in_split)) == len(set.union(*in_split))  # no patient in two


@needs_lgg
def test_lgg_masks_are_binary_and_some_are_empty(lgg):
    masks = [np.asarray(Image.open(file)) for file in lgg.glob("*/masks/*.png")]
    assert {mask.shape for mask in masks} == {(32, 32)}
    assert set(np.unique(masks)) == {0, 1}
    empty = sum(not mask.any() for mask in masks)
    assert 0 < empty < len(masks) / 3


@needs_lgg
@pytest.mark.parametrize("size", [None, 256])
def test_lgg_pixels_at_native_size_are_the_tiffs(tmp_path, size):
    """One patient a hospital, of which three slices are read straight from their TIFFs."""
    source, known = tmp_path / "kaggle_3m", {}
    with zipfile.ZipFile(LGG) as archive:
        for site in ("CS", "DU", "FG", "HT"):
            patient = min(n.split("/")[2] for n in archive.namelist() if f"/TCGA_{site}_" in n)
            for name in (n for n in archive.namelist() if f"/{patient}/" in n):
                file = source / Path(*Path(name).parts[2:])
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.read(name))
                known[file.stem] = (site, np.asarray(Image.open(io.BytesIO(archive.read(name)))))
    PREPARE["lgg"](source, tmp_path / "out", size, 0)
    checked = 0
    for stem in [stem for stem in known if not stem.endswith("_mask")]:
        site, image = known[stem]
        written, mask = pixels(SiteFolder.open(tmp_path / "out" / site), stem)
        assert np.array_equal(written, image)
        assert np.array_equal(mask * 255, known[f"{stem}_mask"][1])
        checked += bool(mask.any())
    assert checked >= 4


def lgg_tree(root, sites=("CS", "DU", "FG", "HT"), patients=3):
    for number, (site, patient) in enumerate((s, p) for s in sites for p in range(patients)):
        stem = f"TCGA_{site}_{patient:04d}_19990101"
        save(root / "x/kaggle_3m" / stem / f"{stem}_1.tif", picture(number, 8, 8))
        save(root / "x/kaggle_3m" / stem / f"{stem}_1_mask.tif", np.eye(8) * 255)
    return root


def test_lgg_leaves_out_other_hospitals_and_says_so(tmp_path):
    notes = PREPARE["lgg"](lgg_tree(tmp_path / "in", ("CS", "DU", "EZ", "FG", "HT")), tmp_path / "out", None, 0)
    assert notes == ["Left out, of other sites: EZ (3 images)"]
    assert [site.name for site in find_sites(tmp_path / "out")] == ["CS", "DU", "FG", "HT"]
    assert all(SiteFolder.open(site).volumes for site in find_sites(tmp_path / "out"))


def test_lgg_names_all_that_is_missing_at_once(tmp_path):
    with pytest.raises(FedDPError, match=r"kaggle_3m/TCGA_FG_\*; kaggle_3m/TCGA_HT_\*"):
        PREPARE["lgg"](lgg_tree(tmp_path / "in", ("CS", "DU")), tmp_path / "out", None, 0)
    tree = lgg_tree(tmp_path / "whole")
    next(tree.rglob("TCGA_DU_0001*_mask.tif")).unlink()
    with pytest.raises(FedDPError, match="TCGA_DU_0001_19990101_1_mask.tif missing"):
        PREPARE["lgg"](tree, tmp_path / "out", None, 0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_lgg_as_it_is_downloaded_holds_its_tree_twice(tmp_path, packed):
    """kaggle_3m/ and lgg-mri-segmentation/kaggle_3m/: copies are one, in a zip and unpacked; of other sites, too."""
    once = lgg_tree(tmp_path / "once", ("CS", "DU", "EZ", "FG", "HT"))
    twice = tmp_path / "twice"
    for below in ("", "lgg-mri-segmentation"):
        shutil.copytree(once / "x", twice / below, dirs_exist_ok=True)
    if packed:
        twice = Path(shutil.make_archive(str(twice), "zip", twice))
    notes = [PREPARE["lgg"](tree, tmp_path / out, None, 0) for tree, out in ((once, "a"), (twice, "b"))]
    assert notes == [["Left out, of other sites: EZ (3 images)"]] * 2
    written = [{p.relative_to(root): p.read_bytes() for p in root.rglob("*.*")} for root in (tmp_path / "a", tmp_path / "b")]
    assert written[0] == written[1]


@pytest.mark.parametrize("end", [".tif", "_mask.tif"])
def test_lgg_twice_with_other_pixels_is_named_before_a_site_is_written(tmp_path, end):
    tree = lgg_tree(lgg_tree(tmp_path / "in") / "again").parent
    file = f"kaggle_3m/TCGA_CS_0000_19990101/TCGA_CS_0000_19990101_1{end}"
    save(tree / "x" / file, np.zeros((8, 8)))
    with pytest.raises(FedDPError, match=f"{tree} has both in/again/x/{file} and in/x/{file}, and they differ. Keep one."):
        PREPARE["lgg"](tree, tmp_path / "out", None, 0)
    assert not (tmp_path / "out").exists()


# -- EndoPolyp -------------------------------------------------------------------------------------------------------

POLYPS = {
    "Kvasir": ("Kvasir-SEG/images/{}.jpg", "Kvasir-SEG/masks/{}.jpg"),
    "ClinicDB": ("CVC-ClinicDB/Original/{}.tif", "CVC-ClinicDB/Ground Truth/{}.tif"),
    "ColonDB": ("CVC-ColonDB/images/{}.png", "CVC-ColonDB/masks/{}.png"),
    "ETIS": ("ETIS-LaribPolypDB/images/{}.png", "ETIS-LaribPolypDB/masks/{}.png"),
    "PolypGenC1": (
        "PolypGen2021_MultiCenterData_v3/data_C1/images_C1/{}.jpg",
        "PolypGen2021_MultiCenterData_v3/data_C1/masks_C1/{}_mask.jpg",
    ),
}
BOX = np.zeros((24, 32))
BOX[8:16, 8:24] = 255


def polyp_tree(root, count=5):
    """Five images a set, of stems 1 to 5 in every set, as the public sets' numbering overlaps too."""
    for site, (image, mask) in enumerate(POLYPS.values()):
        for number in range(1, count + 1):
            save(root / image.format(number), picture(100 * site + number))
            save(root / mask.format(number), BOX)
    return root


def test_polyps_of_each_set_become_the_site_of_that_name(tmp_path):
    """PNG and TIFF keep their bits, so ColonDB and ETIS must equal their own pictures, 200 + n and 300 + n."""
    (note,) = PREPARE["endopolyp"](polyp_tree(tmp_path / "in"), tmp_path / "out", None, 0)
    unseen = tmp_path / "out-unseen"
    assert note.endswith(str(unseen / "PolypGenC1"))
    assert [path.name for path in find_sites(tmp_path / "out")] == ["ClinicDB", "ColonDB", "ETIS", "Kvasir"]
    assert [path.name for path in find_sites(unseen)] == ["PolypGenC1"]
    assert check(tmp_path / "out") == check(unseen) == []
    for site, first in (("ClinicDB", 100), ("ColonDB", 200), ("ETIS", 300)):
        folder = SiteFolder.open(tmp_path / "out" / site)
        for number in range(1, 6):
            image, mask = pixels(folder, str(number))
            assert np.array_equal(image, picture(first + number))
            assert np.array_equal(mask, BOX / 255)
    assert {row.split for row in SiteFolder.open(unseen / "PolypGenC1").rows} == {"test"}


def test_grey_jpeg_masks_are_cut_at_127(tmp_path):
    """A JPEG mask with one 200 and one 90 grey flat, 8x8 blocks each, so flat they survive JPEG within a grey level."""
    tree = polyp_tree(tmp_path / "in")
    grey = np.zeros((24, 32))
    grey[:8, :8], grey[8:16, 8:16] = 200, 90
    save(tree / "Kvasir-SEG/masks/3.jpg", grey)
    PREPARE["endopolyp"](tree, tmp_path / "out", None, 0)
    assert np.array_equal(pixels(SiteFolder.open(tmp_path / "out/Kvasir"), "3")[1], grey == 200)


def test_etis_is_never_taken_from_colondb(tmp_path):
    tree = polyp_tree(tmp_path / "in")
    shutil.rmtree(tree / "ETIS-LaribPolypDB")
    with pytest.raises(FedDPError, match="sets missing: ETIS .ETIS-LaribPolypDB/images"):
        PREPARE["endopolyp"](tree, tmp_path / "out", None, 0)
    shutil.copytree(tree / "CVC-ColonDB", tree / "ETIS-LaribPolypDB")
    with pytest.raises(FedDPError, match=r"CVC-ColonDB/images/1.png \(ColonDB\) and .*ETIS.* are the same image"):
        PREPARE["endopolyp"](tree, tmp_path / "out", None, 0)
    assert not (tmp_path / "out").exists()


def test_two_sites_that_share_a_single_image_are_refused(tmp_path):
    tree = polyp_tree(tmp_path / "in")
    shutil.copy(tree / "Kvasir-SEG/images/4.jpg", tree / "PolypGen2021_MultiCenterData_v3/data_C1/images_C1/2.jpg")
    with pytest.raises(FedDPError, match=r"Kvasir-SEG/images/4.jpg .*C1/2.jpg .*same image"):
        PREPARE["endopolyp"](tree, tmp_path / "out", None, 0)


def test_etis_in_its_first_release_is_read(tmp_path):
    tree = polyp_tree(tmp_path / "in")
    shutil.rmtree(tree / "ETIS-LaribPolypDB")
    for number in range(1, 6):
        save(tree / f"ETIS-LaribPolypDB/ETIS-LaribPolypDB/{number}.tif", picture(number + 900))
        save(tree / f"ETIS-LaribPolypDB/Ground Truth/p{number}.tif", BOX)
    PREPARE["endopolyp"](tree, tmp_path / "out", None, 0)
    assert np.array_equal(pixels(SiteFolder.open(tmp_path / "out/ETIS"), "5")[0], picture(905))


def with_sequences(tree):
    """`tree` with ClinicDB's table: frames 1 to 30 in ten sequences of three."""
    with (tree / "CVC-ClinicDB/metadata.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["frame_id", "sequence_id", "png_image_path"])
        table.writerows([n, (n - 1) // 3, f"PNG/Original/{n}.png"] for n in range(1, 31))
    return tree


def test_clinicdb_sequences_stay_together_where_published(tmp_path):
    """30 frames of 10 sequences of three: patients are the sequences, so 6, 2 and 2 sequences, 18, 6 and 6 frames."""
    tree = with_sequences(polyp_tree(tmp_path / "in", 30))
    PREPARE["endopolyp"](tree, tmp_path / "out", 16, 0)
    clinic = SiteFolder.open(tmp_path / "out/ClinicDB")
    assert {row.image: row.patient for row in clinic.rows}["3"] == "ClinicDB-sequence-0"
    assert [len(clinic.rows_of(split)) for split in ("train", "val", "test")] == [18, 6, 6]
    assert not clinic.volumes  # a video's frames are no slices
    said = {s: json.loads((tmp_path / "out" / s / "dataset.json").read_text())["patients"] for s in ("ClinicDB", "ETIS")}
    assert said == {"ClinicDB": "video sequences of metadata.csv", "ETIS": "unknown: image level"}
    assert pixels(clinic, "1")[0].shape == (16, 16, 3)


def test_polyps_are_split_in_halves_and_the_unseen_site_is_not(tmp_path):
    """30 frames in 10 sequences of three at ClinicDB: 5 sequences, 15 frames, each; elsewhere 15 of 30 images."""
    tree = with_sequences(polyp_tree(tmp_path / "in", 30))
    PREPARE["endopolyp"](tree, tmp_path / "out", 16, 0, "1:1")
    for folder in map(SiteFolder.open, find_sites(tmp_path / "out")):
        assert [len(folder.rows_of(split)) for split in ("train", "val", "test")] == [15, 0, 15]
        assert json.loads((folder.path / "dataset.json").read_text())["split"] == "1:1"
    assert len(SiteFolder.open(tmp_path / "out-unseen/PolypGenC1").rows_of("test")) == 30


def test_colondb_and_etis_test_on_the_images_that_the_released_code_lists():
    """jcwang123/PFL-Seg-Trans, prepare_polyp: range(221, 273) and range(171, 197). The others are as many as the paper trains
    on: 380 - 328 = 52 images test, the last 272; 196 - 170 = 26, the last 196."""
    ends = {site: (tested[0], tested[-1], len(tested)) for site, tested in endopolyp.TESTED.items()}
    assert ends == {"ColonDB": (221, 272, 52), "ETIS": (171, 196, 26)}


def test_published_polyps_are_numbers_of_images_and_at_two_sites_the_images_themselves(tmp_path, monkeypatch):
    """Five images a set here. ColonDB tests on 2 and 3, ETIS on 5, whatever the seed; 4 of Kvasir's and 2 of ClinicDB's train,
    others with another seed. The unseen site tests on all."""
    tree = polyp_tree(tmp_path / "in")
    with pytest.raises(FedDPError, match="Kvasir has 5 images, but --split published divides 1000"):
        PREPARE["endopolyp"](tree, tmp_path / "out", 16, 0, "published")
    training = {"Kvasir": 4, "ColonDB": 3, "ETIS": 4, "ClinicDB": 2}
    monkeypatch.setattr(endopolyp, "NUMBERS", {site: Published(number, 5) for site, number in training.items()})
    monkeypatch.setattr(endopolyp, "TESTED", {"ColonDB": range(2, 4), "ETIS": range(5, 6)})
    chosen = {"Kvasir": set(), "ClinicDB": set()}
    for seed in range(3):
        out = tmp_path / str(seed) / "out"
        PREPARE["endopolyp"](tree, out, 16, seed, "published")
        found = {folder.site: folder for folder in map(SiteFolder.open, find_sites(out))}
        assert {site: len(folder.rows_of("train")) for site, folder in found.items()} == training
        tested = {site: frozenset(row.image for row in folder.rows_of("test")) for site, folder in found.items()}
        assert (tested["ColonDB"], tested["ETIS"]) == ({"2", "3"}, {"5"})
        assert {site: len(images) for site, images in tested.items()} == {s: 5 - n for s, n in training.items()}
        for site, several in chosen.items():
            several.add(tested[site])
        unseen = SiteFolder.open(tmp_path / str(seed) / "out-unseen/PolypGenC1")
        assert len(unseen.rows_of("test")) == 5
        said = [json.loads((folder.path / "dataset.json").read_text()).get("split") for folder in (*found.values(), unseen)]
        assert said == ["published"] * 4 + [None]
    assert all(len(several) > 1 for several in chosen.values())


@pytest.mark.parametrize("name", ["05", "6", "a"])
def test_a_published_split_by_number_needs_the_numbers(tmp_path, monkeypatch, name):
    tree = polyp_tree(tmp_path / "in")
    for folder in ("images", "masks"):
        (tree / f"ETIS-LaribPolypDB/{folder}/5.png").rename(tree / f"ETIS-LaribPolypDB/{folder}/{name}.png")
    monkeypatch.setattr(endopolyp, "NUMBERS", dict.fromkeys(endopolyp.NUMBERS, Published(4, 5)))
    monkeypatch.setattr(endopolyp, "TESTED", {"ETIS": range(5, 6)})
    said = f"ETIS: .*/images/{name}.png is none of 1 to 5, .* Name the files as published, or use --split 60/20/20"
    with pytest.raises(FedDPError, match=said):
        PREPARE["endopolyp"](tree, tmp_path / "out", 16, 0, "published")
    assert not (tmp_path / "out").exists()
    PREPARE["endopolyp"](tree, tmp_path / "out", 16, 0, "1:1")


def test_all_missing_sets_are_named_at_once(tmp_path):
    tree = polyp_tree(tmp_path / "in")
    for gone in ("Kvasir-SEG/masks", "CVC-ColonDB", "PolypGen2021_MultiCenterData_v3"):
        shutil.rmtree(tree / gone)
    with pytest.raises(FedDPError) as error:
        PREPARE["endopolyp"](tree, tmp_path / "out", None, 0)
    for named in ("Kvasir-SEG/masks", "CVC-ColonDB/images", "data_C1/images_C1"):
        assert named in str(error.value)
    assert "ETIS" not in str(error.value)


def test_a_polyp_without_mask_or_of_another_size_is_refused(tmp_path):
    tree = polyp_tree(tmp_path / "in")
    save(tree / "CVC-ColonDB/masks/2.png", BOX[:-1])
    with pytest.raises(FedDPError, match="CVC-ColonDB/images/2.png: image .* differ in size"):
        PREPARE["endopolyp"](tree, tmp_path / "out", 16, 0)
    assert not (tmp_path / "out/ColonDB").exists()
    (tree / "CVC-ColonDB/masks/2.png").unlink()
    with pytest.raises(FedDPError, match="1 image.* no mask, .*CVC-ColonDB/images/2.png"):
        PREPARE["endopolyp"](tree, tmp_path / "other", 16, 0)


# -- fundus ----------------------------------------------------------------------------------------------------------


def rings(height=40, width=48, disc=20, cup=8, centre=(20, 24)):
    """0 outside, 1 in a disc `disc` pixels high, 2 in a cup: squares, so that every edge is known."""
    mask = np.zeros((height, width), np.uint8)
    for side, value in ((disc, 1), (cup, 2)):
        mask[centre[0] - side // 2 : centre[0] + side // 2, centre[1] - side // 2 : centre[1] + side // 2] = value
    return mask


def fundus_tree(root):
    mask = rings()
    for part, truth, numbers in (("Training", "GT", range(10)), ("Test", "Test_GT", range(10, 16))):
        base = root / "Drishti-GS1_files" / part
        for n in numbers:
            save(base / f"Images/d_{n}.png", picture(n, 40, 48))
            # Two of four raters are 128 of 255, one is 64: the half counts, the quarter does not.
            save(base / truth / f"d_{n}/SoftMap/d_{n}_ODsegSoftmap.png", np.where(mask >= 1, 128, 64))
            save(base / truth / f"d_{n}/SoftMap/d_{n}_cupsegSoftmap.png", np.where(mask >= 2, 255, 0))
    for part, letter in (("Healthy", "N"), ("Glaucoma and suspects", "G")):
        for n in range(3):
            stem = f"{letter}-{n}-L"
            pair = np.concatenate([np.full((40, 48, 3), 50), np.full((40, 48, 3), 200)], axis=1)
            save(root / f"RIM-ONE r3/{part}/Stereo Images/{stem}.jpg", pair)
            for name, value in (("Disc", 1), ("Cup", 2)):
                save(root / f"RIM-ONE r3/{part}/Average_masks/{stem}-{name}-Avg.png", (mask >= value) * 255)
    grey = np.array([255, 128, 0], np.uint8)[mask]
    for part, letter in (("Glaucoma", "g"), ("Non-Glaucoma", "n")):
        for n in range(3):
            save(root / f"Training400/{part}/{letter}{n}.jpg", picture(n, 40, 48))
            save(root / f"Annotation-Training400/Disc_Cup_Masks/{part}/{letter}{n}.bmp", grey)
    for n in range(5):
        save(root / f"REFUGE-Validation400/V{n}.jpg", picture(n, 40, 48))
        save(root / f"REFUGE-Validation400-GT/Disc_Cup_Masks/V{n}.bmp", grey)
    return root


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    root = tmp_path_factory.mktemp("fundus")
    PREPARE["fundus"](fundus_tree(root / "in"), root / "out", None, 0)
    return root / "out"


def test_fundus_masks_are_disc_and_cup_at_every_site(eyes):
    """40 x 48 is cropped to 40 x 40 round column 24, so columns 4 to 43: the middle of the crop is the disc's."""
    assert check(eyes) == []
    expected = rings()[:, 4:44]
    count = {}
    for folder in map(SiteFolder.open, find_sites(eyes)):
        assert (folder.classes, folder.labels) == (("disc", "cup"), "nested")
        count[folder.site] = len(folder.rows)
        for row in folder.rows:
            assert np.array_equal(pixels(folder, row.image)[1], expected)
    assert count == {"DrishtiGS": 16, "RIMONEr3": 6, "REFUGEtrain": 6, "REFUGEval": 5}


def test_drishtis_published_test_images_are_its_test_split(eyes):
    """10 published training images: a fifth, 2, to val."""
    folder = SiteFolder.open(eyes / "DrishtiGS")
    assert {row.image for row in folder.rows_of("test")} == {f"d_{n}" for n in range(10, 16)}
    assert [len(folder.rows_of(split)) for split in ("train", "val")] == [8, 2]
    assert np.array_equal(pixels(folder, "d_12")[0], picture(12, 40, 48)[:, 4:44])


def test_drishtis_split_where_one_is_asked_for(tmp_path, monkeypatch):
    """10 published training and 6 test images here: `published` keeps them and validates on none; 1:1 mixes all 16, 8 and 8."""
    tree = fundus_tree(tmp_path / "in")
    with pytest.raises(FedDPError, match="DrishtiGS has 16 images, but --split published divides 101"):
        PREPARE["fundus"](tree, tmp_path / "as", 16, 0, "published")
    assert not (tmp_path / "as").exists()
    sizes = {"DrishtiGS": (10, 16), "RIMONEr3": (4, 6), "REFUGEtrain": (5, 6), "REFUGEval": (4, 5)}
    monkeypatch.setattr(fundus, "NUMBERS", {site: Published(*numbers) for site, numbers in sizes.items()})
    for seed in (0, 1):
        out = tmp_path / f"published-{seed}"
        PREPARE["fundus"](tree, out, 16, seed, "published")
        found = {folder.site: folder for folder in map(SiteFolder.open, find_sites(out))}
        assert {row.image for row in found["DrishtiGS"].rows_of("train")} == {f"d_{n}" for n in range(10)}
        assert {site: len(folder.rows_of("train")) for site, folder in found.items()} == {s: n for s, (n, _) in sizes.items()}
        assert not any(folder.rows_of("val") for folder in found.values())
    PREPARE["fundus"](tree, tmp_path / "halves", 16, 0, "1:1")
    halves = SiteFolder.open(tmp_path / "halves/DrishtiGS")
    assert [len(halves.rows_of(split)) for split in ("train", "val", "test")] == [8, 0, 8]
    assert {row.image for row in halves.rows_of("test")} & {f"d_{n}" for n in range(10)}


def test_rim_one_is_the_left_half_of_the_pair(eyes):
    image, _ = pixels(SiteFolder.open(eyes / "RIMONEr3"), "G-1-L")
    assert image.shape == (40, 40, 3)
    assert abs(image[:, :30].astype(int) - 50).max() <= 2  # JPEG; the right half is 200


def test_the_crop_is_800_round_the_disc_and_stays_inside():
    """Disc rows 890-909, middle 900: 500 to 1299. Disc columns 40-59 at the left border: 0 to 799."""
    mask = rings(2000, 1900, centre=(900, 50))
    image = np.broadcast_to(np.arange(2000)[:, None, None] % 256, (2000, 1900, 3)).astype(np.uint8)
    cut, cut_mask = crop(image, mask, "x")
    assert cut.shape == (800, 800, 3)
    assert cut[0, 0, 0] == 500 % 256
    assert np.array_equal(cut_mask, mask[500:1300, :800])
    with pytest.raises(FedDPError, match="x: its mask has no optic disc"):
        crop(image, np.zeros_like(mask), "x")


def test_fundus_names_all_that_is_missing_at_once(tmp_path):
    tree = fundus_tree(tmp_path / "in")
    mask = tree / "Drishti-GS1_files/Test/Test_GT/d_11/SoftMap/d_11_cupsegSoftmap.png"
    mask.unlink()
    with pytest.raises(FedDPError, match=f"{mask.name} missing"):
        PREPARE["fundus"](tree, tmp_path / "out", 16, 0)
    for gone in ("RIM-ONE r3/Healthy", "REFUGE-Validation400", "Annotation-Training400"):
        shutil.rmtree(tree / gone)
    with pytest.raises(FedDPError) as error:
        PREPARE["fundus"](tree, tmp_path / "out", 16, 0)
    for named in ("RIM-ONE r3/Healthy/Stereo Images", "; REFUGE-Validation400.", "Disc_Cup_Masks/Non-Glaucoma"):
        assert named in str(error.value)
    assert not (tmp_path / "out").exists()


# -- RIGA ------------------------------------------------------------------------------------------------------------

FOLDERS = ("BinRushed/BinRushed1", "BinRushed/BinRushed2", "Magrabia/MagrabiaMale")
FOLDERS += tuple(f"MESSIDOR_Base{n}/Labeled" for n in (1, 2, 3))


def riga_tree(root):
    """Three eyes in each folder, all of the same names. The raters agree on a disc of 20 pixels; on the cup, 8 pixels in three
    masks, 4 in one and none in two: the half has 8. A photograph without masks, as RIGA+ has for domain adaptation."""
    cups = [rings(cup=cup) for cup in (8, 8, 8, 4, 0, 0)]
    for at, folder in enumerate(FOLDERS):
        for n in range(3):
            save(root / f"x/RIGA/{folder}/image{n}.tif", picture(10 * at + n, 40, 48))
            for rater, mask in enumerate(cups, 1):
                save(root / f"x/RIGA-mask/{folder}/image{n}-{rater}.tif", np.array([0, 255, 128], np.uint8)[mask])
    save(root / "x/RIGA/MESSIDOR_Base1/Unlabeled/image9.tif", picture(99, 40, 48))
    return root


def test_riga_adds_three_sites_to_the_four_of_fundus(eyes, tmp_path):
    """pFLFE's seven clients, in one folder; half of the six raters decide. 40 x 48 is cropped round column 24."""
    out = tmp_path / "seven"
    shutil.copytree(eyes, out)
    PREPARE["riga"](riga_tree(tmp_path / "in"), out, None, 0)
    assert check(out) == []
    folders = {folder.site: folder for folder in map(SiteFolder.open, find_sites(out))}
    count = {site: len(folder.rows) for site, folder in folders.items()}
    assert [count.pop(site) for site in ("BinRushed", "Magrabia", "MESSIDOR")] == [6, 3, 9]
    assert sorted(count) == ["DrishtiGS", "REFUGEtrain", "REFUGEval", "RIMONEr3"]
    assert len({(folder.classes, folder.labels, folder.channels) for folder in folders.values()}) == 1
    image, mask = pixels(folders["MESSIDOR"], "MESSIDOR_Base2_Labeled_image1")
    assert np.array_equal(image, picture(41, 40, 48)[:, 4:44])
    assert np.array_equal(mask, rings()[:, 4:44])
    assert {row.image for row in folders["Magrabia"].rows} == {f"MagrabiaMale_image{n}" for n in range(3)}


def test_riga_names_what_is_missing_or_strange(tmp_path):
    tree = riga_tree(tmp_path / "in")
    with pytest.raises(FedDPError, match="BinRushed: no numbers of training images are published"):
        PREPARE["riga"](tree, tmp_path / "out", 16, 0, "published")
    save(tree / "x/RIGA-mask/Magrabia/MagrabiaMale/image1-4.tif", rings())
    with pytest.raises(FedDPError, match=r"MagrabiaMale/image1.tif: its masks have the values \[1, 2\] beside 0, 128 and 255"):
        PREPARE["riga"](tree, tmp_path / "out", 16, 0)
    for gone in ("RIGA/BinRushed", "RIGA-mask/MESSIDOR_Base3"):
        shutil.rmtree(tree / "x" / gone)
    with pytest.raises(FedDPError, match="folders missing: RIGA/BinRushed and RIGA-mask/BinRushed; RIGA/MESSIDOR_Base3 and"):
        PREPARE["riga"](tree, tmp_path / "other", 16, 0)


# -- lung ------------------------------------------------------------------------------------------------------------


def lung_tree(root):
    """Four Montgomery and six Shenzhen X-rays, and one without mask in another folder, as in the repository's data/test."""
    for prefix, count in (("MCUCXR", 4), ("CHNCXR", 6)):
        for number in range(1, count + 1):
            stem = f"{prefix}_{number:04d}_{number % 2}"
            save(root / f"data/cxr/{stem}.png", picture(number, 24, 24)[..., 0])
            save(root / f"data/masks/{stem}.png", np.where(np.eye(24) > 0, 128, 127))
    save(root / "data/test/CHNCXR_0025_0.png", picture(9, 24, 24)[..., 0])
    return root


def test_lung_has_a_site_for_each_country_and_masks_are_cut_at_127(tmp_path):
    """Half white, 128, is lung; a grey level less is not. A fifth of 4, and of 6, is rounded to 1 for val and test."""
    assert PREPARE["lung"](lung_tree(tmp_path / "in"), tmp_path / "out", None, 0) == []
    assert check(tmp_path / "out") == []
    count = {}
    for folder in map(SiteFolder.open, find_sites(tmp_path / "out")):
        assert (folder.classes, folder.labels, folder.channels) == (("lungs",), "nested", 1)
        count[folder.site] = [len(folder.rows_of(split)) for split in ("train", "val", "test")]
        for row in folder.rows:
            image, mask = pixels(folder, row.image)
            assert np.array_equal(image, picture(int(row.image.split("_")[1]), 24, 24)[..., 0])
            assert np.array_equal(mask, np.eye(24))
            assert row.image[:-2] == row.patient
    assert count == {"Montgomery": [2, 1, 1], "Shenzhen": [4, 1, 1]}


def test_lung_names_what_is_missing(tmp_path):
    tree = lung_tree(tmp_path / "in")
    (tree / "data/masks/CHNCXR_0003_1.png").unlink()
    with pytest.raises(FedDPError, match=r"data/masks/CHNCXR_0003_1\.png missing"):
        PREPARE["lung"](tree, tmp_path / "out", None, 0)
    for file in (tree / "data/cxr").glob("MCUCXR*"):
        file.unlink()
    with pytest.raises(FedDPError, match=r"images missing: cxr/MCUCXR_\*\. Complete"):
        PREPARE["lung"](tree, tmp_path / "out", None, 0)
    assert not (tmp_path / "out").exists()


# -- all -------------------------------------------------------------------------------------------------------------


TREES = [("lgg", lgg_tree), ("endopolyp", polyp_tree), ("fundus", fundus_tree), ("riga", riga_tree), ("lung", lung_tree)]


@pytest.mark.parametrize(("name", "tree"), TREES)
def test_copies_in_a_source_are_one_and_a_page_shows_each_site(tmp_path, name, tree):
    """The whole tree twice, as in the LGG zip, makes the sites that it makes once; the page lies beside them."""
    tree(tmp_path / "in")
    shutil.copytree(tmp_path / "in", tmp_path / "twice/one")
    shutil.copytree(tmp_path / "in", tmp_path / "twice/two")
    for out, source in (("a", tmp_path / "in"), ("b", tmp_path / "twice")):
        done = CliRunner().invoke(app, ["prepare", name, "--source", str(source), "--out", str(tmp_path / out), "--size", "16"])
        assert done.exit_code == 0, (done.output, done.exception)
        assert f"{tmp_path / out / 'preview.html'} shows some images of each site" in done.stderr
    roots = [(tmp_path / out, tmp_path / f"{out}-unseen") for out in "ab"]
    left, right = ({f.relative_to(root): f.read_bytes() for root in of for f in root.rglob("*.*")} for of in roots)
    assert left == right
    for root in (root for root in roots[0] if root.exists()):
        page = (root / "preview.html").read_text()
        assert [f"<h2>{site.name}</h2>" in page for site in find_sites(root)] == [True] * len(find_sites(root))
        assert check(root) == []


@pytest.mark.parametrize(("name", "tree"), TREES)
def test_folder_and_zip_give_the_same_bits_at_the_asked_size(tmp_path, name, tree):
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tree(tmp_path / "in"))
    for out, source in (("a", tmp_path / "in"), ("b", Path(packed))):
        PREPARE[name](source, tmp_path / out, 16, 7)
    left, right = ({f.relative_to(r): f.read_bytes() for f in r.rglob("*.*")} for r in (tmp_path / "a", tmp_path / "b"))
    assert left == right
    assert {Image.open(file).size for file in (tmp_path / "a").rglob("*.png")} == {(16, 16)}
    with pytest.raises(FedDPError, match="not empty"):
        PREPARE[name](tmp_path / "in", tmp_path / "a", 16, 7)


def test_the_command_prepares_and_sums_up(tmp_path):
    lgg_tree(tmp_path / "in")
    arguments = ["--source", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--size", "8"]
    done = CliRunner().invoke(app, ["prepare", "lgg", *arguments])
    assert done.exit_code == 0, done.output
    split = "1 train 1 val 1 test"
    assert done.stdout == f"{tmp_path / 'out'}: CS {split}; DU {split}; FG {split}; HT {split}\n"
    assert "split" not in json.loads((tmp_path / "out/CS/dataset.json").read_text())
    halves = ["--source", str(tmp_path / "in"), "--out", str(tmp_path / "halves"), "--split", "1:1"]
    done = CliRunner().invoke(app, ["prepare", "lgg", *halves])
    split = "1 train 0 val 2 test"  # half of three is 1.5, rounded 2
    assert done.stdout == f"{tmp_path / 'halves'}: CS {split}; DU {split}; FG {split}; HT {split}\n"
    with pytest.raises(FedDPError, match="mnist: not a known data set. Use one of lgg, endopolyp, fundus"):
        CliRunner().invoke(app, ["prepare", "mnist", *arguments], catch_exceptions=False)
    (tmp_path / "file").touch()
    for name, what in (("nowhere", "nowhere does not exist"), ("file", "file: neither a folder nor a zip")):
        with pytest.raises(FedDPError, match=what):
            PREPARE["lgg"](tmp_path / name, tmp_path / "x", None, 0)
