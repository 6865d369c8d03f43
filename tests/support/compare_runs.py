"""A stand-in for a run that leaves what a finished one leaves, in milliseconds, for the tests of `feddp compare`."""

import csv
import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from feddp.cli import app
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError
from feddp.methods.base import STAGES
from feddp.networks import build
from feddp.networks.weights import save_network
from feddp.training.claim import is_unused
from feddp.training.metrics import summarize

SITES = ("site-1", "site-2")


def row(dice: float) -> dict[str, float]:
    """All metrics follow from Dice, so that a test's numbers can be checked by hand: ASSD = 10 (1 − Dice) pixels."""
    distance = 10 * (1 - dice)
    return {"dice": dice, "iou": dice / (2 - dice)} | dict.fromkeys(("hd", "hd95", "assd", "assd-medpy"), distance)


def write_run(
    folder: Path,
    dice,
    selection: str = "val",
    events: list[dict] = (),
    size: int = 32,
    federated: bool = True,
    method: str = "feddp",
    seed: int = 0,
    **more,
) -> Path:
    """A finished run's folder. `dice`: {site: {slot: {image: Dice}}}, slots in the order of the stages.

    `more` replaces entries of results.json.
    """
    for site, slots in dice.items():
        (folder / "sites" / site).mkdir(parents=True)
        with open(folder / "sites" / site / "images.csv", "w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, ["network", "image", *row(0)])
            writer.writeheader()
            for slot, images in slots.items():
                writer.writerows({"network": slot, "image": image, **row(value)} for image, value in images.items())
    (folder / "progress.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    present = {slot for slots in dice.values() for slot in slots}
    stages = [stage for stage, slot in STAGES.items() if slot in present]
    results = {"selection": selection, "size": size, "stages": stages, "federated": federated, "missing": {}, "average": {}}
    results |= {"method": method, "network": "toy", "rounds": 3, "seed": seed}
    results["sites"] = {site: _summaries(slots) for site, slots in dice.items()}
    (folder / "results.json").write_text(json.dumps(results | more), encoding="utf-8")
    return folder


def _summaries(slots) -> dict[str, dict]:
    """Before: of the last slot but one, where there is one; final: of the last."""
    networks = [summarize([row(value) for value in images.values()]) for images in slots.values()]
    return {"before_calibration": networks[-2:][0], "final": networks[-1]}


def write_cases(folder: Path, dice) -> Path:
    """Adds volumes to a run of `write_run`: {site: {slot: {case: Dice}}}."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for site, slots in dice.items():
        results["sites"][site]["volumes"] = {}
        with open(folder / "sites" / site / "cases.csv", "w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(["network", "case", "dice", "iou"])
            writer.writerows((s, case, d, d / (2 - d)) for s, cases in slots.items() for case, d in cases.items())
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def asked(nbytes: int) -> dict:
    return {"sites": [*SITES], "bytes": dict.fromkeys(SITES, nbytes)}


def federation(rounds: int, home: bool) -> list[dict]:
    """The events of a run: 100 bytes to and from each site a round, 2 s a round; in local stages 3 bytes each way and 5 s."""
    events, now = [], 0.0
    for t in range(1, rounds + 1):
        events.append({"event": "ask", "time": now, "task": "train", "round": t, **asked(100)})
        now += 2
        for i, site in enumerate(SITES):
            scalars = {"loss": 1.0, "seconds": 1.5} | ({"dice": 0.5, "iou": (t - 1) / 10 + i / 100} if t > 1 else {})
            answer = {"event": "answer", "time": now, "site": site, "task": "train", "round": t, "bytes": 100}
            events.append(answer | {"scalars": scalars})
        events.append({"event": "round", "time": now, "round": t, "of": rounds, "seconds": 2.0})
    events.append({"event": "ask", "time": now, "task": "adopt", "round": rounds, **asked(100)})
    for i, site in enumerate(SITES):
        answer = {"event": "answer", "time": now + 1, "site": site, "task": "adopt", "round": rounds, "bytes": 0}
        events.append(answer | {"scalars": {"dice": 0.5, "iou": rounds / 10 + i / 100}})
    if home:
        for task, sent, given, when in (("collect", 0, 3, 10.0), ("calibrate", 3, 0, 12.0)):
            events.append({"event": "ask", "time": when, "task": task, **asked(sent)})
            for site in SITES:
                answer = {"event": "answer", "time": when + 3, "site": site, "task": task, "bytes": given, "scalars": {}}
                events.append(answer)
    events.append({"event": "ask", "time": 20.0, "task": "evaluate", **asked(0)})
    events += [{"event": "answer", "time": 30.0, "site": s, "task": "evaluate", "bytes": 0, "scalars": {}} for s in SITES]
    return events + [{"event": "done", "time": 30.0}]


def tested(site: Path) -> list[str]:
    """The first two test images of a site's folder."""
    return [row.image for row in SiteFolder.open(site).rows_of("test")][:2]


class FakeRuns:
    """In the place of `feddp.run.options.run_here`.

    Attributes:
        calls: (folder's path below runs/, options) of each run that was started.
        places: (env, device, threads) of each.
        broken: methods whose runs fail with `error`, leaving a half-written folder behind.
    """

    def __init__(self):
        self.calls: list = []
        self.places: list = []
        self.broken: set[str] = set()
        self.error = FedDPError

    def __call__(self, data, out, options, env="sim", device="cpu", threads=None, without_consent=(), sites=SITES, rounds=None):
        assert is_unused(out), "feddp run refuses a folder that holds anything"
        self.calls.append((f"{out.parent.name}/{out.name}", options))
        self.places.append((env, device, threads))
        (out / "workspace").mkdir()
        if options.method in self.broken:
            raise self.error(f"the job failed: {options.method} | diverged at 50%")
        shutil.rmtree(out)
        calibrated = options.method == "feddp" and options.calibration_epochs != 0 or options.then == "igc"
        start = 0.5 + 0.01 * len(options.method) + 0.02 * options.seed
        slots = {"start": start} | ({"calibrated": start + 0.1} if calibrated else {})
        dice = {}
        for i, site in enumerate(sites):
            first, second = tested(data / site)
            dice[site] = {slot: {first: value - 0.1 * i, second: value - 0.2} for slot, value in slots.items()}
        named = {"method": options.method, "seed": options.seed, "rounds": options.rounds, "network": options.network}
        selection = "test" if "selection=test" in options.settings else "val"
        write_run(out, dice, selection, events=federation(options.rounds, calibrated), **named)
        (out / "workspace").mkdir()
        network = build(options.network, 3, 1, seed=options.seed)
        metadata = {"network": options.network, "channels": "3", "classes": '["lesion"]', "size": "32", "labels": "nested"}
        save_network(out / "shared.safetensors", network.state_dict(), {"round": str(options.rounds)})
        for site in sites:
            save_network(out / "sites" / site / "network.safetensors", network.state_dict(), metadata)
        return {}


def break_off(run: Path) -> None:
    """Makes a finished run's folder that of a run which was broken off."""
    record = run.with_name(f"{run.name}.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"finished": False}))
    (run / "results.json").unlink()
    (run / "run.json").write_text("{}")


def compare_in(out: Path, network: str, root: Path):
    """Runs `feddp compare` at 32 px for two rounds, on `root` unless told, always into `out`; gives typer's result."""

    def run(*arguments, data=root):
        common = ["--data", data, "--out", out, "--network", network, "--size", 32, "--rounds", 2]
        return CliRunner().invoke(app, ["compare", *map(str, [*common, *arguments])])

    return run


def read(path: Path) -> list[dict[str, str]]:
    """A CSV's rows."""
    with open(path, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))
