"""A hospital's images in, its masks out, and afterwards, if asked, how good they are."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddp.adaptation.adapt import Report, Settings
from feddp.adaptation.models import Models
from feddp.adaptation.strategies import STRATEGIES, predict, probabilities
from feddp.data.folder import SiteFolder, facts_of, misfit, refuse_occupied
from feddp.data.images import SPLIT, Images, label_mask
from feddp.data.loading import load
from feddp.data.pixels import write_png
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.files import ADAPTED, SCORES, write_json
from feddp.training.metrics import THRESHOLD, measure, summarize
from feddp.training.volumes import measure_volumes


@dataclass(frozen=True)
class Request:
    """A strategy of STRATEGIES, its settings, and whether masks are compared with the site's own afterwards.

    Raises:
        InputError: there is no such way.
    """

    how: str
    settings: Settings
    score: bool = False

    def __post_init__(self) -> None:
        if self.how not in STRATEGIES:
            raise InputError(f"--how {self.how}: there are {', '.join(STRATEGIES)}")


def adapt(
    models: Models,
    run: str,
    folder: Path,
    out: Path,
    request: Request,
    device: torch.device,
    report: Report = lambda epoch, loss: None,
) -> dict[str, Any]:
    """Adapts `models`, of the finished run named `run`, to the images of `folder`, and writes a mask for each of them to `out`.

    A mask has the image's name and size and a site's masks' values. Beside them: adapt.json, what was done; with `score`,
    scores.json, the metrics of every image at the network's input size, and only then are masks of `folder` read.

    Returns:
        adapt.json's content: how, models, settings, the losses, the epoch that was kept, the numbers of images and of
        empty masks, seconds an image (adaptation, prediction and writing); with `score`, the summary of the metrics
        (`metrics.summarize`) too.

    Raises:
        InputError: no images, images or classes that do not fit the models, or `out` is not empty.
    """
    refuse_occupied([out])
    found, settings = Images.of(folder), request.settings
    _fits(found.site, models, request.score, folder)
    inputs, shapes = found.read(models.channels, models.size)
    started = time.monotonic()
    adapted = STRATEGIES[request.how](models, inputs, settings, device, report)
    out.mkdir(parents=True, exist_ok=True)
    maps: list[Tensor] = []
    empty = 0
    predictions = predict(adapted.networks, inputs, settings.batch, device)
    for file, shape, logits in zip(found.files, shapes, track(predictions, "Predicting", len(inputs)), strict=True):
        mask = label_mask(probabilities(logits, shape) > THRESHOLD, models.labels)
        write_png(out / file.name, mask)
        empty += not mask.any()
        if request.score:
            maps.append(probabilities(logits, (models.size, models.size)))
    done: dict[str, Any] = {
        "how": request.how,
        "run": run,
        "models": list(models.names),
        "settings": asdict(settings),
        "losses": adapted.fit.losses,
        "kept_epoch": adapted.fit.kept if adapted.fit.losses else None,
        "images": len(inputs),
        "empty_masks": int(empty),
        "seconds_per_image": (time.monotonic() - started) / len(inputs),
        "device": str(device),
    }
    write_json(out / ADAPTED, done)
    if request.score and found.site is not None:
        return done | _scores(out, found.site, maps, models.size)
    return done


def _fits(site: SiteFolder | None, models: Models, score: bool, folder: Path) -> None:
    if site is None:
        if score:
            raise InputError(f"--score needs masks, and {folder} is no site's folder (no dataset.json); leave --score out")
        return
    if differing := misfit(site, facts_of(models) if score else {"channels": models.channels}):
        found, wanted = differing
        names = "(channels, classes, labels)" if score else "channels"
        raise InputError(f"{folder / 'dataset.json'} says {names} = {found}, the models {wanted}; prepare it like their sites")
    if score:  # hours before they are read
        missing = [file for row in site.rows_of(SPLIT) if not (file := site.mask_path(row.image)).exists()]
        if missing:
            raise InputError(f"--score needs masks, and {missing[0]} is missing; add it, or leave --score out")


def _scores(out: Path, site: SiteFolder, maps: Sequence[Tensor], size: int) -> dict[str, Any]:
    """Reads the masks, for the first time, and writes scores.json."""
    samples = load(site, SPLIT, size)
    predicted, masks = torch.stack(list(maps)), torch.stack([sample["mask"] for sample in samples])
    rows = measure(predicted, masks)
    scores = summarize(rows)
    content: dict[str, Any] = {
        "summary": scores,
        "images": {sample["stem"]: row for sample, row in zip(samples, rows, strict=True)},
    }
    if site.volumes:
        cases = measure_volumes(predicted, masks, [sample["patient"] for sample in samples])
        content |= {"volumes": summarize(list(cases.values())), "cases": cases}
    write_json(out / SCORES, content)
    return {"scores": scores}
