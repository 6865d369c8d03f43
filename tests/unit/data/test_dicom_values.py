"""The values of DICOM slices: padding, bits that hold none, and what differs from slice to slice."""

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.uid import ImplicitVRLittleEndian, RLELossless

from feddp.data.formats.find import find
from feddp.data.formats.scan import eight_bits
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from support.scans import SHAPE, series

RAMP = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 200
PADDED = np.zeros(SHAPE, bool)
PADDED[:, :5] = PADDED[0] = True


def written(folder, pixels, **changes):
    """A series of one slice with these stored values; changes of None are deletions. The file is read again."""
    (image,) = series(folder, slices=1)
    image.BitsAllocated = image.BitsStored = 8 * pixels.itemsize
    image.PixelRepresentation, image.PixelData = int(pixels.dtype.kind == "i"), pixels.tobytes()
    image.RescaleSlope, image.RescaleIntercept = 1, 0
    for keyword, value in changes.items():
        delattr(image, keyword) if value is None else setattr(image, keyword, value)
    image.HighBit = changes.get("HighBit", image.BitsStored - 1)
    image.save_as(folder / "1.dcm", enforce_file_format=True)
    return read(folder)


def read(folder):
    tree = Source(folder)
    (entry,) = find(tree, folder.name).entries
    return entry.read(tree, "axial").pixels


def padded(kind, value):
    return np.where(PADDED, value, RAMP).astype(kind)


@pytest.mark.parametrize(
    ("pixels", "changes"),
    [
        (padded("<i2", -2000), {"PixelPaddingValue": -2000}),
        (padded("<i2", -2000), {"PixelPaddingValue": -2100, "PixelPaddingRangeLimit": -1900}),
        (padded("<i2", -2000), {"PixelPaddingValue": -2000, "PixelPaddingRangeLimit": -2100}),
        (padded("<u2", 65535), {"PixelPaddingValue": 65535}),
        (padded("<u2", 63536), {"PixelPaddingValue": 63535, "PixelPaddingRangeLimit": 65535}),
        (padded("<u2", 63536), {"PixelPaddingValue": 63536, "BitsStored": 12}),
        (padded("<u2", 4095), {"PixelPaddingValue": 4095, "BitsStored": 12}),
        (padded("<i2", -2000), {"PixelPaddingValue": -2000, "RescaleSlope": 3, "RescaleIntercept": -1024}),
        (padded("<u2", 4095), {"PixelPaddingValue": 4095, "BitsStored": 12, "PhotometricInterpretation": "MONOCHROME1"}),
        (padded("<u1", 255), {"PixelPaddingValue": 255, "RescaleSlope": 2}),
    ],
)
def test_padding_is_black_and_does_not_move_the_window(tmp_path, pixels, changes):
    """As a padded image has it, so the same image without padding, of the values of the others."""
    rest = np.where(PADDED, 100, RAMP).astype(pixels.dtype)
    plain = {key: value for key, value in changes.items() if not key.startswith("PixelPadding")}
    found, bare = written(tmp_path / "p", pixels, **changes), written(tmp_path / "b", rest, **plain)
    assert np.isnan(found[0]).sum() == PADDED.sum()
    assert (found[0][~PADDED] == bare[0][~PADDED]).all()
    within = bare[0][~PADDED]
    low, high = within.min(), np.quantile(within, 0.99)
    wanted = np.where(PADDED, 0, np.rint((bare[0] - low) / (high - low) * 255).clip(0, 255))
    assert (eight_bits(found, None)[0] == wanted).all()
    window = (float(within.min()) - 50, float(within.max()) + 50)
    assert (eight_bits(found, window)[0][PADDED] == 0).all()
    assert (eight_bits(found, window)[0][~PADDED] == eight_bits(bare, window)[0][~PADDED]).all()


@pytest.mark.parametrize("white", [True, False])
def test_padding_of_8_bits_becomes_black_and_other_values_stay(tmp_path, white):
    """In a window too: from -100 to 155, a value v becomes v + 100. MONOCHROME1 turns values, not padding."""
    changes = {"RescaleSlope": None, "RescaleIntercept": None} | ({} if white else {"PhotometricInterpretation": "MONOCHROME1"})
    written(tmp_path / "s", padded("<u1", 255), PixelPaddingValue=255, **changes)
    (entry,) = find(Source(tmp_path), tmp_path.name).entries
    found, wanted = entry.read(Source(tmp_path), "axial"), RAMP if white else 255 - RAMP
    assert not found.deep
    assert (found.eight_bits(None)[0] == np.where(PADDED, 0, wanted)).all()
    assert (found.eight_bits((-100, 155))[0] == np.where(PADDED, 0, np.minimum(wanted + 100, 255))).all()


