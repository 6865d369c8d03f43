"""`feddp export --to card`: what is known of a run, in CHAI's entries, and nothing that is not known."""

import json
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given

from feddp.cli.export import Format
from feddp.errors import InputError
from feddp.export import FORMATS
from feddp.export.bundle import metadata
from feddp.export.card import NAMESPACE, applied, write
from feddp.export.facts import Facts, interval
from feddp.files import NETWORK, RECORD, RESULTS, TIME, append_event, write_json
from feddp.networks import build
from feddp.networks.weights import save_network
from feddp.protocol import STD_WITHHELD, VOLUMES, WHEN, WITHHELD
from feddp.stages.results import gathered
from feddp.training.columns import METRICS
from support.fuzz import cases, changed, tried

# v0.2/schema.xsd of github.com/coalition-for-health-ai/mc-schema, commit 1c77360: each entry that must be there, in its order.
# The file itself is not in this repository; the XML was validated against it by hand with lxml (docs/how-to/take-home.md)
METRIC = ("MetricGoal", "Results", "Interpretation", "TestType", "TestingDataDescription", "ValidationProcessAndJustification")
REQUIRED = {
    "BasicInfo": ("ModelName", "ModelDeveloper", "DeveloperContact"),
    "ReleaseInfo": ("ReleaseStage", "ReleaseDate", "ReleaseVersion", "GlobalAvailability"),
    "ModelSummary": ("Summary", "Keywords"),
    "UsesAndDirections": (
        "IntendedUseAndWorkflow",
        "PrimaryIntendedUsers",
        "HowToUse",
        "TargetedPatientPopulation",
        "CautionedOutOfScopeSettings",
    ),
    "Warnings": ("KnownRisksAndLimitations", "KnownBiasesOrEthicalConsiderations", "ClinicalRiskLevel"),
    "TrustIngredients": ("AISystemFacts", "TransparencyInformation"),
    "AISystemFacts": (
        "OutcomesAndOutputs",
        "ModelType",
        "InputDataSource",
        "OutputAndInputDataTypes",
        "DevelopmentDataCharacterization",
        "BiasMitigationApproaches",
        "OngoingMaintenance",
        "Transparency",
    ),
    "TransparencyInformation": ("FundingSource", "StakeholdersConsulted"),
    "KeyMetrics": ("UsefulnessUsabilityEfficacy", "FairnessEquity", "SafetyReliability"),
    **dict.fromkeys(("UsefulnessUsabilityEfficacy", "FairnessEquity", "SafetyReliability"), METRIC),
    "MetricResult": ("Label", "ValueJson"),
    "Resources": ("PeerReviewedPublications", "PatientConsentOrDisclosure"),
}
TOP = ("BasicInfo", "ReleaseInfo", "ModelSummary", "UsesAndDirections", "Warnings", "TrustIngredients", "KeyMetrics")


def cells(mean, n=3, std=0.1):
    return {metric: {"mean": mean, "std": std, "n": n} if std is not None else {"mean": mean, "n": n} for metric in METRICS}


@pytest.fixture
def run(toy, tmp_path, plan_for):
    """A finished run of four sites: one complete, one without deviations, one without numbers, one without a result."""
    plan = plan_for(network=toy, method="fedavg", sites=("A", "B", "C", "D"))
    sites = {
        "A": dict.fromkeys(WHEN, cells(0.5)),
        "B": dict.fromkeys(WHEN, cells(0.7, std=None)) | {STD_WITHHELD: 10},
        "C": {WITHHELD: 5},
    }
    averaged = gathered(plan, {"A": sites["A"]}, 2, 2, {"D": "it | left"})
    folder = tmp_path / "run"
    (folder / "sites/A").mkdir(parents=True)
    write_json(folder / RESULTS, averaged | {"sites": sites, "job": "the-job"})
    write_json(folder / TIME, {"rounds": {"wall": [1.0, 2.0]}, "sites": {}})
    texts = plan.metadata | {"method": "fedavg", "site": "A"}
    save_network(folder / "sites/A" / NETWORK, build(toy, 3, 1, seed=0).state_dict(), texts)
    return folder


