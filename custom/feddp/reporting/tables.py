"""A table of results, and how it is written: Markdown for reading, LaTeX for a paper, CSV for further work."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from feddp.files import write_text
from feddp.reading import is_number, shown
from feddp.training.columns import of_class

Better = Callable[[Iterable[float]], float]  # max or min


class Shown(NamedTuple):
    """How a metric is shown: its head, the factor from its value to the head's unit, and which of two values is better."""

    head: str
    factor: float
    better: Better


SHOWN = {
    "dice": Shown("Dice (%)", 100, max),
    "iou": Shown("IoU (%)", 100, max),
    "assd": Shown("ASSD (pix.)", 1, min),
    "assd-medpy": Shown("ASSD by medpy (pix.)", 1, min),
    "hd95": Shown("HD95 (pix.)", 1, min),
    "hd": Shown("HD (pix.)", 1, min),
}
BLANK = "—"
_DIGITS = 17  # of a float; a damaged file could ask for a billion
_BETTER: dict[Better, str] = {max: "max", min: "min"}

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "λ": r"$\lambda$",
    "δ": r"$\delta$",
    "τ": r"$\tau$",
    "✓": r"$\surd$",
    BLANK: "---",
}


@dataclass(frozen=True)
class Value:
    """A mean in its unit, and its standard deviation where it has one."""

    mean: float
    std: float | None = None
    digits: int = 2

    def __str__(self) -> str:
        mean = f"{self.mean:.{self.digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{self.digits}f}"


Cell = Value | str


def shown_value(summary: Mapping[str, Mapping[str, float]], metric: str, class_name: str = "") -> Value:
    """A metric of a `metrics.summarize`, of one class or the mean over them, in the unit it is shown in.

    It has no standard deviation where that is withheld, and where there is one number alone.
    """
    factor, number = SHOWN[metric].factor, summary[of_class(metric, class_name)]
    return Value(factor * number["mean"], factor * number["std"] if "std" in number and number["n"] > 1 else None)


@dataclass(frozen=True)
class ResultTable:
    """Heads and rows of equal length.

    Attributes:
        name: names its files, `table_<name>.csv` and `table_<name>.tex`.
        better: for each column `max` or `min`, or None where no value is best.
        apart: rows that are shown but do not compete for the best value.
        notes: sentences below the table.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    better: tuple[Better | None, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    apart: frozenset[int] = frozenset()

    def best(self) -> set[tuple[int, int]]:
        """(row, column) of the best values; all that are equal to the last digit shown are best."""
        found = set()
        for j, better in enumerate(self.better):
            cells = [(i, row[j]) for i, row in enumerate(self.rows) if i not in self.apart]
            shown = {i: float(f"{cell.mean:.{cell.digits}f}") for i, cell in cells if isinstance(cell, Value)}
            if better and shown:
                found |= {(i, j) for i, value in shown.items() if value == better(shown.values())}
        return found

    def markdown(self) -> str:
        """The title, the table with its best values in bold, and the notes."""
        rows = [self._cells(row, i, "**{}**", _pipe) for i, row in enumerate(self.rows)]
        lines = [f"## {self.title}", "", *markdown_lines(map(_pipe, self.heads), rows)]
        return "\n".join([*lines, *(part for note in self.notes for part in ("", note))]) + "\n"

    def latex(self) -> str:
        """A tabular that needs no package."""
        lines = [f"% {self.title}", r"\begin{tabular}{" + "l" * len(self.heads) + "}", r"\hline"]
        lines += [" & ".join(map(escape, self.heads)) + r" \\", r"\hline"]
        lines += [" & ".join(self._cells(row, i, r"\textbf{{{}}}", escape)) + r" \\" for i, row in enumerate(self.rows)]
        return "\n".join([*lines, r"\hline", r"\end{tabular}", *(f"% {note}" for note in self.notes)]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """JSON from which `from_json` restores an equal table."""
        rows = [[asdict(cell) if isinstance(cell, Value) else cell for cell in row] for row in self.rows]
        better = [None if each is None else _BETTER[each] for each in self.better]
        return {"name": self.name, "title": self.title, "heads": self.heads, "better": better, "rows": rows} | {
            "notes": self.notes,
            "apart": sorted(self.apart),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ResultTable":
        """KeyError, TypeError or ValueError where the content is not what `to_json` gives."""
        known = {name: each for each, name in _BETTER.items()}
        rows = tuple(tuple(map(_stored, row)) for row in content["rows"])
        better = tuple(None if each is None else known[each] for each in content["better"])
        name, title, heads, notes = content["name"], content["title"], tuple(content["heads"]), tuple(content["notes"])
        if not all(isinstance(text, str) for text in (name, title, *heads, *notes)):
            raise TypeError("a table's name, title, heads and notes are texts")
        if any(len(columns) != len(heads) for columns in (better, *rows)):
            raise ValueError(f"not every row of the table {name} has {len(heads)} columns")
        return cls(name, title, heads, better, rows, notes, frozenset(content["apart"]))

    def write(self, folder: Path) -> None:
        """Writes table_<name>.tex, and table_<name>.csv with all digits and each standard deviation in its own column."""
        write_text(folder / f"table_{self.name}.tex", self.latex())
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.heads)
        spread = [any(isinstance(cell, Value) and cell.std is not None for cell in column) for column in columns]
        lines = io.StringIO()
        writer = csv.writer(lines)
        writer.writerow([part for h, two in zip(self.heads, spread, strict=True) for part in ([h, f"{h} ±"] if two else [h])])
        for row in self.rows:
            writer.writerow([p for cell, two in zip(row, spread, strict=True) for p in _fields(cell)[: 1 + two]])
        write_text(folder / f"table_{self.name}.csv", lines.getvalue())

    def _cells(self, row: Sequence[Cell], i: int, bold: str, escaped: Callable[[str], str]) -> list[str]:
        best = self.best()
        return [bold.format(escaped(str(cell))) if (i, j) in best else escaped(str(cell)) for j, cell in enumerate(row)]


def markdown_lines(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a Markdown table; an empty head takes one blank."""
    heads = list(heads)
    yield "|" + "".join(f" {head} |" if head else " |" for head in heads)
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def escape(text: str) -> str:
    """Plain text for LaTeX."""
    return "".join(_LATEX.get(character, character) for character in text)


def _stored(cell: Any) -> Cell:
    """A cell of JSON; TypeError or ValueError where it is neither a text nor a value."""
    if isinstance(cell, str):
        return cell
    value = Value(**cell)
    numbers = all(isinstance(number, float) or is_number(number) for number in (value.mean, value.std or 0))
    if not numbers or type(value.digits) is not int or not 0 <= value.digits <= _DIGITS:
        raise ValueError(f"{shown(cell)} is no value")
    return value


def _fields(cell: Cell) -> list[float | str]:
    return [cell.mean, "" if cell.std is None else cell.std] if isinstance(cell, Value) else [cell, ""]


def _pipe(text: str) -> str:
    return text.replace("|", "\\|")
