"""`feddp calibrate-threshold`: conformal risk control, by hand and by simulation, and what the command refuses."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from feddp.data.folder import write_site
from feddp.data.preparation import KEY, Preparation
from feddp.errors import InputError
from feddp.networks import build
from feddp.networks.weights import save_network
from feddp.run import threshold, uncertainty
from feddp.run.conformal import largest_threshold, risk
from support.docs_pages import commands_for

ALIKE = {str(k): [np.array([0.2, 0.4, 0.6, 0.8])] for k in range(4)}


def test_a_threshold_by_hand():
    """Four patients, each with foreground at 0.2, 0.4, 0.6 and 0.8: R̂(t) is 0, 1/4, 1/2, 3/4 at these t, the share below t.
    The bound 4/5 R̂ + 1/5 ≤ α is R̂ ≤ (5α − 1)/4: 0 for α = 0.2, 1/4 for 0.4, 0.9875 for 0.99."""
    assert [risk(list(ALIKE.values()), t) for t in (0.2, 0.4, 0.6, 0.8, 0.9)] == [0, 0.25, 0.5, 0.75, 1]
    assert [largest_threshold(ALIKE, alpha) for alpha in (0.2, 0.39, 0.4, 0.59, 0.99)] == [0.2, 0.2, 0.4, 0.4, 0.8]


def test_a_patient_counts_once_however_many_images_there_are():
    """Patient a has two images, of which t = 0.5 misses 1/2 and 0, so 1/4; b one, of which it misses all: (1/4 + 1)/2 = 5/8."""
    assert risk([[np.array([0.1, 0.9]), np.array([0.5])], [np.array([0.3])]], 0.5) == 0.625


def test_too_few_patients_have_no_threshold():
    """With n = 4, 1/(n+1) = 0.2 is the least alpha. A patient without a mask is none."""
    for found in (ALIKE, ALIKE | {"empty": []}):
        with pytest.raises(InputError, match="4 validation patients with a mask allow alpha=0.2 at least, not 0.19"):
            largest_threshold(found, 0.19)
    for alpha in (0, 1, float("nan")):
        with pytest.raises(InputError, match="between 0 and 1"):
            largest_threshold(ALIKE, alpha)


def test_a_new_patient_is_missed_as_rarely_as_promised():
    """Patients of very different difficulty. Over 500 calibrations with 15 patients each, the mean false-negative rate of a new
    patient is at most α (Theorem 1) and, for continuous losses, at least α − 2/(n+1) (Theorem 2); 0.5 would break the bound."""
    rng, n, alpha, trials = np.random.default_rng(0), 15, 0.2, 500
    missed, plain = [], []
    for _ in range(trials):
        patients = [[np.sort(rng.beta(a, 2, 40))] for a in rng.uniform(0.5, 6, n + 1)]
        threshold = largest_threshold({str(k): each for k, each in enumerate(patients[:-1])}, alpha)
        missed.append(risk(patients[-1:], threshold))
        plain.append(risk(patients[-1:], 0.5))
    error = 3 * np.std(missed) / np.sqrt(trials)
    assert alpha - 2 / (n + 1) - error <= np.mean(missed) <= alpha + error
    assert np.mean(plain) > alpha + error


# --- the commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def brightness(toy, tmp_path):
    """Makes a toy network whose logit is `slope` times the red channel's value of 0 to 1, minus `shift`; of further classes the
    logit is the same everywhere."""

    def make(name="network", slope=4.0, shift=2.0, prepared=None, selection=None, more=()):
        network = build(toy, 3, 1 + len(more), seed=0)
        with torch.no_grad():
            for value in network.state_dict().values():
                value.zero_()
            network.q.weight[0, 0], network.norm.weight[0], network.head.weight[0, 0] = 1, 1, slope
            network.norm.running_var.fill_(1 - network.norm.eps)
            network.head.bias.copy_(torch.tensor([-shift, *more.values()] if more else [-shift]))
        classes = json.dumps(["lesion", *more])
        texts = {"network": toy, "channels": "3", "classes": classes, "labels": "nested", "size": "32"}
        texts |= {"normalise": "scale"} | ({KEY: prepared.text} if prepared else {})
        texts |= {"selection": selection} if selection else {}
        save_network(tmp_path / f"{name}.safetensors", network.state_dict(), texts)
        return tmp_path / f"{name}.safetensors"

    return make


@pytest.fixture
def site(tmp_path):
    """Nine validation patients, each with a lesion of eight pixels: six of red 100, two of red 50; the rest is black."""
    image, mask = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32), np.uint8)
    image[0, :6, 0], image[0, 6:8, 0], mask[0, :8] = 100, 50, 1
    rows = [(f"v{k}", f"p{k}", "val", image, mask) for k in range(9)] + [("t", "pt", "test", image, mask)]
    described = {"name": "hand", "channels": 3, "classes": ["lesion"], "labels": "nested"}
    write_site(tmp_path / "site", described, [("x", "px", "train", image, mask), *rows])
    return tmp_path / "site"


def test_the_command_by_hand(brightness, site, feddp, tmp_path):
    """p(100) = σ(4 · 100/255 − 2) = 0.39385 and p(50) = σ(4 · 50/255 − 2) = 0.22869. At t = p(100), each patient misses 2 of 8
    pixels: R̂ = 1/4, and 9/10 · 1/4 + 1/10 = 0.325. So alpha = 0.33 gives p(100), and 0.32 p(50)."""
    file, images = brightness(), site / "images"
    for alpha, expected, found in ((0.33, 0.39385, 6), (0.32, 0.22869, 8)):
        out = tmp_path / f"{alpha}.json"
        code, said, _ = feddp("calibrate-threshold", "--network", file, "--data", site, "--alpha", alpha, "--out", out)
        content = json.loads(out.read_text())
        assert (code, content["patients"]) == (0, 9)
        assert content["threshold"] == pytest.approx(expected, abs=1e-4)
        assert content["false_negative_rate"] == pytest.approx(1 - found / 8)
        masks = tmp_path / f"masks-{alpha}"
        arguments = ("predict", "--network", file, "--images", images, "--out", masks, "--threshold", out)
        assert feddp(*arguments)[0] == 0
        assert (np.asarray(Image.open(masks / "t.png")) > 0).sum() == found, "the same pixels as in the calibration"
    assert feddp("predict", "--network", file, "--images", images, "--out", tmp_path / "plain")[0] == 0
    assert not np.asarray(Image.open(tmp_path / "plain/t.png")).any(), "0.5 finds nothing"


def test_where_the_threshold_goes_is_looked_at_before_any_prediction(brightness, site, feddp, tmp_path, monkeypatch):
    """A folder is made for it; a folder, or a place in a file, is refused in one line while no image was read."""
    file = brightness()
    calibrate = ("calibrate-threshold", "--network", file, "--data", site, "--alpha", 0.33, "--out")
    assert feddp(*calibrate, tmp_path / "new/deep/t.json")[0] == 0
    assert json.loads((tmp_path / "new/deep/t.json").read_text())["patients"] == 9

    def read(*_):
        raise RuntimeError("an image was read")

    monkeypatch.setattr(threshold, "read_image", read)
    for out, said in (
        (tmp_path, f"{tmp_path} is a folder; name a file, such as"),
        (file / "deep/t.json", f"{file} is a file; name a file in a folder with --out"),
    ):
        code, _, error = feddp(*calibrate, out)
        assert (code, error.count("\n"), said in error) == (2, 1, True), error
    with pytest.raises(RuntimeError):  # the control
        feddp(*calibrate, tmp_path / "t.json")


def test_the_commands_of_take_home(brightness, site, feddp, tmp_path, monkeypatch):
    """take-home.md's, as printed: nine patients are just enough for 0.1, which then allows no miss."""
    monkeypatch.chdir(tmp_path)
    for made, at in ((brightness(), "runs/feddp/sites/CS/network.safetensors"), (site, "data/lgg/CS")):
        (tmp_path / at).parent.mkdir(parents=True)
        made.rename(tmp_path / at)
    for command in commands_for("test_conformal", "docs/how-to/take-home.md"):
        assert feddp(*command.split()[1:])[0] == 0
    assert (np.asarray(Image.open("runs/masks-0.1/t.png")) > 0).sum() == 8


