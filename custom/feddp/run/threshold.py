"""`feddp calibrate-threshold`: a threshold for one network at one site, with a bound on what its masks miss."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddp.data.folder import SiteFolder, metadata_of, misfit
from feddp.data.loading import class_maps
from feddp.data.pixels import read_image, read_mask, same_size
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.export.graph import Graph
from feddp.files import write_json, writing
from feddp.networks.metadata import TEST
from feddp.networks.weights import fingerprint, read_network
from feddp.reading import read_own, real
from feddp.run.conformal import largest_threshold, risk
from feddp.terminal import note
from feddp.training.device import asked_for
from feddp.training.metrics import THRESHOLD, require_finite

FORMAT = "feddp-threshold/1"
SPLIT = "val"


def calibrate(network: Path, data: Path, alpha: float, out: Path, device: str = "cpu") -> dict[str, Any]:
    """Writes the threshold of `feddp.run.conformal` to the JSON file `out`, and returns the file's content.

    It uses the validation images of the site's folder `data`, in their own size, that have a mask. The threshold is never above
    0.5: a lower one misses less, so the bound holds, and no pixel is lost that the network finds likely.

    A warning says where the network's run trained on validation images: whether those of `data` are others, nobody can tell.

    Raises:
        InputError: the data do not fit the network or are too few, `alpha` is out of range, the labels are exclusive ones of
            several classes, or `out` exists.
        StorageError: there is no space for `out`, or its folder cannot be written to.
    """
    if out.is_dir():
        raise InputError(f"{out} is a folder; name a file, such as {out / 'threshold.json'}")
    if out.exists():
        raise InputError(f"{out} exists; remove it, or name another file")
    if files := [parent for parent in out.parents if parent.exists() and not parent.is_dir()]:
        raise InputError(f"{files[0]} is a file; name a file in a folder with --out")
    graph, metadata = Graph.of(network)
    folder, where = SiteFolder.open(data), asked_for(device)
    if wrong := misfit(folder, metadata_of(metadata)):
        raise InputError(f"{data} has {wrong[0]}, but the network {network} {wrong[1]}; name the network's site")
    if metadata.labels != "nested" and len(metadata.classes) > 1:
        raise InputError(f"{network}: a pixel has one of its {len(metadata.classes)} exclusive classes, which no bound covers")
    if metadata.selection == TEST:
        note(
            f"warning: the run of {network} trained on the split {SPLIT} too (selection=test), and no bound holds for images"
            f" that a network was trained on. Unless the patients under {SPLIT} in {data} are others, which the run has not"
            f" seen, name a folder whose split.csv has such patients as {SPLIT}"
        )
    with writing(out):  # not after all predictions
        out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[np.ndarray]] = {}
    for row in track(folder.rows_of(SPLIT), f"Predicting {SPLIT}"):
        file, mask_file = folder.image_path(row.image), folder.mask_path(row.image)
        image = read_image(file, folder.channels, folder.path)
        mask = read_mask(mask_file, len(folder.classes), folder.path)
        same_size(file, image, mask)
        own = inside(probabilities(graph.to(where), image))
        truth = class_maps(torch.from_numpy(np.array(mask)), len(folder.classes), folder.labels).bool()
        found.setdefault(row.patient, []).extend(
            map_[true].numpy() for map_, true in zip(own, truth, strict=True) if true.any()
        )
    patients = [own for own in found.values() if own]
    exact = min(largest_threshold(found, alpha), THRESHOLD)
    content = {
        "format": FORMAT,
        # `feddp predict` takes what is above the threshold, and the bound is for what is at least as large
        "threshold": float(np.nextafter(np.float32(exact), np.float32(-1))),
        "alpha": alpha,
        "patients": len(patients),
        "false_negative_rate": risk([[np.sort(values) for values in own] for own in patients], exact),
        "network": fingerprint(read_network(network)[0]),
    }
    write_json(out, content)
    return content


def read_threshold(file: Path, network: Path) -> float:
    """Returns the threshold in a file of `calibrate`; raises InputError if the file is damaged or of another network."""
    try:
        content = read_own(real(file), InputError, "calibrate again")
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; `feddp calibrate-threshold` writes it") from None
    value = content.get("threshold")
    if content.get("format") != FORMAT or not isinstance(value, float) or not -1 <= value <= 1:
        raise InputError(f"{file} holds no threshold; name a file of `feddp calibrate-threshold`")
    if content.get("network") != fingerprint(read_network(network)[0]):
        raise InputError(f"{file} was calibrated for another network than {network}; calibrate again")
    return value


def probabilities(graph: Graph, image: np.ndarray) -> torch.Tensor:
    """Returns the probabilities of an image (H, W, channels) or (H, W) on the CPU: float32 (C, H, W).

    Raises:
        InputError: one is not finite.
    """
    pixels = torch.from_numpy(np.atleast_3d(image).astype(np.float32)).permute(2, 0, 1)[None]
    with torch.no_grad():
        return require_finite(graph.probabilities(pixels.to(next(graph.parameters()).device))[0].cpu())


def inside(maps: torch.Tensor) -> torch.Tensor:
    """Returns nested probabilities (C, H, W) at most those of the classes around them, as masks are decoded (`label_mask`)."""
    return maps.cummin(dim=0).values
