"""`feddp predict` on pictures, volumes and series: masks in the images' own size, place and format."""

import gzip
import os
import shlex
import shutil

import nibabel
import numpy as np
import pydicom
import pytest
import tifffile
import torch
from PIL import Image
from torch import nn

from feddp.data.formats.write import VERSION
from feddp.data.preparation import KEY, Preparation
from feddp.networks import NETWORKS
from feddp.networks.weights import save_network
from support import ROOT
from support.docs_pages import commands_for
from support.scans import SHAPE, nifti, series, square


class Bright(nn.Module):
    """Class 1 above a brightness of 0.25, class 2 above 0.75, of images that are divided by 255."""

    roles = {}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.thresholds = nn.Parameter(torch.tensor([0.25, 0.75])[:classes].view(-1, 1, 1))

    def forward(self, x):
        return 100 * (x[:, :1] - self.thresholds)


@pytest.fixture
def predict(feddp, tmp_path, monkeypatch):
    """Runs the command with a network of some channels and classes; returns its exit code, stdout, stderr and the masks."""
    monkeypatch.setitem(NETWORKS, "bright", Bright)

    def run(images, *options, channels=1, classes='["lesion"]', out="masks", prepared=Preparation("axial", stretched=True)):
        network = tmp_path / "network.safetensors"
        metadata = {"network": "bright", "channels": str(channels), "classes": classes, "labels": "nested", "size": "32"}
        count = classes.count('"') // 2
        metadata |= {"normalise": "scale"} | ({KEY: prepared.text} if prepared else {})
        save_network(network, Bright(channels, count).state_dict(), metadata)
        code, *said = feddp("predict", "--network", network, "--images", images, "--out", tmp_path / out, *options)
        return code, *said, tmp_path / out

    return run


def pixels(file):
    return np.asarray(Image.open(file))


GREY = np.zeros((64, 32), np.uint8)
GREY[10:20, 4:12] = 200
TRUE = (GREY > 0).astype(np.uint8)


