"""A network's model card: Markdown for people, JSON for programs, XML for registries that take CHAI's Applied Model Card.

The entries and their order are those of the Applied Model Card's schema, version 0.2 (Coalition for Health AI,
github.com/coalition-for-health-ai/mc-schema, v0.2/schema.xsd). The schema is an XML one; the JSON has the same entries under
`AppliedModelCard`, and the numbers behind them under `facts`.
"""

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feddp.adaptation.models import prepared
from feddp.export.facts import LEVEL, PER_CASE, Facts
from feddp.files import write_json, write_text
from feddp.methods import METHODS
from feddp.protocol import BEST_PER_SITE
from feddp.reading import counted
from feddp.reporting.tables import BLANK, markdown_lines

MARKDOWN, JSON, XML = "card.md", "card.json", "card.xml"
NAMESPACE = "https://mc.chai.org/v0.2/schema.xsd"
FORMAT = "feddp-card/1"
ROOT = "AppliedModelCard"
UNKNOWN = "Not stated: no file of the run says it. To be filled in by whoever deploys the network."
# a method that personalizes leaves a network of its own at every site
_OWN = "The rows of {site} measure this network; a row of another site measures that site's own network on that site's images."
_METRIC = "MetricResult"
_NUMBERS = ("mean", "low", "high", "std")

Tree = dict[str, Any]


def write(network: Path, out: Path) -> Path:
    """Writes MARKDOWN, JSON and XML to the folder `out` and returns the path of MARKDOWN; InputError as `Facts.of`."""
    facts = Facts.of(network)
    card = applied(facts)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / JSON, {"format": FORMAT, ROOT: card, "facts": numbers(facts)})
    write_text(out / XML, '<?xml version="1.0" encoding="UTF-8"?>\n' + as_xml(card) + "\n")
    write_text(out / MARKDOWN, "\n".join(as_markdown(card, facts)) + "\n")
    return out / MARKDOWN


def numbers(facts: Facts) -> Tree:
    """Returns what the card was made of: plain values, null or absent where nothing is known."""
    plan = facts.plan
    return {
        "network": facts.metadata.network,
        "classes": list(facts.metadata.classes),
        "labels": facts.metadata.labels,
        "channels": facts.metadata.channels,
        "size": facts.metadata.size,
        "normalise": facts.metadata.normalise,
        "parameters": facts.parameters,
        "site": facts.site or None,
        "sha256": {"file": facts.bytes_sha256, "tensors": facts.tensors_sha256},
        "method": facts.method or None,
        "job": facts.job,
        "round": facts.round,
        "sites": facts.sites(),
        "plan": {"digest": plan.digest(), **plan.to_json()} if plan else None,
        "seconds": facts.time.get("rounds"),
        "metrics": facts.measured(),
        "interval": LEVEL,
        "withheld": facts.withheld(),
        "missing": list(facts.missing),
    }