def test_an_interval_by_hand():
    """Student's t at 97.5 %: 12.7062 with one degree of freedom, 4.30265 with two (any table). The unbiased deviation over √n
    is std/√(n−1): 12.7062 · 0.1 / 1 = 1.27062 and 4.30265 · 0.1 / √2 = 0.304243. No Dice is below 0 or above 1."""
    assert interval({"mean": 2.5, "std": 0.1, "n": 2}) == pytest.approx({"low": 2.5 - 1.27062, "high": 2.5 + 1.27062}, abs=1e-5)
    assert interval({"mean": 0.5, "std": 0.1, "n": 2}, 1.0) == {"low": 0.0, "high": 1.0}
    assert interval({"mean": 0.5, "std": 0.1, "n": 3}) == pytest.approx({"low": 0.195757, "high": 0.804243}, abs=1e-5)
    assert interval({"mean": 0.5, "std": 0.0, "n": 1}) == interval({"mean": 0.5, "n": 9}) == {"low": None, "high": None}


def test_a_card_holds_the_entries_of_the_public_schema(run, tmp_path):
    write(run / "sites/A" / NETWORK, tmp_path / "card")
    root = ET.parse(tmp_path / "card/card.xml").getroot()
    names = {each: each.tag.removeprefix(f"{{{NAMESPACE}}}") for each in root.iter()}
    assert names[root] == "AppliedModelCard"
    assert [names[part] for part in root] == [*TOP, "Resources", "Bibliography"]
    for part in root.iter():
        if names[part] in REQUIRED:
            assert tuple(names[inner] for inner in part) == REQUIRED[names[part]], names[part]
    assert {names[part] for part in root.iter() if len(part)} <= {*REQUIRED, "AppliedModelCard", "Keywords", "Results"}
    as_json = json.loads((tmp_path / "card/card.json").read_text())["AppliedModelCard"]
    assert as_json["KeyMetrics"]["FairnessEquity"]["Interpretation"] == "Not measured."
    label = root.find(".//{*}MetricResult/{*}Label")
    assert label is not None
    assert (
        label.text == as_json["KeyMetrics"]["UsefulnessUsabilityEfficacy"]["Results"][0]["MetricResult"]["Label"] == "A: dice"
    )


@pytest.mark.parametrize(("own", "said"), [(1, "round 1 selected"), (None, "its own best round selected")])
def test_a_card_names_the_round_of_the_sites_own_network(run, tmp_path, own, said):
    """Of Local Train, not the round that is best by the mean over the sites, 2; unknown of a site that withholds its scores."""
    results = json.loads((run / RESULTS).read_text())
    results["sites"]["A"] |= {} if own is None else {"round": own}
    write_json(run / RESULTS, results | {"best_per_site": True})
    write(run / "sites/A" / NETWORK, tmp_path / "card")
    assert json.loads((tmp_path / "card/card.json").read_text())["facts"]["round"] == own
    assert said in (tmp_path / "card/card.md").read_text()


def test_a_card_says_what_is_known_withheld_and_missing(run, tmp_path, feddp, plan_for, toy):
    code, out, _ = feddp("export", "--network", run / "sites/A" / NETWORK, "--to", "card", "--out", tmp_path / "card")
    assert (code, out.strip()) == (0, str(tmp_path / "card/card.md"))
    facts = json.loads((tmp_path / "card/card.json").read_text())["facts"]
    rows = {(row["site"], row["metric"]): row for row in facts["metrics"]}
    low_high = interval({"mean": 0.5, "std": 0.1, "n": 3})
    assert rows["A", "dice"] == {"site": "A", "metric": "dice", "mean": 0.5, "std": 0.1, "n": 3} | low_high
    assert rows["B", "iou"] == {"site": "B", "metric": "iou", "mean": 0.7, "std": None, "n": 3, "low": None, "high": None}
    assert {site for site, _ in rows} == {"A", "B"}
    assert facts["withheld"] == [
        "C withholds all that is measured over fewer than 5 test images or cases",
        "B withholds standard deviations over fewer than 10 test images or cases",
        "D has no result: it | left",
    ]
    assert (facts["sites"], facts["missing"], facts["round"], facts["job"]) == (["A", "B", "C", "D"], [], 2, "the-job")
    assert facts["plan"]["digest"] == plan_for(network=toy, method="fedavg", sites=("A", "B", "C", "D")).digest()
    assert facts["seconds"] == {"wall": [1.0, 2.0]}
    metrics = metadata(Facts.of(run / "sites/A" / NETWORK), applied(Facts.of(run / "sites/A" / NETWORK)))["eval_metrics"]
    assert metrics == {f"A: {metric}": 0.5 for metric in METRICS}, "those of B are of its own network"
    text = (tmp_path / "card/card.md").read_text()
    for said in (
        "| A | dice | 0.5000 | 0.1958 | 0.8042 | 0.1000 | 3 |",
        "| B | dice | 0.7000 | — | — | — | 3 |",
        "left",
        "The rows of A",
    ):
        assert said in text


