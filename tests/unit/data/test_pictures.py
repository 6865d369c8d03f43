"""What a picture's values mean: each file is read as it was made, or refused by name; no value is guessed."""

import struct

import numpy as np
import pytest
import tifffile
from PIL import Image

from feddp.data.formats.pictures import read_colours, read_labels, read_picture
from feddp.data.prepare.source import Source
from feddp.errors import BadFile
from feddp.reading import told
from support.scans import packed_rows, shallow_png

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (12, 10), np.uint8)
COLOUR = RNG.integers(0, 256, (12, 10, 3), np.uint8)
DRAWN = np.zeros((12, 10), np.uint8)
DRAWN[2:6, 3:9] = 255
WHITE = np.full((12, 10), 255, np.uint8)
STACK = RNG.integers(0, 256, (6, 12, 10), np.uint8)
BLACK, RED, PALE = [0, 0, 0], [255, 0, 0], [255, 255, 255]


def read(folder, name, reader=read_picture):
    found = reader(Source(folder), f"{folder.name}/{name}")
    return found.pixels[0] if reader is read_picture else found.values


# -- orientation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_those_stored_whatever_the_orientation_says(tmp_path, orientation):
    """One rule for Pillow's TIFFs, packed or not, tifffile's, and EXIF in PNG and JPEG."""
    exif = Image.Exif()
    exif[274] = orientation
    tag = [(274, "H", 1, orientation, True)]
    Image.fromarray(GREY).save(tmp_path / "plain.tif", tiffinfo={274: orientation})
    Image.fromarray(GREY).save(tmp_path / "packed.tif", tiffinfo={274: orientation}, compression="tiff_lzw")
    tifffile.imwrite(tmp_path / "deep.tif", COLOUR.astype("u2") * 257, photometric="rgb", extratags=tag)
    Image.fromarray(GREY).save(tmp_path / "exif.png", exif=exif)
    Image.fromarray(DRAWN).save(tmp_path / "exif.jpg", exif=exif, quality=100)
    for name, stored, close in (
        *((f"{kind}.{ending}", GREY, 0) for kind, ending in (("plain", "tif"), ("packed", "tif"), ("exif", "png"))),
        ("deep.tif", COLOUR.astype("u2") * 257, 0),
        ("exif.jpg", DRAWN, 40),
    ):
        scan = read_picture(Source(tmp_path), f"{tmp_path.name}/{name}")
        assert scan.orientation == orientation, name
        assert np.abs(scan.pixels[0].astype(int) - stored).max() <= close, name


