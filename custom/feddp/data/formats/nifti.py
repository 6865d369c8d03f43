"""Reads NIfTI volumes as stacks of slices along one of the patient's axes."""

import gzip
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any

import nibabel
import numpy as np
from nibabel.affines import apply_affine, voxel_sizes
from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation, ornt_transform

from feddp.data.formats.guarded import AGAIN, guarded
from feddp.data.formats.scan import AXES, Scan, finite, known, too_many
from feddp.data.formats.stack import room
from feddp.data.prepare.source import Source, read_up_to, settled
from feddp.errors import BadFile, Problem
from feddp.limits import MIB, VOLUME_START, VOLUME_TAIL
from feddp.reading import short

APART = 0.1  # mm
UNITS = {1: 1000.0, 3: 0.001}  # in mm, of the codes for metres and micrometres; any other is taken for mm
SHEAR = 1e-3  # the largest cosine between two axes that are at right angles
HEADER = 348  # bytes
SECOND = 540  # bytes of a header of NIfTI-2, as it says in its first four
WIDEST = 8  # bytes per voxel
SINGLE, PAIR = b"n+1", b"ni1"  # a header's last bytes, of a file with its voxels and of one beside them
_GZIP = b"\x1f\x8b"  # the start of a packed file
COLOURS = "RGB"  # the fields of a voxel that has colours
CORRECT = "Correct the source"


@dataclass(frozen=True)
class Volume:
    """A NIfTI volume and the axis along which it is sliced: `voxels_of` puts slices back into its own voxels.

    Args:
        image: its header and affine.
        shape: its three axes: one or two if it has fewer are 1 long, and any others are.
    """

    image: nibabel.Nifti1Image
    shape: tuple[int, ...]
    axis: str

    def voxels_of(self, slices: np.ndarray) -> np.ndarray:
        """Returns slices (S, H, W) in the order of the volume's own voxels, with all of its axes."""
        return self.placed(slices).reshape(self.image.shape)

    def placed(self, slices: np.ndarray) -> np.ndarray:
        """Returns slices (S, H, W) in the order of the volume's own voxels; what is written there is written to them."""
        order, turned = AXES[self.axis]
        canonical = np.flip(slices.transpose(np.argsort(order)), turned)
        own = ornt_transform(np.array([[0, 1], [1, 1], [2, 1]]), io_orientation(self.image.affine))
        voxels: np.ndarray = apply_orientation(canonical, own)
        return voxels

    @property
    def canonical(self) -> tuple[tuple[int, ...], np.ndarray]:
        """The shape and affine of the volume with its axes turned to the patient's right, front and head."""
        turned = io_orientation(self.image.affine)
        shape = tuple(self.shape[int(axis)] for axis in np.argsort(turned[:, 0]))
        return shape, self.image.affine @ inv_ornt_aff(turned, self.shape)


def read_volume(tree: Source, name: str, axis: str) -> Scan:
    """Returns a volume of `tree` as slices along `axis`, one of AXES: float32, or uint8 in colour.

    Raises:
        InputError: the file cannot be read, is no single volume, or has values that are not finite. Names the file.
    """
    with _opened(tree, name, axis) as (volume, voxels):
        pixels = _slices(tree.shown(name), volume, voxels)
    order, affine = AXES[axis][0], volume.canonical[1]
    sizes = [round(float(size), 6) for size in _millimetres(affine, _unit(volume))[list(order)]]  # the header has float32
    mm, apart = (sizes[1], sizes[2]) if known(*sizes[1:]) else None, sizes[0] if known(*sizes) else None
    return Scan(pixels, mm, apart, True, axis, volume)