def test_the_command_knows_every_format():
    assert [each.value for each in Format] == list(FORMATS)


def test_a_network_alone_has_a_card_that_says_what_is_missing(run, tmp_path):
    """Taken out of the run's folder, it knows no site but its own, no number, no plan; nothing is guessed."""
    (tmp_path / "alone").mkdir()
    file = (run / "sites/A" / NETWORK).rename(tmp_path / "alone" / NETWORK)
    write(file, tmp_path / "card")
    card = json.loads((tmp_path / "card/card.json").read_text())
    facts, applied = card["facts"], card["AppliedModelCard"]
    assert (facts["site"], facts["method"], facts["sites"], facts["metrics"], facts["plan"]) == ("A", "fedavg", [], [], None)
    assert len(facts["missing"]) == 3
    assert facts["withheld"] == ["not known without the run's results"]
    assert applied["KeyMetrics"]["UsefulnessUsabilityEfficacy"]["TestType"].startswith("Missing")
    assert applied["TrustIngredients"]["AISystemFacts"]["InputDataSource"].startswith("Not stated")
    assert "Missing: the run's plan." in applied["ModelSummary"]["Summary"]


def test_a_network_is_not_given_the_numbers_of_another_run(run, tmp_path, toy):
    """A network of two classes that someone put into the folder of a run with one."""
    texts = {"network": toy, "channels": "3", "classes": '["a", "b"]', "labels": "nested", "size": "32", "method": "fedavg"}
    save_network(run / "sites/A" / NETWORK, build(toy, 3, 2, seed=0).state_dict(), texts)
    with pytest.raises(InputError, match="not a network of the run around it"):
        write(run / "sites/A" / NETWORK, tmp_path / "card")


def test_a_damaged_number_is_refused(run, tmp_path):
    results = json.loads((run / RESULTS).read_text())
    results["sites"]["A"][WHEN[-1]]["dice"]["mean"] = "high"
    write_json(run / RESULTS, results)
    with pytest.raises(InputError, match="wrong number of A"):
        write(run / "sites/A" / NETWORK, tmp_path / "card")
    assert not (tmp_path / "card").exists()


def test_a_metric_that_is_not_there_is_named(run, tmp_path):
    """Of a run of an earlier version, or of a file that lost something; the other numbers are shown."""
    results = json.loads((run / RESULTS).read_text())
    del results["sites"]["A"][WHEN[-1]]["hd"]
    del results["sites"]["B"][WHEN[-1]]
    write_json(run / RESULTS, results)
    write(run / "sites/A" / NETWORK, tmp_path / "card")
    facts = json.loads((tmp_path / "card/card.json").read_text())["facts"]
    assert facts["missing"] == [
        f"hd of A: {RESULTS} does not have it",
        f"{', '.join(METRICS)} of B: {RESULTS} does not have it",
    ]
    assert {(row["site"], row["metric"]) for row in facts["metrics"]} == {("A", name) for name in METRICS if name != "hd"}
    assert "- hd of A: results.json does not have it" in (tmp_path / "card/card.md").read_text()


@pytest.mark.parametrize(
    "damage",
    [
        {"sites": {"A": []}},
        {"sites": {"A": {WHEN[-1]: 3}}},
        {"sites": {"A": {VOLUMES: [1]}}},
        {"sites": {"A": {VOLUMES: {WHEN[-1]: 1}}}},
        {"without": ["A"]},
        {"without": {"peers": "A"}},
        {"job": {"a": 1}},
        {"job": "a\nb"},
    ],
)
def test_a_damaged_entry_is_one_line(damage, run, tmp_path, feddp):
    write_json(run / RESULTS, json.loads((run / RESULTS).read_text()) | damage)
    for command in (["export", "--to", "card", "--out", tmp_path / "card", "--network"], ["models", "deploy"]):
        code, _, said = feddp(*command, run / "sites/A" / NETWORK)
        assert (code, said.count("\n"), RESULTS in said) == (2, 1, True), said


