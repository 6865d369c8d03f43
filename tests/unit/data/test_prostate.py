"""Prostate MRI, of volumes that the tests write in the published layout."""

import csv
import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nvflare.apis.utils.format_check import name_check
from PIL import Image

from feddp.data.check import check
from feddp.data.folder import SiteFolder, find_sites
from feddp.data.prepare import PREPARE
from feddp.errors import FedDPError

ISSUE = ("BIDMC", "HK", "I2CVB", "ISBI", "ISBI_1.5", "UCL")
RELEASE = ("BIDMC", "HK", "HCRUDB", "RUNMC", "BMC", "UCL")  # in the same order
SITES = ("BIDMC", "HK", "I2CVB", "ISBI", "ISBI_15", "UCL")
SCANNER = np.diag([-0.5, -0.5, 3.0, 1.0])  # columns to the left, rows to the back, slices to the head: as axial MRI is stored
SLICES, ROWS, COLUMNS = 6, 8, 10


def volume(number=0):
    """(S, H, W), one value in each voxel: the least 100·`number`, each next one 1 more, in some order."""
    values = np.random.default_rng(number).permutation(SLICES * ROWS * COLUMNS)
    return 100 * number + values.reshape(SLICES, ROWS, COLUMNS).astype(np.float32)


def truth():
    """(S, H, W), with prostate in slices 2 to 4 only: the two zones' labels, left of the middle and towards the front."""
    labels = np.zeros((SLICES, ROWS, COLUMNS), np.uint8)
    labels[2:5, 1:3, 6:9] = 1
    labels[3, 3, 6:9] = 2
    return labels


def save(file, slices, affine=SCANNER):
    """A NIfTI file; `slices` (S, H, W) as seen, columns to the patient's left and rows to the back."""
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(slices.T, affine), file)


def tree(root, folders=ISSUE, cases=3, suffix="_segmentation", ending=".nii.gz"):
    for place, folder in enumerate(folders):
        for case in range(cases) if isinstance(cases, int) else cases[folder]:
            save(root / folder / f"Case{case:02d}{ending}", volume(10 * place + case))
            save(root / folder / f"Case{case:02d}{suffix}{ending}", truth())
    return root


def grey(number=0):
    """480 voxels, from v to v + 479: the 99th percentile lies at position 0.99·479 = 474.21 of the sorted ones, so at
    v + 474.21, which becomes 255; what is brighter is cut."""
    return np.rint((volume(number) - 100 * number) / 474.21 * 255).clip(0, 255)


