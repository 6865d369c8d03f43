"""Where NIfTI voxels lie: which of a header's two affines counts, in what unit, and what is written back."""

import gzip
import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.affines import from_matvec

from feddp.data.formats.find import find
from feddp.data.formats.labels import by_value
from feddp.data.formats.nifti import read_truth
from feddp.data.formats.write import write_nifti
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError

VOXELS = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
# the first axis to the head (3 mm), the second to the left (0.5 mm), the third to the front (0.8 mm)
TURNED = np.array([[0, -0.5, 0, 1], [0, 0, 0.8, 2], [3.0, 0, 0, 3], [0, 0, 0, 1]])


def volume(folder, sform=None, qform=None, unit="mm", pixdim=None):
    """Writes VOXELS with these affines, each (affine, code), and reads it."""
    image = nibabel.Nifti1Image(VOXELS, None)
    image.header.set_xyzt_units(unit)
    image.set_qform(*(qform or (None, 0)))
    image.set_sform(*(sform or (None, 0)))
    if pixdim:
        image.header["pixdim"][1:4] = pixdim
    folder.mkdir(exist_ok=True)
    image.to_filename(folder / "v.nii")
    tree = Source(folder)
    (entry,) = find(tree, folder.name).entries
    return entry, entry.read(tree, "axial")


def read(folder, name, axis="axial"):
    tree = Source(folder)
    (entry,) = [each for each in find(tree, folder.name).entries if each.name == name]
    return entry, entry.read(tree, axis)


def saved(folder, name, voxels, affine=TURNED, kind=nibabel.Nifti1Image):
    folder.mkdir(exist_ok=True)
    kind(voxels, affine).to_filename(folder / name)


@pytest.mark.parametrize("axis", ["axial", "coronal", "sagittal"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (2, 3, 4, 1, 1), (6, 4), (6, 4, 1, 1)])
def test_further_axes_of_one_voxel_and_missing_ones_do_not_matter(tmp_path, shape, axis):
    """As many programs write them. What is written for such a volume has its axes."""
    plain = shape[:3] if len(shape) > 2 else (*shape, 1)
    saved(tmp_path / "s", "plain.nii", VOXELS.reshape(plain))
    saved(tmp_path / "s", "more.nii.gz", VOXELS.reshape(shape))
    (_, wanted), (entry, found) = (read(tmp_path / "s", name, axis) for name in ("plain", "more"))
    assert (found.pixels == wanted.pixels).all()
    assert (found.mm, found.apart) == (wanted.mm, wanted.apart)
    mask = (found.pixels % 5 == 0).astype(np.uint8)
    (file,) = write_nifti(tmp_path, entry, found, mask, ("a",), "nested")
    assert nibabel.load(file).shape == shape
    assert (np.asarray(nibabel.load(file).dataobj) == (VOXELS % 5 == 0).reshape(shape)).all()
    truth = read_truth(Source(tmp_path / "s"), "s/plain.nii", found.origin)
    assert (truth == wanted.pixels).all()


@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (2, 3, 2, 1, 2), (24,)])
def test_several_volumes_or_a_line_are_no_volume(tmp_path, shape):
    saved(tmp_path / "s", "v.nii", VOXELS.reshape(shape), np.eye(4))
    with pytest.raises(FedDPError, match=rf"v.nii: has {len(shape)} dimensions, {' x '.join(map(str, shape))}. Give one three"):
        read(tmp_path / "s", "v")


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_header_beside_its_voxels_is_one_volume(tmp_path, packed):
    saved(tmp_path / "s", f"pair.img{packed}", VOXELS, kind=nibabel.Nifti1Pair)
    saved(tmp_path / "s", "one.nii", VOXELS)
    found = find(Source(tmp_path / "s"), "s")
    assert ([entry.name for entry in found.entries], found.others, found.refused) == (["one", "pair"], [], [])
    (_, one), (entry, pair) = (read(tmp_path / "s", name) for name in ("one", "pair"))
    assert (one.pixels == pair.pixels).all()
    (file,) = write_nifti(tmp_path, entry, pair, np.ones(pair.pixels.shape, np.uint8), ("a",), "nested")
    assert (nibabel.load(file).affine == nibabel.load(tmp_path / "s/one.nii").affine).all()
    assert nibabel.load(file).get_fdata().all()


