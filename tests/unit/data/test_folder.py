"""A site's folder: written whole or not at all, and opened only if its description is in order."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddp.data.folder import Row, SiteFolder, find_sites, metadata_of, misfit, write_site
from feddp.errors import FedDPError
from feddp.jobs.folder import federation_of

REQUIRED = {"name": "toy", "channels": 3, "classes": ["disc", "cup"], "labels": "nested", "scanner": "A"}
IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
MASK = np.arange(20, dtype=np.uint8).reshape(4, 5) % 3


def samples():
    return [(f"i{n}", f"p{n}", split, IMAGE + n, MASK) for n, split in enumerate(("train", "val", "test", "train"))]


def test_what_is_written_opens_with_the_same_bits(tmp_path):
    write_site(tmp_path / "A", REQUIRED, samples())
    folder = SiteFolder.open(tmp_path / "A")
    assert (folder.site, folder.dataset, folder.channels, folder.labels) == ("A", "toy", 3, "nested")
    assert folder.classes == ("disc", "cup")
    assert folder.rows_of("train") == (Row("i0", "p0", "train"), Row("i3", "p3", "train"))
    assert [row.split for row in folder.rows] == ["train", "val", "test", "train"]
    assert np.array_equal(np.asarray(Image.open(folder.image_path("i3"))), IMAGE + 3)
    assert np.array_equal(np.asarray(Image.open(folder.mask_path("i3"))), MASK)
    assert json.loads((tmp_path / "A" / "dataset.json").read_text())["scanner"] == "A"


def test_an_interrupted_write_leaves_no_site(tmp_path):
    def breaks_off():
        yield samples()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_site(tmp_path / "A", REQUIRED, breaks_off())
    assert list(tmp_path.iterdir()) == []


def test_a_killed_write_is_not_a_site_and_is_cleared_by_the_next(tmp_path):
    """kill -9 leaves the hidden sibling behind: no site for `find_sites`, no obstacle for the next run."""
    write_site(tmp_path / ".A.partial", REQUIRED, samples())
    with pytest.raises(FedDPError, match="no site's folder"):
        find_sites(tmp_path)
    write_site(tmp_path / "A", REQUIRED, samples()[:2])
    assert [path.name for path in tmp_path.iterdir()] == ["A"]
    assert len(list((tmp_path / "A" / "images").iterdir())) == 2


def test_an_occupied_target_is_refused_and_kept(tmp_path):
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "notes.txt").write_text("mine")
    with pytest.raises(FedDPError, match="A: not empty. Remove it"):
        write_site(tmp_path / "A", REQUIRED, samples())
    assert (tmp_path / "A" / "notes.txt").read_text() == "mine"


def test_an_empty_folder_elsewhere_that_is_linked_is_used(tmp_path):
    """A larger disk, say. The whole set was made before the link turned out to be no folder that can be removed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "A").symlink_to(tmp_path / "disk")
    write_site(tmp_path / "A", REQUIRED, samples())
    assert (tmp_path / "A").is_symlink()
    assert len(SiteFolder.open(tmp_path / "A").rows) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A", "disk"]


def test_an_empty_target_is_used(tmp_path):
    (tmp_path / "A").mkdir()
    write_site(tmp_path / "A", REQUIRED, samples())
    assert len(SiteFolder.open(tmp_path / "A").rows) == 4