def written(folder):
    """Stem -> pixels of image and mask."""
    return {
        row.image: tuple(np.asarray(Image.open(path(row.image))) for path in (folder.image_path, folder.mask_path))
        for row in folder.rows
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("prostate")
    notes = PREPARE["prostate"](tree(root / "in", cases=10), root / "out", None, 0)
    return root / "out", notes


def test_six_sources_become_six_sites(prepared):
    out, notes = prepared
    assert check(out) == []
    assert [path.name for path in find_sites(out)] == sorted(SITES)
    # three of six slices have no prostate, in each of ten cases
    assert notes == ["Slices left out, without prostate: BIDMC 30, HK 30, I2CVB 30, ISBI 30, ISBI_15 30, UCL 30"]
    metadata = json.loads((out / "ISBI_15" / "dataset.json").read_text())
    expected = {"name": "Prostate-MRI", "channels": 1, "classes": ["prostate"], "labels": "nested", "split_seed": 0}
    assert metadata.items() >= expected.items()
    assert metadata["source"].startswith("NCI-ISBI 2013")


def test_every_site_may_take_part_in_a_flare_federation():
    for site in SITES:
        ill, reason = name_check(site, "client")
        assert not ill, reason


def test_slices_with_prostate_are_written_as_grey_values_and_one_label(prepared):
    """Case 7 of HK, the second source, is volume 17."""
    slices = written(SiteFolder.open(prepared[0] / "HK"))
    assert [stem for stem in slices if stem.startswith("Case07")] == ["Case07_002", "Case07_003", "Case07_004"]
    for number in (2, 3, 4):
        image, mask = slices[f"Case07_{number:03d}"]
        assert np.array_equal(image, grey(17)[number])
        assert np.array_equal(mask, truth()[number] > 0)
    assert slices["Case07_003"][1].sum() == 9  # six voxels of label 1, three of label 2


def test_a_case_is_in_one_split_and_can_be_put_together_again(prepared):
    """10 cases: 6, 2 and 2, of three slices each."""
    folder = SiteFolder.open(prepared[0] / "UCL")
    assert folder.volumes
    assert [len(folder.rows_of(split)) for split in ("train", "val", "test")] == [18, 6, 6]
    with (folder.path / "split.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len({(row["patient"], row["split"]) for row in rows}) == 10
    # SCANNER: 0.5 mm in the plane, slices 3 mm apart
    assert {(row.place.mm, row.place.apart) for row in folder.rows} == {((0.5, 0.5), 3.0)}
    assert [row.place.slice for row in folder.rows[:3]] == [2, 3, 4]
    assert [row["image"] for row in rows] == [f"Case{c:02d}_{s:03d}" for c in range(10) for s in (2, 3, 4)]
    assert all(row["image"].startswith(f"{row['patient']}_") for row in rows)


def reoriented(file, axes):
    """The same patient, stored along other axes."""
    stored = nibabel.load(file)
    now, then = nibabel.io_orientation(stored.affine), nibabel.orientations.axcodes2ornt(axes)
    other = stored.as_reoriented(nibabel.orientations.ornt_transform(now, then))
    assert "".join(nibabel.aff2axcodes(other.affine)) == axes
    nibabel.save(other, file)


@pytest.mark.parametrize("axes", ["RAS", "LPS", "LAI", "SRP", "PIR"])
def test_slices_are_axial_however_the_volume_is_stored(tmp_path, axes):
    """A mask may even be stored along other axes than its image, as long as its voxels lie at the same places."""
    root = tree(tmp_path / "in")
    reoriented(root / "UCL/Case01.nii.gz", axes)
    reoriented(root / "HK/Case01.nii.gz", axes)
    reoriented(root / "HK/Case01_segmentation.nii.gz", axes)
    PREPARE["prostate"](root, tmp_path / "out", None, 0)
    for site, number in (("UCL", 51), ("HK", 11)):
        image, mask = written(SiteFolder.open(tmp_path / "out" / site))["Case01_003"]
        assert np.array_equal(image, grey(number)[3])
        assert np.array_equal(mask, truth()[3] > 0)


def test_rows_run_to_the_back_and_columns_to_the_patient_s_left(tmp_path):
    """Said in millimetres: the brightest voxel lies 4 mm left of and 3 mm behind the first, in the slice 9 mm above it.

    Voxels are 0.5, 0.5 and 3 mm apart: column 8, row 6, slice 3. The world's axes run to the right, the front and the head.
    """
    root = tree(tmp_path / "in")
    file = root / "BIDMC/Case00.nii.gz"
    stored = nibabel.load(file)
    voxels = np.zeros(stored.shape, np.float32)
    x, y, z = np.rint(np.linalg.inv(stored.affine) @ [-4.0, -3.0, 9.0, 1.0])[:3].astype(int)
    voxels[x, y, z] = 1000
    voxels[:, :, 5] = 10  # a sixth of all voxels: the 99th percentile
    nibabel.save(nibabel.Nifti1Image(voxels, stored.affine), file)
    PREPARE["prostate"](root, tmp_path / "out", None, 0)
    image, _ = written(SiteFolder.open(tmp_path / "out/BIDMC"))["Case00_003"]
    assert np.argwhere(image == 255).tolist() == [[6, 8]]


@pytest.mark.parametrize(
    ("folders", "suffix", "ending"),
    [(ISSUE, "_segmentation", ".nii"), (RELEASE, "_segmentation", ".nii.gz"), (RELEASE, "_Segmentation", ".nii.gz")],
)
def test_every_published_naming_is_read(tmp_path, folders, suffix, ending):
    PREPARE["prostate"](tree(tmp_path / "deep/in", folders, 3, suffix, ending), tmp_path / "out", None, 0)
    assert [path.name for path in find_sites(tmp_path / "out")] == sorted(SITES)
    for place, site in enumerate(SITES):
        image, _ = written(SiteFolder.open(tmp_path / "out" / site))["Case02_004"]
        assert np.array_equal(image, grey(10 * place + 2)[4])


def test_folder_and_zip_give_the_same_bits_at_the_asked_size(tmp_path):
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tree(tmp_path / "in"))
    for out, source in (("a", tmp_path / "in"), ("b", Path(packed))):
        PREPARE["prostate"](source, tmp_path / out, 16, 7)
    left, right = ({f.relative_to(r): f.read_bytes() for f in r.rglob("*.*")} for r in (tmp_path / "a", tmp_path / "b"))
    assert left == right
    assert {Image.open(file).size for file in (tmp_path / "a").rglob("*.png")} == {(16, 16)}
    with pytest.raises(FedDPError, match="not empty"):
        PREPARE["prostate"](tmp_path / "in", tmp_path / "a", 16, 7)


# -- the published split -------------------------------------------------------------------------------------------------

# the cases that liuquande.github.io/SAML has of each source
ALL = {"BIDMC": (0, *range(2, 13)), "HK": range(38, 50), "I2CVB": range(19), "ISBI": range(30), "ISBI_1.5": range(30)}
ALL |= {"UCL": (1, *range(26, 38))}


def test_the_published_cases_train_validate_and_test(tmp_path):
    """The lists beside IOP-FL's released code: how many cases of each site train, validate and test, and which test."""
    root = tree(tmp_path / "in", cases=ALL)
    PREPARE["prostate"](root, tmp_path / "out", None, 0, "published")
    found = {}
    for site in SITES:
        folder = SiteFolder.open(tmp_path / "out" / site)
        found[site] = [sorted({row.patient for row in folder.rows_of(word)}) for word in ("train", "val", "test")]
    assert {site: tuple(map(len, cases)) for site, cases in found.items()} == {
        **{"BIDMC": (7, 2, 3), "HK": (7, 2, 3), "I2CVB": (12, 3, 4)},
        **{"ISBI": (19, 5, 6), "ISBI_15": (19, 5, 6), "UCL": (8, 2, 3)},
    }
    assert {site: " ".join(case.removeprefix("Case") for case in test) for site, (_, _, test) in found.items()} == {
        **{"BIDMC": "03 08 10", "HK": "45 48 49", "I2CVB": "06 12 14 18"},
        **{"ISBI": "04 05 07 13 15 17", "ISBI_15": "03 16 17 18 27 29", "UCL": "33 36 37"},
    }
    assert found["I2CVB"][1] == ["Case02", "Case04", "Case07"]
    metadata = json.loads((tmp_path / "out/UCL/dataset.json").read_text())
    assert metadata["split"] == "published"


def test_other_cases_than_the_published_ones_are_named(tmp_path):
    root = tree(tmp_path / "in", cases=ALL | {"HK": (*range(37, 49),)})
    with pytest.raises(FedDPError, match="HK has other cases .*: Case49 is missing, Case37 is in none of its lists. Give the"):
        PREPARE["prostate"](root, tmp_path / "out", None, 0, "published")
    assert not (tmp_path / "out").exists()


# -- what is wrong with a source -------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    return tree(tmp_path / "in")


def refused(source, message):
    with pytest.raises(FedDPError, match=message):
        PREPARE["prostate"](source, source.parent / "out", None, 0)


def test_all_missing_sources_are_named_at_once(source):
    shutil.rmtree(source / "ISBI")
    shutil.rmtree(source / "HK")
    refused(source, "sources missing: HK; ISBI or RUNMC. Complete")
    assert not (source.parent / "out").exists()


def test_a_case_in_halves_is_named(source):
    (source / "UCL/Case01_segmentation.nii.gz").unlink()
    (source / "BIDMC/Case02.nii.gz").unlink()
    refused(source, "missing beside in/BIDMC/Case02_segmentation.nii.gz, in/UCL/Case01.nii.gz")
    assert not (source.parent / "out").exists()


def test_a_copy_of_a_case_is_the_case(source):
    shutil.copytree(source / "UCL", source / "copy/UCL")
    PREPARE["prostate"](source, source.parent / "out", 8, 0)
    assert len(SiteFolder.open(source.parent / "out/UCL").rows) == 3 * 3  # slices 2 to 4 of each case


@pytest.mark.parametrize("again", ["ISBI/Case01.nii", "RUNMC/Case01.nii.gz", "copy/ISBI/Case01.nii.gz"])
def test_a_case_that_is_there_twice_is_named(source, again):
    save(source / again, volume())
    refused(source, "both .*Case01.nii.* and .*Case01.nii.*. Keep one")


def test_a_mask_of_another_shape_is_named(source):
    save(source / "HK/Case01_segmentation.nii.gz", truth()[:-1])
    refused(source, r"HK/Case01_segmentation.nii.gz: has 10 x 8 x 5 voxels, but its image 10 x 8 x 6")
    assert not (source.parent / "out/HK").exists()


@pytest.mark.parametrize(
    ("affine", "apart"),
    [
        (SCANNER + [[0, 0, 0, 3], [0, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 0]], "5.0"),
        (np.diag([-0.5, -0.5, 4.0, 1.0]), "5.0"),
        (np.diag([0.5, -0.5, 3.0, 1.0]), "4.5"),
    ],
    ids=["moved", "stretched", "mirrored"],
)
def test_a_mask_that_lies_elsewhere_is_named(source, affine, apart):
    """Moved by 3 and 4 mm: 5. Slices 4 mm apart and not 3: 5·1 at the last. Mirrored: columns from 0 to 4.5 mm, not −4.5."""
    save(source / "HK/Case01_segmentation.nii.gz", truth(), affine)
    refused(source, f"HK/Case01_segmentation.nii.gz: is {apart} mm away from its image .* give the mask the image's affine")


def test_affines_that_differ_by_rounding_are_the_same(source):
    """0.0001 mm a column, 9 columns on: 0.0009 mm."""
    save(source / "HK/Case01_segmentation.nii.gz", truth(), SCANNER + np.diag([1e-4, 0, 0, 0]))
    PREPARE["prostate"](source, source.parent / "out", None, 0)


def test_a_volume_of_four_dimensions_is_named(source):
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 3, 2), np.float32), SCANNER), source / "HK/Case01.nii.gz")
    refused(source, r"HK/Case01.nii.gz: has 4 dimensions, 4 x 4 x 3 x 2")


