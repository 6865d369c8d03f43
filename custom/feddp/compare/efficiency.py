"""Table V: what a method costs in time and in bytes, as the server's progress.jsonl and this machine's clock say."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from feddp import protocol
from feddp.compare.scores import Result
from feddp.compare.tables import failed, labelled
from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.files import NETWORK, PROGRESS, Event, read_results, site_folder
from feddp.methods.base import LOCAL_STAGES, SPECTRA, STAGES, TRAIN
from feddp.networks.weights import load_personal
from feddp.reporting.tables import BLANK, Cell, ResultTable, Value
from feddp.stages.accounting import ROUND, SITE, accounted, requests_of
from feddp.stages.events import read_progress
from feddp.training.device import wait

_HEADS = ("Train time (s)", "Local time (s)", "Inference (ms)", "Joint (MB)", "Local (KB)")
_INFERENCE = 2  # its place in _HEADS
_WARM_UP, _TIMED = 3, 20
_CLOCK = (
    "Means over the seeds. Times are wall clock where each run ran, all sites on one machine; inference is batch 1 of one"
    f" site's final network, on {{device}}, the median of at most {_TIMED} test images on this machine after {_WARM_UP} passes."
)
_BYTES = (
    "Joint and Local are the tensors' bytes that the server sent and received, of all sites together, in stage 1 and in the"
    " local stages; MB = 10^6, KB = 10^3 bytes."
)
_NO_NETWORK = f"Inference is {BLANK} where no network of the runs is left."
_TIMES = (
    "Wall, combining and saving are the server's; the rest are means over the sites. Receiving: from the server's request until"
    " the site begins, and its filters; without FLARE also while other sites train. Sending: from the site's answer until the"
    " server has checked it. Both hold the writing of tensors as bytes, which FLARE does while it transfers them.",
)
_STAGE_TIMES = (
    "Means over the seeds: wall clock from each request of a stage until its last answer; of train, the rounds, and"
    " the choice of one at their end. time.json in a run's folder has them by site.",
)


def efficiency_table(methods: Mapping[str, Result], data: Path, device: str) -> ResultTable:
    """One row per method, averaged over its seeds; `data` is the root of the sites' folders, `device` that of inference."""
    rows: list[tuple[Cell, ...]] = [
        (labelled(label, result), *(_row(result, data, device) if result.folders else failed(result, len(_HEADS))))
        for label, result in methods.items()
    ]
    heads = ("Method", *_HEADS)
    blank = any(result.folders and row[1 + _INFERENCE] == BLANK for result, row in zip(methods.values(), rows, strict=True))
    where = "one CPU thread" if torch.device(device).type == "cpu" else f"the device {device}"
    notes = (_CLOCK.format(device=where), _BYTES, *([_NO_NETWORK] if blank else []))
    return ResultTable("efficiency", "Table V: efficiency", heads, (None,) * len(heads), tuple(rows), notes)


def times_table(methods: Mapping[str, Result]) -> ResultTable:
    """One row per method: the mean seconds per round of every part of time.json over rounds, seeds and sites."""
    rows: list[tuple[Cell, ...]] = []
    for label, result in methods.items():
        times = [accounted(read_progress(folder / PROGRESS)) for folder in result.folders.values()]
        cells = [_mean([time["rounds"][name] for time in times]) for name in ROUND]
        cells += [_mean([site[name] for time in times for site in time["sites"].values()]) for name in SITE]
        rows.append((labelled(label, result), *(cells if times else failed(result, len(ROUND + SITE)))))
    heads = ("Method", *(name.capitalize() for name in ROUND + SITE))
    return ResultTable("times", "Seconds per round", heads, (None,) * len(heads), tuple(rows), _TIMES)


