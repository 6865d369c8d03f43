"""How a run stands (`feddp.stages.standing`), for a terminal: a line, and a table of the sites."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group  # noqa: TID251 (the type)
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from feddp.reading import counted, lasting
from feddp.reporting.tables import BLANK

RUNNING = "running"
_STYLES = {"works": "cyan", "receives": "cyan", "sends": "cyan", "late": "yellow", "lost": "red", "refused": "red"}
# what these states become when the run has ended
_ENDED = {**dict.fromkeys(("works", "receives", "sends"), "no answer"), "waits": "answered"}
_FIRST = ("refused", "lost", "late", "receives", "works", "sends", "waits")  # the order of sites where not all have room
_NOTES = 2  # messages that are shown there


def view(summary: Mapping[str, Any], state: str, brief: bool = False) -> Group:
    """Returns what `feddp watch` shows.

    Args:
        summary: as `Standing.summary`, or without entries, while the server has told nothing.
        state: of the run or job, in a word or two.
        brief: give every site and message one line.
    """

    def line(text: str) -> Text:
        return Text(text, no_wrap=brief, overflow="ellipsis" if brief else None)

    parts: list[Table | Text] = [Text(headline(summary, state), "bold")]
    if sites := summary.get("sites"):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("site", "state"):
            table.add_column(head)
        for head in ("loss", "Dice", "to the site", "from the site"):
            table.add_column(head, justify="right", no_wrap=True)
        for name, site in sites.items():
            sizes = (decimal(site["received"]), decimal(site["sent"]))
            table.add_row(
                line(name), _state(site, line(""), state == RUNNING), _number(site["loss"]), _number(site["dice"]), *sizes
            )
        parts.append(table)
    return Group(*parts, *map(line, summary.get("notes", [])))


def fitted(summary: Mapping[str, Any], state: str, console: Console) -> Group:
    """Returns `view`; if that is higher than the terminal, sites in need of attention first, one line each, and a count."""
    whole, room = view(summary, state), console.height - 1
    if len(console.render_lines(whole)) <= room or not summary.get("sites"):
        return whole
    sites, cut = summary["sites"], {**summary, "notes": summary["notes"][-_NOTES:]}
    order = sorted(sites, key=lambda name: (*(sites[name]["state"] != word for word in _FIRST), name))
    others = len(console.render_lines(view({**cut, "sites": {order[0]: sites[order[0]]}}, state, brief=True)))
    shown = order[: max(1, room - others - 1)]
    if rest := Counter(sites[name]["state"] for name in order[len(shown) :]):
        counts = ", ".join(f"{number} {word}" for word, number in rest.items())
        cut["notes"].insert(0, f"and {counted(rest.total(), 'more site')}: {counts}")
    return view({**cut, "sites": {name: sites[name] for name in shown}}, state, brief=True)


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


def _state(site: Mapping[str, Any], text: Text, running: bool) -> Text:
    word, why = site["state"], site["why"]
    if running:
        text.append(word if word == "waits" else f"{word} {lasting(site['since'])}", _STYLES.get(word))
    else:
        text.append(_ENDED.get(word, word))
    return text.append(f": {why}", "default") if why else text


def _number(value: float | None) -> str:
    return BLANK if value is None else f"{value:.3f}"
