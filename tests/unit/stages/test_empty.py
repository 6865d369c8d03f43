"""Warnings of networks that find no structure, by Dice and IoU alone: at the server, in a site's log, and at a run's end."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from feddp.data.folder import SiteFolder
from feddp.networks import NETWORKS
from feddp.pages.run_page import report_in
from feddp.protocol import EVALUATING, FLAGS, LOADING, STORING
from feddp.run import session
from feddp.run.local import local
from feddp.run.session import Request
from feddp.stages import empty
from feddp.stages.empty import EMPTY, ROUNDS, remedy
from feddp.stages.message import Message
from feddp.training.metrics import measure
from feddp.training.store import Store

PLAN = SimpleNamespace(method="fedavg", training=SimpleNamespace(loss="dice_ce"), size=64)
REMEDY = "submit the job with --set loss=dice and, if structures are a few pixels thin, with a larger --size"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Server(SimpleNamespace):
    """Notes what it is told."""

    def __init__(self):
        super().__init__(plan=PLAN, memory=SimpleNamespace(empty={}), events=[], log=[])

    def progress(self, event, **metadata):
        self.events.append((event, metadata["site"]))

    def warn(self, message):
        self.log.append(message)


def scores(dice, share):
    """Dice and IoU where `share` of the masks is empty and found so, and the others' Dice are alike: share + (1 - share) d."""
    d = max(0.0, dice - share) / (1 - share) if share < 1 else 0.0
    return {"dice": dice, "iou": dice - (1 - share) * (d - d / (2 - d))}


def warned_after(*dice, share=0.0):
    """After how many rounds with these Dice of site A the server has warned, each time it did."""
    server, found = Server(), []
    for number, value in enumerate(dice, 1):
        empty.warn(
            server,
            {"A": Message(scalars={} if value is None else scores(value, share)), "B": Message(scalars=scores(0.5, 0.0))},
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
        ([0.0] * 4 + [0.002] + [0.0] * 4, []),  # not in a row
        ([0.0] * 4 + [0.002] + [0.0] * 5, [10]),
        ([0.0004] * 5, [5]),  # 0.000 where it leaves a site
        ([0.0006] * 5, []),  # 0.001, and IoU 0.000
        ([0.0] * 5 + [0.4] + [0.0] * 5, [5]),  # once for each site
        ([0.0] * 4 + [None] + [0.0], [6]),  # withheld: a round that nobody knows
    ],
)
def test_the_server_warns_after_five_rounds_in_a_row(dice, expected):
    assert ROUNDS == 5
    assert warned_after(*dice) == expected


