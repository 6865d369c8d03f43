"""The verdict's words and numbers, derived by hand from tiny runs: eight images a site, so that there are intervals."""

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
        "FedDP is better than Local Train: +12.5 points of Dice on average over 2 sites"
        " (95 % interval over images +12.5 to +12.5)."
    )
    assert first.tone == BETTER
    assert first.more[0] == "The mean is higher at 2 of 2 sites."
    assert first.more[1] == "Sites' own intervals: above 0 at 2, below 0 at 0, with 0 at 0."
    assert second.text.startswith("FedDP is better than FedAvg: +5.0 points")
    assert second.more[0] == "The mean is higher at 1 of 2 sites and equal at 1."
    assert worst.text == "The worst site of FedDP is B, with 60.0 % Dice."
    assert worst.more == ("That is 10.0 points below its best site.", "There, others have: Local Train 40.0 %, FedAvg 60.0 %.")
    assert verdict.missing == ()


def test_an_interval_around_zero_shows_nothing(judged):
    """Four images +10, four -10 points: the mean is 0, resamples are 20/8 Binomial(8, 1/2) - 10, from -7.5 to +7.5."""
    mixed = {"A": {"start": {image: 0.6 if image in "abcd" else 0.4 for image in IMAGES}}}
    verdict = judged(fedavg=flat(A=0.5), feddp=mixed)
    assert verdict.findings[0].tone == OPEN
    assert verdict.findings[0].text == (
        "FedDP is not shown to differ from FedAvg: 0.0 points of Dice at A, the only site with a result of both"
        " (95 % interval over images −7.5 to +7.5)."
    )


def test_worse(judged):
    finding = judged(local=flat(A=0.8), feddp=flat(A=0.7)).findings[0]
    assert finding.tone == WORSE
    assert finding.text.startswith("FedDP is worse than Local Train: −10.0 points of Dice at A, the only site")
    assert finding.more == (), "of one site, its interval is the average's"


def test_sites_count_equally_however_many_images_they_have(judged):
    """A: 8 images of +10, B: 6 images of -20: (10 - 20)/2 = -5, not (80 - 120)/14 = -2.9."""
    few = {"start": dict.fromkeys("abcdef", 0.5)}
    verdict = judged(fedavg=flat(A=0.6) | {"B": few}, feddp=flat(A=0.7) | {"B": {"start": dict.fromkeys("abcdef", 0.3)}})
    assert verdict.findings[0].text.startswith("FedDP is worse than FedAvg: −5.0 points")


def test_without_the_sites_tables_there_is_no_interval(judged, tmp_path):
    """Two sites are too few for an interval over sites; the sentence says why, and that it may be chance. C is not left out in
    silence."""
    write_run(tmp_path / "one", flat(A=0.6, B=0.6, C=0.5), method="fedavg")
    write_run(tmp_path / "two", flat(A=0.7, B=0.65), method="feddp")
    (tmp_path / "two/sites/A/images.csv").unlink()
    verdict = judge(collect([tmp_path / "one", tmp_path / "two"]))
    finding = verdict.findings[0]
    assert verdict.scope[1] == (
        "An interval needs 3 sites, or 6 images at each site, whose values are on this machine and not withheld."
    )
    assert finding.tone == OPEN
    assert finding.text == (
        "FedDP scores higher than FedAvg: +7.5 points of Dice on average over 2 sites. There is no interval, so this may be"
        " chance."
    )
    assert finding.more[-1] == "Left out, because only one of the two has a result there: C."
    assert finding.contrast.sites["B"].interval == pytest.approx((5, 5)), "B's table is here"
    assert finding.contrast.sites["A"].interval is None


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        (
            (0, 0, 10, 10),
            "is not shown to differ from FedAvg: +5.0 points of Dice on average over 4 sites"
            " (95 % interval over sites −4.2 to +14.2)",
        ),
        (
            (6, 6, 14, 14),
            "is better than FedAvg: +10.0 points of Dice on average over 4 sites (95 % interval over sites +2.7 to +17.3)",
        ),
        (
            (1, 1, 1, 29),
            "is not shown to differ from FedAvg: +8.0 points of Dice on average over 4 sites"
            " (95 % interval over sites −14.3 to +30.3)",
        ),
    ],
)
def test_four_sites_without_tables_have_students_interval(tmp_path, differences, text):
    """t(0.975; 3) = 3.1824. The sums of squares around the means 5, 10 and 8 are 100, 64 and 588, so s/√4 is √(100/3)/2 =
    2.887, 2.309 and 7; 3.1824 times these: 9.19, 7.35 and 22.28. In the last case all are positive, which chance gives
    in 1 of 8 (all of one sign): no proof."""
    write_run(tmp_path / "one", flat(A=0.5, B=0.5, C=0.5, D=0.5), method="fedavg")
    higher = {site: 0.5 + d / 100 for site, d in zip("ABCD", differences, strict=True)}
    write_run(tmp_path / "two", flat(**higher), method="feddp")
    for site in "ABCD":
        (tmp_path / f"two/sites/{site}/images.csv").unlink()
    verdict = judge(collect([tmp_path / "one", tmp_path / "two"]))
    finding = verdict.findings[0]
    assert text in finding.text
    assert finding.contrast.basis == "sites"
    assert any("are Student's" in line for line in verdict.scope)


