"""What an exported study holds besides images, SEGs of every kind, and SEGs of anonymised series."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from highdicom.seg import Segmentation, SegmentDescription
from imagecodecs import jpeg2k_encode, jpegls_encode
from pydicom import Dataset, dcmread
from pydicom.encaps import encapsulate
from pydicom.sr.codedict import codes
from pydicom.uid import (
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
    SecondaryCaptureImageStorage,
    generate_uid,
)

from feddp.data.formats.dicom import load
from feddp.data.formats.dicom_masks import class_maps, joined_maps
from feddp.data.formats.dicom_segments import STRANGE
from feddp.data.formats.find import find
from feddp.data.formats.notes import Notes
from feddp.data.formats.write import write_seg
from feddp.data.prepare.own_masks import truths_of
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from feddp.run.images import InputImages, Reading
from support.scans import APART, SHAPE, SPACING, contours, series, square

SQUARES = np.zeros((4, *SHAPE), bool)
for _number in range(4):
    SQUARES[(_number, *square(_number))] = True
RT = "1.2.840.10008.5.1.4.1.1.481."  # the class of RT images, doses, plans and others

# -- what is left out --------------------------------------------------------------------------------------------------

OTHERS = {
    "RT Dose": {"SOPClassUID": f"{RT}2", "Modality": "RTDOSE"},  # with pixels: the dose on a grid
    "RT Plan": {"SOPClassUID": f"{RT}5", "Modality": "RTPLAN"},
    "SR": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.11", "Modality": "SR"},
    "Encapsulated PDF": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.104.1", "Modality": "OT"},
    "Key Object Selection": {"SOPClassUID": "", "Modality": "KO"},
    "Grayscale Softcopy Presentation State": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.11.1", "Modality": ""},
    "Secondary Capture": {"SOPClassUID": SecondaryCaptureImageStorage, "Modality": "CT"},
    "Surface Segmentation": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.66.5", "Modality": "SEG"},
    "private data without an image": {"SOPClassUID": "1.3.12.2.1107.5.9.1", "Rows": None},  # Siemens' CSA
    "localizer": {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]},
    "RT Image": {"SOPClassUID": f"{RT}1", "Modality": "RTIMAGE"},
}


def beside(image, file, changes, new=True):
    """Writes a file of the study of an image, by default of a series of its own."""
    made = Dataset()
    made.update(image)
    made.file_meta = image.file_meta
    for keyword, value in {"SOPInstanceUID": generate_uid(), "SeriesNumber": 1, **changes}.items():
        made.add(type(image["Modality"])(keyword, image[keyword].VR if keyword in image else "CS", value))
    if new:
        made["SeriesInstanceUID"] = type(image["Modality"])("SeriesInstanceUID", "UI", generate_uid())
    made.preamble = bytes(128)
    made.save_as(file)


@pytest.mark.parametrize("kind", OTHERS)
def test_what_accompanies_the_images_of_a_study_is_left_out_with_a_note(tmp_path, kind):
    """The series keeps its name, as if the file were not there. A report needs no pixels."""
    images = series(tmp_path / "ct")
    alone = [entry.name for entry in find(Source(tmp_path), tmp_path.name).entries]
    beside(images[0], tmp_path / "ct/a.dcm", OTHERS[kind])
    found = find(Source(tmp_path), tmp_path.name)
    assert ([entry.name for entry in found.entries], found.refused) == (alone, [])
    assert list(found.notes) == [f"left out, as {kind}: {tmp_path.name}/ct/a.dcm"]
    seen = InputImages(tmp_path, 1, Reading(convert=True))
    assert [opened.entry.name for opened in seen.read("Reading")] == alone
    assert seen.warnings[-1:] == (f"left out, as {kind}: {tmp_path.name}/ct/a.dcm",)
    assert seen.refused == []


def test_a_localizer_of_the_same_series_is_left_out_too(tmp_path):
    images = series(tmp_path / "ct")
    changes = OTHERS["localizer"] | {"ImageOrientationPatient": [1, 0, 0, 0, 0, -1]}
    beside(images[0], tmp_path / "ct/a.dcm", changes, new=False)
    found = find(Source(tmp_path), tmp_path.name)
    assert [len(entry.files) for entry in found.entries] == [4]
    assert list(found.notes) == [f"left out, as localizer: {tmp_path.name}/ct/a.dcm"]


@pytest.mark.parametrize(
    ("words", "left"), [("t1_LOCALIZER_3plane", True), ("Topogram 0.6", True), ("localised tumour", False)]
)
def test_a_localizer_is_also_known_by_its_description(tmp_path, words, left):
    """MR scanners do not say it elsewhere."""
    images = series(tmp_path / "ct")
    for image in series(tmp_path / "scout", slices=1):
        image.StudyInstanceUID, image.SeriesDescription = images[0].StudyInstanceUID, words
        image.save_as(tmp_path / "scout/1.dcm", enforce_file_format=True)
    notes = list(find(Source(tmp_path), tmp_path.name).notes)
    assert notes == ([f"left out, as localizer: {tmp_path.name}/scout/1.dcm"] if left else [])


@pytest.mark.parametrize("kind", ["Secondary Capture", "localizer", "RT Image"])
def test_where_there_is_nothing_else_these_are_the_images(tmp_path, kind):
    images = series(tmp_path / "other", slices=1)
    beside(images[0], tmp_path / "a.dcm", OTHERS[kind] | {"StudyInstanceUID": generate_uid()})
    found = find(Source(tmp_path), tmp_path.name)
    assert (len(found.entries), list(found.notes)) == (2, [])


def test_a_copy_of_a_slice_is_left_out_with_a_note(tmp_path):
    series(tmp_path / "ct")
    (tmp_path / "ct/again.dcm").write_bytes((tmp_path / "ct/2.dcm").read_bytes())
    found = find(Source(tmp_path), tmp_path.name)
    assert [len(entry.files) for entry in found.entries] == [4]
    assert list(found.notes) == [f"left out, as copies of other files: {tmp_path.name}/ct/again.dcm"]


def test_a_folder_without_an_image_says_what_it_holds(tmp_path):
    images = series(tmp_path / "ct", slices=1)
    (tmp_path / "ct/1.dcm").unlink()
    beside(images[0], tmp_path / "ct/dose.dcm", OTHERS["RT Dose"])
    contours(tmp_path / "ct/drawn.dcm", images, [])
    with pytest.raises(FedDPError, match=r"holds no image \(left out, as RT Dose: .*/ct/dose.dcm\) \(left out, as masks of "):
        InputImages(tmp_path, 1, Reading())


@pytest.mark.parametrize("kind", ["1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.1.2"])
@pytest.mark.parametrize("lacks", ["PixelData", "Rows"])
def test_an_image_without_pixels_is_no_report(tmp_path, kind, lacks):
    """It is broken, so it is named. A mammogram's kind is called "... Image Storage - For Presentation"."""
    (image,) = series(tmp_path / "ct", slices=1)
    image.SOPClassUID = image.file_meta.MediaStorageSOPClassUID = kind
    del image[lacks]
    image.save_as(tmp_path / "ct/1.dcm", enforce_file_format=True)
    (entry,) = find(Source(tmp_path), tmp_path.name).entries
    with pytest.raises(FedDPError, match=f"1.dcm: {'has no Rows' if lacks == 'Rows' else 'holds no image'}"):
        entry.read(Source(tmp_path), "axial")


