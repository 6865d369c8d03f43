"""Seeds: every random draw of a run comes from (seed, site, round) and what it is for."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from named parts, the same on every machine and Python (unlike `hash`)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Torch's global generators hold `seed_of(*parts)` inside the block and are as they were after it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(*parts))
        yield
