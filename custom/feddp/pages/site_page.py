"""`feddp report --site`: the page of one site's images, which must not leave the site.

Of the worst, the median and the best test image with foreground by Dice of the first network, and of the worst without: the
image, the mask, and every network's outline with Dice and ASSD, as the papers' figures of cases; and where a pixel's query
looks (Wang et al., TMI 2024, Fig. 1). If other sites' networks are on this machine, also the inconsistency of all (Eq. 7).

Deviations: Eq. 7 is of networks before the calibration; here, the other sites' networks are those that the run left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddp.adaptation.models import described, network_files
from feddp.data.folder import SiteFolder, metadata_of, misfit
from feddp.data.images import SPLIT
from feddp.data.loading import Sample, load
from feddp.data.pixels import read_image
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.files import RESULTS, read_results
from feddp.methods.base import STAGES
from feddp.networks.attention import attention_of
from feddp.networks.weights import load_personal, read_network
from feddp.pages.collected import label_of
from feddp.pages.pictures import VIEW, coloured, contours, picture
from feddp.pages.template import rendered, require_place, write_page
from feddp.training.calibration import with_inconsistency
from feddp.training.loop import predict
from feddp.training.metrics import THRESHOLD, Row, measure

_SLOTS = [f"{slot}.safetensors" for slot in STAGES.values() if slot]  # in the order of the stages
_BATCH = 8
_LOOKING = 5  # networks whose attention is shown


@dataclass(frozen=True)
class Networks:
    """Files by what the page calls them: the site's own networks, and other sites' of the first run that has any."""

    own: dict[str, Path]
    peers: dict[str, Path]


@dataclass(frozen=True)
class CasePanel:
    """A panel: what lies over the case's image, and the words below it."""

    caption: str
    paths: tuple[tuple[str, str], ...] = ()  # (kind of line, its `d`)
    overlay: str = ""
    point: tuple[float, float] | None = None


@dataclass(frozen=True)
class Case:
    name: str
    stem: str
    image: str
    panels: tuple[CasePanel, ...]
    maps: tuple[CasePanel, ...]


def site_report(folders: Sequence[Path], site: Path, out: Path, pixel: tuple[int, int] | None = None) -> Path:
    """Writes the page of the site's folder `site` to `out`, readable for its owner alone, and returns `out`.

    Args:
        folders: of finished runs, or a site's own folders of a job (`feddp/<job id>/` of its workspace).
        pixel: (x, y) of the network's input, whose attention is shown; default: the middle of the mask.

    Raises:
        InputError: a folder holds no network of this site, the images do not fit the network, there is no test image, or `out`
            is no place for a page.
    """
    require_place(out)
    folder = SiteFolder.open(site)
    networks = networks_of(folders, folder.site)
    first = next(iter(networks.own.values()))
    size = described(first).size
    if pixel and not all(0 <= place < size for place in pixel):
        raise InputError(f"--pixel {pixel[0]},{pixel[1]}: the network's input has {size} x {size} pixels; count from 0")
    measured = {label: _measured(folder, file) for label, file in networks.own.items()}
    samples, rows = measured[next(iter(measured))].samples, measured[next(iter(measured))].rows
    filled = [bool(sample["mask"].any()) for sample in samples]
    cases = chosen([row["dice"] for row in rows], filled)
    maps = _maps(networks, [samples[i] for i in cases.values()], pixel)
    made = []
    for (name, i), own_maps in zip(cases.items(), maps, strict=True):
        sample = samples[i]
        image = read_image(folder.image_path(sample["stem"]), folder.channels, folder.path)
        truth = CasePanel("Ground truth" + ("" if filled[i] else ": no foreground"), _lines("truth", sample["mask"]))
        outlines = [_outline(label, found, i, sample["mask"]) for label, found in measured.items()]
        made.append(Case(name, sample["stem"], picture(image), (CasePanel("Image"), truth, *outlines), tuple(own_maps)))
    html = rendered(
        "site.html",
        site=folder.site,
        cases=made,
        view=VIEW,
        count=sum(filled),
        empty=len(samples) - sum(filled),
        first=next(iter(measured)),
    )
    write_page(out, html, private=True)
    return out


def networks_of(folders: Sequence[Path], site: str) -> Networks:
    """The networks of `site` in runs' folders and in the site's own folders of jobs.

    Raises:
        InputError: a folder holds none.
    """
    own: dict[str, Path] = {}
    peers: dict[str, Path] = {}
    for folder in folders:
        slots = [folder / name for name in _SLOTS if (folder / name).exists()]
        if (folder / RESULTS).exists():
            files = {name: file for name, file in network_files(folder).items() if file.exists()}
            if not files:
                raise InputError(f"{folder} holds no network (`feddp runs slim` removes them); name a run that has some")
            if site not in files:
                raise InputError(f"{folder} holds no network of {site}; it has {', '.join(files)}: name that site's data")
            found = {label_of(read_results(folder).get("method", "")): files.pop(site)}
            peers = peers or files
        elif slots:
            found = {slot.stem: slot for slot in slots[::-1]}  # the last stage's first
        else:
            raise InputError(
                f"{folder} is neither a finished run nor a site's folder of a job: it has no {RESULTS} and no network"
            )
        for label, file in found.items():
            name = f"{label} ({folder.resolve().name})" if label in own else label
            if name in own:
                raise InputError(f"{folder} is named twice, or as another folder; name each once")
            own[name] = file
    return Networks(own, peers)


