"""What benchmarks share: images in memory, measurements in interleaved pairs, calls in processes of their own, the report with
the machine it was made on."""

import argparse
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import date
from importlib.metadata import packages_distributions, version
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

from feddp.adaptation.models import network_files, plan_of
from feddp.data.folder import SiteFolder
from feddp.data.habits import habits_of
from feddp.data.loading import Sample, class_maps, network_input
from feddp.data.progress import track
from feddp.data.synthesize import draw
from feddp.errors import FedDPError
from feddp.files import PROGRESS, RECORD, Event, read_events, read_results, site_folder
from feddp.lean import postpone_compiler
from feddp.limits import SIZE
from feddp.networks.metadata import STEP
from feddp.networks.weights import load_personal
from feddp.plan.schema import Plan
from feddp.protocol import TRAIN
from feddp.terminal import say
from feddp.training.device import wait
from feddp.training.loop import predict
from feddp.training.metrics import measure

DRAWN = 96  # pixels: drawing one of 384 takes a quarter of a second
STDERR = 2  # for what processes write that is no figure
FP32, BF16 = "float32", "bfloat16"


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(f"feddp bench {name}", description=(about or "").splitlines()[0])


def count(text: str) -> int:
    """Reads a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """Reads a whole number of at least 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def pixels(text: str) -> int:
    """Reads the side of a network's input, of a size that a plan may have, for argparse."""
    if not text.isdecimal() or int(text) not in range(STEP, SIZE + 1, STEP):
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {STEP} from {STEP} to {SIZE}")
    return int(text)


def of_a_run(name: str, about: str | None, run: str) -> argparse.ArgumentParser:
    """Returns a parser of `RUN --data DATA`; the help says `run` of RUN."""
    options = parser(name, about)
    options.add_argument("run", type=Path, help=run)
    options.add_argument("--data", type=Path, required=True)
    return options


def finished(run: Path, data: Path) -> tuple[Plan, dict[str, nn.Module], dict[str, SiteFolder]]:
    """Returns a finished run's plan, its sites' networks, and these sites' folders below `data`."""
    networks = {site: load_personal(file) for site, file in network_files(run).items()}
    folders = {site: SiteFolder.open(data / site) for site in networks}
    return plan_of(run, read_results(run)), networks, folders


@torch.no_grad()
def image_dice(network: nn.Module, samples: Sequence[Sample]) -> list[float]:
    """Returns the Dice of each image, in per cent."""
    return [100 * row["dice"] for maps, batch in predict(network, samples) for row in measure(maps, batch["mask"])]


def images(number: int, size: int) -> list[Sample]:
    """Returns synthetic RGB images of lesions, the same ones every time, as a site loads them; large ones are resized."""
    habits, samples = habits_of(0, 0), []
    for at in track(range(number), "Drawing images"):
        image, mask = draw(habits, min(size, DRAWN), np.random.default_rng(at))
        maps = F.interpolate(class_maps(torch.from_numpy(mask), 1, "nested")[None], (size, size))[0]  # the nearest pixel
        samples.append(Sample(image=network_input(image, size), mask=maps, stem=f"image-{at}", patient=f"P{at}"))
    return samples


def computing(compute: str, graphs: bool = False) -> dict[str, str]:
    """Returns the settings with which a site computes in `compute`, with CUDA graphs or without."""
    return {"precision_compute": compute, "cuda_graphs": str(graphs).lower()}


def interleaved(
    what: str, pairs: int, calls: Mapping[str, Callable[[], object]], device: str = "cpu", warm: bool = True
) -> dict[str, list[float]]:
    """Returns each call's seconds, `pairs` of them, after one call that is not counted (`warm`).

    The calls take turns, and every second turn runs backwards, so that other work on the machine meets all of them alike.
    """
    for call in calls.values() if warm else ():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in track(range(pairs), what):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            wait(device)
            started = time.perf_counter()
            calls[name]()
            wait(device)
            seconds[name].append(round(time.perf_counter() - started, 6))
    return seconds


