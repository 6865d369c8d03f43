"""benchmarks/dials.py: a small campaign with a network that trains in milliseconds; what it writes and does not redo."""

import csv
import importlib.util
import json

import pytest

from feddp.data.habits import Dials
from feddp.errors import InputError
from feddp.networks import NETWORKS
from support import ROOT
from support.small import Small

SMALL = "--values 0 1 --seeds 0 --sites 3 --images 12 --size 32 --rounds 1 --epochs 1 --network small"


@pytest.fixture
def dials(monkeypatch):
    spec = importlib.util.spec_from_file_location("dials", ROOT / "benchmarks/dials.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(NETWORKS, "small", Small)
    return module


def test_a_campaign_is_a_table_a_figure_and_is_not_run_twice(dials, tmp_path, monkeypatch):
    """Two values, three sites; FedAvg always, FineTune, and FedDP's rows before and after its calibration: 2 · 3 · 4 lines."""
    words = ["style", "--out", str(tmp_path), *SMALL.split(), "--methods", "FineTune", "FedDP, λ = 0"]
    dials.main(words)
    with open(tmp_path / "style.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
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
    run, again = dials.run_here, []
    monkeypatch.setattr(dials, "run_here", lambda *given, **options: again.append(given[1].name) or run(*given, **options))
    dials.shutil.rmtree(folder / "finetune")
    (folder / "data").rename(folder / "data.part")  # as if the drawing had been interrupted
    (folder / "data.part/site-3/dataset.json").unlink()
    dials.main(words)
    assert again == ["finetune"]
    assert (tmp_path / "style.csv").read_bytes() == first


def test_results_of_other_settings_are_not_taken(dials, tmp_path, monkeypatch):
    """Another number of rounds and another setting are refused before a run; other values, seeds and methods are not."""
    ran = []
    monkeypatch.setattr(dials.Campaign, "run", lambda campaign, *which: ran.append(which) or [(*which, "site-1", 50.0)])
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


def test_results_of_unknown_settings_are_not_taken(dials, tmp_path):
    (tmp_path / "style").mkdir()
    with pytest.raises(InputError, match="with their settings is missing; choose another --out"):
        dials.main(["style", "--out", str(tmp_path), *SMALL.split()])


def test_the_difference_is_paired_by_seed(dials):
    """Two sites: (10 + 20) / 2 = 15 and (30 + 50) / 2 = 40."""
    rows = [(0.5, 0, "FedAvg", "a", 10.0), (0.5, 0, "FedAvg", "b", 20.0), (0.5, 1, "FedAvg", "a", 30.0)]
    assert dials.means([*rows, (0.5, 1, "FedAvg", "b", 50.0)]) == {"FedAvg": {0.5: {0: 15.0, 1: 40.0}}}