def test_pictures_of_every_kind_have_masks_and_overlays(predict, tmp_path):
    """A 16-bit picture of 0 and 60000 becomes 0 and 255, as more than a hundredth of it is bright."""
    images = tmp_path / "images"
    (images / "deep").mkdir(parents=True)
    Image.fromarray(GREY).save(images / "a.png")
    Image.fromarray(GREY).save(images / "b.jpg", quality=100)
    tifffile.imwrite(images / "c.tif", GREY.astype(np.uint16) * 300)
    Image.fromarray(GREY).save(images / "deep/d.bmp")
    code, out, err, masks = predict(images, "--overlay")
    assert (code, err) == (0, "")
    assert out == f"4 masks in {masks}\n"
    for name in ("a", "b", "c", "deep_d"):
        assert (pixels(masks / f"{name}.png") == TRUE).all()
    over = pixels(masks / "overlays/a.png")
    # 0.6 · 200 + 0.4 · (230, 159, 0); outside, the image
    assert over[12, 5].tolist() == [212, 184, 120]
    assert over[0, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("depth", [1, 257])
def test_pictures_are_marked_as_they_are_stored_and_what_else_they_are_is_said(predict, tmp_path, depth):
    """A viewer turns the TIFF by half; of six slices or of sixteen bits of ink, none is taken for the picture."""
    images = tmp_path / "images"
    images.mkdir()
    tag = [(274, "H", 1, 3, True)]
    tifffile.imwrite(images / "a.tif", GREY.astype("u2" if depth > 1 else "u1") * depth, extratags=tag)
    tifffile.imwrite(images / "b.tif", np.stack([GREY] * 6), imagej=True, truncate=True)
    tifffile.imwrite(images / "c.tif", np.dstack([GREY] * 4).astype("u2") * 257, photometric="separated")
    code, out, err, masks = predict(images)
    assert code == 1
    assert (pixels(masks / "a.png") == TRUE).all()
    assert "1 of the images, a first: read as stored, and their masks are too; an orientation" in err
    assert "b.tif: holds several pictures. Save one picture per file." in err
    assert "c.tif: is a TIFF in CMYK of 16 bits, which is not read. Save it as grey or RGB." in err


def test_classes_have_values_and_colours(predict, tmp_path):
    (tmp_path / "images").mkdir()
    two = np.where(GREY > 0, np.uint8(128), np.uint8(0))
    two[12:14, 6:8] = 255
    Image.fromarray(two).save(tmp_path / "images/a.png")
    _, _, _, masks = predict(tmp_path / "images", "--overlay", classes='["disc", "cup"]')
    assert (pixels(masks / "a.png") == TRUE + (two == 255)).all()
    assert pixels(masks / "overlays/a.png")[12, 6].tolist() == [187, 225, 246]  # 0.6 · 255 + 0.4 · (86, 180, 233)


def test_grey_images_are_converted_for_a_network_of_rgb_when_asked(predict, tmp_path):
    (tmp_path / "images").mkdir()
    Image.fromarray(GREY).save(tmp_path / "images/a.png")
    code, _, err, masks = predict(tmp_path / "images", channels=3)
    assert code == 2
    assert "has 1 channel(s), but the network expects 3. Save it as 8-bit RGB, or convert all with --convert" in err
    assert not masks.exists() or not list(masks.iterdir())
    assert predict(tmp_path / "images", "--convert", channels=3)[0] == 0
    assert (pixels(masks / "a.png") == TRUE).all()


def test_images_are_read_as_the_training_images_were(predict, tmp_path):
    """The network's file says coronal and 0 to 100; a volume of 8 x 12 x 16 voxels has 12 coronal slices.

    Values of 20 and 30 are 0.2 and 0.3 of the window: foreground is above 0.25. Alone, 30 would be the 99th percentile.
    """
    voxels = np.full((8, 12, 16), 20, np.float32)
    voxels[:, 5] = 30
    nifti(tmp_path / "images/scan.nii", voxels, np.eye(4))
    trained = Preparation("coronal", (0.0, 100.0), True)
    code, out, err, masks = predict(tmp_path / "images", prepared=trained)
    assert (code, err) == (0, "")
    assert [int(pixels(masks / f"scan_{n:03d}.png").all()) for n in range(12)] == [int(n == 5) for n in range(12)]
    assert predict(tmp_path / "images", "--axis", "coronal", "--window", "0,100", prepared=trained, out="typed")[2] == ""
    for file in masks.iterdir():
        assert file.read_bytes() == (tmp_path / "typed" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("trained", "options", "said"),
    [
        (Preparation("axial", (0.0, 200.0), True), (), []),
        (Preparation("axial", None, True), (), []),
        (
            Preparation("coronal", (0.0, 200.0), True),
            (),
            ["1 of the images, anna first: axial slices, but the network was trained on coronal ones"],
        ),
        (
            Preparation("axial", (0.0, 200.0), True),
            ("--window", "0,300"),
            ["3 of the images, anna first: read with another --window than the network's training images: 0,200"],
        ),
        (
            Preparation("axial", None, True),
            ("--window", "0,300"),
            ["training images: from the least value to the 99th percentile"],
        ),
        (
            Preparation("axial", None, False),
            (),
            ["2 of the images, anna first: made of the least", "had 8 bits: see --window"],
        ),
        (
            Preparation("", None, True),
            (),
            ["1 of the images, scan first: sliced as axial, because the network's file"],
        ),
        (None, (), ["are not described in its file: see --window", "sliced as axial"]),
        (None, ("--axis", "axial", "--window", "0,200"), []),
        (Preparation("axial", (0.0, 200.0), False), (), ["1 of the images, photo first: of 8 bits, and left as they are"]),
    ],
)
def test_what_is_not_as_in_training_is_a_warning(predict, tmp_path, scans, trained, options, said):
    """A series of 64 x 32 pixels and a volume of 8 x 8, of more than 8 bits, and a picture of 64 x 32 pixels and 8 bits."""
    nifti(tmp_path / "images/scan.nii", np.arange(512, dtype=np.int16).reshape(8, 8, 8), np.eye(4))
    Image.fromarray(GREY).save(tmp_path / "images/photo.png")
    code, _, err, _ = predict(tmp_path / "images", *options, prepared=trained)
    assert code == 0
    assert all(text in err for text in said), err
    assert all(line.startswith("warning: ") for line in err.splitlines())
    assert bool(err) == bool(said)


@pytest.mark.parametrize(("trained", "value"), [(Preparation(size=32), 1), (Preparation(), 2)])
def test_an_image_is_scaled_as_the_training_images_were_prepared(predict, tmp_path, trained, value):
    """Columns of 0, 255, 255, 0 and so on, 128 of them, to 32. Preparing weighs the eight nearest pixels of a new one's centre
    by 7, 7, 5, 5, 3, 3, 1 and 1, of 32: those of 255 are the two nearest and the two farthest, so the new pixel has 255 / 2,
    which is class 1; at the border, without three pixels, 15 / 28 of 255. The training's own resizing takes the two nearest
    pixels alone: 255, class 2. The mask has the image's size."""
    (tmp_path / "images").mkdir()
    columns = np.tile(np.array([0, 255, 255, 0], np.uint8), (128, 32))
    Image.fromarray(columns).save(tmp_path / "images/a.png")
    code, _, err, masks = predict(tmp_path / "images", classes='["lesion", "core"]', prepared=trained)
    assert (code, err) == (0, "")
    assert np.array_equal(pixels(masks / "a.png"), np.full((128, 128), value))


def test_a_network_that_says_nonsense_of_its_images_is_named(predict, tmp_path):
    class Wrong:
        text = '{"axis": "axial", "window": [1, 0], "stretched": true}'

    (tmp_path / "images").mkdir()
    Image.fromarray(GREY).save(tmp_path / "images/a.png")
    code, _, err, _ = predict(tmp_path / "images", prepared=Wrong)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "network.safetensors: 'prepared' in its metadata is wrong (axis must be one of" in err


OBLIQUE = nibabel.affines.from_matvec(
    np.array([[0, -0.6, 2.4], [0.5, 0, 0], [0, 0.8, 1.8]]), (3, -4, 5)
)  # 0.5, 1 and 3 mm; turned by about 37 degrees around the axis from left to right


@pytest.mark.parametrize("axis", ["axial", "coronal", "sagittal"])
@pytest.mark.parametrize(
    "affine",
    [np.diag([1.0, 1, 1, 1]), np.diag([-0.5, 0.7, 3, 1]), OBLIQUE],
    ids=["plain", "anisotropic, to the left", "oblique"],
)
def test_a_volume_s_mask_has_its_affine_and_its_voxels(predict, tmp_path, axis, affine):
    """Every side is 32 or 64, so that resizing to 32 and back keeps edges at even places: the mask is the bright voxels."""
    voxels = np.zeros((32, 64, 32), np.float32)
    voxels[4:12, 10:20, 6:16] = 200
    voxels[20:22, 40:42, 30:32] = 200
    nifti(tmp_path / "images/scan.nii.gz", voxels, affine)
    code, out, err, masks = predict(
        tmp_path / "images", "--format", "nifti", "--axis", axis, "--window", "0,255", out=f"masks-{axis}"
    )
    assert code == 0, err
    assert out == f"1 mask in {masks}\n"
    image, mask = nibabel.load(tmp_path / "images/scan.nii.gz"), nibabel.load(masks / "scan.nii.gz")
    assert (mask.affine == image.affine).all()
    for name in ("qform_code", "sform_code", "pixdim", "qoffset_x", "quatern_b", "srow_x", "xyzt_units"):
        assert (mask.header[name] == image.header[name]).all()
    assert mask.get_data_dtype() == np.uint8
    assert (np.asarray(mask.dataobj) == (voxels > 0)).all()


def test_a_volume_s_mask_has_no_text_of_its_image(predict, tmp_path):
    """dcm2niix writes a study's description there; others put the whole DICOM header into an extension (code 2)."""
    image = nibabel.Nifti1Image(np.arange(512, dtype=np.int16).reshape(8, 8, 8), np.eye(4))
    texts = {
        "data_type": b"NAME-A",
        "db_name": b"NAME-B",
        "descrip": b"NAME-C",
        "aux_file": b"NAME-D",
        "intent_name": b"NAME-E",
    }
    for name, text in texts.items():
        image.header[name] = text
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"NAME-F"))
    (tmp_path / "images").mkdir()
    nibabel.save(image, tmp_path / "images/scan.nii")
    written = (tmp_path / "images/scan.nii").read_bytes()
    assert [written.count(b"NAME-" + letter) for letter in (b"B", b"C", b"D", b"E", b"F")] == [
        1
    ] * 5  # nibabel clears data_type
    code, _, err, masks = predict(tmp_path / "images", "--format", "nifti")
    assert code == 0, err
    assert b"NAME-" not in gzip.decompress((masks / "scan.nii.gz").read_bytes())


