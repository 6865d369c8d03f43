"""What is known of a network's run, from the files beside it; what is missing is named, never guessed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from feddp.adaptation.models import described, plan_of
from feddp.errors import InputError
from feddp.files import NETWORK, RESULTS, TIME, read_results, site_folder
from feddp.limits import NETWORK_BYTES
from feddp.networks.metadata import Metadata
from feddp.networks.weights import fingerprint, load_personal, read_network
from feddp.plan.schema import Plan
from feddp.protocol import STD_WITHHELD, WHEN, WITHHELD
from feddp.reading import is_count, is_text, read, read_own
from feddp.stages.evaluate import is_whole

LEVEL = 0.95


@dataclass(frozen=True)
class Facts:
    """Facts of a network and its run.

    Attributes:
        results, plan, time: of the run; empty and None if `file` does not lie in a run's folder, or the run has no such file.
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
    missing: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: Path) -> "Facts":
        """Reads a network's file and, if it is <run>/sites/<site>/network.safetensors, its run's.

        Raises:
            InputError: the file holds no network of FedDP, or a file of the run is damaged, or the run is another.
        """
        metadata, network = described(file), load_personal(file)
        state, texts = read_network(file)
        own = (file, metadata, texts, sha256(read(file, NETWORK_BYTES)).hexdigest(), fingerprint(state))
        count = sum(value.numel() for value in network.parameters())
        place = file.resolve()
        folder = place.parents[min(2, len(place.parents) - 1)]
        if place != site_folder(folder, place.parent.name) / NETWORK or not (folder / RESULTS).exists():
            why = f"the run's results: no {RESULTS} lies beside the network"
            return cls(*own, count, missing=(why, "the run's plan", "the run's time"))
        results, missing = read_results(folder), []
        if not all(map(is_text, results.get("missing", {}).values())):
            raise InputError(f"{folder / RESULTS}: a reason in missing is no text; take it from the run again")
        if (folder / TIME).exists():
            time = read_own(folder / TIME, InputError, "take it from the run's server again")
        else:
            time, missing = {}, [f"the run's time: it has no {TIME}"]
        plan = plan_of(folder, results)
        if metadata != Metadata.of(folder / RESULTS, plan.metadata):
            raise InputError(f"{file} is not a network of the run around it: its metadata differ from the plan's; move it away")
        return cls(*own, count, results, plan, time, tuple(missing))

    @property
    def site(self) -> str:
        """The site whose network it is; "" if the file does not say it."""
        return self.texts.get("site", "")

    @property
    def method(self) -> str:
        """The method's name; "" if neither the plan nor the file says it."""
        return self.plan.method if self.plan else self.texts.get("method", "")

    def sites(self) -> list[str]:
        """Returns the names of the run's sites, those without a result too; none if the results are missing."""
        return sorted({*self.results.get("sites", ()), *self.results.get("missing", ())})

    def measured(self) -> list[dict[str, Any]]:
        """Returns one entry per site and metric of the final networks: site, metric, mean, std, n, low, high.

        low and high bound the mean's interval at LEVEL (`interval`); std, low and high are None where std is withheld. Raises
        InputError if a number in the results is none.
        """
        found = []
        for site, result in sorted(self.results.get("sites", {}).items()):
            summary: Any = result.get(WHEN[-1], {}) if isinstance(result, dict) else None
            whole = isinstance(summary, dict) and is_whole(summary, tuple(summary), result)
            if not whole or not all(is_count(cell["n"]) for cell in summary.values()):
                raise InputError(f"{self.file}: the run's {RESULTS} has a wrong number of {site}; take it from the run again")
            for metric, cell in summary.items():
                entry = {"site": site, "metric": metric, "mean": cell["mean"], "std": cell.get("std"), "n": cell["n"]}
                found.append(entry | interval(cell))
        return found

    def withheld(self) -> list[str]:
        """Returns what the sites' policies withhold, and the sites without a result, a sentence each."""
        if not self.results:
            return ["not known without the run's results"]
        said = []
        for word, what in ((WITHHELD, "all that is measured"), (STD_WITHHELD, "standard deviations")):
            found = {site: result[word] for site, result in sorted(self.results.get("sites", {}).items()) if word in result}
            said += [f"{site} withholds {what} over fewer than {least} test images or cases" for site, least in found.items()]
        return said + [f"{site} has no result: {why}" for site, why in sorted(self.results.get("missing", {}).items())]


def interval(cell: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns Student's interval of a mean from {"mean", "std" (of the population), "n"}: mean ± t · std / √(n − 1).

    It takes the images for independent; images of one patient are not, so the true interval is wider.
    """
    from scipy.stats import t

    if cell.get("std") is None or cell["n"] < 2:
        return {"low": None, "high": None}
    half = float(t.ppf((1 + LEVEL) / 2, cell["n"] - 1)) * cell["std"] / math.sqrt(cell["n"] - 1)
    return {"low": cell["mean"] - half, "high": cell["mean"] + half}
