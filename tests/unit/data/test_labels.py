"""What a mask's values are: two levels as they were drawn, through JPEG and scaling too; anything else is refused by name."""

import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter
from scipy.ndimage import distance_transform_edt

from feddp.data.formats import stack
from feddp.data.formats.labels import by_colour, by_value, in_one, require_nested
from feddp.errors import BadFile

FILE = Path("m.png")


def disc(side, radius, across=0.0):
    """0 and 1, drawn around a point that is no pixel's centre."""
    y, x = np.mgrid[:side, :side] - side / 2 + 0.3
    return (y**2 + (x - across) ** 2 <= radius**2).astype(np.uint8)


def jpeg(mask, quality):
    stream = io.BytesIO()
    Image.fromarray(mask * 255).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream))


def scaled(mask, side):
    return np.asarray(Image.fromarray(mask * 255).resize((side, side), Image.Resampling.BILINEAR))


# -- two levels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quality", [10, 23, 30, 50, 69, 75, 95])
@pytest.mark.parametrize("radius", [3, 5, 8, 20, 50])
def test_a_jpeg_of_a_mask_is_the_mask(radius, quality):
    """Of all its edge pixels, hardly any crosses the middle; at the lowest qualities, some do. Beside a small structure,
    JPEG leaves flat areas of 1 or 2 in the background (radius 5 at 23 and 69)."""
    drawn = disc(128, radius)
    read = by_value(FILE, jpeg(drawn, quality), 1, None)
    assert (read != drawn).sum() <= (0.1 if quality < 75 else 0.03) * drawn.sum() + 2


@pytest.mark.parametrize("change", ["smaller", "larger", "blurred", "half grey", "tiny"])
def test_a_mask_with_soft_edges_is_the_mask(change):
    """At the edge, half covered pixels are above 127; a mask of 0 and 128 alone is one of two levels."""
    found = {
        "smaller": scaled(disc(512, 80), 64),
        "larger": scaled(disc(64, 8), 512),
        "blurred": np.asarray(Image.fromarray(disc(128, 30) * 255).filter(ImageFilter.GaussianBlur(2))),
        "half grey": disc(64, 10) * np.uint8(128),
        "tiny": scaled(disc(512, 14), 64),
    }[change]
    drawn = {"smaller": disc(512, 80), "larger": disc(64, 8), "blurred": disc(128, 30)}.get(change)
    read = by_value(FILE, found, 1, None)
    assert (read == (found > 127)).all()
    if drawn is not None:
        assert read.mean() == pytest.approx(drawn.mean(), rel=0.05)


def cells(count, side, dtype=np.uint8, first=1):
    """`count` squares of side x side pixels with a line of 0 around each, and the values from `first`."""
    across = int(np.ceil(np.sqrt(count)))
    found = np.zeros((across * (side + 1),) * 2, dtype)
    for number in range(count):
        y, x = (place * (side + 1) for place in divmod(number, across))
        found[y : y + side, x : x + side] = first + number
    return found


def thin(values, width):
    """Lines of so many pixels with free space between them, each of the next value."""
    found = np.zeros((64, 9 * len(values) + 9), np.uint8)
    for number, value in enumerate(values):
        found[8:56, 6 + 9 * number : 6 + 9 * number + width] = value
    return found