def apart(
    work: Callable[..., dict[str, Any]], calls: Mapping[str, Sequence[object]], processes: int, seconds: float
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Yields each call's name with what `work` returns for its arguments, as soon as it is known.

    Every call has a process of its own, so that one that dies, or breaks its connection to the GPU, harms no other. Of a call
    that raises, dies or takes too long the yield is {"error": the cause}. What still runs when the caller stops is ended.

    Args:
        processes: at once, at most.
        seconds: until a call has taken too long.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    waiting, running = list(calls.items()), dict[Connection, tuple[str, BaseProcess, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                name, given = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_answer, args=(sender, work, given))
                process.start()
                sender.close()  # the process has the only one left: if it dies, the receiver is at its end
                running[receiver] = name, process, time.monotonic() + seconds
            connection.wait(list(running), max(0.0, min(end for _, _, end in running.values()) - time.monotonic()))
            for receiver, (name, process, end) in list(running.items()):
                if receiver.poll():
                    found = _received(receiver, process)
                elif time.monotonic() >= end:
                    found = {"error": f"no answer within {seconds:g} s"}
                else:
                    continue
                process.kill()
                process.join()
                del running[receiver]
                yield name, found
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()


def caught(work: Callable[..., dict[str, Any]], given: Sequence[object]) -> dict[str, Any]:
    """Returns what `work` returns, or {"error": what it raised}, whose traceback goes to stderr."""
    try:
        return work(*given)
    except Exception as error:  # a computation on a device may raise any error
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _answer(sender: Connection, work: Callable[..., dict[str, Any]], given: Sequence[object]) -> None:
    postpone_compiler()  # as the command itself does; torch is imported already, with `work`
    sender.send(caught(work, given))


def _received(receiver: Connection, process: BaseProcess) -> dict[str, Any]:
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        found = {"error": f"its process ended with exit code {process.exitcode}, without an answer"}
    return found


def ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles of the ratios of pairs."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": round(median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}


def shown(found: Mapping[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def machine(device: str = "cpu") -> dict[str, Any]:
    """Returns what the figures depend on, and the load of now: of the benchmark, which has just ended, and of others."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    driver = Path("/proc/driver/nvidia/version")
    gpu = torch.cuda.get_device_properties(device) if torch.device(device).type == "cuda" else None
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "gpu": gpu and gpu.name,
        "gpu_bytes": gpu and gpu.total_memory,
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of the packages that this process has imported."""
    owners = packages_distributions()
    return {name: version(name) for module in sorted(sys.modules) for name in owners.get(module, ())}


def run(data: Path, out: Path, env: str, *options: object) -> None:
    """Runs `feddp run` in a process of its own, as a user does; its progress goes to stderr.

    Raises:
        FedDPError: the run failed; its own message is on stderr.
    """
    command = [sys.executable, "-m", "feddp", "run", "--data", data, "--out", out, "--env", env, *options]
    if code := subprocess.run(list(map(str, command)), stdout=STDERR, check=False).returncode:
        raise FedDPError(f"the run in {env} ended with exit code {code}; its message is above")


def own_trainings(out: Path) -> dict[tuple[str, int, int], Event]:
    """Returns {(site, round from 1, phase): its training in the site's own log} of a finished run."""
    return {
        (site, event["round"] + 1, event["phase"]): event
        for site in read_results(out)["sites"]
        for event in read_events(site_folder(out, site) / RECORD)
        if event["event"] == TRAIN
    }


def events_of(out: Path) -> list[Event]:
    """Returns a finished run's events; answers to train with the seconds that the site noted for itself, and `done`: when.

    The guard rounds a site's seconds to tenths when they leave it. Rounds that are alike are rounded alike, so no median over
    them removes the error.
    """
    own, events, slowest = own_trainings(out), read_events(out / PROGRESS), dict[int, float]()  # {phase: of the present round}
    for event in events:
        if event["event"] == "answer" and event["task"] == TRAIN:
            phase = event["phase"]
            noted = own[event["site"], event["round"], phase]
            event["done"] = noted["time"]
            seconds = event["scalars"]["seconds"] = noted["seconds"]
            slowest[phase] = max(slowest.get(phase, 0.0), seconds)
        elif event["event"] == "round":
            event["beyond_compute"] = event["seconds"] - sum(slowest.values())
            slowest.clear()
    return events


def kind_of(process: psutil.Process) -> str:
    """Returns which of FLARE's programs a process runs, by the module's name: server_train, worker_process, ..."""
    found = re.search(r"nvflare\.(?:\w+\.)*(\w+)", " ".join(process.cmdline()))
    return found.group(1) if found else process.name()


def report(
    name: str, heads: Sequence[str], rows: Sequence[Sequence[object]], figures: Mapping[str, Any], device: str = "cpu"
) -> None:
    """Prints a table (Markdown) and the figures as one line of JSON."""
    for cells in (heads, ["---"] * len(heads), *rows):
        row(*cells)
    line(name, figures, device)


def row(*cells: object) -> None:
    """Prints a row of a table (Markdown), at once."""
    say(f"| {' | '.join(map(str, cells))} |")


def line(name: str, figures: Mapping[str, Any], device: str = "cpu") -> None:
    """Prints figures as one line of JSON, at once: a run that is cut leaves those before."""
    found = {"benchmark": name, "date": date.today().isoformat(), "machine": machine(device), **figures}
    say(json.dumps(readable(found), ensure_ascii=False, allow_nan=False))


def readable(value: Any) -> Any:
    """Returns the value with a word in place of each number that JSON does not have: "nan", "inf" or "-inf"."""
    if isinstance(value, Mapping):
        return {key: readable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [readable(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
