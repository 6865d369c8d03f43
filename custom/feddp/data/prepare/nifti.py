"""NIfTI volumes as stacks of axial slices."""

import gzip
import zipfile
import zlib
from itertools import product

import nibabel
import numpy as np
from nibabel.affines import apply_affine
from nibabel.filebasedimages import ImageFileError
from nibabel.orientations import OrientationError
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError

from feddp.data.prepare.source import Source
from feddp.errors import FedDPError

APART = 0.1  # mm
# ways in which a file's bytes, its compression, its header or its axes are damaged
UNREADABLE = (
    *(ImageFileError, WrapStructError, HeaderDataError, OrientationError),
    *(OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile),
)


def read_axial(tree: Source, image: str, mask: str) -> tuple[np.ndarray, np.ndarray]:
    """The volumes `image` and `mask` of `tree` as axial slices, however they are stored: (S, H, W), float32 each.

    Slices go from the feet to the head; in a slice, rows from front to back and columns from the patient's right to the left,
    as radiologists look at it. FedDPError naming the file that cannot be read, is not three-dimensional, or holds a
    value that is not finite, and the mask whose shape is not the image's, or whose voxels lie elsewhere in the patient.
    """
    volume, truth = _load(tree, image), _load(tree, mask)
    if volume.shape != truth.shape:
        raise FedDPError(f"{tree.path}: {mask} is {truth.shape}, its image {volume.shape}. Mend the source.")
    corners = list(product(*((0, length - 1) for length in volume.shape)))
    apart = apply_affine(volume.affine, corners) - apply_affine(truth.affine, corners)
    if (distance := np.linalg.norm(apart, axis=1).max()) > APART:
        raise FedDPError(
            f"{tree.path}: {mask} lies {distance:.1f} mm from its image in the patient. "
            "Give it the image's affine, if the two do belong together voxel by voxel."
        )
    return _slices(volume), _slices(truth)


def _load(tree: Source, name: str) -> nibabel.Nifti1Image:
    """With nibabel's canonical axes, which run to the patient's right, front and head."""
    try:
        content = tree.read(name)
        if name.lower().endswith(".gz"):
            content = gzip.decompress(content)
        volume = nibabel.as_closest_canonical(nibabel.Nifti1Image.from_bytes(content))
        voxels = volume.get_fdata(dtype=np.float32)
    except UNREADABLE as error:
        raise FedDPError(f"{tree.path}: {name} is not a readable NIfTI volume ({error}). Download it again.") from None
    if volume.ndim != 3:
        raise FedDPError(f"{tree.path}: {name} has {volume.ndim} dimensions, {volume.shape}. Give one volume of three.")
    if not np.isfinite(voxels).all():
        raise FedDPError(f"{tree.path}: {name} holds values that are not finite. Mend the source.")
    return volume


def _slices(volume: nibabel.Nifti1Image) -> np.ndarray:
    return volume.get_fdata(dtype=np.float32)[::-1, ::-1].T  # which keeps what it has read
