"""Warnings of masks that stay empty: at the server by the Dice that it sees, at a site by what it knows of its images."""

import json
from types import SimpleNamespace

import pytest
import torch

from feddp.networks import NETWORKS
from feddp.protocol import EVALUATING, LOADING, STORING
from feddp.run.follow import Follower
from feddp.stages import empty
from feddp.stages.empty import EMPTY, ROUNDS
from feddp.stages.message import Message
from feddp.training.store import Store
from support.driven import drive


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Server(SimpleNamespace):
    """Notes what it is told."""

    def __init__(self):
        super().__init__(memory=SimpleNamespace(empty={}), events=[], log=[])

    def progress(self, event, **metadata):
        self.events.append((event, metadata["site"]))

    def warn(self, message):
        self.log.append(message)


def warned_after(*dice):
    """After how many rounds with these Dice of site A the server has warned, each time it did."""
    server, found = Server(), []
    for number, value in enumerate(dice, 1):
        empty.warn(
            server, {"A": Message(scalars={} if value is None else {"dice": value}), "B": Message(scalars={"dice": 0.5})}
        )
        found += [number] * (len(server.events) - len(found))
    assert server.events == [(EMPTY, "A")] * len(found)
    assert len(server.log) == len(found)
    return found


@pytest.mark.parametrize(
    ("dice", "expected"),
    [
        ([0.0] * 4, []),
        ([0.0] * 12, [5]),  # once
        ([0.0] * 4 + [0.001] + [0.0] * 4, []),  # not in a row
        ([0.0] * 4 + [0.001] + [0.0] * 5, [10]),
        ([0.0004] * 5, [5]),  # 0.000 where it leaves a site
        ([0.0006] * 5, []),  # 0.001
        ([0.0] * 5 + [0.4] + [0.0] * 5, [5]),  # once for each site
        ([0.0] * 4 + [None] + [0.0], [6]),  # withheld: a round that nobody knows
    ],
)
def test_the_server_warns_after_five_rounds_in_a_row(dice, expected):
    assert ROUNDS == 5
    assert warned_after(*dice) == expected


class Alone:
    """A site with the log of its rounds, and `empty_dice`."""

    name = "A"

    def __init__(self, folder, empty_dice):
        self.store, self.empty_dice = Store(folder), empty_dice

    def train(self, *dice):
        """Returns the rounds in which the log got its warning."""
        for round, value in enumerate(dice, 1):
            self.store.record("train", round=round, phase=0, loss=1.0, dice=value)
            empty.note(self, round, value)
        return [event["round"] for event in lines(self.store.folder / "record.jsonl") if event["event"] == EMPTY]


@pytest.mark.parametrize(
    ("empty_dice", "dice", "expected"),
    [
        (0.0, [0.0] * 9, [5]),
        (0.25, [0.25] * 9, [5]),  # a quarter of the images has no structure: empty masks have Dice 1 there
        (0.25, [0.25, 0.2, 0.0, 0.25, 0.1], [5]),  # worse than empty masks
        (0.25, [0.25] * 4 + [0.26] + [0.25] * 5, [10]),
        (0.0, [0.0] * 4 + [0.001] * 3, []),
        (1.0, [1.0] * 9, []),  # there is nothing to find
    ],
)
def test_a_site_warns_by_the_dice_of_empty_masks(tmp_path, empty_dice, dice, expected):
    assert Alone(tmp_path, empty_dice).train(*dice) == expected


def test_a_repeated_round_counts_once(tmp_path):
    site = Alone(tmp_path, 0.0)
    for round in (1, 2, 2, 3, 3):
        site.store.record("train", round=round, phase=0, loss=1.0, dice=0.0)
        empty.note(site, round, 0.0)
    assert [event["event"] for event in lines(tmp_path / "record.jsonl")] == ["train"] * 5


def test_the_dice_of_empty_masks_is_the_share_of_empty_ones(open_site, toy):
    """Three images of two classes: of the six masks, one of the first class and two of the second are empty: 3/6."""
    site = open_site(network=toy)
    masks = torch.ones(3, 2, 4, 4)
    masks[0, 0] = masks[0, 1] = masks[2, 1] = 0
    masks[1, 0, 1:] = 0  # a single row is a structure
    site.validation = [{"mask": mask} for mask in masks]
    assert site.empty_dice == 0.5


def test_a_run_with_empty_masks_says_so_and_sends_no_more(tmp_path, tiny_root, plan_for, toy, monkeypatch, capsys):
    """A head with bias -30 and a small learning rate: every probability stays near e⁻³⁰, so every mask is empty.

    Seven rounds are scored when the next begins: rounds 1 to 6, of which the fifth brings the warning.
    """
    plain = NETWORKS[toy]

    def build(*arguments, **options):
        network = plain(*arguments, **options)
        torch.nn.init.constant_(network.head.bias, -30.0)
        return network

    monkeypatch.setitem(NETWORKS, toy, build)
    plan = plan_for(method="fedavg", network=toy, rounds=7, lr=1e-6)
    sites = drive(plan, tiny_root, tmp_path)
    progress = lines(tmp_path / "server" / "progress.jsonl")
    shares = {name: site.empty_dice for name, site in sites.items()}
    silent = [name for name, share in shares.items() if share > 0]
    warned = [event["site"] for event in progress if event["event"] == EMPTY]
    assert warned == [name for name in sites if name not in silent]
    assert warned, "a site whose validation images all have a lesion"
    for name, site in sites.items():
        (own,) = [event for event in lines(site.store.folder / "record.jsonl") if event["event"] == EMPTY]
        assert own["round"] == 5
        assert own["message"].startswith(f"site {name}: its masks stay empty: validation Dice {shares[name]:.3f} in 5 rounds")
    answers = [event for event in progress if event["event"] == "answer" and event["task"] == "train"]
    numbers = {"loss", "samples", "seconds", LOADING, STORING}
    assert {frozenset(event["scalars"]) for event in answers} == {
        frozenset(numbers),
        frozenset(numbers | {"dice", "iou", EVALUATING}),
    }
    Follower(plan, tuple(sites), tmp_path / "server" / "progress.jsonl").until(lambda: True)
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("warning: site") == len(warned)
    assert "--set loss=dice" in shown
