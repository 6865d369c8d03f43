"""Known pixels in every transfer syntax that the docs list, and what is said of the others."""

import io
import re
import zlib

import imagecodecs
import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread, uid
from pydicom.encaps import encapsulate, encapsulate_extended
from pydicom.pixels.processing import convert_color_space

from feddp.data.formats.decoding import CODECS
from feddp.data.formats.dicom_series import read_series
from feddp.data.formats.find import find
from feddp.data.prepare.source import Source
from feddp.errors import FedDPError
from support import ROOT
from support.jpeg_lossless import PREDICTORS, encode
from support.scans import deflated, series

RNG = np.random.default_rng(48)
JPEG_2000 = {"codecformat": "j2k", "level": 0, "reversible": True}


def read(folder):
    (entry,) = find(Source(folder), folder.name).entries
    return read_series(Source(folder), entry.files).pixels


def written(folder, syntax, values, frames, bits=None, **changes):
    """Writes values (F, H, W) or (F, H, W, 3) as a file whose packed frames these are; returns its folder."""
    (image,) = series(folder, slices=1)
    for keyword in ("RescaleSlope", "RescaleIntercept", "ImagePositionPatient", "ImageOrientationPatient"):
        delattr(image, keyword)
    image.NumberOfFrames, image.Rows, image.Columns = values.shape[:3]
    image.SamplesPerPixel = 3 if values.ndim == 4 else 1
    image.PhotometricInterpretation = "RGB" if values.ndim == 4 else "MONOCHROME2"
    if values.ndim == 4:
        image.PlanarConfiguration = 0
    image.BitsAllocated = 8 * values.itemsize
    image.BitsStored = bits or image.BitsAllocated
    image.HighBit = image.BitsStored - 1
    image.PixelRepresentation = int(values.dtype.kind == "i")
    image.PixelData = encapsulate(frames)
    image["PixelData"].VR, image["PixelData"].is_undefined_length = "OB", True
    image.file_meta.TransferSyntaxUID = syntax
    for keyword, value in changes.items():
        setattr(image, keyword, value)
    image.save_as(folder / "1.dcm", enforce_file_format=True)
    return folder


def drawn(kind, bits, components=1):
    """Two frames of 20 x 12 pixels of any values of so many bits."""
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if kind[0] == "i" else (0, 1 << bits)
    shape = (2, 20, 12, components) if components > 1 else (2, 20, 12)
    return RNG.integers(low, high, shape).astype(kind)


def patterns(values, bits):
    """What a codec without signs keeps of values: their lowest bits."""
    return (values.astype(np.int64) & ((1 << bits) - 1)).astype("u1" if bits <= 8 else "u2")


# -- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize(("kind", "bits"), [("u1", 8), ("u2", 10), ("u2", 12), ("i2", 12), ("u2", 16), ("i2", 16)])
def test_jpeg_lossless_is_read_to_the_bit(tmp_path, kind, bits, predictor):
    values = drawn(kind, bits)
    frames = [encode(patterns(each, bits), bits, predictor, restart=predictor % 2 * 4) for each in values]
    syntax = uid.JPEGLosslessSV1 if predictor == 1 else uid.JPEGLossless
    assert (read(written(tmp_path / "s", syntax, values, frames, bits)) == values).all()


