"""A network's features of pixels, and a seeded sample of them for every class.

There are two layers. DECODER: the input of the segmentation head, which (Liu et al., 2024, Fig. 8 a, b) and
(Xie et al., 2024, Fig. 1) show.
ENCODER: the deepest of the decoder's inputs, which pFLFE's enhancement trains; Table 5's "global feature" may mean it.
A pixel is a pixel of the layer's map; its class is the mask's at its centre.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.data.loading import Sample, class_index
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.training.loop import predict

DECODER, ENCODER = "decoder", "encoder"
LAYERS = (DECODER, ENCODER)
_BATCH = 8

Drawn = tuple[np.ndarray, np.ndarray]  # of n pixels, the draws (n,) and the features (n, width)


@dataclass(frozen=True)
class Pixels:
    """Features float32 (n, width), and each pixel's class int64 (n,), 0 the background."""

    features: np.ndarray
    classes: np.ndarray


def sample_pixels(
    network: nn.Module, samples: Sequence[Sample], labels: str, layer: str, per_class: int, seed: int, what: str
) -> Pixels:
    """Draws up to `per_class` pixels of every class uniformly from all images of `samples`, without replacement.

    Every pixel draws a number, and the pixels of a class with the smallest numbers are kept, so that the maps of one batch at
    most are in memory. The draws depend on the seed only: for two networks with maps of one size, the same pixels are drawn.

    Args:
        samples: as `feddp.data.loading.load` gives them.
        labels: "nested" or "exclusive".
        what: the progress bar's text.
    """
    rng = np.random.default_rng(seed)
    kept: dict[int, Drawn] = {}
    with tapped(network, layer) as taken:
        passes = predict(network, samples, _BATCH)
        for _, batch in track(passes, what, math.ceil(len(samples) / _BATCH)):
            maps = taken.pop()
            classes = at_size(class_index(batch["mask"].cpu(), labels), (maps.shape[-2], maps.shape[-1])).flatten().numpy()
            vectors, draws = maps.permute(0, 2, 3, 1).flatten(0, 2), rng.random(len(classes))
            for label in np.unique(classes).tolist():
                own = np.flatnonzero(classes == label)
                own = own[np.argsort(draws[own])[:per_class]]
                found = draws[own], vectors[own].float().cpu().numpy()
                kept[label] = _smallest(kept.get(label), found, per_class)
    order = sorted(kept)
    features = np.concatenate([kept[label][1] for label in order])
    return Pixels(features, np.concatenate([np.full(len(kept[label][0]), label) for label in order]))


@contextmanager
def tapped(network: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Yields a list to which every forward pass of `network` appends the layer's map (B, width, h, w).

    Raises:
        InputError: there is no layer of this name, or the network does not have it.
    """
    if layer not in LAYERS:
        raise InputError(f"--layer {layer}: there are {', '.join(LAYERS)}")
    name = "segmentation_head" if layer == DECODER else "decoder"
    module = getattr(network, name, None)
    if not isinstance(module, nn.Module):
        raise InputError(f"{type(network).__name__} has no {name}, before which features are taken; choose another run")
    taken: list[Tensor] = []
    # the decoder's input is one list of the encoder's maps, from high to low resolution
    hook = module.register_forward_pre_hook(
        lambda _, inputs: taken.append((inputs[0] if layer == DECODER else inputs[0][-1]).detach())
    )
    try:
        yield taken
    finally:
        hook.remove()


def at_size(classes: Tensor, size: tuple[int, int]) -> Tensor:
    """Classes int64 (B, H, W) at the centres of a map's pixels: (B, *size)."""
    return F.interpolate(classes[:, None].float(), size, mode="nearest-exact")[:, 0].long()


def _smallest(before: Drawn | None, found: Drawn, count: int) -> Drawn:
    """The `count` pixels with the smallest draws, in the draws' order."""
    draws, features = found if before is None else (np.concatenate(pair) for pair in zip(before, found, strict=True))
    first = np.argsort(draws)[:count]
    return draws[first], features[first]
