"""What a kit's policy lets leave, in words: for the administrator who is to start it."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from feddp.flare.policy import SitePolicy
from feddp.kit.files import KEPT
from feddp.kit.privacy import privacy_file, scopes
from feddp.sealing.kit import CLIENT, Kit

# of a property of privacy.json; one that is not named here is shown under its own name
WORDS = {
    "data": "trains on",
    "device": "computes on",
    "consent": "gives other sites, beside the shared tensors that the server averages",
    "recipients": "to these sites",
    "private": "never shares, whatever the method",
    "methods": "takes jobs of",
    "spectra": "training images of whose spectra a job may ask, at most",
    "min_images": "fewest images over which a mean leaves",
    "threads": "CPU threads",
    "approve": "takes these plans, by digest",
    "networks": "takes these networks",
    "tensors": "initial tensors that a job may bring, by SHA-256",
    "bounds": "of an approved plan",
    "std_images": "fewest images over which a standard deviation leaves",
    "budget": "jobs and evaluations over the same data, at most",
    "seed": "whose draws the order of images follows",
}


def effective(kit: Kit) -> Iterator[str]:
    """One line for each property of each scope, defaults included, and what the kit keeps; nothing for a server or a person."""
    if kit.kind != CLIENT:
        return
    if (kept := kit.folder / KEPT).exists():  # whoever put it there knows the secret by which the site draws
        yield f"keeps {len(list(kept.iterdir()))} files and folders in {kept}; if this kit never ran, remove the folder"
    for scope in scopes(privacy_file(kit)):
        policy = SitePolicy.of(kit.name, scope["properties"], simulated=False)
        yield f"a job under scope {scope['name']}"
        for field in fields(policy):
            value = getattr(policy, field.name)
            yield f"  {WORDS.get(field.name, field.name)} ({field.name}): {_words(value)}{_changed(field, value)}"


def _changed(field: Field[Any], value: Any) -> str:
    """What a property would be if privacy.json left it out: weaker than that, it is the administrator's own decision."""
    return "" if field.default in (MISSING, value) else f" [left out, it would be: {_words(field.default)}]"


def _words(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, tuple | list | frozenset | set):
        return ", ".join(_words(inner) for inner in value) or "none"
    return str(value)
