"""The minimum size: what is measured over fewer images than a site's policy says stays there, and the run copes with that.

`tiny_root` has 8 images to train on, 2 to validate and 2, of one patient, to test.
"""

import csv
import json

import pytest
from rich.console import Console

from feddp import protocol
from feddp.flare import messages
from feddp.protocol import EVALUATING, PARTS
from feddp.reporting.page import table, write_markdown
from feddp.run.follow import Follower
from feddp.stages.train import adopt
from support.server import SITES, Run, good
from support.site import CELL, NUMBERS, SUMMARY, TABLES, bytes_of

CASES = {"dice": CELL, "iou": CELL}
VOLUMES = {"before_calibration": CASES, "final": CASES}
TUNED = {"loss": 0.5, "iou_before": 0.4, "iou": 0.5, "epoch": 1}

SECONDS = ("seconds", *PARTS)
KEPT = [name for name in SECONDS if name != EVALUATING]  # it grows with the number of images


@pytest.fixture
def hospital(hospital, plan_for, toy):
    """A FedDP job's process at a site of this minimum; `plan` is what else the job says."""
    return lambda min_images, **plan: hospital(plan=plan_for(network=toy, **plan), min_images=min_images)


@pytest.mark.parametrize(
    ("least", "task", "said", "kept"),
    [
        (2, "train", NUMBERS, NUMBERS),
        (3, "train", NUMBERS, {name: NUMBERS[name] for name in ("round", "phase", "loss", "samples", *KEPT)}),
        (8, "train", {"loss": 0.5, "samples": 8.0}, {"loss": 0.5, "samples": 8.0}),
        (9, "train", NUMBERS, {name: NUMBERS[name] for name in ("round", "phase", "samples", *KEPT)}),
        (3, "score", {"round": 2, "dice": 0.5, "iou": 0.4}, {"round": 2}),
        (3, "adopt", {"round": 2, "dice": 0.5, "iou": 0.4}, {"round": 2}),
        (2, "calibrate", TUNED, TUNED),
        (3, "calibrate", TUNED, {"loss": 0.5, "epoch": 1}),
        (9, "tune", TUNED, {"epoch": 1}),
        (2, "evaluate", TABLES, TABLES),
        (3, "evaluate", TABLES, {}),
        (2, "evaluate", TABLES | {"volumes": VOLUMES}, TABLES),  # two slices of one case
        (1, "evaluate", TABLES | {"volumes": VOLUMES}, TABLES | {"volumes": VOLUMES}),
        (9, "collect", {"consent": True}, {"consent": True}),
        (3, "adapt", {"images": 2, "seconds": 0.1, "empty_masks": 1, "scores": SUMMARY}, {"images": 2, "seconds": 0.1}),
        (2, "adapt", {"images": 2, "empty_masks": 1, "scores": SUMMARY}, {"images": 2, "empty_masks": 1, "scores": SUMMARY}),
    ],
)
def test_means_over_too_few_images_stay(hospital, least, task, said, kept):
    """Counts of images may leave; of means, those over `min_images` or more. The rest is one word, and an audit line."""
    site = hospital(least)
    withheld = {} if kept == said else {"withheld": least}
    assert site.sends(task, messages.pack(**said)) == ({}, kept | withheld)
    assert len(site.audited()) == len(withheld)
    if withheld:
        names = ", ".join(sorted(said.keys() - kept.keys()))
        expected = f"[A:{task}#?][egress guard withheld {names}: measured over fewer than {least} images or cases]"
        assert site.audited()[0].endswith(expected)


def test_the_minimum_is_five_unless_a_policy_says(hospital):
    site = hospital(1)
    del site.policy["min_images"]
    site.submitted(site.plan)
    assert site.sends("score", messages.pack(dice=0.5)) == ({}, {"withheld": 5})


def test_the_split_that_chooses_is_counted(hospital, tiny_root, tmp_path):
    """With `selection=test` the scores are the test images': four of them here, and two to validate."""
    root = tmp_path / "site"
    root.mkdir()
    (root / "dataset.json").write_text((tiny_root / "site-1/dataset.json").read_text())
    lines = (tiny_root / "site-1/split.csv").read_text().splitlines()
    header, rows = lines[0], [line.rsplit(",", 1) for line in lines[1:]]
    patients = sorted({row[0].split(",")[1] for row in rows if row[1] == "train"})[:1]
    moved = [f"{row[0]},{'test' if row[0].split(',')[1] in patients else row[1]}" for row in rows]
    (root / "split.csv").write_text("\n".join([header, *moved]) + "\n")
    for selection, kept in (("test", {"dice": 0.5}), ("val", {"withheld": 4})):
        site = hospital(4, selection=selection)
        site.policy["data"] = str(root)
        site.submitted(site.plan)
        assert site.sends("score", messages.pack(dice=0.5)) == ({}, kept)


