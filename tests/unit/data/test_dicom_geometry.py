"""Where DICOM slices lie and what their values mean: tilted, turned, incomplete and enhanced series, and masks on them."""

import math
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset, dcmread

from feddp.data.formats.dicom import load
from feddp.data.formats.dicom_masks import class_maps
from feddp.data.formats.dicom_references import references_of
from feddp.data.formats.find import find
from feddp.data.formats.write import write_seg
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from support.scans import APART, SHAPE, SPACING, contours, enhanced, series, square

BOX = [(3.5, 5.5), (3.5, 19.5), (11.5, 19.5), (11.5, 5.5)]  # around the centres of rows 4 to 11 and columns 6 to 19
HOLE = [(8.5, 7.5), (8.5, 11.5), (5.5, 11.5), (5.5, 7.5)]  # rows 6 to 8, columns 8 to 11; drawn in the other direction


def turned(degrees):
    """Rows to the left; columns to the back, turned towards the head. The normal is row x column = (0, -sin, cos)."""
    angle = math.radians(degrees)
    return (1, 0, 0, 0, math.cos(angle), math.sin(angle)), np.array([0, -math.sin(angle), math.cos(angle)])


def read(folder):
    tree = Source(folder)
    (entry,) = find(tree, folder.name).entries
    return entry.read(tree, "axial")


def numbers(scan):
    """Which of the slices of `series` these are: slice n has at least 2 n HU, and the noise of some pixel is 0."""
    return [round(float(each.min()) / 2) for each in scan.pixels]


@pytest.mark.parametrize(("degrees", "axis"), [(0, "axial"), (20, "axial"), (45, ""), (90, "coronal")])
@pytest.mark.parametrize("way", [1, -1], ids=["along", "against"])
def test_slices_are_sorted_along_their_normal_however_they_lie(tmp_path, degrees, axis, way):
    """Files are named against the order of the slices; the distance between slices is that along their normal."""
    lying, normal = turned(degrees)
    series(tmp_path / "s", lying=lying, step=way * APART * normal)
    scan = read(tmp_path / "s")
    assert numbers(scan) == [0, 1, 2, 3][::way]
    assert (scan.mm, scan.axis, scan.apart) == (SPACING, axis, pytest.approx(APART, abs=1e-6))


def test_a_sagittal_series_is_named_so(tmp_path):
    """Rows to the back, columns to the feet: the normal (0,1,0) x (0,0,-1) = (-1,0,0)."""
    series(tmp_path / "s", lying=(0, 1, 0, 0, 0, -1), step=(-2.0, 0, 0))
    scan = read(tmp_path / "s")
    assert (scan.axis, scan.apart, numbers(scan)) == ("sagittal", 2.0, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("gone", "height", "apart"),
    [([], 11, APART), ([2], 11, None), ([0], 11, APART), ([], 11.2, APART), ([], 11.5, None)],
    ids=["all", "one missing within", "the first missing", "0.2 of 3 mm off", "0.5 of 3 mm off"],
)
def test_a_missing_or_displaced_slice_leaves_no_distance_between_slices(tmp_path, gone, height, apart):
    """Slice 2 belongs at 11 mm. A tenth of the distance is allowed, because files round positions."""
    images = series(tmp_path / "s")
    images[2].ImagePositionPatient[2] = height
    images[2].save_as(tmp_path / "s/2.dcm", enforce_file_format=True)
    for number in gone:
        (tmp_path / f"s/{images[number].InstanceNumber}.dcm").unlink()
    assert read(tmp_path / "s").apart == apart


def test_positions_rounded_to_tenths_are_even(tmp_path):
    """Slices 0.625 mm apart at 5.0, 5.6, 6.3, 6.9 (5.625, 6.25, 6.875): (6.9 - 5) / 3 = 0.633333 mm."""
    for image, height in zip(series(tmp_path / "s"), (5.0, 5.6, 6.3, 6.9), strict=True):
        image.ImagePositionPatient[2] = height
        image.save_as(tmp_path / f"s/{image.InstanceNumber}.dcm", enforce_file_format=True)
    assert read(tmp_path / "s").apart == pytest.approx(0.633333)


