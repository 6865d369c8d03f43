"""RTSTRUCTs: which series and slices a contour is drawn on, and what is no area."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset, dcmread
from pydicom.uid import CTImageStorage, generate_uid

from feddp.data.formats.dicom import load
from feddp.data.formats.dicom_contours import BETWEEN, EMPTY, OPEN, STRANGE
from feddp.data.formats.dicom_masks import class_maps
from feddp.data.formats.find import find
from feddp.data.formats.notes import Notes
from feddp.data.formats.outlines import NO_HOLE
from feddp.data.prepare.folder_options import FolderOptions
from feddp.data.prepare.own_images import prepare
from feddp.data.prepare.own_masks import truths_of
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from support.scans import APART, SHAPE, contours, series

BOX = [(4, 6), (4, 19), (11, 19), (11, 6)]  # the centres of the corners of rows 4 to 11 and columns 6 to 19
ELSEWHERE = Dataset()
ELSEWHERE.SOPClassUID, ELSEWHERE.SOPInstanceUID = CTImageStorage, generate_uid()
INNER = [(8, 8), (8, 11), (6, 11), (6, 8)]  # the other way round; without its line, row 7 and columns 9 and 10


def changed(file, change):
    """Rewrites an RTSTRUCT; `change` gets the file and its contours, and returns what replaces the contours, if anything."""
    drawn = dcmread(file)
    kept = change(drawn, list(drawn.ROIContourSequence[0].ContourSequence))
    if kept is not None:
        drawn.ROIContourSequence[0].ContourSequence = kept
    drawn.save_as(file, enforce_file_format=True)


def refer(contour, *images):
    """Has a contour refer to images."""
    contour.ContourImageSequence = [Dataset() for _ in images]
    for item, image in zip(contour.ContourImageSequence, images, strict=True):
        item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = image.SOPClassUID, image.SOPInstanceUID


def also_listed(drawn, image):
    """Lists the series of an image too, in its own frame of reference."""
    listed, study, space = Dataset(), Dataset(), Dataset()
    listed.SeriesInstanceUID = image.SeriesInstanceUID
    for each in drawn.ReferencedFrameOfReferenceSequence:
        if each.FrameOfReferenceUID == image.FrameOfReferenceUID:
            each.RTReferencedStudySequence[0].RTReferencedSeriesSequence.append(listed)
            return
    study.RTReferencedSeriesSequence = [listed]
    space.FrameOfReferenceUID, space.RTReferencedStudySequence = image.FrameOfReferenceUID, [study]
    drawn.ReferencedFrameOfReferenceSequence.append(space)


def masks(top, notes=None):
    """{series: its mask of the class lesion} of the series in top/images and the file top/masks/m.dcm."""
    tree = Source(top)
    images, found = find(tree, f"{top.name}/images"), find(tree, f"{top.name}/masks")
    truths, unused = truths_of(tree, images, found, ["lesion"])
    assert unused == []
    file = load(tree, f"{top.name}/masks/m.dcm")
    read = {each.name: each.read(tree, "axial").origin for each in images.entries}
    return {
        name: class_maps(Path("m.dcm"), file, read[name], ["lesion"], notes=notes)[0] for name, files in truths.items() if files
    }


@pytest.fixture
def top(tmp_path):
    """A series ct, and an RTSTRUCT with the square BOX on its slices 1 and 2, without references of contours."""
    images = series(tmp_path / "top/images/ct")
    contours(tmp_path / "top/masks/m.dcm", images, [(1, BOX), (2, BOX)])
    return tmp_path / "top", images, tmp_path / "top/masks/m.dcm"


def boxes(*slices):
    wanted = np.zeros((4, *SHAPE), bool)
    for number in slices:
        wanted[number, 4:12, 6:20] = True
    return wanted


# -- which series ------------------------------------------------------------------------------------------------------


def second(top, images, frame=None):
    """A second series mr at the same places, by default in the same frame of reference."""
    others = series(top / "images/mr")
    for number, image in enumerate(others):
        image.FrameOfReferenceUID = frame or images[0].FrameOfReferenceUID
        image.save_as(top / f"images/mr/{len(others) - number}.dcm", enforce_file_format=True)
    return others


def test_contours_belong_to_the_series_whose_images_they_name(top):
    """Of two listed series, the other has no mask, so it is named; drawn on both, each has its own contours."""
    folder, images, file = top
    others = second(folder, images)
    changed(
        file,
        lambda drawn, found: (also_listed(drawn, others[0]), [refer(each, images[n]) for n, each in enumerate(found, 1)])[0],
    )
    with pytest.raises(FedDPError, match=r"1 image\(s\) have no mask, top/images/mr/1.dcm first\. Add a SEG or RTSTRUCT"):
        masks(folder)
    changed(file, lambda drawn, found: (refer(found[0], images[1]), refer(found[1], others[2]))[0])
    own = masks(folder)
    assert (own["ct"] == boxes(1)).all()
    assert (own["mr"] == boxes(2)).all()


def test_without_images_a_structure_belongs_to_the_series_of_its_frame_of_reference(top):
    """Two listed series at the same places in the scanners' coordinates, but in different frames of reference."""
    folder, images, file = top
    others = second(folder, images, generate_uid())
    changed(file, lambda drawn, found: also_listed(drawn, others[0]))
    with pytest.raises(FedDPError, match=r"1 image\(s\) have no mask, top/images/mr/1.dcm first"):
        masks(folder)

    def with_another(drawn, found):
        roi, drawing = deepcopy(drawn.StructureSetROISequence[0]), deepcopy(drawn.ROIContourSequence[0])
        roi.ROINumber = drawing.ReferencedROINumber = 4
        roi.ReferencedFrameOfReferenceUID, drawing.ContourSequence = others[0].FrameOfReferenceUID, found[1:]
        drawn.StructureSetROISequence.append(roi)
        drawn.ROIContourSequence.append(drawing)
        return found[:1]

    changed(file, with_another)
    own = masks(folder)
    assert (own["ct"] == boxes(1)).all()
    assert (own["mr"] == boxes(2)).all()