@pytest.mark.parametrize(
    ("image", "mask", "message"),
    [
        (IMAGE.astype(float), MASK, "uint8"),
        (IMAGE[..., 0], MASK, "do not fit 3 channel"),
        (IMAGE[:2], MASK, "do not fit"),
        (IMAGE, MASK + 1, "value 3. Use 0 to 2"),
    ],
)
def test_wrong_pixels_are_not_written(tmp_path, image, mask, message):
    with pytest.raises(FedDPError, match=f"A/i0: .*{message}"):
        write_site(tmp_path / "A", REQUIRED, [("i0", "p0", "train", image, mask)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stem", "patient", "message"),
    [
        ("i0", "M\udcfcller", r"A: the name of patient 'M\\udcfcller' is not a line"),
        ("i\udcfc", "p0", r"A: the name of image 'i\\udcfc' is not a line"),
        ("i" * 252, "p0", r"A: image 'i+\.\.\.' has a name too long for a file"),
    ],
)
def test_names_that_no_table_can_hold_are_not_written(tmp_path, stem, patient, message):
    """Python reads a file's name of another encoding, such as Latin-1, with letters that UTF-8 does not have."""
    with pytest.raises(FedDPError, match=message):
        write_site(tmp_path / "A", REQUIRED, [(stem, patient, "train", IMAGE, MASK)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("dataset.json", "{", "not readable JSON"),
        ("dataset.json", "[]", "holds a list"),
        ("dataset.json", json.dumps(REQUIRED | {"channels": 2}), "channels is 2. Make it 1 or 3"),
        ("dataset.json", json.dumps(REQUIRED | {"channels": True}), "channels is true"),
        ("dataset.json", json.dumps(REQUIRED | {"classes": []}), "classes is"),
        ("dataset.json", json.dumps(REQUIRED | {"labels": "both"}), 'labels is "both"'),
        (
            "dataset.json",
            json.dumps(REQUIRED | {"volumes": "case"}),
            'volumes is "case". Make it "patient" or "volume", or leave it out',
        ),
        ("dataset.json", json.dumps(REQUIRED | {"volumes": None}), "volumes is null"),
        ("split.csv", "image;patient;split\n", "header 'image;patient;split'"),
        ("split.csv", "image,patient,split\na,p,train\nb,p,test\n", "patient p is in train and test"),
        ("split.csv", "image,patient,split\na,p,trian\n", "split 'trian'"),
        ("split.csv", "image,patient,split\na,p,train\na,p,train\n", "listed more than once"),
        ("split.csv", "image,patient,split\n../a,p,train\n", "is a path"),
        ("split.csv", "image,patient,split\na,p\n", "does not have three fields"),
    ],
)
def test_an_ill_formed_description_is_refused_by_name(tmp_path, file, text, message):
    write_site(tmp_path / "A", REQUIRED, samples())
    (tmp_path / "A" / file).write_text(text)
    with pytest.raises(FedDPError, match=message) as error:
        SiteFolder.open(tmp_path / "A")
    assert str(tmp_path / "A" / file) in str(error.value)


def test_a_linked_folder_has_the_links_name(tmp_path, monkeypatch):
    """As the check says and as the run looks for it; `.` and `..` have the name of what they are."""
    write_site(tmp_path / "A", REQUIRED, samples())
    (tmp_path / "data").mkdir()
    (tmp_path / "data/north").symlink_to(tmp_path / "A")
    assert federation_of(tmp_path / "data")[0] == ["north"]
    monkeypatch.chdir(tmp_path / "A/images")
    assert [SiteFolder.open(Path(path)).site for path in ("..", "../../A", "../../data/north")] == ["A", "A", "north"]
    monkeypatch.chdir(tmp_path / "A")
    assert SiteFolder.open(Path()).site == "A"


@pytest.mark.parametrize("file", ["dataset.json", "split.csv"])
def test_a_missing_description_is_refused_by_name(tmp_path, file):
    write_site(tmp_path / "A", REQUIRED, samples())
    (tmp_path / "A" / file).unlink()
    with pytest.raises(FedDPError, match=f"{file}: is missing"):
        SiteFolder.open(tmp_path / "A")


def test_a_spreadsheets_byte_order_mark_is_read(tmp_path):
    write_site(tmp_path / "A", REQUIRED, samples())
    (tmp_path / "A" / "split.csv").write_text("image,patient,split\r\ni0, p0, val\r\n", encoding="utf-8-sig")
    assert SiteFolder.open(tmp_path / "A").rows == (Row("i0", "p0", "val"),)


def test_a_patients_images_are_a_volume_only_where_the_folder_says_so(tmp_path):
    for name, said in (("pictures", {}), ("slices", {"volumes": "patient"})):
        write_site(tmp_path / name, REQUIRED | said, samples())
        assert SiteFolder.open(tmp_path / name).volumes == ("patient" if name == "slices" else "")


def test_find_sites_takes_a_root_only(tmp_path):
    for site in ("B", "A"):
        write_site(tmp_path / site, REQUIRED, samples())
    (tmp_path / "notes").mkdir()
    assert find_sites(tmp_path) == [tmp_path / "A", tmp_path / "B"]
    with pytest.raises(FedDPError, match="Give the folder that holds"):
        find_sites(tmp_path / "A")


def test_an_unknown_split_or_folder_is_refused(tmp_path):
    write_site(tmp_path / "A", REQUIRED, samples())
    with pytest.raises(FedDPError, match="no split 'dev'"):
        SiteFolder.open(tmp_path / "A").rows_of("dev")
    with pytest.raises(FedDPError, match="no such folder"):
        SiteFolder.open(tmp_path / "B")


def test_data_fit_what_is_made_for_them(tmp_path):
    """Of all three metadata, or of the channels alone where no mask is read."""
    write_site(tmp_path / "A", REQUIRED, samples())
    folder = SiteFolder.open(tmp_path / "A")
    metadata = metadata_of(folder)
    assert list(metadata) == ["channels", "classes", "labels"]
    assert misfit(folder, metadata) is None
    assert misfit(folder, {"channels": folder.channels}) is None
    other = metadata | {"labels": "exclusive" if folder.labels == "nested" else "nested"}
    assert misfit(folder, other) == (tuple(metadata.values()), tuple(other.values()))
    assert misfit(folder, {"channels": 7}) == ((folder.channels,), (7,))