# -- SEGs of every kind ------------------------------------------------------------------------------------------------


def segmentation(images, pixels, kind="BINARY", labels=("lesion",), **options):
    described = [SegmentDescription(n, each, codes.SCT.Tissue, codes.SCT.Tissue, "MANUAL") for n, each in enumerate(labels, 1)]
    uids = generate_uid(), 9, generate_uid(), 1, "m", "m", "1", "1"
    return Segmentation(images, pixels, kind, described, *uids, **options)


def maps(top, made, classes=("lesion",), notes=None):
    made.save_as(top / "m.dcm")
    tree = Source(top)
    (entry,) = find(tree, f"{top.name}/s").entries
    return class_maps(Path("m.dcm"), load(tree, f"{top.name}/m.dcm"), entry.read(tree, "axial").origin, classes, notes=notes)


BOTH = np.stack([SQUARES, np.roll(SQUARES, 3, axis=2)], axis=-1)  # overlapping


@pytest.mark.parametrize(
    ("kind", "pixels", "wanted"),
    [("BINARY", BOTH.astype(np.uint8), BOTH), ("FRACTIONAL", BOTH * 0.6, BOTH), ("FRACTIONAL", BOTH * 0.4, BOTH & False)],
)
def test_segments_overlap_and_a_fraction_counts_above_a_half(tmp_path, kind, pixels, wanted):
    images = series(tmp_path / "s")
    found = maps(tmp_path, segmentation(images, pixels, kind, ("a", "b")), ("a", "b"))
    assert (np.moveaxis(found, 0, -1) == wanted).all()


def test_a_map_of_labels_is_read_without_its_background(tmp_path):
    """One class and one segment, of another name: the described background is none."""
    images = series(tmp_path / "s")
    made = segmentation(images, SQUARES.astype(np.uint8), "LABELMAP", ("another",))
    assert len(made.SegmentSequence) == 2
    assert (maps(tmp_path, made)[0] == SQUARES).all()