def test_without_images_all_listed_series_of_the_frame_of_reference_count(top):
    folder, images, file = top
    others = second(folder, images)
    changed(file, lambda drawn, found: also_listed(drawn, others[0]))
    own = masks(folder)
    assert (own["ct"] == boxes(1, 2)).all()
    assert (own["mr"] == boxes(1, 2)).all()


def test_without_a_series_the_frame_of_reference_decides_if_one_series_has_it(top):
    folder, images, file = top
    changed(file, lambda drawn, found: delattr(drawn.ReferencedFrameOfReferenceSequence[0], "RTReferencedStudySequence"))
    assert (masks(folder)["ct"] == boxes(1, 2)).all()
    second(folder, images)
    with pytest.raises(FedDPError, match=r"2 image\(s\) have no mask, .*; top/masks/m.dcm refers to no series"):
        masks(folder)


def test_contours_of_images_that_are_not_there_are_named(top):
    folder, images, file = top
    changed(file, lambda drawn, found: [refer(each, ELSEWHERE) for each in found] and None)
    with pytest.raises(FedDPError, match="m.dcm: has contours, but none of them refers to a slice of its series"):
        masks(folder)
    changed(file, lambda drawn, found: refer(found[0], images[1]))
    assert (masks(folder)["ct"] == boxes(1)).all()


# -- which slice -------------------------------------------------------------------------------------------------------


def lifted(contour, by):
    points = np.array(contour.ContourData, float).reshape(-1, 3) + np.array([0, 0, by])
    contour.ContourData = [float(value) for value in points.ravel()]


def test_a_contour_is_drawn_on_the_image_that_it_names(top):
    """1.4 mm above slice 1, of slices 3 mm apart, and 1.6 mm: nearer to slice 2, and too far from slice 1."""
    folder, images, file = top
    changed(file, lambda drawn, found: (lifted(found[0], 1.4), refer(found[0], images[1]), refer(found[1], images[2]))[0])
    assert (masks(folder)["ct"] == boxes(1, 2)).all()
    changed(file, lambda drawn, found: lifted(found[0], 0.2))
    with pytest.raises(FedDPError, match="m.dcm: has a contour 1.6 mm away from the slice to which it refers"):
        masks(folder)


