"""run.yaml: the options with which a run began, as a file for `feddp run --config`, which repeats the run.

It has what a user types, nothing else: an unfinished run is continued from run.json (`feddp.run.session`), never from here.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from feddp.errors import BadFile, Problem
from feddp.limits import CONFIG_BYTES
from feddp.reading import read, short, shown

_TYPED = re.compile(r"true|false|-?(0|[1-9][0-9]{0,14})(\.[0-9]{0,14}[1-9])?")  # texts that YAML would read as a number or bool
_HEAD = """\
# Repeats this run: feddp run --config run.yaml --out ANOTHER_FOLDER
# An unfinished run goes on from run.json (feddp run --resume), not from this file. Plan {plan}
"""


class _Loader(yaml.SafeLoader):
    """YAML's plain values alone: no alias, by which a few lines become billions of values, and no key twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name); write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        content = super().construct_mapping(node, deep)
        if len(content) < len(node.value):
            raise yaml.YAMLError("it has a key twice, or a merge (<<)")
        return content


def read_config(path: Path) -> dict[str, Any]:
    """Returns the options in a YAML file, of at most CONFIG_BYTES, by name.

    Raises:
        BadFile: the file is missing, too large, no YAML of names and values, has an alias, or has a key twice.
    """
    try:
        content = yaml.load(read(path, CONFIG_BYTES), _Loader)  # a child of SafeLoader
    except FileNotFoundError:
        raise BadFile(Problem(path, "does not exist", "Name the run.yaml of a run, or a file of your own")) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist, bytes of no text
        raise BadFile(Problem(path, f"is not readable YAML ({_reason(error)})", "Correct it")) from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BadFile(Problem(path, f"holds {shown(content)}, not names and values", "Write one `option: value` per line"))
    return content


def write_config(options: Mapping[str, Any], plan: str) -> str:
    """Returns the content of run.yaml.

    Args:
        options: by their names on the command line; empty ones are left out, so that the defaults hold.
        plan: the digest of the plan that they make.
    """
    given = {name: _plain(value) for name, value in options.items() if value not in (None, "", (), [], {})}
    return _HEAD.format(plan=plan) + yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=10_000)


def text_of(value: Any) -> str | None:
    """Returns a value of the file as it is typed on the command line; None if it is no plain value or list of these."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        words = [text_of(word) for word in value]
        return None if None in words or any(isinstance(word, list) for word in value) else ",".join(map(str, words))
    if isinstance(value, int) and value.bit_length() > 64:  # of base 16 it may have thousands of digits, and has no text
        return None
    return str(value) if isinstance(value, str | int | float) else None


def _plain(value: Any) -> Any:
    """Returns a value as YAML shows it best; its `text_of` stays the same."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(word) for word in value]
    if isinstance(value, Path):
        return str(value)
    typed = yaml.safe_load(value) if isinstance(value, str) and _TYPED.fullmatch(value) else value
    return typed if text_of(typed) == text_of(value) else value


def _reason(error: Exception) -> str:
    return short(" ".join(str(error).split()), 200)