def comparison(folder, runs, patients):
    """A comparison's folder of runs {variant: Dice as `write_run` takes it}, of the local stage if there are two networks."""
    results = {}
    for number, (variant, dice) in enumerate(runs.items()):
        write_run(folder / str(number), dice, method=variant.partition("@")[0])
        results[variant] = {"folders": {"0": str(number)}, "failed": {}}
    content = {"methods": [*runs], "studies": [], "results": results, "failed": {}, "tables": [], "patients": patients}
    (folder / "comparison.json").write_text(json.dumps(content))
    return judge(collect([folder]))


def test_two_images_of_a_patient_are_one_observation(tmp_path):
    """Three patients with two images each, at both sites; only the third gains, 30 points. Of three patients two are drawn: 0,
    15 or 30 points with 4, 4 and 1 of 9. The mean of both sites is 0 in 16 of 81 draws, more than 2.5 %, and 30 in 1 of 81,
    fewer, so the percentiles are 0 and 22.5. The mean is 10, t(0.975; 4) / z = 2.7764 / 1.9600 = 1.4166:
    10 − 14.17 = −4.2 and 10 + 1.4166 · 12.5 = 27.7. As twelve images, six at a site: all six are without a gain in (2/3)⁶ =
    8.8 % of the draws of a site and in 0.8 % of both, so that interval lies above 0."""
    few = "abcdef"
    gain = {site: {"start": {i: 0.8 if i in "ef" else 0.5 for i in few}} for site in "AB"}
    runs = {"fedavg": {site: {"start": dict.fromkeys(few, 0.5)} for site in "AB"}, "feddp": gain}
    of = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}
    verdict = comparison(tmp_path, runs, {"A": of, "B": of})
    finding = verdict.findings[0]
    assert finding.tone == OPEN
    assert finding.text == (
        "FedDP is not shown to differ from FedAvg: +10.0 points of Dice on average over 2 sites"
        " (95 % interval over patients −4.2 to +27.7)."
    )
    assert finding.more == ("The mean is higher at 2 of 2 sites.",), "three patients are too few for a site's own interval"
    assert verdict.scope[0].startswith("Intervals over patients are of 4000 draws")
    (tmp_path / "images").mkdir()
    assert comparison(tmp_path / "images", runs, {"A": of}).findings[0].tone == BETTER, "of B no patients are known"


@pytest.mark.parametrize("patients", [{"A": 1}, {"A": {"a": "Mary"}}, {"A": {"a": -1}}, [1]])
def test_a_comparison_with_wrong_patients_is_refused(tmp_path, patients):
    with pytest.raises(InputError, match="comparison.json is damaged"):
        comparison(tmp_path, {"fedavg": flat(A=0.5), "feddp": flat(A=0.6)}, patients)


