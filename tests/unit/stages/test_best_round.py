"""The round that stage 1 selects, by the median of the sites' differences in validation IoU; of equal rounds, the first."""

import json
from itertools import pairwise, permutations
from statistics import median
from types import SimpleNamespace

import pytest

from feddp.files import read_events, read_results
from feddp.limits import HEADER_SHARE, NETWORK_BYTES
from feddp.run.options import Options, run_here
from feddp.stages.message import Message
from feddp.stages.selection import KEPT, add, packed, unpacked
from feddp.stages.train import adopt, note, score, train


@pytest.mark.parametrize(
    ("scores", "best", "kept"),
    [
        ([(0.4, 0.6), (0.7, 0.7), (0.8, 0.6), (0.5, 0.7)], 2, [1, 2]),
        ([(0.5, 0.5), (0.4, 0.6), (0.6, 0.4)], 1, [1]),
        ([(0.0, 0.0), (0.0, 0.0)], 1, [1]),
        ([(0.2, 0.4), (0.1, 0.9), (0.6, 0.6)], 3, [1, 2, 3]),
    ],
)
def test_of_equal_rounds_the_first_is_the_best(scores, best, kept):
    """Means 0.5, 0.7, 0.7, 0.6: round 2, though round 3 is equal. 0.5 three times: round 1. 0 is better than none.
    0.3, 0.5, 0.6: the last."""
    memory, marked = noted(*({"A": a, "B": b} for a, b in scores))
    assert memory.best_round == best
    assert marked == kept


def noted(*rounds):
    """The server's memory after rounds with these scores {site: IoU}, and the rounds that it marked as the best so far."""
    marked = []
    memory = SimpleNamespace(scored={}, best_round=None, keep_best=lambda: marked.append(memory.best_round))
    server = SimpleNamespace(memory=memory, plan=SimpleNamespace(needs_scores=True))
    for round, ious in enumerate(rounds, 1):
        note(server, round, {site: Message(scalars={"iou": iou}) for site, iou in ious.items()})
    return memory, marked


@pytest.mark.parametrize("sites", [3, 4, 5])
@pytest.mark.parametrize(("step", "claims", "best"), [(-0.01, (0.0, 1.0), 1), (0.01, (1.0, 0.0), 2)])
def test_one_liar_does_not_outweigh_the_other_sites(sites, step, claims, best):
    """All honest sites lose (or win) 0.01 in round 2, and one site claims to win (lose) 1. The mean of five follows the liar:
    (1 − 4 · 0.01)/5 > 0. The median of the differences is an honest one, or of four lies between two honest ones."""
    honest = [f"H{number}" for number in range(sites - 1)]
    rounds = [dict.fromkeys(honest, 0.5 + step * t) | {"liar": claims[t]} for t in (0, 1)]
    first, second = (sum(ious.values()) / sites for ious in rounds)
    assert (second > first) is (best == 1), "the control: the mean chooses the other round"
    assert noted(*rounds)[0].best_round == best


def test_differences_that_cancel_are_no_difference():
    """+0.001 and −0.001, which as floats sum to 5e-17, or less than nothing: round 1 stays."""
    memory, _ = noted({"A": 0.811, "B": 0.702}, {"A": 0.812, "B": 0.701})
    assert memory.best_round == 1
    assert noted({"A": 0.5, "B": 0.5}, {"A": 0.501, "B": 0.5})[0].best_round == 2, "half of a thousandth counts"


@pytest.mark.parametrize("absent", range(1, 9))
@pytest.mark.parametrize("site", "ABC")
def test_a_site_that_misses_one_round_does_not_decide(site, absent):
    """IoU .30, .60 and .75 + .01 t: every site's is highest in round 8. Without A, whose is the lowest, a round's mean is
    0.675 + .01 t, which 0.55 + .01 t of all three never reaches. If a site misses the last round, the others still choose it.
    """
    rounds = [{"A": 0.30 + 0.01 * t, "B": 0.60 + 0.01 * t, "C": 0.75 + 0.01 * t} for t in range(1, 9)]
    del rounds[absent - 1][site]
    assert noted(*rounds)[0].best_round == 8


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([{"A": 0.5, "B": 0.5}, {"A": 0.51}, {"A": 0.505, "B": 0.6}], 3),
        ([{"A": 0.5, "B": 0.5}, {"A": 0.51}, {"A": 0.505, "B": 0.4}], 2),
        ([{"A": 0.9}, {"A": 0.8, "B": 0.1}, {"A": 0.7, "B": 0.8}], 3),
        ([{"A": 0.9}, {"A": 0.8, "B": 0.7}, {"A": 0.7, "B": 0.8}], 1),
        ([{"A": 0.5, "B": 0.9}, {"A": 0.6}, {"A": 0.7}], 3),
        ([{"A": 0.5}, {"B": 0.9}, {"A": 0.6}], 3),
        ([{"A": 0.5}, {"B": 0.9}, {"A": 0.4, "B": 0.8}], 1),
    ],
)
def test_who_has_a_part_in_the_choice(rounds, best):
    """1, 2: A alone chooses round 2; B keeps its part, with 0.5 of round 1: round 3 has 0.5525 against 0.505, or 0.4525.
    3, 4: B comes after the best round and counts there with its first score: 0.75 against (0.9 + 0.1)/2; against (0.9 + 0.7)/2.
    5: B is lost: A alone chooses. 6, 7: without a common site the earlier round stays, and both have a part from then on:
    0.6 against 0.5, and (0.4 + 0.8)/2 against (0.5 + 0.9)/2."""
    assert noted(*rounds)[0].best_round == best


