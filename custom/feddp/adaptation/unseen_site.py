"""Adapts a finished run's models to a folder of images, writes the predicted masks and, on request, scores them."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddp.adaptation.choices import AdaptationOptions
from feddp.adaptation.fitting import Report
from feddp.adaptation.models import Models
from feddp.adaptation.strategies import STRATEGIES, predict, probabilities
from feddp.data.folder import Described, SiteFolder, metadata_of, misfit, refuse_occupied
from feddp.data.images import SPLIT, Images, label_mask
from feddp.data.loading import load
from feddp.data.pixels import write_png
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.files import ADAPTED, SCORES, write_json
from feddp.training.metrics import THRESHOLD, measure, require_finite, summarize
from feddp.training.volumes import measure_volumes


def adapt(
    models: Models,
    run: str,
    folder: Path,
    out: Path,
    request: AdaptationOptions,
    device: torch.device,
    report: Report = lambda epoch, loss: None,
) -> dict[str, Any]:
    """Adapts `models` of the finished run `run` to the images of `folder`, and writes a mask per image to `out`.

    A mask has the name and size of its image, and the pixel values of the sites' masks. `adapt.json` in `out` describes the
    adaptation. With `score`, the masks of `folder` are read after the prediction, and `scores.json` holds the metrics per
    image at the network's input size, of each class too if there are several.

    Returns:
        The content of adapt.json: how, models, settings, the losses, the epoch that was kept, the numbers of images and of
        empty masks, seconds per image (adaptation, prediction and writing); with `score`, also the summary over the images
        (`metrics.summarize`).

    Raises:
        InputError: there are no images, images or classes do not fit the models, `out` is not empty, or a prediction is not
            finite.
    """
    refuse_occupied([out])
    source, settings = fitting(folder, models, request.score), request.settings
    inputs, shapes = source.read(models.channels, models.size, models.normalise, _prepared(models, source))
    started = time.monotonic()
    adapted = STRATEGIES[request.how](models, inputs, settings, device, report)
    out.mkdir(parents=True, exist_ok=True)
    maps: list[Tensor] = []
    empty = 0
    predictions = predict(adapted.networks, inputs, settings.batch, device)
    for file, shape, logits in zip(source.files, shapes, track(predictions, "Predicting", len(inputs)), strict=True):
        mask = label_mask(require_finite(probabilities(logits, shape)), models.labels, THRESHOLD).numpy()
        write_png(out / file.name, mask)
        empty += not mask.any()
        if request.score:
            maps.append(probabilities(logits, (models.size, models.size)))
    description: dict[str, Any] = {
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
    write_json(out / ADAPTED, description)
    if request.score and source.site is not None:
        return description | _scores(out, source.site, maps, models.size)
    return description


def fitting(folder: Path, models: Described, score: bool) -> Images:
    """Returns the images of `folder`, of which none is read yet.

    Raises:
        InputError: there are none, they or their classes do not fit the models or, with `score`, a mask is missing.
    """
    source = Images.of(folder)
    site = source.site
    if site is None:
        if score:
            raise InputError(f"--score needs masks, but {folder} has no dataset.json, so it has none; leave --score out")
        return source
    if differing := misfit(site, metadata_of(models) if score else {"channels": models.channels}):
        actual, wanted = differing
        names = "(channels, classes, labels)" if score else "channels"
        raise InputError(
            f"{folder / 'dataset.json'} has {names} = {actual}, but the models have {wanted}; prepare it like the run's sites"
        )
    if score:  # fails before the adaptation, not hours into it
        missing = [file for row in site.rows_of(SPLIT) if not (file := site.mask_path(row.image)).exists()]
        if missing:
            raise InputError(f"--score needs masks, but {missing[0]} is missing; add it, or leave --score out")
    return source


def _prepared(models: Models, source: Images) -> int | None:
    """Returns the size to which images of a plain folder are resized first; a site's are prepared already."""
    if source.site is not None or not models.prepared:
        return None
    if len(models.prepared) > 1:
        sizes = " and ".join(map(str, sorted(models.prepared)))
        raise InputError(f"the run's sites resized their images to {sizes} pixels; prepare {source.folder} as a site's folder")
    (size,) = models.prepared
    return size


def _scores(out: Path, site: SiteFolder, maps: Sequence[Tensor], size: int) -> dict[str, Any]:
    """Reads the masks and writes scores.json; the masks are not read before this."""
    samples = load(site, SPLIT, size)
    predicted, masks = torch.stack(list(maps)), torch.stack([sample["mask"] for sample in samples])
    rows = measure(predicted, masks, site.classes)
    summary = summarize(rows)
    content: dict[str, Any] = {
        "summary": summary,
        "images": {sample["stem"]: row for sample, row in zip(samples, rows, strict=True)},
    }
    if site.volumes:
        cases = measure_volumes(predicted, masks, [site.case_of(row) for row in site.rows_of(SPLIT)], site.classes)
        content |= {"volumes": summarize(list(cases.values())), "cases": cases}
    write_json(out / SCORES, content)
    return {"scores": summary}
