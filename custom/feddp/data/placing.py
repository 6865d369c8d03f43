"""Where the images of a site lie while it trains: on its GPU if there is room.

From the CPU's memory one thread collates each batch, pins it and copies it: at 384 px a fast GPU waits for that.
"""

from typing import cast

import torch

from feddp.data.loading import Sample, to

SHARE = 8  # of a GPU's free memory, one part in so many may hold one list of samples; the rest is for training


def placed(samples: list[Sample], device: torch.device) -> list[Sample]:
    """Returns the samples with their tensors on `device`, if it is a GPU with room for them; else the samples as they are."""
    if device.type != "cuda":
        return samples
    free, _ = torch.cuda.mem_get_info(device)
    return within(free // SHARE, samples, device)


def within(room: int, samples: list[Sample], device: torch.device) -> list[Sample]:
    """Returns new samples with their tensors on `device` if those elsewhere have at most `room` bytes; else the given ones."""
    tensors = [value for sample in samples for value in sample.values() if isinstance(value, torch.Tensor)]
    if sum(value.nbytes for value in tensors if value.device.type != device.type) > room:
        return samples
    return [cast(Sample, to(sample, device)) for sample in samples]
