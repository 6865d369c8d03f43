"""A table of means, and how it is written: Markdown for reading, LaTeX for a paper, CSV for further work."""

import csv
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddp.compare.results import FINAL, IMAGE, Kind, Result
from feddp.compare.scores import scores

# a metric's head, the factor to its unit, and what is better
SHOWN = {
    "dice": ("Dice (%)", 100, max),
    "iou": ("IoU (%)", 100, max),
    "assd": ("ASSD (pix.)", 1, min),
    "hd95": ("HD95 (pix.)", 1, min),
    "hd": ("HD (pix.)", 1, min),
}
BLANK = "—"
OPTIMISTIC = "Optimistic: rounds and epochs were chosen on the test images (selection=test)."
APART = "Rows without a federation, or without some of the seeds, compete neither for the best value nor in the test."

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "λ": r"$\lambda$",
    "δ": r"$\delta$",
    "✓": r"$\surd$",
    BLANK: "---",
}


@dataclass(frozen=True)
class Value:
    """A mean in its unit, and its ± where it has one."""

    mean: float
    std: float | None = None
    digits: int = 2

    def __str__(self) -> str:
        mean = f"{self.mean:.{self.digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{self.digits}f}"


Cell = Value | str


@dataclass(frozen=True)
class Table:
    """Heads and rows of equal length.

    Attributes:
        name: of its files, `table_<name>.csv` and `.tex`.
        better: a column's `max` or `min`, or None where no value is best.
        apart: rows that are shown and do not compete for the best value.
        notes: sentences below it.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    better: tuple
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    apart: frozenset[int] = frozenset()

    def best(self) -> set[tuple[int, int]]:
        """(row, column) of the best values; all that read alike to the last digit shown are best."""
        found = set()
        for j, better in enumerate(self.better):
            competing = {i: row[j] for i, row in enumerate(self.rows) if i not in self.apart and _is_value(row[j])}
            shown = {i: float(f"{cell.mean:.{cell.digits}f}") for i, cell in competing.items()}
            if better and shown:
                found |= {(i, j) for i, value in shown.items() if value == better(shown.values())}
        return found

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *(_line(_pipe(h) for h in self.heads), "|---" * len(self.heads) + "|")]
        lines += [_line(self._cells(row, i, "**{}**", _pipe)) for i, row in enumerate(self.rows)]
        return "\n".join([*lines, *(part for note in self.notes for part in ("", note))]) + "\n"

    def latex(self) -> str:
        """A tabular that needs no package."""
        lines = [f"% {self.title}", r"\begin{tabular}{" + "l" * len(self.heads) + "}", r"\hline"]
        lines += [" & ".join(map(escape, self.heads)) + r" \\", r"\hline"]
        lines += [" & ".join(self._cells(row, i, r"\textbf{{{}}}", escape)) + r" \\" for i, row in enumerate(self.rows)]
        return "\n".join([*lines, r"\hline", r"\end{tabular}", *(f"% {note}" for note in self.notes)]) + "\n"

    def write(self, folder: Path) -> None:
        """Writes table_<name>.tex, and table_<name>.csv with all digits, a value's ± in a column of its own."""
        (folder / f"table_{self.name}.tex").write_text(self.latex(), encoding="utf-8")
        spread = [any(_is_value(row[j]) and row[j].std is not None for row in self.rows) for j in range(len(self.heads))]
        with open(folder / f"table_{self.name}.csv", "w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(
                [part for h, two in zip(self.heads, spread, strict=True) for part in ([h, f"{h} ±"] if two else [h])]
            )
            for row in self.rows:
                writer.writerow([p for cell, two in zip(row, spread, strict=True) for p in _fields(cell)[: 1 + two]])

    def _cells(self, row: Sequence[Cell], i: int, bold: str, escaped) -> list[str]:
        best = self.best()
        return [bold.format(escaped(str(cell))) if (i, j) in best else escaped(str(cell)) for j, cell in enumerate(row)]


def escape(text: str) -> str:
    """Plain text for LaTeX."""
    return "".join(_LATEX.get(character, character) for character in text)


