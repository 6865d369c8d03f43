"""Public data sets from somebody who means harm: zips, volumes and tables of `feddp data prepare`."""

import gzip
import struct
import zipfile
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

import feddp.archive
from feddp.data.formats.find import find
from feddp.data.formats.nifti import read_volume
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError, InputError
from feddp.limits import ARCHIVE_DIRECTORY, ARCHIVE_RATIO, IMAGE_BYTES, VOLUME_TAIL, VOXELS
from support.hostile_files import MIB, bmp, cost, one_line, png, sparse, zeros_gz

NAME = "Kvasir-SEG/images/a.png"
READ = "Source(Path({file!r})).read({name!r})"
SOURCE = "from feddp.data.prepare.source import Source"
VOLUME = "import feddp.data.formats.nifti as nifti; from feddp.data.prepare.source import Source"


def zipped(path: Path, files: dict[str, bytes], method=zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as target:
        for name, content in files.items():
            target.writestr(name, content)
    return path


def source_cost(file: Path) -> tuple[str, float]:
    return cost(SOURCE, READ.format(file=str(file), name=f"{file.stem}/{NAME}"))


def refused(file: Path, message: str) -> None:
    with pytest.raises(FedDPError, match=message) as error:
        Source(file).read(f"{file.stem}/{NAME}")
    assert str(file) in str(error.value)


# -- zips ------------------------------------------------------------------------------------------------------------


def test_a_file_that_unpacks_to_more_than_an_image_may_have_is_refused_by_the_directory(tmp_path):
    bomb = zipped(tmp_path / "set.zip", {NAME: bytes(IMAGE_BYTES + 1)})
    assert bomb.stat().st_size < MIB
    error, grown = source_cost(bomb)
    assert NAME in error
    assert "the limit is 160 MiB" in error
    assert grown < 30


def test_a_directory_that_lies_about_a_size_does_not_make_zipfile_unpack_the_rest(tmp_path):
    """96 MiB of zeros that the directory says are 10 bytes; Python's zipfile unpacks them all and then cuts, as is shown."""
    bomb = zipped(tmp_path / "set.zip", {NAME: bytes(96 * MIB)})
    content = bytearray(bomb.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<L", 10)
    bomb.write_bytes(content)
    error, grown = source_cost(bomb)
    assert "cannot be read" in error
    assert grown < 30
    naive = "\n    try: zipfile.ZipFile({!r}).read({!r})\n    except zipfile.BadZipFile: pass"
    assert cost("import zipfile", naive.format(str(bomb), NAME))[1] > 80


def test_a_directory_of_hundreds_of_mebibytes_is_not_read(tmp_path):
    """The last 22 bytes say how long the directory is: zipfile reads that much at once, as is shown."""
    size = 300 * MIB
    end = struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 1, 1, size, 0, 0)
    bomb = sparse(tmp_path / "set.zip", size + len(end), end=end)
    error, grown = source_cost(bomb)
    assert f"its directory has {size} bytes; the limit is {ARCHIVE_DIRECTORY // MIB} MiB" in error
    assert grown < 30
    naive = "\n    try: zipfile.ZipFile({!r})\n    except zipfile.BadZipFile: pass"
    assert cost("import zipfile", naive.format(str(bomb)))[1] > 250


def test_files_that_overlap_are_refused(tmp_path):
    """One file of 100 MiB of zeros, named 300 times by a directory of 20 KiB: 29 GiB in 120 KiB."""
    content = zipped(tmp_path / "one.zip", {NAME: bytes(100 * MIB)}).read_bytes()
    entry, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
    entries = [content[entry:end].replace(b"/a.png", f"/{i:01x}.png".encode()) for i in range(16)]
    directory = b"".join(entry.replace(b"images", f"im{i:04d}".encode()) for i in range(20) for entry in entries)
    count = len(entries) * 20
    tail = struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, count, count, len(directory), entry, 0)
    (tmp_path / "set.zip").write_bytes(content[:entry] + directory + tail)
    assert len(zipfile.ZipFile(tmp_path / "set.zip").namelist()) == count
    with pytest.raises(FedDPError, match="set.zip: unpacked it has 32000 MiB, more than a zip of its size can hold"):
        Source(tmp_path / "set.zip")