def test_contours_at_a_tenth_of_the_distance_between_slices_are_on_one_slice(top):
    """0.29 mm of 3 mm, as where heights are rounded; at 0.31 mm a contour lies between slices, and is left out."""
    folder, images, file = top
    beside = [(row + 20, column) for row, column in BOX]
    both = boxes(1)
    both[1, 24:32, 6:20] = True
    for by, wanted in ((0.29, both), (0.31, boxes(1))):
        contours(file, images, [(1, BOX), (1, beside)])
        changed(file, lambda drawn, found, by=by: lifted(found[1], by))
        assert (masks(folder)["ct"] == wanted).all()


def test_slices_that_do_not_say_where_they_lie_are_named(top):
    folder, images, file = top
    del images[2].ImagePositionPatient
    images[2].save_as(folder / "images/ct/2.dcm", enforce_file_format=True)
    with pytest.raises(FedDPError, match="ct/2.dcm: has no ImagePositionPatient"):
        masks(folder)


def test_a_contour_beyond_the_slices_is_named(top):
    folder, _, file = top
    changed(file, lambda drawn, found: lifted(found[1], 2 * APART))
    with pytest.raises(FedDPError, match="m.dcm: has a contour 3.0 mm away from the nearest slice of its series"):
        masks(folder)


# -- which contours ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The value length")  # a name of 17 letters, of which DICOM allows 16
def test_overlapping_contours_are_united_and_a_turned_inner_one_is_a_hole(top):
    """As CLOSED_PLANAR; as CLOSEDPLANAR_XOR, under each of the names that programs write, the hole needs no direction."""
    folder, images, file = top
    moved = [(row + 4, column + 4) for row, column in BOX]
    contours(file, images, [(1, BOX), (1, BOX), (1, moved)])
    wanted = boxes(1)
    wanted[1, 8:16, 10:24] = True
    assert (masks(folder)["ct"] == wanted).all()
    ring = boxes(1)
    ring[1, 7, 9:11] = False
    contours(file, images, [(1, BOX), (1, INNER)])
    assert (masks(folder)["ct"] == ring).all()
    contours(file, images, [(1, BOX), (1, INNER[::-1])])
    assert (masks(folder)["ct"] == boxes(1)).all()
    for kind in ("CLOSEDPLANAR_XOR", "CLOSED_PLANAR_XOR"):
        changed(file, lambda drawn, found, kind=kind: [setattr(each, "ContourGeometricType", kind) for each in found] and None)
        assert (masks(folder)["ct"] == ring).all()


@pytest.mark.parametrize("kind", ["POINT", "OPEN_PLANAR", "OPEN_NONPLANAR"])
def test_points_and_open_lines_are_no_area(top, kind):
    """Beside a closed contour they are left out; a structure of them alone would be an empty mask without a word."""
    folder, _, file = top
    changed(file, lambda drawn, found: setattr(found[0], "ContourGeometricType", kind))
    assert (masks(folder)["ct"] == boxes(2)).all()
    changed(file, lambda drawn, found: setattr(found[1], "ContourGeometricType", kind))
    with pytest.raises(FedDPError, match=f"m.dcm: has a structure of the classes that surrounds no area: {kind}"):
        masks(folder)


