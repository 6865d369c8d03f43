"""Synthetic sites: images of lesions in tissue, with devices and annotations as different as at four hospitals.

Sites differ in tint, contrast, texture, noise, vignette, lesion size and annotation habits. A lesion fades into an ambiguous
halo; the raters of one site draw a wide outline, those of another a tight one, the others an exact or a smooth one. The wide
and the tight raters use the same kind of device (equal texture, noise and vignette; normalisation per channel removes most of
tint and gain), so no single network can fit both.

All numbers of a site are in its dataset.json under "habits"; with `thin` the `smoothing` among them has no effect. An image
depends on (seed, site, image), so any site can be made alone, with the same bits. Dials change how far sites differ
(`feddp.data.habits`); between two values of a dial, an image keeps its structures, and everything that the dial does not move.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
from scipy.ndimage import distance_transform_edt, gaussian_filter

from feddp.data.folder import refuse_occupied, write_site
from feddp.data.habits import ERROR, Dials, Habits, habits_of, rng_of
from feddp.data.prepare.split import split_patients
from feddp.data.progress import track
from feddp.data.vessels import THIN, vessel

LESION = np.array([0.2, -1.0, -0.6])  # redder and darker than any tissue colour
EMPTY = 0.1  # fraction of the images without a lesion
METADATA = {"channels": 3, "classes": ("lesion",), "labels": "nested"}  # in every site's dataset.json
HALO = 1.6  # radius of the halo, in radii of the lesion


def synthesize(
    root: Path,
    sites: int = 4,
    images: int = 60,
    size: int = 96,
    seed: int = 0,
    dials: Dials = Dials(),
    thin: bool = False,
) -> None:
    """Writes <root>/site-1 to site-<sites>, each with `images` RGB images of size x size pixels.

    Each patient has two images; patients are split 60/20/20. `thin` draws curves instead of lesions. Raises InputError if one
    of the folders is not empty.
    """
    folders = [Path(root) / f"site-{number}" for number in range(1, sites + 1)]
    refuse_occupied(folders)
    for index, folder in enumerate(folders):
        synthesize_site(folder, index, images, size, seed, dials, thin)


def patients_of(images: int) -> list[str]:
    """Returns the patient of each image of a site."""
    return [f"P{number // 2:03d}" for number in range(images)]


def synthesize_site(
    folder: Path, index: int, images: int, size: int, seed: int, dials: Dials = Dials(), thin: bool = False
) -> None:
    """Writes only site number `index`, from 0, with the same bits as in a whole set of sites."""
    habits = habits_of(index, seed, dials)
    patients = patients_of(images)
    splits = split_patients(patients, seed)
    metadata = {
        "name": "synthetic",
        **METADATA,
        "seed": seed,
        "index": index,
        "habits": asdict(habits),
        **({"dials": asdict(dials)} if dials != Dials() else {}),
        **({"thin": thin} if thin else {}),
    }
    samples = (
        (
            f"image-{number:03d}",
            patient,
            splits[patient],
            *draw(habits, size, rng_of(seed, index, number), dials.label_noise, thin),
        )
        for number, patient in enumerate(track(patients, f"Drawing {Path(folder).name}"))
    )
    write_site(folder, metadata, samples)


def draw(
    habits: Habits, size: int, rng: np.random.Generator, label_noise: float = 0.0, thin: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image, uint8 (size, size, 3), and the mask of the site's raters, uint8 (size, size) of 0 and 1."""
    (slips,) = rng.spawn(1)  # errors of the raters: drawn apart, so that they do not change the image
    y, x = np.mgrid[:size, :size] / (size - 1)
    shading = habits.texture * _smooth(rng, size, habits.texture_scale)
    shading += 0.05 * _smooth(rng, size, 0.25)  # folds and uneven light, at every site
    colour = habits.tint * (1 + 0.05 * rng.standard_normal(3)) + shading[..., None]

    drawn = np.zeros((size, size), bool)
    if rng.random() >= EMPTY:
        for _ in range(rng.integers(1, 3)):
            error = label_noise * ERROR * _smooth(slips, size, 0.06) if label_noise else 0.0
            if thin:
                depth, outside = vessel(habits.lesion_radius, x, y, rng)
                mask = outside < THIN * (habits.margin + error)
            else:
                depth, lesion = _lesion(habits, x, y, rng)
                mask = _annotate(lesion, habits, error)
            colour += habits.contrast * rng.uniform(0.8, 1.2) * depth[..., None] * LESION
            drawn |= mask

    # a dark blotch of another colour, so that darkness alone does not identify a lesion
    blotch, _ = _lesion(habits, x, y, rng)
    colour -= 0.1 * blotch[..., None]
    colour *= (1 - habits.vignette * 2 * ((x - 0.5) ** 2 + (y - 0.5) ** 2))[..., None]
    colour = habits.gain * np.clip(colour, 0, 1) ** habits.gamma + habits.noise * rng.standard_normal(colour.shape)
    return np.round(255 * np.clip(colour, 0, 1)).astype(np.uint8), drawn.astype(np.uint8)


def _smooth(rng: np.random.Generator, size: int, scale: float) -> np.ndarray:
    """Returns noise of unit standard deviation, smooth over the fraction `scale` of the side."""
    field: np.ndarray = gaussian_filter(rng.standard_normal((size, size)), scale * size, mode="wrap")
    unit: np.ndarray = (field - field.mean()) / field.std()
    return unit


def _lesion(habits: Habits, x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lesion's strength per pixel, 0 to 1 with a soft edge and a halo, and the pixels inside its true edge."""
    radius = rng.uniform(*habits.lesion_radius)
    cx, cy = rng.uniform(0.1 + radius, 0.9 - radius, 2)
    stretch, turn = rng.uniform(0.75, 1.0), rng.uniform(0, np.pi)
    u = (x - cx) * np.cos(turn) + (y - cy) * np.sin(turn)
    v = ((y - cy) * np.cos(turn) - (x - cx) * np.sin(turn)) / stretch
    angle = np.arctan2(v, u)
    edge = radius * np.ones_like(angle)
    for order in (2, 3, 4, 5):
        edge += radius * rng.uniform(0, 0.3 / order) * np.cos(order * angle + rng.uniform(0, 2 * np.pi))
    distance = np.hypot(u, v) / edge  # 1 on the edge
    core = 1 / (1 + np.exp(np.clip((distance - 0.9) / 0.12, -50, 50)))
    halo = np.clip((HALO - distance) / (HALO - 0.8), 0, 1)
    return 0.6 * core + 0.4 * halo, distance < 1


def _annotate(lesion: np.ndarray, habits: Habits, error: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns the lesion as the site's raters draw it (boolean maps); `error` per pixel moves the outline, in sides."""
    size = len(lesion)
    outside = distance_transform_edt(~lesion) - distance_transform_edt(lesion)
    drawn: np.ndarray = outside < (habits.margin + error) * size  # without both: the lesion, as no pixel is at distance 0
    if not habits.smoothing:
        return drawn
    smooth: np.ndarray = gaussian_filter(drawn.astype(float), habits.smoothing * size)
    return smooth > 0.5
