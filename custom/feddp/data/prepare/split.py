"""Splits patients into train, val and test by seed, once or for every fold of a cross-validation.

The splits of the papers, by name (`SPLITTINGS`): 70/10/20 is that of (Liu et al., 2024); 64/16/20 that of (Jiang et al., TMI
2023), 20 % for testing and 80/20 of the rest; 1:1 that of (Xie et al., 2024), without validation images. `published` has the
numbers of training images of (Wang et al., TMI 2024); the others are test images. Which images these are is known of Drishti
(`fundus`), ColonDB and ETIS (`endopolyp`); elsewhere the seed chooses them, because the released code takes them from the
folders of downloads. Of `prostate` it has the cases of (Jiang et al., TMI 2023).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from feddp.data.description import SPLITS
from feddp.errors import InputError

# val and test in per cent of the patients; the others are train
SHARES: Mapping[str, tuple[int, int]] = {"60/20/20": (20, 20), "1:1": (0, 50), "70/10/20": (10, 20), "64/16/20": (16, 20)}
PUBLISHED = "published"
SPLITTINGS = (*SHARES, PUBLISHED)


@dataclass(frozen=True)
class Published:
    """A site's published numbers of images."""

    training: int
    images: int


def needed(splitting: Any) -> tuple[str, ...]:
    """Returns the splits that must hold a patient; of a splitting of the papers without validation images, not val.

    Args:
        splitting: what dataset.json says of the split, or None.
    """
    without = [PUBLISHED, *(name for name, (val, _) in SHARES.items() if not val)]
    return tuple(name for name in SPLITS if name != "val" or splitting not in without)


def split_site(
    site: str, images: Iterable[str], seed: int, splitting: str | None, published: Published | None = None
) -> dict[str, str]:
    """Returns the split of every distinct patient of a site.

    Args:
        images: the patient of every image.
        splitting: one of SPLITTINGS, or None for `split_patients`.
        published: the numbers for `published`, if the data set has any.

    Raises:
        InputError: there is no such splitting, or this site cannot have it; names the remedy.
    """
    counts = Counter(list(images))  # of the keys, where it is a mapping
    if splitting is None:
        return split_patients(counts, seed)
    if splitting == PUBLISHED:
        return _as_published(site, counts, seed, published)
    require_splitting(splitting)
    parts = 1 + sum(share > 0 for share in SHARES[splitting])
    if len(counts) < parts:
        raise InputError(
            f"{site} has {len(counts)} patients, too few for --split {splitting}. Use the whole data set, or leave --split out."
        )
    return _divided(_shuffled(counts, seed), SHARES[splitting])


def splitting_of(seed: int, splitting: str | None) -> dict[str, str | int]:
    """Returns the metadata of dataset.json about the split."""
    return {"split_seed": seed} | ({} if splitting is None else {"split": splitting})


def require_splitting(splitting: str | None) -> None:
    """Raises InputError if there is no such splitting; None is the default one."""
    if splitting is not None and splitting not in SPLITTINGS:
        raise InputError(f"--split {splitting}: not a known split. Use one of {', '.join(SPLITTINGS)}, or leave it out.")


def split_patients(patients: Iterable[str], seed: int) -> dict[str, str]:
    """Returns the split of every distinct patient: a fifth (rounded) to val, a fifth to test, the others to train.

    With three or more patients no split is empty. One patient goes to train, two go to train and test. The result depends only
    on the set of patients and the seed, not on order or repetition.
    """
    order = _shuffled(patients, seed)
    if len(order) < 3:
        return dict(zip(order, ("train", "test"), strict=False))
    return _divided(order, SHARES["60/20/20"])


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


def _divided(order: list[str], shares: tuple[int, int]) -> dict[str, str]:
    """Deals val and test, at least one patient to each that has a share, from the front; the others are train."""
    val, test = (max(1, round(len(order) * share / 100)) if share else 0 for share in shares)
    words = ["val"] * val + ["test"] * test + ["train"] * (len(order) - val - test)
    return dict(zip(order, words, strict=True))


def _as_published(site: str, counts: Counter[str], seed: int, published: Published | None) -> dict[str, str]:
    """Whole patients to train, whose images together are the published number; the others to test."""
    shares = ", ".join(SHARES)
    if published is None:
        raise InputError(f"{site}: no numbers of training images are published for this data set. Use --split {shares}.")
    images = counts.total()
    if images != published.images:
        raise InputError(
            f"{site} has {images} images, but --split {PUBLISHED} divides {published.images}. "
            f"Give the whole data set, or use --split {shares}."
        )
    chosen = _adding_up(_shuffled(counts, seed), counts, published.training)
    if chosen is None:
        raise InputError(
            f"{site}: no set of whole patients has the published {published.training} training images. Use --split {shares}, or"
            " remove the table of patients: every image is then a patient of its own."
        )
    return {patient: "train" if patient in chosen else "test" for patient in counts}


def _adding_up(order: list[str], counts: Counter[str], wanted: int) -> set[str] | None:
    """Returns patients with `wanted` images in all, the first in `order` that add up to it, or None."""
    reached: dict[int, tuple[str, ...]] = {0: ()}
    for patient in order:
        for total, patients in list(reached.items()):
            if (more := total + counts[patient]) <= wanted:
                reached.setdefault(more, (*patients, patient))
        if wanted in reached:
            return set(reached[wanted])
    return None


def _shuffled(patients: Iterable[str], seed: int) -> list[str]:
    import numpy as np  # imported here: the command line reads the names of the splits

    names = sorted(set(patients))
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
