"""Polygons as pixels, against DICOM PS3.3 C.8.8.6.3, exact arithmetic, and masks whose outlines are drawn by other programs."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from feddp.data.formats.outlines import NO_HOLE, TOUCH, TWICE, exclusive, united

SHAPE = (14, 14)


def box(low, high, columns=None):
    """A rectangle from low to high, by its corners (row, column)."""
    left, right = columns or (low, high)
    return np.array([(low, left), (low, right), (high, right), (high, left)], float)


def drawn(corners):
    """A polygon from every corner on, in both directions."""
    return [np.roll(way, first, axis=0) for way in (corners, corners[::-1]) for first in range(len(corners))]


def filled(*areas):
    mask = np.zeros(SHAPE, bool)
    for rows, columns in areas:
        mask[rows, columns] = True
    return mask


@pytest.mark.parametrize("number", range(8))
def test_a_centre_on_the_line_is_inside_whatever_the_direction_and_the_first_corner(number):
    """A square between the centres of 10 rows and columns has 100 pixels, and a line of 10 has 10; rounded to 0.01 too."""
    assert (united([drawn(box(2, 11))[number]], SHAPE) == filled((slice(2, 12), slice(2, 12)))).all()
    assert (united([drawn(box(2, 11, (5, 5)))[number]], SHAPE) == filled((slice(2, 12), 5))).all()
    slanted = drawn(np.array([(1, 1), (5, 5), (9, 1), (5, 1)], float) + 0.01)[number]
    wanted = [[max(0, 1 + min(row - 1, 9 - row)) if 1 <= row <= 9 else 0] for row in range(14)]
    assert (united([slanted], SHAPE).sum(axis=1, keepdims=True) == wanted).all()


@pytest.mark.parametrize("corners", [[(3, 4)], [(3, 4), (3, 4)], [(3, 4), (3, 9)], [(3, 9), (3, 4), (3, 7)]])
def test_a_point_and_a_line_are_the_pixels_on_them(corners):
    columns = [column for _, column in corners]
    assert (united([np.array(corners, float)], SHAPE) == filled((3, slice(min(columns), max(columns) + 1)))).all()


def exact(corners, row, column):
    """Whether a pixel is within a polygon of fractions, with an odd number of edges to its right, or at most TOUCH from one."""
    odd = False
    for (r0, c0), (r1, c1) in zip(corners, corners[1:] + corners[:1], strict=True):
        length = (r1 - r0) ** 2 + (c1 - c0) ** 2
        share = ((row - r0) * (r1 - r0) + (column - c0) * (c1 - c0)) / (length or 1)
        share = min(max(share, Fraction(0)), Fraction(1))
        if (row - r0 - share * (r1 - r0)) ** 2 + (column - c0 - share * (c1 - c0)) ** 2 <= Fraction(TOUCH) ** 2:
            return True
        if (r0 <= row) != (r1 <= row):
            odd ^= c0 + (row - r0) / (r1 - r0) * (c1 - c0) > column
    return odd


@pytest.mark.parametrize("step", [1, 2, 4])
def test_any_polygon_has_the_pixels_of_exact_arithmetic(step):
    """Corners at whole, half and quarter pixels, some beyond the image; a polygon may cross itself."""
    rng = np.random.default_rng(step)
    for count in (3, 4, 5, 8, 12):
        corners = [(Fraction(int(r), step), Fraction(int(c), step)) for r, c in rng.integers(-2 * step, 16 * step, (count, 2))]
        wanted = [[exact(corners, row, column) for column in range(14)] for row in range(14)]
        for polygon in drawn(np.array(corners, float))[:: count // 2]:
            assert (united([polygon], SHAPE) == wanted).all(), corners


# -- several polygons --------------------------------------------------------------------------------------------------

OUTER, INNER, ISLAND = box(1, 12), box(3, 10)[::-1], box(5, 8)
RING = filled((slice(1, 13), slice(1, 13))) & ~filled((slice(4, 10), slice(4, 10)))  # the inner line belongs to it


@pytest.mark.parametrize("again", range(8))
def test_a_contour_twice_is_the_contour_once(again):
    """However it is drawn the second time; and with a hole, or within another contour."""
    once = united([OUTER], SHAPE)
    assert (united([OUTER, drawn(OUTER)[again]], SHAPE) == once).all()
    assert (united([OUTER, drawn(OUTER)[again], INNER], SHAPE) == RING).all()
    assert (united([OUTER, INNER, INNER], SHAPE) == RING).all()


def test_what_may_be_meant_otherwise_is_counted():
    """A contour within another one in its direction; a line of diagonal steps twice, in both directions, as of a ring."""
    diamond = np.array([(3, 6), (6, 9), (9, 6), (6, 3)], float)
    for polygons, wanted in (
        ([OUTER, INNER[::-1]], {NO_HOLE: 1}),
        ([OUTER, INNER, ISLAND[::-1]], {NO_HOLE: 1}),
        ([OUTER, INNER, ISLAND], {}),
        ([OUTER, OUTER, OUTER[::-1]], {}),
        ([OUTER, box(5, 13)], {}),
        ([diamond, diamond[::-1]], {TWICE: 1}),
        ([diamond, diamond], {}),
    ):
        doubts = Counter()
        united(polygons, SHAPE, doubts)
        assert doubts == wanted


def test_overlapping_contours_are_united_in_whatever_direction():
    """Two squares of 6 x 6 pixels that share 3 x 3."""
    for second in (box(5, 10), box(5, 10)[::-1]):
        wanted = filled((slice(2, 8), slice(2, 8)), (slice(5, 11), slice(5, 11)))
        assert wanted.sum() == 36 + 36 - 9
        assert (united([box(2, 7), second], SHAPE) == wanted).all()


def test_a_contour_in_another_is_a_hole_if_it_is_drawn_in_the_other_direction():
    assert (united([OUTER, INNER], SHAPE) == RING).all()
    assert (united([INNER[::-1], OUTER], SHAPE) == united([OUTER], SHAPE)).all()
    both = RING | filled((slice(5, 9), slice(5, 9)))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        polygons = [(OUTER, INNER, ISLAND)[number] for number in order]
        assert (united(polygons, SHAPE) == both).all()
        assert (united([each[::-1] for each in polygons], SHAPE) == both).all()


@pytest.mark.parametrize("out", [0.03, 0.1, 0.15, 0.4, 0.49])
def test_a_hole_may_leave_its_contour_by_half_a_pixel(out):
    """Rows 4 to 9 of columns 4 to 12; a square beside it of the other direction is none, and neither is a moved copy."""
    hole = box(3, 10, (3, 12 + out))[::-1]
    wanted = filled((slice(1, 13), slice(1, 13))) & ~filled((slice(4, 10), slice(4, 13)))
    for polygons in ([OUTER, hole], [hole, OUTER], [OUTER[::-1], hole[::-1]]):
        assert (united(polygons, SHAPE) == wanted).all()
    beside = box(3, 10, (12, 12 + out))[::-1]
    assert (united([OUTER, beside], SHAPE) == united([OUTER], SHAPE)).all()
    assert (united([OUTER, OUTER[::-1] + out], SHAPE) == united([OUTER], SHAPE)).all()


@pytest.mark.parametrize("seam", [(6, 6), (6, 8)])
def test_a_hole_across_parts_that_touch_or_overlap_is_taken_from_both(seam):
    """With a part in the hole; what reaches beyond both parts is no hole."""
    parts = [box(1, 12, (1, seam[1])), box(1, 12, (seam[0], 12))]
    for order in ([0, 1, 2], [2, 0, 1]):
        polygons = [[*parts, INNER][number] for number in order]
        assert (united(polygons, SHAPE) == RING).all()
        assert (united([each[::-1] for each in polygons], SHAPE) == RING).all()
        both = RING | filled((slice(5, 9), slice(5, 9)))
        assert (united([*polygons, ISLAND], SHAPE) == both).all()
    beyond = box(3, 13, (3, 10))[::-1]
    assert (united([*parts, beyond], SHAPE) == united([OUTER, beyond[::-1]], SHAPE)).all()


def test_a_hole_in_one_contour_is_none_of_another_that_covers_a_part_of_it():
    across = box(0, 13, (6, 7))
    assert (united([OUTER, INNER, across], SHAPE) == RING | filled((slice(0, 14), slice(6, 8)))).all()


def test_a_keyhole_is_a_hole():
    """One line from the outer square along a channel to the inner one and back, in both directions of the inner one."""
    for way in (INNER, INNER[::-1]):
        inner = np.roll(way, -int(np.flatnonzero((way == (3, 3)).all(axis=1))[0]), axis=0)
        keyhole = np.concatenate([OUTER, OUTER[:1], inner, inner[:1]])
        assert (united([keyhole], SHAPE) == RING).all()


def test_exclusive_contours_are_combined_whatever_their_direction_and_order():
    """Figures C.8.8.6-2 and -3: a ring, and a part within its void; the lines belong to the structure."""
    nothing, both = np.zeros(SHAPE, bool), RING | filled((slice(5, 9), slice(5, 9)))
    for way in (1, -1):
        assert (exclusive(nothing, [OUTER, INNER[::way]]) == RING).all()
        assert (exclusive(nothing, [ISLAND[::way], OUTER, INNER]) == both).all()
    between = box(1.5, 12.5)
    assert not exclusive(nothing, [between, between[::-1]]).any()


# -- masks whose outlines another program has drawn --------------------------------------------------------------------

# rings, one of them only corner to corner; parts in a hole, single pixels, a line, and a bridge of one corner
ROWS = """
##############
#............#
#.####..#....#
#.#..#.#.#.#.#
#.#..#..#....#
#.####.......#
#........##..#
#.....####...#
#.#####......#
#.#...#...#..#
#.#.#.#..##..#
#.#...#......#
#.#####....#.#
##############
"""
MASK = np.array([list(row) for row in ROWS.split()]) == "#"
# what cv2.findContours (OpenCV 5.0, RETR_TREE, CHAIN_APPROX_SIMPLE) gives for it, as (row, column); rt-utils writes these
OPENCV = [
    [(0, 0), (13, 0), (13, 13), (0, 13)],
    [(9, 2), (8, 3), (8, 5), (9, 6), (11, 6), (12, 5), (12, 3), (11, 2)],
    [(10, 4)],
    [
        (1, 0),
        (0, 1),
        (0, 12),
        (1, 13),
        (12, 13),
        (13, 12),
        (12, 11),
        (13, 10),
        (13, 7),
        (12, 6),
        (8, 6),
        (7, 7),
        (7, 9),
        (6, 10),
        (6, 9),
        (7, 8),
        (7, 6),
        (8, 5),
        (8, 2),
        (12, 2),
        (13, 1),
        (12, 0),
    ],
    [(9, 10), (10, 9), (10, 10)],
    [(3, 11)],
    [(2, 8), (3, 7), (4, 8), (3, 9)],
    [(3, 7), (2, 8), (3, 9), (4, 8)],
    [(2, 2), (5, 2), (5, 5), (2, 5)],
    [(3, 2), (2, 3), (2, 4), (3, 5), (4, 5), (5, 4), (5, 3), (4, 2)],
]


def test_the_contours_of_opencv_give_the_mask_back():
    polygons = [np.array(corners, float) for corners in OPENCV]
    for way in (1, -1):
        assert (united([each[::way] for each in polygons], SHAPE) == MASK).all()
        assert (exclusive(np.zeros(SHAPE, bool), [each[::way] for each in polygons]) == MASK).all()
    rounded = [each + np.random.default_rng(0).uniform(-0.009, 0.009, each.shape) for each in polygons]
    assert (united(rounded, SHAPE) == MASK).all()


def along_edges(mask):
    """Closed lines along the edges of a mask's pixels, foreground always on one side, so holes turn the other way."""
    padded = np.pad(mask, 1)
    ahead = {}
    for row, column in np.argwhere(padded):
        r, c = row - 1.5, column - 1.5  # the pixel's first corner; the four sides, each from corner to corner
        for beside, start, end in (
            ((row - 1, column), (r, c), (r, c + 1)),
            ((row, column + 1), (r, c + 1), (r + 1, c + 1)),
            ((row + 1, column), (r + 1, c + 1), (r + 1, c)),
            ((row, column - 1), (r + 1, c), (r, c)),
        ):
            if not padded[beside]:
                ahead.setdefault(start, []).append(end)
    found = []
    while ahead:
        line = [next(iter(ahead))]
        while line[-1] in ahead:
            ends = ahead[line[-1]]
            line.append(ends.pop())
            if not ends:
                del ahead[line[-2]]
        found.append(np.array(line[:-1]))
    return found


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_contours_along_the_edges_of_pixels_give_any_mask_back(share):
    """Noise, which has every way in which pixels, holes and parts in holes can touch."""
    rng = np.random.default_rng(int(10 * share))
    for _ in range(4):
        mask = rng.random(SHAPE) < share
        polygons = along_edges(mask)
        for way in (1, -1):
            turned = [np.roll(each[::way], rng.integers(9), axis=0) for each in polygons]
            assert (united([turned[number] for number in rng.permutation(len(turned))], SHAPE) == mask).all()
            assert (exclusive(np.zeros(SHAPE, bool), turned) == mask).all()