@pytest.fixture
def scans(tmp_path):
    return series(tmp_path / "images/anna")


def test_a_dicom_seg_holds_the_voxels_of_the_masks_and_refers_to_its_series(predict, tmp_path, scans):
    """Read by highdicom, and by pydicom frame by frame, against the PNGs and against the squares that were drawn."""
    from highdicom.seg import segread

    window = ("--window", "0,200")
    code, _, err, masks = predict(tmp_path / "images", "--format", "dicom-seg", *window)
    assert code == 0, err
    assert predict(tmp_path / "images", *window, out="pngs")[0] == 0
    pngs = np.stack([pixels(tmp_path / f"pngs/anna_{number:03d}.png") for number in range(4)])
    drawn = np.zeros((4, *SHAPE), np.uint8)
    for number in range(4):
        drawn[(number, *square(number))] = 1
    assert (pngs == drawn).all()

    made = segread(masks / "anna.dcm")
    uids = [each.SOPInstanceUID for each in scans]
    assert (made.get_pixels_by_source_instance(uids)[..., 0] == drawn).all()

    raw = pydicom.dcmread(masks / "anna.dcm")
    assert raw.pixel_array.shape == (4, *SHAPE)
    seen = set()
    for frame, described in zip(raw.pixel_array, raw.PerFrameFunctionalGroupsSequence, strict=True):
        uid = described.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        assert (frame == drawn[uids.index(uid)]).all()
        seen.add(uid)
        position = described.PlanePositionSequence[0].ImagePositionPatient
        assert list(position) == list(scans[uids.index(uid)].ImagePositionPatient)
    assert seen == set(uids)
    assert raw.ReferencedSeriesSequence[0].SeriesInstanceUID == scans[0].SeriesInstanceUID
    assert raw.SeriesDescription == "FedDP segmentation"
    assert (raw.PatientID, raw.StudyInstanceUID) == ("P1", scans[0].StudyInstanceUID)
    (segment,) = raw.SegmentSequence
    assert (segment.SegmentLabel, segment.SegmentAlgorithmType) == ("lesion", "AUTOMATIC")
    (algorithm,) = segment.SegmentationAlgorithmIdentificationSequence
    assert (algorithm.AlgorithmName, algorithm.AlgorithmVersion) == ("FedDP", VERSION)
    measures = raw.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    assert list(measures.PixelSpacing) == list(scans[0].PixelSpacing)