def test_a_site_that_withholds_has_no_part():
    """B's mean would be 0.9 in round 1; it never sends one."""
    memory, marked = noted({"A": 0.5}, {"A": 0.6})
    note(SimpleNamespace(memory=memory, plan=None), 3, {"A": Message(scalars={"iou": 0.7}), "B": Message()})
    assert (memory.best_round, memory.scored[3], marked) == (3, {"A": 0.7}, [1, 2, 3])


def site_by_site(*columns):
    """Rounds from the sites' scores in them."""
    return [dict(zip("ABC", ious, strict=True)) for ious in zip(*columns, strict=True)]


def test_rounds_in_a_circle_do_not_lose_the_better_one():
    """Round 2 is above round 1 by 0.01 (A, C), round 3 above round 2 by 0.02 (A, B), and round 1 above round 3 by 0.20 (B, C).
    Compared with the best so far alone, round 3 would be selected. Its worst difference is -0.2, that of round 2 -0.02."""
    circle = site_by_site((0.50, 0.51, 0.53), (0.70, 0.48, 0.50), (0.60, 0.61, 0.40))
    gains = [median(now[site] - former[site] for site in "ABC") for former, now in pairwise([*circle, circle[0]])]
    assert [round(gain, 6) for gain in gains] == [0.01, 0.02, 0.2], "the control: a circle"
    assert noted(*circle)[0].best_round == 2


def test_a_round_that_is_better_than_all_others_is_selected_in_any_order():
    """D beats the other three, which go round in a circle, by 0.01 at two sites: it is the best wherever it comes."""
    circle = site_by_site((0.50, 0.51, 0.53), (0.70, 0.48, 0.50), (0.60, 0.61, 0.40))
    winner = {"A": 0.54, "B": 0.71, "C": 0.30}
    for order in permutations([*circle, winner]):
        assert order[noted(*order)[0].best_round - 1] is winner


@pytest.mark.parametrize("liar", ["between", "late"])
def test_a_liar_cannot_select_a_round_that_all_others_find_worse(liar):
    """A gains 0.01 in each of 30 rounds and B 0.002, so both find the last round best. The liar wants round 10.

    between: it lies in round 1, and its gains from there lie between the others'. By these alone, round 10 has A's 0.09, and
    every later round B's, at most 0.058. late: it claims 1 in round 10 and 0 elsewhere.
    """
    steps = range(30)
    claims = [0.2 + (0.09 if step == 9 else 0.002 * step) if liar == "between" else float(step == 9) for step in steps]
    rounds = [{"A": 0.3 + 0.01 * step, "B": 0.6 + 0.002 * step, "liar": claims[step]} for step in steps]
    gains = [round(median(ious[site] - rounds[0][site] for site in ious), 6) for ious in rounds]
    assert gains.index(max(gains)) == 9, "the control: by the gains since the first round it selects"
    assert noted(*rounds)[0].best_round == 30


