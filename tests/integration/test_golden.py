"""Golden results: every method's short run, as it was when golden.json was written.

This is a regression record: it says that numbers have changed, not that they were right. What is right is derived elsewhere
(test_method_numbers, test_fedlc, test_calibration, ...). A change that is meant to change numbers comes with a record written
anew by `PYTHONPATH=.:tests python tests/integration/test_golden.py`, and says why.

Tolerances. Another build of torch, or another processor, rounds in another order. AdamW's first steps depend on a gradient's
sign more than on its size, so where a gradient is near 0, rounding can move a weight by its whole step: losses and norms are
compared to 1e-3 (or 1e-4 where they are near 0). Overlaps count pixels beyond a threshold, where one pixel of a small lesion
is already a hundredth: they may differ by 0.02, and boundary distances by 0.02 of their own value or 0.1 pixels. How far a
network moved is a difference of near numbers, compared to 2e-3.

The networks have the default one's layers with few channels, SiloBN's a ResNet's, and learn: with FedAvg site 1's Dice is 0.54
on validation images and 0.49 on test images; FedLC's new head alone finds nothing yet. At 32 pixels their last stage would be
one pixel, where the decoder's normalisation of one channel divides rounding errors by nearly 0. A processor with AMX,
and the same with AVX2 alone (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS), differ by at most a tenth of
what is allowed.
"""

import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.small import narrow, narrow_resnet
from feddp.data.synthesize import synthesize
from feddp.methods import METHODS
from feddp.networks import NETWORKS
from feddp.plan.resolve import build_network
from feddp.plan.schema import Plan
from feddp.stages.evaluate import evaluate
from feddp.stages.site import SLOTS
from support import ROOT
from support.driven import drive

RECORD = ROOT / "tests/golden.json"
SITES = ("site-1", "site-2")
RUN = {"channels": 3, "classes": ("lesion",), "labels": "nested", "size": 64, "rounds": 2, "sites": SITES}
SETTINGS = {"batch": 4, "tune_epochs": 1, "heads_epochs": 2, "calibration_epochs": 2, "start": "last"}
SETTINGS |= {"tune_lr": 3e-4, "calibration_lr": 3e-4}
FEW = {"pvt": narrow, "resnet": narrow_resnet}
TOLERANCES = {"dice": {"abs": 0.02}, "iou": {"abs": 0.02}, "assd": {"rel": 0.02, "abs": 0.1}}
MOVED = {"rel": 2e-3, "abs": 1e-4}


@patch.dict(NETWORKS, FEW)
def results_of(method: str, data: Path, folder: Path) -> dict[str, dict]:
    """A run of all of the method's stages, every site consenting; per site what came of it.

    Centralized has one site here: its pooling of several is tested with the process that pools.
    """
    plan = Plan(method=method, network="resnet" if method == "silobn" else "pvt", **RUN, settings=SETTINGS)
    results = {}
    for name, site in drive(plan, data, folder, SITES if METHODS[method].federated else SITES[:1]).items():
        events = [json.loads(line) for line in (site.store.folder / "record.jsonl").read_text().splitlines()]
        final = evaluate(site)["final"]
        state, _ = site.store.read(next(slot for slot in reversed(SLOTS) if site.store.has(slot)))
        start = build_network(plan).state_dict()
        results[name] = {
            "losses": [event["loss"] for event in events if "loss" in event],
            "adopted": {metric: [e[metric] for e in events if e["event"] == "score"][-1] for metric in ("dice", "iou")},
            "test": {metric: final[metric]["mean"] for metric in TOLERANCES},
        }
        for what, tensors in (("norms", state), ("moved", {key: state[key] - start[key] for key in floating(start)})):
            results[name][what] = {part: norm(tensors, part) for part in ("encoder", "decoder", "segmentation_head")}
    return results


def floating(state):
    return [key for key, value in state.items() if value.is_floating_point()]


def norm(state, part):
    """The L2 norm over the tensors of a part of the network."""
    return sum(v.double().square().sum() for key, v in state.items() if key.startswith(part)).sqrt().item()


def flat(results, path=()):
    """Every number under its path, such as ("site-1", "test", "dice")."""
    if not isinstance(results, dict | list):
        return {path: results}
    items = results.items() if isinstance(results, dict) else enumerate(results)
    return {key: value for name, part in items for key, value in flat(part, (*path, name)).items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_short_run_gives_what_it_gave(method, tiny_root, tmp_path):
    record = json.loads(RECORD.read_text())
    assert method in record, f"{RECORD.name} has no {method}; the docstring of this file says how to write it anew"
    found, wanted = flat(results_of(method, tiny_root, tmp_path)), flat(record[method])
    assert found.keys() == wanted.keys()
    near = {p: pytest.approx(v, **tolerance(p)) for p, v in wanted.items()}
    assert found == near


def tolerance(path):
    return MOVED if "moved" in path else TOLERANCES.get(path[-1], {"rel": 1e-3, "abs": 1e-4})


def write() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(data, sites=2, images=12, size=32)
        record = {method: results_of(method, data, Path(folder) / method) for method in METHODS}
    rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}"))
    RECORD.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    write()
