"""NIfTI volumes as stacks of axial slices."""

import gzip
import math
from itertools import product
from typing import IO

import nibabel
import numpy as np
from nibabel.affines import apply_affine

from feddp.data.prepare.source import Source, read_up_to
from feddp.errors import FedDPError, InputError
from feddp.limits import MIB, VOLUME_START, VOLUME_TAIL, VOXELS
from feddp.reading import short

APART = 0.1  # mm
HEADER = 348  # bytes
WIDEST = 8  # bytes a voxel
# what a file of VOXELS may have at most, packed or not
LARGEST = VOLUME_START + WIDEST * VOXELS + VOLUME_TAIL


def read_axial(tree: Source, image: str, mask: str) -> tuple[np.ndarray, np.ndarray]:
    """The volumes `image` and `mask` of `tree` as axial slices, however they are stored: (S, H, W), float32 each.

    Slices go from the feet to the head; in a slice, rows from front to back and columns from the patient's right to the left,
    as radiologists look at it. InputError naming the file that cannot be read, is not three-dimensional, or holds a
    value that is not finite, and the mask whose shape is not the image's, or whose voxels lie elsewhere in the patient.
    """
    volume, truth = _load(tree, image), _load(tree, mask)
    if volume.shape != truth.shape:
        raise InputError(f"{tree.path}: {mask} is {truth.shape}, its image {volume.shape}. Mend the source.")
    corners = list(product(*((0, length - 1) for length in volume.shape)))
    apart = apply_affine(volume.affine, corners) - apply_affine(truth.affine, corners)
    if (distance := np.linalg.norm(apart, axis=1).max()) > APART:
        raise InputError(
            f"{tree.path}: {mask} lies {distance:.1f} mm from its image in the patient. "
            "Give it the image's affine, if the two do belong together voxel by voxel."
        )
    return _slices(volume), _slices(truth)


def _load(tree: Source, name: str) -> nibabel.Nifti1Image:
    """With nibabel's canonical axes, which run to the patient's right, front and head."""
    try:
        with tree.open(name, LARGEST) as stream:
            unpacked = gzip.GzipFile(fileobj=stream) if name.lower().endswith(".gz") else stream
            content = _content(unpacked, f"{tree.path}: {name}")
        canonical: nibabel.Nifti1Image = nibabel.as_closest_canonical(nibabel.Nifti1Image.from_bytes(content))
        voxels = canonical.get_fdata(dtype=np.float32)
    except FedDPError:
        raise
    except Exception as error:  # bytes, compression, header and axes are damaged in more ways than have a name
        why = short(str(error))
        raise InputError(f"{tree.path}: {name} is not a readable NIfTI volume ({why}). Download it again.") from None
    if not np.isfinite(voxels).all():
        raise InputError(f"{tree.path}: {name} holds values that are not finite. Mend the source.")
    return canonical


def _content(stream: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    """The bytes of a volume, as many as its header says, once that says that they are bearable.

    Raises:
        InputError: it has not three dimensions, too many voxels, voxels that are no real numbers, or far more bytes than
            its header says.
    """
    start = read_up_to(stream, HEADER)
    header = nibabel.Nifti1Header(start)
    shape, dtype, offset = header.get_data_shape(), header.get_data_dtype(), header.get_data_offset()
    if len(shape) != 3:
        raise InputError(f"{name} has {len(shape)} dimensions, {shape}. Give one volume of three.")
    if min(shape) < 1 or math.prod(shape) > VOXELS:
        sides = " x ".join(map(str, shape))
        raise InputError(f"{name} has {sides} voxels, and {VOXELS} is the most that is read. Make it smaller.")
    if dtype.kind not in "iuf" or dtype.itemsize > WIDEST:
        raise InputError(f"{name} has voxels of {short(str(dtype))}. Give whole or floating point numbers of at most 64 bits.")
    if not HEADER <= offset <= VOLUME_START:
        raise InputError(f"{name} begins its voxels at byte {offset}, and {VOLUME_START} is the most. Mend the source.")
    content = start + read_up_to(stream, offset - HEADER + math.prod(shape) * dtype.itemsize)
    # to the end, where the checksum is
    if len(read_up_to(stream, VOLUME_TAIL + 1)) > VOLUME_TAIL:
        raise InputError(f"{name} goes on for more than {VOLUME_TAIL // MIB} MiB after its last voxel. Mend the source.")
    return content


def _slices(volume: nibabel.Nifti1Image) -> np.ndarray:
    voxels: np.ndarray = volume.get_fdata(dtype=np.float32)  # which keeps what it has read
    return voxels[::-1, ::-1].T
