"""Thin structures of synthetic images: curves as vessels, fissures or catheters are, one to five pixels wide."""

import numpy as np
from scipy.spatial import cKDTree

THIN = 0.07  # half the width of a curve, in radii of a lesion; raters' margins and errors are as much smaller
LENGTH, POINTS = 1.3, 400  # of a curve: in fractions of the side, and points on it
BEND = 0.07  # standard deviation of the change of direction from point to point, in radians


def vessel(
    radius: tuple[float, float], x: np.ndarray, y: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a curve's strength per pixel, 0 to 1, and every pixel's distance outside its edge, negative inside.

    It passes through the middle of the image. x, y: the pixels' coordinates, 0 to 1; distances are in the same unit.
    """
    half = THIN * rng.uniform(*radius)
    heading = rng.uniform(0, 2 * np.pi) + np.cumsum(BEND * rng.standard_normal(POINTS))
    points = np.cumsum(LENGTH / POINTS * np.stack([np.cos(heading), np.sin(heading)], axis=1), axis=0)
    points += rng.uniform(0.25, 0.75, 2) - points[POINTS // 2]
    distance, _ = cKDTree(points).query(np.stack([x, y], axis=-1))
    outside = distance - half
    return 1 / (1 + np.exp(np.clip(outside / (0.3 * half), -50, 50))), outside