class Marking(torch.nn.Module):
    """A network that marks the first `rows` rows of each image."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.weight = rows, torch.nn.Parameter(torch.zeros(1))

    def forward(self, images):
        logits = torch.full_like(images, -30.0)
        logits[:, :, : self.rows] = 30.0
        return logits


def drawn(*rows):
    """Images of 4 x 4 pixels whose masks mark so many first rows."""
    masks = [torch.zeros(1, 4, 4) for _ in rows]
    for mask, count in zip(masks, rows, strict=True):
        mask[:, :count] = 1
    return [{"image": torch.zeros(1, 4, 4), "mask": mask} for mask in masks]


class Alone:
    """A site with the log of its rounds, whose network marks so many rows of images with these masks."""

    name, plan = "A", PLAN

    def __init__(self, folder, training=(0, 1), validation=(0, 1), rows=0):
        self.store, self.network = Store(folder), Marking(rows)
        self.samples, self.validation = drawn(*training), drawn(*validation)

    def train(self, round, found):
        told = empty.note(self, round, found)
        self.store.record("train", round=round, phase=0, loss=1.0, **found)
        return told

    def warned(self):
        """Returns the rounds in which the log got its warning."""
        return [event["round"] for event in lines(self.store.folder / "record.jsonl") if event["event"] == EMPTY]


@pytest.mark.parametrize(
    ("share", "dice", "expected"),
    [
        (0.0, [0.0] * 9, [5]),
        (0.25, [0.25] * 9, [5]),  # a quarter of the images has no structure: empty masks have Dice 1 there
        (0.25, [0.25] * 2 + [0.0] * 3, [5]),  # something is drawn in the images without structures too
        (0.25, [0.25] * 4 + [0.26] + [0.25] * 5, [10]),
        (0.25, [0.2] * 9, [5]),
        (0.0, [0.2] * 9, []),  # a bad network finds something
        (0.0, [0.0] * 4 + [0.002] * 3, []),
        (1.0, [1.0] * 9, []),  # there is nothing to find
        (0.0, [0.9992] * 9, []),  # IoU 0.9984: nearly all is found
    ],
)
def test_site_and_server_warn_in_the_same_round_whatever_the_share_of_empty_masks(tmp_path, share, dice, expected):
    site = Alone(tmp_path)
    for round, value in enumerate(dice, 1):
        site.train(round, scores(value, share))
    assert site.warned() == warned_after(*dice, share=share) == expected


def test_a_repeated_round_counts_once(tmp_path):
    site = Alone(tmp_path)
    for round in (1, 2, 2, 3, 3):
        site.train(round, scores(0.0, 0.0))
    assert site.warned() == []


BLANK = "site A: all its training masks, or all by which rounds are selected, are {}: nothing is learnt or measured there; {}"
FOLDER = "check the folder there with `feddp data check`"
SEEN = "validation Dice 0.000 equals IoU in 5 rounds in a row"


@pytest.mark.parametrize(
    ("training", "validation", "rows", "when", "said"),
    [
        ((0, 0), (0, 0), 0, 1, BLANK.format("empty", f"{FOLDER}, and if its structures are small, raise --size (now 64)")),
        ((0, 0), (0, 0), 4, 1, BLANK.format("empty", f"{FOLDER}, and if its structures are small, raise --size (now 64)")),
        ((0, 0), (0, 1), 0, 1, BLANK.format("empty", f"{FOLDER}, and if its structures are small, raise --size (now 64)")),
        ((0, 1), (0, 0), 0, 1, BLANK.format("empty", f"{FOLDER}, and if its structures are small, raise --size (now 64)")),
        ((4, 4), (4, 4), 4, 1, BLANK.format("full", FOLDER)),
        ((4, 4), (0, 1), 0, 1, BLANK.format("full", FOLDER)),
        (
            (4, 0),
            (0, 1),
            4,
            5,
            f"site A: its network marks every pixel: {SEEN}; {FOLDER}, and then submit the job with more --rounds",
        ),
        (
            (0, 1),
            (0, 1),
            3,
            5,
            f"site A: its network marks pixels, and hardly one of a structure: {SEEN}; {FOLDER}, and then {REMEDY}",
        ),
        ((0, 1), (0, 1), 0, 5, f"site A: its network finds no structure: {SEEN}; {REMEDY}"),
    ],
)
def test_the_warning_names_what_the_site_tells_of_masks_and_of_the_network(tmp_path, training, validation, rows, when, said):
    """At once where masks are all empty or full, else after five rounds; once, at the site and at the server."""
    site, server = Alone(tmp_path, training, validation, rows), Server()
    for round in range(1, 10):
        told = site.train(round, scores(0.0, 0.0))
        empty.warn(server, {"A": Message(scalars=scores(0.0, 0.0) | told)})
        assert len(server.log) == (round >= when)
        assert told.keys() <= set(FLAGS)
    assert server.log == [said]
    (event,) = [event for event in lines(tmp_path / "record.jsonl") if event["event"] == EMPTY]
    assert (event["round"], event["message"]) == (when, said)


def test_full_masks_are_told_of_whatever_the_scores(tmp_path):
    site, server = Alone(tmp_path, (4, 4), (4, 4), 4), Server()
    empty.warn(server, {"A": Message(scalars=scores(1.0, 0.0) | site.train(1, scores(1.0, 0.0)))})
    assert server.log == [BLANK.format("full", FOLDER)]


def test_an_answer_that_is_asked_for_again_tells_the_same(tmp_path):
    site = Alone(tmp_path, rows=3)
    told = [site.train(round, scores(0.0, 0.0)) for round in (1, 2, 3, 4, 5, 5, 6)]
    wanted = {"marks_nothing": False, "marks_all": False}
    assert told == [{}, {}, {}, {}, wanted, wanted, {}]


def test_a_usual_site_tells_nothing(tmp_path):
    site = Alone(tmp_path, rows=1)
    assert [site.train(round, scores(0.5, 0.0)) for round in range(1, 8)] == [{}] * 7


def test_a_server_that_lacks_a_number_does_not_count_the_round():
    server = Server()
    for withheld in ({"iou": 0.0}, {"dice": 0.0}, {}):
        for _ in range(ROUNDS):
            empty.warn(server, {"A": Message(scalars=withheld)})
    assert server.events == []


def test_dice_and_iou_are_equal_where_nothing_is_found_and_nowhere_else(toy):
    """Two classes in three images, half of the six masks empty: an empty prediction has Dice and IoU 1/2. One that finds one
    pixel of a structure of two has Dice 2/3 and IoU 1/2 there, so 3.67/6 and 3.5/6."""
    masks = torch.zeros(3, 2, 4, 4)
    masks[0, 0, 0, :2] = masks[1, 1, 0, :2] = masks[2, 0, 0, :2] = 1
    nothing = torch.zeros(3, 2, 4, 4)
    one = nothing.clone()
    one[0, 0, 0, 0] = 1
    found = []
    for predicted in (nothing, one):
        rows = measure(predicted, masks, ("disc", "cup"))
        found.append({name: sum(row[name] for row in rows) / 3 for name in ("dice", "iou")})
    assert found == [{"dice": 0.5, "iou": 0.5}, pytest.approx({"dice": 11 / 18, "iou": 3.5 / 6})]
    assert [empty.finds_nothing(means) for means in found] == [True, False]


def draw(root, site, split, filled):
    """Gives the images of a site's split masks with a square, or without one."""
    folder = SiteFolder.open(root / site)
    for row, square in zip(folder.rows_of(split), filled, strict=True):
        mask = Image.new("L", (32, 32))
        mask.paste(int(square), (8, 8, 24, 24))
        mask.save(folder.path / "masks" / f"{row.image}.png")