def test_a_zip_or_folder_of_too_many_files_is_refused(tmp_path, monkeypatch):
    import feddp.data.prepare.source as source

    files = {f"Kvasir-SEG/images/{i}.png": b"" for i in range(4)}
    zipped(tmp_path / "set.zip", files)
    zipfile.ZipFile(tmp_path / "set.zip").extractall(tmp_path / "set")
    for most, wrong in ((4, None), (3, "has (4|more than 3) files")):
        monkeypatch.setattr(feddp.archive, "ARCHIVE_FILES", most)
        monkeypatch.setattr(source, "ARCHIVE_FILES", most)
        for path in (tmp_path / "set.zip", tmp_path / "set"):
            if wrong is None:
                assert len(Source(path).names) == 4
            else:
                with pytest.raises(FedDPError, match=wrong):
                    Source(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_packed_otherwise_is_refused(tmp_path, method):
    """Their unpackers have no bound on what one step returns."""
    refused(zipped(tmp_path / "set.zip", {NAME: png(32, 32)}, method), "not compressed by deflate. Unpack it")


def test_an_encrypted_file_is_refused(tmp_path):
    content = bytearray(zipped(tmp_path / "set.zip", {NAME: b"x"}).read_bytes())
    for mark, place in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        content[content.index(mark) + place] |= 1
    (tmp_path / "set.zip").write_bytes(content)
    refused(tmp_path / "set.zip", "is encrypted")


@pytest.mark.parametrize(
    "spoil", [lambda c: c[: len(c) // 2], lambda c: c[:20] + b"\xff" * 40 + c[60:], lambda c: c[:-22] + bytes(22)]
)
def test_a_damaged_zip_is_named(tmp_path, spoil):
    file = zipped(tmp_path / "set.zip", {NAME: np.random.default_rng(0).bytes(1000)})
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(FedDPError, match="set.zip"):
        Source(file).read(f"set/{NAME}")


def test_a_damaged_file_of_a_zip_that_may_be_dicom_is_named(tmp_path):
    """A file without ending is read to see whether it is DICOM; the one beside it is none."""
    file = zipped(tmp_path / "set.zip", {"images/damaged": np.random.default_rng(0).bytes(1000), "images/other": b"x"})
    content = bytearray(file.read_bytes())
    start = content.index(b"images/damaged") + len(b"images/damaged")
    content[start : start + 40] = b"\xff" * 40
    file.write_bytes(content)
    found = find(Source(file), "set/images")
    assert [str(error) for error in found.refused] == [
        f"{file}: set/images/damaged cannot be read (Error -3 while decompressing data: invalid block type). Download it again."
    ]
    assert found.others == ["set/images/other"]


def test_whatever_bytes_are_changed_a_zip_is_read_or_named(tmp_path):
    """Any other exception than FedDPError fails the test. The zip as it was is read."""
    file = zipped(tmp_path / "set.zip", {NAME: png(8, 8), "b.png": b"x" * 50})
    content, rng, named = file.read_bytes(), np.random.default_rng(0), 0
    assert Source(file).read(f"set/{NAME}") == png(8, 8)
    for _ in range(400):
        changed = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            changed[place] = rng.integers(256)
        file.write_bytes(changed)
        try:
            tree = Source(file)
            for name in tree.names:
                tree.grey(name)
        except FedDPError:
            named += 1
    assert named > 200


def test_a_mask_that_packs_as_well_as_deflate_can_is_read(tmp_path):
    """An all black bitmap, as published masks are, packs nearly 1000 : 1; half a limit is not in the way of the real thing."""
    file = zipped(tmp_path / "set.zip", {NAME: bmp(2124, 2056)})
    (entry,) = zipfile.ZipFile(file).infolist()
    assert ARCHIVE_RATIO / 2 < entry.file_size / entry.compress_size < ARCHIVE_RATIO
    assert Source(file).grey(f"set/{NAME}").shape == (2056, 2124)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_link_out_of_a_downloaded_folder_is_refused_and_one_within_is_not(tmp_path):
    folder = tmp_path / "set/Kvasir-SEG/images"
    folder.mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(png(8, 8))
    (folder / "a.png").symlink_to(tmp_path / "secret.png")
    (folder / "b.png").write_bytes(png(8, 8))
    (folder / "c.png").symlink_to("b.png")
    tree = Source(tmp_path / "set")
    with pytest.raises(FedDPError, match="a.png: is a link that leads out of"):
        tree.grey(f"set/{NAME}")
    assert tree.grey("set/Kvasir-SEG/images/c.png").shape == (8, 8)


def test_an_image_of_too_many_pixels_or_frames_or_of_another_kind_is_named(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "huge.png").write_bytes(png(60_000, 6_000, b""))
    Image.new("L", (8, 8)).save(folder / "two.tif", save_all=True, append_images=[Image.new("L", (8, 8))])
    Image.new("RGB", (8, 8)).save(folder / "page.jpg", "EPS")
    Image.new("L", (8, 8)).save(folder / "one.tif")
    tree = Source(folder)
    for name, message in (
        ("huge.png", "huge.png: has .* Scale it down"),
        ("two.tif", "holds several pictures"),
        ("page.jpg", "not a readable"),
    ):
        with pytest.raises(FedDPError, match=message):
            tree.grey(f"set/{name}")
    assert tree.grey("set/one.tif").shape == (8, 8)


# -- volumes ---------------------------------------------------------------------------------------------------------


def volume(shape=(8, 8, 4), dtype=np.int16, **fields) -> bytes:
    """A NIfTI of zeros; `fields` are written over its header, whatever they say."""
    content = bytearray(nibabel.Nifti1Image(np.zeros(shape, dtype), np.eye(4)).to_bytes())
    for name, value in fields.items():
        place, kind = {"dim": (40, "<8h"), "vox_offset": (108, "<f"), "datatype": (70, "<2h")}[name]
        struct.pack_into(kind, content, place, *np.atleast_1d(value))
    return bytes(content)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "set").mkdir()

    def make(content: bytes, name: str = "v.nii.gz") -> Path:
        (tmp_path / "set" / name).write_bytes(content)
        return tmp_path / "set"

    return make


def volume_cost(folder: Path, more: str = "") -> tuple[str, float]:
    return cost(VOLUME, f"nifti.read_volume(Source(Path({str(folder)!r}){more}), 'set/v.nii.gz', 'axial')")


def test_ten_gibibytes_of_zeros_in_ten_mebibytes_are_refused_within_one(tree):
    """As no volume at all, and behind a small one. gzip.decompress would take all of it, as 128 MiB show."""
    for start, message in ((b"", "has no header of NIfTI"), (volume(), "unpacks to more than 1 MiB, which is the limit")):
        folder = tree(zeros_gz(10 * 1024, start))
        error, grown = volume_cost(folder)
        assert "set/v.nii.gz" in error
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(error)
        assert grown < 60
    file = tree(zeros_gz(128), "w.nii.gz") / "w.nii.gz"
    assert cost("import gzip", f"gzip.decompress(Path({str(file)!r}).read_bytes())")[1] > 120


def test_a_header_that_says_gibibytes_is_refused_before_they_are_made(tree):
    """15000 x 15000 x 3 voxels of two bytes are 1.3 GiB; with a limit lifted the file is unpacked as far as it goes."""
    content = volume(dim=[3, 15_000, 15_000, 3, 1, 1, 1, 1])[:352]
    folder = tree(zeros_gz(128, content))
    error, grown = volume_cost(folder)
    assert "set/v.nii.gz: has 15000 x 15000 x 3 voxels; the limit is 536,870,912 voxels in all. Give fewer" in error
    assert grown < 60
    assert volume_cost(folder, ", voxels=10**12")[0] != error


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": [3, 0, 8, 4, 1, 1, 1, 1]}, "0 x 8 x 4 voxels"),
        ({"dim": [3, -8, 8, 4, 1, 1, 1, 1]}, "voxels|readable"),
        ({"dim": [7, 2, 2, 2, 2, 2, 2, 2]}, "has 7 dimensions"),
        ({"dim": [1, 8, 1, 1, 1, 1, 1, 1]}, "has 1 dimensions"),
        ({"vox_offset": 2e9}, "start at byte 2000000000"),
        ({"vox_offset": float("nan")}, "not a readable NIfTI"),
        ({"datatype": [1792, 128]}, "has voxels of complex128"),
        ({"datatype": [9999, 8]}, "not a readable NIfTI"),
    ],
    ids=str,
)
def test_a_header_that_makes_no_volume_is_named(tree, fields, message):
    for name, content in (("v.nii", volume(**fields)), ("v.nii.gz", gzip.compress(volume(**fields)))):
        with pytest.raises(FedDPError, match=message) as error:
            read_volume(Source(tree(content, name)), f"set/{name}", "axial")
        assert f"set/{name}" in str(error.value)


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_volume_of_the_second_version_is_named(tree, order):
    """nibabel's reader of the first version would say that its data type is unknown."""
    content = nibabel.Nifti2Image(np.zeros((2, 2, 2), np.int16), np.eye(4)).to_bytes()
    assert content[:4] == (540).to_bytes(4, "little")
    content = content if order == "<" else (540).to_bytes(4, "big") + content[4:]
    with pytest.raises(InputError, match=r"set/v.nii: is NIfTI-2. Save it as NIfTI-1."):
        read_volume(Source(tree(content, "v.nii")), "set/v.nii", "axial")