def test_the_version_in_a_seg_is_the_package_s():
    assert f'\nversion = "{VERSION}"\n' in (ROOT / "pyproject.toml").read_text()


def test_what_a_prepared_seg_gives_back_is_what_was_predicted(predict, feddp, tmp_path, scans):
    """The masks of `predict --format dicom-seg` beside their series are a source of `data prepare folder`."""
    for patient in ("bert", "cleo"):
        series(tmp_path / f"images/{patient}", patient)
    _, _, _, masks = predict(tmp_path / "images", "--format", "dicom-seg", "--window", "0,200")
    shutil.move(tmp_path / "images", tmp_path / "source/clinic/images")
    shutil.move(masks, tmp_path / "source/clinic/masks")
    code, _, err = feddp("data", "prepare", "folder", "--source", tmp_path / "source", "--out", tmp_path / "out")
    assert code == 0, err
    wanted = np.zeros(SHAPE, np.uint8)
    wanted[square(2)] = 1
    assert (pixels(tmp_path / "out/clinic/masks/bert_002.png") == wanted).all()


def test_files_that_cannot_be_read_are_listed_at_the_end_and_the_others_done(predict, tmp_path, scans):
    images = tmp_path / "images"
    Image.fromarray(GREY).save(images / "good.png")
    (images / "empty.png").touch()
    (images / "half.png").write_bytes((images / "good.png").read_bytes()[:50])
    nifti(images / "scan.nii", np.zeros((32, 32, 2), np.uint8) + np.arange(32, dtype=np.uint8)[:, None, None], np.eye(4))
    (images / "broken.nii").write_bytes((images / "scan.nii").read_bytes()[:400])
    (images / "header.dcm").write_bytes((images / "anna/1.dcm").read_bytes()[:300])
    huge = bytearray((images / "good.png").read_bytes())
    huge[16:24] = (60_000).to_bytes(4, "big") * 2
    (images / "huge.png").write_bytes(huge)
    shutil.copytree(images / "anna", images / "bert")
    (images / "bert/1.dcm").write_bytes((images / "anna/1.dcm").read_bytes()[:-50])
    code, out, err, masks = predict(images)
    assert code == 1
    assert out == f"7 masks in {masks}\n"  # a picture, two slices, four slices
    lines = err.splitlines()
    assert len(lines) == 6
    for name in ("empty.png", "half.png", "broken.nii", "header.dcm", "huge.png", "1.dcm"):
        assert sum(name in line for line in lines) == 1, name
    assert {file.name for file in masks.iterdir()} == {
        "good.png", "scan_000.png", "scan_001.png", *(f"anna_{n:03d}.png" for n in range(4))
    }  # fmt: skip