def test_a_run_that_finds_nothing_says_so_on_the_screen_and_in_its_report(
    tmp_path, tiny_root, plan_for, toy, monkeypatch, capsys
):
    """A head with bias -30 and a small learning rate: every probability stays near e⁻³⁰, so every mask is empty. Of site-1's
    two validation and two test images, one shows no structure, so its Dice is 0.5; site-2's is 0.

    Seven rounds are scored when the next begins: rounds 1 to 6, of which the fifth brings the warning. Of equal rounds the
    first is selected.
    """
    plain = NETWORKS[toy]

    def build(*arguments, **options):
        network = plain(*arguments, **options)
        torch.nn.init.constant_(network.head.bias, -30.0)
        return network

    monkeypatch.setitem(NETWORKS, toy, build)
    shutil.copytree(tiny_root, tmp_path / "data")
    for split in ("val", "test"):
        draw(tmp_path / "data", "site-1", split, (False, True))
        draw(tmp_path / "data", "site-2", split, (True, True))
    plan, out = plan_for(method="fedavg", network=toy, rounds=7, lr=1e-6), tmp_path / "run"
    policies = {site: {"data": str(tmp_path / "data" / site), "seed": "plan"} for site in plan.sites}
    session.run(Request(plan, policies, out), local, "fedavg")
    shown, page = " ".join(capsys.readouterr().err.split()), report_in(out).read_text()
    table, log, progress = ((out / name).read_text() for name in ("results.md", "local.log", "progress.jsonl"))
    for site, dice in (("site-1", "0.500"), ("site-2", "0.000")):
        (own,) = [event for event in lines(out / "sites" / site / "record.jsonl") if event["event"] == EMPTY]
        assert own["round"] == 5
        said = f"site {site}: its network finds no structure: validation Dice {dice} equals IoU in 5 rounds in a row; {REMEDY}"
        assert own["message"] == said
        assert shown.count(f"warning: {said}") == page.count(f"warning: {said}") == log.count(said) == progress.count(said) == 1
    end = "these networks find no structure on the test images: their mean Dice (site-1 0.500, site-2 0.000) equals IoU"
    assert shown.count(f"warning: {end}") == table.count(f"**Warning**: {end}") == page.count(f"FedAvg, seed 0: {end}") == 1
    assert all("--set start=last takes the last." in text for text in (shown, table, page)), "round 1 of 7 is selected"
    answers = [json.loads(line) for line in progress.splitlines()]
    answers = [event for event in answers if event["event"] == "answer" and event["task"] == "train"]
    numbers = {"loss", "samples", "seconds", LOADING, STORING}
    assert {frozenset(event["scalars"]) for event in answers} == {
        frozenset(numbers),
        frozenset(numbers | {"dice", "iou", EVALUATING}),
    }


def results(round=None, **means):
    """results.json of sites with these Dice and IoU; `round`: each site's own best one."""
    own = {} if round is None else {"round": round}
    sites = {
        site: own | {"final": {"dice": {"mean": dice}, "iou": {"mean": iou}}, "before_calibration": {"dice": {"mean": 0.0}}}
        for site, (dice, iou) in means.items()
    }
    return {"method": "fedavg", "sites": sites, "start_round": None if round else 3, "rounds": 3}


def test_the_end_names_the_sites_whose_network_finds_nothing():
    found = results(B=(0.25, 0.25), C=(0.3, 0.2), A=(0.0, 0.0), D=(1.0, 1.0))
    text = "these networks find no structure on the test images: their mean Dice (A 0.000, B 0.250) equals IoU; "
    assert empty.at_the_end(found) == f"{text}{REMEDY}."
    assert empty.at_the_end(results(C=(0.3, 0.2))) == ""
    assert empty.at_the_end(found, "before_calibration") == "", "its IoU is not known"
    assert empty.at_the_end({"method": "fedavg", "sites": {"A": {"withheld": 5}}, "rounds": 3}) == ""
    assert "start=last" in empty.at_the_end(results(round=2, A=(0.0, 0.0)))
    assert "start=last" not in empty.at_the_end(results(round=3, A=(0.0, 0.0)))


