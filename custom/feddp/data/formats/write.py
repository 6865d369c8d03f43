"""Writes predicted masks: PNG, overlays, NIfTI with the affine of the image, DICOM SEG that refers to its series."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from feddp.data.formats.find import DICOM, NIFTI, PICTURE, FoundImage
from feddp.data.formats.guarded import guarded
from feddp.data.formats.scan import Scan
from feddp.data.pixels import write_png

# of classes 1, 2, ...; these repeat (Okabe and Ito, 2008: colours that colour-blind people tell apart)
COLOURS = np.array([(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)])
OPACITY = 0.4
_TEXTS = ("data_type", "db_name", "descrip", "aux_file", "intent_name")  # of a NIfTI header
MAKER, VERSION = "FedDP", "0.1.0"  # of this package
SCHEME = "99FEDDP"  # a private coding scheme: DICOM has no code for a class of the user's
SERIES_NUMBER = 900  # of the segmentation; scanners number from 1

Write = Callable[[Path, FoundImage, Scan, np.ndarray, Sequence[str], str], list[Path]]


def write_pngs(
    folder: Path, entry: FoundImage, scan: Scan, mask: np.ndarray, classes: Sequence[str], labels: str
) -> list[Path]:
    """Writes one PNG per slice: uint8 values of 0 to C."""
    return [_written(folder / f"{name}.png", each) for name, each in zip(names(entry, mask), mask, strict=True)]


def write_nifti(
    folder: Path, entry: FoundImage, scan: Scan, mask: np.ndarray, classes: Sequence[str], labels: str
) -> list[Path]:
    """Writes one volume of the image's own voxels and header, with uint8 values of 0 to C.

    The header's texts and extensions are left out: converters write names and whole DICOM headers there.
    """
    source = scan.origin.image
    header = source.header.copy()
    header.set_data_dtype(np.uint8)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0
    for name in _TEXTS:
        header[name] = b""
    header.extensions.clear()
    file = folder / f"{entry.name}.nii.gz"
    nibabel.save(nibabel.Nifti1Image(scan.origin.voxels_of(mask), source.affine, header), file)
    return [file]


def write_seg(folder: Path, entry: FoundImage, scan: Scan, mask: np.ndarray, classes: Sequence[str], labels: str) -> list[Path]:
    """Writes a binary DICOM SEG with one segment per class; of nested classes, a segment holds those inside it.

    Raises:
        BadFile: the series lacks what a SEG needs, such as a study or a frame of reference.
    """
    file = folder / f"{entry.name}.dcm"
    values = np.arange(1, len(classes) + 1)
    maps = mask[..., None] >= values if labels == "nested" else mask[..., None] == values  # (S, H, W, C)
    with guarded(scan.origin.files[0], "cannot have a DICOM SEG", "Use --format png"):
        made = _segmentation(scan, scan.origin.as_in_files(maps.astype(np.uint8)), classes)
        made.save_as(file)
    return [file]


def _segmentation(scan: Scan, maps: np.ndarray, classes: Sequence[str]) -> Any:
    from highdicom import AlgorithmIdentificationSequence, PixelMeasuresSequence, PlaneOrientationSequence
    from highdicom.seg import Segmentation, SegmentDescription
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code
    from pydicom.uid import generate_uid

    from feddp.data.formats.dicom_series import axes, is_placed, spacing_of
    from feddp.data.formats.dicom_sources import CHARACTERS, sources_of, thickness_of

    algorithm = AlgorithmIdentificationSequence(MAKER, codes.DCM.ArtificialIntelligence, VERSION)
    described = [
        SegmentDescription(
            number,
            name[:64],  # DICOM's limit of a long string
            codes.SCT.SpatialAndRelationalConcept,
            Code(f"CLASS{number}", SCHEME, name[:64]),
            "AUTOMATIC",
            algorithm,
        )
        for number, name in enumerate(classes, 1)
    ]
    origin = scan.origin
    first, thickness = origin.slices[0], thickness_of(origin.slices, scan.apart)
    placed: dict[str, Any] = {}
    if is_placed(first):
        row, column, _ = axes(first)
        placed["plane_orientation"] = PlaneOrientationSequence("PATIENT", [*row, *column])
        placed["pixel_measures"] = PixelMeasuresSequence(spacing_of(origin.files[0], first), thickness)
    return Segmentation(
        source_images=sources_of(origin, thickness),
        pixel_array=maps,
        segmentation_type="BINARY",
        segment_descriptions=described,
        series_instance_uid=generate_uid(),
        series_number=SERIES_NUMBER,
        series_description=f"{MAKER} segmentation",
        sop_instance_uid=generate_uid(),
        instance_number=1,
        manufacturer=MAKER,
        manufacturer_model_name=MAKER,
        software_versions=VERSION,
        device_serial_number="0",
        specific_character_set=CHARACTERS,
        **placed,
    )


def write_overlays(folder: Path, entry: FoundImage, pixels: np.ndarray, mask: np.ndarray) -> None:
    """Writes an RGB PNG per slice, the image under the coloured classes. pixels: uint8 (S, H, W) or (S, H, W, 3)."""
    for name, image, each in zip(names(entry, mask), pixels, mask, strict=True):
        under = (image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=-1)).astype(float)
        over = COLOURS[(each.astype(int) - 1) % len(COLOURS)]
        mixed = np.where(each[..., None] > 0, (1 - OPACITY) * under + OPACITY * over, under)
        _written(folder / f"{name}.png", np.rint(mixed).astype(np.uint8))


def names(entry: FoundImage, slices: np.ndarray) -> list[str]:
    """Returns the names of an entry's slices; a picture has its own."""
    return [entry.name] if entry.kind == PICTURE else [f"{entry.name}_{number:03d}" for number in range(len(slices))]


def _written(file: Path, pixels: np.ndarray) -> Path:
    write_png(file, pixels)
    return file


# format: what writes it, and the kinds of images that can have it
WRITERS: dict[str, tuple[Write, tuple[str, ...]]] = {
    "png": (write_pngs, (PICTURE, NIFTI, DICOM)),
    "nifti": (write_nifti, (NIFTI,)),
    "dicom-seg": (write_seg, (DICOM,)),
}