def test_an_orientation_in_xmp_does_not_turn_a_tiff(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.tif", tiffinfo={700: b'<x tiff:Orientation="3"/>'})
    assert (read(tmp_path, "a.tif") == GREY).all()


# -- transparency ----------------------------------------------------------------------------------------------------

HIDDEN = {
    "white RGBA": np.dstack([WHITE, WHITE, WHITE, DRAWN]),
    "white LA": np.dstack([WHITE, DRAWN]),
    "black RGBA": np.dstack([0 * WHITE, 0 * WHITE, 0 * WHITE, DRAWN]),
    "half transparent": np.dstack([DRAWN, DRAWN, DRAWN, DRAWN // 2]),
    "white and wholly transparent": np.dstack([WHITE, 0 * WHITE]),
    "turned around": np.dstack([DRAWN, 255 - DRAWN]),
}


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("ending", ["png", "tif"])
def test_a_mask_whose_transparency_says_something_else_is_refused(tmp_path, kind, ending):
    Image.fromarray(HIDDEN[kind]).save(tmp_path / f"a.{ending}")
    for reader in (read_labels, read_colours):
        with pytest.raises(BadFile, match=r"is transparent in places, and says something else"):
            read(tmp_path, f"a.{ending}", reader)


@pytest.mark.parametrize("bands", [2, 4])
def test_a_mask_whose_transparency_says_the_same_is_read(tmp_path, bands):
    """Exactly the black pixels are transparent, as GIMP exports it; or none is."""
    for name, alpha in (("same", DRAWN), ("opaque", WHITE)):
        Image.fromarray(np.dstack([*[DRAWN] * (bands - 1), alpha])).save(tmp_path / f"{name}.png")
        found = read(tmp_path, f"{name}.png", read_labels)
        assert (found.reshape(12, 10, -1) == DRAWN[..., None]).all()


@pytest.mark.parametrize(
    ("mode", "key"), [("L", 255), ("L", 0), ("RGB", (255, 255, 255)), ("1", 255), ("P", bytes([255, 0])), ("I;16", 65535)]
)
def test_a_transparent_value_of_a_png_counts_as_transparency(tmp_path, mode, key):
    """tRNS: the foreground's value is transparent; where it is the background's, both say the same."""
    image = (
        Image.fromarray(DRAWN.astype("u2") * 257) if mode == "I;16" else Image.fromarray(DRAWN // 255 if mode == "P" else DRAWN)
    )
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
    elif mode != "I;16":
        image = image.convert(mode)
    image.save(tmp_path / "a.png", transparency=key)
    if key == 0:
        assert (read(tmp_path, "a.png", read_labels) == DRAWN).all()
    else:
        with pytest.raises(BadFile, match=r"is transparent in places"):
            read(tmp_path, "a.png", read_labels)


def test_an_image_that_shows_everything_by_transparency_is_refused_and_others_lose_it(tmp_path):
    Image.fromarray(np.dstack([COLOUR, DRAWN])).save(tmp_path / "a.png")
    assert (read(tmp_path, "a.png") == COLOUR).all()
    Image.fromarray(np.dstack([WHITE, DRAWN])).save(tmp_path / "a.png")
    with pytest.raises(BadFile, match=r"is of one colour, and shows everything by its transparency"):
        read(tmp_path, "a.png")


# -- values of few bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("ending", ["png", "tif"])
def test_labels_of_few_bits_are_those_stored_and_their_grey_levels_reach_255(tmp_path, bits, ending):
    """Pillow makes 85 or 17 of a label 1; 3 of 2 bits and 15 of 4 bits are white."""

    def write(values):
        shallow_png(tmp_path / "a.png", values, bits)
        rows = np.frombuffer(b"".join(packed_rows(values, bits)), np.uint8).reshape(len(values), -1)
        tifffile.imwrite(tmp_path / "a.tif", rows, metadata=None)
        with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
            tiff.pages[0].tags["BitsPerSample"].overwrite(bits)
            tiff.pages[0].tags["ImageWidth"].overwrite(values.shape[1])

    labels = DRAWN // 255 + (np.arange(10) > 6)
    write(labels)
    assert (read(tmp_path, f"a.{ending}", read_labels) == labels).all()
    assert (read(tmp_path, f"a.{ending}") == labels * (255 // (2**bits - 1))).all()
    write(DRAWN // 255 * (2**bits - 1))
    assert (read_labels(Source(tmp_path), f"{tmp_path.name}/a.{ending}").colours == DRAWN).all()


# -- what a TIFF's header says -----------------------------------------------------------------------------------------

CYAN = RNG.integers(0, 256, (12, 10, 4), np.uint8)
OTHER = {
    "CMYK of 16 bits": (CYAN.astype("u2") * 257, {"photometric": "separated"}, "in CMYK of 16 bits"),
    "inks": (CYAN, {"photometric": "separated", "extratags": [(332, "H", 1, 2, True)]}, "in other inks than CMYK"),
    "CMYK with transparency": (
        np.dstack([CYAN, WHITE]),
        {"photometric": "separated", "extrasamples": ["unassalpha"]},
        "in CMYK of a kind that is not read",
    ),
    "signed CMYK": ((CYAN // 2).astype("i1"), {"photometric": "separated"}, "in CMYK of a kind that is not read"),
    "Lab of 16 bits": (COLOUR.astype("u2"), {"photometric": "cielab"}, "in CIELab of 16 bits"),
    "ICC Lab": (COLOUR, {"photometric": "icclab"}, "of the kind ICCLAB"),
    "YCbCr of 16 bits": (COLOUR.astype("u2"), {"photometric": "ycbcr"}, "in YCbCr of 16 bits"),
    "a sensor's mosaic": (GREY, {"photometric": "cfa"}, "of the kind CFA"),
    "three channels of grey": (COLOUR, {"photometric": "minisblack", "planarconfig": "contig"}, "has 3 channels"),
    "two channels of grey": (COLOUR[..., :2], {"photometric": "minisblack", "planarconfig": "contig"}, "has 2 channels"),
    "a fourth of no meaning": (CYAN, {"photometric": "rgb", "extrasamples": ["unspecified"]}, "has 4 channels"),
    "five channels": (RNG.integers(0, 9, (12, 10, 5), np.uint8), {"photometric": "rgb"}, "has 5 channels"),
    "multiplied colours": (CYAN.astype("u2"), {"photometric": "rgb", "extrasamples": ["assocalpha"]}, "are multiplied by"),
}


@pytest.mark.parametrize("kind", OTHER)
def test_a_tiff_of_another_kind_is_not_read_as_grey_or_rgb(tmp_path, kind):
    values, options, said = OTHER[kind]
    tifffile.imwrite(tmp_path / "a.tif", values, **options)
    with pytest.raises(BadFile, match=said):
        read(tmp_path, "a.tif")


@pytest.mark.parametrize("depth", ["u1", "u2"])
def test_planes_and_white_as_0_are_read(tmp_path, depth):
    values, most = COLOUR.astype(depth), np.iinfo(depth).max
    tifffile.imwrite(tmp_path / "a.tif", np.moveaxis(values, -1, 0), photometric="rgb", planarconfig="separate")
    assert (read(tmp_path, "a.tif") == values).all()
    tifffile.imwrite(tmp_path / "a.tif", most - values[..., 0], photometric="miniswhite", compression="deflate")
    assert (read(tmp_path, "a.tif") == values[..., 0]).all()


@pytest.mark.parametrize("depth", ["?", "u1", "u2"])
def test_a_mask_with_white_as_0_is_as_shown_unless_it_shows_a_white_background(tmp_path, depth):
    """ImageJ writes its masks so, with 255 for the structure, which is then shown as black: it was the background."""
    shown = (DRAWN > 0).astype(depth)
    shown = shown if depth == "?" else shown * np.iinfo(depth).max
    tifffile.imwrite(tmp_path / "a.tif", ~shown, photometric="miniswhite")
    assert ((read(tmp_path, "a.tif", read_labels) > 0) == (DRAWN > 0)).all()
    tifffile.imwrite(tmp_path / "a.tif", shown, photometric="miniswhite")
    with pytest.raises(
        BadFile, match=r"has white as 0, and most of its border is white, so which is the background is not known"
    ):
        read(tmp_path, "a.tif", read_labels)


@pytest.mark.parametrize(
    "packed", [{"compression": "lzw"}, {"compression": "lzw", "predictor": True}, {"compression": "packbits"}]
)
def test_what_pillow_would_cut_is_read_from_lzw_and_packbits(tmp_path, packed):
    """Values of 16 bits in colour, and signed ones, which tifffile decodes; a part that is cut off is refused."""
    deep, signed = COLOUR.astype("u2") * 200, (GREY // 2 - 60.0).astype("i1")
    tifffile.imwrite(tmp_path / "a.tif", deep, photometric="rgb", rowsperstrip=5, **packed)
    assert (read(tmp_path, "a.tif") == deep).all()
    tifffile.imwrite(tmp_path / "a.tif", signed, tile=(16, 16), **packed)
    assert (read(tmp_path, "a.tif") == signed).all()
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
        count = tiff.pages[0].tags["TileByteCounts"]
        count.overwrite(count.value[0] // 2)
    with pytest.raises(BadFile, match=r"is not a readable image .its content is damaged"):
        read(tmp_path, "a.tif")


def by_imagej(file):
    """One directory, and six slices behind each other, as ImageJ writes stacks of more than 4 GiB, and others all."""
    tifffile.imwrite(file, STACK[0], description="ImageJ=1.53t\nimages=6\nslices=6\nloop=false\n", metadata=None)
    file.write_bytes(file.read_bytes() + STACK[1:].tobytes())


def with_preview(file):
    with tifffile.TiffWriter(file) as writer:
        writer.write(GREY[::2, ::2], subifds=1, subfiletype=1)
        writer.write(GREY)


SEVERAL = {
    "ImageJ, one directory": by_imagej,
    "ImageJ": lambda f: tifffile.imwrite(f, STACK, imagej=True),
    "hyperstack": lambda f: tifffile.imwrite(f, STACK.reshape(2, 3, 12, 10).astype("u2"), imagej=True, truncate=True),
    "tifffile, one directory": lambda f: tifffile.imwrite(f, STACK, truncate=True, photometric="minisblack"),
    "in colour, one directory": lambda f: tifffile.imwrite(f, np.stack([COLOUR] * 4), truncate=True, photometric="rgb"),
    "pages": lambda f: tifffile.imwrite(f, STACK, photometric="minisblack"),
    "OME": lambda f: tifffile.imwrite(f, STACK, ome=True, photometric="minisblack"),
    "a volume": lambda f: tifffile.imwrite(f, STACK, volumetric=True, tile=(16, 16, 16)),
    "a preview first": with_preview,
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_one_picture_of_several_is_not_read_as_all(tmp_path, kind):
    SEVERAL[kind](tmp_path / "a.tif")
    with pytest.raises(BadFile, match=r"holds several pictures|begins with the preview of another"):
        read(tmp_path, "a.tif")


def test_a_slice_alone_that_kept_the_words_of_its_stack_and_a_pyramid_are_read(tmp_path):
    words = "ImageJ=1.53t\nimages=6\nslices=6\nloop=false\n"
    tifffile.imwrite(tmp_path / "a.tif", GREY, description=words, metadata=None)
    assert (read(tmp_path, "a.tif") == GREY).all()
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(GREY, subifds=1)
        writer.write(GREY[::2, ::2], subfiletype=1)
    assert (read(tmp_path, "a.tif") == GREY).all()


# -- palettes --------------------------------------------------------------------------------------------------------


def indexed(file, palette, indices=DRAWN // 255):
    image = Image.fromarray(indices.astype(np.uint8))
    image.putpalette(sum(palette, []))
    image.save(file)


@pytest.mark.parametrize("ending", ["png", "tif", "bmp"])
@pytest.mark.parametrize("palette", [[PALE, BLACK], [RED, BLACK], [PALE, [16, 16, 16]], [BLACK, BLACK, RED]])
def test_a_palette_that_shows_a_class_as_the_background_is_refused(tmp_path, ending, palette):
    indexed(tmp_path / f"a.{ending}", palette, DRAWN // 255 + (np.arange(10) > 8) * (len(palette) > 2))
    with pytest.raises(BadFile, match=r"has a palette that shows the index 1 as .*, so which is the background"):
        read(tmp_path, f"a.{ending}", read_labels)


@pytest.mark.parametrize("palette", [[RED, PALE], [PALE, [100] * 3], [[0, 255, 0], [0, 0, 255]]])
def test_a_palette_whose_other_index_surrounds_all_is_refused(tmp_path, palette):
    """0 was the background, whatever its colour: the structure and what is around it changed places."""
    around = np.pad(np.zeros((4, 5), np.uint8), 2, constant_values=1)
    indexed(tmp_path / "a.png", palette, around)
    with pytest.raises(BadFile, match=r"shows 0 as [\d,]*, and most of its border is the index 1, .* background is not known"):
        read(tmp_path, "a.png", read_labels)
    indexed(tmp_path / "b.png", palette, 1 - around)
    assert (read(tmp_path, "b.png", read_labels) == 1 - around).all()
    indexed(tmp_path / "c.png", [BLACK, palette[1]], around)
    assert (read(tmp_path, "c.png", read_labels) == around).all()


@pytest.mark.parametrize("palette", [[BLACK, PALE], [BLACK, RED], [PALE, RED], [BLACK, [1, 1, 1]], [[9, 0, 0], [10, 0, 0]]])
def test_the_indices_of_other_palettes_are_the_values(tmp_path, palette):
    for ending in ("png", "tif"):
        indexed(tmp_path / f"a.{ending}", palette)
        assert (read(tmp_path, f"a.{ending}", read_labels) == DRAWN // 255).all()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("scale", [1, 257])
def test_a_tiff_s_palette_has_16_bits_or_uses_the_low_byte(tmp_path, bits, scale):
    """Of index 1, the colour is 200,10,30, as 200 or as 200 · 257."""
    colours = np.zeros((3, 1 << bits), np.uint16)
    colours[:, 1], colours[:, 2] = (200, 10, 30), (0, 255, 7)
    indices = DRAWN // 255 + (np.arange(10) > 7)
    tifffile.imwrite(tmp_path / "a.tif", indices.astype(f"u{bits // 8}"), photometric="palette", colormap=colours * scale)
    wanted = colours.T[indices]
    assert (read(tmp_path, "a.tif") == wanted).all()
    assert (read(tmp_path, "a.tif", read_colours) == wanted).all()
    assert (read(tmp_path, "a.tif", read_labels) == indices).all()


def test_colours_of_16_bits_are_those_of_8(tmp_path):
    """They were stretched to the brightest: half red became red."""
    half = np.dstack([DRAWN // 2, 0 * DRAWN, 0 * DRAWN])
    tifffile.imwrite(tmp_path / "a.tif", half.astype("u2") * 257, photometric="rgb")
    assert (read(tmp_path, "a.tif", read_colours) == half).all()


def test_fractions_are_no_colours(tmp_path):
    """0.5 became 0, and a mask of fractions was empty."""
    tifffile.imwrite(tmp_path / "a.tif", np.dstack([DRAWN / 510, 0 * DRAWN, 0 * DRAWN]).astype("f4"), photometric="rgb")
    with pytest.raises(
        BadFile, match=r"has colours up to 0.5, which are not whole numbers of 0 to 255. Save its colours with 8 or 16 bits"
    ):
        read(tmp_path, "a.tif", read_colours)


# -- BMP -------------------------------------------------------------------------------------------------------------


def bmp(bits, palette, rows):
    """A BMP of 10 x 12 pixels whose rows are packed already, the last one first."""
    colours = b"".join(bytes([value] * 3 + [0]) for value in palette)
    pixels = b"".join(row.ljust(-(-len(row) // 4) * 4, b"\0") for row in rows[::-1])
    start = 54 + len(colours)
    head = struct.pack("<IiiHHIIiiII", 40, 10, 12, 1, bits, 0, len(pixels), 2835, 2835, len(palette), 0)
    return b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + head + colours + pixels


def test_a_bmp_that_pillow_takes_for_a_narrower_one_is_refused(tmp_path):
    """Two greys in 8 bits became a black picture. Greys in all 256 values, and one bit, are read."""
    (tmp_path / "a.bmp").write_bytes(bmp(8, [0, 255], [bytes(row) for row in DRAWN // 255]))
    with pytest.raises(BadFile, match=r"is a BMP of 8 bits with a palette of few greys"):
        read(tmp_path, "a.bmp", read_labels)
    (tmp_path / "a.bmp").write_bytes(bmp(4, range(16), [bytes(5)] * 12))
    with pytest.raises(BadFile, match=r"is a BMP of 4 bits with a palette of few greys"):
        read(tmp_path, "a.bmp", read_labels)
    for values in (DRAWN, DRAWN > 0):
        Image.fromarray(values).save(tmp_path / "a.bmp")
        assert (read(tmp_path, "a.bmp", read_labels) == DRAWN).all()


def test_the_fourth_channel_of_a_bmp_is_not_left_out(tmp_path):
    """Windows writes transparency there, where the format has none."""
    for alpha, refused in ((WHITE, False), (0 * WHITE, False), (DRAWN, True)):
        rows = [row.tobytes() for row in np.dstack([COLOUR[..., ::-1], alpha])]
        (tmp_path / "a.bmp").write_bytes(bmp(32, [], rows))
        if refused:
            with pytest.raises(BadFile, match=r"has a fourth channel that BMP gives no meaning"):
                read(tmp_path, "a.bmp")
        else:
            assert (read(tmp_path, "a.bmp") == COLOUR).all()


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'rows'"),
        KeyError(277),
        ValueError("not enough values, use force=True"),
        ValueError("<TiffPage 0 @8> invalid"),
        struct.error("unpack requires a buffer of 8 bytes"),
        OSError(""),
        OSError("decoder error -2"),
        ValueError("corrupted tile cannot be reshaped from (9,) to (1, 8, 8, 1)"),
        ValueError("imcd_lzw_decode returned IMCD_LZW_INVALID"),
    ],
)
def test_messages_have_no_words_of_python(error):
    assert told(error) == "its content is damaged"


def test_messages_have_what_a_library_says_of_a_file():
    assert told(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")) == "it is no text in UTF-8"
    assert told(OSError("image file is\n truncated (3 bytes)")) == "image file is truncated (3 bytes)"
