"""Reads DICOM series: one file per slice, sorted by their position in the patient."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from pydicom import Dataset
from pydicom.encaps import get_frame
from pydicom.filereader import read_dataset, read_partial, read_preamble
from pydicom.pixels.processing import apply_modality_lut
from pydicom.pixels.utils import pixel_array
from pydicom.tag import BaseTag
from pydicom.uid import DeflatedExplicitVRLittleEndian, RLELossless

from feddp.data.formats.guarded import guarded
from feddp.data.formats.scan import Scan, finite, known
from feddp.data.formats.unpacked import require_rle
from feddp.data.pixels import require_scans
from feddp.data.prepare.source import Source, read_up_to
from feddp.errors import BadFile, Problem
from feddp.limits import DICOM_BYTES, HEAD_BYTES, IMAGE_PIXELS, SERIES_BYTES, VOXELS
from feddp.reading import amount

SEG, CONTOURS = "SEG", "RTSTRUCT"  # modalities that hold masks
_SYNTAX, _META, _PIXELS = 0x00020010, 2, 0x7FE0  # an element, and groups
BROKEN = "is not a readable DICOM file"
UNEVEN = 0.01  # relative difference between two distances of slices that count as equal


@dataclass(frozen=True)
class Header:
    """What groups the files of a source into series."""

    name: str
    series: str
    modality: str
    patient: str
    number: int
    instance: int


@dataclass(frozen=True)
class Series:
    """The files of a series, in the order of its slices."""

    slices: tuple[Dataset, ...]

    @property
    def series(self) -> str:
        return str(self.slices[0].SeriesInstanceUID)


def is_dicom(tree: Source, name: str) -> bool:
    """Whether a file has DICOM's mark after its preamble."""
    with tree.open(name, DICOM_BYTES) as stream:
        return read_up_to(stream, 132)[128:] == b"DICM"


def read_header(tree: Source, name: str) -> Header:
    """Returns what a file says of its series; raises InputError if it is not DICOM. Names the file."""
    dataset = load(tree, name, pixels=False)
    with guarded(tree.shown(name), BROKEN):  # pydicom decodes an element when it is asked for
        series = str(dataset.get("SeriesInstanceUID") or "")
        if not series:
            raise BadFile(Problem(tree.shown(name), "has no SeriesInstanceUID", "Export the series again"))
        number, instance = (_whole(dataset, key) for key in ("SeriesNumber", "InstanceNumber"))
        return Header(name, series, str(dataset.get("Modality") or ""), str(dataset.get("PatientID") or ""), number, instance)


def load(tree: Source, name: str, pixels: bool = True) -> Dataset:
    """Returns a file's data set up to its pixels, without these if they are not asked for, and without what is behind them.

    Raises:
        InputError: the file is too large or broken, or compressed as a whole, so that its size is unknown. Names the file.
    """
    return _parsed(tree, name, tree.read(name, DICOM_BYTES), pixels)


def _parsed(tree: Source, name: str, content: bytes, pixels: bool) -> Dataset:
    with guarded(tree.shown(name), BROKEN):
        stream = io.BytesIO(content)
        read_preamble(stream, force=False)
        meta = read_dataset(stream, False, True, stop_when=lambda tag, vr, length: tag.group != _META)
        syntax = meta.get(_SYNTAX)
        if syntax is not None and syntax.value == DeflatedExplicitVRLittleEndian:
            raise BadFile(Problem(tree.shown(name), "is a deflated DICOM file", "Export it without this compression"))
        reached: list[int] = []

        def at_pixels(tag: BaseTag, vr: str | None, length: int) -> bool:
            if tag.group >= _PIXELS:
                reached.append(tag)
            return bool(reached)

        # an element of eight bytes takes hundreds in memory: these are counted first
        dataset = read_partial(io.BytesIO(content[:HEAD_BYTES]), at_pixels)
        if len(content) > HEAD_BYTES and not reached:
            what = f"has more than {amount(HEAD_BYTES)} besides pixels, which is the limit"
            raise BadFile(Problem(tree.shown(name), what, "Leave out the structures that are no class"))
        return read_partial(io.BytesIO(content), lambda tag, vr, length: tag.group > _PIXELS) if pixels else dataset


def read_series(tree: Source, names: Sequence[str]) -> Scan:
    """Returns the images of a series as slices, in the units of its modality, such as Hounsfield units.

    Slices are sorted along their normal if the files say where they lie; several files that do not say so are no volume.

    Raises:
        InputError: a file is broken, too large, or holds several frames; or the files differ in size, orientation or spacing,
            or two of them lie at one place. Names a file.
    """
    files: list[tuple[Dataset, str]] = []
    left = SERIES_BYTES
    for name in names:
        content = tree.read(name, DICOM_BYTES)
        left -= len(content)
        if left < 0:
            raise BadFile(Problem(tree.shown(name), f"is of a series of more than {amount(SERIES_BYTES)}", "Give fewer files"))
        files.append((_parsed(tree, name, content, pixels=True), name))
    with guarded(tree.shown(names[0]), "is of a series that is not readable"):
        return _series(tree, files)