def test_a_tilted_gantry_leaves_no_distance_between_slices(tmp_path):
    """Slices are turned by 15 degrees, and the table moves to the head: the stack leans. Half a degree is allowed."""
    for degrees, apart in ((15, None), (0.5, APART * math.cos(math.radians(0.5)))):
        folder = tmp_path / f"s{degrees}"
        series(folder, lying=turned(degrees)[0], step=(0, 0, APART))
        scan = read(folder)
        assert numbers(scan) == [0, 1, 2, 3]
        assert scan.apart == (apart if apart is None else pytest.approx(apart, abs=1e-6))


# -- values ------------------------------------------------------------------------------------------------------------


def one(folder, pixels, **changes):
    """Writes a series of one slice with these pixels, and reads it; changes of None are deletions."""
    (image,) = series(folder, slices=1)
    for keyword, value in changes.items():
        delattr(image, keyword) if value is None else setattr(image, keyword, value)
    image.BitsAllocated = 8 * pixels.itemsize
    image.BitsStored = changes.get("BitsStored", image.BitsAllocated)
    image.HighBit = image.BitsStored - 1
    image.PixelRepresentation = int(pixels.dtype.kind == "i")
    image.PixelData = pixels.tobytes()
    image.save_as(folder / "1.dcm", enforce_file_format=True)
    return read(folder).pixels[0]


RAMP = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 200


@pytest.mark.parametrize(
    ("kind", "bits", "expected"),
    [("<u1", 8, 255 - RAMP), ("<u2", 12, 4095 - RAMP), ("<i2", 16, -1 - RAMP)],
    ids=["8 bits", "12 bits", "signed"],
)
def test_where_white_is_low_values_are_turned_over(tmp_path, kind, bits, expected):
    """MONOCHROME1: of unsigned values, the largest that fits minus the value; of signed ones, low + high - v = -1 - v."""
    plain = {"RescaleSlope": None, "RescaleIntercept": None, "PhotometricInterpretation": "MONOCHROME1", "BitsStored": bits}
    found = one(tmp_path / "s", RAMP.astype(kind), **plain)
    assert (found == expected).all()
    assert found.dtype == (np.uint8 if bits == 8 else np.float32)


@pytest.mark.parametrize(("slope", "kind"), [(1, np.uint8), (2, np.float32)])
def test_8_bits_stay_unless_they_are_rescaled(tmp_path, slope, kind):
    found = one(tmp_path / "s", RAMP.astype("u1"), RescaleSlope=slope, RescaleIntercept=0)
    assert (found.dtype, found.max()) == (kind, 199 * slope)


@pytest.mark.parametrize(("step", "most"), [(256, 65535), (1, 255)])
def test_a_palette_becomes_its_colours(tmp_path, step, most):
    """Index i of a 16-bit palette is red 256 i, green 0, blue 65535 - 256 i; of 8 bits: i, 0, 255 - i. As some write it, the
    16 bits hold these 8."""
    index = np.arange(256)
    palettes = {"Red": step * index, "Green": 0 * index, "Blue": most - step * index}
    changes = {"PhotometricInterpretation": "PALETTE COLOR", "RescaleSlope": None, "RescaleIntercept": None}
    for name, values in palettes.items():
        changes[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        changes[f"{name}PaletteColorLookupTableData"] = values.astype("<u2").tobytes()
    found = one(tmp_path / "s", RAMP.astype("u1"), **changes)
    assert found.dtype == np.uint8
    assert (found == np.stack([RAMP, 0 * RAMP, 255 - RAMP], axis=-1)).all()


def test_every_slice_has_its_own_rescale(tmp_path):
    """As in PET: 100 stored units of slope 1 and 3."""
    for image, slope in zip(series(tmp_path / "s", slices=2), (1, 3), strict=True):
        image.RescaleSlope, image.RescaleIntercept = slope, 0
        image.PixelData = np.full(SHAPE, 100, "<i2").tobytes()
        image.save_as(tmp_path / f"s/{image.InstanceNumber}.dcm", enforce_file_format=True)
    assert [each.max() for each in read(tmp_path / "s").pixels] == [100, 300]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RescaleSlope": 2, "RescaleIntercept": -1000}, [-800, -600]),
        ({"RescaleSlope": None, "RescaleIntercept": None, "ModalityLUTSequence": "table"}, [7, 9]),
    ],
    ids=["slope", "table"],
)
def test_several_frames_without_groups_are_in_the_units_of_their_file(tmp_path, changes, expected):
    """As in multi-frame secondary captures. Frames of 100 and 200: 2 · 100 - 1000 = -800 and 2 · 200 - 1000 = -600.

    The table gives 7 to values up to 100, and 9 to those above.
    """
    table = Dataset()
    table.LUTDescriptor, table.ModalityLUTType = [256, 0, 16], "US"
    table.LUTData = np.where(np.arange(256) > 100, 9, 7).astype("<u2").tobytes()
    pixels = np.stack([np.full(SHAPE, value, "<u2") for value in (100, 200)])
    changes = {key: [table] if value == "table" else value for key, value in changes.items()}
    plain = {"NumberOfFrames": 2, "Rows": SHAPE[0], "ImagePositionPatient": None, "ImageOrientationPatient": None}
    one(tmp_path / "s", pixels, **plain, **changes)
    assert [each.max() for each in read(tmp_path / "s").pixels] == expected