@pytest.mark.parametrize(("least", "kept"), [(10, {"loss": 0.5}), (11, {"withheld": 11})])
def test_the_validation_images_that_are_trained_on_are_counted(hospital, least, kept):
    """With `selection=test`, 8 and 2 images are trained on; batches of 5 leave none out."""
    assert hospital(least, selection="test", batch=5).sends("train", messages.pack(loss=0.5)) == ({}, kept)


@pytest.mark.parametrize(("batch", "kept"), [(8, ["loss"]), (7, ["withheld"]), (1, ["loss"])])
def test_a_loss_is_of_the_images_that_its_batches_hold(hospital, batch, kept):
    """With 8 images and batches of 7 every round leaves another one out: a mean over 7."""
    assert list(hospital(8, batch=batch).sends("train", messages.pack(loss=0.5))[1]) == kept


@pytest.mark.parametrize("where", ["final", "peers"])
def test_a_table_that_says_so_itself_is_withheld(hospital, where):
    """One cell over one image, in a folder of two: none of the tables leaves."""
    few = SUMMARY | {"assd": CELL | {"n": 1}}
    said = TABLES | {where: {"site-2": few} if where == "peers" else few}
    assert hospital(2).sends("evaluate", messages.pack(**said)) == ({}, {"withheld": 2})


def test_a_table_cannot_claim_more_images_than_there_are(hospital):
    many = dict.fromkeys(SUMMARY, CELL | {"n": 1000})
    said = TABLES | {"before_calibration": many, "final": many, "peers": {}}
    assert hospital(3).sends("evaluate", messages.pack(**said)) == ({}, {"withheld": 3})


@pytest.mark.parametrize("least", [2, 3])
def test_the_values_of_images_are_at_home_and_nowhere_else(hospital, least):
    """The site's evaluation through its guard: images.csv has every test image, what is sent has none."""
    site = hospital(least)
    shared = site.shared
    adopt(site.open(), shared, 2)
    answer = site.executed(protocol.EVALUATE)
    tensors, said = site.sends(protocol.EVALUATE, answer)
    with open(site.store.folder / "images.csv", newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 2
    sent = bytes_of(messages.pack(tensors, **said))
    assert not any(row["image"].encode() in sent for row in rows)
    if least == 2:
        mean = sum(float(row["dice"]) for row in rows) / 2
        assert said["final"]["dice"]["mean"] == pytest.approx(mean)
    else:
        assert said == {"withheld": 3}


def test_a_site_trains_on_while_its_scores_stay(hospital):
    """The executor's own answers pass, a round after the other, without the scores of the second."""
    site = hospital(5)
    shared = site.shared
    for round in range(2):
        answer = site.executed(protocol.TRAIN, shared, round=round, phase=0)
        shared, said = site.sends(protocol.TRAIN, answer)
        assert set(said) == {"round", "phase", "loss", "samples", *KEPT} | ({"withheld"} if round else set())


# --- the server ---------------------------------------------------------------------------------------------------------------


def withholding(*quiet, **ious):
    """Sites of which those in `quiet` withhold what they measure, as the guard leaves it."""

    def answer(site, task, tensors, scalars):
        if task == "collect":
            return messages.pack(consent=False)
        if task == "calibrate":
            made = messages.pack(**TUNED)
        else:
            made = good(site, task, tensors, scalars, ious={round: value for round, value in enumerate(ious.get(site, ()))})
        if site not in quiet:
            return made
        sent, said = messages.unpack(made)
        few = {"dice", "iou", "iou_before", "before_calibration", "final", "peers"}
        kept = {name: value for name, value in said.items() if name not in few}
        return messages.pack(sent, **kept, **({"withheld": 5} if kept != said else {}))

    return answer


def test_a_site_that_withholds_is_in_the_results_without_numbers(tmp_path, plan_for, capsys):
    """B withholds. A's and C's IoU choose the round: (0.2 + 0.4)/2 after round 1, (0.3 + 0.2)/2 after round 2, so it is 1."""
    plan = plan_for(start="best", rounds=2, sites=SITES)
    answer = withholding("B", A=(0, 0.2, 0.3), C=(0, 0.4, 0.2))
    run = Run(tmp_path, plan, SITES, answer).run("train", "calibrate", "evaluate")
    assert run.panics == []
    assert run.progress("refused") == []
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["start_round"], results["best_round"], results["missing"]) == (1, 1, {})
    assert set(results["sites"]["B"]) == {"withheld", "calibration"}
    assert results["sites"]["B"]["withheld"] == 5
    assert "withheld" not in results["sites"]["A"]
    assert results["average"]["final"]["dice"] == {"mean": 0.5, "std": 0.0, "n": 2}
    text = write_markdown(results)
    (dice,) = [line for line in text.splitlines() if line.startswith("| before |")]
    assert dice.startswith("| before | 50.00 ± 0.00 | withheld | 50.00 ± 0.00 | 50.00 ± 0.00 |")
    said = "B: its policy withholds what is measured over fewer than 5 test images or cases."
    assert said in text.splitlines()
    Console(width=120).print(table(results))
    shown = capsys.readouterr().out
    assert said in " ".join(shown.split())
    assert len([line for line in shown.splitlines() if "withheld" in line and "B" in line]) == 1
    Follower(plan, SITES, tmp_path / "progress.jsonl").until(lambda: True)
    shown = capsys.readouterr().err
    assert "round 1 validation Dice: A 0.500  C 0.500" in shown
    assert "calibrate B: validation IoU withheld -> withheld, best epoch 1" in shown


