"""The verdict's words and numbers, derived by hand from tiny runs: four images a site, so that there are intervals."""

import json

import pytest

from feddp.errors import InputError
from feddp.pages.collected import collect, without_paths
from feddp.pages.verdict import BETTER, OPEN, WORSE, judge
from support.compare_runs import write_run

IMAGES = "abcdefgh"


def flat(**sites):
    """{site: Dice of every image}, eight images each."""
    return {site: {"start": dict.fromkeys(IMAGES, value)} for site, value in sites.items()}


@pytest.fixture
def judged(tmp_path):
    """The verdict of runs {method: Dice as `write_run` takes it}."""

    def make(**runs):
        folders = [write_run(tmp_path / name, dice, method=name.rstrip("_0123456789")) for name, dice in runs.items()]
        return judge(collect(folders))

    return make


def texts(verdict):
    return [finding.text for finding in verdict.findings]


def test_better_everywhere(judged):
    """70 and 60 against 65 and 40: +5 and +20, on average +12.5; all images of a site differ by the same, so each interval is
    the difference itself, above 0 at both. Against FedAvg 60 and 60: +10 and 0."""
    verdict = judged(local=flat(A=0.65, B=0.4), fedavg=flat(A=0.6, B=0.6), feddp=flat(A=0.7, B=0.6))
    first, second, worst = verdict.findings
    assert first.text == (
        "FedDP is better than Local Train: +12.5 points of Dice on average over 2 sites (95 % interval +12.5 to +12.5)."
    )
    assert first.tone == BETTER
    assert first.more[0] == "The mean is higher at 2 of 2 sites."
    assert first.more[1] == "Sites' own intervals: above 0 at 2, below 0 at 0, across 0 at 0."
    assert second.text.startswith("FedDP is better than FedAvg: +5.0 points")
    assert second.more[0] == "The mean is higher at 1 of 2 sites."
    assert worst.text == "The worst site of FedDP is B, with 60.0 % Dice."
    assert worst.more == ("That is 10.0 points below its best site.", "There, others have: Local Train 40.0 %, FedAvg 60.0 %.")
    assert verdict.missing == ()


def test_an_interval_around_zero_shows_nothing(judged):
    """Four images +10, four -10 points: the mean is 0, resamples are 20/8 Binomial(8, 1/2) - 10, from -7.5 to +7.5."""
    mixed = {"A": {"start": {image: 0.6 if image in "abcd" else 0.4 for image in IMAGES}}}
    verdict = judged(fedavg=flat(A=0.5), feddp=mixed)
    assert verdict.findings[0].tone == OPEN
    assert verdict.findings[0].text == (
        "FedDP is not shown to differ from FedAvg: 0.0 points of Dice on average over 1 site (95 % interval −7.5 to +7.5)."
    )


def test_worse(judged):
    finding = judged(local=flat(A=0.8), feddp=flat(A=0.7)).findings[0]
    assert finding.tone == WORSE
    assert finding.text.startswith("FedDP is worse than Local Train: −10.0 points of Dice on average over 1 site")


def test_sites_count_equally_however_many_images_they_have(judged):
    """A: 8 images of +10, B: 4 images of -20: (10 - 20)/2 = -5, not (80 - 80)/12 = 0."""
    few = {"start": dict.fromkeys("abcd", 0.5)}
    verdict = judged(fedavg=flat(A=0.6) | {"B": few}, feddp=flat(A=0.7) | {"B": {"start": dict.fromkeys("abcd", 0.3)}})
    assert verdict.findings[0].text.startswith("FedDP is worse than FedAvg: −5.0 points")


def test_without_the_sites_tables_there_is_no_interval(judged, tmp_path):
    """Two sites are too few to draw sites again; the sentence says why, and that it may be chance."""
    write_run(tmp_path / "one", flat(A=0.6, B=0.6), method="fedavg")
    write_run(tmp_path / "two", flat(A=0.7, B=0.65), method="feddp")
    (tmp_path / "two/sites/A/images.csv").unlink()
    finding = judge(collect([tmp_path / "one", tmp_path / "two"])).findings[0]
    assert finding.tone == OPEN
    assert finding.text.startswith("FedDP scores higher than FedAvg: +7.5 points of Dice on average over 2 sites (no interval:")
    assert finding.text.endswith("this may be chance.")
    assert finding.contrast.sites["B"].interval == pytest.approx((5, 5)), "B's table is here"
    assert finding.contrast.sites["A"].interval is None


