"""Pictures inside a site's page: images as PNG in the page, contours of masks as paths, maps in colours."""

import base64
import io

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

VIEW = 100.0  # units of a panel's side, whatever the pixels of what it shows
_SIDE = 256  # pixels: more make the page large, not clearer


def picture(pixels: np.ndarray) -> str:
    """An image (H, W) or (H, W, 3) of uint8, made square as a network sees it, as the `data:` address of a PNG."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return _png(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR))


def coloured(values: np.ndarray, highest: float) -> str:
    """A map (H, W) from 0, dark, to `highest`, bright, as the `data:` address of a PNG."""
    shares = values / highest if highest > 0 else np.zeros_like(values)
    colours = matplotlib.colormaps["magma"](np.clip(shares, 0, 1), bytes=True)[..., :3]
    image = Image.fromarray(np.ascontiguousarray(colours))
    return _png(image.resize((_SIDE // 2, _SIDE // 2), Image.Resampling.BILINEAR))


def contours(mask: np.ndarray) -> str:
    """The outlines of a boolean mask (H, W) as the `d` of a path in a view of VIEW x VIEW; "" for an empty mask.

    They run through the middle between foreground and background pixels, and are closed at the edge of the image.
    """
    padded = np.pad(mask.astype(float), 1)
    rows, columns = mask.shape
    # of a pixel's index, the middle in the view: pixel i of n covers i/n to (i+1)/n
    x, y = (VIEW * (np.arange(-1, n + 1) + 0.5) / n for n in (columns, rows))
    found = Figure().subplots().contour(x, y, padded, levels=[0.5])
    lines = [line for path in found.get_paths() for line in path.to_polygons(closed_only=False)]
    return "".join("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in np.clip(line, 0, VIEW)) + "Z" for line in lines)


def _png(image: Image.Image) -> str:
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