@pytest.mark.parametrize(("selection", "warned"), [("test", True), ("val", False), (None, False)])
def test_it_warns_where_the_run_trained_on_validation_images(brightness, site, feddp, tmp_path, selection, warned):
    """With selection=test. A file of an earlier version does not say it."""
    out = tmp_path / "t.json"
    file = brightness(selection=selection)
    code, _, said = feddp("calibrate-threshold", "--network", file, "--data", site, "--alpha", 0.33, "--out", out)
    assert (code, out.exists()) == (0, True)
    assert (f"warning: the run of {file} trained on the split val too (selection=test)" in said) is warned
    assert ("name a folder whose split.csv has such patients as val" in said) is warned


def test_the_threshold_never_takes_what_half_would_find(brightness, site, feddp, tmp_path):
    """A network that is sure of all foreground: the bound would allow more than 0.5."""
    out = tmp_path / "t.json"
    feddp("calibrate-threshold", "--network", brightness(slope=40.0), "--data", site, "--alpha", 0.9, "--out", out)
    assert json.loads(out.read_text())["threshold"] == pytest.approx(0.5, abs=1e-6)


def test_a_threshold_is_of_its_network_and_its_site(brightness, site, feddp, tmp_path):
    file, other, out = brightness(), brightness("other", slope=5.0), tmp_path / "t.json"
    calibrate = ("calibrate-threshold", "--network", file, "--data", site)
    assert feddp(*calibrate, "--alpha", 0.33, "--out", out)[0] == 0
    predict = ("predict", "--images", site / "images", "--out", tmp_path / "x", "--threshold")
    (tmp_path / "damaged.json").write_text('{"format": "feddp-threshold/1", "threshold": "low"}')
    for arguments, said in (
        ((*calibrate, "--out", out), "exists"),
        ((*calibrate, "--alpha", 0.05, "--out", tmp_path / "y"), "allow alpha=0.1 at least"),
        ((*predict, out, "--network", other), "another network"),
        ((*predict, tmp_path / "damaged.json", "--network", file), "holds no threshold"),
        ((*predict, tmp_path / "none.json", "--network", file), "does not exist"),
    ):
        code, _, error = feddp(*arguments)
        assert (code, error.count("\n"), said in error) == (2, 1, True), error
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