def test_a_group_of_a_frame_replaces_the_units_of_its_file(both, tmp_path):
    classic, _, file = both
    file.RescaleSlope, file.RescaleIntercept = 7, 7
    file.save_as(tmp_path / "enhanced/s/1.dcm", enforce_file_format=True)
    assert (read(tmp_path / "enhanced/s").pixels == classic.pixels).all()


# -- masks -------------------------------------------------------------------------------------------------------------


def mask(tmp_path, file="m.dcm"):
    """The mask of the class lesion in tmp_path/<file>, of the series in tmp_path/s."""
    tree = Source(tmp_path)
    return class_maps(Path(file), load(tree, f"{tmp_path.name}/{file}"), read(tmp_path / "s").origin, ["lesion"])[0]


def boxes(*where):
    wanted = np.zeros((4, *SHAPE), bool)
    for number, rows, columns in where:
        wanted[number, rows, columns] ^= True
    return wanted


WHOLE, INNER = (slice(4, 12), slice(6, 20)), (slice(6, 9), slice(8, 12))


@pytest.mark.parametrize("degrees", [0, 30])
@pytest.mark.parametrize("kind", ["CLOSED_PLANAR", "CLOSEDPLANAR_XOR"])
def test_a_contour_inside_another_is_a_hole_on_any_plane(tmp_path, degrees, kind):
    lying, normal = turned(degrees)
    images = series(tmp_path / "s", lying=lying, step=APART * normal)
    contours(tmp_path / "m.dcm", images, [(1, BOX), (1, HOLE), (2, BOX)])
    drawn = dcmread(tmp_path / "m.dcm")
    for contour in drawn.ROIContourSequence[0].ContourSequence:
        contour.ContourGeometricType = kind
    drawn.save_as(tmp_path / "m.dcm")
    assert (mask(tmp_path) == boxes((1, *WHOLE), (1, *INNER), (2, *WHOLE))).all()


def moved(file, number, by):
    """Moves a contour of an RTSTRUCT; `by` is a function of its points (N, 3)."""
    drawn = dcmread(file)
    contour = drawn.ROIContourSequence[0].ContourSequence[number]
    contour.ContourData = [float(v) for v in by(np.array(contour.ContourData, float).reshape(-1, 3)).ravel()]
    drawn.save_as(file)


def test_contours_between_slices_are_left_out(tmp_path):
    """Drawn every 1 mm on slices 3 mm apart: the one 1 mm above slice 1 is not taken for a hole in slice 1."""
    contours(tmp_path / "m.dcm", series(tmp_path / "s"), [(1, BOX), (1, HOLE)])
    moved(tmp_path / "m.dcm", 1, lambda points: points + [0, 0, 1.0])
    assert (mask(tmp_path) == boxes((1, *WHOLE))).all()


