"""Writes the reference pages from the package when the site is built, so that they cannot go stale.

A page holds a marker such as `<!-- generated: methods -->`; the function of that name below returns what replaces it.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "custom"))  # the package of this checkout, whatever is installed

from feddp import cli, files, limits, protocol, versions  # noqa: E402
from feddp.data.prepare import FOLDER, PREPARE  # noqa: E402
from feddp.domains import BUFFER, COUNTER, MEAN, VARIANCE, WEIGHT, amplitudes  # noqa: E402
from feddp.flare.bounds import Bounds  # noqa: E402
from feddp.flare.policy import Budget, SitePolicy  # noqa: E402
from feddp.methods import OWN  # noqa: E402
from feddp.networks import DEFAULT, NETWORKS  # noqa: E402
from feddp.partition import ROLES  # noqa: E402
from feddp.plan import schema  # noqa: E402
from feddp.provision import MINIMUM  # noqa: E402
from feddp.tracking.curves import TAGS  # noqa: E402
from feddp.training import store  # noqa: E402
from feddp.training.settings import MOST, key  # noqa: E402

LAYOUTS = {"fundus": ["fundus_layouts"]}  # further modules of a public set, with the layout in their docstring
MARKER = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page. KeyError for a marker that has no function here."""
    return MARKER.sub(lambda match: GENERATED[match[1]](), markdown)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def code(value: object) -> str:
    return f"`{value}`" if str(value) else ""


def codes(values: Iterable[object]) -> str:
    return ", ".join(map(code, values))


def default(value: object) -> str:
    """A default as it is written after `--set`."""
    return "" if value is None else code(str(value).lower() if isinstance(value, bool) else value)


def _docstring(method: type) -> list[str]:
    """The paragraphs of the file's docstring; a method with a docstring of its own has that for a title."""
    title, *paragraphs = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "").split("\n\n")
    return [inspect.cleandoc(method.__dict__.get("__doc__") or title), *paragraphs]


# --- methods and settings ------------------------------------------------------------------------------------------------


def methods() -> str:
    rows, sections = [], []
    for name, method in OWN.items():
        title, *paragraphs = _docstring(method)
        private = codes(method.private) + ("; and a whole personal model" if method.personal else "")
        stages = ", ".join(method.stages) if method.federated else "no federation"
        rows.append((f"[`{name}`](#{name})", private, stages, title.split(":")[0]))
        own = _settings_of(method.Hyper)
        sections += [f"## {name}", title, *paragraphs]
        metadata = [f"- **Private:** {private}", f"- **Stages:** {stages}"]
        metadata += [f"- **Aggregations per round:** {method.phases}"] if method.phases > 1 else []
        sections += ["\n".join(metadata), *([_settings_table(own)] if own else [])]
    return "\n\n".join([table(("method", "private roles", "stages", "paper"), rows), *sections])


def _settings_of(group: type) -> list[tuple[str, str, str, str]]:
    found = []
    for field in fields(group):
        number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
        most = f"{field.metadata.get('most', MOST):,.15g}" if number else ""
        found.append((code(key(field.name)), default(field.default), most, field.metadata["meaning"]))
    return found


def _settings_table(rows: list[tuple[str, str, str, str]]) -> str:
    return table(("setting", "default", "at most", "meaning"), rows)


def settings() -> str:
    """Those of every method, by the data class that holds them; a method's own are on the page of methods."""
    groups = [group for group in schema._groups("fedavg") if fields(group)]
    parts = []
    for group in groups:
        first = inspect.cleandoc(group.__doc__ or "").split("\n\n")[0]
        parts += [f"## {group.__name__}", first, _settings_table(_settings_of(group))]
    return "\n\n".join(parts)


def method_settings() -> str:
    rows = [(f"[`{name}`](methods.md#{name})", *row) for name, method in OWN.items() for row in _settings_of(method.Hyper)]
    return table(("method", "setting", "default", "at most", "meaning"), rows)


def networks() -> str:
    return table(("network", ""), ((code(name), "default" if name == DEFAULT else "") for name in NETWORKS))


def roles() -> str:
    return codes(ROLES)


# --- a site's policy -----------------------------------------------------------------------------------------------------


def policy() -> str:
    rows = []
    for field in fields(SitePolicy):
        if field.name in ("data", "bounds", "budget"):
            shown = {"data": "required", "bounds": "[below](#bounds)", "budget": "[below](#budget)"}[field.name]
        elif field.default is None:
            shown = "any"
        else:
            shown = "none" if field.default == () else code(field.default)
        rows.append((f"[`{field.name}`](#{field.name})", shown))
    return table(("property", "default"), rows)


def bounds() -> str:
    return _data_class(Bounds)


def minimum() -> str:
    return table(("property", "at least"), ((code(name), code(value)) for name, value in MINIMUM.items()))


def budget() -> str:
    return _data_class(Budget)


def _data_class(group: type) -> str:
    return table(("key", "default"), ((code(field.name), _plain(field.default)) for field in fields(group)))


def _plain(value: object) -> str:
    return codes(value) if isinstance(value, tuple) else default(value)


# --- files and limits ----------------------------------------------------------------------------------------------------


def run_files() -> str:
    return _block(files.__doc__)


def site_files() -> str:
    return _block(store.__doc__)


def _block(docstring: str | None) -> str:
    """The part of a docstring that lists files."""
    return "```text\n" + (docstring or "").strip().split("\n\n", 1)[1] + "\n```"


