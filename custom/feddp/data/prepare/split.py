"""Patients -> train, val and test, by seed; once, or for every fold of a cross-validation."""

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


def deal_patients(patients: Iterable[str], folds: int, seed: int) -> list[dict[str, str]]:
    """Every distinct patient's split in each of `folds` folds: dealt one by one, a fold's are test, of the rest `hold_out`.

    Every patient is in test exactly once, and folds differ by at most one patient. None where there are fewer patients than
    folds, or where a fold would leave fewer than two to train and validate.
    """
    order = _shuffled(patients, seed)
    dealt = [order[i::folds] for i in range(folds)]
    if len(order) < folds or len(order) - len(dealt[0]) < 2:
        return []
    return [dict.fromkeys(part, "test") | hold_out(set(order) - set(part), seed) for part in dealt]


def _shuffled(patients: Iterable[str], seed: int) -> list[str]:
    names = sorted(set(patients))
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
