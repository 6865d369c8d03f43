"""Figures as SVG inside an HTML page: in the page's own colour and letters, and the same bytes for the same figure."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

_INK = "#010203"  # what is drawn in it takes the page's colour of text, in light and in dark
_COLOURS = ("#2f7fb8", "#d9822b", "#2a9d78", "#b5559b", "#7a6ad8", "#c2504d", "#7d8a33", "#5b9fb5", "#a3742f", "#7f8791")
_STYLE: Any = {  # rcParams, whose names matplotlib's types list one by one
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), _INK),
    **{f"boxplot.{part}props.color": _INK for part in ("box", "whisker", "cap", "median")},
    "grid.color": _INK,
    "grid.linewidth": 0.5,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler("color", _COLOURS),
    "axes.titlesize": 11,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.parse_math": False,  # a site may be called `$x`
    "svg.fonttype": "none",  # text stays text: small, and readable for a screen reader
}
_READABLE = 0.8  # of its width, below which a figure is scrolled, not made smaller
_UNUSED = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|<style type=\"text/css\">.*?</style>", re.DOTALL)
_NAMED = re.compile(r' id="([^"]*)"')
_USED = re.compile(r'(?:url\(#|href="#)([^")]*)')


@contextmanager
def page_style() -> Iterator[None]:
    """Figures for `inline` are made and turned into text within this block."""
    with matplotlib.rc_context(_STYLE):
        yield


def inline(figure: Figure, name: str, title: str) -> str:
    """The figure as an `<svg>` element with a title for those who do not see it.

    Args:
        name: unlike that of every other figure of the page; the ids inside follow from it and from the drawing alone.
    """
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = _UNUSED.sub("", written.getvalue())
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    used = set(_USED.findall(text))
    text = _NAMED.sub(lambda match: match[0] if match[1] in used else "", text)
    head, rest = text.split(">", 1)
    width, height = (float(each) for each in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)[0])
    pixels = round(width * 4 / 3)
    size = f"width:{pixels}px;min-width:{round(_READABLE * pixels)}px"
    opened = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" style="{size}" aria-label="{escape(title)}">'
    return f"{opened}<title>{escape(title)}</title>" + re.sub(r"\s*\n\s*", "\n", rest).strip()