def test_feddp_is_compared_with_fedavg_of_the_same_choice_of_round(tmp_path):
    """FedDP goes on from the last round: 60 against 40 in FedAvg's last round, not against 70 in its best. Without the last
    round's row it is compared with the best, and the page says what to add."""
    dp = {"A": {"start": dict.fromkeys(IMAGES, 0.5), "calibrated": dict.fromkeys(IMAGES, 0.6)}}
    tuned = {"A": {"start": dict.fromkeys(IMAGES, 0.4), "tuned": dict.fromkeys(IMAGES, 0.45)}}
    best = flat(A=0.7)
    (tmp_path / "fair").mkdir()
    fair = comparison(tmp_path / "fair", {"fedavg": best, "finetune@when=before": tuned, "feddp": dp}, {})
    assert fair.findings[0].text.startswith("FedDP is better than FedAvg's last round: +20.0 points")
    assert fair.findings[0].more[-1] == (
        "Before the calibration, in which its networks train further, the difference is +10.0 points"
        " (95 % interval over images +10.0 to +10.0)."
    )
    assert not any("different rounds" in line for line in fair.scope)
    (tmp_path / "uneven").mkdir()
    uneven = comparison(tmp_path / "uneven", {"fedavg": best, "feddp": dp}, {})
    assert uneven.findings[0].text.startswith("FedDP is worse than FedAvg: −10.0 points")
    assert "FedAvg's last round is finetune@when=before: name it in --methods of `feddp compare`." in uneven.scope
    folders = [
        write_run(tmp_path / "dp", dp),
        write_run(tmp_path / "best", best, method="fedavg"),
        write_run(tmp_path / "last", flat(A=0.4), method="fedavg", settings={"start": "last"}),
    ]
    assert judge(collect(folders)).findings[0].text.startswith("FedDP is better than FedAvg (last): +20.0 points")
    folders[0] = write_run(tmp_path / "bn", flat(A=0.8), method="fedbn")
    assert judge(collect(folders)).findings[0].text.startswith("fedbn is better than FedAvg (best): +10.0 points")


def test_finetune_is_judged_not_its_rounds_which_are_fedavg_s(tmp_path):
    """FineTune 45 against 40 in the last round, its own before its tuning."""
    tuned = {"A": {"start": dict.fromkeys(IMAGES, 0.4), "tuned": dict.fromkeys(IMAGES, 0.45)}}
    verdict = comparison(tmp_path, {"finetune@when=before": tuned, "finetune": tuned, "local": flat(A=0.3)}, {})
    assert verdict.subject.label == "finetune"
    assert verdict.findings[1].text.startswith("finetune is better than FedAvg's last round: +5.0 points")


def test_a_variant_of_fedavg_does_not_replace_it(tmp_path):
    """FedAvg with another loss and the last round, as FedDP has, is another method: the tables do not take it either."""
    dp = {"A": {"start": dict.fromkeys(IMAGES, 0.5), "calibrated": dict.fromkeys(IMAGES, 0.6)}}
    other = "fedavg@loss=dice@start=last"
    found = comparison(tmp_path, {other: flat(A=0.1), "fedavg": flat(A=0.5), "feddp": dp}, {})
    assert found.findings[0].text.startswith("FedDP is better than FedAvg: +10.0 points")


def test_sites_own_intervals_are_told_where_the_average_s_is_over_sites(tmp_path):
    """C has the one patient, so the average is over the sites: 10 at each of three, s = 0. A and B have six patients each."""
    of = {image: number % 6 for number, image in enumerate(IMAGES)}
    runs = {"fedavg": flat(A=0.5, B=0.5, C=0.5), "feddp": flat(A=0.6, B=0.6, C=0.6)}
    verdict = comparison(tmp_path, runs, {"A": of, "B": of, "C": dict.fromkeys(IMAGES, 0)})
    assert "(95 % interval over sites +10.0 to +10.0)" in verdict.findings[0].text
    assert "Sites' own intervals: above 0 at 2, below 0 at 0, with 0 at 0; none at 1, with too few patients." in (
        verdict.findings[0].more
    )
    assert [line.split(" are ")[0] for line in verdict.scope[:2]] == ["Intervals over patients", "Intervals over sites"]


