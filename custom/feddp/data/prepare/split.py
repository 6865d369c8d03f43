"""Patients -> train, val and test, by seed."""

from collections.abc import Iterable

import numpy as np


def split_patients(patients: Iterable[str], seed: int) -> dict[str, str]:
    """Every distinct patient's split: a fifth each to val and test, rounded, the rest to train.

    From three patients on no split is empty. One patient goes to train, two to train and test. The same set of patients
    and seed give the same answer in whatever order, and however often, the patients come.
    """
    order = _shuffled(patients, seed)
    if len(order) < 3:
        return dict(zip(order, ("train", "test"), strict=False))
    part = max(1, round(len(order) / 5))
    words = ["val"] * part + ["test"] * part + ["train"] * (len(order) - 2 * part)
    return dict(zip(order, words, strict=True))


def hold_out(patients: Iterable[str], seed: int) -> dict[str, str]:
    """Train and val only, where the test patients are published: a fifth, and at least one of two or more, to val."""
    order = _shuffled(patients, seed)
    part = max(1, round(len(order) / 5)) if len(order) > 1 else 0
    return {name: "val" if i < part else "train" for i, name in enumerate(order)}


def _shuffled(patients: Iterable[str], seed: int) -> list[str]:
    names = sorted(set(patients))
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
