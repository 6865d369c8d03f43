"""`feddp report`: the page of finished runs or of a comparison. It holds means, intervals and counts, no value of an image."""

from collections.abc import Sequence
from pathlib import Path

from feddp.files import REPORT
from feddp.pages import charts, measures
from feddp.pages.attendance import attendance
from feddp.pages.collected import Collected, collect
from feddp.pages.provenance import provenance
from feddp.pages.template import rendered, require_place, write_page
from feddp.pages.verdict import judge
from feddp.reading import counted

_ALREADY = {"spread", "stages"}  # tables of a comparison that the page shows otherwise


def report(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page to `out` and returns it. The same files give the same bytes.

    Raises:
        InputError: a folder is no finished run and no comparison, one of its files is damaged, `out` is no place for a page, or
            the page is too large.
    """
    require_place(out)
    write_page(out, _page(collect(folders)))
    return out


def report_in(folder: Path) -> Path:
    """The same for one folder, into that folder."""
    return report([folder], folder / REPORT)


def _page(collected: Collected) -> str:
    _ = [run.events for run in collected.runs]  # a damaged file is found before anything is drawn
    verdict = judge(collected)
    subject = verdict.subject
    first = subject.runs[0] if subject else None
    return rendered(
        "run.html",
        title=_title(collected),
        summary=_summary(collected),
        verdict=verdict,
        heat=measures.dice_map(collected),
        exchanged=measures.exchange_map(first) if first else None,
        exchanged_of=first.name if first else "",
        differences=charts.differences_chart(verdict),
        difference_table=measures.difference_table(verdict) if verdict.contrasts else None,
        before_after=measures.before_after(subject) if subject and verdict.calibration else None,
        curves=charts.curves_chart(collected, verdict) if subject else None,
        spread=measures.spread_over_sites(collected) if subject else None,
        spread_chart=charts.spread_chart(collected),
        metrics=measures.metric_tables(collected),
        volumes=measures.volume_table(collected) if subject else None,
        studies=charts.study_charts(collected),
        tables=[table for table in collected.tables if table.name not in _ALREADY],
        failed=collected.failed,
        costs=measures.costs(collected) if subject else None,
        time=charts.time_chart(subject) if subject else None,
        stages=measures.stages(collected) if subject else None,
        runs=[(run.name, attendance(run), provenance(run)) for run in collected.runs],
    )


def _title(collected: Collected) -> str:
    labels = list(collected.methods)
    if not labels:
        return "A comparison"
    shown = ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")
    return f"{shown} at {counted(len(collected.sites), 'site')}"


def _summary(collected: Collected) -> str:
    if not collected.runs:
        return counted(len(collected.tables), "table")
    results = [run.results for run in collected.runs]
    networks, rounds = sorted({r["network"] for r in results}), sorted({r["rounds"] for r in results})
    parts = [
        counted(len(results), "finished run"),
        ", ".join(networks),
        counted(rounds[0], "round") if len(rounds) == 1 else f"{', '.join(map(str, rounds))} rounds",
    ]
    sizes = sorted({r["size"] for r in results if "size" in r})
    return " · ".join([*parts, *([f"{', '.join(map(str, sizes))} pixels"] if sizes else [])])
