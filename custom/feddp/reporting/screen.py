"""Prints tables to a terminal. One that is too narrow wraps the lines: a number is never cut."""

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from feddp.reporting.tables import ResultTable
from feddp.terminal import Screen

WIDEST = 10_000  # characters of a line


def show(view: Table) -> None:
    """Prints the table as wide as its columns need, whatever the width of the terminal."""
    console = Screen()
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), view).maximum
    Screen(width=max(console.width, needed)).print(view)


def on_screen(table: ResultTable) -> Table:
    """Returns a table of results for `show`, with its best values in bold."""
    view = Table(title=Text(table.title), caption=Text("\n".join(table.notes)), box=box.SIMPLE_HEAD, pad_edge=False)
    for head in table.heads:
        view.add_column(Text(head), no_wrap=True)
    best = table.best()
    for i, row in enumerate(table.rows):
        view.add_row(*(Text(str(cell), "bold" if (i, j) in best else "") for j, cell in enumerate(row)))
    return view