def test_a_pair_of_analyze_does_not_say_where_it_lies(tmp_path):
    saved(tmp_path / "s", "v.img", VOXELS, np.eye(4), nibabel.AnalyzeImage)
    with pytest.raises(FedDPError, match="v.img: has no header of NIfTI .that of Analyze does not say where voxels lie"):
        read(tmp_path / "s", "v")


@pytest.mark.parametrize("kind", [[("R", "u1"), ("G", "u1"), ("B", "u1")], [(c, "u1") for c in "RGBA"]])
def test_voxels_of_colours_become_slices_of_colours(tmp_path, kind):
    colours = np.zeros(VOXELS.shape, kind)
    colours["R"], colours["G"], colours["B"] = VOXELS, VOXELS + 100, 255 - VOXELS
    saved(tmp_path / "s", "v.nii", colours)
    saved(tmp_path / "s", "grey.nii", VOXELS)
    (_, grey), (entry, found) = (read(tmp_path / "s", name) for name in ("grey", "v"))
    assert found.pixels.dtype == np.uint8
    assert (found.pixels == np.stack([grey.pixels, grey.pixels + 100, 255 - grey.pixels], axis=-1)).all()
    (file,) = write_nifti(tmp_path, entry, found, (grey.pixels > 9).astype(np.uint8), ("a",), "nested")
    assert (np.asarray(nibabel.load(file).dataobj) == (VOXELS > 9)).all()
    with pytest.raises(FedDPError, match="v.nii: has colours. Save it with one number per voxel"):
        read_truth(Source(tmp_path / "s"), "s/v.nii", grey.origin)


@pytest.mark.parametrize(("name", "packed"), [("v.nii", True), ("v.nii.gz", False)])
def test_whether_a_file_is_packed_is_in_its_bytes_and_not_its_name(tmp_path, name, packed):
    saved(tmp_path / "s", "plain.nii", VOXELS)
    content = (tmp_path / "s/plain.nii").read_bytes()
    (tmp_path / "s" / name).write_bytes(gzip.compress(content) if packed else content)
    assert (read(tmp_path / "s", "v")[1].pixels == read(tmp_path / "s", "plain")[1].pixels).all()


def test_labels_that_a_slope_leaves_beside_whole_numbers_are_these(tmp_path):
    """Labels 0 to 2 stored as 10,000 times as much, and read as 0.9999 of themselves; 0.997 of themselves are none."""
    stored = (10_000 * (VOXELS % 3)).astype(np.int16)
    for name, slope in (("v", 1e-4), ("near", 0.9999e-4), ("far", 0.997e-4)):
        saved(tmp_path / "s", f"{name}.nii", stored)
        content = bytearray((tmp_path / f"s/{name}.nii").read_bytes())
        content[112:120] = struct.pack("<2f", slope, 0)
        (tmp_path / f"s/{name}.nii").write_bytes(content)
    tree, origin = Source(tmp_path / "s"), read(tmp_path / "s", "v")[1].origin
    wanted, near, far = (read_truth(tree, f"s/{name}.nii", origin) for name in ("v", "near", "far"))
    assert near.max() == pytest.approx(1.9998, abs=1e-6)
    assert (by_value(Path("near.nii"), near, 2, None) == np.rint(wanted)).all()
    with pytest.raises(FedDPError, match="has the value.s. 0.997, 1.994. Use 0 to 2"):
        by_value(Path("far.nii"), far, 2, None)


@pytest.mark.parametrize(("slope", "shift"), [(0.5, -3), (2, 0), (np.nan, np.nan), (0, 7)])
def test_values_are_scaled_as_the_header_says(tmp_path, slope, shift):
    """A slope of 0 or that is no number means that there is none (NIfTI-1, scl_slope)."""
    saved(tmp_path / "s", "v.nii", VOXELS)
    content = bytearray((tmp_path / "s/v.nii").read_bytes())
    content[112:120] = struct.pack("<2f", slope, shift)
    plain = read(tmp_path / "s", "v")[1].pixels
    (tmp_path / "s/v.nii").write_bytes(content)
    assert (read(tmp_path / "s", "v")[1].pixels == (plain * slope + shift if slope > 0 else plain)).all()