def test_an_inner_class_is_no_more_probable_than_those_around_it():
    """0.9, 0.3 and 0.6 from the outermost to the innermost: 0.9, 0.3 and 0.3. 0.2, 0.7 and 0.4: 0.2 thrice."""
    found = threshold.inside(torch.tensor([[[0.9, 0.2]], [[0.3, 0.7]], [[0.6, 0.4]]]))
    assert found[:, 0].T.tolist() == [pytest.approx([0.9, 0.3, 0.3]), pytest.approx([0.2, 0.2, 0.2])]


def test_a_threshold_of_nested_classes_by_hand(brightness, site, feddp, tmp_path):
    """The lesion's core is all of it; the network says σ(1) = 0.73 for the core everywhere, but the mask has none outside the
    lesion: 0.39385 at six pixels and 0.22869 at two, as of the lesion itself. At t = 0.39385 both classes miss 1/4, so 0.325 as
    above, which 0.33 allows and 0.32 does not. (By 0.73 the core would miss nothing at 0.39385, which makes 1/8.)"""
    file = brightness(more={"core": 1.0})
    dataset = json.loads((site / "dataset.json").read_text()) | {"classes": ["lesion", "core"]}
    (site / "dataset.json").write_text(json.dumps(dataset))
    for path in (site / "masks").iterdir():
        Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8) * 2).save(path)
    for alpha, expected, missed in ((0.33, 0.39385, 0.25), (0.32, 0.22869, 0)):
        out = tmp_path / f"{alpha}.json"
        assert feddp("calibrate-threshold", "--network", file, "--data", site, "--alpha", alpha, "--out", out)[0] == 0
        content = json.loads(out.read_text())
        assert content["threshold"] == pytest.approx(expected, abs=1e-4)
        assert content["false_negative_rate"] == pytest.approx(missed)


def test_several_images_of_a_patient_are_one_patient(brightness, site, feddp, tmp_path):
    """The first of the nine has a second image, whose lesion is black, p = σ(−2) = 0.119; a tenth has no lesion, which says
    nothing. At t = p(100) the first misses (1/4 + 1)/2 = 5/8, the others 1/4: R̂ = (5/8 + 8/4)/9 = 0.29167, and 9/10 of it +
    1/10 = 0.3625 is below 0.37. As ten patients it would be 10/11 · (9/4 + 1)/10 + 1/11 = 0.386."""
    black, mask = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32), np.uint8)
    mask[0, :8] = 1
    for name, patient, each in (("second", "p0", mask), ("healthy", "p9", np.zeros_like(mask))):
        Image.fromarray(black).save(site / f"images/{name}.png")
        Image.fromarray(each).save(site / f"masks/{name}.png")
        with open(site / "split.csv", "a", encoding="utf-8") as handle:
            handle.write(f"{name},{patient},val\n")
    out = tmp_path / "t.json"
    code, _, said = feddp("calibrate-threshold", "--network", brightness(), "--data", site, "--alpha", 0.37, "--out", out)
    assert code == 0, said
    content = json.loads(out.read_text())
    assert content["threshold"] == pytest.approx(0.39385, abs=1e-4)
    assert (content["patients"], content["false_negative_rate"]) == (9, pytest.approx(0.29167, abs=1e-4))