def applied(facts: Facts) -> Tree:
    """Returns the entries of the Applied Model Card, in the order of its schema."""
    plan, metadata = facts.plan, facts.metadata
    method = facts.method
    about = _first_line(method) if method else ""
    classes, sites = ", ".join(metadata.classes), facts.sites()
    of = f" of the site {facts.site}" if facts.site else ""
    by = f", trained by {method}" if method else ""
    rounds = f", {counted(plan.rounds, 'round')}" if plan else ""
    each = ", its own best round selected" if facts.results.get(BEST_PER_SITE) else ""
    rounds += f", round {facts.round} selected" if facts.round is not None else each
    together = not method or METHODS[method].federated
    missing = " ".join(f"Missing: {what}." for what in facts.missing)
    trained = prepared(facts.file)
    scaled = f"scaled to {trained.size} x {trained.size} pixels by weighted means, " if trained and trained.size else ""
    images = f"8-bit images with {counted(metadata.channels, 'channel')}, {scaled}"
    images += f"resized to {metadata.size} x {metadata.size} pixels"
    means = {"MetricGoal": "Overlap and boundary distance of predicted and reference masks on each site's own test images."}
    return {
        "BasicInfo": {
            "ModelName": f"{method or 'network'} on {metadata.network}: {classes}",
            "ModelDeveloper": f"The {'federation of the ' if together else ''}sites {', '.join(sites)}" if sites else UNKNOWN,
            "DeveloperContact": UNKNOWN,
        },
        "ReleaseInfo": {
            "ReleaseStage": "Research; not cleared for clinical use.",
            "ReleaseDate": UNKNOWN,
            "ReleaseVersion": f"SHA-256 of the tensors {facts.tensors_sha256}; of the file {facts.bytes_sha256}",
            "GlobalAvailability": UNKNOWN,
        },
        "ModelSummary": {
            "Summary": f"Segments {classes}: the network{of}{by}{rounds}. {missing}".strip(),
            "Keywords": [{"Keyword": word} for word in ("segmentation", "federated learning", *metadata.classes)],
        },
        "UsesAndDirections": {
            "IntendedUseAndWorkflow": f"Research on segmenting {classes}; a person checks every mask. It is no medical device.",
            "PrimaryIntendedUsers": "Researchers at the sites of the federation.",
            "HowToUse": "`feddp predict --network FILE --images FOLDER --out FOLDER` writes a mask for every image.",
            "TargetedPatientPopulation": UNKNOWN,
            "CautionedOutOfScopeSettings": "Clinical decisions; sites, devices or patients unlike those of the training.",
        },
        "Warnings": {
            "KnownRisksAndLimitations": f"Knows only {images}. It was measured at no site but those named here.",
            "KnownBiasesOrEthicalConsiderations": "Not measured: the run knows no age, sex or origin of a patient.",
            "ClinicalRiskLevel": UNKNOWN,
        },
        "TrustIngredients": {
            "AISystemFacts": {
                "OutcomesAndOutputs": f"A mask of 0 (background) to C ({classes}); {metadata.labels} labels.",
                "ModelType": f"{metadata.network}, {facts.parameters} parameters. {about}".strip(),
                "InputDataSource": _source(facts, sites),
                "OutputAndInputDataTypes": f"{images}, normalised by {metadata.normalise}; one 8-bit mask per image.",
                "DevelopmentDataCharacterization": "The run does not record how many images a site trained on, nor of whom.",
                "BiasMitigationApproaches": "None is recorded.",
                "OngoingMaintenance": UNKNOWN,
                "Transparency": f"Plan {plan.digest()}." if plan else "The plan is missing.",
            },
            "TransparencyInformation": {"FundingSource": UNKNOWN, "StakeholdersConsulted": UNKNOWN},
        },
        "KeyMetrics": {
            "UsefulnessUsabilityEfficacy": means | _measured(facts),
            "FairnessEquity": _not_measured("Equal quality at all sites and for all patients."),
            "SafetyReliability": _not_measured("Known behaviour on unusual images."),
        },
        "Resources": {"PeerReviewedPublications": "The page Method cards of FedDP's documentation names them.",
                      "PatientConsentOrDisclosure": UNKNOWN},
        "Bibliography": "",
    }  # fmt: skip


def _source(facts: Facts, sites: list[str]) -> str:
    if not sites:
        return UNKNOWN
    how = "each site's images stayed there" if METHODS[facts.method].federated else "pooled in one place, no federation"
    return f"The images of {', '.join(sites)}; {how}."


def _first_line(method: str) -> str:
    """Returns what a method says of itself, in its class or its file."""
    found = METHODS[method]
    return (found.__doc__ or sys.modules[found.__module__].__doc__ or "").strip().splitlines()[0]


