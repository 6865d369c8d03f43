"""Methods on synthetic sites that differ in one respect alone, more and more.

From which difference on does a personal network pay? One dial of `feddp data synthesize` goes through its values; the other
dials are 0, so that the sites are alike in all else. For each value and seed the images are drawn, and each method runs in one
process without FLARE. All methods use the networks of the last round; tuning and calibration have the same number of epochs.
FedAvg is FineTune before it tunes, where that is run. What is on disk is not run again, and an unfinished run is continued:
start the same command again. Values, seeds and methods may be added; other settings need another folder. At 0 the images do
not depend on the dial: such runs are in OUT/alike, and made once for all dials.

    feddp bench dials style --out runs/dials

writes to runs/dials style.csv (test Dice of each site), style.png (mean over sites; its difference to FedAvg's, a star at the
onset), style_onset.csv (that difference with its interval), style_onset.json (the onsets) and style.json (the settings).
Beside each run's folder, METHOD.json says on which machine it was made, and on which day it was started or last continued; runs
of earlier versions have no such file.

A method's onset is the lowest value from which on the mean Dice of the sites exceeds FedAvg's beyond chance: there and at all
higher values, the 95 % interval of the paired difference lies above 0. One seed is one observation, because the images, their
splits, the first weights and the batches are drawn anew with it. The sites are no sample: they are of four kinds on purpose,
and how much each gains differs with its kind, not by chance. One or two seeds have no interval; that of their test patients
takes its place, which ignores the chance in training and so finds more onsets than further seeds would confirm. The intervals
are not corrected for the number of methods: of 40 methods equal to FedAvg, one has its onset at the last value.
"""

import argparse
import csv
import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import count, machine, natural, pixels
from feddp.compare.patients import PatientScores
from feddp.compare.runs import Place
from feddp.compare.scores import BEFORE, FINAL, IMAGE, read_rows
from feddp.compare.statistics import FEW, interval_of_few
from feddp.compare.tested import patients
from feddp.data.folder import SiteFolder
from feddp.data.habits import Dials
from feddp.data.prepare.split import split_patients
from feddp.data.synthesize import METADATA, patients_of, synthesize
from feddp.errors import InputError
from feddp.files import RESULTS, locked, read_results, write_json, write_text
from feddp.flare.bounds import Bounds
from feddp.networks import DEFAULT
from feddp.plan.resolve import build_network, partition_of
from feddp.plan.schema import behaviour_of
from feddp.protocol import WHEN
from feddp.reading import counted, read_own
from feddp.run.folders import remove_spare
from feddp.run.options import Options, run_here
from feddp.terminal import note, say
from feddp.training.metrics import Row

REFERENCE = "FedAvg"
DICE = 100  # in per cent
COLOURS = 10  # of lines in a figure, before they repeat
ALIKE = "alike"  # the folder of the runs at 0, which all dials share
NEVER, UNKNOWN = "never here", "unknown"
PLACE = Place("local")  # where the runs are made


@dataclass(frozen=True)
class Approach:
    """A method, and its family: what differs between the sites' networks, or how they are mixed."""

    family: str
    method: str  # also the name of its runs' folders
    settings: tuple[str, ...] = ()
    usual: bool = False  # run where --methods is not given


