"""Seeds: every random draw of a run comes from (seed, site, round) and what it is for; at a real site, from its secret too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from named parts, the same on every machine and Python (unlike `hash`)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(device: torch.device, *parts: int | str) -> Iterator[None]:
    """Torch's generators of the CPU and of `device` hold `seed_of(*parts)` inside the block and are as they were after it.

    Other GPUs are not touched: a site may not have been given them.
    """
    import torch

    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed_of(*parts))
        for gpu in cuda:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed_of(*parts))
        yield
