"""Small DICOM series with masks, NIfTI volumes, and pictures that Pillow cannot write, as a hospital has them."""

import io
import struct
import zlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import nibabel
import numpy as np
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.uid import (
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    EnhancedCTImageStorage,
    ExplicitVRLittleEndian,
    RTStructureSetStorage,
    generate_uid,
)

SHAPE = (64, 32)
SPACING, APART = (0.5, 0.8), 3.0  # mm between rows and columns, and between slices


def _dataset(kind: str, patient: str, study: str, series: str) -> Dataset:
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = kind
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = generate_uid()
    dataset.PatientID, dataset.PatientName, dataset.PatientBirthDate, dataset.PatientSex = patient, "A^B", "", ""
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID, dataset.StudyID = study, series, "1"
    dataset.StudyDate = dataset.StudyTime = dataset.AccessionNumber = dataset.ReferringPhysicianName = ""
    return dataset


def series(
    folder: Path,
    patient: str = "P1",
    slices: int = 4,
    lying: Sequence[float] = (1, 0, 0, 0, 1, 0),
    step: Sequence[float] = (0, 0, APART),
) -> list[Dataset]:
    """Writes a CT series whose files are named against the order of the slices; returns it in the order of the slices.

    A slice is 0 HU, 2 HU more per slice, with a square of 100 HU more (`square`).

    Args:
        lying: directions of a slice's rows and columns in the patient; by default rows run to the left, columns to the back.
        step: from one slice to the next, in mm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    study, uid, frame = generate_uid(), generate_uid(), generate_uid()
    made = []
    for number in range(slices):
        dataset = _dataset(CTImageStorage, patient, study, uid)
        dataset.Modality, dataset.SeriesNumber, dataset.InstanceNumber = "CT", 7, slices - number
        dataset.FrameOfReferenceUID, dataset.PositionReferenceIndicator = frame, ""
        dataset.ImageOrientationPatient = [round(float(part), 9) for part in lying]
        dataset.ImagePositionPatient = [round(float(value), 9) for value in np.array([-10, -20, 5]) + number * np.array(step)]
        dataset.PixelSpacing, dataset.SliceThickness = list(SPACING), APART
        dataset.Rows, dataset.Columns = SHAPE
        dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
        dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 16, 15, 1
        dataset.RescaleIntercept, dataset.RescaleSlope = -1000, 2
        units = np.zeros(SHAPE) + 2 * number + np.random.default_rng([0, number]).integers(0, 4, SHAPE) * 2
        units[square(number)] += 100
        dataset.PixelData = ((units + 1000) / 2).astype("<i2").tobytes()
        dataset.save_as(folder / f"{slices - number}.dcm", enforce_file_format=True)
        made.append(dataset)
    return made


def deflated(folder: Path) -> tuple[bytes, bytes]:
    """Writes a series of one slice; returns what a file begins with that is deflated behind it, and the rest of this one."""
    (image,) = series(folder, slices=1)
    whole, start = (io.BytesIO() for _ in range(2))
    for stream, syntax in ((whole, ExplicitVRLittleEndian), (start, DeflatedExplicitVRLittleEndian)):
        image.file_meta.TransferSyntaxUID = syntax
        image.save_as(stream, enforce_file_format=True)
    end = [144 + struct.unpack("<L", each.getvalue()[140:144])[0] for each in (whole, start)]  # (0002,0000) and what it counts
    return start.getvalue()[: end[1]], whole.getvalue()[end[0] :]


def square(number: int) -> tuple[slice, slice]:
    """The rows and columns of the structure on a slice."""
    return slice(4, 12 + 2 * number), slice(6, 20)


def contours(
    file: Path, images: Sequence[Dataset], corners: Sequence[tuple[int, Sequence[tuple[float, float]]]], name: str = "lesion"
) -> None:
    """Writes an RTSTRUCT of polygons: (slice, [(row, column), ...]), in pixels whose centres have whole coordinates."""
    first = images[0]
    dataset = _dataset(RTStructureSetStorage, first.PatientID, first.StudyInstanceUID, generate_uid())
    dataset.Modality, dataset.StructureSetLabel = "RTSTRUCT", "test"
    referenced, study, frame, roi, drawn = Dataset(), Dataset(), Dataset(), Dataset(), Dataset()
    referenced.SeriesInstanceUID = first.SeriesInstanceUID
    study.RTReferencedSeriesSequence = [referenced]
    frame.FrameOfReferenceUID, frame.RTReferencedStudySequence = first.FrameOfReferenceUID, [study]
    dataset.ReferencedFrameOfReferenceSequence = [frame]
    roi.ROINumber, roi.ROIName, roi.ReferencedFrameOfReferenceUID = 3, name, first.FrameOfReferenceUID
    dataset.StructureSetROISequence = [roi]
    drawn.ReferencedROINumber, drawn.ContourSequence = 3, []
    for place, polygon in corners:
        contour = Dataset()
        contour.ContourGeometricType, contour.NumberOfContourPoints = "CLOSED_PLANAR", len(polygon)
        start = np.array(images[place].ImagePositionPatient, float)
        across, down = np.array(images[place].ImageOrientationPatient, float).reshape(2, 3)
        points = [start + col * SPACING[1] * across + row * SPACING[0] * down for row, col in polygon]
        contour.ContourData = [round(float(value), 9) for point in points for value in point]
        drawn.ContourSequence.append(contour)
    dataset.ROIContourSequence = [drawn]
    file.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(file, enforce_file_format=True)


def nifti(file: Path, voxels: np.ndarray, affine: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), file)


def enhanced(file: Path, images: Sequence[Dataset], order: Sequence[int]) -> Dataset:
    """Writes a series as one enhanced file, whose frames are its slices in another order; returns it."""
    made = deepcopy(images[0])
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = EnhancedCTImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = generate_uid()
    made.NumberOfFrames = len(order)
    shared, lying, sized, scaled = Dataset(), Dataset(), Dataset(), Dataset()
    lying.ImageOrientationPatient = made.ImageOrientationPatient
    sized.PixelSpacing, sized.SliceThickness = made.PixelSpacing, made.SliceThickness
    scaled.RescaleIntercept, scaled.RescaleSlope = made.RescaleIntercept, made.RescaleSlope
    shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = [lying], [sized]
    shared.PixelValueTransformationSequence = [scaled]
    frames = []
    for number in order:
        frame, placed = Dataset(), Dataset()
        placed.ImagePositionPatient = images[number].ImagePositionPatient
        frame.PlanePositionSequence = [placed]
        frames.append(frame)
    made.SharedFunctionalGroupsSequence, made.PerFrameFunctionalGroupsSequence = [shared], frames
    for keyword in ("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing", "RescaleIntercept", "RescaleSlope"):
        del made[keyword]
    made.PixelData = b"".join(images[number].PixelData for number in order)
    file.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(file, enforce_file_format=True)
    return made


def deep_png(file: Path, pixels: np.ndarray) -> None:
    """Writes uint16 pixels (H, W, channels) as a PNG of 16 bits: grey with transparency (2), RGB (3) or RGBA (4)."""
    rows = [line.astype(">u2").tobytes() for line in pixels]
    _png(file, pixels.shape, 16, {2: 4, 3: 2, 4: 6}[pixels.shape[2]], rows)


def shallow_png(file: Path, values: np.ndarray, bits: int) -> None:
    """Writes grey values (H, W) as a PNG of 2 or 4 bits."""
    _png(file, values.shape, bits, 0, packed_rows(values, bits))


def packed_rows(values: np.ndarray, bits: int) -> list[bytes]:
    """Returns the rows of values (H, W) of so many bits, without gaps between them."""
    digits = np.unpackbits(values.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return [np.packbits(row).tobytes() for row in digits.reshape(len(values), -1)]


def _png(file: Path, shape: tuple[int, ...], bits: int, kind: int, rows: list[bytes]) -> None:
    lines = b"".join(b"\0" + row for row in rows)  # 0: no filter
    header = struct.pack(">IIBBBBB", shape[1], shape[0], bits, kind, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    packed = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