def test_too_few_patients_are_told_as_such(tmp_path):
    of = {image: number % 2 for number, image in enumerate(IMAGES)}
    verdict = comparison(tmp_path, {"fedavg": flat(A=0.5, B=0.5), "feddp": flat(A=0.6, B=0.6)}, {"A": of, "B": of})
    assert "There is no interval, so this may be chance." in verdict.findings[0].text
    assert verdict.scope[0].startswith("An interval needs 3 sites, or 6 test patients, two of them at each site, whose values")


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
        " (95 % interval over images +10.0 to +10.0).",
        "The worst site of FedDP is A, with 60.0 % Dice.",
    ]
    assert verdict.findings[1].more == ("That is 20.0 points below its best site.",)
    assert verdict.missing == (
        "Whether FedDP is better than training alone (Local Train) or one network for all sites (FedAvg) cannot be said from"
        " these runs.",
    )
    assert verdict.command == "feddp compare --methods local,fedavg,finetune@when=before,feddp --data ROOT --out FOLDER"


def test_what_the_longer_training_of_the_last_stage_adds_is_told(judged):
    """FedDP 50 after the rounds and 70 after the calibration, FedAvg 60: +10, of which the rounds are -10."""
    calibrated = {"A": {"start": dict.fromkeys(IMAGES, 0.5), "calibrated": dict.fromkeys(IMAGES, 0.7)}}
    finding = judged(fedavg=flat(A=0.6), feddp=calibrated).findings[0]
    assert finding.text.startswith("FedDP is better than FedAvg: +10.0 points")
    assert finding.more[-1] == (
        "Before the calibration, in which its networks train further, the difference is −10.0 points"
        " (95 % interval over images −10.0 to −10.0)."
    )
    assert judged(local=flat(A=0.6), fedbn=flat(A=0.7)).findings[0].more == (), "no later stage"


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


def test_runs_of_two_versions_that_train_differently_are_no_seeds_of_one_method(tmp_path):
    former = write_run(tmp_path / "former", flat(A=0.6), behaviour=2)
    assert list(collect([former, write_run(tmp_path / "same", flat(A=0.7), seed=1, behaviour=2)]).methods) == ["FedDP"]
    later = write_run(tmp_path / "later", flat(A=0.7), seed=1, behaviour=3)
    assert list(collect([former, later]).methods) == ["FedDP (former)", "FedDP (later)"]


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


def test_the_mean_is_the_images_not_the_rounded_one(tmp_path):
    """Sites with guards round means to three decimals: here 60.04 and 60.0 became 60.0. The images say +0.04, at both."""
    write_run(tmp_path / "one", flat(A=0.6, B=0.6), method="fedavg")
    folder = write_run(tmp_path / "two", flat(A=0.6004, B=0.6004), method="feddp")
    path = folder / "results.json"
    path.write_text(path.read_text().replace("0.6004", "0.6"))
    finding = judge(collect([tmp_path / "one", folder])).findings[0]
    assert finding.text.startswith("FedDP is better than FedAvg: +0.04 points")
    assert "(95 % interval over images +0.04 to +0.04)" in finding.text


def test_what_is_shown_as_equal_is_not_called_higher(judged):
    """At A +0.001 points, which no text shows, at B +10, at C the same."""
    verdict = judged(fedavg=flat(A=0.6, B=0.5, C=0.5), feddp=flat(A=0.60001, B=0.6, C=0.5))
    assert verdict.findings[0].more[:2] == (
        "The mean is higher at 1 of 3 sites and equal at 2.",
        "Sites' own intervals: above 0 at 1, below 0 at 0, with 0 at 2.",
    )
    same = judged(local=flat(A=0.5, B=0.5), fedbn=flat(A=0.5, B=0.5)).findings[0]
    assert same.text.startswith("fedbn is not shown to differ from Local Train: 0.0 points of Dice on average over 2 sites")


def test_the_personal_method_is_judged_not_one_global_network(judged):
    """FedProx shares all; FedBN keeps its normalisation; FedDP comes first wherever it stands, twice too."""
    half, more = flat(A=0.5, B=0.5), flat(A=0.6, B=0.6)
    assert judged(fedavg=half, fedprox=half, fedbn=more, ditto=more).subject.label == "fedbn"
    assert judged(local_2=half, fedbn_2=half, feddp_1=half).subject.label == "FedDP"


def test_two_plans_of_feddp_come_before_another_method(tmp_path):
    folders = [write_run(tmp_path / "bn", flat(A=0.5), method="fedbn")]
    folders += [write_run(tmp_path / f"dp{n}", flat(A=0.5), rounds=n) for n in (4, 5)]
    assert judge(collect(folders)).subject.label == "FedDP (dp4)"