@pytest.mark.parametrize("coder", [None, jpegls_encode, partial(jpeg2k_encode, codecformat="j2k", reversible=True)])
def test_packed_segments_are_read(tmp_path, coder):
    """By run lengths, as pydicom packs them; as JPEG-LS and JPEG 2000."""
    made = segmentation(series(tmp_path / "s"), SQUARES * 1.0, "FRACTIONAL")
    if coder is None:
        made.compress(RLELossless)
    else:
        made.PixelData = encapsulate([coder(each) for each in made.pixel_array])
        made["PixelData"].VR, made["PixelData"].is_undefined_length = "OB", True
        made.file_meta.TransferSyntaxUID = JPEGLSLossless if coder is jpegls_encode else JPEG2000Lossless
    assert (maps(tmp_path, made)[0] == SQUARES).all()


def test_frames_of_one_bit_per_pixel_may_start_within_a_byte(tmp_path):
    """5 x 3 pixels are 15 bits: frames start at bits 0, 7, 6 and 5 of bytes, and the second ends in the third byte after."""
    images = series(tmp_path / "s")
    drawn = np.random.default_rng(0).integers(0, 2, (4, 5, 3)).astype(bool)
    for number, image in enumerate(images):
        image.Rows, image.Columns, image.PixelData = 5, 3, np.zeros(15, "<i2").tobytes()
        image.save_as(tmp_path / f"s/{4 - number}.dcm", enforce_file_format=True)
    assert (maps(tmp_path, segmentation(images, drawn.astype(np.uint8)))[0] == drawn).all()


def test_each_segment_may_have_as_many_voxels_as_a_volume(tmp_path):
    """A file of 1000 slices and 5 organs has 5000 frames."""
    images = series(tmp_path / "s")
    segmentation(images, BOTH.astype(np.uint8), labels=("lesion", "other")).save_as(tmp_path / "m.dcm")
    most = SQUARES.size
    scan = find(Source(tmp_path), f"{tmp_path.name}/s").entries[0].read(Source(tmp_path), "axial")
    file, dataset = Path("m.dcm"), load(Source(tmp_path), f"{tmp_path.name}/m.dcm")
    assert class_maps(file, dataset, scan.origin, ("lesion",), most).any()
    with pytest.raises(FedDPError, match=f"m.dcm: has 8 frames of .*the limit is {2 * most - 2:,} voxels.*--voxels"):
        class_maps(file, dataset, scan.origin, ("lesion",), most - 1)


def without(made, *keywords):
    for frame in made.PerFrameFunctionalGroupsSequence:
        for keyword in keywords:
            del frame[keyword]
    return made


def test_a_frame_is_placed_by_its_reference_or_by_its_place(tmp_path):
    """Slice 2 has no frame."""
    images, drawn = series(tmp_path / "s"), SQUARES & (np.arange(4) != 2)[:, None, None]
    for keyword in ("DerivationImageSequence", "PlanePositionSequence"):
        made = segmentation(images, drawn.astype(np.uint8))
        assert (maps(tmp_path, without(made, keyword))[0] == drawn).all()
    with pytest.raises(FedDPError, match="m.dcm: has a frame that neither lies somewhere nor refers to one slice"):
        maps(tmp_path, without(made, "DerivationImageSequence"))


@pytest.mark.parametrize(("down", "across"), [(-1, 1), (1, -1), (-1, -1)])
def test_a_frame_may_start_from_another_corner(tmp_path, down, across):
    """The same pixels, with rows or columns that run the other way, from the first pixel there."""
    images = series(tmp_path / "s")
    made = segmentation(images, SQUARES[:, ::down, ::across].astype(np.uint8))
    lying = made.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
    row, column = np.array(lying.ImageOrientationPatient, float).reshape(2, 3)
    lying.ImageOrientationPatient = [float(value) for value in (*(across * row), *(down * column))]
    moved = (SHAPE[1] - 1) * SPACING[1] * row * (across < 0) + (SHAPE[0] - 1) * SPACING[0] * column * (down < 0)
    for frame in made.PerFrameFunctionalGroupsSequence:
        (lies,) = frame.PlanePositionSequence
        lies.ImagePositionPatient = [float(value) for value in np.array(lies.ImagePositionPatient, float) + moved]
    assert (maps(tmp_path, made)[0] == SQUARES).all()
    lying.ImageOrientationPatient = [float(value) for value in (*row, *column)]
    with pytest.raises(FedDPError, match="m.dcm: has a frame .* mm from the nearest slice"):
        maps(tmp_path, made)