def stages_table(methods: Mapping[str, Result]) -> ResultTable:
    """One row per method: the mean seconds of every stage of time.json over seeds."""
    runs = {label: [_stages(folder) for folder in result.folders.values()] for label, result in methods.items()}
    known = {TRAIN, protocol.EVALUATE_STAGE, *(stage for times in runs.values() for time in times for stage in time)}
    names = [stage for stage in (*STAGES, protocol.EVALUATE_STAGE) if stage in known]
    rows: list[tuple[Cell, ...]] = []
    for label, times in runs.items():
        cells = [_mean([[time.get(name) for time in times]]) for name in names]
        rows.append((labelled(label, methods[label]), *(cells if times else failed(methods[label], len(names)))))
    heads = ("Method", *(name.capitalize() for name in names))
    return ResultTable("stages", "Seconds per stage", heads, (None,) * len(heads), tuple(rows), _STAGE_TIMES)


def _stages(folder: Path) -> dict[str, float]:
    return {name: stage["wall"] for name, stage in accounted(read_progress(folder / PROGRESS))["stages"].items()}


def _mean(lists: Sequence[Sequence[float | None]]) -> Cell:
    known = [seconds for each in lists for seconds in each if seconds is not None]
    return Value(float(np.mean(known))) if known else BLANK


def train_seconds(events: list[Event]) -> float:
    """The rounds' wall-clock seconds, of the rounds of which they are known."""
    return float(sum(seconds for seconds in accounted(events)["rounds"]["wall"] if seconds is not None))


def local_seconds(events: list[Event]) -> float:
    """Wall-clock seconds of the local stages after training, each request until its last answer; 0 without them."""
    stages = accounted(events)["stages"]
    return float(sum(stage["wall"] for name, stage in stages.items() if name in LOCAL_STAGES))


def traffic(events: list[Event]) -> tuple[int, int] | None:
    """Bytes of tensors that the server sent and received (up to the end of training, after it); None without events.

    A request that was made again counts as it ended the last time, as its seconds do: what a method costs, not a broken run.
    """
    requests = requests_of(events)
    if not requests:
        return None
    joint, local = 0, 0
    for request in requests:
        if protocol.spec_of(request.task).stage in (SPECTRA, TRAIN):  # the rounds, or an exchange before them
            joint += request.nbytes
        elif request.task != protocol.EVALUATE:
            local += request.nbytes
    return joint, local


def _row(result: Result, data: Path, device: str) -> tuple[Cell, ...]:
    runs = [read_progress(folder / PROGRESS) for folder in result.folders.values()]
    times = [Value(float(np.mean([seconds(run) for run in runs])), digits=1) for seconds in (train_seconds, local_seconds)]
    exchanged = [pair for run in runs if (pair := traffic(run))]
    sizes: list[Cell] = [BLANK, BLANK]
    if exchanged:
        joint, local = np.mean(exchanged, axis=0)
        sizes = [Value(joint / 1e6), Value(local / 1e3)]
    return (*times, _inference(list(result.folders.values()), data, device), *sizes)


def _inference(folders: Sequence[Path], data: Path, device: str) -> Cell:
    """Of the first run and site that have kept a network."""
    for folder in folders:
        results = read_results(folder)
        for site in sorted(results["sites"]):
            path = site_folder(folder, site) / NETWORK
            if path.exists():
                images = [sample["image"] for sample in load(SiteFolder.open(data / site), "test", results["size"])[:_TIMED]]
                return Value(inference_ms(load_personal(path), images, device))
    return BLANK


@torch.no_grad()
def inference_ms(network: torch.nn.Module, images: list[torch.Tensor], device: str = "cpu") -> float:
    """The median milliseconds from an image (C,H,W) to its map, one at a time, without reading it; a CPU has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a site's default; two threads on a busy machine wait for each other
    network.to(device).eval()
    images = [image[None].to(device) for image in images]
    for _ in range(_WARM_UP):
        network(images[0])
    taken = []
    for image in images:
        wait(device)
        started = time.perf_counter()
        network(image)
        wait(device)
        taken.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return 1000 * float(np.median(taken))