def test_a_checksum_that_does_not_fit_is_still_noticed(tree):
    content = bytearray(gzip.compress(volume()))
    content[-8] ^= 1
    with pytest.raises(FedDPError, match="not a readable NIfTI volume .*CRC"):
        read_volume(Source(tree(bytes(content))), "set/v.nii.gz", "axial")


def test_a_volume_as_large_as_it_may_be_is_read_with_a_few_bytes_behind_it(tree):
    folder = tree(gzip.compress(volume((8, 8, 4)) + bytes(VOLUME_TAIL)))
    assert read_volume(Source(folder, voxels=256), "set/v.nii.gz", "axial").pixels.shape == (4, 8, 8)
    with pytest.raises(FedDPError, match="has 8 x 8 x 4 voxels; the limit is 255 voxels in all. .*a larger --voxels"):
        read_volume(Source(folder, voxels=255), "set/v.nii.gz", "axial")


OWN = """
def own():  # MiB of memory without that of files, which the system takes back when it needs it
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
"""


def test_a_ct_of_the_whole_body_is_within_the_limit_and_hardly_in_memory(tree):
    """2000 slices of 512 x 512 pass. Of 64 slices of 1024 x 1024 voxels, 256 MiB of values lie in a temporary file."""
    assert VOXELS >= 2000 * 512 * 512
    folder = tree(zeros_gz(128, volume(dim=[3, 1024, 1024, 64, 1, 1, 1, 1])[:352]))
    read = f"scan = nifti.read_volume(Source(Path({str(folder)!r})), 'set/v.nii.gz', 'axial')"
    told = "raise nifti.BadFile(nifti.Problem('read', f'{scan.pixels.nbytes // 2**20} {own() - before}', ''))"
    said, _ = cost(VOLUME + OWN, f"before = own(); {read}; {told}")
    size, grown = said.removeprefix("read: ").removesuffix(". .").split()
    assert int(size) == 256
    assert float(grown) < 60