def _measured(facts: Facts) -> Tree:
    rows = [{"Label": f"{row['site']}: {row['metric']}", "ValueJson": json.dumps(_numbers_of(row))} for row in facts.measured()]
    optimistic = facts.results.get("selection") == "test"
    said = [f"Intervals are Student's at {LEVEL:.0%} over a site's images, or cases, as if these were independent."]
    said += [f"Distances are in pixels of images of {facts.metadata.size} x {facts.metadata.size} pixels."]
    said += [_OWN.format(site=facts.site)] if facts.site else []
    said += ["Optimistic: round and epoch were selected on the test images."] if optimistic else []
    return {
        "Results": [{_METRIC: row} for row in rows or [{"Label": "none", "ValueJson": "null"}]],
        "Interpretation": " ".join([*said, *(f"{what}." for what in facts.withheld())]),
        "TestType": "Internal: held-out test images of the training sites." if rows else "Missing: no result is known.",
        "TestingDataDescription": "; ".join(_counts(facts)) or "Missing: no result is known.",
        "ValidationProcessAndJustification": "Each site measures its final network, and sends what its policy allows.",
    }


def _not_measured(goal: str) -> Tree:
    said = "Not measured."
    entries = ("Interpretation", "TestType", "TestingDataDescription", "ValidationProcessAndJustification")
    none = [{_METRIC: {"Label": "none", "ValueJson": "null"}}]
    return {"MetricGoal": goal, "Results": none, **dict.fromkeys(entries, said)}


def _numbers_of(row: Mapping[str, Any]) -> Tree:
    return {name: row[name] for name in (*_NUMBERS, "n")}


def _counts(facts: Facts) -> Iterator[str]:
    counts = {(row["site"], row["metric"].endswith(PER_CASE)): row["n"] for row in facts.measured()}
    yield from (f"{site}: {counted(n, 'test case' if cases else 'test image')}" for (site, cases), n in counts.items())


def as_xml(card: Tree) -> str:
    """Returns the card as an XML element of NAMESPACE."""
    root = ET.Element(ROOT, {"xmlns": NAMESPACE})
    _append(root, card)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode")


def _append(parent: ET.Element, content: Tree | list[Tree] | str) -> None:
    if isinstance(content, str):
        # XML knows neither of these two, which a class's name may hold
        parent.text = re.sub("[\ufffe\uffff]", "?", content)
        return
    for part in content if isinstance(content, list) else [content]:
        for name, value in part.items():
            _append(ET.SubElement(parent, name), value)


def as_markdown(card: Tree, facts: Facts) -> Iterator[str]:
    """Yields the card's lines: a heading per entry, the metrics as a table, what is withheld and missing as lists."""
    yield f"# Model card: {_cell(card['BasicInfo']['ModelName'])}"
    yield from _sections(card, 2)
    yield from ("", "## Metrics by site", "")
    rows = facts.measured()
    cells = [[_cell(r["site"]), _cell(r["metric"]), *(_shown(r[name]) for name in _NUMBERS), str(r["n"])] for r in rows]
    yield from markdown_lines(("site", "metric", *_NUMBERS, "n"), cells)
    yield f"\nlow and high: Student's interval of the mean at {LEVEL:.0%}. {BLANK}: not known."
    yield "Distances are in pixels of the resized images." + (f" {_OWN.format(site=facts.site)}" if facts.site else "")
    for title, lines in (("Withheld", facts.withheld()), ("Missing", facts.missing)):
        yield from ("", f"## {title}", "", *(f"- {_cell(line)}" for line in lines or ("nothing",)))


def _sections(part: Tree, level: int) -> Iterator[str]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from ("", f"{'#' * level} {_words(name)}")
            yield from _sections(value, level + 1)
        elif isinstance(value, str) and value:
            yield from ("", f"**{_words(name)}**: {_cell(value)}")


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)


def _shown(value: float | None) -> str:
    return BLANK if value is None else f"{value:.4f}"


def _cell(text: str) -> str:
    """Returns a text, perhaps a name or a reason from elsewhere, as one line of Markdown without elements and addresses."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