def beside(side, height, width, value):
    """A square of 255 over four ninths of the image, and beside it a small box of another value."""
    found = np.zeros((side, side), np.uint8)
    found[: side * 2 // 3, : side * 2 // 3] = 255
    found[side * 4 // 5 :][:height, side // 9 :][:, :width] = value
    return found


FAR = distance_transform_edt(disc(128, 30))
LABELS = {
    "200 objects": cells(200, 7),
    "255 objects": cells(255, 4),
    "130 objects": cells(130, 5),
    "200 objects of one pixel": cells(200, 1),
    "4 objects far apart": cells(4, 3) * np.uint8(60),
    "objects of 16 bits": cells(500, 5, np.uint16) * np.uint16(130),
    "objects of 32 bits": cells(60, 5, np.uint32) * np.uint32(1000),
    "objects without background": cells(200, 5)[:-1, :-1] + np.uint8(20),
    "disc and cup": np.maximum(disc(64, 25) * np.uint8(128), disc(64, 12) * np.uint8(255)),
    "a label and pixels of no class": np.maximum(disc(64, 25) - disc(64, 23) * np.uint8(1), disc(64, 23)) * np.uint8(1)
    + np.maximum(disc(64, 28) - disc(64, 25), 0) * np.uint8(255),
    "classes 1 to 3 and 255": cells(3, 6) + np.pad(np.full((2, 14), 255, np.uint8), ((12, 0), (0, 0))),
    "artery and vein": thin([100, 200] * 4, 2),
    "thirds": thin([85, 170, 255] * 3, 2),
    "a line of one pixel": thin([127, 255] * 4, 1),
    "12 fibres": thin(range(20, 256, 20), 2),
    "5 fibres": thin(range(50, 255, 50), 2),
    "thin beside flat": beside(96, 2, 80, 120),
    "a lesion of 9 pixels": beside(96, 3, 3, 120),
    "a lesion beside a large organ": beside(512, 30, 30, 100),
    "a lesion that touches the organ": np.pad(np.full((32, 32), 255, np.uint8), ((8, 24), (8, 24)))
    + np.pad(np.full((10, 3), 100, np.uint8), ((20, 34), (40, 21))),
    "thin and dark": thin([20, 255], 2),
    "thin, in a volume": np.stack([thin([0, 0], 2), thin([100, 255], 2)]).astype(np.float32),
    "a distance": (FAR / FAR.max() * 255).astype(np.uint8),
    "a blunt probability": np.asarray(Image.fromarray(disc(128, 30) * 255).filter(ImageFilter.GaussianBlur(14))),
    "a volume of objects": np.stack([cells(200, 5)] * 3).astype(np.float32),
}


@pytest.mark.parametrize("kind", LABELS)
def test_values_that_are_no_two_levels_are_refused_and_not_cut_in_half(kind):
    """Above 127 were 128 to 200: half of the objects were background."""
    with pytest.raises(BadFile, match=r"m\.png: has (flat areas of the values|structures of the value|\d+ values in b)"):
        by_value(FILE, LABELS[kind], 1, None)
    found = by_value(FILE, LABELS[kind], 1, 0)
    assert (found == (LABELS[kind] > 0)).all()


@pytest.mark.parametrize("values", [cells(100, 5), cells(300, 5, np.uint16)])
def test_few_objects_are_refused_with_the_option_that_takes_them(values):
    with pytest.raises(BadFile, match=r"has the value\(s\) 2, 3, 4, .*where all above 0 is foreground, give --threshold 0"):
        by_value(FILE, values, 1, None)
    assert (by_value(FILE, values, 1, 0) == (values > 0)).all()


@pytest.mark.parametrize("change", ["BOX", "BILINEAR", "LANCZOS", "blur", "jpeg"])
def test_soft_edges_of_small_and_thin_structures_are_no_labels(change):
    """Lines of 3 pixels and specks of 5 x 5; of the large, lines at a slant: no edge has one value throughout."""
    drawn = disc(384, 90)
    for x in range(8, 300, 40):
        drawn[np.arange(384), x + np.arange(384) // 7 + np.arange(18)[:, None]] = 1
    if change in ("blur", "jpeg"):
        small = drawn[::4, ::4]
        found = jpeg(small, 30) if change == "jpeg" else np.asarray(Image.fromarray(small * 255).filter(ImageFilter.BoxBlur(1)))
    else:
        found = np.asarray(Image.fromarray(drawn * 255).resize((96, 96), Image.Resampling[change]))
    assert (by_value(FILE, found, 1, None) == (found > 127)).all()


def test_two_levels_on_grey_are_two_levels():
    assert (by_value(FILE, 29 + disc(64, 15) * np.uint8(147), 1, None) == disc(64, 15)).all()


@pytest.mark.parametrize("value", [2, 17, 100])
def test_one_value_for_the_foreground_is_offered_the_threshold_first(value):
    with pytest.raises(
        BadFile, match=rf"has the value\(s\) {value}\. Where all above 0 is foreground, give --threshold 0; o"
    ) as said:
        by_value(FILE, disc(32, 8) * np.uint8(value), 1, None)
    assert "--colour" not in str(said.value)


def test_thin_structures_with_soft_edges_are_offered_the_middle_first():
    blurred = np.asarray(Image.fromarray(thin([255] * 8, 1)).filter(ImageFilter.GaussianBlur(0.7)).rotate(9, Image.BILINEAR))
    with pytest.raises(BadFile, match=r"not dark, as .* have\. Of thin structures with soft edges, give --threshold 127;"):
        by_value(FILE, blurred, 1, None)
    assert (by_value(FILE, blurred, 1, 127) == (blurred > 127)).all()


# -- colours ---------------------------------------------------------------------------------------------------------


COLOURS = {(200, 0, 0): 1, (0, 200, 0): 2}
NESTED = disc(64, 20) + disc(64, 8)
PAINTED = np.array([[0, 0, 0], [200, 0, 0], [0, 200, 0], [240, 0, 0]], np.uint8)


def smooth(mask, sigma):
    return np.asarray(Image.fromarray(PAINTED[mask]).filter(ImageFilter.GaussianBlur(sigma)))


@pytest.mark.parametrize("quality", [90, 100])
def test_colours_that_jpeg_moves_are_those_declared(quality):
    stream = io.BytesIO()
    Image.fromarray(PAINTED[NESTED]).save(stream, "JPEG", quality=quality, subsampling=0)
    read = by_colour(FILE, np.asarray(Image.open(stream)), COLOURS)
    assert (read != NESTED).sum() <= 0.02 * NESTED.sum()


@pytest.mark.parametrize("ground", [0, 1])
@pytest.mark.parametrize("height", [1, 2, 6])
def test_an_area_of_a_colour_near_a_declared_one_is_of_no_class(ground, height):
    """240,0,0 is 40 steps from 200,0,0, closer than CLOSE: the undeclared class became the declared one."""
    drawn = disc(64, 20) if ground else 0 * NESTED
    if ground and height < 6:
        drawn[50:] = 0  # a thin line of its own, below
    top = 32 if ground and height == 6 else 56
    drawn[top : top + height, 26:36] = 3
    with pytest.raises(BadFile, match=r"has the colour 240,0,0, which is of no class. Give the colours of the classes with"):
        by_colour(FILE, PAINTED[drawn], COLOURS)


@pytest.mark.parametrize("dark", [1, 10])
def test_a_class_that_is_nearly_black_is_not_the_background(dark):
    """Masks of 1 instead of 255 in each colour became empty. What is all nearly black, as after JPEG, is the background."""
    image = np.zeros((64, 64, 3), np.uint8)
    image[disc(64, 9) > 0] = dark, 0, 0
    with pytest.raises(BadFile, match=rf"has the colour {dark},0,0, which is of no class"):
        by_colour(FILE, image, COLOURS)
    assert not by_colour(FILE, np.full((8, 8, 3), (dark, 0, 0), np.uint8), COLOURS).any()


@pytest.mark.parametrize("how", ["smooth", "JPEG"])
def test_blended_edges_are_named_as_such(how):
    image = smooth(disc(64, 20), 1)
    if how == "JPEG":
        stream = io.BytesIO()
        Image.fromarray(PAINTED[NESTED]).save(stream, "JPEG", quality=75)
        image = np.asarray(Image.open(stream))
    with pytest.raises(BadFile, match=r"which is of no class. Its edges are blended, .*save it without smoothing as PNG"):
        by_colour(FILE, image, COLOURS)


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.99999, 1.0009, 0.9991])
def test_labels_close_to_a_whole_number_are_that_number(value):
    values = np.array([[0, value], [-0.0005, 1 + value]], np.float32)
    assert by_value(FILE, values, 3, None).tolist() == [[0, 1], [0, 2]]


@pytest.mark.parametrize(("value", "shown"), [(0.998, "0.998"), (0.5, "0.5"), (1.4999, "1.4999"), (-1, "-1"), (4, "4")])
def test_a_refused_value_is_shown_as_what_it_is(value, shown):
    """`has the value(s) 1. Use 0 to 1` was said of 0.9999999."""
    with pytest.raises(BadFile, match=rf"has the value\(s\) {shown}\. Use 0 to 2"):
        by_value(FILE, np.array([[0, value]], np.float32), 2, None)


def test_probabilities_need_the_limit_that_the_user_gives():
    """127 of 255 is one half: 0.49 lies below, 0.51 above."""
    values = np.array([[0, 0.49], [0.51, 0.9]], np.float32)
    with pytest.raises(BadFile, match=r"has the value\(s\) 0.49, 0.51, 0.9. Use 0 to 1.*--threshold"):
        by_value(FILE, values, 1, None)
    assert by_value(FILE, values, 1, 127).tolist() == [[0, 0], [1, 1]]


# -- classes inside and beside each other ------------------------------------------------------------------------------


def boxes(*places):
    found = np.zeros((20, 24), np.uint8)
    for value, (top, left, height, width) in enumerate(places, 1):
        found[top : top + height, left : left + width] = value
    return found


BESIDE = {
    "apart": boxes((2, 2, 6, 6), (2, 12, 8, 8)),
    "touching": boxes((2, 2, 6, 6), (2, 8, 8, 8)),
    "the second alone": boxes((0, 0, 0, 0), (2, 12, 8, 8)),
    "three in a row": boxes((2, 1, 6, 5), (2, 6, 6, 5), (2, 11, 6, 5)),
}
INSIDE = {
    "inside": boxes((2, 2, 12, 12), (5, 5, 4, 4)),
    "at the rim": boxes((2, 2, 12, 12), (5, 10, 4, 4)),
    "the first alone": boxes((2, 2, 12, 12)),
    "three": boxes((2, 2, 16, 16), (4, 4, 12, 12), (6, 6, 4, 4)),
    "at the image's edge": boxes((0, 0, 12, 12), (0, 0, 4, 4)),
    "nothing": boxes(),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_classes_beside_each_other_are_not_taken_for_nested(kind):
    """A kidney of 36 pixels beside a spleen of 64 was a kidney of 100."""
    mask, classes = BESIDE[kind], ("kidney", "spleen", "liver")[: max(2, BESIDE[kind].max())]
    maps = mask == np.arange(1, len(classes) + 1)[:, None, None]
    with pytest.raises(
        BadFile, match=r"has spleen beside kidney and not inside it. If classes lie beside each other, give --lab"
    ):
        require_nested(FILE, mask, classes)
    with pytest.raises(BadFile, match=rf"of spleen, {maps[1].sum()} of {maps[1].sum()} pixels lie outside kidney. If classes"):
        in_one(maps, None, classes, FILE)
    assert (in_one(maps, "nested", classes, FILE) == mask).all()
    assert (in_one(maps, "exclusive", classes, FILE) == mask).all()


@pytest.mark.parametrize("kind", INSIDE)
def test_classes_inside_each_other_are_nested_without_a_word(kind):
    mask, classes = INSIDE[kind], ("organ", "tumour", "core")[: max(2, INSIDE[kind].max())]
    require_nested(FILE, mask, classes)
    maps = mask >= np.arange(1, len(classes) + 1)[:, None, None]
    assert (in_one(maps, None, classes, FILE) == mask).all()


def test_one_pixel_outside_is_said():
    maps = np.stack([boxes((2, 2, 6, 6)), boxes((4, 4, 5, 2))]).astype(bool)
    with pytest.raises(BadFile, match="of cup, 2 of 10 pixels lie outside disc"):
        in_one(maps, None, ("disc", "cup"), FILE)


def test_the_masks_of_a_large_volume_take_the_memory_of_some_slices(monkeypatch):
    """60 slices of 10,000 pixels: 600,000 bytes of one class as 8 bits, and four times that as numbers."""
    monkeypatch.setattr(stack, "IN_MEMORY", 0)
    values, maps = stack.room((60, 100, 100), np.float32), stack.room((2, 60, 100, 100), bool)
    drawn = disc(100, 30)
    values[:], maps[:] = drawn, drawn
    tracemalloc.start()
    try:
        assert by_value(FILE, values, 1, None).sum() == 60 * drawn.sum()
        assert in_one(maps, None, ["outer", "inner"], FILE).max() == 2
        require_nested(FILE, maps[0].view(np.uint8), ["outer", "inner"])
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
