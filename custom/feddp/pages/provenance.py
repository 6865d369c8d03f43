"""What a run was: its plan and the plan's digest, versions, and the SHA-256 of every network's file."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddp.errors import InputError
from feddp.files import NETWORK, RESULTS, RUN, site_folder
from feddp.limits import NETWORK_BYTES, RESULTS_BYTES
from feddp.pages.collected import FinishedRun
from feddp.plan.schema import Plan
from feddp.reading import opened, read_json

_BLOCK = 1 << 20
_SHOWN = ("method", "network", "rounds", "size", "seed", "channels", "classes", "labels", "stages", "behaviour", "selection")


@dataclass(frozen=True)
class Provenance:
    """Of one run; `digest` is "" and `versions` empty where its folder has no run.json, as a downloaded job's.

    `participants` has the versions that the sites and the server told at the job's start, by those who have the same ones.
    """

    plan: dict[str, str]
    digest: str
    place: str
    versions: Mapping[str, str]
    participants: Mapping[str, str]
    hashes: dict[str, str]  # {file, relative to the run's folder: SHA-256 in hex}


def provenance(run: FinishedRun) -> Provenance:
    """InputError where run.json is damaged, or the versions in results.json are."""
    plan = {name: _text(run.results[name]) for name in _SHOWN if name in run.results}
    plan |= {f"set {name}": _text(value) for name, value in sorted(run.results.get("settings", {}).items())}
    path, stored = run.folder / RUN, {}
    if path.exists():
        stored = read_json(path, RESULTS_BYTES, run.folder)
        if not isinstance(stored, dict) or not isinstance(stored.get("plan"), dict):
            raise InputError(f"{path} is damaged: it holds no plan; remove the file to have a report without it")
        if not isinstance(stored.get("versions", {}), dict):
            raise InputError(f"{path} is damaged: its versions are no names and versions; remove the file, or that entry")
    versions = {str(name): str(version) for name, version in stored.get("versions", {}).items()}
    return Provenance(plan, _digest(stored.get("plan")), str(stored.get("env", "")), versions, _participants(run), _hashes(run))


def _participants(run: FinishedRun) -> dict[str, str]:
    told = run.results.get("versions", {})
    if not isinstance(told, dict) or not all(isinstance(found, dict) for found in told.values()):
        raise InputError(f"{run.folder / RESULTS} is damaged: its versions are not those of participants; remove that entry")
    found: dict[str, list[str]] = {}
    for who, versions in told.items():
        found.setdefault(", ".join(f"{name} {version}" for name, version in versions.items()), []).append(str(who))
    return {", ".join(names): text for text, names in found.items()}


def _digest(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return ""
    try:
        return Plan.from_json(plan).digest()
    except InputError:  # of another version, whose digest this one does not know
        return "of another version of feddp"


def _hashes(run: FinishedRun) -> dict[str, str]:
    files = [*sorted(run.folder.glob("*.safetensors")), *(site_folder(run.folder, site) / NETWORK for site in run.sites)]
    return {str(path.relative_to(run.folder)): _sha256(path, run.folder) for path in files if path.is_file()}


def _sha256(path: Path, run: Path) -> str:
    digest = hashlib.sha256()
    with opened(path, NETWORK_BYTES, run) as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
