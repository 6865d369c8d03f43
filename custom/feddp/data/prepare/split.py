"""Splits patients into train, val and test by seed, once or for every fold of a cross-validation."""

from collections.abc import Iterable

import numpy as np


def split_patients(patients: Iterable[str], seed: int) -> dict[str, str]:
    """Returns the split of every distinct patient: a fifth (rounded) to val, a fifth to test, the others to train.

    With three or more patients no split is empty. One patient goes to train, two go to train and test. The result depends only
    on the set of patients and the seed, not on order or repetition.
    """
    order = _shuffled(patients, seed)
    if len(order) < 3:
        return dict(zip(order, ("train", "test"), strict=False))
    part = max(1, round(len(order) / 5))
    words = ["val"] * part + ["test"] * part + ["train"] * (len(order) - 2 * part)
    return dict(zip(order, words, strict=True))


def hold_out(patients: Iterable[str], seed: int) -> dict[str, str]:
    """Returns splits train and val, for data with published test patients: a fifth, at least one of two or more, to val."""
    order = _shuffled(patients, seed)
    part = max(1, round(len(order) / 5)) if len(order) > 1 else 0
    return {name: "val" if i < part else "train" for i, name in enumerate(order)}


def deal_patients(patients: Iterable[str], folds: int, seed: int) -> list[dict[str, str]]:
    """Returns the split of every distinct patient per fold: the fold's patients are test, `hold_out` splits the others.

    Every patient is in test exactly once; the folds' sizes differ by at most one patient. Returns [] if there are fewer
    patients than folds, or if a fold would leave fewer than two patients for training and validation.
    """
    order = _shuffled(patients, seed)
    dealt = [order[i::folds] for i in range(folds)]
    if len(order) < folds or len(order) - len(dealt[0]) < 2:
        return []
    return [dict.fromkeys(part, "test") | hold_out(set(order) - set(part), seed) for part in dealt]


def _shuffled(patients: Iterable[str], seed: int) -> list[str]:
    names = sorted(set(patients))
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