@dataclass(frozen=True)
class _Predicted:
    samples: list[Sample]
    maps: Tensor  # (n, classes, size, size), probabilities
    rows: list[Row]


def _measured(folder: SiteFolder, file: Path) -> _Predicted:
    metadata = described(file)
    if differing := misfit(folder, metadata_of(metadata)):
        raise InputError(f"{folder.path} is not of (channels, classes, labels) = {differing[1]}, as {file}; name its data")
    samples = load(folder, SPLIT, metadata.size, metadata.normalise)
    if not samples:
        raise InputError(f"{folder.path} has no image in split {SPLIT}; add some to split.csv")
    passes = track(
        predict(load_personal(file), samples, _BATCH), f"Predicting with {file.name}", math.ceil(len(samples) / _BATCH)
    )
    found = [(maps, measure(maps, batch["mask"])) for maps, batch in passes]
    return _Predicted(samples, torch.cat([maps for maps, _ in found]), [row for _, rows in found for row in rows])


def chosen(dice: Sequence[float], filled: Sequence[bool]) -> dict[str, int]:
    """Returns {name of the case: index of the image}, each image once.

    Of the images with foreground (`filled`) the worst, the median and the best. Of those without, only the worst, if the
    network finds some there: otherwise Dice is 1, and there is nothing to see.
    """
    order = np.argsort(dice, kind="stable").tolist()
    inside, empty = [i for i in order if filled[i]], [i for i in order if not filled[i]]
    wanted = {}
    if inside:
        wanted = {"Worst case": inside[0], "Median case": inside[(len(inside) - 1) // 2], "Best case": inside[-1]}
    if empty and (dice[empty[0]] < 1 or not inside):
        wanted["Worst case without foreground"] = empty[0]
    return {name: i for name, i in wanted.items() if list(wanted.values()).index(i) == list(wanted).index(name)}


def _outline(label: str, found: _Predicted, i: int, mask: Tensor) -> CasePanel:
    row = found.rows[i]
    lines = (*_lines("truth", mask), *_lines("network", found.maps[i] > THRESHOLD))
    nothing = "" if any(line for kind, line in lines if kind == "network") else ", no foreground"
    return CasePanel(f"{label}: Dice {100 * row['dice']:.1f} %, ASSD {row['assd']:.2f} pixels{nothing}", lines)


def _lines(kind: str, maps: Tensor) -> tuple[tuple[str, str], ...]:
    return tuple((kind, contours(part.bool().numpy())) for part in maps)


def _maps(networks: Networks, samples: list[Sample], pixel: tuple[int, int] | None) -> list[list[CasePanel]]:
    """For each sample the inconsistency of the sites' networks, and where each network's query of the pixel looks."""
    label, file = next(iter(networks.own.items()))
    network = load_personal(file)
    peers = {site: read_network(path)[0] for site, path in networks.peers.items() if _alike(path, file)}
    found: list[list[CasePanel]] = [[] for _ in samples]
    if peers:
        deltas = [s["delta"].mean(dim=0).numpy() for s in with_inconsistency(network, peers, samples, "frozen")]
        highest = max(float(delta.max()) for delta in deltas)
        for shown, delta in zip(found, deltas, strict=True):
            caption = f"Inconsistency δ of {len(peers) + 1} sites' networks: highest {delta.max():.3f}, mean {delta.mean():.3f}"
            shown.append(CasePanel(f"{caption} (brightest colour: {highest:.3f})", overlay=coloured(delta, highest)))
    looking = {label: network} | {
        f"{site}'s network": load_personal(networks.peers[site]) for site in list(peers)[: _LOOKING - 1]
    }
    for shown, sample in zip(found, samples, strict=True):
        x, y = pixel or _middle(sample["mask"])
        size = sample["image"].shape[-1]
        for name, each in looking.items():
            weights = attention_of(each, sample["image"], (x, y))
            if weights is not None and weights.numel() > 1:  # one key takes all of every query
                point = (VIEW * (x + 0.5) / size, VIEW * (y + 0.5) / size)
                overlay = coloured(weights.numpy(), float(weights.max()))
                keys = f"{weights.shape[0]} x {weights.shape[1]} keys, weights {weights.min():.3f} to {weights.max():.3f}"
                shown.append(CasePanel(f"Where pixel {x},{y} looks, {name} ({keys})", overlay=overlay, point=point))
    return found


def _alike(one: Path, other: Path) -> bool:
    """Whether two files hold networks of the same tensors."""
    return described(one) == described(other)


def _middle(mask: Tensor) -> tuple[int, int]:
    """(x, y) of the foreground pixel that is nearest to the foreground's centre; of an empty mask the image's centre."""
    places = mask.amax(dim=0).nonzero().double()  # (n, 2): y, x
    if not len(places):
        return mask.shape[-1] // 2, mask.shape[-2] // 2
    y, x = places[(places - places.mean(dim=0)).square().sum(dim=1).argmin()].long().tolist()
    return x, y
