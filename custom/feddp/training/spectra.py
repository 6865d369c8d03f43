"""Continuous frequency-space interpolation (FedDG; Liu et al., CVPR 2021, Eq. 2 and 3): functions on images.

An image's amplitude spectrum holds its style, its phase its anatomy. Of the amplitude only the centre is looked at: the
frequencies up to `radius` in both directions, the mean (frequency 0) in the middle.
"""

import torch
from torch import Tensor
from torch.fft import fft2, fftshift, ifft2, ifftshift

from feddp.training.store import Store

SLOT = "spectra"  # the file of what consenting peers gave
SHARE = 0.01  # of the image's shorter side, on either side of frequency 0 (the released code's L)


def radius(height: int, width: int) -> int:
    """b = floor(min(H, W) · SHARE), at least 1: the centre is of 2b+1 by 2b+1 frequencies."""
    return max(1, int(min(height, width) * SHARE))


def windows(images: Tensor) -> Tensor:
    """The centre of each image's amplitude spectrum: (B, C, H, W) -> (B, C, 2b+1, 2b+1).

    In torch's unnormalised transform: the middle is |H · W · mean|.
    """
    centre = _centre(fftshift(fft2(images), dim=(-2, -1)).abs(), radius(*images.shape[-2:]))
    return centre.contiguous()  # a strided view neither travels nor is written


def interpolated(images: Tensor, peers: Tensor, weights: Tensor) -> Tensor:
    """Images whose amplitude in the centre is (1−λ) their own + λ a peer's; phase and all else of the amplitude stay.

    Args:
        images: (B, C, H, W).
        peers: `windows` of as many images, (B, C, 2b+1, 2b+1).
        weights: λ of each, (B,), in [0, 1].
    """
    spectrum = fftshift(fft2(images), dim=(-2, -1))
    amplitude, share = spectrum.abs(), weights.view(-1, 1, 1, 1)
    centre = _centre(amplitude, peers.shape[-1] // 2)  # a view
    centre.lerp_(peers, share)
    result: Tensor = ifft2(ifftshift(torch.polar(amplitude, spectrum.angle()), dim=(-2, -1))).real
    return result


def in_another_style(images: Tensor, peers: Tensor) -> Tensor:
    """Each image (B, C, H, W) towards one of `peers` (M, C, 2b+1, 2b+1). Chance comes from torch's generator of the CPU."""
    chosen = torch.randint(len(peers), (len(images),))
    return interpolated(images, peers[chosen.to(peers.device)], torch.rand(len(images)).to(images))


def received(store: Store) -> Tensor | None:
    """All that the peers gave, (M, C, 2b+1, 2b+1), in the order of their names; None where nobody gave anything."""
    if not store.has(SLOT):
        return None
    peers, _ = store.read(SLOT)
    return torch.cat([peers[name] for name in sorted(peers)])


def _centre(spectrum: Tensor, b: int) -> Tensor:
    row, column = (side // 2 for side in spectrum.shape[-2:])  # where fftshift puts frequency 0
    return spectrum[..., row - b : row + b + 1, column - b : column + b + 1]
