"""The page of one run: its results as Markdown, and as a table for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from feddp.protocol import BEST_PER_SITE, ROUNDED, STD_WITHHELD, VOLUMES, WHEN, WITHHELD
from feddp.reading import counted
from feddp.reporting.tables import BLANK, SHOWN, markdown_lines, shown_value
from feddp.stages.empty import at_the_end
from feddp.training.columns import class_names, of_class

_ROUNDED = "Each site rounded what it sent: Dice and IoU to three decimals, distances and losses to three digits."
_BEFORE = {
    False: "before: the networks before the last local stage; final: after it. Without a local stage, both are those of the"
    " selected round.",
    True: "before: the federation's network; final: after local post-training.",
}
_PEERS = "peers: the sites whose networks took part in this site's calibration."
_METRICS, _CASE_METRICS = ("dice", "assd"), ("dice", "iou")


def write_markdown(results: Mapping[str, Any]) -> str:
    """results.json in the layout of the paper's Table I: Dice in per cent and ASSD in pixels, mean ± standard deviation."""
    sites = sorted(results["sites"])
    lines = [f"# {_title(results)}", ""]
    if not results["federated"]:
        lines += ["All sites' images in one place, trained outside FLARE: an upper bound, no federation.", ""]
    if results["selection"] == "test":
        lines += ["**Optimistic**: the best round and epoch were chosen on the test images (`selection=test`).", ""]
    if warning := at_the_end(results):
        lines += [f"**Warning**: {warning}", ""]
    parts = {site: results["sites"][site] for site in sites} | {"Average": results["average"]}
    lines += _before_and_final(parts, _METRICS)
    lines += [
        "",
        "± is the standard deviation over a site's test images, and over the sites in Average. An image on which exactly one"
        " of mask and prediction is empty counts with the image's diagonal as its distance.",
        _BEFORE["joined" in results],
        _selected(results),
    ]
    lines += _notes(results)
    for site in sites:
        lines += _exchanges(site, results["sites"][site])
    if "sealed" in results and _exchanged(results["sites"].values()):
        how = "encrypted from site to site" if results["sealed"] else "in the clear: this environment has no certificates"
        lines.append(f"What the sites exchanged went {how}.")
    lines += [f"**{site} is missing**: {reason}" for site, reason in sorted(results["missing"].items())]
    missed = results.get("missed", {})
    lines += [f"{site} took no part in {counted(n, 'round')} of {results['rounds']}" for site, n in missed.items()]
    if VOLUMES in results["average"]:
        lines += ["", "By case, all test slices of a patient as one volume (± over a site's test cases):", ""]
        lines += _before_and_final({column: part.get(VOLUMES, {}) for column, part in parts.items()}, _CASE_METRICS)
    if results["matrix"]:
        for name in ("", *class_names(name for row in results["matrix"].values() for cell in row.values() for name in cell)):
            what = f"Test Dice (%){f' of {name} alone' if name else ''}"
            lines += ["", f"{what} of every exchanged network (columns, before calibration) at every site (rows):", ""]
            lines += _matrix(results["matrix"], of_class("dice", name))
    return "\n".join(lines) + "\n"


def table(results: Mapping[str, Any]) -> Table:
    """The same for a terminal, one row per site."""
    title = _title(results)
    if results["selection"] == "test":
        title += " (optimistic: chosen on the test images)"
    caption = "\n".join((_BEFORE["joined" in results], _PEERS, *_notes(results)))
    view = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for head in ("site", *(text for metric in _METRICS for text in (f"{SHOWN[metric].head}\nbefore", "\nfinal")), "peers"):
        view.add_column(head, justify="left" if head == "site" else "right", no_wrap=True)
    for site in (*sorted(results["sites"]), "Average"):
        part = results["average"] if site == "Average" else results["sites"][site]
        peers = str(part.get("calibration", {}).get("peers", ""))
        for name in ("", *_classes([part])):
            cells = [_cell(part.get(when), metric, name) for metric in _METRICS for when in WHEN]
            view.add_row(f"  {name}" if name else site, *cells, "" if name else peers)
        if site == max(results["sites"]):
            view.add_section()
    return view


