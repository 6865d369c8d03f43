"""Describes in words what a kit's policy lets leave, for the administrator who starts the kit."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from feddp.flare.policy import SitePolicy
from feddp.flare.scopes import scopes_of
from feddp.kit.files import KEPT
from feddp.kit.privacy import privacy_file
from feddp.sealing.kit import CLIENT, Kit

# for each property of privacy.json; a property without an entry is shown under its own name
WORDS = {
    "data": "trains on",
    "device": "computes on",
    "consent": "gives to other sites, in addition to the shared tensors that the server averages",
    "recipients": "gives to these sites",
    "senders": "uses what these sites give, in exchanges",
    "private": "never shares, with any method",
    "methods": "accepts these methods",
    "spectra": "mean spectra of groups of patients that a job may ask for, at most",
    "min_images": "images over which a mean may leave, at least",
    "threads": "CPU threads",
    "approve": "accepts these plans, by digest",
    "networks": "accepts these networks",
    "tensors": "initial tensors that a job may bring, by SHA-256",
    "bounds": "bounds for every plan",
    "std_images": "images over which a standard deviation may leave, at least",
    "budget": "jobs and evaluations on the same data, at most",
    "seed": "source of the order of images",
    "keep_days": "days after which the files of an unused run are removed",
}
UNSET = {"keep_days": "never"}  # the meaning of a property that is left out, where it is not "any"


def effective(kit: Kit) -> Iterator[str]:
    """Yields a line for kept files and for each property of each scope, defaults included; none for a server or a person."""
    if kit.kind != CLIENT:
        return
    if (kept := kit.folder / KEPT).exists():  # a person who put it there would know the site's secret
        yield f"keeps {len(list(kept.iterdir()))} files and folders in {kept}; if this kit never ran, remove the folder"
    for name, scope in scopes_of(privacy_file(kit)).items():
        policy = SitePolicy.of(kit.name, scope["properties"], simulated=False)
        yield f"a job under scope {name}"
        for field in fields(policy):
            value = getattr(policy, field.name)
            yield f"  {WORDS.get(field.name, field.name)} ({field.name}): {_of(field, value)}{_changed(field, value)}"


def _changed(field: Field[Any], value: Any) -> str:
    """Returns the default of a property that privacy.json changes; a weaker value is the administrator's own decision."""
    return "" if field.default in (MISSING, value) else f" [default: {_of(field, field.default)}]"


def _of(field: Field[Any], value: Any) -> str:
    return UNSET.get(field.name, "any") if value is None else _words(value)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, tuple | list | frozenset | set):
        return ", ".join(_words(inner) for inner in value) or "none"
    return str(value)
