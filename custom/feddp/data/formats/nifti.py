"""Reads NIfTI volumes as stacks of slices along one of the patient's axes."""

import gzip
import math
from dataclasses import dataclass
from itertools import product
from typing import IO

import nibabel
import numpy as np
from nibabel.affines import apply_affine, voxel_sizes

from feddp.data.formats.guarded import AGAIN
from feddp.data.formats.scan import AXES, Scan, finite, known
from feddp.data.prepare.source import Source, read_up_to
from feddp.errors import FedDPError, InputError
from feddp.limits import MIB, VOLUME_START, VOLUME_TAIL, VOXELS
from feddp.reading import short

APART = 0.1  # mm
UNITS = {1: 1000.0, 3: 0.001}  # in mm, of the codes for metres and micrometres; any other is taken for mm
SHEAR = 1e-3  # the largest cosine between two axes that are at right angles
HEADER = 348  # bytes
SECOND = 540  # bytes of a header of NIfTI-2, as it says in its first four
WIDEST = 8  # bytes per voxel
# limit of a file of VOXELS, packed or not
LARGEST = VOLUME_START + WIDEST * VOXELS + VOLUME_TAIL


@dataclass(frozen=True)
class Volume:
    """A NIfTI volume and the axis along which it was sliced: `voxels_of` puts slices back into its own voxels."""

    image: nibabel.Nifti1Image
    axis: str

    def voxels_of(self, slices: np.ndarray) -> np.ndarray:
        """Returns slices (S, H, W) in the order of the volume's own voxels."""
        order, turned = AXES[self.axis]
        canonical = np.flip(slices.transpose(np.argsort(order)), turned)
        axes = nibabel.io_orientation(self.image.affine)
        own = nibabel.orientations.ornt_transform(np.array([[0, 1], [1, 1], [2, 1]]), axes)
        voxels: np.ndarray = nibabel.orientations.apply_orientation(canonical, own)
        return voxels


def read_volume(tree: Source, name: str, axis: str) -> Scan:
    """Returns a volume of `tree` as float32 slices along `axis`, one of AXES.

    Raises:
        InputError: the file cannot be read, is not three-dimensional, or has values that are not finite. Names the file.
    """
    image = _load(tree, name)
    canonical, order = nibabel.as_closest_canonical(image), AXES[axis][0]
    sizes = [round(float(size), 6) for size in _millimetres(canonical)[list(order)]]  # the header has float32
    mm, apart = (sizes[1], sizes[2]) if known(*sizes[1:]) else None, sizes[0] if known(*sizes) else None
    return Scan(_slices(canonical, axis), mm, apart, True, axis, Volume(image, axis))


def read_truth(tree: Source, mask: str, origin: Volume) -> np.ndarray:
    """Returns the mask of a volume as its slices, (S, H, W) float32.

    Raises:
        InputError: as `read_volume`, or the mask differs from its image in shape or in position in the patient.
    """
    volume, truth = nibabel.as_closest_canonical(origin.image), nibabel.as_closest_canonical(_load(tree, mask))
    if volume.shape != truth.shape:
        raise InputError(f"{tree.path}: {mask} is {truth.shape}, but its image {volume.shape}. Correct the source.")
    corners = list(product(*((0, length - 1) for length in volume.shape)))
    apart = apply_affine(volume.affine, corners) - apply_affine(truth.affine, corners)
    unit = _unit(volume)
    if (distance := np.linalg.norm(apart, axis=1).max() * unit) > APART:
        raise InputError(
            f"{tree.path}: {mask} is {distance:.1f} mm away from its image in the patient. "
            "If the voxels of both do correspond, give the mask the image's affine."
        )
    return _slices(truth, origin.axis)


def _millimetres(volume: nibabel.Nifti1Image) -> np.ndarray:
    """Returns the distances between voxels along the three axes, of the affine; nan where the axes are not at right angles."""
    sizes: np.ndarray = voxel_sizes(volume.affine) * _unit(volume)
    directions = volume.affine[:3, :3] / voxel_sizes(volume.affine)
    leaning = np.abs(directions.T @ directions - np.eye(3)).max()
    return sizes if leaning <= SHEAR else np.full(3, np.nan)


def _unit(volume: nibabel.Nifti1Image) -> float:
    return UNITS.get(int(volume.header["xyzt_units"]) % 8, 1.0)  # the other bits are the unit of time


def _load(tree: Source, name: str) -> nibabel.Nifti1Image:
    """Loads a volume; nibabel can turn its axes to the patient's right, front and head."""
    try:
        with tree.open(name, LARGEST) as stream:
            unpacked = gzip.GzipFile(fileobj=stream) if name.lower().endswith(".gz") else stream
            content = _content(unpacked, f"{tree.path}: {name}")
        image: nibabel.Nifti1Image = nibabel.Nifti1Image.from_bytes(content)
        nibabel.as_closest_canonical(image)
        voxels = image.get_fdata(dtype=np.float32)
    except FedDPError:
        raise
    except Exception as error:  # many kinds of errors: bytes, compression, header or axes may be damaged
        why = short(" ".join(str(error).split()))
        raise InputError(f"{tree.path}: {name} is not a readable NIfTI volume ({why}). {AGAIN}.") from None
    if not finite(voxels):
        raise InputError(f"{tree.path}: {name} has values that are not finite, or huge. Correct the source.")
    return image


def _content(stream: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    """Reads the bytes of a volume after a check of the size in its header.

    Raises:
        InputError: the volume is not three-dimensional, has too many voxels, voxels that are not real numbers, or far more
            bytes than its header announces.
    """
    start = read_up_to(stream, HEADER)
    if SECOND in (int.from_bytes(start[:4], order) for order in ("little", "big")):
        raise InputError(f"{name} is NIfTI-2. Save it as NIfTI-1.")
    header = nibabel.Nifti1Header(start)
    shape, dtype, offset = header.get_data_shape(), header.get_data_dtype(), header.get_data_offset()
    if len(shape) != 3:
        raise InputError(f"{name} has {len(shape)} dimensions, {shape}. Give one three-dimensional volume.")
    if min(shape) < 1 or math.prod(shape) > VOXELS:
        sides = " x ".join(map(str, shape))
        raise InputError(f"{name} has {sides} voxels; the limit is {VOXELS}. Make it smaller.")
    if dtype.kind not in "iuf" or dtype.itemsize > WIDEST:
        raise InputError(f"{name} has voxels of {short(str(dtype))}. Give whole or floating point numbers of at most 64 bits.")
    if not HEADER <= offset <= VOLUME_START:
        raise InputError(f"the voxels of {name} start at byte {offset}; the limit is {VOLUME_START}. Correct the source.")
    content = start + read_up_to(stream, offset - HEADER + math.prod(shape) * dtype.itemsize)
    # reads to the end, because the checksum is there
    if len(read_up_to(stream, VOLUME_TAIL + 1)) > VOLUME_TAIL:
        raise InputError(f"{name} has more than {VOLUME_TAIL // MIB} MiB after its last voxel. Correct the source.")
    return content


def _slices(canonical: nibabel.Nifti1Image, axis: str) -> np.ndarray:
    order, turned = AXES[axis]
    voxels: np.ndarray = np.flip(canonical.get_fdata(dtype=np.float32), turned)
    return voxels.transpose(order)
