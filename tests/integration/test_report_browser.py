"""The pages of `feddp report` as a browser shows them, on a telephone and on a desk, in light, in dark and on paper."""

import shlex
import shutil
import subprocess

import pytest
from PIL import Image

from feddp.pages.run_page import report
from feddp.pages.site_page import site_report
from support.browser import Browser
from support.compare_runs import federation, write_run
from support.docs_pages import DOCS, commands_for
from support.report_runs import toy_run

pytestmark = pytest.mark.tools

LONG = "a-hospital-with-a-name-that-is-very-long-and-has-no-blank-" * 3


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three methods at ten sites, one of them with a long name; the reason why one is missing has no blank either."""
    folder = tmp_path_factory.mktemp("page")
    sites = [LONG, *(f"site-{i}" for i in range(1, 10))]
    runs = []
    for k, method in enumerate(("local", "fedavg", "feddp")):
        slots = {"start": {f"{i}": 0.5 + 0.02 * i + 0.03 * k for i in range(5)}}
        slots |= {"calibrated": {f"{i}": 0.8 for i in range(5)}} if method == "feddp" else {}
        dice = dict.fromkeys(sites, slots)
        events = [e | ({"site": LONG} if e.get("site") == "site-1" else {}) for e in federation(3, home=method == "feddp")]
        runs.append(write_run(folder / method, dice, method=method, events=events, missing={"gone": "x" * 300}))
    return report(runs, folder / "report.html")


@pytest.mark.parametrize("width", [380, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_runs_is_silent_and_fits(browser, page, width, dark):
    seen = browser.show(page, width, dark=dark)
    assert seen.messages == []
    assert seen.requests == []
    assert seen.content <= seen.window == width


def test_the_page_of_a_site_is_silent_and_fits(browser, toy, tiny_root, tmp_path):
    page = site_report([toy_run(tmp_path / "run", toy)], tiny_root / "site-1", tmp_path / "site.html")
    for width in (380, 1280):
        seen = browser.show(page, width)
        assert (seen.messages, seen.requests) == ([], [])
        assert seen.content <= seen.window == width


def test_it_fits_on_paper(browser, page):
    """A4 has 210 mm, 794 pixels at 96 dpi, less two margins of 10 mm."""
    seen = browser.show(page, 718, media="print")
    assert seen.content <= seen.window


def test_colours_follow_the_readers_scheme(browser, page):
    assert browser.show(page, 380, dark=True).png != browser.show(page, 380, dark=False).png


def test_the_picture_of_the_documentation(page, tmp_path):
    """The command in report.md, with the page in place of the one that the commands before it make."""
    (command,) = commands_for("test_report_browser", "docs/how-to/report.md")
    (tmp_path / "runs/example").mkdir(parents=True)
    (tmp_path / "docs/assets").mkdir(parents=True)
    shutil.copy(page, tmp_path / "runs/example/report.html")
    subprocess.run(
        [*shlex.split(command), f"--user-data-dir={tmp_path / 'profile'}"], cwd=tmp_path, check=True, capture_output=True
    )
    with Image.open(tmp_path / "docs/assets/report.png") as picture, Image.open(DOCS / "assets/report.png") as shown:
        assert picture.size == shown.size
    assert (DOCS / "assets/report.png").stat().st_size < 150_000


def test_what_a_page_must_not_do_is_noticed(browser, tmp_path):
    """The control: a script that speaks, a picture from elsewhere, a line wider than the window."""
    page = tmp_path / "loud.html"
    script, picture = "<script>console.log('x')</script>", '<img src="http://127.0.0.1:9/x.png">'
    page.write_text(f"<!doctype html>{script}{picture}<div style='width:2000px'>wide</div>")
    seen = browser.show(page, 380)
    assert seen.messages
    assert seen.requests == ["http://127.0.0.1:9/x.png"]
    assert seen.content > seen.window