def test_uneven_comparisons_say_so(tmp_path):
    """Other seeds, rounds and sizes; and a reference whose rounds were chosen on the test images."""
    folders = [write_run(tmp_path / f"dp{s}", flat(A=0.6, B=0.6), seed=s) for s in (0, 1, 2)]
    folders.append(write_run(tmp_path / "avg", flat(A=0.5, B=0.5), "test", method="fedavg", rounds=9, size=64))
    verdict = judge(collect(folders))
    assert "The seeds differ: FedDP has 0, 1, 2; FedAvg has 0." in verdict.findings[0].more
    assert "These runs differ in rounds (FedDP: 3, FedAvg: 9), so a difference may come from that." in verdict.scope
    assert "These runs differ in size (FedDP: 32, FedAvg: 64), so a difference may come from that." in verdict.scope
    assert not any("differ in lr" in sentence for sentence in verdict.scope)
    assert "Optimistic: rounds and epochs were chosen on the test images (selection=test)." in verdict.scope
    assert not any("One seed" in line for line in verdict.scope)


def test_other_settings_of_the_training_say_so(tmp_path):
    """What is given to one run alone. Settings of a method's own are part of the method."""
    given = {"lr": 0.1, "largest_component": True, "lambda": 0.5}
    folders = [
        write_run(tmp_path / "dp", flat(A=0.6, B=0.6), settings=given),
        write_run(tmp_path / "avg", flat(A=0.5, B=0.5), method="fedavg"),
    ]
    scope = judge(collect(folders)).scope
    assert "These runs differ in lr (FedDP: 0.1, FedAvg: default), so a difference may come from that." in scope
    assert "These runs differ in largest_component (FedDP: True, FedAvg: default), so a difference may come from that." in scope
    assert not any("lambda" in sentence for sentence in scope)


@pytest.mark.parametrize("even", [False, True])
def test_a_best_round_beside_a_last_one_is_said(tmp_path, even):
    """A method with a local stage goes on from the last round, FedAvg ends with its best unless it is told otherwise."""
    folders = [write_run(tmp_path / "dp", flat(A=0.6), method="feddp", stages=["train", "calibrate"])]
    folders.append(write_run(tmp_path / "avg", flat(A=0.5), method="fedavg", settings={"start": "last"} if even else {}))
    said = [line for line in judge(collect(folders)).scope if "of different rounds (FedDP: last, FedAvg: best)" in line]
    assert len(said) == 1 - even


def test_the_worst_site(judged):
    """One site has no rank; of equal ones all are named; a site whose result one seed lacks is named as such."""
    assert texts(judged(fedavg=flat(A=0.5))) == ["At A, its only site with a result, FedAvg has 50.0 % Dice."]
    assert texts(judged(fedavg_1=flat(A=0.5, B=0.5004)))[-1] == "At all 2 sites FedAvg has 50.0 % Dice."
    tied = judged(fedavg_2=flat(A=0.5, B=0.5, C=0.7)).findings[-1]
    assert tied.text == "The worst sites of FedAvg are A, B, with 50.0 % Dice each."
    assert tied.more == ("That is 20.0 points below its best site.",)


def test_a_site_without_a_result_is_named(tmp_path):
    folder = write_run(tmp_path / "run", flat(A=0.5, B=0.6), missing={"C": "site C was lost at train"})
    assert judge(collect([folder])).scope[-1] == ("Without a result of FedDP in every run: C. Who took part, below, says why.")


def test_methods_without_a_common_site_are_not_compared(judged):
    verdict = judged(fedavg=flat(A=0.5), feddp=flat(B=0.5))
    assert verdict.missing[0] == "No site has a result of both FedDP and FedAvg."
    assert verdict.missing[1].startswith("Whether FedDP is better than training alone (Local Train) cannot be said")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_table_with_a_number_that_is_none_is_refused(tmp_path, value):
    folder = write_run(tmp_path / "run", flat(A=0.5))
    path = folder / "sites/A/images.csv"
    path.write_text(path.read_text().replace("start,a,0.5", f"start,a,{value}"))
    with pytest.raises(InputError, match="images.csv is no table of images"):
        judge(collect([write_run(tmp_path / "other", flat(A=0.5), method="fedavg"), folder]))