def read_truth(tree: Source, mask: str, origin: Volume) -> np.ndarray:
    """Returns the mask of a volume as its slices, (S, H, W) float32.

    Raises:
        InputError: as `read_volume`, or the mask has colours, or differs from its image in shape or in position in the patient.
    """
    file = tree.shown(mask)
    with _opened(tree, mask, origin.axis) as (truth, voxels):
        (shape, place), (own_shape, own_place) = origin.canonical, truth.canonical
        if shape != own_shape:
            sizes = [" x ".join(map(str, each)) for each in (own_shape, shape)]
            raise BadFile(Problem(file, f"has {sizes[0]} voxels, but its image {sizes[1]}", CORRECT))
        corners = list(product(*((0, length - 1) for length in shape)))
        moved = apply_affine(place, corners) * _unit(origin) - apply_affine(own_place, corners) * _unit(truth)
        if (distance := np.linalg.norm(moved, axis=1).max()) > APART:
            lost = "" if _is_placed(truth) else ", because its header does not say where it lies,"
            what = f"is{lost} {distance:.1f} mm away from its image in the patient"
            remedy = "If the voxels of both do correspond, give the mask the image's affine"
            raise BadFile(Problem(file, what, remedy))
        slices = _slices(file, truth, voxels)
    if slices.ndim == 4:
        raise BadFile(Problem(file, "has colours", "Save it with one number per voxel"))
    return slices


def _is_placed(volume: Volume) -> bool:
    return any(int(volume.image.header[code]) > 0 for code in ("sform_code", "qform_code"))


def _millimetres(affine: np.ndarray, unit: float) -> np.ndarray:
    """Returns the distances between voxels along the three axes; nan where the axes are not at right angles."""
    sizes: np.ndarray = voxel_sizes(affine) * unit
    directions = affine[:3, :3] / voxel_sizes(affine)
    leaning = np.abs(directions.T @ directions - np.eye(3)).max()
    return sizes if leaning <= SHEAR else np.full(3, np.nan)


def _unit(volume: Volume) -> float:
    return UNITS.get(int(volume.image.header["xyzt_units"]) % 8, 1.0)  # the other bits are the unit of time


@contextmanager
def _opened(tree: Source, name: str, axis: str) -> Iterator[tuple[Volume, Any]]:
    """Opens a volume; yields it with its voxels, of its three axes, which are read when they are asked for."""
    file = tree.shown(name)
    with ExitStack() as streams:
        with guarded(file, "is not a readable NIfTI volume"):
            beside = tree.partner(name)
            start = _start(tree, beside or name)
            header = _checked(file, tree.voxels, start, PAIR if beside else SINGLE)
            content = streams.enter_context(_content(tree, name, header))
            parts: dict[str, Any] = {"image": content}
            kind: Any = nibabel.Nifti1Image
            if beside:
                kind, parts["header"] = nibabel.Nifti1Pair, streams.enter_context(_whole(tree, beside))
            image = kind.from_file_map(kind.make_file_map(parts))
            shape = (*image.shape[:3], 1)[:3]
            _require_place(file, image.affine)
            opened = Volume(image, shape, axis), image.dataobj.reshape(shape)
        yield opened


def _require_place(file: Path, affine: np.ndarray) -> None:
    """Raises BadFile if voxels of this affine have no size or place."""
    if not finite(affine) or np.linalg.matrix_rank(affine[:3, :3]) < 3:
        what = "says that its voxels have no size or place (its sform or qform is broken)"
        raise BadFile(Problem(file, what, CORRECT))


def _unpacked(stream: Any) -> Any:
    """Returns a file as it is or, if it is packed, whatever its name says, what unpacks it."""
    return gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == _GZIP else stream


def _start(tree: Source, name: str) -> bytes:
    with tree.open(name, _largest(tree)) as stream:
        return read_up_to(_unpacked(stream), HEADER)


def _largest(tree: Source) -> int:
    """Returns how many bytes a file may have, packed or not."""
    return VOLUME_START + WIDEST * tree.voxels + VOLUME_TAIL


def _whole(tree: Source, name: str) -> IO[bytes]:
    """Opens the header of a pair, unpacked."""
    with tree.open(name, VOLUME_START) as stream:
        return settled(iter([read_up_to(_unpacked(stream), VOLUME_START)]), VOLUME_START, tree.shown(name))


