"""`feddp bench`: the benchmarks of a checkout."""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

import feddp
from feddp.errors import InputError
from feddp.terminal import say

OF_ALL = ("__init__", "common")  # no benchmarks


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The benchmark; without a name, they are listed.")] = "",
) -> None:
    """Run a benchmark of this checkout, or list them; `feddp bench NAME --help` lists a benchmark's options."""
    root = Path(feddp.__file__).parents[2]
    files = {path.stem: path for path in sorted(root.glob("benchmarks/*.py")) if path.stem not in OF_ALL}
    if not files:
        raise InputError(f"{root} has no benchmarks: they are not installed; run this command in a checkout of FedDP")
    if not name:
        for word, path in files.items():
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            say(f"{word:12} {about.splitlines()[0]}")
        return
    if name not in files:
        raise InputError(f"unknown benchmark {name!r}; known: {', '.join(files)}")
    sys.path.insert(0, str(root))
    import_module(f"benchmarks.{name}").main(context.args)