def cut(content):
    return content[: len(content) // 2]


def no_axes(content):
    """An affine of zeros: sform_code (byte 254) says that srow_x, y and z (280 to 327) hold it."""
    return content[:252] + bytes([0, 0, 1, 0]) + content[256:280] + bytes(48) + content[328:]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("Case01.nii.gz", cut, "is not a readable NIfTI volume .Compressed file ended"),
        ("Case01_segmentation.nii.gz", lambda _: b"<html>not found</html>", "is cut off, or no NIfTI volume"),
        ("Case01.nii.gz", lambda _: b"", "is cut off, or no NIfTI volume"),
        ("Case01.nii", cut, "is cut off: it has 1136 bytes, but its header says 2272"),
        ("Case01.nii", lambda _: b"<html>not found</html>", "is cut off, or no NIfTI volume"),
        ("Case01.nii", no_axes, "says that its voxels have no size or place"),
    ],
)
def test_a_file_that_is_no_volume_is_named(source, name, damage, said):
    file = source / "HK" / name
    if name.endswith(".nii"):
        shutil.move(source / "HK/Case01.nii.gz", source / "whole.nii.gz")
        nibabel.save(nibabel.load(source / "whole.nii.gz"), file)
    file.write_bytes(damage(file.read_bytes()))
    refused(source, f"HK/{name}: {said}")


def test_values_that_make_no_image_are_named(source):
    broken = volume()
    broken[0, 0, 0] = np.nan
    save(source / "BIDMC/Case01.nii.gz", broken)
    refused(source, "BIDMC/Case01.nii.gz: has voxels without a value .NaN.. Set them to 0")
    save(source / "BIDMC/Case01.nii.gz", np.full_like(broken, 7))
    refused(source, "BIDMC/Case01.nii.gz has no contrast: .* are 7")
    save(source / "BIDMC/Case01.nii.gz", volume())
    save(source / "BIDMC/Case01_segmentation.nii.gz", np.zeros_like(truth()))
    refused(source, "BIDMC/Case01_segmentation.nii.gz is empty")