METHODS: dict[str, Approach] = {
    "Local Train": Approach("no federation", "local", usual=True),
    REFERENCE: Approach("one network", "fedavg", usual=True),
    "FineTune": Approach("tuned afterwards", "finetune", ("tune_epochs={epochs}",), usual=True),
    "FedDP, λ = 0": Approach("private queries, tuned", "feddp", ("calibration_epochs={epochs}", "lambda=0"), usual=True),
    "FedOAP": Approach("private queries, adapter and head, tuned", "fedoap", ("tune_epochs={epochs}",)),
    "FedRep": Approach("private head", "fedrep", usual=True),
    # not pFLFE: its enhancement and its second aggregation would hide what the private decoder alone does
    "FedPer with decoder": Approach("private decoder", "fedper", ("private=decoder,head",)),
    "LG-FedAvg": Approach("private encoder", "lg_fedavg"),
    "LoRA": Approach("private adapters", "lora"),
    "FedBN": Approach("private normalisation", "fedbn", usual=True),
    "Ditto": Approach("second model", "ditto", usual=True),
    # not FedRoD: its balanced loss differs from the others'
    "APFL": Approach("mixed models", "apfl"),
    "IOP-FL": Approach("mixed over rounds", "iop_fl"),
}
QUERIES, FEDDP, TUNED = "FedDP's queries alone", "FedDP, λ = 0", "FineTune"
EARLIER = {TUNED: REFERENCE, FEDDP: QUERIES}  # a run before its last local stage is another row's
FAMILIES = {label: approach.family for label, approach in METHODS.items()} | {QUERIES: "private queries"}
Rows = list[tuple[float, int, str, str, float]]  # (value, seed, label, site, Dice)
Interval = tuple[float, float] | None  # None: of too few observations
Intervals = dict[str, dict[float, Interval]]  # {label: {value: of the difference to FedAvg's Dice}}


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

    def options(self, seed: int, label: str) -> Options:
        """Returns the options of a method's runs."""
        approach = METHODS[label]
        own = tuple(setting.format(epochs=self.epochs) for setting in approach.settings)
        return Options(
            method=approach.method,
            rounds=self.rounds,
            network=self.network,
            size=self.size,
            seed=seed,
            settings=("start=last", *own, *self.settings),
        )

    def require(self, seed: int, label: str) -> None:
        """Raises InputError if a method cannot run: its plan is refused, its private rule does not fit the network, or there
        are too few images."""
        plan = self.options(seed, label).plan(METADATA, [f"site-{number}" for number in range(1, self.sites + 1)])
        partition_of(plan, build_network(plan))
        patients = patients_of(self.images)
        splits = split_patients(patients, seed)
        words = [splits[patient] for patient in patients]
        training = sum(word in plan.training.trained_on for word in words)
        if not {plan.training.selection, "test"} <= {*words} or Bounds(**Bounds.admitting(plan)).too_few(training):
            raise InputError(f"--images {self.images}: too few for every split; name more")

    def claim(self, values: Sequence[float]) -> None:
        """Writes the settings beside the results, so that no other campaign takes these for its own.

        Raises:
            InputError: the results on disk are of other settings, or of unknown ones.
        """
        wanted = json.loads(json.dumps({name: value for name, value in asdict(self).items() if name != "out"}))
        self._claim(self.dial, wanted)
        if 0 in values:
            del wanted["dial"]
            self._claim(ALIKE, wanted)

    def _claim(self, name: str, wanted: dict[str, Any]) -> None:
        file, results = self.out / f"{name}.json", self.out / name
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
        return (self.out / self.dial / f"{value:g}" if value else self.out / ALIKE) / f"seed-{seed}"

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

    def require_current(self, value: float, seed: int, label: str) -> None:
        """Raises InputError if the run is on disk and of a version that trains differently."""
        method = METHODS[label].method
        out, here = self.folder(value, seed) / method, behaviour_of(method)
        if (out / RESULTS).exists() and (made := read_results(out).get("behaviour")) != here:
            raise InputError(f"{out} is of a version that trains differently ({made}, here {here}); choose another --out")

    def run(self, value: float, seed: int, label: str) -> Rows:
        """Returns the test Dice of every site, of a run that is on disk or is made; waits for another dial that makes it."""
        folder, approach = self.folder(value, seed), METHODS[label]
        out = folder / approach.method
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            self.require_current(value, seed, label)  # it may have been made meanwhile
            if not (out / RESULTS).exists():
                record = {"date": date.today().isoformat(), "machine": PLACE.machine, "processor": machine()["processor"]}
                write_json(folder / f"{approach.method}.json", record)
                run_here(self.data(value, seed), out, self.options(seed, label), env=PLACE.env)
            remove_spare(out)  # half a gigabyte of each run, which nothing here reads
        found = read_results(out)["sites"]
        return [
            (value, seed, name, site, DICE * found[site][WHEN[when == FINAL]]["dice"]["mean"])
            for name, when in measured(label).items()
            for site in found
        ]

    def tested(self, value: float, seeds: Sequence[int], labels: Sequence[str]) -> PatientScores:
        """Returns the Dice of the test images of finished runs. A site counts once per seed: its images differ."""
        names, rows = dict[str, Mapping[str, str]](), defaultdict[str, dict[str, dict[str, Row]]](dict)
        for seed in seeds:
            with locked(self.folder(value, seed) / ".lock"):
                data = self.data(value, seed)
            for label in labels:
                for name, when in measured(label).items():
                    for site, found in read_rows(self.folder(value, seed) / METHODS[label].method, when, IMAGE).items():
                        rows[name][f"seed {seed}, {site}"] = found
                        names[f"seed {seed}, {site}"] = patients(SiteFolder.open(data / site))
        return PatientScores.of(rows, "dice", names)


def measured(label: str) -> dict[str, str]:
    """Returns {row of the table: before or after the last stage at a site} of a run."""
    return ({EARLIER[label]: BEFORE} if label in EARLIER else {}) | {label: FINAL}


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


def by_seeds(rows: Rows) -> Intervals:
    """Returns the interval over the seeds of the mean difference, Student's."""
    found = means(rows)
    return {
        label: {
            value: interval_of_few([dice - found[REFERENCE][value][seed] for seed, dice in seeds.items()])
            for value, seeds in values.items()
        }
        for label, values in found.items()
        if label != REFERENCE
    }


def by_patients(tests: Mapping[float, PatientScores]) -> Intervals:
    """Returns the interval over the test patients of the mean difference: a bootstrap within each site."""
    found: Intervals = defaultdict(dict)
    for value, tested in tests.items():
        for column, label in enumerate(tested.methods):
            if label != REFERENCE:
                found[label][value] = tested.apart(column, tested.methods.index(REFERENCE))[1] if tested.enough else None
    return dict(found)


