"""The templates of the installed FLARE, from which `nvflare provision` and `nvflare package` write a kit."""

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

_ANY = "any"  # in a shape: any value from provisioning
# placeholders for further keys. Our kits have no relays, so auth_identity_config stays empty
_OPTIONAL = re.compile(r"\{~~(require_signed_jobs_config|auth_identity_config)~~\}")
_OPTIONAL_KEYS = {"require_signed_jobs"}


def rendered(section: str, words: Mapping[str, str]) -> str:
    """Returns a section of the templates, filled with `words`."""
    return str(sh_replace(_sections()[section], words))


@cache
def shape(section: str) -> Any:
    """Returns a JSON section, with `_ANY` for each value that provisioning fills in."""
    text = _OPTIONAL.sub("", _sections()[section])
    return yaml.safe_load(re.sub(r'"?\{~~\w+~~\}"?', f'"{_ANY}"', text))  # JSON is YAML


def deviations(content: Any, shape: Any, exact: bool, at: str = "") -> Iterator[str]:
    """Yields in words where a configuration differs from its template.

    Args:
        shape: of the template. If it holds a list of objects, each object of the configuration is compared with the first.
        exact: whether all keys of the template are required, with its fixed values.
    """
    if isinstance(shape, Mapping) and isinstance(content, Mapping):
        for key in sorted(content.keys() - shape.keys() - _OPTIONAL_KEYS):
            yield f"has {at}{key}, which no kit has"
        for key in sorted(shape.keys() & content.keys()):
            yield from deviations(content[key], shape[key], exact, f"{at}{key}.")
        for key in sorted(shape.keys() - content.keys() if exact else ()):
            yield f"lacks {at}{key}"
    elif isinstance(shape, list) and isinstance(content, list) and isinstance(shape[0], Mapping):
        if exact and len(content) != len(shape):
            yield f"has {len(content)} entries in {at[:-1]}; a kit has {len(shape)}"
        for entry in content:
            yield from deviations(entry, shape[0], exact, at)
    elif isinstance(shape, Mapping | list) or isinstance(content, Mapping) or (exact and shape not in (_ANY, content)):
        yield f"has {at[:-1]}: {content!r}; a kit has {shape!r}"


@cache
def _sections() -> dict[str, str]:
    path = Path(lighter.__file__).parent / "templates" / "master_template.yml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
