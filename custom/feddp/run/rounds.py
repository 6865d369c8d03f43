"""Rounds that several runs have in common (`feddp compare --env local`): one run trains them, the others go on after them.

FedDP with λ = 0 and with λ = 1 differ in the calibration alone, FineTune and FedAvg in the tuning and in the round that they
choose. What the participants have on their disks after the last round, as a run that is killed then would leave it, serves
all of them; each has the bits of a run of its own. The seconds of the rounds are those of the run that trained them.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

from feddp.errors import StorageError
from feddp.files import Event, write_json, writing
from feddp.flare.kept import files_of, kept_below
from feddp.jobs.folder import LOCAL
from feddp.methods import METHODS
from feddp.methods.base import TRAIN, Method
from feddp.plan.schema import Plan
from feddp.stages.memory import LATEST, ServerMemory
from feddp.terminal import note
from feddp.training.claim import PLAN
from feddp.training.settings import Calibration, Heads, Tuning, key

_LATER = {key(each.name) for group in (Tuning, Calibration, Heads) for each in fields(group)} | {"start"}
# in a method's class, what does not change its rounds
_NO_ROUND = {"stages", "label", "__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__"}


def digest_of(plan: Plan) -> str:
    """Returns a digest that is equal for plans with the same rounds: those that differ in later stages, in their settings, or
    in the round that they choose."""
    content = plan.to_json()
    trained = {
        **content,
        "method": _trains(METHODS[plan.method]),
        "stages": plan.stages[: plan.stages.index(TRAIN) + 1],
        "settings": {name: value for name, value in content.get("settings", {}).items() if name not in _LATER},
        "best_per_site": plan.best_per_site,  # its sites note their own best rounds
    }
    return sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()


def _trains(method: type[Method]) -> str:
    """Names the class that defines a method's rounds: its base, where it changes nothing but the stages and its label."""
    while vars(method).keys() <= _NO_ROUND and len(method.__bases__) == 1:
        (method,) = method.__bases__
    return f"{method.__module__}.{method.__qualname__}"


def keep(memory: ServerMemory, workspace: Path, folder: Path, event: Event) -> None:
    """Takes the participants' files into `folder` when `event` is the end of the last round; nothing where it has some.

    A round without a site is this run's own bad luck: then nothing is kept. Nor is it where the disk does not take it: the run
    goes on, and the others train by themselves.
    """
    plan = memory.plan
    if event["event"] != "round" or event["round"] != plan.rounds or memory.missed or folder.exists():
        return
    part = _part(folder)
    try:
        shutil.rmtree(part, ignore_errors=True)  # of an attempt that was killed
        for name, source in _participants(plan, workspace):
            _copy(source, part / name, plan)
        os.replace(part, folder)
    except (OSError, StorageError) as error:
        note(f"warning: these rounds are not kept for other runs: {error}")
        shutil.rmtree(part, ignore_errors=True)


def take(plan: Plan, workspace: Path, folder: Path) -> None:
    """Puts what `keep` left in `folder`, if it left something, into the workspace of a run that has no round of its own."""
    participants = dict(_participants(plan, workspace))
    if not folder.exists() or (participants["server"] / f"{LATEST}.safetensors").exists():
        return
    note(f"its {plan.rounds} rounds are those of another run of this comparison")
    with writing(workspace):
        for name, target in reversed(participants.items()):  # the server last: by its file the run has rounds
            _copy(folder / name, target, plan)


def remove(folder: Path) -> None:
    """Removes what `keep` left in `folder`. What is half removed does not look whole."""
    part = _part(folder)
    shutil.rmtree(part, ignore_errors=True)
    folder.rename(part)
    shutil.rmtree(part)


def _part(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.part")


def _participants(plan: Plan, workspace: Path) -> Iterator[tuple[str, Path]]:
    """The server's and every site's own folder of the run."""
    for name in ("server", *plan.sites):
        yield name, files_of(kept_below(workspace / name), LOCAL)


def _copy(source: Path, target: Path, plan: Plan) -> None:
    """Tensors by a second name of their file, which nobody edits; files to which lines are added as they are; the `plan`'s own
    plan.json."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(target / PLAN, plan.to_json())
    for path in sorted(source.glob("[!.]*"), key=lambda path: path.stem == LATEST):
        if path.name != PLAN:
            (target / path.name).unlink(missing_ok=True)  # of an attempt that was killed
            (os.link if path.suffix == ".safetensors" else shutil.copy)(path, target / path.name)
