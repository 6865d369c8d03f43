"""`--config FILE` of `feddp run`: the options of a YAML file (`feddp.run.config`), under those that are typed."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from feddp.cli.options import given
from feddp.errors import InputError
from feddp.terminal import note

SETTINGS = "set"
APART = ("config", "out", "resume", "retries", "verbose", "help")  # parameters that a file cannot give


def from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the options in the file `path` the command's defaults, before the command line is read.

    Raises:
        InputError: the file cannot be read, an option is unknown, or a value has the wrong type; names file and option.
    """
    if path is not None and not context.resilient_parsing:
        from feddp.run.config import read_config

        content = read_config(path)
        known = {_option(parameter): parameter for parameter in context.command.params if parameter.name not in APART}
        if apart := [name for name in content if name in APART]:
            raise InputError(
                f"{path}: {apart[0]} cannot stand in the file; remove its line, and type --{apart[0]} where you need it"
            )
        if unknown := [name for name in content if name not in known]:
            near = get_close_matches(unknown[0], known, n=1, cutoff=0)[0]
            raise InputError(f"{path}: unknown option {unknown[0]!r}; the nearest one is {near!r}")
        context.meta[__name__] = given_here = {name: value for name, value in content.items() if value is not None}
        context.default_map = {
            str(known[name].name): _value(context, path, known[name], value) for name, value in given_here.items()
        }
    return path


def _option(parameter: Any) -> str:
    return str(parameter.opts[0]).removeprefix("--")


def _value(context: typer.Context, path: Path, parameter: Any, value: Any) -> Any:
    """Returns a value of the file as the command line would give it."""
    from feddp.reading import shown
    from feddp.run.config import text_of

    name = _option(parameter)
    if name == SETTINGS:
        texts = {key: text_of(inner) for key, inner in value.items()} if isinstance(value, dict) else {"": None}
        for key, text in texts.items():
            if text is None or not isinstance(key, str):
                where = f"{name}, {key}" if key else name
                raise InputError(f"{path}: {where}: {shown(value)} holds no plain values; write one `key: value` per line")
        return [f"{key}={text}" for key, text in texts.items()]
    text = text_of(value)
    if text is None:
        raise InputError(f"{path}: {name}: {shown(value)} is no plain value; correct it")
    try:
        parameter.process_value(context, text)
    except typer.BadParameter as error:  # its words differ between versions of typer
        raise InputError(f"{path}: {name}: {shown(value)}: {error.message.rstrip('.')}; correct it") from None
    return text


def merged(context: typer.Context, path: Path, settings: list[str]) -> list[str]:
    """Returns the file's settings (`--set`) under those that are typed, and says which typed options replace the file's."""
    content: dict[str, Any] = context.meta[__name__]
    typed = [name.removeprefix("--") for name in given(context)]
    replaced = [f"{name} ({content[name]})" for name in typed if name in content and name != SETTINGS]
    if SETTINGS in typed and SETTINGS in content:
        below = (context.default_map or {})["settings"]
        keys = {text.split("=", 1)[0] for text in settings}
        replaced += [f"{SETTINGS} {key} ({value})" for key, value in content[SETTINGS].items() if key in keys]
        settings = [*below, *settings]
    if replaced:
        note(f"{path}: the command line replaces {', '.join(replaced)}")
    return settings
