"""Where the images of a site lie while it trains: on its GPU if there is room, else in the CPU's memory.

From there one thread collates, pins and copies each batch. An H200 then trained 290 images of 384 px a second in batches of 32,
instead of 446, both without CUDA graphs (docs/results/gpu.md).
"""

from typing import cast

import torch

from feddp.data.loading import Sample, mapped

# a list of samples may take a sixteenth of a GPU's free memory: a site has three at most, and four sites leave 46 % of it free
SHARE = 16


def placed(samples: list[Sample], device: torch.device) -> list[Sample]:
    """Returns the samples with their tensors on `device`, if it is a GPU with room for them; else the samples as they are."""
    if device.type != "cuda":
        return samples
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # of what torch keeps for itself
    try:
        return within((free + unused) // SHARE, samples, device)
    except torch.OutOfMemoryError:  # another process was quicker
        torch.cuda.empty_cache()
        return samples


def within(room: int, samples: list[Sample], device: torch.device) -> list[Sample]:
    """Returns new samples with their tensors on `device` if those elsewhere have at most `room` bytes; else the given ones."""
    tensors = [value for sample in samples for value in sample.values() if isinstance(value, torch.Tensor)]
    if sum(value.nbytes for value in tensors if value.device.type != device.type) > room:
        return samples
    # not pinned first, as by `to`: this is done once, and torch would keep the pinned memory
    return [cast(Sample, mapped(sample, lambda value: value.to(device))) for sample in samples]
