"""Continuous frequency-space interpolation (FedDG; Liu et al., CVPR 2021, Eq. 2 and 3): functions on images.

The amplitude spectrum of an image carries its style, the phase spectrum its anatomy. Only the centre of the amplitude is used:
the frequencies up to `radius` in both directions, with the mean (frequency 0) in the middle.
"""

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor
from torch.fft import fft2, fftshift, ifft2, ifftshift

from feddp.data.loading import Sample, moved
from feddp.training.store import Store

SLOT = "spectra"  # the file with the spectra of consenting peers
FEWEST = 2  # patients of a group, whatever a site's policy allows
DIGITS = 3  # significant digits of a mean, as of losses that leave; float32's seven would tell any two candidate groups apart
SHARE = 0.01  # of the image's shorter side, on each side of frequency 0 (L; ours: the released training has 0)


def radius(height: int, width: int) -> int:
    """Returns b = floor(min(H, W) · SHARE), at least 1; the centre has 2b+1 by 2b+1 frequencies."""
    return max(1, int(min(height, width) * SHARE))


def windows(images: Tensor) -> Tensor:
    """Returns the centre of each image's amplitude spectrum: (B, C, H, W) -> (B, C, 2b+1, 2b+1).

    Torch's transform is not normalised: the middle is |H · W · mean|.
    """
    centre = _centre(fftshift(fft2(images), dim=(-2, -1)).abs(), radius(*images.shape[-2:]))
    return centre.contiguous()  # a strided view can neither be sent nor be saved


def of_patients(samples: Iterable[Sample]) -> Tensor:
    """Returns the mean of `windows` over each patient's images, (patients, C, 2b+1, 2b+1), in the order of their first images.

    An image that is there twice, under whatever names, counts once, for the first patient that has it.
    """
    own: dict[str, list[Tensor]] = {}
    seen: set[bytes] = set()
    for sample in samples:
        image = sample["image"].cpu()
        digest = sha256(image.contiguous().numpy().tobytes()).digest()
        if digest not in seen:
            seen.add(digest)
            own.setdefault(sample["patient"], []).append(windows(image[None])[0])
    return torch.stack([torch.stack(given).mean(dim=0) for given in own.values()])


def group_means(patients: Tensor, least: int, order: list[int]) -> Tensor:
    """Returns the mean over each group of patients, (groups, C, 2b+1, 2b+1), rounded to DIGITS; no group of too few patients.

    Groups are disjoint and as many as there can be. Every patient weighs the same in its group, so its share is 1/n of n.

    Args:
        patients: `of_patients`.
        least: the fewest patients of a group; below FEWEST it counts as FEWEST.
        order: the patients' indices in the order in which they are dealt to the groups.
    """
    count = len(patients) // max(least, FEWEST)
    means = [patients[order[at::count]].mean(dim=0) for at in range(count)]
    if not means:
        return patients[:0]
    found = torch.stack(means)
    return torch.tensor([float(f"{value:.{DIGITS}g}") for value in found.flatten().tolist()]).view_as(found)


def interpolated(images: Tensor, peers: Tensor, weights: Tensor) -> Tensor:
    """Returns the images with (1−λ) own + λ peer's amplitude in the centre; phase and the other amplitudes do not change.

    Args:
        images: (B, C, H, W).
        peers: an amplitude for each image, (B, C, 2b+1, 2b+1), laid out as `windows`.
        weights: λ of each image, (B,), in [0, 1].
    """
    spectrum = fftshift(fft2(images), dim=(-2, -1))
    amplitude, share = spectrum.abs(), weights.view(-1, 1, 1, 1)
    centre = _centre(amplitude, peers.shape[-1] // 2)  # a view
    centre.lerp_(peers, share)
    result: Tensor = ifft2(ifftshift(torch.polar(amplitude, spectrum.angle()), dim=(-2, -1))).real
    return result


def in_another_style(images: Tensor, peers: Tensor) -> Tensor:
    """Moves each image (B, C, H, W) towards the style of one of `peers` (M, C, 2b+1, 2b+1), drawn by torch's CPU generator."""
    chosen = moved(torch.randint(len(peers), (len(images),)), peers.device)
    return interpolated(images, peers[chosen], moved(torch.rand(len(images)), images.device).to(images.dtype))


def received(store: Store) -> Tensor | None:
    """Returns the mean spectra of all peers, (M, C, 2b+1, 2b+1), in the order of their names; None if there are none."""
    if not store.has(SLOT):
        return None
    peers, _ = store.read(SLOT)
    return torch.cat([peers[name] for name in sorted(peers)])


def _centre(spectrum: Tensor, b: int) -> Tensor:
    row, column = (side // 2 for side in spectrum.shape[-2:])  # fftshift puts frequency 0 here
    return spectrum[..., row - b : row + b + 1, column - b : column + b + 1]
