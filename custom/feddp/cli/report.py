"""`feddp report`: the HTML page of runs or of a comparison, and, at a site, the page of its images."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(help="The --out folder of a comparison, or of one or several runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write the results of runs or of a comparison as one HTML page that needs no network."""
    from feddp.pages.run_page import report as write

    print(write(folders, out))


def after(folder: Path) -> None:
    """Writes the page of what has just finished into its folder. A failure costs the page alone, and is one line."""
    from feddp.pages.run_page import report_in

    try:
        print(f"Report: {report_in(folder)}")
    except Exception as error:  # of whatever kind: the results are on disk
        print(f"no report was written ({type(error).__name__}: {error}); to try again: feddp report {folder}", file=sys.stderr)