def test_what_may_be_an_image_and_is_not_read_is_listed_and_texts_are_a_warning(predict, tmp_path):
    """Files of formats that are not read, a linked folder, a link to nothing and a pipe; hidden files are nobody's images."""
    images = tmp_path / "images"
    (images / "deep").mkdir(parents=True)
    Image.fromarray(GREY).save(images / "good.png")
    (tmp_path / "elsewhere").mkdir()
    Image.fromarray(GREY).save(tmp_path / "elsewhere/lost.png")
    for name in ("scan.nrrd", "deep/scan.mha", "scan.JP2", "unknown", ".DS_Store", "Thumbs.db", "README", "sites.csv", "n.txt"):
        (images / name).write_text("x")
    (images / "linked").symlink_to(tmp_path / "elsewhere")
    (images / "gone.png").symlink_to(tmp_path / "nothing.png")
    os.mkfifo(images / "pipe")
    code, out, err, masks = predict(images)
    assert (code, out) == (1, f"1 mask in {masks}\n")
    said = err.splitlines()
    assert said[0] == "warning: left out, as no images: images/README, images/Thumbs.db, images/n.txt and 1 more"
    unknown = "is no image of a known format. Convert it to PNG, TIFF, NIfTI or DICOM, or leave it out"
    linked = "is a link to a folder or to nothing, which is not read. Put a readable copy there, or leave it out"
    odd = "is not a regular file. Put a readable copy there, or leave it out"
    wrong = {"deep/scan.mha": unknown, "gone.png": linked, "linked": linked, "pipe": odd}
    wrong |= dict.fromkeys(("scan.JP2", "scan.nrrd", "unknown"), unknown)
    assert sorted(said[1:]) == [f"{images}/{name}: {what}." for name, what in wrong.items()]
    assert [file.name for file in masks.iterdir()] == ["good.png"]


def test_a_folder_that_cannot_be_read_is_listed(predict, tmp_path, monkeypatch):
    """But for lost+found, which a disk has at its top and only the administrator may read."""
    for name in ("secret", "lost+found"):
        (tmp_path / "images" / name).mkdir(parents=True)
    Image.fromarray(GREY).save(tmp_path / "images/good.png")
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith(("secret", "lost+found")):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    code, _, err, _ = predict(tmp_path / "images")
    assert code == 1
    assert "images/secret: is a folder that cannot be read (Permission denied). Put a readable copy there" in err
    assert "lost+found" not in err