def scores_table(
    name: str,
    title: str,
    heads: Sequence[str],
    entries: Sequence[tuple[Sequence[str], Result, str]],
    metrics: Sequence[str],
    sites: list[str],
    seeds: int,
    per_site: bool = False,
    kind: Kind = IMAGE,
) -> Table:
    """Mean ± std of test metrics, a row for each of `entries`: (what stands below `heads`, its runs, before or final).

    Args:
        sites: the federation's; the Average is over them.
        seeds: how many were asked for; with several, a column says how the average differs between them.
        per_site: a column for every site, not the Average alone.
        kind: of images, or of cases.
    """
    shown = [*(sites if per_site else []), "Average", *(["± seeds"] if seeds > 1 else [])]
    columns = [(metric, column) for metric in metrics for column in shown]
    rows = []
    for labels, result, when in entries:
        some = f" ({seeds - len(result.failed)} of {seeds} seeds)" if result.folders and result.failed else ""
        cells = _values(result, when, columns, sites, kind) if result.folders else failed(result, len(columns))
        rows.append((*labels[:-1], labels[-1] + some, *cells))
    optimistic = any("test" in result.selections for _, result, _ in entries)
    apart = frozenset(i for i, (_, result, _) in enumerate(entries) if not result.competes)
    return Table(
        name,
        title,
        (*heads, *(f"{SHOWN[m][0]} {c}" for m, c in columns)),
        (*[None] * len(heads), *(None if c == "± seeds" else SHOWN[m][2] for m, c in columns)),
        tuple(rows),
        (*([OPTIMISTIC] if optimistic else []), *([APART] if apart else [])),
        apart,
    )


def spread_table(entries: Mapping[str, Result], sites: list[str]) -> Table:
    """Dice as 002 reports it: the mean over clients, the mean over all test images, and the variance over clients (points²)."""
    rows = []
    for label, result in entries.items():
        if not result.folders:
            rows.append((label, *failed(result, 3)))
            continue
        found = scores(result, sites, FINAL)
        if found.average is None:
            rows.append((label, BLANK, BLANK, BLANK))
            continue
        clients = found.average["dice"]
        images = [row["dice"] for rows_here in found.images.values() for row in rows_here.values()]
        values = 100 * clients["mean"], 100 * sum(images) / len(images), (100 * clients["std"]) ** 2
        rows.append((label, *map(Value, values)))
    heads = ("Method", "Dice (%) per client", "Dice (%) over images", "Variance over clients")
    apart = frozenset(i for i, result in enumerate(entries.values()) if not result.competes)
    return Table("spread", "Dice and its spread, as pFLFE's Tables 1-3", heads, (None, max, max, min), tuple(rows), (), apart)


def failed(result: Result, width: int) -> tuple[str, ...]:
    """A row of a variant without a finished run: the first reason, and nothing."""
    return (f"failed: {textwrap.shorten(next(iter(result.failed.values())), 120)}", *[""] * (width - 1))


def value(summary: dict[str, dict[str, float]], metric: str) -> Value:
    """A metric's mean ± std of a `metrics.summarize`, in the unit it is shown in."""
    factor = SHOWN[metric][1]
    return Value(factor * summary[metric]["mean"], factor * summary[metric]["std"])


def _values(result: Result, when: str, columns: Sequence[tuple[str, str]], sites: list[str], kind: Kind) -> tuple[Cell, ...]:
    found = scores(result, sites, when, kind)
    cells: list[Cell] = []
    for metric, column in columns:
        if column == "± seeds":
            cells.append(Value(SHOWN[metric][1] * found.seeds[metric]) if found.seeds else BLANK)
        else:
            summary = found.average if column == "Average" else found.sites.get(column)
            cells.append(value(summary, metric) if summary else BLANK)
    return tuple(cells)


def _is_value(cell: Cell) -> bool:
    return isinstance(cell, Value)


def _fields(cell: Cell) -> list:
    return [cell.mean, "" if cell.std is None else cell.std] if isinstance(cell, Value) else [cell, ""]


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _pipe(text: str) -> str:
    return text.replace("|", "\\|")
