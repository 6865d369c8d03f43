"""Closed polygons as pixels: which lie inside one polygon or on its line, and which of several polygons are holes.

A pixel is its centre, which has whole coordinates. The rules are those of DICOM PS3.3 C.8.8.6.3: the line belongs to the
structure, whatever it surrounds. Neither the direction nor the first corner of a polygon matters to its own pixels.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

TOUCH = 0.02  # pixels: what is nearer to a line is on it; contours in files are rounded, often to 0.01 mm
SLIP = 0.5  # pixels: how far a hole may leave the polygon around it
# what may be meant otherwise, as a note says it
NO_HOLE = "contours within another one that is drawn in the same direction change nothing; export holes as CLOSEDPLANAR_XOR"
TWICE = "contours that are drawn twice, in both directions, are read as rings; draw areas once"
_AT_ONCE = 10**6  # pairs of points and edges that are held in memory


@dataclass(frozen=True)
class Outline:
    """The pixels of a polygon in the part of an image that it reaches.

    Args:
        window: the rows and columns of this part.
        inside: the pixels within the polygon; some of them lie on its line.
        line: those on its line.
    """

    window: tuple[slice, slice]
    inside: np.ndarray
    line: np.ndarray

    @classmethod
    def of(cls, corners: np.ndarray, shape: tuple[int, ...]) -> "Outline":
        """Returns the pixels of a polygon with these corners (N, 2), rows and columns, in an image (H, W)."""
        low, high = reach(corners, shape)
        size, moved = tuple(int(length) for length in high - low), corners - low
        window = slice(low[0], high[0]), slice(low[1], high[1])
        return cls(window, _inside(moved, size), _line(moved, size))

    @property
    def hole(self) -> np.ndarray:
        """What it takes away if it is a hole: the line of a hole belongs to what surrounds it."""
        within: np.ndarray = self.inside & ~self.line
        return within


def reach(corners: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first row and column of the image (H, W) that a polygon reaches, and those behind its last ones."""
    low = np.clip(np.ceil(corners.min(axis=0) - TOUCH), 0, shape).astype(int)
    high = np.clip(np.floor(corners.max(axis=0) + TOUCH) + 1, 0, shape).astype(int)
    return low, np.maximum(low, high)


def united(polygons: Sequence[np.ndarray], shape: tuple[int, ...], doubts: Counter[str] | None = None) -> np.ndarray:
    """Returns the pixels (H, W) of a structure that several polygons of a slice outline, each with corners (N, 2).

    They are all pixels within a polygon, without those of holes. A hole is a polygon inside another one that is drawn in the
    other direction; what lies in it is structure again if it is drawn in the direction of the outermost one. `doubts` counts
    polygons of which a user should know how they were read: NO_HOLE, TWICE.
    """
    outlines = [Outline.of(corners, shape) for corners in polygons]
    around = _across(polygons, outlines, _around(polygons), shape)
    hole = _holes(polygons, around, Counter() if doubts is None else doubts)
    whole = np.zeros(shape, bool)
    for number in np.flatnonzero(~hole):
        part = np.zeros(shape, bool)
        part[outlines[number].window] = outlines[number].inside | outlines[number].line
        for other in np.flatnonzero(around[number] & hole):
            part[outlines[other].window] &= ~outlines[other].hole
        whole |= part
    return whole