def _title(results: Mapping[str, Any]) -> str:
    start = "local post-training after " if "joined" in results else ""
    rounds = counted(results["rounds"], "round")
    return f"{start}{results['method']} on {results['network']}, {rounds}, seed {results['seed']}"


def _selected(results: Mapping[str, Any]) -> str:
    joint = f"best by the sites' validation IoU: {results['best_round']}"
    if results.get(BEST_PER_SITE):
        own = {site: entry["round"] for site, entry in sorted(results["sites"].items()) if "round" in entry}
        told = "; ".join([*(f"{site}: {round}" for site, round in own.items()), joint])
        return f"Stage 1 selected each site's own best round by validation IoU ({told})."
    return f"Stage 1 selected round {results['start_round']} ({joint})."


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Whether the numbers are rounded, why a site has no number or no standard deviation, and who took no part in exchanges."""
    notes = [_ROUNDED] if results.get(ROUNDED) else []
    for word, what in ((WITHHELD, "what is measured"), (STD_WITHHELD, f"the standard deviation (± {BLANK})")):
        least = {site: found[word] for site, found in sorted(results["sites"].items()) if word in found}
        notes += [f"{site}: its policy withholds {what} over fewer than {n} test images or cases." for site, n in least.items()]
    for word, sites in results.get("without", {}).items():
        notes += [f"{site} took no part in the exchange for {word}: it {why}." for site, why in sites.items()]
    return notes


def _exchanged(sites: Iterable[Mapping[str, Any]]) -> bool:
    """Whether sites can have exchanged something: not if each one that counts its peers had none."""
    peers = [found[stage]["peers"] for found in sites for stage in ("spectra", "calibration") if found.get(stage)]
    return not peers or any(peers)


def _exchanges(site: str, found: Mapping[str, Any]) -> list[str]:
    """What a site received of the others, and what it used it for."""
    lines, styles, calibration = [], found.get("spectra"), found.get("calibration")
    if styles is not None:
        how = f"with the spectra of {styles['peers']} peers" if styles["peers"] else "without others' spectra, as in FedAvg"
        lines.append(f"{site}: trained {how}.")
    if calibration:
        if not calibration["tuned"]:
            how = "its calibration failed; it keeps its network of the stage before"
        elif calibration["calibrated"]:
            how = f"calibrated with {calibration['peers']} peers"
            if left_out := calibration.get("left_out"):
                how += f", without {', '.join(left_out)}, whose tensors it refused"
        else:
            how = "tuned without peers (λ = 0)"
        lines.append(f"{site}: {how}.")
    return lines


def _before_and_final(parts: Mapping[str, Any], metrics: Sequence[str]) -> Iterable[str]:
    """A table of two rows, before the last stage at a site and after it, and of two more for each of several classes.

    `parts`: {column: summaries under WHEN}.
    """
    heads = ["", *(f"{SHOWN[metric].head} {column}" for metric in metrics for column in parts)]
    rows = [
        [
            when.removesuffix("_calibration") + (f", {name}" if name else ""),
            *(_cell(part.get(when), metric, name) for metric in metrics for part in parts.values()),
        ]
        for name in ("", *_classes(parts.values()))
        for when in WHEN
    ]
    return markdown_lines(heads, rows)


def _classes(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """The classes that have summaries of their own somewhere; results written before classes were kept apart have none."""
    return class_names(name for part in parts for when in WHEN for name in part.get(when, {}))


def _matrix(matrix: Mapping[str, Mapping[str, Any]], metric: str) -> Iterable[str]:
    models = sorted({model for row in matrix.values() for model in row})
    rows = [
        [site, *(f"{100 * row[model][metric]['mean']:.2f}" if metric in row.get(model, {}) else "" for model in models)]
        for site, row in sorted(matrix.items())
    ]
    return markdown_lines(["", *models], rows)


def _cell(summary: Mapping[str, Mapping[str, float]] | None, metric: str, class_name: str) -> str:
    if summary is None:
        return WITHHELD
    value = shown_value(summary, metric, class_name)
    alone = summary[of_class(metric, class_name)]["n"] == 1
    return str(value) if value.std is not None or alone else f"{value} ± {BLANK}"
