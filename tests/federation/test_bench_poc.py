"""`feddp bench start` and `round`: the benchmarks that start whole federations in POC, once, with tiny sizes."""

import json

import pytest

from benchmarks import common, round

pytestmark = pytest.mark.poc

TINY = ("--sites", 2, "--images", 12, "--size", 32)


def test_each_process_until_its_first_step(feddp):
    """The server and two sites have one process that stays and one of the job each, whose imports take CPU time and memory."""
    code, out, err = feddp("bench", "start", *TINY)
    assert code == 0, err
    rows = json.loads(out.splitlines()[-1])["processes"]
    of_jobs = [row for row in rows if row["process"] in ("worker_process", "runner_process")]
    assert len({row["participant"] for row in of_jobs}) == len(of_jobs) == 3
    assert len(rows) >= 6
    for row in of_jobs:
        assert row["CPU-seconds"] > 0.5
        assert row["RSS, MiB"] >= row["PSS, MiB"] > 100


def test_a_round_of_ours_and_of_flare_s_recipe(feddp, monkeypatch):
    """Two rounds: the last one of the recipe's has no end, and the last one of ours no next request."""
    ran = []
    monkeypatch.setattr(round, "run", lambda *words: ran.append(words) or common.run(*words))
    code, out, err = feddp("bench", "round", *TINY, "--rounds", 2, "--pairs", 1, "--set", "precision=float16")
    assert code == 0, err
    figures = json.loads(out.splitlines()[-1])
    (ours,), (parts,), (stock,) = figures["ours"], figures["parts"], figures["stock"]
    assert ours > 0
    assert stock > 0
    (words,) = ran
    assert words[words.index("precision=float16") - 1] == "--set"
    # serialising, checks and transfers take some milliseconds of a round whatever the machine
    assert parts["to the fastest site"] > 0
    assert parts["from the fastest site"] > 0