@pytest.mark.parametrize(
    ("method", "loss", "change"),
    [
        ("fedavg", "dice_ce", "--set loss=dice"),
        ("fedavg", "dice", "--set loss=dice_ce or more --rounds"),
        ("virtual_class", "dice_ce", "more --rounds"),  # whose loss is its own
        ("virtual_class", "dice", "more --rounds"),
        ("of another package that is not installed here", "dice_ce", "--set loss=dice"),
    ],
)
def test_the_remedy_is_one_that_the_run_has_not_tried(method, loss, change):
    text = f"submit the job with {change} and, if structures are a few pixels thin, with a larger --size"
    assert remedy(method, loss) == text
    ended = results(A=(0.0, 0.0)) | {"method": method, "settings": {} if loss == "dice_ce" else {"loss": loss}}
    assert empty.at_the_end(ended).endswith(f"equals IoU; {text}.")
    server = Server()
    server.plan = SimpleNamespace(method=method, training=SimpleNamespace(loss=loss))
    for _ in range(ROUNDS):
        empty.warn(server, {"A": Message(scalars=scores(0.0, 0.0))})
    assert server.log[0].endswith(f"in a row; {text}")


def test_the_end_names_sites_whose_test_masks_are_empty_or_full():
    """Their scores count for nothing, and are no reason to change the loss."""
    found = results(A=(0.0, 0.0), B=(1.0, 1.0), C=(0.3, 0.2), D=(0.0, 0.0))
    found["sites"]["A"]["tests_empty"] = found["sites"]["B"]["tests_full"] = found["sites"]["D"]["tests_empty"] = True
    blank = (
        "all test masks of A, D are empty, so their scores say nothing: check the folder there with `feddp data check`;"
        " all test masks of B are full, so their scores say nothing: check the folder there with `feddp data check`"
    )
    assert empty.at_the_end(found) == f"{blank}."
    found["sites"]["C"]["final"] = {"dice": {"mean": 0.0}, "iou": {"mean": 0.0}}
    nothing = "these networks find no structure on the test images: their mean Dice (C 0.000) equals IoU"
    assert empty.at_the_end(found) == f"{blank}; {nothing}; {REMEDY}."


@pytest.mark.parametrize(("distance", "draws"), [(68.0, False), (67.5, False), (60.0, True), (0.7, True)])
def test_the_end_tells_a_network_that_marks_elsewhere_from_one_that_marks_nothing(distance, draws):
    """Of 64 x 64 pixels the diagonal is 90.5. A quarter of the masks is empty and found so: Dice and IoU are 0.25, and where
    nothing is marked the mean distance is 0.75 · 90.5 = 67.9. Marks in images with a structure make it shorter."""
    found = results(A=(0.25, 0.25)) | {"size": 64}
    found["sites"]["A"]["final"]["hd"] = {"mean": distance}
    text = "these networks mark pixels of the test images, and hardly one of a structure: mean Dice A 0.250"
    assert empty.at_the_end(found).startswith(text if draws else "these networks find no structure on the test images")
    assert empty.at_the_end(found).endswith(f"; {REMEDY}.")


def test_the_end_names_a_class_that_is_not_found():
    """A and D find the disc and no cup: means over the classes of 0.4 and 0.3. B finds neither, so its classes are not named.
    E withholds its means. That curves may show more is said of whole networks: no curve has a class of its own."""
    found = results(round=2, A=(0.4, 0.3), B=(0.0, 0.0), C=(0.7, 0.6), D=(0.4, 0.3))
    none = (0.0, 0.0)
    by_class = {"A": ((0.8, 0.6), none), "B": (none, none), "C": ((0.8, 0.7), (0.6, 0.5)), "D": ((0.8, 0.6), none)}
    for site, (disc, cup) in by_class.items():
        values = {"dice_disc": disc[0], "iou_disc": disc[1], "dice_optic_cup": cup[0], "iou_optic_cup": cup[1]}
        found["sites"][site]["final"] |= {name: {"mean": value} for name, value in values.items()}
    found["sites"]["E"] = {"withheld": 5}
    nothing = "these networks find no structure on the test images: their mean Dice (B 0.000) equals IoU"
    no_cup = (
        "these networks find no optic_cup on the test images, or draw it where no image shows it: their mean Dice of it"
        " (A 0.000, D 0.000) equals IoU"
    )
    assert empty.at_the_end(found).startswith(f"{nothing}; {no_cup}; {REMEDY}. An earlier round than the last was selected: ")
    del found["sites"]["B"]
    assert empty.at_the_end(found) == f"{no_cup}; if images show it, {REMEDY}."
