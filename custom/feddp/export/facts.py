"""What is known of a network's run, from the files beside it; what is missing is named, never guessed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from feddp.adaptation.models import described, plan_of
from feddp.errors import InputError
from feddp.files import NETWORK, RECORD, RESULTS, TIME, read_events, read_results, site_folder
from feddp.limits import NETWORK_BYTES
from feddp.networks.metadata import Metadata
from feddp.networks.weights import fingerprint, load_personal, read_network
from feddp.plan.schema import Plan
from feddp.protocol import BEST_PER_SITE, STD_WITHHELD, VOLUMES, WHEN, WITHHELD
from feddp.reading import is_count, is_name, is_text, read, read_own, shown, without_paths
from feddp.stages.evaluate import is_whole
from feddp.training.claim import PLAN
from feddp.training.columns import DISTANCES, METRICS, columns

LEVEL = 0.95
PER_CASE = " per case"  # end of a metric's name


@dataclass(frozen=True)
class Facts:
    """Facts of a network and its run.

    Attributes:
        results, time: of the run; empty if `file` does not lie in a run's folder, or the run has no such file.
        plan: of the run, which a site's own folder of a run has too.
        job: the id of the run's first job. round: the round of which stage 1 selected this network. None if unknown.
        missing: what is not known, a sentence each.
    """

    file: Path
    metadata: Metadata
    texts: dict[str, str]
    bytes_sha256: str
    tensors_sha256: str
    parameters: int
    results: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    time: dict[str, Any] = field(default_factory=dict)
    job: str | None = None
    round: int | None = None
    missing: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: Path) -> "Facts":
        """Reads a network's file and, if it lies in a run's folder (<run>/sites/<site>/network.safetensors) or in a site's own
        folder of a run (feddp/<job id>/), the files around it.

        Raises:
            InputError: the file holds no network of FedDP, or a file of the run is damaged, or the run is another.
        """
        metadata, network = described(file), load_personal(file)
        state, texts = read_network(file)
        if not is_name(texts.get("site", "none")):
            raise InputError(f"{file}: its metadata's site {shown(texts['site'])} is no name; name a network that feddp saved")
        content = sha256(read(file, NETWORK_BYTES)).hexdigest()
        count = sum(value.numel() for value in network.parameters())
        own = (file, metadata, texts, content, fingerprint(state), count)
        place = file.resolve()
        folder = place.parents[min(2, len(place.parents) - 1)]
        if place == site_folder(folder, place.parent.name) / NETWORK and (folder / RESULTS).exists():
            found = cls(*own, **_of_run(folder, place.parent, metadata.classes))
        elif (place.parent / PLAN).exists():
            found = cls(*own, **_of_site(place.parent))
        else:
            why = f"the run's results: no {RESULTS} lies beside the network"
            return cls(*own, missing=(why, "the run's plan", "the run's time"))
        if found.plan is None or metadata != Metadata.of(file, found.plan.metadata):
            raise InputError(f"{file} is not a network of the run around it: its metadata differ from the plan's; move it away")
        return found

    @property
    def site(self) -> str:
        """The site whose network it is; "" if the file does not say it."""
        return self.texts.get("site", "")

    @property
    def method(self) -> str:
        """The method's name; "" if neither the plan nor the file says it."""
        return self.plan.method if self.plan else self.texts.get("method", "")

    def sites(self) -> list[str]:
        """Returns the names of the run's sites, those without a result too; none if the plan is missing."""
        return list(self.plan.sites) if self.plan else []

    def measured(self) -> list[dict[str, Any]]:
        """Returns one entry per site and metric of the final networks: site, metric, mean, std, n, low, high.

        The metrics per image are followed by those per case, if images are slices; n counts images or cases. low and high
        bound the mean's interval at LEVEL (`interval`); std, low and high are None where std is withheld.

        Raises:
            InputError: a number in the results is none.
        """
        found = []
        for site, result in sorted(self.results.get("sites", {}).items()):
            for per, summary in _tables(result):
                if not is_whole(summary, tuple(summary), result) or not all(is_count(cell["n"]) for cell in summary.values()):
                    raise InputError(
                        f"{self.file}: the run's {RESULTS} has a wrong number of {site}; take it from the run again"
                    )
                for metric, cell in summary.items():
                    entry = {"site": site, "metric": metric + per, "mean": cell["mean"], "std": cell.get("std"), "n": cell["n"]}
                    found.append(entry | interval(cell, math.inf if metric.startswith(DISTANCES) else 1.0))
        return found

    def withheld(self) -> list[str]:
        """Returns what the sites withhold: numbers, by their policies, and exchanges; and the sites without a result."""
        if not self.results:
            return ["not known without the run's results"]
        said = []
        for word, what in ((WITHHELD, "all that is measured"), (STD_WITHHELD, "standard deviations")):
            found = {site: result[word] for site, result in sorted(self.results["sites"].items()) if word in result}
            said += [f"{site} withholds {what} over fewer than {least} test images or cases" for site, least in found.items()]
        for exchange, sites in sorted(self.results.get("without", {}).items()):
            said += [f"{site} took no part in the exchange {exchange}: {why}" for site, why in sorted(sites.items())]
        missing = sorted(self.results.get("missing", {}).items())
        return said + [f"{site} has no result: {without_paths(str(why))}" for site, why in missing]


