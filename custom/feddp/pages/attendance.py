"""Who took part in a run: which site consented, withheld, was refused or lost, and why, from results.json and the events."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from feddp.pages.collected import FinishedRun
from feddp.protocol import STD_WITHHELD, WITHHELD
from feddp.reading import counted, without_paths
from feddp.stages.empty import EMPTY

_REASONS = 3  # of a site's refused answers that are shown


@dataclass(frozen=True)
class Attendance:
    """One row of the table."""

    site: str
    state: str  # "took part", "missing"
    exchange: str
    withheld: str
    remarks: tuple[str, ...]


def attendance(run: FinishedRun) -> list[Attendance]:
    """All sites of a run, by name."""
    missing: Mapping[str, str] = run.results["missing"]
    refused, rows = _refused(run), []
    again = Counter(event.get("site") for event in run.events if event["event"] == "again")
    emptied = {event["site"]: event["message"] for event in run.events if event["event"] == EMPTY}
    consented = {e["site"] for e in run.events if e["event"] == "answer" and e.get("scalars", {}).get("consent")}
    for site in sorted({*run.sites, *missing, *refused}):
        entry = run.results["sites"].get(site, {})
        remarks = [without_paths(missing[site])] if site in missing else []
        if "round" in entry:
            remarks.append(f"network of its own best round, {entry['round']}")
        if missed := run.results.get("missed", {}).get(site):
            remarks.append(f"no contribution in {counted(missed, 'round')} of {run.results['rounds']}")
        reasons = list(dict.fromkeys(refused.get(site, ())))
        remarks += [f"refused: {without_paths(reason)}" for reason in reasons[:_REASONS]]
        if len(reasons) > _REASONS:
            remarks.append(f"and {len(reasons) - _REASONS} more refusals")
        if site in emptied:
            remarks.append(f"warning: {without_paths(emptied[site])}")
        if run.drifted(site):
            remarks.append("warning: its record says that the shared tensors were unusually far from the first ones")
        if site in again:
            remarks.append(f"started again, or lost the connection, {counted(again[site], 'time')}")
        state = "missing" if site in missing else "took part" if site in run.results["sites"] else "refused"
        rows.append(Attendance(site, state, _exchange(run, site, consented), _withheld(entry), tuple(remarks)))
    return rows


def _refused(run: FinishedRun) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for event in run.events:
        if event["event"] == "refused":
            found.setdefault(str(event.get("site")), []).append(f"{event.get('task')}: {event.get('reason')}")
    return found


def _exchange(run: FinishedRun, site: str, consented: Collection[str]) -> str:
    """What the site did in exchanges between sites."""
    without = [f"{word}: {sites[site]}" for word, sites in run.results.get("without", {}).items() if site in sites]
    if without:
        return "; ".join(without)
    entry = run.results["sites"].get(site, {})
    peers = [f"{stage}: {counted(entry[stage]['peers'], 'peer')}" for stage in ("spectra", "calibration") if stage in entry]
    if not peers:
        return "none in this method"
    return ("consented; " if site in consented else "") + "; ".join(peers)


def _withheld(entry: Mapping[str, object]) -> str:
    if WITHHELD in entry:
        return f"numbers over fewer than {entry[WITHHELD]} images or cases"
    if STD_WITHHELD in entry:
        return f"standard deviations over fewer than {entry[STD_WITHHELD]} images or cases"
    return "nothing"