def test_a_contour_across_the_slices_is_named(tmp_path):
    contours(tmp_path / "m.dcm", series(tmp_path / "s"), [(1, BOX)])
    moved(tmp_path / "m.dcm", 0, lambda points: points + np.array([[0, 0, -2.0], [0, 0, -2.0], [0, 0, 2.0], [0, 0, 2.0]]))
    with pytest.raises(FedDPError, match="m.dcm: has a contour that is not parallel to the slices"):
        mask(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda position, lying: ([position[0] + 1, *position[1:]], lying), "has a frame 1.0 mm from the nearest slice"),
        (lambda position, lying: (position, [-1, 0, 0, 0, 1, 0]), "or turned"),
        (lambda position, lying: (position, lying), None),
    ],
    ids=["moved", "turned", "as it is"],
)
def test_a_seg_that_lies_elsewhere_than_the_slices_it_refers_to_is_named(tmp_path, change, message):
    """Moved by 1 mm, more than half a pixel of 0.5 mm; or with rows to the right instead of to the left."""
    series(tmp_path / "s")
    segmented(tmp_path)
    made = dcmread(tmp_path / "m.dcm")
    lying = made.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
    for frame in made.PerFrameFunctionalGroupsSequence:
        place = frame.PlanePositionSequence[0]
        place.ImagePositionPatient, turned_to = change(list(place.ImagePositionPatient), lying.ImageOrientationPatient)
    lying.ImageOrientationPatient = turned_to
    made.save_as(tmp_path / "m.dcm")
    if message is None:
        assert (mask(tmp_path) == boxes(*((n, *square(n)) for n in range(4)))).all()
        return
    with pytest.raises(FedDPError, match=message):
        mask(tmp_path)


def segmented(tmp_path, above=50):
    """Writes what is above a value, by default the squares of tmp_path/s, to tmp_path/m.dcm; returns the file."""
    tree = Source(tmp_path)
    (entry,) = find(tree, f"{tmp_path.name}/s").entries
    scan = entry.read(tree, "axial")
    (file,) = write_seg(tmp_path, entry, scan, (scan.pixels > above).astype(np.uint8), ("lesion",), "nested")
    return file.rename(tmp_path / "m.dcm")


def test_a_seg_belongs_to_the_series_on_which_it_was_drawn(tmp_path):
    """Drawn on one of two series at the same places, it lists both; a lookup takes slices without a frame for empty ones."""
    first, second = series(tmp_path / "s"), series(tmp_path / "t2")
    file = segmented(tmp_path)
    made, listed = dcmread(file), Dataset()
    listed.SeriesInstanceUID = second[0].SeriesInstanceUID
    listed.ReferencedInstanceSequence = [Dataset() for _ in second]
    for item, image in zip(listed.ReferencedInstanceSequence, second, strict=True):
        item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = image.SOPClassUID, image.SOPInstanceUID
    made.ReferencedSeriesSequence.append(listed)
    made.save_as(file)
    assert references_of(Source(tmp_path), f"{tmp_path.name}/m.dcm").series == {first[0].SeriesInstanceUID}
    assert (mask(tmp_path) == boxes(*((n, *square(n)) for n in range(4)))).all()
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "t2").rename(tmp_path / "s")
    with pytest.raises(FedDPError, match="m.dcm: has frames, but none of them refers to a slice of its series. Export it"):
        mask(tmp_path)


def test_a_seg_that_does_not_say_which_images_are_of_which_series_counts_for_all_it_lists(tmp_path):
    images = series(tmp_path / "s")
    file = segmented(tmp_path)
    made = dcmread(file)
    del made.ReferencedSeriesSequence[0].ReferencedInstanceSequence
    made.save_as(file)
    assert references_of(Source(tmp_path), f"{tmp_path.name}/m.dcm").series == {images[0].SeriesInstanceUID}


