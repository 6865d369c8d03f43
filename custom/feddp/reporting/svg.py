"""Figures as SVG inside an HTML page: in the page's own colour and letters, and the same bytes for the same figure."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

import matplotlib
from matplotlib.figure import Figure

_INK = "#010203"  # what is drawn in it takes the page's colour of text, in light and in dark
_COLOURS = ("#2f7fb8", "#d9822b", "#2a9d78", "#b5559b", "#7a6ad8", "#c2504d", "#7d8a33", "#5b9fb5", "#a3742f", "#7f8791")
_STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), _INK),
    **{f"boxplot.{part}props.color": _INK for part in ("box", "whisker", "cap", "median")},
    "grid.color": _INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=_COLOURS),
    "axes.titlesize": 11,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.parse_math": False,  # a site may be called `$x`
    "svg.fonttype": "none",  # text stays text: small, and readable for a screen reader
}
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
    opened = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width:g} {height:g}" role="img"'
    size = f' style="width:{width * 4 / 3:.0f}px" aria-label="{escape(title)}"><title>{escape(title)}</title>'
    return opened + size + re.sub(r"\s*\n\s*", "\n", rest).strip()