def test_a_mask_without_values_or_place_says_so(tmp_path):
    """A volume whose two codes are 0 says nothing of its place; NaN in a mask is no class."""
    entry, scan = volume(tmp_path / "s", sform=(TURNED, 2))
    saved(tmp_path / "s", "m.nii", VOXELS.reshape(3, 4, 2), affine=None)
    with pytest.raises(FedDPError, match="is, because its header does not say where it lies, .* mm away"):
        read_truth(Source(tmp_path / "s"), "s/m.nii", scan.origin)
    broken = VOXELS.astype(np.float32)
    broken[0, 1, 2] = np.nan
    saved(tmp_path / "s", "m.nii", broken)
    with pytest.raises(FedDPError, match="m.nii: has voxels without a value .NaN.. Set them to 0, for example with `fslmaths`"):
        read_truth(Source(tmp_path / "s"), "s/m.nii", scan.origin)
    assert entry.name == "v"


def test_slices_follow_the_qform_where_it_is_alone(tmp_path):
    """Axial slice s is the first index; its rows go from front to back, third index 3 to 0; the columns from right to left.

    The second axis runs to the left, so columns are its indices 0 to 2 as they are.
    """
    _, scan = volume(tmp_path / "s", qform=(TURNED, 1))
    wanted = [[[VOXELS[s, c, r] for c in range(3)] for r in (3, 2, 1, 0)] for s in range(2)]
    assert scan.pixels.tolist() == wanted
    assert (scan.mm, scan.apart) == ((0.8, 0.5), 3.0)


def test_the_sform_counts_before_the_qform(tmp_path):
    """As nibabel and the standard's method 3 have it: of both, the sform; and its sizes, whatever pixdim says."""
    _, both = volume(tmp_path / "both", sform=(TURNED, 2), qform=(np.eye(4), 1))
    _, alone = volume(tmp_path / "alone", sform=(TURNED, 2))
    assert (both.pixels == alone.pixels).all()
    assert (both.mm, both.apart) == (alone.mm, alone.apart) == ((0.8, 0.5), 3.0)
    upright = np.diag([0.5, 0.8, 3.0, 1])
    _, wrong = volume(tmp_path / "pixdim", sform=(upright, 2), pixdim=(1, 1, 1))
    assert (wrong.mm, wrong.apart) == ((0.8, 0.5), 3.0)


@pytest.mark.parametrize(("unit", "factor"), [("meter", 1000), ("mm", 1), ("micron", 0.001), ("unknown", 1)])
def test_other_units_become_millimetres(tmp_path, unit, factor):
    _, scan = volume(tmp_path / "s", sform=(TURNED, 2), unit=unit)
    assert (*scan.mm, scan.apart) == pytest.approx((0.8 * factor, 0.5 * factor, 3 * factor))


def test_axes_that_are_not_at_right_angles_have_no_distances(tmp_path):
    """As of a tilted gantry: the third axis runs to the head and a tenth of that to the front. A thousandth is allowed."""
    for lean, known in ((0.1, False), (0.0005, True)):
        matrix = np.array([[0.5, 0, 0], [0, 0.8, 3 * lean], [0, 0, 3.0]])
        _, scan = volume(tmp_path / f"s{known}", sform=(from_matvec(matrix, (0, 0, 0)), 2))
        assert (scan.mm is not None, scan.apart is not None) == (known, known)


@pytest.mark.parametrize(
    ("sform", "qform"),
    [(None, (TURNED, 1)), ((TURNED, 2), None), ((TURNED, 4), (TURNED, 1)), ((TURNED, 2), (np.diag([1.0, 2, 3, 1]), 1))],
    ids=["qform", "sform", "both", "two that differ"],
)
def test_a_mask_has_both_affines_of_its_image(tmp_path, sform, qform):
    entry, scan = volume(tmp_path / "s", sform, qform)
    mask = (scan.pixels % 5 == 0).astype(np.uint8)
    (file,) = write_nifti(tmp_path, entry, scan, mask, ("a",), "nested")
    made, image = nibabel.load(file), nibabel.load(tmp_path / "s/v.nii")
    for get in ("get_sform", "get_qform"):
        (theirs, code), (ours, own) = (getattr(each, get)(coded=True) for each in (image, made))
        assert code == own
        assert theirs is ours is None or (theirs == ours).all()
    assert (np.asarray(made.dataobj) == (VOXELS % 5 == 0)).all()
