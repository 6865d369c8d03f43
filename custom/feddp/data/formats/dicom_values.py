"""The stored values of a DICOM image as values in the units of its modality, and which of them are no part of the image."""

from pathlib import Path

import numpy as np
from pydicom import Dataset
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut

from feddp.data.formats.attributes import given, number_of, text_of
from feddp.data.formats.codec import JPEG_2000
from feddp.data.formats.decoding import CODECS
from feddp.data.formats.dicom import whole

_SCALE = ("RescaleSlope", "RescaleIntercept")


def in_units(file: Path, dataset: Dataset, frame: Dataset, stored: np.ndarray) -> np.ndarray:
    """Returns a frame's stored values (H, W, ...) as uint8 if they are that, else as numbers in the modality's units.

    Black is low, whatever the file's photometry.

    Raises:
        BadFile: the units are said in part. Names `file`.
    """
    photometry, stored = text_of(dataset, "PhotometricInterpretation"), _used_bits(dataset, stored)
    if photometry == "PALETTE COLOR":
        coloured = apply_color_lut(stored, dataset)
        if coloured.dtype != np.uint8 and not _is_low(dataset):
            coloured = coloured >> 8
        return coloured.astype(np.uint8)
    if stored.ndim == 3:
        return stored
    if photometry == "MONOCHROME1":  # white is the least value that BitsStored bits can hold
        white = -1 if stored.dtype.kind == "i" else (1 << int(dataset.BitsStored)) - 1
        stored = (white - stored.astype(np.int64)).astype(stored.dtype)
    _require_rescale(file, frame)
    units = apply_modality_lut(stored, frame)
    return stored if stored.dtype == np.uint8 and (units == stored).all() else units


def _is_low(dataset: Dataset) -> bool:
    """Whether a palette of 16-bit values holds no more than 8 bits: then these are the low ones."""
    count, first, _ = dataset.RedPaletteColorLookupTableDescriptor
    every = np.arange(first, first + (count or 1 << 16))
    return int(apply_color_lut(every, dataset).max()) < 256


def scaled_by(frame: Dataset) -> tuple[str, ...]:
    """Returns the attributes that say in which units a frame's values are; none if it has those of its device."""
    return tuple(keyword for keyword in ("ModalityLUTSequence", *_SCALE) if given(frame, keyword))


def _require_rescale(file: Path, frame: Dataset) -> None:
    """Raises BadFile if a slope or an intercept is missing beside the other, or is no number; drops both if both are empty."""
    said = set(scaled_by(frame)) & {*_SCALE}
    for keyword in _SCALE if said else ():
        number_of(file, frame, keyword)
    for keyword in () if said else _SCALE:
        frame.pop(keyword, None)


def without_padding(file: Path, dataset: Dataset, stored: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns values as uint8 or float32, as a masked array if there is padding: where the stored ones are padding.

    Padding has no value in units. It is compared with all bits of a stored value, and with those in use.
    """
    values = values if values.dtype == np.uint8 else values.astype(np.float32)
    if values.ndim == 2 and given(dataset, "PixelPaddingValue"):
        padding = _padding(file, dataset, stored) | _padding(file, dataset, _used_bits(dataset, stored))
        return np.ma.array(values, mask=padding)
    return values


def _used_bits(dataset: Dataset, stored: np.ndarray) -> np.ndarray:
    """Returns values without the bits of their words that hold none: they may hold an overlay, or anything.

    HighBit counts where words are stored as they are, or by run lengths. JPEG 2000 says itself how many bits its values have.
    """
    words, bits, high = 8 * stored.itemsize, whole(dataset, "BitsStored"), whole(dataset, "HighBit")
    codec, _ = CODECS.get(str(dataset.file_meta.TransferSyntaxUID), (None, None))
    if codec == JPEG_2000 or stored.dtype.kind not in "iu" or not 0 < bits < words:
        return stored
    high = high if codec is None and bits - 1 <= high < words else bits - 1
    used: np.ndarray = (stored << (words - 1 - high)) >> (words - bits)  # of signed values, the sign is kept
    return used


def _padding(file: Path, dataset: Dataset, stored: np.ndarray) -> np.ndarray:
    """Returns which stored values are padding (PS3.3 C.7.5.1.1.2): one value, or a range whose bounds belong to it.

    The bounds may be written as signed where the values are not, or the other way round.
    """
    if stored.dtype.kind not in "iu":
        return np.zeros(stored.shape, bool)
    keywords = ("PixelPaddingValue", "PixelPaddingRangeLimit")
    bounds = [int(number_of(file, dataset, each)) for each in keywords if given(dataset, each)]
    own = np.array([bound % (1 << 8 * stored.itemsize) for bound in bounds], np.uint64).astype(stored.dtype)
    padding: np.ndarray = (stored >= own.min()) & (stored <= own.max())
    return padding
