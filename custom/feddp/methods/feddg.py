"""FedDG's interpolation (Liu et al., CVPR 2021), compared in (Jiang et al., TMI 2023): FedAvg, images in other sites' styles.

Before the first round the consenting sites exchange the low-frequency centres of mean amplitude spectra, each over a group of
patients. In training each image keeps its phase, while that centre is interpolated with a peer's (Eq. 2, 3), λ ~ U(0, 1) per
sample. The loss is the mean over the batch and the interpolated batch. A site without consent, or without a peer, trains as
in FedAvg.

Deviations: the original's episodic meta-learning (interpolated images as meta-test) and its boundary contrast are left out;
only the interpolation is implemented, so tables say "FedDG interpolation". (Jiang et al., TMI 2023) compares with the whole
method. The window is ours: L = 1 % of the image's size, at least 1 pixel (the released training has L = 0, its demonstration
0.003), and the released training takes the peer's amplitude whole, without λ (dataloaders/fundus_dataloader.py, commit
0a281e4). The released code has the amplitudes of all images in one place, and takes one image's as the target. Here a target is
the mean over a group of at least `min_images` patients of a site (its policy; every patient weighs the same), rounded to three
digits: the amplitude of a single image says for sure that this image was trained on. Means vary less than images. Each site
gives at most `spectra` of them, none if it has too few patients, and a peer's is drawn among all of them. Spectra are of the
network's input. By default it has mean 0, so the mean brightness is not exchanged; with `normalise=scale` it is. The result is
not normalised again. Batch normalisation sees the batch and the interpolated batch one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.methods.base import SPECTRA, TRAIN, Round
from feddp.methods.fedavg import FedAvg
from feddp.training.settings import require_bounds, require_positive, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


@dataclass(frozen=True)
class FedDGSettings:
    spectra: int = setting(
        16, "FedDG: the largest number of mean spectra, each over a group of patients, that peers receive of a site", 10_000
    )

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "spectra")


class FedDG(FedAvg):
    label = "FedDG interpolation"
    stages = (SPECTRA, TRAIN)
    changed = 1  # until 2026-11-28 the targets were spectra of single images
    Hyper = FedDGSettings
    hyper: FedDGSettings

    def round(self, site: Round) -> float:
        import torch

        from feddp.training.spectra import in_another_style, received

        peers = received(site.store)
        if peers is None:
            return super().round(site)
        peers = peers.to(site.device)

        def both(images: Tensor) -> Tensor:
            return torch.stack([site.network(images), site.network(in_another_style(images, peers))])

        def mean(logits: Tensor, batch: Batch) -> Tensor:
            own, interpolated = (self.loss(site, part, batch) for part in logits)
            return (own + interpolated) / 2

        return site.fit(epochs=site.plan.training.local_epochs, loss=mean, forward=both)
