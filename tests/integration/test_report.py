"""`feddp report` after a run in this process: what it writes where; no picture and no value of an image reaches the server."""

import csv
import re
import stat

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.data.synthesize import synthesize
from feddp.errors import InputError
from feddp.files import read_results
from feddp.networks import build
from feddp.networks.attention import SplitAttention, attention_of
from feddp.networks.weights import load_personal
from feddp.pages.pictures import VIEW, contours, picture
from feddp.pages.site_page import chosen, networks_of, site_report
from feddp.training.losses import inconsistency
from feddp.training.metrics import measure
from support.report_runs import save_toy, toy_run

SHORT = ("--rounds", 4, "--size", 32, "--calibration-epochs", 1, "--set", "batch=4", "--set", "lr=0.05", "--env", "local")
PNG = re.compile(rb"data:image/png;base64,|\x89PNG\r\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two sites of 8 test images each: of fewer, a mean or a standard deviation may be equal to an image's value."""
    folder = tmp_path_factory.mktemp("root")
    synthesize(folder, sites=2, images=36, size=32)
    return folder


@pytest.fixture
def finished(feddp, toy, root, tmp_path):
    """A run's folder, and what the command printed."""
    code, said, error = feddp("run", "--data", root, "--out", tmp_path / "run", "--network", toy, *SHORT)
    assert code == 0, error
    return tmp_path / "run", said


def values(path) -> set[bytes]:
    """The names and the numbers of single images in a site's table, as texts; a 0 or a 1 says nothing of where it is from."""
    with open(path, newline="", encoding="utf-8") as handle:
        found = {text for row in csv.DictReader(handle) for name, text in row.items() if name != "network"}
    return {text.encode() for text in found if len(text) > 5}


def test_a_run_leaves_its_page_and_the_command_gives_the_same(finished, feddp, tmp_path):
    folder, said = finished
    assert f"Report: {folder / 'report.html'}" in said
    code, again, _ = feddp("report", folder, "--out", tmp_path / "again.html")
    assert (code, again.strip()) == (0, str(tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_bytes() == (folder / "report.html").read_bytes()
    text = (folder / "report.html").read_text()
    assert "torch" in text
    for site in read_results(folder)["sites"]:
        assert f"sites/{site}/network.safetensors" in text
    code, _, error = feddp("report", folder / "workspace/server", "--out", tmp_path / "server.html")
    assert (code, error) == (0, ""), "what a lead downloads is enough"
    assert "There is no interval, so this may be chance." in (tmp_path / "server.html").read_text()


def test_the_server_holds_no_picture_and_no_value_of_an_image(finished, root, tmp_path):
    """Every byte of the server's files, and of the page of the run, after both pages were made. The controls are the site's own
    table and the site's page, which hold what is searched for."""
    folder, _ = finished
    page = site_report([folder], root / "site-1", tmp_path / "site.html").read_bytes()
    server = [path for path in (folder / "workspace/server").rglob("*") if path.is_file()]
    files = {path: path.read_bytes() for path in (*server, folder / "results.json", folder / "report.html")}
    assert len(server) > 3
    for site in ("site-1", "site-2"):
        table = folder / "sites" / site / "images.csv"
        wanted = values(table)
        assert len(wanted) > 20, "names, and numbers of several images"
        assert all(text in table.read_bytes() for text in wanted)
        assert [(path, text) for path, content in files.items() for text in wanted if text in content] == []
    assert [path for path, content in files.items() if PNG.search(content)] == []
    assert PNG.search(page)
    assert b"This page holds patients" in page


def test_the_sites_page_says_first_that_it_must_stay(toy, tiny_root, tmp_path):
    page = site_report([toy_run(tmp_path / "run", toy)], tiny_root / "site-1", tmp_path / "site.html")
    body = page.read_text().split("<body>", 1)[1]
    assert re.sub(r"<[^>]+>", "", body).strip().startswith("This page holds patients' images. It must not leave site-1.")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert site_report([tmp_path / "run"], tiny_root / "site-1", tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_its_numbers_are_the_networks_own(toy, tiny_root, tmp_path):
    """Dice and ASSD below the worst case, and the highest inconsistency, computed here once more from the networks."""
    run = toy_run(tmp_path / "run", toy)
    html = site_report([run], tiny_root / "site-1", tmp_path / "site.html").read_text()
    samples = load(SiteFolder.open(tiny_root / "site-1"), "test", 32)
    maps = {}
    for site in ("site-1", "site-2"):
        network = load_personal(run / "sites" / site / "network.safetensors")
        with torch.no_grad():
            maps[site] = torch.stack([torch.sigmoid(network(s["image"][None]))[0] for s in samples])
    rows = measure(maps["site-1"], torch.stack([s["mask"] for s in samples]))
    worst = min((i for i, s in enumerate(samples) if s["mask"].any()), key=lambda i: rows[i]["dice"])
    assert f"<h2>Worst case: {samples[worst]['stem']}</h2>" in html
    assert f"FedDP: Dice {100 * rows[worst]['dice']:.1f} %, ASSD {rows[worst]['assd']:.2f} pixels" in html
    delta = inconsistency(maps["site-1"], maps["site-2"][None])
    assert f"brightest colour: {delta.max():.3f}" in html


def test_cases_by_hand():
    """Images 0 and 3 are empty: no case for their 100 %, one for a 0. Of two images the worse is worst and median."""
    dice, filled = [1.0, 0.7, 0.9, 1.0, 0.8], [False, True, True, False, True]
    assert chosen(dice, filled) == {"Worst case": 1, "Median case": 4, "Best case": 2}
    assert chosen([1.0, 0.7, 0.9, 0.0, 0.8], filled)["Worst case without foreground"] == 3
    assert chosen([0.5, 0.6], [True, True]) == {"Worst case": 0, "Best case": 1}
    assert chosen([1.0], [False]) == {"Worst case without foreground": 0}, "there is nothing else to show"


def test_a_sites_own_folder_of_a_job_gives_every_stage(toy, tiny_root, tmp_path):
    """At a real site there is no run's folder: `feddp/<job id>/` has the networks of the stages, the last first; no peers."""
    for slot, seed in (("start", 0), ("calibrated", 1)):
        save_toy(tmp_path / f"job/{slot}.safetensors", toy, seed)
    found = networks_of([tmp_path / "job"], "site-1")
    assert (list(found.own), found.peers) == (["calibrated", "start"], {})
    html = site_report([tmp_path / "job"], tiny_root / "site-1", tmp_path / "site.html").read_text()
    assert "calibrated: Dice" in html
    assert "start: Dice" in html
    assert "Inconsistency" not in html


@pytest.mark.parametrize(
    ("site", "folder", "says"),
    [
        ("site-2", "empty", "neither a finished run nor a site's folder"),
        ("other", "run", "holds no network of other; it has site-1"),
    ],
)
def test_what_has_no_network_of_the_site_is_refused(toy, tmp_path, site, folder, says):
    toy_run(tmp_path / "run", toy)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=says):
        networks_of([tmp_path / folder], site)


def test_a_pixel_outside_the_image_is_refused(toy, tiny_root, tmp_path):
    with pytest.raises(InputError, match="has 32 x 32 pixels"):
        site_report([toy_run(tmp_path / "run", toy)], tiny_root / "site-1", tmp_path / "x.html", pixel=(32, 0))


def test_outlines_by_hand():
    """Of 4 x 4 pixels, each 25 units wide, the one in row 1 and column 2, whose middle is (62.5, 37.5): halfway to the middles
    beside it, 12.5 units away on each side. A full mask's outline is the image's edge; an empty mask has none."""
    mask = np.zeros((4, 4), bool)
    mask[1, 2] = True
    corners = {tuple(map(float, each.split())) for each in re.split("[MLZ]", contours(mask)) if each}
    assert corners == {(50, 37.5), (75, 37.5), (62.5, 25), (62.5, 50)}
    full = {tuple(map(float, each.split())) for each in re.split("[MLZ]", contours(np.ones((2, 2), bool))) if each}
    assert {x for x, _ in full} | {y for _, y in full} >= {0, VIEW}
    assert contours(np.zeros((4, 4), bool)) == ""


def test_a_picture_is_a_png_of_one_size():
    import base64
    import io

    address = picture(np.full((10, 20, 3), 7, np.uint8))
    image = Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/png;base64,"))))
    assert image.size == (256, 256)
    assert image.getcolors() == [(256 * 256, (7, 7, 7))]


def test_attention_is_timms_own_softmax(monkeypatch):
    """timm's attention without its fused kernel gives its weights to `attn_drop`: the mean over the heads of the pixel's row.

    At 64 pixels every stage of PVTv2 has 2 x 2 keys, so the last layer is shown; of its 2 x 2 queries pixel (40, 10) is in
    place (1, 0)."""
    network = build("pvt_v2_b0-fpn", 3, 1, seed=0).eval()
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = attention_of(network, image, (40, 10))
    last = [module for module in network.modules() if isinstance(module, SplitAttention)][-1]
    monkeypatch.setattr(SplitAttention, "fused_attn", False)
    taken = []
    last.attn_drop.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    with torch.no_grad():
        network(image[None])
    assert found.shape == (2, 2)
    torch.testing.assert_close(found, taken[0][0].mean(dim=0)[1].reshape(2, 2))
    assert found.sum() == pytest.approx(1)
    assert attention_of(nn.Conv2d(3, 1, 1), image, (0, 0)) is None