def test_a_card_of_slices_counts_patients_too_and_names_who_refused(run, tmp_path):
    """3 images of 2 patients. A reason loses the folders of the machine that gave it."""
    results = json.loads((run / RESULTS).read_text())
    results["sites"]["A"][VOLUMES] = {when: {"dice": {"mean": 0.6, "std": 0.1, "n": 2}} for when in WHEN}
    results |= {"without": {"peers": {"B": "does not consent"}}, "missing": {"D": "no room in /home/lead/runs/x; free it"}}
    write_json(run / RESULTS, results)
    write(run / "sites/A" / NETWORK, tmp_path / "card")
    card = json.loads((tmp_path / "card/card.json").read_text())
    row = {"site": "A", "metric": "dice per case", "mean": 0.6, "std": 0.1, "n": 2}
    assert row | interval(row, 1.0) in card["facts"]["metrics"]
    described = card["AppliedModelCard"]["KeyMetrics"]["UsefulnessUsabilityEfficacy"]["TestingDataDescription"]
    assert described == "A: 3 test images; A: 2 test cases; B: 3 test images"
    assert card["facts"]["withheld"][2:] == [
        "B took no part in the exchange peers: does not consent",
        "D has no result: no room in …/x; free it",
    ]


def test_where_each_site_selects_its_round_the_card_has_this_sites(run, tmp_path):
    """The results then name no round; the site's log ends with the round that it adopted."""
    write_json(run / RESULTS, json.loads((run / RESULTS).read_text()) | {"start_round": None})
    write(run / "sites/A" / NETWORK, tmp_path / "none")
    card = json.loads((tmp_path / "none/card.json").read_text())
    assert (card["facts"]["round"], card["facts"]["missing"]) == (None, ["the selected round"])
    assert "None" not in json.dumps(card["AppliedModelCard"]["ModelSummary"])
    append_event(run / "sites/A" / RECORD, "score", round=1, dice=0.5)
    write(run / "sites/A" / NETWORK, tmp_path / "one")
    card = json.loads((tmp_path / "one/card.json").read_text())
    assert (card["facts"]["round"], card["facts"]["missing"]) == (1, [])
    assert "round 1 selected" in card["AppliedModelCard"]["ModelSummary"]["Summary"]


def test_a_name_that_is_no_text_for_a_card_is_refused(toy, tmp_path, plan_for):
    """XML cannot hold it, and a line cannot."""
    texts = plan_for(network=toy).metadata | {"site": "A\x01"}
    save_network(tmp_path / NETWORK, build(toy, 3, 1, seed=0).state_dict(), texts)
    with pytest.raises(InputError, match="its metadata's site .* is no name"):
        write(tmp_path / NETWORK, tmp_path / "card")


def test_names_and_reasons_are_no_markdown(run, tmp_path):
    """A viewer would fetch the picture, and so tell its owner who reads the card; a line of its own would be a heading."""
    results = json.loads((run / RESULTS).read_text())
    hostile = "![x](http://a/b) <img src=http://a/b>\n# Approved"
    write_json(run / RESULTS, results | {"missing": {"D": hostile}})
    lines = write(run / "sites/A" / NETWORK, tmp_path / "card").read_text().splitlines()
    (said,) = [line for line in lines if "D has no result" in line and line.startswith("- ")]
    assert said == "- D has no result: ![x]\\(http://a/b) &lt;img src=http://a/b> # Approved"
    assert "# Approved" not in lines
    assert "](" not in "\n".join(lines)
    assert "<img" not in "\n".join(lines)


def test_any_results_are_a_card_or_one_line(run, tmp_path):
    """Any other exception than InputError fails the test."""
    whole, told = json.loads((run / RESULTS).read_text()), [0, 0]

    @cases(40)
    @given(changed(whole))
    def written(value):
        (run / RESULTS).write_text(json.dumps(value), encoding="utf-8")
        told[bool(tried(InputError, write, run / "sites/A" / NETWORK, tmp_path / "card")[1])] += 1

    written()
    assert min(told) > 0, told
