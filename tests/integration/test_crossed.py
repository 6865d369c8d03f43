"""`feddp bench crossed`: every site's network at every other site."""

import json

import pytest

from benchmarks.crossed import against_own, cell


def test_the_test_is_over_the_images_of_the_site():
    """Six images, on which the other network is worse by 1, 2, ..., 6: 2 of 64 orders of signs are as extreme, p = 1/32."""
    own = [60.0] * 6
    found = {"A": {"A": own, "B": [50.0]}, "B": {"A": [value - i for i, value in enumerate(own, 1)], "B": [50.0]}}
    assert against_own(found, "B", "A") == pytest.approx(1 / 32)
    assert against_own(found, "A", "A") is None
    assert against_own(found, "A", "B") is None, "equal on every image"
    assert (cell([50.0, 51.0], None), cell([50.0], 1 / 32)) == ("50.50", "50.00 (p = 0.031)")


def test_a_run(feddp, tmp_path):
    """A site's own network has the Dice of results.json; FedAvg's networks are one, so that there is nothing to test."""
    data = tmp_path / "data"
    assert feddp("data", "synthesize", "--out", data, "--images", "8", "--size", "32", "--sites", "2")[0] == 0
    for method in ("fedavg", "local"):
        run = tmp_path / method
        options = ("--rounds", "1", "--size", "32", "--network", "pvt_v2_b0_s-fpn", "--env", "local")
        code, _, err = feddp("run", "--method", method, "--data", data, "--out", run, *options)
        assert code == 0, err
        code, out, err = feddp("bench", "crossed", run, "--data", data)
        assert code == 0, err
        (found,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
        sites = json.loads((run / "results.json").read_text())["sites"]
        for site, result in sites.items():
            assert found["dice"][site][site] == pytest.approx(100 * result["final"]["dice"]["mean"])
        if method == "fedavg":
            assert found["dice"]["site-1"] == found["dice"]["site-2"]
            assert found["p"] == {site: dict.fromkeys(sites) for site in sites}