def test_a_seg_of_a_series_on_which_nothing_is_drawn_is_an_empty_mask(tmp_path):
    """Its frames are empty, or belong to a segment that is no class."""
    images = series(tmp_path / "s")
    segmented(tmp_path, above=1e6)
    assert references_of(Source(tmp_path), f"{tmp_path.name}/m.dcm").series == {images[0].SeriesInstanceUID}
    assert not mask(tmp_path).any()
    made = dcmread(segmented(tmp_path))
    made.SegmentSequence.append(deepcopy(made.SegmentSequence[0]))
    made.SegmentSequence[0].SegmentLabel, made.SegmentSequence[1].SegmentNumber = "bone", 2
    made.save_as(tmp_path / "m.dcm")
    assert not mask(tmp_path).any()


# -- enhanced files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def both(tmp_path):
    """A series as four files, and as one file whose frames are in another order, with what was read of each."""
    images = series(tmp_path / "classic/s")
    file = enhanced(tmp_path / "enhanced/s/1.dcm", images, [2, 0, 3, 1])
    return read(tmp_path / "classic/s"), read(tmp_path / "enhanced/s"), file


def test_frames_of_an_enhanced_file_are_the_slices_of_the_same_series(both):
    classic, frames, _ = both
    assert (classic.pixels == frames.pixels).all()
    for name in ("mm", "apart", "volume", "axis"):
        assert getattr(classic, name) == getattr(frames, name)


def test_a_seg_of_an_enhanced_file_refers_to_its_frames(both, tmp_path):
    """Slice n is frame 2, 4, 1, 3 of the file (0 lies second, 1 last, 2 first, 3 third); it is read back the same."""
    segmented(tmp_path / "enhanced")
    made = dcmread(tmp_path / "enhanced/m.dcm")
    for frame, described in zip(made.pixel_array, made.PerFrameFunctionalGroupsSequence, strict=True):
        source = described.DerivationImageSequence[0].SourceImageSequence[0]
        assert source.ReferencedSOPInstanceUID == both[2].SOPInstanceUID
        number = [2, 4, 1, 3].index(source.ReferencedFrameNumber)
        assert (frame.astype(bool) == boxes((number, *square(number)))[number]).all()
    assert (mask(tmp_path / "enhanced") == boxes(*((n, *square(n)) for n in range(4)))).all()


def test_contours_find_the_frames(both, tmp_path):
    images = series(tmp_path / "again")  # of the same places
    contours(tmp_path / "enhanced/m.dcm", images, [(3, BOX)])
    assert (mask(tmp_path / "enhanced") == boxes((3, *WHOLE))).all()


def test_frames_without_a_place_are_pictures_in_their_order(tmp_path):
    """A clip of ultrasound: three frames, and no word of where they lie."""
    pixels = np.stack([np.full(SHAPE, value, "u1") for value in (7, 5, 9)])
    changes = {"NumberOfFrames": 3, "Rows": SHAPE[0], "ImagePositionPatient": None, "ImageOrientationPatient": None}
    one(tmp_path / "s", pixels, RescaleSlope=None, RescaleIntercept=None, **changes)
    scan = read(tmp_path / "s")
    assert scan.pixels[:, 0, 0].tolist() == [7, 5, 9]
    assert (scan.volume, scan.apart, scan.axis) == (False, None, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.__setattr__("NumberOfFrames", 400_000), "is one of 400000 images"),
        (lambda file: file.PerFrameFunctionalGroupsSequence.pop(), "3 of 4 frames are described"),
        (
            lambda file: file.__setattr__("PixelData", file.PixelData[:-100]),
            "has 16284 bytes .* header says 16384",
        ),
    ],
    ids=["too many", "not all described", "an end cut off"],
)
def test_what_is_wrong_with_an_enhanced_file_is_named(both, tmp_path, change, message):
    change(both[2])
    both[2].save_as(tmp_path / "enhanced/s/1.dcm", enforce_file_format=True)
    with pytest.raises(FedDPError, match=message):
        read(tmp_path / "enhanced/s")


def test_a_file_of_several_frames_is_an_entry_of_its_own(tmp_path):
    """Two enhanced files of one series, such as two echoes, in one folder."""
    images = series(tmp_path / "classic")
    for number in range(2):
        enhanced(tmp_path / f"s/{number}.dcm", images, [0, 1, 2, 3])
    assert [entry.name for entry in find(Source(tmp_path / "s"), "s").entries] == ["P1_1", "P1_2"]
