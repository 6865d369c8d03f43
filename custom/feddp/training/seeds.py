"""Seeds: every random draw depends on (seed, site, round), the purpose of the draw and, at a real site, the site's secret."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_of(*parts: int | str) -> int:
    """Returns a 63-bit seed from the parts, the same on every machine and in every Python (unlike `hash`)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Returns a generator of the CPU, seeded with `seed_of(*parts)`.

    torch 2.15 makes none before it has imported the module below, which a process of a run lacks (`feddp.lean`).
    """
    import torch._prims.rng_prims

    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def seeded(device: torch.device, *parts: int | str) -> Iterator[None]:
    """Seeds torch's generators of the CPU and of `device` with `seed_of(*parts)` for the block, then restores them.

    Other GPUs are not touched: they may not belong to this job.
    """
    import torch

    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed_of(*parts))
        for gpu in cuda:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed_of(*parts))
        yield