def test_whatever_bytes_are_changed_a_volume_is_read_or_named(tree):
    """Any other exception than FedDPError fails the test. The volume as it was is read."""
    content, rng, named = volume(), np.random.default_rng(0), 0
    assert read_volume(Source(tree(content, "v.nii")), "set/v.nii", "axial").pixels.shape == (4, 8, 8)
    for _ in range(300):
        changed = bytearray(content)
        for place in rng.integers(0, 352, 3):
            changed[place] = rng.integers(256)
        try:
            read_volume(Source(tree(bytes(changed), "v.nii")), "set/v.nii", "axial")
        except FedDPError:
            named += 1
    assert 0 < named < 300


# -- tables, and the command -------------------------------------------------------------------------------------------


def test_the_command_ends_in_one_line(feddp, tmp_path):
    bomb = zipped(tmp_path / "set.zip", {"kaggle_3m/x": bytes(MIB)}, zipfile.ZIP_STORED)
    content = bytearray(bomb.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<L", 2**32 - 2)
    bomb.write_bytes(content)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for source, out in ((bomb, "out"), (tmp_path / "loop", "out"), (tmp_path / ("x" * 300), "out")):
        arguments = ("data", "prepare", "lgg", "--source", source, "--out", tmp_path / out)
        one_line(*feddp(*arguments)[::2])
    folder = tmp_path / "empty"
    folder.mkdir()
    one_line(*feddp("data", "prepare", "endopolyp", "--source", folder, "--out", tmp_path / "loop/x")[::2])
