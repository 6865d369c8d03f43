"""Turns a template of this package into a page, and writes it. What a template is given is escaped, except figures of ours."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from feddp.errors import InputError
from feddp.files import write_text

PAGE_BYTES = 2_000_000  # of a page: what a mail takes and a browser shows at once


def rendered(template: str, **values: Any) -> str:
    """Returns the HTML of `templates/<template>`."""
    return _environment().get_template(template).render(**values)


@cache  # it compiles a template once
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("feddp.pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["drawn"] = Markup  # of an <svg> that this package drew
    environment.filters["glued"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    return environment


def require_place(path: Path) -> None:
    """Raises InputError unless a page can be written to `path`: before it is made, and so that no other file is replaced."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file for the page, such as {path / 'report.html'}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{path}: a page's name ends with .html, so that a browser opens it")


def write_page(path: Path, html: str, private: bool = False) -> None:
    """Writes a page of at most PAGE_BYTES; a private one is readable for its owner alone.

    Raises:
        InputError: the page is larger.
    """
    content = html.encode(errors="replace")  # JSON may hold a single surrogate
    if len(content) > PAGE_BYTES:
        raise InputError(f"{path}: the page would have {len(content):,} bytes, at most {PAGE_BYTES:,}; name fewer runs")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, content.decode(), 0o600 if private else 0o666)
