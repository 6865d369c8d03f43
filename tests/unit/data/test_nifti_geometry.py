"""Where NIfTI voxels lie: which of a header's two affines counts, in what unit, and what is written back."""

import nibabel
import numpy as np
import pytest
from nibabel.affines import from_matvec

from feddp.data.formats.find import find
from feddp.data.formats.write import write_nifti
from feddp.data.prepare.source import Source

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