def test_four_sites_without_tables_are_drawn_again(judged, tmp_path):
    """Differences 0, 0, 10, 10: resamples' means are 10/4 Binomial(4, 1/2); P(0) = 1/16 > 2.5 %, so from 0 to 10."""
    write_run(tmp_path / "one", flat(A=0.5, B=0.5, C=0.5, D=0.5), method="fedavg")
    write_run(tmp_path / "two", flat(A=0.5, B=0.5, C=0.6, D=0.6), method="feddp")
    for site in "ABCD":
        (tmp_path / f"two/sites/{site}/images.csv").unlink()
    finding = judge(collect([tmp_path / "one", tmp_path / "two"])).findings[0]
    assert "(95 % interval 0.0 to +10.0)" in finding.text
    assert finding.contrast.basis == "sites"


@pytest.mark.parametrize("word", ["withheld", "std_withheld"])
def test_what_a_site_withholds_is_not_read_from_its_table(tmp_path, word):
    write_run(tmp_path / "one", flat(A=0.6, B=0.6), method="fedavg")
    folder = write_run(tmp_path / "two", flat(A=0.7, B=0.65), method="feddp")
    results = json.loads((folder / "results.json").read_text())
    results["sites"]["A"][word] = 20
    if word == "withheld":
        del results["sites"]["A"]["final"], results["sites"]["A"]["before_calibration"]
    (folder / "results.json").write_text(json.dumps(results))
    found = judge(collect([tmp_path / "one", folder])).findings[0].contrast
    assert found.left_out == (("A",) if word == "withheld" else ())
    assert "A" not in found.sites or found.sites["A"].interval is None


def test_one_run_says_what_it_can_and_what_it_cannot(judged):
    """Before 50, after 60 at all images: +10. A is the worse site, 20 below B."""
    after = {
        s: {"start": dict.fromkeys(IMAGES, v - 0.1), "calibrated": dict.fromkeys(IMAGES, v)}
        for s, v in (("A", 0.6), ("B", 0.8))
    }
    verdict = judged(feddp=after)
    assert texts(verdict) == [
        "FedDP after the calibration is better than before it: +10.0 points of Dice on average over 2 sites"
        " (95 % interval +10.0 to +10.0).",
        "The worst site of FedDP is A, with 60.0 % Dice.",
    ]
    assert verdict.findings[1].more == ("That is 20.0 points below its best site.",)
    assert verdict.missing == (
        "Whether FedDP is better than training alone (Local Train) or one network for all sites (FedAvg) cannot be said from"
        " these runs.",
        "To find out: feddp compare --methods local,fedavg,feddp --data ROOT --out FOLDER",
    )


def test_another_local_stage_is_not_called_a_calibration(judged):
    tuned = {"A": {"start": dict.fromkeys(IMAGES, 0.5), "tuned": dict.fromkeys(IMAGES, 0.6)}}
    assert texts(judged(finetune=tuned))[0].startswith("finetune after the local stage is better than before it: +10.0 points")


def test_seeds_are_averaged_image_by_image_and_their_range_is_told(tmp_path):
    """FedDP 60 and 70, FedAvg 50 and 50 by seed: +15 on average, +10 to +20 by seed."""
    folders = [write_run(tmp_path / f"feddp{s}", flat(A=0.6 + 0.1 * s), seed=s) for s in (0, 1)]
    folders += [write_run(tmp_path / f"fedavg{s}", flat(A=0.5), method="fedavg", seed=s) for s in (0, 1)]
    collected = collect(folders)
    assert list(collected.methods) == ["FedDP", "FedAvg"]
    finding = judge(collected).findings[0]
    assert finding.text.startswith("FedDP is better than FedAvg: +15.0 points")
    assert "By seed, the average difference is +10.0 to +20.0." in finding.more


def test_runs_on_other_images_are_refused(judged):
    other = {"A": {"start": dict.fromkeys("abcdefgz", 0.5)}}
    with pytest.raises(InputError, match="A: the runs were tested on different images"):
        judged(fedavg=other, feddp=flat(A=0.7))


def test_the_plain_method_is_the_reference_not_its_variant(tmp_path):
    """Two plans of FedAvg: neither hides the other; each is called after its folder."""
    folders = [
        write_run(tmp_path / "a", flat(A=0.5), method="fedavg"),
        write_run(tmp_path / "b", flat(A=0.4), method="fedavg", rounds=9),
    ]
    assert list(collect(folders).methods) == ["FedAvg (a)", "FedAvg (b)"]
    with pytest.raises(InputError, match="one plan and one seed"):
        collect([folders[0], write_run(tmp_path / "c", flat(A=0.5), method="fedavg")])
    with pytest.raises(InputError, match="named twice"):
        collect([folders[0], folders[0]])


def test_a_message_loses_the_machines_folders():
    text = "site A: /home/eve/data/A/images/x.png is missing; log: /tmp/run 1/local.log (see https://x.org/a/b), 3/4 of it"
    assert without_paths(text) == "site A: …/x.png is missing; log: …/run 1/local.log (see https://x.org/a/b), 3/4 of it"
