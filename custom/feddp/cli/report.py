"""`feddp report`: the HTML page of runs or of a comparison, and, at a site, the page of its images."""

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from feddp.errors import InputError
from feddp.terminal import note, say, working


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="The --out folder of a comparison, or of runs; with --site also the site's own folder of a job."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    site: Annotated[
        Path | None, typer.Option(help="At a site: the folder of its data. The page then shows its images and must stay there.")
    ] = None,
    pixel: Annotated[
        str, typer.Option(help="With --site: X,Y of the network's input, whose attention is shown; default: the mask's middle.")
    ] = "",
) -> None:
    """Write the results of runs or of a comparison as one HTML page that needs no network."""
    if site is not None:
        from feddp.pages.site_page import site_report

        say(f"{site_report(folders, site, out, _pixel(pixel))}: holds patients' images, must not leave the site")
        return
    if pixel:
        raise InputError("--pixel is for the page of a site; name the site's data with --site")
    from feddp.pages.run_page import report as write

    with _making():
        page = write(folders, out)
    say(page)


def _making() -> AbstractContextManager[object]:
    """Shows on a terminal that the page is being made: half a minute for long runs of many sites."""
    return working("Making the report")


def _pixel(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d{1,5},\d{1,5}", text):
        raise InputError(f"--pixel {text}: write X,Y in pixels from the left and from the top, such as 40,52")
    x, y = text.split(",")
    return int(x), int(y)


def after(folder: Path) -> None:
    """Writes the page of what has just finished into its folder. A failure costs the page alone, and is one line."""
    from feddp.pages.run_page import report_in

    try:
        with _making():
            page = report_in(folder)
        say(f"Report: {page}")
    except Exception as error:  # of whatever kind: the results are on disk
        why = f"{type(error).__name__}: {error}"
        note(f"no report was written ({why}); to try again: feddp report {folder}")