def layouts() -> str:
    """The first sentence and the indented blocks of the docstring of every public set's module."""
    parts = []
    for name in (name for name in PREPARE if name != FOLDER):
        modules = [import_module(f"feddp.data.prepare.{name}")]
        modules += [import_module(f"feddp.data.prepare.{module}") for module in LAYOUTS.get(name, ())]
        found = re.findall(r"(?:^    .*\n)+", "\n".join(module.__doc__ or "" for module in modules), re.MULTILINE)
        block = "\n".join(inspect.cleandoc(f"\n{text}") + "\n" for text in found)
        parts += [f"### {name}", (modules[0].__doc__ or "").split("\n\n")[0], f"```text\n{block}```"]
    return "\n\n".join(parts)


def tags() -> str:
    return table(("tag", "value"), ((code(tag), meaning) for tag, meaning in TAGS.items()))


def file_limits() -> str:
    """What each limit is of is the comment behind it. KeyError for a limit without one."""
    meanings = dict(re.findall(r"^([A-Z_]+) = .*?  # (.*)$", inspect.getsource(limits), re.MULTILINE))
    found = ((name, value) for name, value in vars(limits).items() if name.isupper() and name != "MIB")
    return table(("at most", "of", "name"), ((f"{value:,}", meanings[name], code(name)) for name, value in found))


# --- the task protocol ---------------------------------------------------------------------------------------------------


def tasks() -> str:
    rows = [
        (
            code(spec.name),
            code(spec.stage),
            spec.kind.name.lower() if spec.kind else "",
            code(spec.consent),
            spec.tensors.value,
            codes(spec.scalars),
            code(spec.delivers),
        )
        for spec in protocol.TASKS.values()
    ]
    return table(("task", "stage", "kind", "consent", "tensors in an answer", "scalars in an answer", "delivers"), rows)


def task_kinds() -> str:
    return table(("kind", "meaning"), ((kind.name.lower(), kind.value) for kind in protocol.Kind))


def scalars() -> str:
    return table(("scalar", "leaves as", "bounds", "measured over"), (_scalar(*item) for item in protocol.SCALARS.items()))


def _scalar(name: str, scalar: protocol.Number | protocol.Table | protocol.Versions) -> tuple[str, str, str, str]:
    bounds = ""
    if isinstance(scalar, protocol.Number):
        bounds = "true or false" if scalar.flag else f"{scalar.least:,} to {scalar.most:,}"
    if isinstance(scalar, protocol.Table):
        leaves = f"mean, std and n of {codes(scalar.metrics)}, of each class too if there are several"
    elif isinstance(scalar, protocol.Versions):
        leaves = f"three numbers of the version of {codes(versions.PACKAGES)}"
        bounds = f"{protocol.VERSION.least:,} to {protocol.VERSION.most:,}"
    elif scalar.digits is not None:
        leaves = f"{scalar.digits} significant digits"
    else:
        leaves = "exact" if scalar.decimals is None else f"{scalar.decimals} decimals"
    return code(name), leaves, bounds, scalar.over.value if scalar.over else ""


def domains() -> str:
    where = {
        WEIGHT: "parameters",
        MEAN: "`running_mean` of a batch or instance normalisation",
        VARIANCE: "its `running_var`",
        COUNTER: "its `num_batches_tracked`",
        BUFFER: "any other buffer",
    }
    rows = [(domain.what, found, f"{domain.least:,.0f}", f"{domain.most:,.0f}") for domain, found in where.items()]
    spectra = amplitudes(1)
    rows.append((spectra.what, "spectra that FedDG exchanges", f"{spectra.least:.0f}", f"{spectra.most:g} N"))
    return table(("tensor", "which", "from", "to"), rows)


def participants() -> str:
    """What of a version must be the same at all participants of a job."""
    rows = []
    for name, package in versions.PACKAGES.items():
        rows.append((code(name), " and ".join(versions.PARTS[: package.equal]) or "nothing", package.why))
    return table(("package", "must be equal", "why"), rows)


# --- the command line ----------------------------------------------------------------------------------------------------


def commands() -> str:
    return "\n\n".join(_commands("feddp", typer.main.get_command(cli.app)))


def _commands(name: str, command: Any) -> list[str]:
    """A command, or the commands below it, as click's objects of whichever click typer brings."""
    below: Mapping[str, Any] = getattr(command, "commands", {})
    if below:
        return [part for word, each in below.items() for part in _commands(f"{name} {word}", each)]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    rows = [(code(p.name.upper()), _option(p)) for p in arguments] + [(code(p.opts[0]), _option(p)) for p in options]
    usage = " ".join([name, *(p.name.upper() for p in arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"## {name}", inspect.cleandoc(command.help or ""), f"```text\n{usage}\n```"]
    return parts + ([table(("", "meaning"), rows)] if rows else [])


def _option(parameter: Any) -> str:
    text, value = getattr(parameter, "help", None) or "", parameter.default
    if parameter.required:
        return f"{text} Required."
    empty = value is None or value is False or value == "" or callable(value) or (isinstance(value, list | tuple) and not value)
    return text if empty else f"{text} Default: {code(getattr(value, 'value', value))}."


GENERATED: dict[str, Callable[[], str]] = {
    "methods": methods,
    "domains": domains,
    "settings": settings,
    "method-settings": method_settings,
    "networks": networks,
    "roles": roles,
    "policy": policy,
    "bounds": bounds,
    "minimum": minimum,
    "budget": budget,
    "run-files": run_files,
    "site-files": site_files,
    "layouts": layouts,
    "tags": tags,
    "limits": file_limits,
    "tasks": tasks,
    "task-kinds": task_kinds,
    "scalars": scalars,
    "versions": participants,
    "commands": commands,
}
