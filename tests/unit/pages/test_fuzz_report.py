"""`feddp report` of a folder from somebody else: whatever its files hold, it becomes a page or one line."""

import json
import os

import pytest
from hypothesis import given

from feddp.errors import InputError
from feddp.files import read_events
from feddp.pages.run_page import report
from support.compare_runs import SITES, federation, write_run
from support.fuzz import cases, changed, tried

DICE = {
    site: {"start": {f"{site}-{i}": 0.5 + 0.01 * i for i in range(4)}, "calibrated": {f"{site}-{i}": 0.8 for i in range(4)}}
    for site in SITES
}
MORE = {"missed": {"site-1": 1}, "without": {"calibration": {"site-2": "no"}}, "settings": {"a": 1}, "classes": ["lesion"]}
EVENTS = federation(1, home=True)[:8] + [{"event": "refused", "time": 9, "site": "site-2", "task": "train", "reason": "x"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("fuzz") / "run", DICE, events=EVENTS, **MORE)
    (folder / "run.json").write_text(json.dumps({"plan": {"a": 1}, "env": "sim", "versions": {"torch": "2"}}))
    return folder


@pytest.mark.parametrize("name", ["results.json", "run.json", "progress.jsonl"])
def test_any_content_of_a_file_is_a_page_or_one_line(folder, name):
    """Any other exception than InputError fails the test."""
    file, told = folder / name, {"pages": 0, "lines": 0}
    whole = file.read_text(encoding="utf-8")
    content = read_events(file) if name == "progress.jsonl" else json.loads(whole)

    @cases(12)
    @given(changed(content))
    def written(value):
        lines = value if name == "progress.jsonl" and isinstance(value, list) else [value]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        page, line = tried(InputError, report, [folder], folder / "page.html")
        told["lines" if line else "pages"] += 1
        assert "\n" not in line
        assert page is None or "<script" not in page.read_text(encoding="utf-8")

    try:
        written()
    finally:
        file.write_text(whole, encoding="utf-8")
    assert min(told.values()) > 0, told


@pytest.mark.parametrize("name", ["progress.jsonl", "sites/site-1/images.csv"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_named(tmp_path, name, kind):
    """Reading a pipe waits for whoever writes it; reading /dev/zero never ends."""
    file = write_run(tmp_path / "run", DICE, events=EVENTS) / name
    file.unlink()
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises(InputError, match=f"{file.name}.* is (not a regular file|a link that leads out of)"):
        report([tmp_path / "run"], tmp_path / "page.html")
