"""A page of some images of each site with the outlines of their masks, so that a person sees what was read.

It lies beside the sites' folders, and nothing that trains or predicts reads it. One file without scripts: pictures are in it.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import binary_erosion

from feddp.data.description import Row
from feddp.data.folder import SiteFolder, find_sites
from feddp.data.formats.write import COLOURS
from feddp.data.pixels import read_image, read_mask
from feddp.errors import BadFile
from feddp.files import replacing

NAME = "preview.html"
SHOWN = 6  # images of a site; more if its classes are more
LOOKED_AT = 48  # masks of a site from which these are chosen
SIDE = 240  # pixels of the longer side
QUALITY = 85  # of JPEG: 10 KB for a photograph
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em }
div { display: flex; flex-wrap: wrap; gap: 1em } figure { margin: 0; width: 240px; overflow-wrap: anywhere }
figcaption { font-size: 85% } b { padding-left: .7em; margin-right: .4em; border-left: .8em solid }"""


def write_preview(root: Path) -> Path:
    """Writes the page for all sites' folders below `root`, and returns it. The same folders make the same page.

    Raises:
        InputError: there is no site's folder, or one is not valid.
        StorageError: the page cannot be written.
    """
    sites = [SiteFolder.open(path) for path in find_sites(root)]
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"',
        " content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>What was read</title><style>{STYLE}</style></head><body>\n<h1>What was read</h1>\n",
        "<p>Some images of each site, with the outlines of their classes. Do they lie where they should? This page shows images"
        " of patients: keep it where they are.</p>\n",
        *(_section(site) for site in sites),
        "</body></html>\n",
    ]
    with replacing(root / NAME) as part:
        part.write_text("".join(parts), encoding="utf-8")
    return root / NAME


def _section(site: SiteFolder) -> str:
    legend = "".join(f'<b style="border-color: {_hex(c)}"></b>{escape(name)} ' for c, name in enumerate(site.classes))
    try:
        figures = "".join(_figure(site, row) for row in _chosen(site))
    except BadFile as error:  # of a site that was there before, and has nothing to do with what was prepared
        figures = f"<p>Not shown. {escape(str(error))}</p>"
    count = f"{len(site.rows)} images, {site.labels} classes"
    return f"<h2>{escape(site.site)}</h2>\n<p>{count}: {legend}</p>\n<div>{figures}</div>\n"


def _hex(number: int) -> str:
    return "#" + "".join(f"{value:02x}" for value in COLOURS[number % len(COLOURS)])


def _chosen(site: SiteFolder) -> list[Row]:
    """Returns images in the order of split.csv: of each class, that with most of it; then some with and without any."""
    rows = [site.rows[place] for place in _spread(len(site.rows), LOOKED_AT)]
    areas = np.array([_maps(site, row).mean(axis=(1, 2)) for row in rows])  # (images, classes)
    chosen = {int(best) for best, most in zip(areas.argmax(axis=0), areas.max(axis=0), strict=True) if most > 0}
    drawn = [place for place in range(len(rows)) if areas[place].any()]
    empty = [place for place in range(len(rows)) if not areas[place].any()]
    for places, most in ((empty, min(1, len(empty))), (drawn, SHOWN), (empty, SHOWN)):
        room = max(0, min(most, SHOWN - len(chosen)))
        left = [place for place in places if place not in chosen]
        chosen.update(left[place] for place in _spread(len(left), room))
    return [rows[place] for place in sorted(chosen)]


def _spread(count: int, most: int) -> Sequence[int]:
    """Returns at most `most` of `count` places, evenly."""
    return range(count) if count <= most else [count * number // most for number in range(most)]


def _maps(site: SiteFolder, row: Row) -> np.ndarray:
    """Returns where each class is: bool (C, H, W)."""
    mask = read_mask(site.mask_path(row.image), len(site.classes), site.path)
    values = np.arange(1, len(site.classes) + 1)[:, None, None]
    return mask >= values if site.labels == "nested" else mask == values


def _figure(site: SiteFolder, row: Row) -> str:
    image, maps = read_image(site.image_path(row.image), site.channels, site.path), _maps(site, row)
    factor = SIDE / max(image.shape[:2])
    size = (max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor)))
    smooth, sharp = Image.Resampling.BOX, Image.Resampling.NEAREST
    pixels = np.array(Image.fromarray(image).resize(size, smooth if factor < 1 else sharp).convert("RGB"))
    for number, drawn in enumerate(maps):
        # a structure that is thinner than a pixel here still has an outline
        covered = Image.fromarray(drawn.astype(np.uint8) * 255).resize(size, smooth if factor < 1 else sharp)
        inside = np.asarray(covered) > 0
        pixels[inside & ~binary_erosion(inside)] = COLOURS[number % len(COLOURS)]
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=QUALITY, subsampling=0)
    shares = ", ".join(f"{escape(name)} {_share(drawn)}" for name, drawn in zip(site.classes, maps, strict=True))
    told = f"{escape(row.image)} ({row.split}): {shares}"
    return (
        f'<figure><img width="{size[0]}" height="{size[1]}" alt="" src="data:image/jpeg;base64,'
        f'{base64.b64encode(stream.getvalue()).decode()}"><figcaption>{told}</figcaption></figure>\n'
    )


def _share(drawn: np.ndarray) -> str:
    if not drawn.any():
        return "none"
    return "under 0.01 %" if drawn.mean() < 1e-4 else f"{100 * drawn.mean():.3g} %"