@pytest.mark.parametrize("picture", ["P7_000.png", "p7/000.jpg"])
def test_two_images_of_one_mask_are_refused_before_anything_is_written(predict, tmp_path, picture):
    """The mask of a volume's first slice, P7_000.png, is also that of a picture of this name."""
    nifti(tmp_path / "images/P7.nii.gz", np.arange(128, dtype=np.int16).reshape(8, 8, 2), np.eye(4))
    (tmp_path / "images" / picture).parent.mkdir(exist_ok=True)
    Image.fromarray(GREY).save(tmp_path / "images" / picture)
    code, _, err, masks = predict(tmp_path / "images")
    assert (code, masks.exists()) == (2, False)
    assert f"images/P7.nii.gz and {tmp_path}/images/{picture} may both have the mask" in err
    (tmp_path / "images" / picture).rename(tmp_path / "images/P7_00.png")
    assert predict(tmp_path / "images")[0] == 0


def test_a_network_that_has_diverged_writes_no_mask(predict, tmp_path, monkeypatch):
    """A probability that is no number is not above the threshold: the mask would be empty."""
    (tmp_path / "images").mkdir()
    Image.fromarray(GREY).save(tmp_path / "images/a.png")
    monkeypatch.setattr(Bright, "forward", lambda self, x: x[:, :1] * self.thresholds * torch.nan)
    code, _, err, masks = predict(tmp_path / "images", "--overlay")
    assert (code, masks.exists()) == (2, False)
    assert "predictions are not finite; the network has diverged" in err


def test_a_format_that_the_images_cannot_have_is_one_line(predict, tmp_path):
    (tmp_path / "images").mkdir()
    Image.fromarray(GREY).save(tmp_path / "images/a.png")
    for wrong, said in (
        (("--format", "nifti"), "a.png is no nifti image"),
        (("--format", "dicom-seg"), "a.png is no dicom image"),
        (("--format", "gif"), "--format gif: use png or nifti or dicom-seg"),
        (("--axis", "x"), "--axis x: use axial or coronal or sagittal"),
    ):
        code, _, err, masks = predict(tmp_path / "images", *wrong)
        assert (code, len(err.strip().splitlines()), masks.exists()) == (2, 1, False)
        assert said in err


def test_the_commands_of_the_page_work(predict, feddp, tmp_path, monkeypatch):
    """Of docs/how-to/use-a-network.md: the folders that it names, and a network that another command has written."""
    monkeypatch.chdir(tmp_path)
    series(tmp_path / "ct/anna")
    nifti(tmp_path / "mri/scan.nii.gz", np.arange(512, dtype=np.int16).reshape(8, 8, 8), np.eye(4))
    assert predict("mri")[0] == 0  # writes network.safetensors
    commands = commands_for("test_predict_formats", "docs/how-to/use-a-network.md")
    assert len(commands) == 2
    for command in commands:
        code, _, err = feddp(*shlex.split(command)[1:])
        assert code == 0, err
    assert [file.name for file in (tmp_path / "masks-ct").iterdir()] == ["anna.dcm"]
    assert {file.name for file in (tmp_path / "masks-mri").iterdir()} == {"scan.nii.gz", "overlays"}


def test_a_source_with_masks_is_not_taken_for_images(predict, tmp_path):
    for part in ("images", "masks"):
        (tmp_path / "scans/north" / part).mkdir(parents=True)
        Image.fromarray(GREY).save(tmp_path / "scans/north" / part / "a.png")
    for folder in ("scans", "scans/north"):
        code, _, err, _ = predict(tmp_path / folder)
        assert code == 2
        assert f"holds masks besides images; name the images: {tmp_path}/scans/north/images" in err


def test_a_site_s_folder_is_not_taken_for_images(predict, tiny_root):
    code, _, err, _ = predict(tiny_root / "site-1")
    assert code == 2
    assert "is a site's folder, with masks; name its images" in err
