"""Methods on synthetic sites that differ in one respect alone, more and more.

From which difference on does a personal network pay? One dial of `feddp data synthesize` goes through its values; the other
dials are 0, so that the sites are alike in all else. For each value and seed the images are drawn, and each method runs in one
process without FLARE. All methods use the networks of the last round; tuning and calibration have the same number of epochs.
What is on disk is not run again, and an unfinished run is continued: start the same command again. Values, seeds and methods
may be added; other settings need another folder.

    feddp bench dials style --out runs/dials

writes runs/dials/style.csv (test Dice of each site), runs/dials/style.png (mean over sites; and its difference to FedAvg's) and
runs/dials/style.json (the settings).
"""

import argparse
import csv
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from feddp.data.habits import Dials
from feddp.data.synthesize import synthesize
from feddp.errors import InputError
from feddp.files import RESULTS, read_results, write_json
from feddp.networks import DEFAULT
from feddp.reading import read_own
from feddp.run.options import Options, run_here

REFERENCE = "FedAvg"
DICE = 100  # in per cent
# {label: (method, settings)}
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Local Train": ("local", ()),
    REFERENCE: ("fedavg", ()),
    "FineTune": ("finetune", ("tune_epochs={epochs}",)),
    "FedDP, λ = 0": ("feddp", ("calibration_epochs={epochs}", "lambda=0")),
    "FedRep": ("fedrep", ()),
    "Ditto": ("ditto", ()),
    "FedBN": ("fedbn", ()),
}
QUERIES, FEDDP = "FedDP's queries alone", "FedDP, λ = 0"  # the former are the latter before its last stage
Rows = list[tuple[float, int, str, str, float]]  # (value, seed, label, site, Dice)


@dataclass(frozen=True)
class Campaign:
    """What is run for each value and seed, and where."""

    dial: str
    out: Path
    network: str
    sites: int
    images: int
    size: int
    rounds: int
    epochs: int
    thin: bool
    settings: tuple[str, ...]

    def claim(self) -> None:
        """Writes the settings beside the results, so that no other campaign takes these for its own.

        Raises:
            InputError: the results on disk are of other settings, or of unknown ones.
        """
        file, results = self.out / f"{self.dial}.json", self.out / self.dial
        wanted = json.loads(json.dumps({name: value for name, value in asdict(self).items() if name != "out"}))
        remedy = "choose another --out, or give the same settings"
        if not file.exists():
            if results.exists():
                raise InputError(f"{results} has results, but {file} with their settings is missing; choose another --out")
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(file, wanted)
            return
        found = read_own(file, InputError, remedy)
        names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
        if names:
            differ = "; ".join(f"{name} {found.get(name)}, not {wanted.get(name)}" for name in names)
            raise InputError(f"{file}: the results there were made with {differ}; {remedy}")

    def folder(self, value: float, seed: int) -> Path:
        return self.out / self.dial / f"{value:g}" / f"seed-{seed}"

    def data(self, value: float, seed: int) -> Path:
        """Returns the sites' images, drawn if they are not there; an interrupted drawing leaves only `data.part`."""
        data = self.folder(value, seed) / "data"
        if not data.exists():
            part = data.with_name("data.part")
            if part.exists():
                shutil.rmtree(part)
            dials = Dials(**({dial.name: 0.0 for dial in fields(Dials)} | {self.dial: value}))
            synthesize(part, self.sites, self.images, self.size, seed, dials, self.thin)
            part.rename(data)
        return data

    def run(self, value: float, seed: int, label: str) -> Rows:
        """Returns the test Dice of every site, of a run that is on disk or is made."""
        method, settings = METHODS[label]
        out = self.folder(value, seed) / method
        if not (out / RESULTS).exists():
            own = tuple(setting.format(epochs=self.epochs) for setting in settings)
            options = Options(
                method=method,
                rounds=self.rounds,
                network=self.network,
                size=self.size,
                seed=seed,
                settings=("start=last", *own, *self.settings),
            )
            run_here(self.data(value, seed), out, options, env="local")
        for tensors in out.rglob("*.safetensors"):  # half a gigabyte of each run, which nothing here reads
            tensors.unlink()
        stages = {label: "final"} | ({QUERIES: "before_calibration"} if label == FEDDP else {})
        return [
            (value, seed, name, site, DICE * found[stage]["dice"]["mean"])
            for name, stage in stages.items()
            for site, found in read_results(out)["sites"].items()
        ]


def write(path: Path, rows: Rows) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("value", "seed", "method", "site", "dice"))
        table.writerows((f"{value:g}", seed, label, site, f"{dice:.3f}") for value, seed, label, site, dice in rows)


def means(rows: Rows) -> dict[str, dict[float, dict[int, float]]]:
    """Returns {label: {value: {seed: mean Dice over the sites}}}."""
    cells = defaultdict(list)
    for value, seed, label, _, dice in rows:
        cells[label, value, seed].append(dice)
    found: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for (label, value, seed), dices in cells.items():
        found[label][value][seed] = mean(dices)
    return found


def draw(path: Path, dial: str, rows: Rows) -> None:
    """Draws the mean over seeds, with a band from the lowest to the highest: Dice, and the paired difference to FedAvg."""
    found, figure = means(rows), Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, values in found.items():
        for axis, reference in ((left, {}), (right, found[REFERENCE])):
            paired = {
                value: [dice - (reference[value][seed] if reference else 0) for seed, dice in seeds.items()]
                for value, seeds in sorted(values.items())
            }
            (line,) = axis.plot(list(paired), [mean(dices) for dices in paired.values()], marker=".", label=label)
            low, high = ([pick(dices) for dices in paired.values()] for pick in (min, max))
            axis.fill_between(list(paired), low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    left.set(xlabel=dial, ylabel="test Dice (%), mean of sites")
    right.set(xlabel=dial, ylabel=f"difference to {REFERENCE}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "feddp bench dials", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dial", choices=[dial.name for dial in fields(Dials)])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--values", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--network", default=DEFAULT)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--images", type=int, default=60, help="per site")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=10, help="of tuning and calibration")
    parser.add_argument("--thin", action="store_true", help="vessels instead of lesions")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="for every method")
    given = vars(parser.parse_args(arguments))
    values, seeds, labels = given.pop("values"), given.pop("seeds"), given.pop("methods")
    labels = list(dict.fromkeys((REFERENCE, *labels)))  # the others are compared with it
    campaign = Campaign(**given | {"settings": tuple(given["settings"])})
    campaign.claim()
    runs, rows = [(value, seed, label) for seed in seeds for value in values for label in labels], Rows()
    for number, (value, seed, label) in enumerate(runs, 1):
        print(f"{number} of {len(runs)}: {campaign.dial} {value:g}, seed {seed}, {label}", file=sys.stderr, flush=True)
        rows += campaign.run(value, seed, label)
        write(campaign.out / f"{campaign.dial}.csv", rows)
    draw(campaign.out / f"{campaign.dial}.png", campaign.dial, rows)
    print(campaign.out / f"{campaign.dial}.png")
