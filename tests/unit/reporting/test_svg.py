"""Figures inside a page."""

import xml.etree.ElementTree as ET

from matplotlib.figure import Figure

from feddp.reporting.plots import draw_curves, draw_spread
from feddp.reporting.svg import inline, page_style

HOSTILE = ["<script>alert(1)</script>", 'a" onload="x', "$\\alpha", "--><b>", "_hidden", "&amp;"]


def curves() -> Figure:
    return draw_curves({name: {name: [{1: 0.1, 2: 0.2}]} for name in HOSTILE}, "IoU", columns=3)


def test_the_same_figure_is_the_same_text_and_holds_no_date():
    texts = []
    for _ in range(2):
        with page_style():
            texts.append(inline(curves(), "one", "Curves"))
    assert texts[0] == texts[1]
    assert "<metadata" not in texts[0]
    assert "date" not in texts[0].lower()


def test_names_are_text_and_not_markup():
    """Every name stands as it is in some <text>, `$` starts no formula, and the figure is well-formed XML."""
    with page_style():
        text = inline(curves(), "one", HOSTILE[0])
    root = ET.fromstring(text.replace("xlink:href", "href"))
    found = [each.text for each in root.iter("text")]
    assert [name for name in HOSTILE if name not in found] == []
    assert [each.tag for each in root.iter() if each.tag in ("script", "b", "style")] == []
    assert root.find("title").text == HOSTILE[0]


def test_it_takes_the_pages_colours_and_no_id_twice():
    with page_style():
        one = inline(draw_spread({"a": [1, 2, 3], "b": [2, 3, 4]}, "", "Dice"), "one", "t")
        other = inline(draw_spread({"a": [1, 2, 3], "b": [2, 3, 4]}, "", "Dice"), "other", "t")
    assert "currentColor" in one
    assert "#010203" not in one
    ids = [
        {each.get("id") for each in ET.fromstring(text.replace("xlink:href", "href")).iter()} - {None} for text in (one, other)
    ]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_panels_stand_in_rows():
    """Six panels in rows of three; four fill one row and a third."""
    assert len(curves().axes) == 6
    figure = draw_curves({str(i): {"m": [{1: 0.1}]} for i in range(4)}, "IoU", columns=3)
    assert [axis.axison for axis in figure.axes] == [True] * 4 + [False] * 2
