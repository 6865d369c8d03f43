"""`feddp bench crossed`: every site's network at every other site."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import crossed
from feddp.errors import InputError

# Dice of the runs' networks {run: {site of the network: {site of the images: by image}}}
RUNS = {
    "run": {"A": {"A": [60.0] * 6, "B": [50.0]}, "B": {"A": [60.0 + i for i in range(1, 7)], "B": [50.0]}},
    "other": {"A": {"A": [60.0 + i for i in range(1, 7)]}, "B": {"B": [40.0]}},
}


@pytest.fixture
def measured(monkeypatch, capsys):
    """Runs the benchmark on RUNS, whose networks are their rows; returns its figures and its table's rows. The plan of a run is
    of 32 px unless its name is in `larger`."""

    def run(*arguments, larger=()):
        def finished(path, data):
            size, training = 64 if str(path) in larger else 32, SimpleNamespace(normalise="none")
            plan = SimpleNamespace(method=f"of {path}", rounds=3, seed=0, size=size, training=training)
            return plan, RUNS[str(path)], {site: site for site in RUNS[str(path)]}

        monkeypatch.setattr(crossed, "finished", finished)
        monkeypatch.setattr(crossed, "load", lambda folder, *_: folder)
        monkeypatch.setattr(crossed, "image_dice", lambda network, images: network[images])
        crossed.main([*arguments, "--data", "data"])
        lines = capsys.readouterr().out.splitlines()
        return json.loads(lines[-1]), [line for line in lines if line.startswith("|")][2:]

    return run


def test_the_test_is_over_the_images_of_the_site(measured):
    """At A the network of B is better on the six images by 1, 2, ..., 6: 2 of 64 orders of signs are as extreme, p = 1/32. At B
    the two are equal, so there is nothing to test. Means: 60 and 60 + 21/6 = 63.5."""
    found, rows = measured("run")
    assert found["p"] == {"A": {"A": None, "B": None}, "B": {"A": pytest.approx(1 / 32), "B": None}}
    assert rows == ["| A | 60.00 | 50.00 |", "| B | 63.50 (p = 0.031) | 50.00 |"]
    assert "against" not in found


def test_the_own_network_may_be_that_of_another_run(measured):
    """The other run's network of A has the values that B's network has here: A's own here is below them by 1 to 6, p = 1/32,
    and B's equal. At B one image is 10 above the other run's: both of its two signs are as extreme, p = 1."""
    found, rows = measured("run", "--against", "other")
    assert found["p"] == {"A": {"A": pytest.approx(1 / 32), "B": 1}, "B": {"A": None, "B": 1}}
    assert found["dice"]["A"] == {"A": 60, "B": 50}
    assert found["against"] == {"method": "of other", "rounds": 3, "seed": 0, "dice": {"A": 63.5, "B": 40}}
    assert rows[-1] == "| the site itself in other | 63.50 | 40.00 |"


def test_another_run_of_other_images_is_refused(measured):
    with pytest.raises(InputError, match="--against other: its size, normalisation or sites are not those of run"):
        measured("run", "--against", "other", larger=["other"])


def test_a_run(feddp, tmp_path):
    """A site's own network has the Dice of results.json, also where it is that of the other run. FedAvg's networks are one, so
    that there is nothing to test."""
    data = tmp_path / "data"
    assert feddp("data", "synthesize", "--out", data, "--images", "8", "--size", "32", "--sites", "2")[0] == 0
    final = {}
    for method, more in (("fedavg", ()), ("local", ("--against", tmp_path / "fedavg"))):
        run = tmp_path / method
        options = ("--rounds", "1", "--size", "32", "--network", "pvt_v2_b0_s-fpn", "--env", "local")
        code, _, err = feddp("run", "--method", method, "--data", data, "--out", run, *options)
        assert code == 0, err
        code, out, err = feddp("bench", "crossed", run, "--data", data, *more)
        assert code == 0, err
        (found,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
        sites = json.loads((run / "results.json").read_text())["sites"]
        final[method] = {site: pytest.approx(100 * result["final"]["dice"]["mean"]) for site, result in sites.items()}
        assert {site: found["dice"][site][site] for site in sites} == final[method]
        if method == "fedavg":
            assert found["dice"]["site-1"] == found["dice"]["site-2"]
            assert found["p"] == {site: dict.fromkeys(sites) for site in sites}
    assert found["against"]["dice"] == final["fedavg"]