def _of_run(folder: Path, own: Path, classes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the attributes of Facts that the files of a finished run's folder give; `own` is the network's folder."""
    results, missing, time = read_results(folder), [], dict[str, Any]()
    _require_whole(folder / RESULTS, results)
    if (folder / TIME).exists():
        time = read_own(folder / TIME, InputError, "take it from the run's server again")
    else:
        missing.append(f"the run's time: it has no {TIME}")
    round = results["sites"].get(own.name, {}).get("round") if results.get(BEST_PER_SITE) else results.get("start_round")
    if round is None:  # the results do not say it
        round = _selected(own)
    missing += [] if round is not None else ["the selected round"]
    for site, result in sorted(results["sites"].items()):
        if WITHHELD not in result and (lacking := [m for m in columns(METRICS, classes) if m not in result.get(WHEN[-1], {})]):
            missing.append(f"{', '.join(lacking)} of {site}: {RESULTS} does not have it")
    known = {"results": results, "plan": plan_of(folder, results), "time": time}
    return {**known, "job": results.get("job"), "round": round, "missing": tuple(missing)}


def _of_site(folder: Path) -> dict[str, Any]:
    """Returns the attributes of Facts that a site's own folder of a run, which is named after its first job, gives."""
    plan = Plan.from_json(read_own(folder / PLAN, InputError, "take the network from its run again"))
    missing = ("the run's results: the server of the run has them", "the run's time: the server of the run has it")
    return {"plan": plan, "job": folder.name, "round": _selected(folder), "missing": missing}


def _selected(folder: Path) -> int | None:
    """Returns the round whose network a site adopted, the last that it scored; None if its log does not say it."""
    rounds = [event.get("round") for event in read_events(folder / RECORD) if event.get("event") == "score"]
    return rounds[-1] if rounds and type(rounds[-1]) is int else None


def _require_whole(file: Path, results: Mapping[str, Any]) -> None:
    """Raises InputError if an entry that a card shows has another type."""
    sites, without = results["sites"].values(), results.get("without", {})
    whole = is_name(results.get("job") or "none") and isinstance(without, dict)
    whole = whole and all(isinstance(entry, dict) for entry in (*sites, *without.values()))
    whole = whole and all(isinstance(result.get(name, {}), dict) for result in sites for name in (WHEN[-1], VOLUMES))
    whole = whole and all(map(is_text, results.get("missing", {}).values()))
    if not whole or not all(isinstance(summary, dict) for result in sites for _, summary in _tables(result)):
        raise InputError(f"{file}: an entry of a site, or the job, is damaged; take it from the run again")


def _tables(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the tables of a site's final network, each with the end of its metrics' names."""
    return [("", result.get(WHEN[-1], {})), (PER_CASE, result.get(VOLUMES, {}).get(WHEN[-1], {}))]


def interval(cell: Mapping[str, Any], most: float = math.inf) -> dict[str, float | None]:
    """Returns Student's interval of a mean from {"mean", "std" (of the population), "n"}: mean ± t · std / √(n − 1), cut to the
    metric's range, 0 to `most`.

    It takes images, or cases, for independent; images of one patient are not, so their true interval is wider.
    """
    from scipy.stats import t

    if cell.get("std") is None or cell["n"] < 2:
        return {"low": None, "high": None}
    half = float(t.ppf((1 + LEVEL) / 2, cell["n"] - 1)) * cell["std"] / math.sqrt(cell["n"] - 1)
    return {"low": max(0.0, cell["mean"] - half), "high": min(most, cell["mean"] + half)}