def onset(intervals: Mapping[float, Interval]) -> float | str:
    """Returns the lowest value from which on every interval lies above 0, or NEVER; UNKNOWN where an interval is missing."""
    first: float | str = NEVER
    for value in sorted(intervals, reverse=True):
        found = intervals[value]
        if found is None:
            return UNKNOWN
        if found[0] <= 0:
            return first
        first = value
    return first


def write_onsets(campaign: Campaign, rows: Rows, intervals: Intervals, over: str) -> dict[str, float | str]:
    """Writes each method's differences and its onset as CSV, and the onsets as one line of JSON; prints and returns them."""
    found, onsets = means(rows), {label: onset(values) for label, values in intervals.items()}
    with open(campaign.out / f"{campaign.dial}_onset.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("method", "family", "value", "difference", "low", "high", "onset"))
        for label, values in intervals.items():
            for value in sorted(values):
                difference = mean(dice - found[REFERENCE][value][seed] for seed, dice in found[label][value].items())
                numbers = (f"{number:.3f}" for number in (difference, *(values[value] or ())))
                cells = (*numbers, "", "")[:3]
                table.writerow((label, FAMILIES[label], f"{value:g}", *cells, onsets[label]))
    line = {"dial": campaign.dial, "reference": REFERENCE, "chance": over, "onset": onsets}
    write_text(campaign.out / f"{campaign.dial}_onset.json", json.dumps(line, ensure_ascii=False) + "\n")
    say(f"{campaign.dial}: from which value on the Dice exceeds {REFERENCE}'s beyond chance (95 % interval over {over})")
    for label, first in onsets.items():
        say(f"{label:24} {FAMILIES[label]:22} {first}")
    return onsets


def draw(path: Path, dial: str, rows: Rows, onsets: Mapping[str, float | str]) -> None:
    """Draws the mean over seeds, with a band from the lowest to the highest: Dice, and the paired difference to FedAvg.

    A star marks the onset.
    """
    found, figure = means(rows), Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (label, values) in enumerate(found.items()):
        for axis, reference in ((left, {}), (right, found[REFERENCE])):
            paired = {
                value: [dice - (reference[value][seed] if reference else 0) for seed, dice in seeds.items()]
                for value, seeds in sorted(values.items())
            }
            heights = [mean(dices) for dices in paired.values()]
            style = "-" if number < COLOURS else "--"
            (line,) = axis.plot(list(paired), heights, style, marker=".", label=label)
            low, high = ([pick(dices) for dices in paired.values()] for pick in (min, max))
            axis.fill_between(list(paired), low, high, color=line.get_color(), alpha=0.12, linewidth=0)
            if reference and (start := onsets.get(label)) in paired:
                axis.plot([start], [mean(paired[start])], "*", color=line.get_color(), markersize=13, clip_on=False)
    left.set(xlabel=dial, ylabel="test Dice (%), mean of sites")
    right.set(xlabel=f"{dial}; a star is the onset", ylabel=f"difference to {REFERENCE}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


def _value(text: str) -> float:
    """Reads where a dial stands, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return value


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "feddp bench dials", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dial", choices=[dial.name for dial in fields(Dials)])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--values", type=_value, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--seeds", type=natural, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--network", default=DEFAULT)
    parser.add_argument("--sites", type=count, default=4)
    parser.add_argument("--images", type=count, default=60, help="per site")
    parser.add_argument("--size", type=pixels, default=64)
    parser.add_argument("--rounds", type=count, default=50)
    parser.add_argument("--epochs", type=natural, default=10, help="of tuning and calibration")
    parser.add_argument("--thin", action="store_true", help="vessels instead of lesions")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="for every method")
    given = vars(parser.parse_args(arguments))
    values, seeds, labels = given.pop("values"), given.pop("seeds"), given.pop("methods")
    values, seeds = sorted(set(values)), list(dict.fromkeys(seeds))
    labels = labels or [label for label, approach in METHODS.items() if approach.usual]
    labels = [label for label in dict.fromkeys(labels) if label != REFERENCE]
    labels = labels if TUNED in labels else [REFERENCE, *labels]  # the others are compared with it
    campaign = Campaign(**given | {"settings": tuple(given["settings"])})
    for label in labels:
        campaign.require(max(seeds), label)
    runs, rows = [(value, seed, label) for seed in seeds for value in values for label in labels], Rows()
    for made in runs:
        campaign.require_current(*made)
    campaign.claim(values)
    for number, (value, seed, label) in enumerate(runs, 1):
        note(f"{number} of {len(runs)}: {campaign.dial} {value:g}, seed {seed}, {label}")
        rows += campaign.run(value, seed, label)
        write(campaign.out / f"{campaign.dial}.csv", rows)
    if len(seeds) < FEW:
        intervals = by_patients({value: campaign.tested(value, seeds, labels) for value in values})
        over = f"the test patients of {counted(len(seeds), 'seed')}; training's chance is not in it"
    else:
        intervals, over = by_seeds(rows), f"{len(seeds)} seeds"
    onsets = write_onsets(campaign, rows, intervals, over)
    draw(campaign.out / f"{campaign.dial}.png", campaign.dial, rows, onsets)
    say(campaign.out / f"{campaign.dial}.png")