def exclusive(whole: np.ndarray, polygons: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the pixels (H, W) of a structure combined with polygons by exclusive or, and those on the polygons' lines."""
    outlines = [Outline.of(corners, whole.shape) for corners in polygons]
    found = whole.copy()
    for each in outlines:
        found[each.window] ^= each.inside
    for each in outlines:
        found[each.window] |= each.line
    return found


def _inside(corners: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the pixels from which a way out crosses the line an odd number of times.

    So a channel from the outer line to an inner one (a keyhole) makes a hole of what the inner one surrounds.
    """
    changes = np.zeros((shape[0], shape[1] + 1), np.int32)
    for start, end in _edges(corners, max(1, *shape)):
        low, high = np.minimum(start[:, 0], end[:, 0]), np.maximum(start[:, 0], end[:, 0])
        edge, row = _spread(np.ceil(low), np.ceil(high), shape[0])  # a row on a corner counts for the edge that leads down
        share = (row - start[edge, 0]) / (end[edge, 0] - start[edge, 0])
        column = start[edge, 1] + share * (end[edge, 1] - start[edge, 1])
        np.add.at(changes, (row, np.clip(np.floor(column) + 1, 0, shape[1]).astype(int)), 1)
    within: np.ndarray = np.cumsum(changes, axis=1)[:, :-1] % 2 == 1
    return within


def _line(corners: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the pixels on the line of a polygon; of a single corner, on that."""
    touched = np.zeros(shape, bool)
    for start, end in _edges(corners, max(1, *shape)):
        steep = np.abs(end - start)[:, 0] >= np.abs(end - start)[:, 1]
        for along, chosen in ((0, steep), (1, ~steep)):  # each pixel on an edge is the nearest to it in its row, or column
            first, last = start[chosen], end[chosen]
            low, high = np.minimum(first, last)[:, along], np.maximum(first, last)[:, along]
            edge, there = _spread(np.ceil(low - TOUCH), np.floor(high + TOUCH) + 1, shape[along])
            way = (last - first)[edge]
            share = np.clip((there - first[edge, along]) / np.where(way[:, along] == 0, 1, way[:, along]), 0, 1)
            across = np.rint(first[edge, 1 - along] + share * way[:, 1 - along])
            pixel = np.stack([there, across] if along == 0 else [across, there], axis=1)
            kept = (_apart(pixel, first[edge], last[edge]) <= TOUCH) & (across >= 0) & (across < shape[1 - along])
            touched[tuple(pixel[kept].astype(int).T)] = True
    return touched


def _holes(polygons: Sequence[np.ndarray], around: np.ndarray, doubts: Counter[str]) -> np.ndarray:
    """Returns which polygons (N,) are holes; `doubts` as of `united`."""
    ways, hole = [_way(corners) for corners in polygons], np.zeros(len(polygons), bool)
    depth = around.sum(axis=0)
    for number in np.argsort(depth, kind="stable").tolist():  # outer ones first
        if not depth[number] or not ways[number]:
            continue
        outer = max(np.flatnonzero(around[:, number]).tolist(), key=lambda each: int(depth[each]))
        slack = TOUCH if _within(polygons[number], polygons[outer]) else SLIP
        turned = ways[number] != ways[outer]
        if not _within(polygons[outer], polygons[number], slack):
            doubts.update([] if turned else [NO_HOLE])
        elif turned and _is_ring(polygons[number]):
            doubts[TWICE] += 1
        else:
            ways[number] = ways[outer]  # the same line twice encloses nothing between the two
        hole[number] = hole[outer] ^ (ways[number] != ways[outer])
    return hole


def _across(
    polygons: Sequence[np.ndarray], outlines: Sequence[Outline], around: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns `around` (N, N) so that parts of a structure lie together around a hole that none of them holds alone.

    Such a hole has its pixels in several outermost polygons, all drawn in the other direction.
    """
    ways, found = np.array([_way(corners) for corners in polygons]), around.copy()
    outermost = ~around.any(axis=0) & (ways != 0)
    for way in (1, -1):
        parts = np.flatnonzero(outermost & (ways == -way)).tolist()
        candidates = np.flatnonzero(outermost & (ways == way)).tolist() if len(parts) > 1 else []
        if not candidates:
            continue
        owners = np.zeros(shape, np.uint16)
        for part in parts:
            owners[outlines[part].window] += outlines[part].inside | outlines[part].line
        for number in candidates:
            own = outlines[number]
            area, there = own.inside | own.line, owners[own.window] > 0
            if not own.hole.any() or (area & ~there).any():
                continue
            low, high = polygons[number].min(axis=0), polygons[number].max(axis=0)
            near = [p for p in parts if (polygons[p].min(axis=0) <= high).all() and (polygons[p].max(axis=0) >= low).all()]
            held = around[number] | (np.arange(len(polygons)) == number)
            found[np.ix_(near, held)] = True
    return found


def _around(polygons: Sequence[np.ndarray]) -> np.ndarray:
    """Returns an array (N, N): whether the polygon of the row lies around that of the column. Of equal ones, the first does.

    A polygon that is drawn in the other direction may leave it a little, as holes do that touch the line.
    """
    count = len(polygons)
    found = np.zeros((count, count), bool)
    low, high = (np.stack([bound(corners, axis=0) for corners in polygons]) for bound in (np.min, np.max))
    ways = np.array([_way(corners) for corners in polygons])
    for outer in range(count):
        slack = np.where(ways * ways[outer] < 0, SLIP, TOUCH)
        near = (low >= low[outer] - slack[:, None]).all(axis=1) & (high <= high[outer] + slack[:, None]).all(axis=1)
        for inner in np.flatnonzero(near).tolist():
            twin = found[inner, outer]  # also around this one
            found[outer, inner] = outer != inner and not twin and ways[outer] != 0
            found[outer, inner] = found[outer, inner] and _within(polygons[inner], polygons[outer], slack[inner])
    return found


def _within(points: np.ndarray, corners: np.ndarray, slack: float = TOUCH) -> bool:
    """Whether all points (M, 2) lie within a polygon with these corners (N, 2), or outside by at most so many pixels.

    With more slack than that of a line, so do the middles between the points, and more than half of all lie within it.
    """
    if slack > TOUCH:
        points = np.concatenate([points, (points + np.roll(points, 1, axis=0)) / 2])
    odd, apart = np.zeros(len(points), bool), np.full(len(points), np.inf)
    for start, end in _edges(corners, len(points)):
        point, first, last = points[:, None], start[None], end[None]
        between = (first[..., 0] <= point[..., 0]) != (last[..., 0] <= point[..., 0])
        height = np.where(first[..., 0] == last[..., 0], 1, last[..., 0] - first[..., 0])
        column = first[..., 1] + (point[..., 0] - first[..., 0]) / height * (last[..., 1] - first[..., 1])
        odd ^= (between & (column < point[..., 1])).sum(axis=1) % 2 == 1
        apart = np.minimum(apart, _apart(point, first, last).min(axis=1))
    return bool((odd | (apart <= slack)).all() and (odd | (apart <= TOUCH)).mean() > 0.5)


def _is_ring(corners: np.ndarray) -> bool:
    """Whether a polygon leads from pixel to pixel by their edges and corners, without an edge that a corner would save.

    Of a closed line of such pixels, OpenCV gives twice the same polygon, in both directions: an outer and an inner one.
    """
    places = np.rint(corners)
    ways = np.diff(places, axis=0, append=places[:1])
    ways = ways[(ways != 0).any(axis=1)]
    size = np.abs(ways)
    straight = (size == 0).any(axis=1)
    turns = straight & np.roll(straight, -1) & (np.sign(ways) * np.sign(np.roll(ways, -1, axis=0)) == 0).all(axis=1)
    whole = np.abs(corners - places).max() <= TOUCH
    return bool(whole and (straight | (size[:, 0] == size[:, 1])).all() and not turns.any())


def _way(corners: np.ndarray) -> int:
    """Returns the direction in which a polygon is drawn, 1 or -1; 0 if it surrounds nothing."""
    offset = corners - corners[0]
    after = np.roll(offset, -1, axis=0)
    area = float((offset[:, 0] * after[:, 1] - offset[:, 1] * after[:, 0]).sum()) / 2
    return 0 if abs(area) < TOUCH else int(np.sign(area))


def _edges(corners: np.ndarray, each: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields starts and ends (N, 2) of edges, some at a time: an edge needs memory for `each` pixels or points."""
    after, size = np.roll(corners, -1, axis=0), max(1, _AT_ONCE // each)
    for number in range(0, len(corners), size):
        yield corners[number : number + size], after[number : number + size]


def _spread(low: np.ndarray, high: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns edges and whole numbers: of edge i, those from low[i] to high[i] - 1, of 0 to most - 1."""
    low, high = (np.clip(bound, 0, most).astype(int) for bound in (low, high))
    count = np.maximum(high - low, 0)
    edge = np.repeat(np.arange(len(low)), count)
    return edge, np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count) + low[edge]


def _apart(point: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns the distances of points from edges, all (..., 2)."""
    way = end - start
    length = (way**2).sum(axis=-1)
    share = np.clip(((point - start) * way).sum(axis=-1) / np.where(length == 0, 1, length), 0, 1)
    distance: np.ndarray = np.linalg.norm(point - start - share[..., None] * way, axis=-1)
    return distance