@pytest.mark.parametrize(
    ("what", "corners", "change"),
    [
        (NO_HOLE, INNER[::-1], lambda contour: None),
        (BETWEEN, BOX, lambda contour: lifted(contour, 1)),
        (STRANGE, BOX, lambda contour: refer(contour, ELSEWHERE)),
        (OPEN, BOX, lambda contour: setattr(contour, "ContourGeometricType", "OPEN_PLANAR")),
        (EMPTY, [(2.1, 2), (2.9, 9)], lambda contour: None),
        (None, BOX, lambda contour: None),
    ],
)
def test_contours_that_add_nothing_are_told(top, what, corners, change):
    """Two of them beside the square, without a pixel on a slice of their own. One that is drawn twice is told once."""
    folder, images, file = top
    contours(file, images, [(1, BOX), *[(2 if what == EMPTY else 1, corners)] * 2])
    changed(file, lambda drawn, found: [change(each) for each in found[1:]] and None)
    notes = Notes()
    assert (masks(folder, notes)["ct"] == boxes(1)).all()
    assert notes == ({(what, Path("m.dcm")): 1 if what == NO_HOLE else 2} if what else {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda contour: setattr(contour, "ContourGeometricType", "SPIRAL"), "has a contour of an unknown kind, SPIRAL"),
        (lambda contour: delattr(contour, "ContourData"), "has no ContourData"),
        (lambda contour: setattr(contour, "ContourData", [1.0, 2.0, 3.0, 4.0]), "has another ContourData than DICOM allows"),
    ],
)
def test_what_is_wrong_with_a_contour_is_named(top, change, message):
    folder, _, file = top
    changed(file, lambda drawn, found: change(found[0]))
    with pytest.raises(FedDPError, match=f"m.dcm: {message}.*Export it again"):
        masks(folder)


def test_a_structure_that_nobody_has_drawn_is_empty(top):
    folder, _, file = top
    changed(file, lambda drawn, found: delattr(drawn.ROIContourSequence[0], "ContourSequence"))
    assert not masks(folder)["ct"].any()


def test_a_number_of_two_structures_is_named(top):
    folder, _, file = top

    def twice(drawn, found):
        drawn.StructureSetROISequence.append(deepcopy(drawn.StructureSetROISequence[0]))
        drawn.StructureSetROISequence[1].ROIName = "spleen"

    changed(file, twice)
    with pytest.raises(FedDPError, match="m.dcm: has two structures of the ROINumber 3, lesion and spleen. Export it again"):
        masks(folder)


# -- which structure ---------------------------------------------------------------------------------------------------


def noted(top):
    """Prepares the series for the class lesion; returns the notes on how the file of masks was read."""
    (top / "split.csv").write_text("image,patient,split\nct,1,test\n")
    options = FolderOptions.of(("lesion",), None, [], None, "axial", None, None, None)
    return [note for note in prepare(top, top.parent / "out", None, 0, None, options) if "m.dcm" in note]


@pytest.mark.parametrize(("name", "said"), [("GTV 1", True), ("", True), ("Lesion", False)])
def test_a_lone_structure_of_another_name_is_the_class_with_a_note(top, name, said):
    folder, images, file = top
    contours(file, images, [(1, BOX)], name)
    assert (masks(folder)["ct"] == boxes(1)).all()
    wanted = f"top: the only structure, {name or 'without a name'}, is taken as lesion: 1 in 1 file(s), {file} first"
    assert noted(folder) == ([wanted] if said else [])


@pytest.mark.parametrize(("name", "kind"), [("BODY", ""), ("External", ""), ("skin", "EXTERNAL")])
def test_the_outline_of_the_body_is_no_class_unless_it_has_its_name(top, name, kind):
    folder, images, file = top

    def interpreted(drawn, found):
        drawn.RTROIObservationsSequence = [Dataset()]
        drawn.RTROIObservationsSequence[0].ReferencedROINumber = 3
        drawn.RTROIObservationsSequence[0].RTROIInterpretedType = kind

    contours(file, images, [(1, BOX)], name)
    changed(file, interpreted)
    with pytest.raises(FedDPError, match=f"m.dcm: has one structure, {name}, which is the outline of the body and not lesion"):
        masks(folder)
    drawn = load(Source(folder), f"{folder.name}/masks/m.dcm")
    (entry,) = find(Source(folder), f"{folder.name}/images").entries
    assert class_maps(file, drawn, entry.read(Source(folder), "axial").origin, [name]).any()
