"""Table IV: every site's network, and the ensemble of all of them, measured on an unseen site."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddp.compare.scores import Result, Summary, over_seeds
from feddp.compare.tables import APART, by_class, failed, labelled, optimistic
from feddp.data.folder import SiteFolder, metadata_of, misfit
from feddp.data.loading import Sample, load
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.files import NETWORK, read_results, site_folder
from feddp.networks.metadata import ZSCORE
from feddp.networks.weights import load_personal
from feddp.reporting.tables import BLANK, SHOWN, ResultTable, shown_value
from feddp.training.loop import predict
from feddp.training.metrics import Row, measure, summarize

ENSEMBLE = "Ensemble"
_METRICS = ("dice", "assd")


def open_unseen(path: Path, data: Path, metadata: Mapping[str, Any]) -> SiteFolder:
    """The folder of an unseen site, for the federation below `data`, whose channels, classes and labels are `metadata`.

    Raises:
        InputError: it is a site of the federation, differs in channels, classes or labels, or has no image in split test.
    """
    folder = SiteFolder.open(path)
    if path.resolve().parent == data.resolve():
        raise InputError(f"--unseen {path} is a site of the federation; name a folder outside {data}")
    if misfit(folder, metadata):
        found = metadata_of(folder)
        raise InputError(
            f"--unseen {path} has {found}, the federation {dict(metadata)}; prepare it like the federation's sites"
        )
    if not folder.rows_of("test"):
        raise InputError(f"--unseen {path} has no image in split test, which is what is measured; put some there in split.csv")
    return folder


def unseen_tables(
    methods: Mapping[str, Result], folder: SiteFolder, sites: list[str], size: int, device: str
) -> list[ResultTable]:
    """Dice and ASSD (mean ± std over the images of `folder` in split test, seeds averaged image by image).

    Of several classes, their mean, then one table for each class alone.
    """
    samples = cache(partial(load, folder, "test", size))  # by how a run's networks normalise
    classes = folder.classes if len(folder.classes) > 1 else ()
    found = {
        label: _summaries(result, samples, sites, classes, device)
        for label, result in track(methods.items(), f"Measuring on {folder.site}", len(methods))
    }
    count = len(folder.rows_of("test"))
    notes = [f"{count} images of {folder.site} in split test. Ensemble: the mean of the sites' probability maps."]
    if blank := [label for label, result in methods.items() if result.folders and found[label].keys() != {*sites, ENSEMBLE}]:
        notes.append(f"{BLANK}: a network of a site is not there ({', '.join(blank)}).")
    notes += optimistic(methods.values())
    if apart := frozenset(i for i, result in enumerate(methods.values()) if not result.competes):
        notes.append(APART)
    columns = [(metric, column) for metric in _METRICS for column in (*sites, ENSEMBLE)]
    heads = ("Method", *(f"{SHOWN[m].head} {c}" for m, c in columns))
    better = (None, *(SHOWN[m].better for m, _ in columns))

    def table(name: str, title: str, class_name: str) -> ResultTable:
        rows = []
        for label, result in methods.items():
            here = found[label]
            cells = [shown_value(here[column], m, class_name) if column in here else BLANK for m, column in columns]
            rows.append((labelled(label, result), *(cells if result.folders else failed(result, len(columns)))))
        return ResultTable(name, title, heads, better, tuple(rows), tuple(notes), apart)

    title = f"Table IV: the unseen site {folder.site}"
    return [table("unseen", title, ""), *by_class(table, "unseen", title, classes)]


def _summaries(
    result: Result, samples: Callable[[str], list[Sample]], sites: list[str], classes: Sequence[str], device: str
) -> dict[str, Summary]:
    """The metrics of each site's network and of ENSEMBLE, of those that all runs of a method have kept."""
    seeds = []
    for run in result.folders.values():
        files = {site: site_folder(run, site) / NETWORK for site in sites}
        networks = {site: load_personal(file).to(device) for site, file in files.items() if file.exists()}
        images = samples(read_results(run).get("settings", {}).get("normalise", ZSCORE))
        measured, stems = measure_networks(networks, images, classes), [sample["stem"] for sample in images]
        if networks.keys() != set(sites):
            measured.pop(ENSEMBLE, None)  # the ensemble of fewer sites is another one
        seeds.append({column: dict(zip(stems, rows, strict=True)) for column, rows in measured.items()})
    return {
        column: summarize(list(over_seeds(column, [seed[column] for seed in seeds]).values()))
        for column in (*sites, ENSEMBLE)
        if seeds and all(column in seed for seed in seeds)
    }


def measure_networks(
    networks: Mapping[str, nn.Module], samples: list[Sample], classes: Sequence[str] = ()
) -> dict[str, list[Row]]:
    """The metrics of every sample under each network, and under ENSEMBLE, the mean of the networks' probabilities (C,H,W).

    With `classes`, the names of the classes, also those of each class.
    """
    masks = torch.stack([sample["mask"] for sample in samples])
    rows: dict[str, list[Row]] = {}
    total: Tensor | None = None
    for name, network in networks.items():
        maps = torch.cat([part.cpu() for part, _ in predict(network, samples)])
        rows[name] = measure(maps, masks, classes)
        total = maps if total is None else total + maps
    if total is not None:
        rows[ENSEMBLE] = measure(total / len(networks), masks, classes)
    return rows
