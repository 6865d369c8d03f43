"""FLARE's own templates, of the version that is installed: what `nvflare provision` and `nvflare package` write into a kit."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from nvflare import lighter
from nvflare.lighter.constants import TemplateSectionKey as Section
from nvflare.lighter.utils import sh_replace

__all__ = ["Section", "deviations", "rendered", "shape"]

_ANY = "any"  # in a shape: whatever provisioning puts there
# where more keys may follow. Kits of ours have no relays, so none says whose name another's certificate may have
_OPTIONAL = re.compile(r"\{~~(require_signed_jobs_config|auth_identity_config)~~\}")
_OPTIONAL_KEYS = {"require_signed_jobs"}


def rendered(section: str, words: Mapping[str, str]) -> str:
    """A section of the templates with `words` in their places."""
    return str(sh_replace(_sections()[section], words))


@cache
def shape(section: str) -> Any:
    """A JSON section, with `_ANY` wherever provisioning puts a word in."""
    text = _OPTIONAL.sub("", _sections()[section])
    return yaml.safe_load(re.sub(r'"?\{~~\w+~~\}"?', f'"{_ANY}"', text))  # JSON is YAML


def deviations(said: Any, shape: Any, exact: bool, at: str = "") -> Iterator[str]:
    """Where a configuration says what its template does not know, each in words.

    Args:
        shape: of the template; where it holds a list of objects, each of the configuration's is held against the first.
        exact: whether values of the template's own must be as they are there, and none may lack.
    """
    if isinstance(shape, Mapping) and isinstance(said, Mapping):
        for key in sorted(said.keys() - shape.keys() - _OPTIONAL_KEYS):
            yield f"says {at}{key}, which no kit says"
        for key in sorted(shape.keys() & said.keys()):
            yield from deviations(said[key], shape[key], exact, f"{at}{key}.")
        for key in sorted(shape.keys() - said.keys() if exact else ()):
            yield f"does not say {at}{key}"
    elif isinstance(shape, list) and isinstance(said, list) and isinstance(shape[0], Mapping):
        if exact and len(said) != len(shape):
            yield f"has {len(said)} entries in {at[:-1]}, and a kit has {len(shape)}"
        for entry in said:
            yield from deviations(entry, shape[0], exact, at)
    elif isinstance(shape, Mapping | list) or isinstance(said, Mapping) or (exact and shape not in (_ANY, said)):
        yield f"says {at[:-1]}: {said!r}, and a kit {shape!r}"


@cache
def _sections() -> dict[str, str]:
    path = Path(lighter.__file__).parent / "templates" / "master_template.yml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
