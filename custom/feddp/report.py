"""Results as people read them."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from feddp.protocol import ROUNDED, STD_WITHHELD, VOLUMES, WHEN, WITHHELD

_ROUNDED = "Each site rounded what it measured, metrics to three decimals and losses to three digits, before it left."
_NO_STD = "—"


def write_markdown(results: Mapping[str, Any]) -> str:
    """results.json as a table in the layout of the paper's Table I: Dice in per cent and ASSD in pixels, mean ± std."""
    sites = sorted(results["sites"])
    title = f"# {results['method']} on {results['network']}, {results['rounds']} rounds, seed {results['seed']}"
    lines = [title, ""]
    if not results["federated"]:
        lines += ["All sites' images in one place, trained outside FLARE: an upper bound, no federation.", ""]
    if results["selection"] == "test":
        lines += ["**Optimistic**: the best round and epoch were chosen on the test images (`selection=test`).", ""]
    parts = {site: results["sites"][site] for site in sites} | {"Average": results["average"]}
    lines += _before_and_final(parts, {"Dice (%)": ("dice", 100), "ASSD (pix.)": ("assd", 1)})
    lines += [
        "",
        "± is the standard deviation over a site's test images, and over the sites in Average. An image on which exactly one"
        " of mask and prediction is empty counts with the image's diagonal as its distance.",
        f"Stage 1 handed on round {results['start_round']} (best by mean validation IoU: {results['best_round']}).",
    ]
    lines += _notes(results)
    for site in sites:
        styles = results["sites"][site].get("spectra")
        if styles is not None:
            how = f"with the spectra of {styles['peers']} peers" if styles["peers"] else "without others' spectra, as in FedAvg"
            lines.append(f"{site}: trained {how}.")
        calibration = results["sites"][site].get("calibration")
        if calibration:
            if not calibration["tuned"]:
                how = "its calibration failed; it keeps its network of the stage before"
            elif calibration["calibrated"]:
                how = f"calibrated with {calibration['peers']} peers"
            else:
                how = "tuned without peers (λ = 0)"
            lines.append(f"{site}: {how}.")
    if "sealed" in results:
        how = (
            "encrypted from site to site" if results["sealed"] else "in the clear, by the simulator, which has no certificates"
        )
        lines.append(f"What the sites exchanged went {how}.")
    lines += [f"**{site} is missing**: {reason}" for site, reason in sorted(results["missing"].items())]
    if VOLUMES in results["average"]:
        lines += ["", "By case, all test slices of a patient as one volume (± over a site's test cases):", ""]
        cases = {column: part.get(VOLUMES, {}) for column, part in parts.items()}
        lines += _before_and_final(cases, {"Dice (%)": ("dice", 100), "IoU (%)": ("iou", 100)})
    if results["matrix"]:
        lines += [
            "",
            "Test Dice (%) of every exchanged network (columns, before calibration) at every site (rows):",
            "",
        ]
        models = sorted({model for row in results["matrix"].values() for model in row})
        lines += ["| | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
        for site, row in sorted(results["matrix"].items()):
            cells = [f"{100 * row[m]['dice']['mean']:.2f}" if m in row else "" for m in models]
            lines.append(f"| {site} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def table(results: Mapping[str, Any]) -> Table:
    """The same for a terminal: a line a site."""
    title = f"{results['method']} on {results['network']}, {results['rounds']} rounds, seed {results['seed']}"
    if results["selection"] == "test":
        title += " (optimistic: chosen on the test images)"
    caption = "\n".join(_notes(results)) or None
    view = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for head in ("site", "Dice (%)\nbefore", "\nfinal", "ASSD (pix.)\nbefore", "\nfinal", "peers"):
        view.add_column(head, justify="left" if head == "site" else "right", no_wrap=True)
    for site in (*sorted(results["sites"]), "Average"):
        part = results["average"] if site == "Average" else results["sites"][site]
        cells = [_cell(part.get(when), *what) for what in (("dice", 100), ("assd", 1)) for when in WHEN]
        view.add_row(site, *cells, str(part.get("calibration", {}).get("peers", "")), end_section=site == max(results["sites"]))
    return view


def _notes(results: Mapping[str, Any]) -> list[str]:
    """That the numbers are rounded; why a site has none, or no ±."""
    notes = [_ROUNDED] if results.get(ROUNDED) else []
    for word, what in ((WITHHELD, "what is measured"), (STD_WITHHELD, f"the standard deviation (± {_NO_STD})")):
        least = {site: found[word] for site, found in sorted(results["sites"].items()) if word in found}
        notes += [f"{site}: its policy withholds {what} over fewer than {n} test images or cases." for site, n in least.items()]
    return notes


def _before_and_final(parts: Mapping[str, Any], metrics: Mapping[str, tuple[str, float]]) -> list[str]:
    """A table of two rows; `parts`: {column: summaries under WHEN}, `metrics`: {head: (metric, factor to its unit)}."""
    heads = [f"{head} {column}" for head in metrics for column in parts]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for when in WHEN:
        cells = [_cell(part.get(when), *what) for what in metrics.values() for part in parts.values()]
        lines.append(f"| {when.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return lines


def _cell(summary: Mapping[str, Any] | None, metric: str, scale: float) -> str:
    if summary is None:
        return WITHHELD
    cell = summary[metric]
    return f"{scale * cell['mean']:.2f} ± " + (f"{scale * cell['std']:.2f}" if "std" in cell else _NO_STD)
