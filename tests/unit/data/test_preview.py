"""The page that `data prepare` writes: a person sees each class where it was read; nothing else reads it."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from feddp.data.check import check
from feddp.data.folder import write_site
from feddp.data.formats.write import COLOURS
from feddp.data.preview import LOOKED_AT, SHOWN, SIDE, write_preview

ODD = "<script>alert(1)</script>&\"'"


def site(root, name="north", count=3, classes=("lesion",), labels="nested", draw=None, shape=(24, 32), channels=1):
    """Images of one grey, 100, whose masks `draw` makes from their number."""

    def samples():
        for number in range(count):
            image = np.full((*shape, channels) if channels > 1 else shape, 100, np.uint8)
            mask = np.zeros(shape, np.uint8)
            if draw:
                draw(mask, number)
            yield f"{ODD if number == 0 else 'i'}{number}".replace("/", "|"), f"p{number}", "train", image, mask

    metadata = {"name": "x", "channels": channels, "classes": list(classes), "labels": labels}
    write_site(root / name, metadata, samples())
    return root


def pictures(page):
    text = page.read_text(encoding="utf-8")
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(found)))).astype(int)
        for found in re.findall(r"base64,([^\"]+)\"", text)
    ]


def close(picture, number):
    """Where a picture has the colour of a class; JPEG changes it a little."""
    return np.abs(picture - COLOURS[number]).sum(axis=-1) < 60


def captions(page):
    return re.findall(r"<figcaption>(.*?)</figcaption>", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_outline_of_a_class_lies_where_its_mask_is(tmp_path, channels):
    """A box of 8 x 12 of 24 x 32 pixels, at 7.5 pixels of the page each: its outline, and not its inside, is coloured."""

    def box(mask, number):
        mask[4:12, 10:22] = 1

    (picture,) = pictures(write_preview(site(tmp_path, count=1, draw=box, channels=channels)))
    assert picture.shape == (180, SIDE, 3)
    rows, columns = np.nonzero(close(picture, 0))
    assert (rows.min(), rows.max()) == (30, 89)  # 4 · 7.5 and 12 · 7.5 - 1
    assert (columns.min(), columns.max()) == (75, 164)
    assert not close(picture, 0)[33:87, 78:162].any()


@pytest.mark.parametrize("labels", ["nested", "exclusive"])
def test_each_class_has_its_outline_and_its_share(tmp_path, labels):
    """Class 1 on 12 x 16 pixels and class 2 on 6 x 8 of them, of 768: nested, 25 % and 6.25 %; exclusive, 18.75 %."""

    def draw(mask, number):
        mask[2:14, 2:18] = 1
        mask[4:10, 4:12] = 2

    page = write_preview(site(tmp_path, count=1, classes=("organ", "tumour"), labels=labels, draw=draw))
    (picture,), (caption,) = pictures(page), captions(page)
    assert close(picture, 0).any()
    assert close(picture, 1).any()
    assert caption.endswith(f"organ {'25' if labels == 'nested' else '18.8'} %, tumour 6.25 %")


def test_a_wholly_marked_image_and_a_thin_line_in_a_large_one_are_seen(tmp_path):
    """Every pixel foreground, as of a mask in the alpha channel: an outline around the whole image, and 100 %."""

    def draw(mask, number):
        mask[...] = number == 0
        mask[:, 333] |= number == 1

    page = write_preview(site(tmp_path, count=2, draw=draw, shape=(700, 1000)))
    full, line = pictures(page)
    assert close(full, 0)[[0, -1]].mean() > 0.9
    assert close(line, 0)[:, 79:81].any(axis=1).all()
    assert [caption.rsplit(" ", 2)[1:] for caption in captions(page)] == [["100", "%"], ["0.1", "%"]]


def test_images_with_and_without_a_class_are_chosen_and_the_rarest_class_is(tmp_path):
    """Of 40 images one holds the cyst; 20 hold the lesion."""

    def draw(mask, number):
        mask[2:6, 2:6] = number % 2
        mask[8:10, 8:10] = 2 * (number == 22)

    page = write_preview(site(tmp_path, count=40, classes=("lesion", "cyst"), labels="exclusive", draw=draw))
    found = captions(page)
    assert len(found) == SHOWN < 40 < LOOKED_AT
    assert sum("cyst none" not in caption for caption in found) == 1
    assert sum("lesion none, cyst none" in caption for caption in found) == 1


def test_the_page_is_small_the_same_each_time_and_no_reader_minds_it(tmp_path):
    def draw(mask, number):
        mask[:, :number] = 1

    root = site(site(tmp_path, "south", 12, draw=draw), "north", 60, draw=draw)
    before = check(root)
    first = write_preview(root).read_bytes()
    assert write_preview(root).read_bytes() == first
    assert len(first) < 200_000
    assert check(root) == before
    assert sorted(path.name for path in root.iterdir()) == ["north", "preview.html", "south"]


def test_a_broken_site_beside_the_others_is_named_and_they_are_shown(tmp_path):
    """The sites just prepared are whole; one that was there before ended the command."""
    root = site(site(tmp_path, "south"), "north")
    (root / "south/masks/i1.png").unlink()
    page = write_preview(root)
    assert len(captions(page)) == 3
    assert "<p>Not shown. " in page.read_text(encoding="utf-8")
    assert "south/masks/i1.png: is missing. Add it, or remove its line from split.csv." in page.read_text(encoding="utf-8")


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.text = set(), ""

    def handle_starttag(self, tag, attributes):
        self.found.add(tag)
        assert not [name for name, value in attributes if name.startswith("on") or (name == "src" and value[:5] != "data:")]

    def handle_data(self, data):
        self.text += data


def test_names_are_text_and_the_page_loads_nothing(tmp_path):
    page = write_preview(site(tmp_path)).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert ODD.replace("/", "|") in tags.text
    known = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "div", "figure", "img", "figcaption"}
    assert tags.found == known
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")
