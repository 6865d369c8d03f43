"""Kills random processes of a run at random moments, continues it, and compares the outcome with an unbroken run, bit by bit.

    python tests/chaos.py --env local --method feddp --seed 0 --kills 3 --runs 10 --out /tmp/chaos

Prints one JSON line per run: what was killed and when, how often the run was continued, rounds repeated, bits that differ.
Exit code 1: bits differ, processes are left, or no kill landed in any run.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from safetensors.torch import load_file

ROLES = {  # by a part of the command line
    "server parent": "server.server_train",
    "site parent": "client.client_train",
    "server job": "server.runner_process",
    "site job": "client.worker_process",
    "simulator": "run.patient_simulator",
    "simulated site": "simulator.simulator_worker",
    "worker": "run.worker",
}
STEPS = "ask", "answer", "round"  # the events between which a moment is drawn


@dataclass
class Outcome:
    """What happened to one run."""

    seed: int
    kills: list[str] = field(default_factory=list)
    starts: int = 0
    repeated: int = 0  # rounds or phases asked for again
    differing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # processes that outlived the command by more than a minute
    seconds: float = 0.0


def command(arguments: argparse.Namespace, out: Path, env: str) -> list[str]:
    # a round waits for every site: one that missed a round would rightly change the outcome
    sites = sum((folder / "dataset.json").exists() for folder in arguments.data.iterdir())
    settings = [f"--set={setting}" for setting in (f"min_sites={sites}", *arguments.set)]
    words = ["run", "--data", arguments.data, "--out", out, "--env", env, "--method", arguments.method]
    words += ["--rounds", arguments.rounds, "--calibration-epochs", arguments.epochs, "--size", 32, *settings]
    if arguments.threads and out.name.startswith(env):
        words += ["--threads", arguments.threads]
    return [sys.executable, "-m", "feddp", *map(str, words)]


def events(out: Path) -> list[dict]:
    """The server's events so far, wherever the environment keeps them."""
    places = ("", "workspace/server/feddp/*/", "simulated/simulator_server/feddp/*/", "poc/*/*/localhost/feddp/*/")
    found = [path.read_text(encoding="utf-8") for place in places for path in out.glob(f"{place}progress.jsonl")]
    return [json.loads(line) for line in max(found, key=len, default="").splitlines() if line.endswith("}")]


def family(process: psutil.Process, out: Path) -> dict[str, list[psutil.Process]]:
    """The run's processes by role: all whose command line names its folder, and the command."""
    roles: dict[str, list[psutil.Process]] = {"command": [process]}
    for other in psutil.process_iter(["cmdline"]):
        line = " ".join(other.info["cmdline"] or [])
        if str(out) in line and other.pid not in (process.pid, os.getpid()):
            for role, part in ROLES.items():
                if part in line.split(" --")[0] or f"{part} " in line:
                    roles.setdefault(role, []).append(other)
                    break
    return roles


def unbroken(words: list[str]) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def survive(arguments: argparse.Namespace, seed: int, out: Path, whole: Path) -> Outcome:
    """One run with `arguments.kills` kills; returns what happened."""
    draw, outcome, started = random.Random(seed), Outcome(seed), time.monotonic()
    steps = sum(event["event"] in STEPS for event in events(whole))
    moments = sorted(draw.randrange(1, steps) for _ in range(arguments.kills))
    log = open(f"{out}.log", "w", encoding="utf-8")  # noqa: SIM115
    resumed = [sys.executable, "-m", "feddp", "run", "--resume", str(out)]
    while True:
        outcome.starts += 1
        words = resumed if (out / "run.json").exists() else command(arguments, out, arguments.env)
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            done = sum(event["event"] in STEPS for event in events(out)) if out.exists() else 0
            if moments and done >= moments[0]:
                moments.pop(0)
                time.sleep(draw.random() * arguments.jitter)
                kill(draw, process, out, arguments.roles, outcome, done)
            time.sleep(0.05)
        if process.returncode == 0 or (out / "results.json").exists():  # the last kill may come after the end
            break
        if outcome.starts > arguments.kills + 3:
            outcome.differing.append(f"gave up after {outcome.starts} starts, exit {process.returncode}; see {out}.log")
            break
    outcome.left = outlived(out)
    if (out / "results.json").exists():
        rounds = [(e["task"], e["round"], e["phase"]) for e in events(out) if e["event"] == "ask" and "phase" in e]
        outcome.repeated = len(rounds) - len(set(rounds))
        outcome.differing += differing(whole, out)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def kill(draw: random.Random, process: subprocess.Popen, out: Path, only: str, outcome: Outcome, done: int) -> None:
    roles = family(psutil.Process(process.pid), out)
    roles = {role: found for role, found in roles.items() if not only or role in only.split(",")}
    if not roles:
        return
    role = draw.choice(sorted(roles))
    victim = draw.choice(sorted(roles[role], key=lambda each: each.pid))
    try:
        victim.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
    outcome.kills.append(f"{role} after {done} events")
    if victim.pid == process.pid:
        process.wait()  # the next kill is for the next attempt


def outlived(out: Path) -> list[str]:
    """The run's processes that are still there after a minute."""
    deadline = time.monotonic() + 60
    while True:
        left = [" ".join(p.info["cmdline"])[:120] for p in psutil.process_iter(["cmdline"]) if _is_of(p, out)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _is_of(process: psutil.Process, out: Path) -> bool:
    line = " ".join(process.info["cmdline"] or [])
    return str(out) in line and process.pid != os.getpid() and "chaos" not in line.split(str(out))[0]


def differing(whole: Path, other: Path) -> list[str]:
    """The files of two finished runs that are not equal to the bit; results.json but for the job's id.

    With certificates, a site rounds and withholds what it reports: then images.csv alone has its metrics.
    """
    found = []
    one, two = (json.loads((run / "results.json").read_text(encoding="utf-8")) for run in (whole, other))
    if one["rounded"] == two["rounded"] and {**one, "job": ""} != {**two, "job": ""}:
        found.append("results.json")
    for path in [whole / "shared.safetensors", *sorted(whole.glob("sites/*/network.safetensors"))]:
        tensors, again = load_file(path), load_file(other / path.relative_to(whole))
        if tensors.keys() != again.keys() or not all(tensors[name].equal(again[name]) for name in tensors):
            found.append(str(path.relative_to(whole)))
    for path in sorted(whole.glob("sites/*/images.csv")):
        if path.read_bytes() != (other / path.relative_to(whole)).read_bytes():
            found.append(str(path.relative_to(whole)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="local")
    parser.add_argument("--threads", type=int, help="sites at once in the runs that are killed")
    parser.add_argument("--method", default="feddp")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--jitter", type=float, default=1.0, help="seconds, at most, between an event and the kill")
    parser.add_argument("--roles", default="", help="comma-separated; all of the environment's if empty")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=["batch=4"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    whole = arguments.out / f"whole-{arguments.method}"
    if not (whole / "results.json").exists():  # in one process: it has the bits of any environment
        unbroken(command(arguments, whole, "local"))
    bad = landed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        outcome = survive(arguments, seed, arguments.out / f"{arguments.env}-{arguments.method}-{seed}", whole)
        print(json.dumps(asdict(outcome)), flush=True)
        bad += bool(outcome.differing or outcome.left)
        landed += len(outcome.kills)
    if arguments.kills and not landed:
        roles = arguments.roles or "all"
        print(f"no kill landed: no process to kill was there (--roles {roles}); nothing is shown", file=sys.stderr)
        return 1
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