def test_a_point_transform_leaves_the_lowest_bits_out(tmp_path):
    """12 bits without the two lowest: 4 · floor(value / 4)."""
    values = drawn("u2", 12)
    frames = [encode(each, 12, 6, shift=2) for each in values]
    assert (read(written(tmp_path / "s", uid.JPEGLossless, values, frames, 12)) == values // 4 * 4).all()


def test_values_of_fewer_bits_than_a_file_says_are_read(tmp_path):
    """A JPEG of 8 bits in a file of 16."""
    values = drawn("u1", 8)
    frames = [encode(each, 8) for each in values]
    found = read(written(tmp_path / "s", uid.JPEGLosslessSV1, values.astype("u2"), frames, 12))
    assert (found == values).all()
    assert found.dtype == np.float32


def by_jpeg_lossless(values, bits):
    return encode(patterns(values, bits), bits)


def by_jpeg_ls(values, bits):
    return imagecodecs.jpegls_encode(patterns(values, bits))


def by_jpeg_2000(values, bits):
    return imagecodecs.jpeg2k_encode(values, bitspersample=bits, **JPEG_2000)


def by_htj2k(values, bits):
    return imagecodecs.htj2k_encode(values, reversible=True)


HTJ2K = {uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K}
LOSSLESS = {
    uid.JPEGLSLossless: by_jpeg_ls,
    uid.JPEGLSNearLossless: by_jpeg_ls,
    uid.JPEG2000Lossless: by_jpeg_2000,
    uid.JPEG2000: by_jpeg_2000,
    uid.HTJ2KLossless: by_htj2k,
    uid.HTJ2KLosslessRPCL: by_htj2k,
    uid.HTJ2K: by_htj2k,
}


@pytest.mark.parametrize(("kind", "bits"), [("u1", 8), ("u2", 12), ("u2", 16), ("i2", 16)])
@pytest.mark.parametrize("syntax", LOSSLESS, ids=lambda each: each.keyword)
def test_other_lossless_syntaxes_are_read_to_the_bit(tmp_path, syntax, kind, bits):
    if syntax in HTJ2K and not hasattr(imagecodecs, "htj2k_encode"):
        pytest.skip("the imagecodecs of Python 3.10 decodes HTJ2K, and does not encode it")
    values = drawn(kind, bits)
    frames = [LOSSLESS[syntax](each, bits) for each in values]
    assert (read(written(tmp_path / "s", syntax, values, frames, bits)) == values).all()


STEPS = bytes.fromhex(  # by OpenJPH: 61 times the numbers 0 to 63, lossless
    "ff4fff5100294000000000080000000800000000000000000000000800000008000000000000000000010f0101ff50000800"
    "020000000aff52000c00020001000504044001ff5c00132088909090909090909090909090888888ff64001700014f70656e"
    "4a50482056657220302e32362e332eff90000a00000000005a0001ff93c0002635f6050774000000c00013400013002afe02"
    "07740064f103877400c000134000138010100182740092288900c35400c0002a20001560388ee3aa70827500ce3b77eefcc0"
    "4201ecb600ffd9"
)


@pytest.mark.parametrize("syntax", sorted(HTJ2K))
def test_htj2k_is_read_by_every_python(tmp_path, syntax):
    values = (np.arange(64, dtype=np.uint16) * 61).reshape(1, 8, 8)
    assert (read(written(tmp_path / "s", syntax, values, [STEPS])) == values).all()


@pytest.mark.parametrize("syntax", [uid.RLELossless, uid.JPEGLSLossless])
@pytest.mark.parametrize(("kind", "bits"), [("u1", 8), ("i2", 16), ("u2", 12)])
def test_what_pydicom_packs_is_read_to_the_bit(tmp_path, syntax, kind, bits):
    """With its own coder of RLE, and pyjpegls."""
    values = drawn(kind, bits)
    folder = written(tmp_path / "s", uid.ExplicitVRLittleEndian, values, [b"ab"], bits)
    image = dcmread(folder / "1.dcm", force=True)
    image.PixelData = values.tobytes()
    image["PixelData"].is_undefined_length = False
    image.compress(syntax)
    image.save_as(folder / "1.dcm")
    assert (read(folder) == values).all()


@pytest.mark.parametrize("syntax", [uid.ExplicitVRLittleEndian, uid.ImplicitVRLittleEndian, uid.ExplicitVRBigEndian])
@pytest.mark.parametrize(("kind", "bits"), [("u1", 8), ("i2", 12), ("u2", 16)])
def test_plain_pixels_are_read_in_every_order_of_bytes(tmp_path, syntax, kind, bits):
    values = drawn(kind, bits)
    (image,) = series(tmp_path / "s", slices=1)
    del image.RescaleSlope, image.RescaleIntercept, image.ImagePositionPatient
    image.NumberOfFrames, image.Rows, image.Columns = values.shape
    image.BitsAllocated, image.BitsStored, image.HighBit = 8 * values.itemsize, bits, bits - 1
    image.PixelRepresentation = int(kind[0] == "i")
    order = ">" if syntax == uid.ExplicitVRBigEndian else "<"
    image.PixelData = values.astype(order + kind).tobytes()
    image.file_meta.TransferSyntaxUID = syntax
    image["PixelData"].VR = "OB" if kind == "u1" and order == "<" else "OW"
    if kind == "u1" and order == ">":  # two pixels are a word, whose bytes are turned
        image.PixelData = values.reshape(-1, 2)[:, ::-1].tobytes()
    little = syntax != uid.ExplicitVRBigEndian
    implicit = syntax == uid.ImplicitVRLittleEndian
    image.save_as(tmp_path / "s/1.dcm", enforce_file_format=True, little_endian=little, implicit_vr=implicit)
    assert (read(tmp_path / "s") == values).all()


def test_a_deflated_file_is_read_like_the_plain_one(tmp_path):
    start, rest = deflated(tmp_path / "s")
    expected = read(tmp_path / "s")
    packer = zlib.compressobj(wbits=-15)
    (tmp_path / "s/1.dcm").write_bytes(start + packer.compress(rest) + packer.flush())
    assert (read(tmp_path / "s") == expected).all()
    (tmp_path / "s/1.dcm").write_bytes(start + zlib.compressobj(wbits=-15).compress(rest))
    assert "1.dcm: is not a readable DICOM file" in str(find(Source(tmp_path / "s"), "s").refused[0])


# -- lossy -----------------------------------------------------------------------------------------------------------

SMOOTH = np.stack([np.add.outer(np.arange(20), np.arange(12)) * scale for scale in (5, 7)])


def by_jpeg(values, **options):
    return imagecodecs.jpeg8_encode(values, level=95, **options)


@pytest.mark.parametrize(
    ("syntax", "bits"), [(uid.JPEGBaseline8Bit, 8), (uid.JPEGExtended12Bit, 8), (uid.JPEGExtended12Bit, 12)]
)
def test_jpeg_is_read_within_its_loss(tmp_path, syntax, bits):
    """At quality 95 the coarsest step of T.81's table of luminance is 121 / 10: 12 of 8 bits; ramps lose far less."""
    values = (SMOOTH * (1 if bits == 8 else 16)).astype("u1" if bits == 8 else "u2")
    frames = [by_jpeg(each, bitspersample=bits) for each in values]
    found = read(written(tmp_path / "s", syntax, values, frames, bits))
    assert np.abs(found.astype(int) - values).max() <= 6
    assert np.abs(found[1].astype(int) - found[0]).max() > 20


def test_jpeg_ls_near_lossless_keeps_its_promise(tmp_path):
    """NEAR = 3: no value is farther than 3 from what it was (T.87, 4.2.1)."""
    values = drawn("u2", 12)
    frames = [imagecodecs.jpegls_encode(each, level=3) for each in values]
    found = read(written(tmp_path / "s", uid.JPEGLSNearLossless, values, frames, 12))
    assert 0 < np.abs(found - values).max() <= 3


@pytest.mark.parametrize("syntax", [uid.JPEG2000, uid.HTJ2K])
def test_jpeg_2000_is_read_within_its_loss(tmp_path, syntax):
    if syntax in HTJ2K and not hasattr(imagecodecs, "htj2k_encode"):
        pytest.skip("the imagecodecs of Python 3.10 decodes HTJ2K, and does not encode it")
    values = (SMOOTH * 16).astype("u2")
    if syntax == uid.JPEG2000:
        frames = [imagecodecs.jpeg2k_encode(each, level=60, bitspersample=12, codecformat="j2k") for each in values]
    else:
        frames = [imagecodecs.htj2k_encode(each, level=0.0005, reversible=False) for each in values]
    found = read(written(tmp_path / "s", syntax, values, frames, 12))
    assert np.abs(found - values).max() <= 40  # a hundredth of 4096


# -- colour ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("photometry", ["RGB", "YBR_FULL"])
@pytest.mark.parametrize("syntax", [uid.JPEGLosslessSV1, uid.JPEGLSLossless, uid.RLELossless, uid.ExplicitVRLittleEndian])
def test_colours_become_red_green_and_blue(tmp_path, syntax, photometry):
    """YBR_FULL by PS3.3 C.7.6.3.1.2, as pydicom computes it; without loss but for that."""
    values = drawn("u1", 8, 3)
    frames = {
        uid.JPEGLosslessSV1: lambda: [encode(each, 8) for each in values],
        uid.JPEGLSLossless: lambda: [imagecodecs.jpegls_encode(each) for each in values],
    }.get(syntax, lambda: [b"ab", b"ab"])()
    folder = written(tmp_path / "s", syntax, values, frames, PhotometricInterpretation=photometry)
    if frames[0] == b"ab":
        image = dcmread(folder / "1.dcm")
        image.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
        image.PixelData = values.tobytes()
        image["PixelData"].is_undefined_length = False
        if syntax == uid.RLELossless:
            image.compress(syntax, generate_instance_uid=False)
        image.save_as(folder / "1.dcm")
    wanted = values if photometry == "RGB" else np.stack([convert_color_space(each, "YBR_FULL", "RGB") for each in values])
    found = read(folder)
    assert found.dtype == np.uint8
    assert (found == wanted).all()


@pytest.mark.parametrize("kind", ["u1", "u2"])
def test_the_transformed_colours_of_jpeg_2000_are_read_to_the_bit(tmp_path, kind):
    """YBR_RCT: the codestream says how, and the decoder undoes it."""
    values = drawn(kind, 8 * int(kind[1]), 3)
    frames = [imagecodecs.jpeg2k_encode(each, mct=True, **JPEG_2000) for each in values]
    found = read(written(tmp_path / "s", uid.JPEG2000Lossless, values, frames, PhotometricInterpretation="YBR_RCT"))
    assert (found == values).all()


COLOURS = np.zeros((1, 16, 32, 3), np.uint8)
COLOURS[0, :, :16], COLOURS[0, :, 16:] = (200, 40, 30), (20, 60, 220)


@pytest.mark.parametrize("photometry", ["YBR_FULL_422", "YBR_FULL", "RGB"])
@pytest.mark.parametrize("mark", ["JFIF", "Adobe"])
def test_a_jpeg_s_own_mark_of_its_colours_counts(tmp_path, photometry, mark):
    """JFIF and Adobe's transform 1 both mean luminance and differences, whatever the file says: they are turned back once."""
    stream = io.BytesIO()
    Image.fromarray(COLOURS[0]).save(stream, "JPEG", quality=95, subsampling="4:2:2")
    packed = stream.getvalue()
    if mark == "Adobe":
        jfif = packed[2 : 4 + int.from_bytes(packed[4:6], "big")]
        packed = packed.replace(jfif, b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x01")
    found = read(written(tmp_path / "s", uid.JPEGBaseline8Bit, COLOURS, [packed], PhotometricInterpretation=photometry))
    apart = np.abs(found.astype(int) - COLOURS)
    assert np.delete(apart, range(12, 20), axis=2).max() <= 4  # but for the border, where the halved differences are blurred


def test_plain_colours_of_which_half_are_left_out_are_read(tmp_path):
    """YBR_FULL_422 (PS3.3 C.7.6.3.1.2): Y Y B R of two pixels; where all are there though, the file contradicts itself."""
    ybr = convert_color_space(COLOURS[0], "RGB", "YBR_FULL")
    halved = np.stack([ybr[:, ::2, 0], ybr[:, 1::2, 0], ybr[:, ::2, 1], ybr[:, ::2, 2]], axis=-1)
    folder = written(tmp_path / "s", uid.ExplicitVRLittleEndian, COLOURS, [b"ab"], PhotometricInterpretation="YBR_FULL_422")
    image = dcmread(folder / "1.dcm")
    image["PixelData"].is_undefined_length = False
    image.PixelData = halved.tobytes()
    image.save_as(folder / "1.dcm")
    assert np.abs(read(folder).astype(int) - COLOURS).max() <= 2
    image.PixelData = ybr.tobytes()
    image.save_as(folder / "1.dcm")
    with pytest.raises(FedDPError, match="says that half of its colours are left out .*, but holds all"):
        read(folder)


@pytest.mark.parametrize(
    ("photometry", "samples"), [("YBR_PARTIAL_420", 3), ("HSV", 3), ("MONOCHROME2", 3), ("RGB", 1), ("", 1)]
)
def test_colours_whose_meaning_is_not_known_are_refused(tmp_path, photometry, samples):
    values = drawn("u1", 8, samples)
    folder = written(tmp_path / "s", uid.JPEGLosslessSV1, values, [encode(each, 8) for each in values])
    image = dcmread(folder / "1.dcm")
    image.PhotometricInterpretation = photometry
    image.save_as(folder / "1.dcm")
    with pytest.raises(
        FedDPError, match=f"1.dcm: has {samples} value.s. per pixel in {photometry or 'no photometric'}.* Save it in"
    ):
        read(folder)


# -- frames ----------------------------------------------------------------------------------------------------------


def test_frames_are_found_in_parts_and_by_either_table(tmp_path):
    """Several fragments per frame without a table; the extended table of large files."""
    values = drawn("u2", 12)
    packed = [encode(each, 12) for each in values]
    folder = written(tmp_path / "s", uid.JPEGLosslessSV1, values, packed, 12)
    image = dcmread(folder / "1.dcm")
    image.PixelData = encapsulate(packed, fragments_per_frame=3, has_bot=False)
    image.save_as(folder / "1.dcm")
    assert (read(folder) == values).all()
    image.PixelData, image.ExtendedOffsetTable, image.ExtendedOffsetTableLengths = encapsulate_extended(packed)
    image.save_as(folder / "1.dcm")
    assert (read(folder) == values).all()


@pytest.mark.parametrize(
    ("number", "said"), [(1, "holds more frames, but its header says 1"), (3, "has no readable pixels|holds 2")]
)
def test_another_number_of_frames_than_the_header_says_is_named(tmp_path, number, said):
    values = drawn("u2", 12)
    packed = [encode(each, 12) for each in values]
    with pytest.raises(FedDPError, match=said):
        read(written(tmp_path / "s", uid.JPEGLosslessSV1, values, packed, 12, NumberOfFrames=number))


def test_the_units_and_the_photometry_of_packed_pixels_count(tmp_path):
    """12 bits with white as 0: 4095 - v; slope 2 and intercept -1000."""
    values = drawn("u2", 12)
    changes = {"PhotometricInterpretation": "MONOCHROME1", "RescaleSlope": 2, "RescaleIntercept": -1000}
    folder = written(tmp_path / "s", uid.JPEGLosslessSV1, values, [encode(each, 12) for each in values], 12, **changes)
    assert (read(folder) == (4095 - values.astype(int)) * 2 - 1000).all()


@pytest.mark.parametrize("coder", [by_jpeg_lossless, by_jpeg_ls])
@pytest.mark.parametrize(("kind", "padding"), [("u2", 63536), ("i2", -32768)])
def test_packed_padding_may_lie_beyond_the_bits_of_values(tmp_path, coder, kind, padding):
    """Words of 16 bits in a file that stores 12; without the others, 63536 would be the value 2096. An overlay is none."""
    values = drawn(kind, 12)
    beyond = np.zeros(values.shape, bool)
    beyond[:, :3] = True
    words = np.where(beyond, padding, (values & 0xFFF) | 0x4000).astype(kind)
    syntax = uid.JPEGLosslessSV1 if coder is by_jpeg_lossless else uid.JPEGLSLossless
    found = read(written(tmp_path / "s", syntax, words, [coder(each, 16) for each in words], 12, PixelPaddingValue=padding))
    assert (np.isnan(found) == beyond).all()
    assert (found[~beyond] == values[~beyond]).all()


# -- what is not read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["102", "65", "94", "110"])
def test_what_is_not_read_here_names_who_reads_it(tmp_path, number):
    """A video, hierarchical JPEG, a link, and JPEG XL, which pydicom does not know."""
    former = "1.2.840.10008.1.2.4." + ("103" if len(number) == 3 else "50")
    folder, syntax = written(tmp_path / "s", former, drawn("u1", 8), [b"ab", b"cd"]), f"1.2.840.10008.1.2.4.{number}"
    content = (folder / "1.dcm").read_bytes()
    (folder / "1.dcm").write_bytes(content.replace(former.encode(), syntax.encode()))
    with pytest.raises(FedDPError, match=rf"1.dcm: has pixels in .*\({re.escape(syntax)}\), .*gdcmconv.*ffmpeg"):
        read(folder)


def test_the_page_lists_every_transfer_syntax_that_is_read():
    page = (ROOT / "docs/how-to/dicom.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(1\.2\.840\.10008\.1\.2[.0-9]*)`", page.split("## Not read")[0]))
    plain = {uid.ImplicitVRLittleEndian, uid.ExplicitVRLittleEndian, uid.ExplicitVRBigEndian}
    assert listed == {*CODECS, *plain, uid.DeflatedExplicitVRLittleEndian, uid.RLELossless}