def test_where_all_withhold_the_last_round_goes_on(tmp_path, plan_for, capsys):
    plan = plan_for(start="last", rounds=2)
    run = Run(tmp_path, plan, SITES, withholding(*SITES)).run("train", "calibrate", "evaluate")
    assert run.panics == []
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["start_round"], results["best_round"]) == (2, None)
    assert results["average"] == {}
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["shared_latest.safetensors"]
    assert "| final | withheld | withheld | withheld | withheld |" in write_markdown(results)
    Console(width=120).print(table(results))
    Follower(plan, SITES, tmp_path / "progress.jsonl").until(lambda: True)
    assert "validation Dice" not in capsys.readouterr().err


def test_where_all_withhold_no_round_is_the_best(tmp_path, plan_for):
    """FedAvg hands on its best round. Its first scores would come with the second round's answers: it ends there, of four."""
    plan = plan_for(method="fedavg", rounds=4)
    run = Run(tmp_path, plan, SITES, withholding(*SITES)).run("train")
    (reason,) = run.panics
    assert reason.startswith("no site sends its validation IoU")
    assert "--set start=last" in reason
    assert [task for task, _, _ in run.sent] == ["train", "train"]


def test_volumes_are_averaged_over_the_sites_that_sent_them(tmp_path, plan_for, capsys):
    """B has four cases, too few, and twenty images: its images' means are there, its cases' are not."""

    def answer(site, task, tensors, scalars):
        made = good(site, task, tensors, scalars)
        if task != "evaluate":
            return made
        return messages.pack(**messages.unpack(made)[1], **({"withheld": 5} if site == "B" else {"volumes": VOLUMES}))

    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, answer).run("train", "evaluate")
    results = json.loads((tmp_path / "results.json").read_text())
    assert run.panics == []
    assert results["average"]["volumes"]["final"]["dice"]["n"] == 2
    assert results["average"]["final"]["dice"]["n"] == 3
    by_case = write_markdown(results).split("By case")[1]
    assert "| final | 50.00 ± 10.00 | withheld | 50.00 ± 10.00 |" in by_case


@pytest.mark.parametrize("said", [{"withheld": "many"}, {"withheld": 5, "samples": 10.0}, {}])
def test_only_a_means_place_is_taken_by_the_word(tmp_path, plan_for, said):
    """B's first answer lacks its loss and its seconds, or says a word for the number: it does not count."""

    def answer(site, task, tensors, scalars):
        made = good(site, task, tensors, scalars)
        if (site, task) != ("B", "train"):
            return made
        return messages.pack(messages.unpack(made)[0], round=scalars["round"], phase=0, **said)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, answer).run("train")
    assert [event["site"] for event in run.progress("refused")] == ["B"]