def test_the_kept_scores_have_a_bound_and_survive_the_disk():
    """KEPT numbers: with 1000 sites, those of 50 rounds, and of the best and the latest one."""
    sites = [f"hospital-{number}" for number in range(1000)]
    scored, best = {}, None
    for number in range(1, KEPT // 1000 + 10):
        best = add(scored, best, number, dict.fromkeys(sites, 0.9 if number == 3 else 0.123))
    assert best == 3
    assert list(scored) == [3, *range(9, KEPT // 1000 + 10)]
    del scored[3][sites[0]]
    stored = json.dumps({"state": json.dumps(packed(scored))})
    assert unpacked(json.loads(json.loads(stored)["state"])) == scored
    assert len(stored) < NETWORK_BYTES // HEADER_SHARE // 2


# --- a site's own best round ------------------------------------------------------------------------------------------------


@pytest.fixture
def ious(monkeypatch):
    """Makes the validation IoU of the network after round t be `values[t - 1]`: it is known by its parameters' sum."""

    def make(values):
        known: dict[float, float] = {}

        def scores(network, samples):
            sum_ = sum(parameter.double().sum().item() for parameter in network.parameters())
            return {"iou": known.setdefault(sum_, values[min(len(known), len(values) - 1)]), "dice": 0.0}

        monkeypatch.setattr("feddp.stages.site.mean_scores", scores)

    return make


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("method", "changes", "values", "adopted"),
    [
        ("local", {}, (0.3, 0.7, 0.5, 0.6), 2),
        ("local", {}, (0.3, 0.2, 0.3, 0.1), 1),
        ("local", {}, (0.3, 0.7001, 0.7004, 0.6), 2),
        ("local", {}, (0.3, 0.4, 0.5, 0.6), 4),
        ("local", {"start": "last"}, (0.3, 0.7, 0.5, 0.6), 3),
        ("local", {"private": "head"}, (0.3, 0.7, 0.5, 0.6), 3),
        ("fedbn", {"private": "all"}, (0.3, 0.7, 0.5, 0.6), 3),
    ],
)
def test_local_train_adopts_the_best_round_of_each_site(open_site, toy, ious, fresh, method, changes, values, adopted):
    """Four rounds; the server, by the mean over the sites, takes each for the best but the last, so it asks for round 3.

    Local: 0.7 in round 2; of equal rounds the first, 1; 0.7001 and 0.7004 leave the site as one number, so 2; 0.6 in the last
    round, 4. Elsewhere the server's round 3: with start=last, with a shared tensor, whose γ is the server's choice, and by a
    method that does not say so.
    """
    plan = {"method": method, "network": toy, "rounds": 4, **changes}
    ious(values)
    site, after = open_site(**plan), []
    shared = site.partition.split(site.copy())[0]
    for round in range(4):
        site = open_site(**plan) if fresh else site
        shared, _ = train(site, shared, round, best=min(round, 3) or None)
        after.append(site.copy())
    score(site, shared, 4)
    site = open_site(**plan) if fresh else site
    given = {name: after[2][name] for name in shared}
    adopt(site, given, 3)
    network = site.store.read("start")[0]
    assert all(value.equal(after[adopted - 1][name]) for name, value in network.items())
    assert not all(value.equal(after[adopted % 4][name]) for name, value in network.items())


def test_a_state_that_is_not_the_best_is_removed(open_site, toy, ious):
    """0.9 in round 1, less later: of six rounds the states 1, and 4, 5 and 6 for repeated rounds."""
    ious((0.9, 0.1, 0.2, 0.3, 0.4, 0.5))
    site = open_site(method="local", network=toy, rounds=6)
    for round in range(6):
        train(site, {}, round, best=round or None)
    left = sorted(path.name for path in site.store.folder.glob("state_*"))
    assert left == [f"state_0000{number}.safetensors" for number in (1, 4, 5, 6)]


@pytest.mark.parametrize(("method", "named"), [("local", True), ("fedavg", False)])
def test_the_results_name_the_round_of_each_site(tiny_root, tmp_path, toy, monkeypatch, method, named):
    """site-1's IoU falls, site-2's rises, and site-2's more: all choose round 3, and site-1's own best is round 1. What each
    site adopted is in its own record: the round that it scored last."""
    scored = {}

    def validate(site):
        site_scores = scored.setdefault(site.name, {})
        key = sum(value.double().sum().item() for value in site.network.state_dict().values())
        slope = {"site-1": -0.1, "site-2": 0.2}[site.name]
        return {"dice": 0.5, "iou": site_scores.setdefault(key, 0.4 + slope * len(site_scores))}

    monkeypatch.setattr("feddp.stages.site.Site.validate", validate)
    out = tmp_path / "out"
    run_here(tiny_root, out, Options(method, 3, None, toy, 32, 0, ("batch=4",)), "local")
    results = read_results(out)
    records = {site: read_events(out / "sites" / site / "record.jsonl") for site in ("site-1", "site-2")}
    adopted = {site: [e["round"] for e in events if e["event"] == "score"][-1] for site, events in records.items()}
    assert results["best_round"] == 3
    assert adopted == ({"site-1": 1, "site-2": 3} if named else {"site-1": 3, "site-2": 3})
    assert {site: entry.get("round") for site, entry in results["sites"].items()} == (
        adopted if named else {"site-1": None, "site-2": None}
    )
    said = "(site-1: 1; site-2: 3; best by the sites' validation IoU: 3)"
    assert (said in (out / "results.md").read_text()) is named