def _checked(file: Path, voxels: int, start: bytes, mark: bytes) -> nibabel.Nifti1Header:
    """Returns the header of a volume after a check of the sizes in it.

    Raises:
        BadFile: it is no single volume, has too many voxels, or voxels that are neither real numbers nor colours.
    """
    if len(start) < HEADER:
        raise BadFile(Problem(file, "is cut off, or no NIfTI volume", AGAIN))
    if SECOND in (int.from_bytes(start[:4], order) for order in ("little", "big")):
        raise BadFile(Problem(file, "is NIfTI-2", "Save it as NIfTI-1"))
    if start[344:347] != mark:
        what = "has no header of NIfTI (that of Analyze does not say where voxels lie)"
        raise BadFile(Problem(file, what, "Convert it to .nii.gz"))
    header = nibabel.Nifti1Header(start)
    shape, dtype, offset = header.get_data_shape(), header.get_data_dtype(), header.get_data_offset()
    wrong = ""
    if len(shape) < 2 or any(length != 1 for length in shape[3:]):
        sides = " x ".join(map(str, shape))
        wrong, remedy = f"has {len(shape)} dimensions, {sides}", "Give one three-dimensional volume"
    elif min(shape) < 1:
        wrong, remedy = f"has {' x '.join(map(str, shape))} voxels", CORRECT
    elif math.prod(shape) > voxels:
        wrong, remedy = too_many(f"has {' x '.join(map(str, shape))} voxels", voxels)
    elif not _is_colour(dtype) and (dtype.kind not in "iuf" or dtype.itemsize > WIDEST):
        wrong = f"has voxels of {short(str(dtype))}"
        remedy = "Give whole or floating point numbers of at most 64 bits"
    elif not (HEADER if mark == SINGLE else 0) <= offset <= VOLUME_START:
        wrong, remedy = f"has voxels that start at byte {offset}; the limit is {VOLUME_START}", CORRECT
    if wrong:
        raise BadFile(Problem(file, wrong, remedy))
    return header


def _is_colour(dtype: np.dtype) -> bool:
    """Whether voxels have red, green and blue of 8 bits, and perhaps an opacity, which is left out."""
    return dtype.names is not None and dtype.names[:3] == tuple(COLOURS)


def _content(tree: Source, name: str, header: nibabel.Nifti1Header) -> IO[bytes]:
    """Opens the file of a volume's voxels, unpacked.

    Raises:
        BadFile: it has fewer bytes than its header says, or many more.
    """
    file = tree.shown(name)
    size = header.get_data_offset() + math.prod(header.get_data_shape()) * header.get_data_dtype().itemsize
    with tree.open(name, _largest(tree)) as packed:
        unpacked, stream = _unpacked(packed), None
        if unpacked is not packed:  # to the end, because the checksum is there
            stream = settled(iter(lambda: unpacked.read(MIB), b""), size + VOLUME_TAIL, file)
    stream = stream or tree.seekable(name, _largest(tree))
    there = stream.seek(0, 2)
    stream.seek(0)
    if there < size:
        raise BadFile(Problem(file, f"is cut off: it has {there} bytes, but its header says {size}", AGAIN))
    return stream


def _slices(file: Path, volume: Volume, voxels: Any) -> np.ndarray:
    """Returns the slices of a volume, which are read one layer of its own voxels after the other."""
    shape = tuple(volume.canonical[0][axis] for axis in AXES[volume.axis][0])
    colour = _is_colour(voxels.dtype)
    pixels = room((*shape, 3), np.uint8) if colour else room(shape, np.float32)
    placed = [volume.placed(pixels[..., c]) for c in range(3)] if colour else [volume.placed(pixels)]
    for number in range(volume.shape[2]):
        with guarded(file, "is not a readable NIfTI volume"):
            layer = np.asanyarray(voxels[..., number])
        if colour:
            for values, name in zip(placed, COLOURS, strict=True):
                values[..., number] = layer[name]
            continue
        if np.isnan(layer).any():
            remedy = "Set them to 0, for example with `fslmaths` and its option -nan, if they are outside of the body"
            raise BadFile(Problem(file, "has voxels without a value (NaN)", remedy))
        if not finite(layer):
            raise BadFile(Problem(file, "has values that are not finite, or huge", CORRECT))
        placed[0][..., number] = layer
    return pixels
