"""How a run stands (`feddp.stages.standing`), for a terminal: a line, and a table of the sites."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from feddp.reading import lasting, plain
from feddp.reporting.tables import BLANK

RUNNING = "running"
_STYLES = {"works": "cyan", "sends": "cyan", "late": "yellow", "lost": "red", "refused": "red"}


def view(summary: Mapping[str, Any], state: str) -> Group:
    """Returns what `feddp watch` shows.

    Args:
        summary: as `Standing.summary`, or without entries, while the server has told nothing.
        state: of the run or job, in a word or two.
    """
    parts: list[Table | Text] = [Text(plain(headline(summary, state)), "bold")]
    if sites := summary.get("sites"):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("site", "state", "loss", "Dice", "to the site", "from the site"):
            table.add_column(head, justify="left" if head in ("site", "state") else "right")
        for name, site in sites.items():
            sizes = (decimal(site["received"]), decimal(site["sent"]))
            table.add_row(Text(plain(name)), _state(site), _number(site["loss"]), _number(site["dice"]), *sizes)
        parts.append(table)
    return Group(*parts, *(Text(plain(note)) for note in summary.get("notes", [])))


def headline(summary: Mapping[str, Any], state: str) -> str:
    """Returns one line: the method, the state, the completed rounds, what the sites are asked for, the time left."""
    if not summary.get("task"):
        return state
    asked = " ".join(word for word in (summary["task"], summary["of"]) if word)
    parts = [f"{summary['method']} on {summary['network']}: {state}", f"{summary['round']} of {summary['rounds']} rounds done"]
    if state == RUNNING:
        parts += [asked, time_left(summary["seconds_left"], summary["rough"])]
    return "; ".join(filter(None, parts))


def time_left(seconds: float | None, rough: bool) -> str:
    """Returns the time left as a text; nothing while it is not known. `rough`: as `Standing.rough`."""
    if seconds is None:
        return ""
    return f"about {lasting(seconds)} left" + (" by the first round" if rough else "")


def _state(site: Mapping[str, Any]) -> Text:
    word, why = site["state"], site["why"]
    text = Text(plain(word if word == "waits" else f"{word} {lasting(site['since'])}"), _STYLES.get(word, ""))
    return text.append(plain(f": {why}"), "default") if why else text


def _number(value: float | None) -> str:
    return BLANK if value is None else f"{value:.3f}"