def test_a_seg_of_a_part_of_its_slices_is_named_with_the_remedy(tmp_path):
    images = series(tmp_path / "s")
    made = segmentation(images, SQUARES.astype(np.uint8))
    made.Rows = SHAPE[0] - 1
    with pytest.raises(FedDPError, match="m.dcm: has .* pixels.* Put the structures into one file that covers whole slices"):
        maps(tmp_path, made)


def test_a_seg_of_other_pixels_or_numbers_is_named(tmp_path):
    """Pixels of another size would put the same shape at another place; a number of two segments says neither's name."""
    images = series(tmp_path / "s")
    made = segmentation(images, BOTH.astype(np.uint8), labels=("lesion", "other"))
    measures = made.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.PixelSpacing = [1.0004 * size for size in SPACING]
    assert (maps(tmp_path, made)[0] == SQUARES).all()
    measures.PixelSpacing = [2 * size for size in SPACING]
    with pytest.raises(FedDPError, match="m.dcm: has pixels of 1 x 1.6 mm, but its series of 0.5 x 0.8 mm"):
        maps(tmp_path, made)
    made.SegmentSequence[1].SegmentNumber = 1
    with pytest.raises(FedDPError, match="m.dcm: has two structures of the SegmentNumber 1, lesion and other"):
        maps(tmp_path, made)


def test_frames_of_images_that_are_not_there_are_told(tmp_path):
    """Those of slices 0 and 3, of the class; of another segment it does not matter."""
    images, notes = series(tmp_path / "s"), Notes()
    made = segmentation(images, BOTH.astype(np.uint8), labels=("lesion", "other"))
    for number in (4, 1):
        (tmp_path / f"s/{number}.dcm").unlink()
    assert (maps(tmp_path, made, notes=notes)[0] == SQUARES[1:3]).all()
    assert notes == {(STRANGE, Path("m.dcm")): 2}


def test_files_of_one_structure_each_are_read_together(tmp_path):
    """A SEG and its copy, an RTSTRUCT, and one of no class. Two files of one class may be of two people: they are named."""
    images, top = series(tmp_path / "top/images/s"), tmp_path / "top"
    (top / "masks").mkdir()
    for name, label in (("a", "Lesion"), ("b", "ruler")):
        segmentation(images, SQUARES.astype(np.uint8), labels=(label,)).save_as(top / f"masks/{name}.dcm")
    (top / "images/a.dcm").write_bytes((top / "masks/a.dcm").read_bytes())
    contours(top / "masks/c.dcm", images, [(1, [(30, 2), (30, 9), (39, 9), (39, 2)])], "spleen")

    def joined(*classes):
        tree, notes = Source(top), Notes()
        (entry,) = find(tree, "top/images").entries
        truths, _ = truths_of(tree, find(tree, "top/images"), find(tree, "top/masks"), classes)
        return joined_maps(tree, truths["s"], entry.read(tree, "axial").origin, classes, notes), notes

    spleen = np.zeros_like(SQUARES)
    spleen[1, 30:40, 2:10] = True
    found, notes = joined("spleen", "absent", "lesion")
    assert (found == [spleen, np.zeros_like(spleen), SQUARES]).all()
    assert notes == {("files of masks without a structure of the classes are left out", top / "masks/b.dcm"): 1}
    with pytest.raises(FedDPError, match="a.dcm: is one of 3 files of masks of its series, and none has a structure of the cl"):
        joined("absent")
    segmentation(images, SQUARES.astype(np.uint8)).save_as(top / "masks/d.dcm")
    with pytest.raises(FedDPError, match="d.dcm: has lesion, and so has .*a.dcm of the same series. Keep one"):
        joined("spleen", "lesion")


@pytest.mark.parametrize("which", ["no series", "none of these series"])
def test_a_seg_that_belongs_to_no_series_is_named(tmp_path, which):
    images = series(tmp_path / "top/images/s")
    made = segmentation(images, SQUARES.astype(np.uint8))
    if which == "no series":
        without(made, "DerivationImageSequence")
        del made.ReferencedSeriesSequence
    else:
        made = segmentation(series(tmp_path / "elsewhere"), SQUARES.astype(np.uint8))
    (tmp_path / "top/masks").mkdir()
    made.save_as(tmp_path / "top/masks/m.dcm")
    tree = Source(tmp_path / "top")
    images, masks = find(tree, "top/images"), find(tree, "top/masks")
    with pytest.raises(FedDPError, match=f"have no mask, .*; top/masks/m.dcm refers to {which}. Add a SEG"):
        truths_of(tree, images, masks, ["lesion"])


