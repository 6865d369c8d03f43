"""`feddp bench start` and `round`: the benchmarks that start whole federations in POC, once, with tiny sizes.

One site: what they compute of several is tested on events made by hand (test_bench).
"""

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import round, start
from support.command import ended

pytestmark = pytest.mark.poc

TINY = ("--sites", 1, "--images", 12, "--size", 32)
ROUNDS = ("--rounds", 2, "--pairs", 1, "--set", "precision=float16")


class Begun:
    """What `bench start` has of the process of its run."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class Measured:
    """`bench round` with `bench start` looking at its run of ours: the two start the same federation, which is started once.

    The run's command is in this process, and what `feddp bench start` calls in another thread of it.

    Attributes:
        ran: the words of the run as `round` gives them, and as `start` does.
        figures: {benchmark: its line of JSON}.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.ran: dict[str, list[str]] = {}
        patch.setattr(round, "run", self._run)
        with redirect_stdout(io.StringIO()) as said:
            code = ended(["feddp", "bench", "round", *map(str, (*TINY, *ROUNDS))])
        assert code == 0, said.getvalue()
        lines = [json.loads(line) for line in said.getvalue().splitlines() if line.startswith("{")]
        self.figures = {line["benchmark"]: line for line in lines}

    def _run(self, data: Path, out: Path, env: str, *options: object) -> None:
        """A run of `round`'s, which `start` takes for its own."""
        words = [str(word) for word in ("run", "--data", data, "--out", out, "--env", env, *options)]

        process = Begun()

        def begin(command: list[str], **_) -> Begun:
            _, _, _, *own = command
            self.ran = {"round": words, "start": own}
            Path(own[own.index("--out") + 1]).symlink_to(out)
            return process

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(start, "subprocess", SimpleNamespace(Popen=begin))
            looking = pool.submit(start.main, [*map(str, TINY)])
            code = 1
            try:
                with redirect_stdout(sys.stderr):
                    code = ended(["feddp", *words])
            finally:
                process.returncode = code
            looking.result()


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        return Measured(patch)


def pairs(words: list[str]) -> set[tuple[str, str]]:
    """The options of a run, but for its folders; each has one word."""
    found = set(zip(words[1::2], words[2::2], strict=True))
    assert len(found) == len(words) // 2
    return {(option, word) for option, word in found if option not in ("--data", "--out")}


def test_each_process_until_its_first_step(measured):
    """The server and a site have one process that stays and one of the job each, whose imports take CPU time and memory."""
    rows = measured.figures["start"]["processes"]
    of_jobs = [row for row in rows if row["process"] in ("worker_process", "runner_process")]
    assert len({row["participant"] for row in of_jobs}) == len(of_jobs) == 2
    assert len(rows) >= 4
    for row in of_jobs:
        assert row["CPU-seconds"] > 0.5
        assert row["RSS, MiB"] >= row["PSS, MiB"] > 100


def test_the_run_that_start_looked_at_is_the_one_that_it_starts(measured):
    """But for a round and a setting more, which it has of `round`; so all of its words were taken."""
    ran = {name: pairs(words) for name, words in measured.ran.items()}
    assert ran["start"] - ran["round"] == {("--rounds", "1")}
    assert ran["round"] - ran["start"] == {("--rounds", "2"), ("--set", "precision=float16")}


def test_a_round_of_ours_and_of_flare_s_recipe(measured):
    """Two rounds: the last one of the recipe's has no end, and the last one of ours no next request."""
    figures = measured.figures["round"]
    (ours,), (parts,), (stock,) = figures["ours"], figures["parts"], figures["stock"]
    assert ours > 0
    assert stock > 0
    # serialising, checks and transfers take some milliseconds of a round whatever the machine
    assert parts["to the fastest site"] > 0
    assert parts["before its offer"] > 0
    assert parts["from the fastest site"] > 0