@pytest.mark.parametrize("scaled", [0, 1])
def test_padding_counts_for_nothing_where_slices_of_8_bits_lie_beside_scaled_ones(tmp_path, scaled):
    images = series(tmp_path / "s", slices=2)
    for number, image in enumerate(images):
        image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 8, 8, 7, 0
        image.PixelData, image.PixelPaddingValue = padded("<u1", 255).tobytes(), 255
        image.RescaleIntercept, image.RescaleSlope = 0, 2 if number == scaled else 1
        image.save_as(tmp_path / f"s/{image.InstanceNumber}.dcm", enforce_file_format=True)
    wanted = np.stack([RAMP * (2 if number == scaled else 1) for number in range(2)])
    assert np.array_equal(read(tmp_path / "s"), np.where(PADDED, np.nan, wanted), equal_nan=True)


def test_padding_written_as_unsigned_beside_signed_values_and_without_types(tmp_path):
    """63536 is -2000 in 16 bits. In implicit files, the type follows from PixelRepresentation."""
    (image,) = series(tmp_path / "s", slices=1)
    image.PixelData, image.RescaleSlope, image.RescaleIntercept = padded("<i2", -2000).tobytes(), 1, 0
    for value, kind, syntax in ((63536, "US", None), (-2000, "SS", ImplicitVRLittleEndian)):
        image.add_new("PixelPaddingValue", kind, value)
        image.file_meta.TransferSyntaxUID = syntax or image.file_meta.TransferSyntaxUID
        image.save_as(tmp_path / "s/1.dcm", enforce_file_format=True)
        assert (np.isnan(read(tmp_path / "s")[0]) == PADDED).all()


def test_an_image_of_padding_alone_is_black(tmp_path):
    found = written(tmp_path / "s", np.full(SHAPE, 7, "<u2"), PixelPaddingValue=7)
    assert np.isnan(found).all()
    assert (eight_bits(found, None) == 0).all()


@pytest.mark.filterwarnings("ignore:Invalid value for VR DS")
def test_a_slope_that_is_no_number_is_not_taken_for_padding(tmp_path):
    with pytest.raises(FedDPError, match="1.dcm: has values that are not finite"):
        written(tmp_path / "s", padded("<i2", -2000), PixelPaddingValue=-2000, RescaleSlope="nan")


@pytest.mark.parametrize("kind", ["<u2", "<i2"])
@pytest.mark.parametrize("high", [11, 13])
def test_bits_that_hold_no_value_are_left_out(tmp_path, kind, high):
    """12 bits from bit 11 or 13 downwards; the others hold an overlay, of which the sign of 16 bits would be a part."""
    values = 20 * RAMP - 2000 if kind == "<i2" else 20 * RAMP
    stored = (values & 0xFFF) << (high - 11)
    overlay = np.where(PADDED, 0x8000, 0) | np.where(PADDED & (high == 13), 1, 0)
    found = written(tmp_path / "s", (stored | overlay).astype("<u2").view(kind), BitsStored=12, HighBit=high)
    assert (found[0] == values).all()
    image = dcmread(tmp_path / "s/1.dcm")
    image.compress(RLELossless)  # words with all their bits, too
    image.save_as(tmp_path / "s/1.dcm")
    assert (read(tmp_path / "s")[0] == values).all()


def test_windows_of_slices_play_no_part(tmp_path):
    images = series(tmp_path / "s")
    plain = read(tmp_path / "s")
    for number, image in enumerate(images):
        image.WindowCenter, image.WindowWidth = [40 + number, 300], [400, 1 + 100 * number]
        image.save_as(tmp_path / f"s/{image.InstanceNumber}.dcm", enforce_file_format=True)
    assert (read(tmp_path / "s") == plain).all()


def test_spacing_and_direction_rounded_in_another_place_are_one_series(tmp_path):
    """0.488281 mm beside 0.48828125, and a cosine that differs by 2e-7; a thousandth is allowed, two are not."""
    images = series(tmp_path / "s")
    for image, spacing, cosine in zip(images, (0.488281, 0.48828125, 0.4883, 0.488281), (1, 1 - 2e-7, 1, 1), strict=True):
        image.PixelSpacing, image.ImageOrientationPatient = [spacing, spacing], [cosine, 2e-7, 0, 0, 1, 0]
        image.save_as(tmp_path / f"s/{image.InstanceNumber}.dcm", enforce_file_format=True)
    assert read(tmp_path / "s").shape == (4, *SHAPE)
    for keyword, value, message in (
        ("PixelSpacing", [0.49, 0.49], "differs from"),
        ("ImageOrientationPatient", [1, 2e-3, 0, -2e-3, 1, 0], "lies in another plane"),
    ):
        other = dcmread(tmp_path / "s/2.dcm")
        setattr(other, keyword, value)
        other.save_as(tmp_path / "s/2.dcm")
        with pytest.raises(FedDPError, match=message):
            read(tmp_path / "s")
        images[2].save_as(tmp_path / "s/2.dcm", enforce_file_format=True)