# -- SEGs of anonymised series -----------------------------------------------------------------------------------------

OF_PATIENT = (
    *("PatientName", "PatientID", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate", "StudyTime"),
    *("ReferringPhysicianName", "SliceThickness", "Modality", "PositionReferenceIndicator", "SeriesNumber"),
)


def predicted(top, change):
    """Writes the squares of a changed series as a SEG, and returns what is read of it, with the file."""
    for image in series(top / "s"):
        number = image.InstanceNumber
        change(image)
        image.save_as(top / f"s/{number}.dcm", enforce_file_format=True)
    return written(top)


def written(top):
    tree = Source(top)
    found = find(tree, f"{top.name}/s")
    for wrong in found.refused:
        raise wrong
    (entry,) = found.entries
    scan = entry.read(tree, "axial")
    (file,) = write_seg(top, entry, scan, SQUARES.astype(np.uint8), ("lesion",), "nested")
    made = dcmread(file.rename(top / "m.dcm"))
    masks = class_maps(Path("m.dcm"), load(Source(top), f"{top.name}/m.dcm"), scan.origin, ("lesion",))
    assert (masks[0] == SQUARES).all()
    assert made.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness == APART
    return made


@pytest.mark.parametrize(
    "lost", [*[(each,) for each in OF_PATIENT], OF_PATIENT], ids=lambda lost: lost[0] if len(lost) == 1 else "all"
)
def test_a_seg_does_without_what_anonymised_files_lack(tmp_path, lost):
    """Attributes of type 2 are there and empty; the thickness is the distance between slices."""
    made = predicted(tmp_path, lambda image: [delattr(image, keyword) for keyword in lost])
    for keyword in {*lost} & {*OF_PATIENT[:9]}:
        assert keyword in made
        assert not made[keyword].value


@pytest.mark.parametrize(
    ("keyword", "kind", "value"),
    [
        ("PatientSex", "CS", "W"),
        ("StudyDate", "LO", "ANON"),
        ("PatientBirthDate", "LO", "XXXX"),
        ("StudyTime", "LO", "?"),
        ("SliceThickness", "LO", "thin"),
        ("SliceThickness", "DS", "0"),
        ("PatientName", "PN", "x" * 100),
        ("PatientID", "SQ", []),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:pydicom")
def test_a_seg_leaves_out_what_dicom_does_not_allow(tmp_path, keyword, kind, value):
    predicted(tmp_path, lambda image: image.add_new(keyword, kind, value))


@pytest.mark.parametrize("said", ["ISO_IR 1OO", "ISO IR 100", "latin1", "ISO_IR_100", "", "nonsense"])
def test_a_seg_has_the_patient_s_name_whatever_the_file_calls_its_characters(tmp_path, said):
    for image in series(tmp_path / "s"):
        image.SpecificCharacterSet, image.PatientName = "ISO_IR 100", "Müller^Jörg"
        file = tmp_path / f"s/{image.InstanceNumber}.dcm"
        image.save_as(file, enforce_file_format=True)
        file.write_bytes(file.read_bytes().replace(b"ISO_IR 100", said.encode().ljust(10), 1))
    made = written(tmp_path)
    assert (str(made.PatientName), made.SpecificCharacterSet) == ("Müller^Jörg", "ISO_IR 192")


@pytest.mark.parametrize("keyword", ["StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID", "PixelSpacing"])
@pytest.mark.parametrize("empty", [False, True])
def test_what_a_seg_cannot_do_without_is_named_with_its_file(tmp_path, keyword, empty):
    def lose(image):
        image[keyword].value = "" if empty else image[keyword].value
        if not empty:
            del image[keyword]

    with pytest.raises(FedDPError, match=rf"s/\d.dcm: has no {keyword}. Export "):
        predicted(tmp_path, lose)


def test_a_seg_of_slices_with_one_uid_is_refused(tmp_path):
    with pytest.raises(FedDPError, match=r"has the SOPInstanceUID of .*dcm"):
        predicted(tmp_path, lambda image: setattr(image, "SOPInstanceUID", "1.2.3"))


def test_a_seg_takes_spacing_and_direction_of_the_first_slice_where_they_are_rounded_elsewhere(tmp_path):
    """A cosine that differs by 2e-7, and a spacing by 3e-7 mm."""

    def change(image):
        image.ImageOrientationPatient = [1, 2e-7 * image.InstanceNumber, 0, 0, 1, 0]
        image.PixelSpacing = ["0.5000003" if image.InstanceNumber % 2 else "0.5", str(SPACING[1])]

    predicted(tmp_path, change)
