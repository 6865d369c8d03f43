"""`feddp features`: from finished runs to a table of divergences and a t-SNE plot."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddp.adaptation.models import described, network_files
from feddp.data.folder import SiteFolder, metadata_of, misfit, refuse_occupied
from feddp.data.images import SPLIT
from feddp.data.loading import load
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.features.divergence import divergence
from feddp.features.extract import LAYERS, Pixels, sample_pixels
from feddp.features.tsne import embed
from feddp.networks.weights import load_personal
from feddp.reporting.plots import Panel, draw_panels, save
from feddp.reporting.tables import BLANK, ResultTable, Value
from feddp.training.device import asked_for
from feddp.training.seeds import seed_of

NOTE = (
    "½ KL(F‖B) + ½ KL(B‖F), in nats, of Gaussians with diagonal covariances fitted to the {layer} features of sampled pixels"
    " of the test images, foreground F (up to {count} of each class) and background B (up to {count}). 0 where they are alike,"
    " more where they are further apart. (Xie et al., 2024) gives no formula, and calls a smaller value better."
)


@dataclass(frozen=True)
class FeaturesRequest:
    """Which features to compare.

    Args:
        models: `--out` folders of finished runs.
        data: the root of the sites' folders.
        sites: the sites to use; all sites of the runs if empty.
        per_class: the most pixels of each class at each site.
    """

    models: Sequence[Path]
    data: Path
    out: Path
    sites: Sequence[str] = ()
    layer: str = LAYERS[0]
    per_class: int = 500
    seed: int = 0
    device: str = "cpu"


def features(request: FeaturesRequest) -> ResultTable:
    """Writes table_kl.csv, table_kl.tex and tsne.png to `request.out`; returns the table, one row per run.

    Raises:
        InputError: there is no finished run, no such site, layer or device, the data do not fit the networks, or `out` is not
            empty.
    """
    if request.layer not in LAYERS:
        raise InputError(f"--layer {request.layer}: there are {', '.join(LAYERS)}")
    refuse_occupied([request.out])
    asked_for(request.device)
    files = {title: _chosen(run, request.sites) for title, run in _titles(request.models).items()}
    sites = sorted({site for of_run in files.values() for site in of_run})
    if missing := [site for site in sites if not (request.data / site).is_dir()]:
        raise InputError(f"--data {request.data} has no {', '.join(missing)}; name the data that --models was run on")
    folders = {site: SiteFolder.open(request.data / site) for site in sites}
    found = {
        title: {site: _pixels(request, file, folders[site]) for site, file in of_run.items()} for title, of_run in files.items()
    }
    panels = {}
    for title, of_run in track(found.items(), "t-SNE"):
        together = np.concatenate([pixels.features for pixels in of_run.values()])
        places = np.concatenate([np.full(len(pixels.classes), sites.index(site)) for site, pixels in of_run.items()])
        classes = np.concatenate([pixels.classes for pixels in of_run.values()])
        panels[title] = Panel(embed(together, seed_of(request.seed, "tsne")), classes, places)
    table = kl_table(found, sites, NOTE.format(layer=request.layer, count=request.per_class))
    request.out.mkdir(parents=True, exist_ok=True)
    table.write(request.out)
    save(draw_panels(panels, ("background", *folders[sites[0]].classes), sites), request.out / "tsne.png")
    return table


def kl_table(found: dict[str, dict[str, Pixels]], sites: list[str], note: str) -> ResultTable:
    """pFLFE's Table 5: one row for each of {run: {site: Pixels}}, the divergence at each site and its mean over all of them."""
    rows = []
    for title, of_run in found.items():
        values = [_divergence(of_run.get(site)) for site in sites]
        known = [value for value in values if value is not None]
        average = float(np.mean(known)) if len(known) == len(sites) else None
        rows.append((title, *(BLANK if value is None else Value(value) for value in (*values, average))))
    heads = ("Run", *sites, "Average")
    title = "pFLFE's Table 5: KL divergence between foreground and background features"
    return ResultTable("kl", title, heads, (None,) * len(heads), tuple(rows), (note,))


def _divergence(pixels: Pixels | None) -> float | None:
    if pixels is None:
        return None
    return divergence(pixels.features[pixels.classes > 0], pixels.features[pixels.classes == 0])


def _pixels(request: FeaturesRequest, file: Path, folder: SiteFolder) -> Pixels:
    """Returns sampled pixels; raises InputError if the data of `folder` do not fit the network, or it has no test image."""
    metadata = described(file)
    if differing := misfit(folder, metadata_of(metadata)):
        raise InputError(
            f"{folder.path} is not of (channels, classes, labels) = {differing[1]}, as {file}; name the data it was run on"
        )
    network, samples = load_personal(file), load(folder, SPLIT, metadata.size, metadata.normalise)
    if not samples:
        raise InputError(f"{folder.path} has no image in split {SPLIT}; leave the site out with --site")
    seed = seed_of(request.seed, folder.site, "pixels")
    what = f"Features of {folder.site}"
    return sample_pixels(network.to(request.device), samples, folder.labels, request.layer, request.per_class, seed, what)


def _titles(runs: Sequence[Path]) -> dict[str, Path]:
    """{title: folder}: the title is the folder's name, or its path where two have the same name."""
    names = [os.path.basename(os.path.realpath(run)) for run in runs]  # unlike Path.resolve, no error for a loop of links
    return {name if names.count(name) == 1 else str(run): run for name, run in zip(names, runs, strict=True)}


def _chosen(run: Path, sites: Sequence[str]) -> dict[str, Path]:
    files = network_files(run)
    if unknown := [site for site in sites if site not in files]:
        raise InputError(f"--site {', '.join(unknown)}: {run} has no such site; it has {', '.join(files)}")
    found = {site: file for site, file in files.items() if not sites or site in sites}
    if gone := [site for site, file in found.items() if not file.exists()]:
        raise InputError(f"{run} has no network of {', '.join(gone)}, which `feddp runs slim` removes; name another run")
    return found
