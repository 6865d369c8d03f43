"""benchmarks/dials.py: a small campaign with a network that trains in milliseconds; what it writes and does not redo."""

import csv
import importlib.util
import json
from datetime import date

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.small import shallow
from feddp.compare.runs import Place
from feddp.data.folder import SiteFolder
from feddp.data.habits import Dials
from feddp.errors import InputError
from feddp.networks import NETWORKS
from feddp.plan.schema import BEHAVIOUR, behaviour_of
from support import ROOT
from support.compare_runs import write_run
from support.small import Small

SMALL = "--values 0 1 --seeds 0 --sites 3 --images 24 --size 32 --rounds 1 --epochs 1 --network small"


@pytest.fixture
def dials(monkeypatch):
    spec = importlib.util.spec_from_file_location("dials", ROOT / "benchmarks/dials.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(NETWORKS, "small", Small)
    return module


@pytest.fixture
def undrawn(dials, monkeypatch):
    """No figure: that of a campaign is looked at in the first test, its stars in the last."""
    monkeypatch.setattr(dials, "draw", lambda *given: None)


@pytest.fixture
def made(dials, monkeypatch):
    """The runs that are made, not read: the folder's last two names."""
    run, found = dials.run_here, []

    def noting(data, out, *given, **options):
        found.append(f"{out.parent.parent.name}/{out.name}")
        return run(data, out, *given, **options)

    monkeypatch.setattr(dials, "run_here", noting)
    return found


def read(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_campaign_is_a_table_a_figure_and_is_not_run_twice(dials, tmp_path, made):
    """Two values, three sites; FineTune before and after it tunes, FedDP before and after its calibration: 2 · 3 · 4 lines."""
    words = ["style", "--out", str(tmp_path), *SMALL.split(), "--methods", "FineTune", "FedDP, λ = 0"]
    dials.main(words)
    rows = read(tmp_path / "style.csv")
    assert len(rows) == 2 * 3 * 4
    assert {row["method"] for row in rows} == {"FedAvg", "FineTune", "FedDP, λ = 0", "FedDP's queries alone"}
    assert (tmp_path / "style.png").read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "style/1/seed-0"
    assert list(tmp_path.rglob("*.safetensors")) == []
    written = json.loads((folder / "data/site-1/dataset.json").read_text())
    assert written["dials"] == vars(Dials(appearance=0, prevalence=0, style=1, label_noise=0))
    results = json.loads((folder / "feddp/results.json").read_text())
    (final,) = [row["dice"] for row in rows if (row["value"], row["method"], row["site"]) == ("1", "FedDP, λ = 0", "site-2")]
    assert float(final) == pytest.approx(100 * results["sites"]["site-2"]["final"]["dice"]["mean"], abs=1e-3)
    first = (tmp_path / "style.csv").read_bytes()
    assert made == [f"{folder}/{method}" for folder in ("alike", "1") for method in ("finetune", "feddp")]
    made.clear()
    dials.shutil.rmtree(folder / "finetune")
    (folder / "data").rename(folder / "data.part")  # as if the drawing had been interrupted
    (folder / "data.part/site-3/dataset.json").unlink()
    dials.main(words)
    assert made == ["1/finetune"]
    assert (tmp_path / "style.csv").read_bytes() == first


@pytest.mark.usefixtures("undrawn")
def test_fedavg_is_finetune_before_it_tunes(dials, tmp_path, made):
    """The same rows as of a run of its own, in the figure's order: FedAvg before FineTune."""
    words = ["style", "--out", str(tmp_path), *SMALL.split(), "--values", "1", "--methods"]
    dials.main([*words, "FedAvg"])
    own = read(tmp_path / "style.csv")
    dials.main([*words, "FineTune", "FedAvg"])
    assert made == ["1/fedavg", "1/finetune"]
    assert read(tmp_path / "style.csv")[:3] == own


@pytest.mark.usefixtures("undrawn")
def test_results_of_other_settings_are_not_taken(dials, tmp_path, monkeypatch):
    """Another number of rounds and another setting are refused before a run; other values, seeds and methods are not."""
    ran = []
    monkeypatch.setattr(dials.Campaign, "run", lambda campaign, *which: ran.append(which) or [(*which, "site-1", 50.0)])
    monkeypatch.setattr(
        dials.Campaign, "tested", lambda campaign, value, seeds, labels: dials.PatientScores((*labels,), (), ())
    )
    words = ["style", "--out", str(tmp_path), *SMALL.split()]
    dials.main([*words, "--methods", "FedAvg"])
    assert ran == [(0, 0, "FedAvg"), (1, 0, "FedAvg")]
    with pytest.raises(InputError) as refused:
        dials.main([*words, "--rounds", "2", "--set", "lr=0.01"])
    assert str(refused.value) == (
        f"{tmp_path / 'style.json'}: the results there were made with rounds 1, not 2; settings [], not ['lr=0.01']; "
        "choose another --out, or give the same settings"
    )
    assert len(ran) == 2
    dials.main([*words, "--values", "0.5", "--seeds", "3", "--methods", "Ditto"])
    assert ran[2:] == [(0.5, 3, "FedAvg"), (0.5, 3, "Ditto")]
    others = ["appearance", *words[1:], "--methods", "FedAvg", "--rounds", "2"]
    dials.main([*others, "--values", "0.5"])
    with pytest.raises(InputError, match=r"alike.json: the results there were made with rounds 1, not 2; choose another --out"):
        dials.main(others)


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_a_version_that_trains_differently_is_not_taken(dials, tmp_path, made):
    """It is the last that is asked for, and nothing is made before it is refused."""
    words = ["style", "--out", str(tmp_path), *SMALL.split(), "--values", "1", "--methods", "FedAvg"]
    dials.main(words)
    results = tmp_path / "style/1/seed-0/fedavg/results.json"
    results.write_text(results.read_text().replace(f'"behaviour": {BEHAVIOUR}', '"behaviour": 1'))
    with pytest.raises(
        InputError, match=rf"is of a version that trains differently \(1, here {BEHAVIOUR}\); choose another --out"
    ):
        dials.main([*words, "--values", "0", "1"])
    assert made == ["1/fedavg"]
    assert not (tmp_path / "alike.json").exists(), "a folder that holds nothing may be another campaign's"


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_another_version_makes_meanwhile_is_not_taken(dials, tmp_path, made, monkeypatch):
    words = ["style", *SMALL.split(), "--values", "1", "--methods", "FedAvg", "--out"]
    dials.main([*words, str(tmp_path / "other")])
    claim = dials.Campaign.claim

    def claimed(campaign, values):
        claim(campaign, values)
        dials.shutil.copytree(tmp_path / "other/style", tmp_path / "own/style")
        results = tmp_path / "own/style/1/seed-0/fedavg/results.json"
        results.write_text(results.read_text().replace(f'"behaviour": {BEHAVIOUR}', '"behaviour": 1'))

    monkeypatch.setattr(dials.Campaign, "claim", claimed)
    with pytest.raises(InputError, match="is of a version that trains differently"):
        dials.main([*words, str(tmp_path / "own")])
    assert made == ["1/fedavg"]


@pytest.mark.usefixtures("undrawn")
def test_a_run_says_on_which_machine_and_day_it_was_made(dials, tmp_path, made):
    """As a comparison's record does, beside the run's folder. A run without it, of an earlier version, is read: nobody knows
    where it was made, so nothing is written. One that is made again has the machine that made it."""
    words = ["style", "--out", str(tmp_path), *SMALL.split(), "--values", "1", "--methods", "FedAvg"]
    dials.main(words)
    record, table = tmp_path / "style/1/seed-0/fedavg.json", (tmp_path / "style.csv").read_bytes()
    found = json.loads(record.read_text())
    assert found.keys() == {"date", "machine", "processor"}
    assert found["machine"] == Place("local").machine
    assert found["processor"] == dials.machine()["processor"]
    assert 0 <= (date.today() - date.fromisoformat(found["date"])).days <= 1
    record.unlink()
    dials.main(words)
    assert made == ["1/fedavg"]
    assert not record.exists()
    assert (tmp_path / "style.csv").read_bytes() == table
    dials.shutil.rmtree(record.with_suffix(""))
    record.write_text('{"machine": "another"}')
    dials.main(words)
    assert made == ["1/fedavg"] * 2
    assert json.loads(record.read_text())["machine"] == found["machine"]


@pytest.mark.parametrize(
    "wrong",
    [
        "--seeds -1",
        "--sites 0",
        "--rounds 0",
        "--images 0",
        "--size 33",
        "--values 2",
        "--values nan",
        "--values x",
        "--epochs -1",
    ],
)
def test_what_cannot_be_is_refused_before_the_settings_are_noted(dials, tmp_path, capsys, wrong):
    """Else the corrected command would be refused, as one of other settings."""
    with pytest.raises(SystemExit) as ended:
        dials.main(["style", "--out", str(tmp_path / "out"), *SMALL.split(), *wrong.split()])
    assert ended.value.code == 2
    assert f"error: argument {wrong.split()[0]}: {wrong.split()[1]} is not a" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--network pvt", "unknown network 'pvt'"),
        ("--network resnet18-fpn --methods Ditto LoRA", "FPN has no attention for LoRA's adapters"),
        ("--set lr=-1", "lr=-1.0 must be a number above 0"),
        ("--rounds 10000000", "rounds=10000000: at most"),
        ("--images 2", "--images 2: too few for every split; name more"),
        ("--images 6", "--images 6: too few for every split; name more"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_the_settings_are_noted(dials, tmp_path, wrong, message):
    with pytest.raises(InputError, match=message):
        dials.main(["style", "--out", str(tmp_path / "out"), *SMALL.split(), *wrong.split()])
    assert not (tmp_path / "out").exists()


def test_results_of_unknown_settings_are_not_taken(dials, tmp_path):
    (tmp_path / "style").mkdir()
    with pytest.raises(InputError, match="with their settings is missing; choose another --out"):
        dials.main(["style", "--out", str(tmp_path), *SMALL.split()])


def test_the_difference_is_paired_by_seed(dials):
    """Two sites: (10 + 20) / 2 = 15 and (30 + 50) / 2 = 40."""
    rows = [(0.5, 0, "FedAvg", "a", 10.0), (0.5, 0, "FedAvg", "b", 20.0), (0.5, 1, "FedAvg", "a", 30.0)]
    assert dials.means([*rows, (0.5, 1, "FedAvg", "b", 50.0)]) == {"FedAvg": {0.5: {0: 15.0, 1: 40.0}}}


@pytest.mark.usefixtures("undrawn")
def test_at_zero_all_dials_share_their_runs(dials, tmp_path, made):
    """Style runs FedAvg at 0 and 1; appearance only at 1. Its Dice at 0 is that of style, and the images are there once."""
    words = ["--out", str(tmp_path), *SMALL.split(), "--methods", "FedAvg"]
    dials.main(["style", *words])
    dials.main(["appearance", *words])
    assert made == ["alike/fedavg", "1/fedavg", "1/fedavg"]
    style, appearance = (read(tmp_path / f"{dial}.csv") for dial in ("style", "appearance"))
    assert style[:3] == appearance[:3]
    assert len(style) == len(appearance) == 6
    assert json.loads((tmp_path / "alike.json").read_text())["rounds"] == 1
    assert "dial" not in json.loads((tmp_path / "alike.json").read_text())


@pytest.mark.usefixtures("undrawn")
def test_the_dice_of_every_test_image_is_kept(dials, tmp_path):
    """24 images of 12 patients a site, 60/20/20: 2 test patients with 2 images each, or 3. The mean over the sites of the
    images' mean is that of results.json, before and after FedDP's last stage."""
    words = ["style", "--out", str(tmp_path), *SMALL.split(), "--values", "1", "--methods", "FedDP, λ = 0"]
    dials.main(words)
    given = {"network": "small", "sites": 3, "images": 24, "size": 32, "rounds": 1, "epochs": 1, "thin": False, "settings": ()}
    tested = dials.Campaign("style", tmp_path, **given).tested(1, [0], ["FedAvg", "FedDP, λ = 0"])
    assert tested.methods == ("FedAvg", "FedDP's queries alone", "FedDP, λ = 0")
    assert len(tested.images) == 3
    assert all(2 <= len(each) <= 3 and set(each) == {2} for each in tested.images)
    rows = read(tmp_path / "style.csv")
    expected = [np.mean([float(r["dice"]) for r in rows if (r["value"], r["method"]) == ("1", m)]) for m in tested.methods]
    assert tested.means() == pytest.approx(expected, abs=1e-3)
    (row,) = [r for r in read(tmp_path / "style_onset.csv") if (r["method"], r["value"]) == ("FedDP, λ = 0", "1")]
    assert float(row["difference"]) == pytest.approx(expected[2] - expected[0], abs=2e-3)
    assert float(row["low"]) <= float(row["difference"]) <= float(row["high"])


@pytest.mark.usefixtures("undrawn")
def test_every_family_runs_in_a_folder_of_its_own(dials, tmp_path, monkeypatch, capsys):
    """But for FedAvg's, one network: it is FineTune's run. Every row is a family of its own.

    Each plan is made and resolved for a network with attention, which some families ask for; the runs are made up, of another
    Dice for each method and for each of its stages. Every method trains in test_golden.py.
    """

    def run(data, out, options, env):
        slots = {"start": 0.2 + len(options.method) / 100}
        if options.method in ("finetune", "fedoap", "feddp"):
            slots["calibrated" if options.method == "feddp" else "tuned"] = slots["start"] + 0.1
        images = {site.name: [row.image for row in SiteFolder.open(site).rows_of("test")] for site in data.glob("site-*")}
        dice = {site: {slot: dict.fromkeys(names, value) for slot, value in slots.items()} for site, names in images.items()}
        write_run(out, dice, method=options.method, behaviour=behaviour_of(options.method))

    monkeypatch.setattr(dials, "run_here", run)
    monkeypatch.setitem(NETWORKS, "shallow", shallow)
    words = ["style", "--out", str(tmp_path), *SMALL.split(), "--values", "1", "--network", "shallow"]
    words += ["--sites", "2", "--images", "28"]
    dials.main([*words, "--methods", *dials.METHODS])
    folders = {path.parent.name for path in (tmp_path / "style/1/seed-0").glob("*/results.json")}
    assert folders == {approach.method for approach in dials.METHODS.values()} - {"fedavg"}
    rows = {(row["method"], row["site"]): float(row["dice"]) for row in read(tmp_path / "style.csv")}
    wanted = {name: 20 + len(approach.method) for name, approach in dials.METHODS.items()}
    wanted |= {"FedAvg": 28, "FineTune": 38, "FedDP's queries alone": 25, "FedDP, λ = 0": 35, "FedOAP": 36}
    assert rows == {(name, site): dice for name, dice in wanted.items() for site in ("site-1", "site-2")}
    assert len(dials.METHODS) == len({approach.family for approach in dials.METHODS.values()})
    onsets = json.loads((tmp_path / "style_onset.json").read_text().rstrip("\n").split("\n")[0])
    assert onsets["chance"] == "the test patients of 1 seed; training's chance is not in it"
    better = {name: dice > wanted["FedAvg"] for name, dice in wanted.items() if name != "FedAvg"}
    assert onsets["onset"] == {name: 1 if more else "never here" for name, more in better.items()}
    assert onsets["onset"].keys() == dials.FAMILIES.keys() - {"FedAvg"}
    assert all(label in capsys.readouterr().out for label in ["LoRA"])


def test_the_onset_is_the_value_from_which_on_every_interval_lies_above_zero(dials):
    """0.5 and 1 do, 0 does not: 0.5. With 0.5 touching 0, what lies below it does not count: 1. At 1 it ends: never."""
    above, around = (0.1, 2.0), (-0.1, 2.0)
    assert dials.onset({0.5: above, 1: above, 0: around}) == 0.5
    assert dials.onset({0: above, 0.5: (0.0, 2.0), 1: above}) == 1
    assert dials.onset({0: above, 0.5: above, 1: around}) == "never here"
    assert dials.onset({0: above, 0.5: None, 1: above}) == "unknown"


def test_with_three_seeds_a_seed_is_an_observation(dials):
    """Differences of 1, 2 and 3 points at 0, of 4, 5 and 6 at 1: means 2 and 5, s = 1, t(0.975, 2) = 4.303, so that half the
    interval is 4.303 / √3 = 2.484. The sites' means are what is compared: 10 and 30 against 20 and 20 is no difference."""
    rows = [(value, seed, "FedAvg", site, 20.0) for value in (0, 1) for seed in (0, 1, 2) for site in "ab"]
    gained = {0: (1, 2, 3), 1: (4, 5, 6)}
    rows += [(v, seed, "Ditto", "a", 10.0 + g) for v, each in gained.items() for seed, g in enumerate(each)]
    rows += [(v, seed, "Ditto", "b", 30.0 + g) for v, each in gained.items() for seed, g in enumerate(each)]
    found = dials.by_seeds(rows)
    assert found.keys() == {"Ditto"}
    assert found["Ditto"][0] == pytest.approx((-0.484, 4.484), abs=1e-3)
    assert found["Ditto"][1] == pytest.approx((2.516, 7.484), abs=1e-3)
    assert dials.onset(found["Ditto"]) == 1


def test_with_fewer_seeds_the_test_patients_are_observations(dials):
    """Every patient of both sites gains 2 points at 1: every draw does. At 0 half gain 2, half lose 2: the interval has 0."""
    images = (np.ones(6), np.ones(6))
    same = np.column_stack([np.full(6, 50.0), np.full(6, 52.0)])
    mixed = np.column_stack([np.full(6, 50.0), [52.0, 48.0] * 3])
    methods = ("FedAvg", "Ditto")
    tests = {0: dials.PatientScores(methods, images, (mixed, mixed)), 1: dials.PatientScores(methods, images, (same, same))}
    found = dials.by_patients(tests)
    assert found["Ditto"][1] == pytest.approx((2, 2))
    assert found["Ditto"][0][0] < 0 < found["Ditto"][0][1]
    assert dials.onset(found["Ditto"]) == 1
    one = dials.PatientScores(methods, (np.ones(1),), (same[:1],))
    assert dials.by_patients({0: one}) == {"Ditto": {0: None}}, "one patient varies with nothing"


def test_the_star_is_at_the_mean_difference_of_the_onset(dials, tmp_path, monkeypatch):
    """Ditto's difference at 1 is 4 points: the star is at (1, 4). A method that never pays has none."""
    drawn = []
    monkeypatch.setattr(dials, "Figure", lambda **size: drawn.append(figure := Figure(**size)) or figure)
    rows = [(v, 0, m, "a", d) for v in (0, 1) for m, d in (("FedAvg", 20.0), ("Ditto", 20.0 + 4 * v), ("FedBN", 19.0))]
    dials.draw(tmp_path / "a.png", "style", rows, {"Ditto": 1, "FedBN": "never here"})
    stars = [line.get_xydata().tolist() for line in drawn[0].axes[1].lines if line.get_marker() == "*"]
    assert stars == [[[1, 4]]]