def test_a_threshold_below_every_probability_can_be_read_and_none_that_is_no_probability(brightness, site, feddp, tmp_path):
    """400 (r − 1) at r = 50/255 is −321: e⁻³²¹ is 0 in float32, and with nine patients 0.1 allows no miss. So the threshold is
    just below 0, and every pixel is found."""
    file, out = brightness(slope=400.0, shift=400.0), tmp_path / "t.json"
    assert feddp("calibrate-threshold", "--network", file, "--data", site, "--alpha", 0.1, "--out", out)[0] == 0
    content = json.loads(out.read_text())
    assert -1e-6 < content["threshold"] < 0
    predict = ("predict", "--network", file, "--images", site / "images", "--threshold", out, "--out")
    assert feddp(*predict, tmp_path / "masks")[0] == 0
    assert (np.asarray(Image.open(tmp_path / "masks/t.png")) > 0).all()
    for wrong in (1.5, -1.5, float("nan")):
        out.write_text(json.dumps(content | {"threshold": wrong}))
        code, _, said = feddp(*predict, tmp_path / "x")
        assert (code, said.count("\n")) == (2, 1), said
    assert not (tmp_path / "x").exists()


def test_exclusive_classes_have_no_bound(toy, site, feddp, tmp_path):
    texts = {"network": toy, "channels": "3", "classes": '["a", "b"]', "labels": "exclusive", "size": "32"}
    save_network(tmp_path / "two.safetensors", build(toy, 3, 2, seed=0).state_dict(), texts)
    dataset = json.loads((site / "dataset.json").read_text()) | {"classes": ["a", "b"], "labels": "exclusive"}
    (site / "dataset.json").write_text(json.dumps(dataset))
    arguments = ("--network", tmp_path / "two.safetensors", "--data", site, "--out", tmp_path / "t.json")
    code, _, said = feddp("calibrate-threshold", *arguments)
    assert (code, "exclusive classes, which no bound covers" in said) == (2, True)