def _series(tree: Source, files: list[tuple[Dataset, str]]) -> Scan:
    for dataset, name in files:
        _require_size(tree, name, dataset, len(files))
    first, name = files[0]
    for dataset, other in files[1:]:
        if any(dataset.get(key) != first.get(key) for key in ("Rows", "Columns", "SamplesPerPixel", "PixelSpacing")):
            what = f"differs from {name} in size, channels or spacing"
            raise BadFile(Problem(tree.shown(other), what, "Put each series into a folder of its own"))
    placed = _positions(tree, files)
    if placed is not None:
        order = np.argsort(placed, kind="stable")
        files, placed = [files[i] for i in order], placed[order]
        if len(placed) > 1 and (np.diff(placed) < 1e-3).any():
            twin = files[int(np.argmin(np.diff(placed))) + 1][1]
            raise BadFile(Problem(tree.shown(twin), "lies at the place of another slice", "Keep one image of each place"))
    pixels = np.stack([_pixels(tree, name, dataset) for dataset, name in files])
    spacing = first.get("PixelSpacing") or first.get("ImagerPixelSpacing")
    mm = (float(spacing[0]), float(spacing[1])) if spacing is not None and len(spacing) == 2 else None
    origin = Series(tuple(dataset for dataset, _ in files))
    return Scan(pixels, mm if mm and known(*mm) else None, _apart(placed), placed is not None, origin)


def axes(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the unit vectors in the patient along a row (to the next column), along a column, and along the slices."""
    row, column = np.array(dataset.ImageOrientationPatient, float).reshape(2, 3)
    return row, column, np.cross(row, column)


def _positions(tree: Source, files: Sequence[tuple[Dataset, str]]) -> np.ndarray | None:
    """Returns the slices' positions along their normal in millimetres; None if a file does not say where it lies."""
    if any("ImagePositionPatient" not in d or "ImageOrientationPatient" not in d for d, _ in files):
        return None
    turned = [np.abs(np.subtract(axes(d), axes(files[0][0]))).max() > 1e-3 for d, _ in files]
    if any(turned):
        what = f"lies in another plane than {files[0][1]}"
        raise BadFile(Problem(tree.shown(files[turned.index(True)][1]), what, "Leave localizers out of the folder"))
    placed = np.array([float(np.dot(np.array(d.ImagePositionPatient, float), axes(d)[2])) for d, _ in files])
    if not finite(placed):
        lost = files[int(np.isfinite(placed).argmin())][1]
        raise BadFile(Problem(tree.shown(lost), "lies at a place that is no number", "Export the series again"))
    return placed


def _apart(placed: np.ndarray | None) -> float | None:
    if placed is None or len(placed) < 2:
        return None
    steps = np.diff(placed)
    even = all(abs(a - b) <= UNEVEN * a for a, b in pairwise(steps))
    distance = round(float(steps.mean()), 6)  # positions are decimal texts
    return distance if even and known(distance) else None


def _require_size(tree: Source, name: str, dataset: Dataset, slices: int) -> None:
    rows, columns, frames = (_whole(dataset, key) for key in ("Rows", "Columns", "NumberOfFrames"))
    samples = _whole(dataset, "SamplesPerPixel") or 1
    wrong = ""
    if "PixelData" not in dataset or rows < 1 or columns < 1:
        wrong, remedy = "holds no image", "Leave it out of the folder"
    elif frames > 1:
        wrong, remedy = f"holds {frames} frames", "Save one image per file"
    elif rows * columns > IMAGE_PIXELS or (slices > 1 and rows * columns * slices > VOXELS):
        wrong, remedy = f"is one of {slices} images of {columns} x {rows} pixels, too many", "Give fewer, or scale them down"
    elif samples not in (1, 3):
        wrong, remedy = f"has {samples} channels", "Save it with one or three"
    if wrong:
        raise BadFile(Problem(tree.shown(name), wrong, remedy))


def _whole(dataset: Dataset, key: str) -> int:
    value = dataset.get(key)
    return int(value) if isinstance(value, int | float) else 0


def _pixels(tree: Source, name: str, dataset: Dataset) -> np.ndarray:
    """Returns uint8 as stored, or float32 in the modality's units; black is low, whatever the file's photometry."""
    with guarded(tree.shown(name), "has no readable pixels"):
        syntax = dataset.file_meta.TransferSyntaxUID
        if syntax.is_compressed and syntax != RLELossless:
            require_scans(tree.shown(name), dataset.PixelData)
        if syntax == RLELossless:
            size = int(dataset.Rows * dataset.Columns * dataset.SamplesPerPixel * dataset.BitsAllocated) // 8
            require_rle(tree.shown(name), get_frame(dataset.PixelData, 0, number_of_frames=1), size)
        values: np.ndarray = pixel_array(dataset)
        if dataset.get("PhotometricInterpretation") == "MONOCHROME1":
            values = (1 << int(dataset.BitsStored)) - 1 - values.astype(np.int32)
        if values.ndim == 2:
            values = np.asarray(apply_modality_lut(values, dataset))
        if not finite(values):
            raise BadFile(Problem(tree.shown(name), "has values that are not finite, or huge", "Export the series again"))
        return values if values.dtype == np.uint8 else values.astype(np.float32)
