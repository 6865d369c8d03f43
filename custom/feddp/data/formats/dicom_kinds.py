"""What a DICOM file of an exported study is: an image, a mask of one, or something that accompanies images."""

import re

from pydicom import Dataset
from pydicom.uid import UID, RTImageStorage, RTStructureSetStorage, SegmentationStorage, SurfaceSegmentationStorage

from feddp.data.formats.attributes import given, text_of

SEG, CONTOURS = "SEG", "RTSTRUCT"  # modalities that hold masks
_LABEL_MAP = "1.2.840.10008.5.1.4.1.1.66.7"  # the class of segmentations as maps of labels
_MASKS = {SegmentationStorage: SEG, _LABEL_MAP: SEG, RTStructureSetStorage: CONTOURS}
_VOLUMES = "Enhanced US Volume Storage"  # the one class of images that is not called so
# modalities of no image (PS3.3 C.7.3.1.1.1), for files that do not say their class, or a private one
_OTHERS = {
    **{"RTPLAN": "RT Plan", "RTDOSE": "RT Dose", "RTRECORD": "RT Treatment Record", "RTINTENT": "RT Physician Intent"},
    **{"SR": "SR", "KO": "Key Object Selection", "PR": "Presentation State", "DOC": "Encapsulated Document"},
    **{"REG": "Registration", "FID": "Fiducials", "PLAN": "Plan", "RWV": "Real World Value Map", "ECG": "Waveform"},
    **{"M3D": "Model", "AU": "Audio", "HD": "Waveform", "EPS": "Waveform", "EEG": "Waveform", "SMR": "Relationship"},
}
_SCOUTS = re.compile(r"\b(locali[sz]ers?|scouts?|topograms?|surview|scanogram)\b", re.IGNORECASE)
PRIVATE = "private data without an image"  # as scanners put beside their images
CAPTURE, SCOUT, PLANAR = "Secondary Capture", "localizer", "RT Image"


def mask_kind(dataset: Dataset) -> str:
    """Returns SEG or CONTOURS; "" if the file holds no masks."""
    modality, sort = text_of(dataset, "Modality").upper(), _class(dataset)
    return _MASKS.get(sort, modality if modality in (SEG, CONTOURS) and sort != SurfaceSegmentationStorage else "")


def other_kind(dataset: Dataset) -> str:
    """Returns what a file is that holds no image, such as a plan or a report; "" of one that does."""
    if mask_kind(dataset):
        return ""
    name = _class(dataset).name
    modality = text_of(dataset, "Modality").upper()
    if modality in _OTHERS:
        return _OTHERS[modality]
    if name and "Storage" not in name and not given(dataset, "Rows"):  # of unknown classes, it is the UID
        return PRIVATE
    if not name.endswith("Storage") or "Image Storage" in name or name == _VOLUMES:
        return ""
    return name.replace(" Storage", "")


def aside_kind(dataset: Dataset) -> str:
    """Returns what an image is that accompanies others of its study: a capture of a screen, a localizer; "" of others."""
    sort = _class(dataset)
    if "Secondary Capture" in sort.name:
        return CAPTURE
    if sort == RTImageStorage:
        return PLANAR
    if "LOCALIZER" in text_of(dataset, "ImageType").upper():
        return SCOUT
    described = f"{text_of(dataset, 'SeriesDescription')} {text_of(dataset, 'ProtocolName')}"
    return SCOUT if _SCOUTS.search(described.replace("_", " ")) else ""


def _class(dataset: Dataset) -> UID:
    return UID(text_of(dataset, "SOPClassUID"))