def test_the_images_to_look_at_first(brightness, feddp, tmp_path):
    """Two networks, on images of one red: 4r − 2 and 8r − 2 with r = red/255. Red 255: σ(2) = 0.88080 and σ(6) = 0.99753, so
    mean 0.93916 and deviation 0.05837; red 64: σ(−0.99608) = 0.26972 and σ(0.00784) = 0.50196: mean 0.38584, deviation
    0.11612, found by one; red 0: both σ(−2), found by none: no doubt."""
    (tmp_path / "images").mkdir()
    for name, red in (("bright", 255), ("dark", 0), ("dim", 64)):
        Image.new("RGB", (40, 33), (red, 0, 0)).save(tmp_path / f"images/{name}.png")
    arguments = ("predict", "--network", brightness(), "--images", tmp_path / "images", "--uncertainty")
    code, said, _ = feddp(*arguments, "--also", brightness("peer", slope=8.0), "--out", tmp_path / "out")
    assert (code, said.splitlines()[-1]) == (0, f"the images to look at first: {tmp_path / 'out/look_first.csv'}")
    with open(tmp_path / "out/look_first.csv", newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert [(row["image"], round(float(row["doubt"]), 4)) for row in rows] == [
        ("dim.png", 0.1161),
        ("bright.png", 0.0584),
        ("dark.png", 0),
    ]
    for folder, name, value in (
        ("mean", "bright", 0.93916 * 255),
        ("mean", "dim", 0.38584 * 255),
        ("disagreement", "bright", 0.05837 * 510),
        ("disagreement", "dark", 0),
    ):
        pixels = np.asarray(Image.open(tmp_path / f"out/{folder}/{name}.png"))
        assert pixels.shape == (33, 40)
        assert (pixels == round(value)).all(), (folder, name)
    assert (np.asarray(Image.open(tmp_path / "out/dim.png")) == 0).all(), "the masks are the network's own"


def test_a_doubt_is_of_the_class_that_is_most_in_doubt():
    """Two members, two pixels. Of the first class both pixels are found by one or both: 0.9 and 0.7, half of whose difference
    is 0.1, and 0.6 and 0.2, 0.2: mean 0.15. Of the second the first pixel, 0.1 and 0.5, is found by none, the other, 0.4 and
    0.8, by one: 0.2. (Over all found pixels together 0.5/3.) The third is found by none."""
    one, other = [[0.9, 0.6], [0.1, 0.4], [0.5, 0.0]], [[0.7, 0.2], [0.5, 0.8], [0.0, 0.5]]
    members = torch.tensor([one, other])[:, :, None]
    assert uncertainty.doubt(members) == pytest.approx(0.2)
    assert uncertainty.doubt(members[:, :1]) == pytest.approx(0.15)
    assert uncertainty.doubt(members[:, 2:]) == 0


def test_several_classes_have_a_picture_each(brightness, feddp, tmp_path):
    """The lesion by 4r − 2 and 8r − 2: of red 255 the mean is 0.93916 and the deviation 0.05837, of black 0.11920 and 0. Of the
    core one says 0, the other ln 3: 1/2 and 3/4, mean 5/8, deviation 1/8 everywhere, the larger doubt. The largest is the
    core's too; without the core it would be the lesion's in the one red pixel."""
    (tmp_path / "images").mkdir()
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[3, 4, 0] = 255
    Image.fromarray(pixels).save(tmp_path / "images/a.png")
    for several in (True, False):
        files = [
            brightness(f"{n}{several}", s, more={"core": c} if several else {})
            for n, s, c in (("a", 4.0, 0.0), ("b", 8.0, np.log(3)))
        ]
        out = tmp_path / f"out-{several}"
        arguments = ("predict", "--network", files[0], "--images", tmp_path / "images", "--uncertainty", "--also", files[1])
        code, _, said = feddp(*arguments, "--out", out)
        assert code == 0, said
        with open(out / "look_first.csv", newline="", encoding="utf-8") as handle:
            (row,) = csv.DictReader(handle)
        largest = 0.125 if several else 0.05837
        assert (row["image"], float(row["doubt"])) == ("a.png", pytest.approx(largest, abs=1e-4))
        assert float(row["largest_disagreement"]) == pytest.approx(largest, abs=1e-4)
        found = {str(path.relative_to(out)): np.asarray(Image.open(path)) for path in out.glob("*/*.png")}
        if several:
            assert found.keys() == {f"{folder}/a-{c}.png" for folder in ("mean", "disagreement") for c in (1, 2)}
            assert (found["mean/a-2.png"] == round(5 / 8 * 255)).all()
            assert (found["disagreement/a-2.png"] == round(510 / 8)).all()
            assert (found["mean/a-1.png"][3, 4], found["mean/a-1.png"][0, 0]) == (round(0.93916 * 255), round(0.1192 * 255))
            assert (found["disagreement/a-1.png"][3, 4], found["disagreement/a-1.png"][0, 0]) == (round(0.05837 * 510), 0)
        else:
            assert found.keys() == {"mean/a.png", "disagreement/a.png"}


def test_flips_and_turns_are_undone(brightness, tmp_path):
    """A network that looks at each pixel alone gives eight equal predictions of any image, if each is turned back rightly; one
    that looks around does not."""
    from feddp.export.graph import Graph
    from feddp.run.uncertainty import _members

    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (45, 38, 3), np.uint8))
    members = torch.stack(list(_members([Graph.of(brightness())[0]], image)))
    assert members.shape == (8, 1, 45, 38)
    assert members.std(dim=0).max() < 1e-5
    assert members[0].std() > 0.01
    texts = {"network": "resnet18-fpn", "channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "32"}
    save_network(tmp_path / "r.safetensors", build("resnet18-fpn", 3, 1, seed=0).state_dict(), texts)
    assert torch.stack(list(_members([Graph.of(tmp_path / "r.safetensors")[0]], image))).std(dim=0).max() > 1e-3


def test_networks_of_other_classes_are_not_mixed(brightness, toy, feddp, tmp_path):
    texts = {"network": toy, "channels": "3", "classes": '["polyp"]', "labels": "nested", "size": "32"}
    save_network(tmp_path / "other.safetensors", build(toy, 3, 1, seed=0).state_dict(), texts)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "images/a.png")
    arguments = ("predict", "--network", brightness(), "--images", tmp_path / "images", "--out", tmp_path / "out")
    for more, said in (
        (("--uncertainty", "--also", tmp_path / "other.safetensors"), "other channels, classes or labels"),
        (("--uncertainty", "--also", brightness("ct", prepared=Preparation("axial", (0, 80), True))), "made in another way"),
        (("--also", tmp_path / "other.safetensors"), "add --uncertainty"),
    ):
        code, _, error = feddp(*arguments, *more)
        assert (code, error.count("\n"), said in error) == (2, 1, True)
        assert not (tmp_path / "out").exists()
