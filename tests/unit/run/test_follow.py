"""What `feddp run` shows while a run runs, in the output of a test, which is no terminal."""

import re

import pytest

from feddp.run.follow import Follower


@pytest.fixture
def run(toy, tiny_root, tmp_path, feddp):
    """The lines that a run of two rounds in this process shows."""

    def run(method, *more):
        words = ["--data", tiny_root, "--method", method, "--network", toy, "--size", 32, "--rounds", 2, "--env", "local"]
        code, _, said = feddp("run", *words, "--set", "batch=4", "--out", tmp_path / f"{method}{len(more)}", *more)
        assert code == 0, said
        return said

    return run


def test_the_time_left_is_said_from_the_first_round_on(run):
    """Two rounds and one epoch of calibration; after the last round the bar alone has it. Each on one line of any length."""
    first, last = re.findall(r"^round \d/2 .*$", run("feddp", "--calibration-epochs", 1), re.MULTILINE)
    assert re.search(r"loss: site-1 \d\.\d+  site-2 \d\.\d+  about \d+ seconds? left by the first round$", first)
    assert re.search(r"loss: site-1 \d\.\d+  site-2 \d\.\d+$", last)


def test_verbose_shows_the_lines_of_the_logs(run, tmp_path):
    """In this process nothing is sealed, and the server's log says so: without --verbose, the log alone."""
    line = "WARNING - no certificates: the server can read the tensors that sites exchange"
    words = ("--calibration-epochs", 1)
    assert line not in run("feddp", *words)
    assert (tmp_path / "feddp2/local.log").read_text() == f"{line}\n"
    assert f"server: {line}\n" in run("feddp", *words, "--verbose")


def test_a_log_that_grows_is_shown_by_whole_lines(tmp_path, plan_for, capsys):
    """Half a line waits for its end; markup and colours of a log are text."""
    log, looks = tmp_path / "log.txt", iter(["one [red]\ntw", "o\n", ""])

    def finished():
        more = next(looks)
        with open(log, "a") as handle:
            handle.write(more)
        return not more

    follower = Follower(plan_for(), ["site-1"], tmp_path / "progress.jsonl", lambda: {"site-1": log})
    follower.until(finished, poll=0)
    assert re.findall(r"^site-1: .*$", capsys.readouterr().err, re.MULTILINE) == ["site-1: one [red]", "site-1: two"]


def test_where_each_site_adopts_its_own_best_round_no_round_is_named(run):
    """Local Train: the server does not know which rounds these are."""
    assert re.search(r"^each site's own best round validation Dice: site-1 \d", run("local"), re.MULTILINE)
