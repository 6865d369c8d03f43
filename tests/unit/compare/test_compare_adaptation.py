"""Every site in turn outside the federation: which runs and adaptations are made, once, and the numbers of their tables."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from feddp.adaptation import unseen_site
from feddp.adaptation.choices import Settings
from feddp.compare import adaptations
from feddp.compare.leave_one_out import LeaveOneOut
from feddp.compare.studies import OUTSIDE, TABLE_II, AdaptedModels
from feddp.compare.tables import OPTIMISTIC
from feddp.compare.variants import Common, Variant
from feddp.data.folder import SiteFolder
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.jobs.folder import federation_of
from feddp.networks import NETWORKS
from feddp.networks.weights import save_network
from feddp.partition import ENCODER, HEAD
from feddp.run import join as joining
from feddp.run import options as run_options
from feddp.stages.train import START
from feddp.training.metrics import summarize
from support.compare_runs import FakeRuns, break_off, compare_in, read, row, write_run
from support.docs_pages import commands_for
from support.driven import drive
from support.small import Small

SITES = ("site-1", "site-2", "site-3")
DICE = {"global": 0.5, "average": 0.4, "ensemble": 0.45, "tent": 0.55, "ttt": 0.35, "routing": 0.6}
# Table II's rows: the run each takes its models from, and the way
DONE = {"start": 0.1, "tuned": 0.5}  # Dice before and after a tuning at site-1
ROWS = {
    "FedAvg": ("fedavg", "global"),
    "Average of the models": ("iop_fl", "average"),
    "Ensemble of the models": ("iop_fl", "ensemble"),
    "Tent": ("fedavg", "tent"),
    "TTT": ("ttt", "ttt"),
    "FedDG interpolation": ("feddg", "global"),
    "IOP-FL, routing": ("iop_fl", "routing"),
}
RUNS = len({run for run, _ in ROWS.values()})  # at each site outside


def by_class(mean, classes):
    """The columns of classes whose Dice lie above `mean` by `classes`."""
    return {f"{metric}_{name}": value for name, above in classes.items() for metric, value in row(mean + above).items()}


class FakeAdaptations:
    """In the place of `unseen_site.adapt`. Dice: DICE of the way, 0.1 less at each later site, 0.02 more a seed; an image 0.05
    above and one below. Seconds an image: the number of epochs.

    Attributes:
        calls: (run's path below OUT, site outside, way) of each.
        broken: ways that fail with `error` at site-2, leaving half a folder.
        classes: {class: its Dice above the mean over the classes}; empty if there is one class.
    """

    def __init__(self):
        self.calls: list = []
        self.settings: list[Settings] = []
        self.broken: set[str] = set()
        self.error: type[Exception] = FedDPError
        self.classes: dict[str, float] = {}

    def __call__(self, models, run, folder, out, request, device):
        how, settings = request.how, request.settings
        assert models == f"models of {run}"
        assert request.score, "scores are what it is for"
        assert not out.exists(), "feddp adapt refuses a folder that holds anything"
        self.calls.append(("/".join(Path(run).parts[-4:]), folder.name, how))
        self.settings.append(settings)
        out.mkdir(parents=True)
        done = {"how": how, "settings": vars(settings), "seconds_per_image": settings.epochs}
        (out / "adapt.json").write_text(json.dumps(done))
        if how in self.broken and folder.name == "site-2":
            raise self.error("it diverged")
        dice = DICE[how] - 0.1 * SITES.index(folder.name) + 0.02 * settings.seed
        stems = [r.image for r in SiteFolder.open(folder).rows_of("test")]
        means = {stem: dice + 0.05 * (-1) ** i for i, stem in enumerate(stems)}
        images = {stem: row(mean) | by_class(mean, self.classes) for stem, mean in means.items()}
        (out / "scores.json").write_text(json.dumps({"summary": summarize(list(images.values())), "images": images}))


class Encoder(nn.Module):
    """x (B, C, H, W) -> [x, features (B, 4, H, W)]."""

    def __init__(self, channels: int):
        super().__init__()
        self.out_channels = (channels, 4)
        self.layers = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        return [x, self.layers(x)]


class Toy(nn.Module):
    """Per pixel, with an encoder, as TTT's rotation head needs one."""

    roles = {ENCODER: ("encoder",), HEAD: ("head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.encoder, self.head = Encoder(channels), nn.Conv2d(4, classes, 1)

    def forward(self, x):
        return self.head(self.encoder(x)[-1])


@pytest.fixture
def toy(monkeypatch) -> str:
    """The name of a toy network, known to plans while the test runs."""
    monkeypatch.setitem(NETWORKS, "toy", Toy)
    return "toy"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Three sites, two test images each."""
    root = tmp_path_factory.mktemp("three")
    synthesize(root, sites=3, images=12, size=32)
    return root


@pytest.fixture
def runs(monkeypatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(run_options, "run_here", fake)
    return fake


@pytest.fixture
def adapted(monkeypatch) -> FakeAdaptations:
    fake = FakeAdaptations()
    monkeypatch.setattr(unseen_site, "adapt", fake)
    monkeypatch.setattr(adaptations, "read_models", lambda run: f"models of {run}")
    return fake


@pytest.fixture
def drawing(root, tmp_path, toy):
    return compare_in(tmp_path / "out", toy, root)


@pytest.fixture
def compare(drawing, monkeypatch):
    """Without its drawings, which one test looks at, that of the studies."""

    def savefig(figure, target, **options):
        blank = '<svg viewBox="0 0 1 1">\n</svg>'
        target.write(blank) if hasattr(target, "write") else Path(target).write_text(blank)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return drawing


def test_each_site_is_outside_once_and_the_others_train(compare, runs, adapted, tmp_path):
    """3 sites × {FedAvg, IOP-FL, TTT, FedDG} runs, of the 2 others each; 3 × 7 adaptations. FedAvg, over two seeds: 0.51,
    0.41 and 0.31 outside: 41 ± √(2/3) · 10, ± 1 over the seeds; at one site ± 5 over its two images. ASSD is 10 (1 − Dice)."""
    done = compare("--leave-one-out", "--seeds", "0,1")
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    inside = {
        path.parents[2].name: sorted(json.loads(path.read_text())["plan"]["sites"]) for path in out.glob("*/runs/*/*.json")
    }
    assert inside == {f"without-{site}": [s for s in SITES if s != site] for site in SITES}
    assert sorted(folder for folder, _ in runs.calls) == sorted(
        [f"{method}/seed-{seed}" for method in ("fedavg", "iop_fl", "ttt", "feddg") for seed in (0, 1)] * 3
    )
    assert len(adapted.calls) == len(set(adapted.calls)) == 2 * 3 * len(ROWS)
    assert all(run.startswith(f"without-{site}/") for run, site, _ in adapted.calls), "no site adapts what it trained"
    assert {(run.split("/")[2], how) for run, _, how in adapted.calls} == set(ROWS.values())
    assert {s.seed for s in adapted.settings} == {0, 1}

    rows = read(out / "table_leave_one_out.csv")
    assert [r["Method"] for r in rows] == list(ROWS)
    expected = {"site-1": 51, "site-1 ±": 5, "site-2": 41, "site-3": 31, "Average": 41, "Average ±": 10 * (2 / 3) ** 0.5}
    expected |= {"± seeds": 1}
    assert {key: float(rows[0][f"Dice (%) {key}"]) for key in expected} == pytest.approx(expected)
    over_seeds = read(out / "table_leave_one_out_seeds.csv")[0]
    expected = {"site-1": 51, "site-1 ±": 1, "site-2": 41, "site-2 ±": 1, "Average": 41, "Average ±": 1}
    assert {key: float(over_seeds[f"Dice (%) {key}"]) for key in expected} == pytest.approx(expected)
    distances = read(out / "table_leave_one_out_assd.csv")
    assert float(distances[0]["ASSD (pix.) Average"]) == pytest.approx(5.9)
    text = (out / "tables.md").read_text()
    assert "**51.00 ± 8.16**" in text, "routing's 60, 50, 40 and 1 more of the seeds is best"
    assert "IOP-FL's Table II" in text
    assert "adaptation 42 of 42: without-site-3: iop_fl, seed 1, routing to site-3" in " ".join(done.stderr.split())


def test_each_of_several_classes_has_a_table_outside(compare, runs, adapted, tmp_path):
    """FedAvg's 50, 40 and 30 outside are means of the disc, 10 more, and the cup, 10 less; ASSD is 10 (1 − Dice). What was
    adapted before classes were kept apart, here routing at site-3, has none of their own."""
    adapted.classes = {"disc": 0.1, "cup": -0.1}
    assert compare("--leave-one-out").exit_code == 0
    old = tmp_path / "out/without-site-3/runs/iop_fl/seed-0/outside/site-3/routing/scores.json"
    scores = json.loads(old.read_text())
    images = {stem: {name: v for name, v in found.items() if "_" not in name} for stem, found in scores["images"].items()}
    old.write_text(json.dumps(scores | {"images": images}))
    assert compare("--leave-one-out").exit_code == 0
    for number, above in ((1, 10), (2, -10)):
        rows = {found["Method"]: found for found in read(tmp_path / f"out/table_leave_one_out_class_{number}.csv")}
        assert list(rows) == list(ROWS)
        columns = [f"Dice (%) {column}" for column in (*SITES, "Average")]
        assert [float(rows["FedAvg"][c]) for c in columns] == pytest.approx([50 + above, 40 + above, 30 + above, 40 + above])
        assert float(rows["FedAvg"]["ASSD (pix.) Average"]) == pytest.approx(6 - above / 10)
        routing = rows["IOP-FL, routing"]
        assert (float(routing["Dice (%) site-1"]), routing["Dice (%) site-3"]) == (pytest.approx(60 + above), "—")
    means = read(tmp_path / "out/table_leave_one_out.csv")[0]
    assert float(means["Dice (%) Average"]) == pytest.approx(40)
    assert "each site in turn outside the federation: cup alone" in (tmp_path / "out/tables.md").read_text()


def test_the_command_that_the_docs_show(compare, runs, adapted):
    (line,) = commands_for("test_compare_adaptation", "docs/how-to/compare.md")
    words = line.split()
    assert words[:2] == ["feddp", "compare"]
    own = {words.index(option) + more for option in ("--data", "--out") for more in (0, 1)}  # the test's
    assert compare(*(word for place, word in enumerate(words) if place > 1 and place not in own)).exit_code == 0


def test_what_is_finished_is_not_made_again(compare, runs, adapted, tmp_path):
    assert compare("--leave-one-out").exit_code == 0
    before = len(runs.calls), len(adapted.calls)
    done = compare("--leave-one-out")
    assert (len(runs.calls), len(adapted.calls)) == before
    assert " ".join(done.stderr.split()).count("(finished before)") == 3 * RUNS + 3 * len(ROWS)
    kept = tmp_path / "out/without-site-2/runs/iop_fl/seed-0/outside/site-2/routing"
    for spoil in (
        lambda: (kept / "scores.json").unlink(),
        lambda: (kept / "scores.json").write_text('{"ima'),
        lambda: (kept / "adapt.json").write_text((kept / "adapt.json").read_text().replace('"epochs": 10', '"epochs": 9')),
        lambda: (kept / "adapt.json").write_text("{}"),
    ):
        spoil()
        calls = len(adapted.calls)
        assert compare("--leave-one-out").exit_code == 0
        assert adapted.calls[calls:] == [("without-site-2/runs/iop_fl/seed-0", "site-2", "routing")]


def test_other_test_images_outside_are_adapted_to_anew(compare, runs, adapted, tmp_path):
    """site-2's validation images become test images. The run without site-1 has site-2 inside and was made on other data,
    which is refused, until its folder is taken away; the run without site-2 stands, and is adapted anew."""
    data = tmp_path / "data"
    synthesize(data, sites=2, images=12, size=32)
    assert compare("--leave-one-out", data=data).exit_code == 0
    path = data / "site-2/split.csv"
    path.write_text(path.read_text().replace(",val", ",test"))
    assert "finished with another plan or other data" in str(compare("--leave-one-out", data=data).exception)
    (tmp_path / "out/without-site-1").rename(tmp_path / "gone")
    calls = len(adapted.calls)
    assert compare("--leave-one-out", data=data).exit_code == 0
    made = adapted.calls[calls:]
    assert [how for run, _, how in made if run.startswith("without-site-2/")] == [how for _, how in ROWS.values()]
    assert len(made) == 2 * len(ROWS)


def test_an_unfinished_run_is_no_place_for_another_plan(compare, runs, adapted, tmp_path):
    """Of the campaign that is planned last: nothing of the others has run before."""
    assert compare("--leave-one-out").exit_code == 0
    run = tmp_path / "out/without-site-3/runs/iop_fl/seed-0"
    break_off(run)
    for name in ("site-1", "site-2"):
        shutil.rmtree(tmp_path / f"out/without-{name}")
    for path in [path for path in run.parent.parent.iterdir() if path != run.parent]:
        shutil.rmtree(path)
    calls = len(runs.calls)
    done = compare("--leave-one-out", "--rounds", 3)
    assert str(done.exception).startswith(f"{run} holds an unfinished run of another plan or other data; ")
    assert len(runs.calls) == calls
    assert (run / "progress.jsonl").exists()


def test_a_run_made_anew_takes_its_adaptations_with_it(compare, runs, adapted, tmp_path):
    assert compare("--leave-one-out").exit_code == 0
    (tmp_path / "out/without-site-1/runs/iop_fl/seed-0/results.json").unlink()
    calls = len(adapted.calls)
    assert compare("--leave-one-out").exit_code == 0
    assert sorted(how for _, _, how in adapted.calls[calls:]) == ["average", "ensemble", "routing"]


@pytest.mark.parametrize("error", [FedDPError, RuntimeError])
def test_an_adaptation_that_fails_is_told_and_stops_nothing(compare, runs, adapted, tmp_path, error):
    adapted.broken, adapted.error = {"tent"}, error
    done = compare("--leave-one-out")
    assert "1 runs failed, the same command tries them again: without-site-2: fedavg, seed 0, tent to site-2" in str(
        done.exception
    )
    assert len(adapted.calls) == 3 * len(ROWS)
    tent = next(r for r in read(tmp_path / "out/table_leave_one_out.csv") if r["Method"].startswith("Tent"))
    assert tent["Method"] == "Tent (0 of 1 seeds)"
    assert float(tent["Dice (%) site-1"]) == pytest.approx(55)
    assert tent["Dice (%) site-2"] == tent["Dice (%) Average"] == "—"
    text = (tmp_path / "out/tables.md").read_text()
    assert "- without-site-2: fedavg, seed 0, tent to site-2: " in text
    adapted.broken, calls = set(), len(adapted.calls)
    assert compare("--leave-one-out").exit_code == 0
    assert len(adapted.calls) == calls + 1


def test_a_run_that_fails_is_told_and_its_rows_too(compare, runs, adapted, tmp_path):
    runs.broken = {"iop_fl"}
    done = compare("--leave-one-out")
    assert "3 runs failed" in str(done.exception)
    rows = {r["Method"]: r for r in read(tmp_path / "out/table_leave_one_out.csv")}
    assert rows["IOP-FL, routing"]["Dice (%) site-1"].startswith("failed: ")
    assert float(rows["FedAvg"]["Dice (%) Average"]) == pytest.approx(40)


def test_the_studies_of_the_outside_share_runs_and_adaptations(drawing, runs, adapted, tmp_path):
    """Runs, of K = 3 sites: Table II's 12; of one site inside: {site-2} without site-1, {site-1} without the others, so 2 × 2
    methods; τ: 5 more of IOP-FL for each site outside (0.9 is the default). Adaptations at each site outside: Table II's 7;
    inside: 2 more; losses: 3 more; τ: 5 more; time: epochs 1, 2, 5 more (0 is the losses' last): 20."""
    done = drawing("--leave-one-out", "--outside-studies", "inside_sites,losses,tau,time")
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    assert len(runs.calls) == 12 + 4 + 15
    assert len(adapted.calls) == len(
        {(c, s.epochs, s.noise, s.beta) for c, s in zip(adapted.calls, adapted.settings, strict=True)}
    )
    assert len(adapted.calls) == 3 * (7 + 2 + 3 + 5 + 3)
    assert {path.name for path in out.iterdir() if path.is_dir()} == {
        *(f"without-{site}" for site in SITES),
        *("only-site-1", "only-site-2"),
    }
    assert [(r["Method"], r["Inside"]) for r in read(out / "table_outside_inside_sites.csv")] == [
        *(("FedAvg", "1"), ("FedAvg", "2")),
        *(("IOP-FL", "1"), ("IOP-FL", "2")),
    ]
    losses = {r["Losses"] for r in read(out / "table_outside_losses.csv")}
    assert losses == {"both", "shape alone", "consistency alone", "none"}
    assert [r["τ"] for r in read(out / "table_outside_tau.csv")] == ["0.1", "0.3", "0.5", "0.7", "0.9", "1"]
    seconds = {r["Method"]: float(r["Seconds a sample"]) for r in read(out / "table_outside_time.csv")}
    assert seconds["routing, 2 epochs"] == 2
    assert len(seconds) == 6 + 5  # Table II without routing, and routing at five numbers of epochs
    for name in ("inside_sites", "losses", "tau", "time"):
        with Image.open(out / f"outside_{name}.png") as picture:
            assert len(picture.convert("L").getcolors()) > 10, "an empty canvas"
    before = len(runs.calls), len(adapted.calls)
    assert drawing("--outside-studies", "tau,time").exit_code == 0
    assert (len(runs.calls), len(adapted.calls)) == before


def test_table_7_tunes_at_each_site_outside_with_its_labels(runs, root, tmp_path, monkeypatch):
    """Six methods, 3 sites: 18 runs of the two others, 18 tunings. Dice before 0.1, after 0.5, 0.4 and 0.3: 40 on average. The
    epochs are those of every stage after training; the site's test images chose nothing. The cup is 10 below the mean."""
    calls = []
    monkeypatch.setitem(NETWORKS, "small", Small)
    compare = compare_in(tmp_path / "out", "small", root)

    def join(run, folder, out, epochs, seed, device):
        assert not out.exists(), "feddp join refuses a folder that holds anything"
        calls.append(("/".join(run.parts[-4:]), folder.name, epochs, seed))
        stems = [r.image for r in SiteFolder.open(folder).rows_of("test")]
        made = {folder.name: {slot: dict.fromkeys(stems, v - 0.1 * SITES.index(folder.name)) for slot, v in DONE.items()}}
        write_run(out, made)
        found = read(out / "sites" / folder.name / "images.csv")
        found = [line | by_class(float(line["dice"]), {"disc": 0.1, "cup": -0.1}) for line in found]
        with (out / "images.csv").open("w", newline="") as handle:
            writer = csv.DictWriter(handle, found[0])
            writer.writeheader()
            writer.writerows(found)
        said = json.loads((out / "results.json").read_text())
        (out / "results.json").write_text(json.dumps(said | {"joined": {}}))

    monkeypatch.setattr(joining, "join", join)
    methods = ["fedavg", "fedper", "fedrep", "fedbn", "pflfe", "fc_pflfe"]
    done = compare("--outside-studies", "joined", "--calibration-epochs", "3")
    assert done.exit_code == 0, done.output
    assert sorted(calls) == sorted((f"without-{s}/runs/{m}/seed-0", s, 3, 0) for s in SITES for m in methods)
    rows = read(tmp_path / "out/table_outside_joined.csv")
    assert [r["Method"] for r in rows] == methods
    expected = {"site-1": 50, "site-2": 40, "site-3": 30, "Average": 40}
    assert {site: float(rows[0][f"Dice (%) {site}"]) for site in expected} == pytest.approx(expected)
    cup = read(tmp_path / "out/table_outside_joined_class_2.csv")[0]
    assert {site: float(cup[f"Dice (%) {site}"]) for site in expected} == pytest.approx(
        {s: v - 10 for s, v in expected.items()}
    )
    assert OPTIMISTIC not in (tmp_path / "out/tables.md").read_text()
    (tmp_path / "out/without-site-2/runs/pflfe/seed-0/outside/site-2/join@epochs=3/images.csv").unlink()
    assert compare("--outside-studies", "joined", "--calibration-epochs", "3").exit_code == 0
    assert calls[18:] == [("without-site-2/runs/pflfe/seed-0", "site-2", 3, 0)]


def test_the_losses_are_removed_one_at_a_time():
    """(Jiang et al., TMI 2023, Fig. 8): without the consistency its noise is 0, without the shape constraint β is 0."""
    found = {e.labels[0]: e.source.settings for e in OUTSIDE["losses"](4).entries}
    assert found["both"] == Settings()
    assert (found["shape alone"].noise, found["shape alone"].beta) == (0, 0.01)
    assert (found["consistency alone"].noise, found["consistency alone"].beta) == (0.5, 0)
    assert found["none"].epochs == 0


def test_the_sites_inside_are_the_first_others():
    """Fig. 7a: 1 to K − 1 inside."""
    entries = [e for e in OUTSIDE["inside_sites"](4).entries if e.labels[0] == "FedAvg"]
    found = [entry.source.sites("b", ["d", "b", "a", "c"]) for entry in entries]
    assert found == [("a",), ("a", "c"), ("a", "c", "d")]
    assert AdaptedModels(Variant.parse("fedavg"), "global").sites("a", ["a", "b", "c"]) == ("b", "c")


def test_it_needs_no_methods(compare, runs, adapted, tmp_path, monkeypatch):
    monkeypatch.setattr("feddp.compare.comparison.efficiency_table", lambda *_: pytest.fail("no method, no Table V"))
    assert compare("--leave-one-out").exit_code == 0
    text = (tmp_path / "out/tables.md").read_text()
    assert "Table I / II" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--outside-studies", "pony"], "--outside-studies pony: unknown; there are leave_one_out, inside_sites"),
        (["--leave-one-out", "--set", "pony=1"], "unknown setting 'pony'"),
        (["--leave-one-out", "--methods", "fedpony"], "unknown method 'fedpony'"),
        (["--leave-one-out", "--device", "cuda:99"], "--device cuda:99 cannot be used"),
        (["--leave-one-out", "--device", "cpu,cuda:99"], "--device cuda:99 cannot be used"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(compare, runs, tmp_path, arguments, message):
    assert message in str(compare(*arguments).exception)
    assert not runs.calls
    assert not (tmp_path / "out").exists()


def test_one_site_or_a_site_without_test_images_is_refused(compare, runs, tmp_path):
    synthesize(tmp_path / "one", sites=1, images=12, size=32)
    assert "has one site; one outside and one inside are needed" in str(
        compare("--leave-one-out", data=tmp_path / "one").exception
    )
    synthesize(tmp_path / "two", sites=2, images=12, size=32)
    path = tmp_path / "two/site-2/split.csv"
    path.write_text(path.read_text().replace(",test", ",val"))
    done = compare("--leave-one-out", data=tmp_path / "two")
    assert f"{tmp_path / 'two/site-2'} has no image in split test" in str(done.exception)
    assert not runs.calls


def test_some_of_the_sites_are_named_and_found(root):
    assert federation_of(root, ["site-3", "site-1"])[0] == ["site-1", "site-3"]
    with pytest.raises(FedDPError, match="site-9: not a site below .*; the sites are site-1, site-2, site-3"):
        federation_of(root, ["site-1", "site-9"])


def test_a_run_of_some_sites_asks_no_other(root, tmp_path, toy, monkeypatch):
    """`run_here` hands the chosen sites to the session, their folders and the plan's names."""
    asked = []
    monkeypatch.setattr(run_options.session, "run", lambda request, *_, **__: asked.append(request) or {})
    options = run_options.Options("fedavg", 1, network=toy, size=32)
    run_options.run_here(root, tmp_path / "out", options, sites=("site-1", "site-3"))
    assert asked[0].plan.sites == ("site-1", "site-3")
    assert list(asked[0].policies) == ["site-1", "site-3"]


class Driven:
    """In the place of `run_here`: the plain loop, and what a run of it leaves for a hospital outside."""

    def __call__(self, data, out, options, env="sim", device="cpu", threads=None, without_consent=(), sites=None, rounds=None):
        names, metadata = federation_of(data, sites)
        plan = options.plan(metadata, names)
        done = drive(plan, data, out / "workspace", tuple(names))
        write_run(out, {site: {"start": {"a": 0.5}} for site in names})
        for name, site in done.items():
            network, said = site.store.read(START)
            save_network(out / "sites" / name / "network.safetensors", network, said)
        shared = done[names[0]].partition.split(network)[0]
        save_network(out / "shared.safetensors", shared, {"round": str(options.rounds)})


def test_leave_one_out_without_a_stand_in_for_the_models(root, tmp_path, toy, monkeypatch):
    """Trained by the plain loop for a round with `start=last`, adapted by `unseen_site.adapt`, scored on the masks outside."""
    monkeypatch.setattr(run_options, "run_here", Driven())
    common = Common(1, None, toy, 32, ("start=last", "batch=4"))
    studies = {TABLE_II: OUTSIDE[TABLE_II](3)}
    found = LeaveOneOut(studies, common, (0,), root, tmp_path / "out")
    results = found.execute()
    assert not found.failed
    for entry in studies[TABLE_II].entries:
        adaptations = results[entry.source].folders[0]
        assert list(adaptations) == list(SITES)
        for site, made in adaptations.items():
            said = json.loads((made.folder / "adapt.json").read_text())
            assert said["models"] == [*(s for s in SITES if s != site), "global"]
            assert made.images.keys() == {r.image for r in SiteFolder.open(root / site).rows_of("test")}
            assert all(0 <= images["dice"] <= 1 and np.isfinite(images["assd"]) for images in made.images.values())
            assert len(list(made.folder.glob("*.png"))) == 2
