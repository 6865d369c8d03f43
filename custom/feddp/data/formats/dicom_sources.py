"""The images of a series as the sources of a SEG: complete where anonymised files lack something, and equal where they differ
only in how a number was rounded."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydicom import DataElement, Dataset
from pydicom.charset import default_encoding
from pydicom.filebase import DicomIO
from pydicom.filewriter import write_data_element
from pydicom.uid import UID
from pydicom.valuerep import DA, TM

from feddp.data.formats.attributes import given, lacking, text_of, value_of
from feddp.data.formats.dicom_series import EXPORT, PLACE, Series, is_placed, require_placed
from feddp.errors import BadFile, Problem

CHARACTERS = "ISO_IR 192"  # of a SEG: UTF-8, whatever its images have
# of a patient and a study: attributes that are there, but may be empty (PS3.3 C.7.1.1 and C.7.2.1)
_TEXTS = ("PatientID", "PatientName", "AccessionNumber", "StudyID", "ReferringPhysicianName")
_DATES = {"PatientBirthDate": DA, "StudyDate": DA, "StudyTime": TM}
_SEXES = ("M", "F", "O")
_UIDS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
_PIXELS = 0x7FE0  # a group
_PRINTED = ("LO", "LT", "PN", "SH", "ST", "UC", "UT")  # what is written in a file's own characters


def sources_of(series: Series, thickness: float | None) -> list[Dataset]:
    """Returns the files of a series, without pixels, with all that a SEG takes from its images.

    Attributes of the patient and the study that are missing, or that are not what DICOM allows, are empty. Of slices, spacing
    and directions are those of the first one, and so is the thickness, in mm; it is empty if it is not known.

    Raises:
        BadFile: a file lacks a UID, or has that of another slice; a slice that lies somewhere lacks a frame of reference, or
            one of several does not say where it lies. Names the file and the attribute.
    """
    files = list(zip(series.slices, series.files, strict=True)) if series.file is None else [(series.file, series.files[0])]
    first, seen, placed = files[0][0], dict[str, Path](), all(map(is_placed, series.slices))
    if len(series.slices) > 1:
        require_placed(series)
    for dataset, file in files:
        wanted = (*_UIDS, "FrameOfReferenceUID") if placed else _UIDS
        for keyword in wanted:
            if not UID(text_of(dataset, keyword)).is_valid:
                raise lacking(file, dataset, keyword)
        if (other := seen.setdefault(text_of(dataset, "SOPInstanceUID"), file)) is not file:
            raise BadFile(Problem(file, f"has the SOPInstanceUID of {other}", EXPORT))
    described = _described(first)
    described.SliceThickness = thickness
    if not placed:  # as an X-ray
        for keyword in (*PLACE, "FrameOfReferenceUID"):
            described.pop(keyword, None)
    return [described if dataset is first else _slice(dataset, described) for dataset, _ in files]


def _described(first: Dataset) -> Dataset:
    """Returns what can be written of the first file, completed."""
    made = Dataset()
    for tag in first.keys():  # noqa: SIM118 - of a Dataset, only keys() decodes nothing
        if tag.group < _PIXELS and not tag.is_private and (element := _written(first, tag)) is not None:
            made.add(element)
    for keyword in _TEXTS:
        setattr(made, keyword, text_of(made, keyword))
    for keyword, kind in _DATES.items():
        setattr(made, keyword, _moment(made, keyword, kind))
    sex = text_of(made, "PatientSex").upper()
    made.PatientSex, made.Modality = sex if sex in _SEXES else "", text_of(made, "Modality") or "OT"
    made.SpecificCharacterSet = CHARACTERS
    made.file_meta = first.file_meta
    return made


def _written(dataset: Dataset, tag: Any) -> DataElement | None:
    """Returns an element with its text decoded; None if it cannot be read, or not be written again."""
    try:
        element: DataElement = dataset[tag]
        if element.VR in _PRINTED and element.value is not None:
            values = element.value if element.VM > 1 else [element.value]
            element = DataElement(tag, element.VR, [str(value) for value in values] if element.VM > 1 else str(values[0]))
        stream = DicomIO(io.BytesIO())
        stream.is_little_endian, stream.is_implicit_VR = True, False
        write_data_element(stream, element, ["utf-8" if element.VR in _PRINTED else default_encoding])
    except Exception:  # a value may be anything that its file holds
        return None
    return element


def _moment(dataset: Dataset, keyword: str, kind: type) -> Any:
    """Returns a date or a time; "" if it is none."""
    try:
        return kind(text_of(dataset, keyword)) or ""
    except ValueError:
        return ""


def _slice(dataset: Dataset, first: Dataset) -> Dataset:
    made = Dataset()
    made.update(first)
    for keyword in ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "ImagePositionPatient"):
        if given(dataset, keyword):
            made[keyword] = dataset[keyword]  # not its value alone: the element is the first file's
    made.file_meta = dataset.file_meta
    return made


def thickness_of(slices: Sequence[Dataset], apart: float | None) -> float | None:
    """Returns the thickness of slices in mm: what the first one says, else their distance; None if neither is known."""
    said = value_of(slices[0], "SliceThickness")
    return float(said) if isinstance(said, int | float) and 0 < said < 1e4 else apart
