"""Conformal risk control: a threshold under which the expected false-negative rate is at most alpha, whatever the network.

Angelopoulos, Bates, Fisch, Lei, Schuster: Conformal Risk Control, ICLR 2024 (2022 as a preprint), Eq. 4 and Theorem 1: with n
exchangeable losses L_i(λ), not increasing in λ and at most B = 1,

    λ̂ = inf { λ : n/(n+1) · R̂(λ) + B/(n+1) ≤ α },  R̂(λ) = 1/n Σ L_i(λ)      gives  E[L_{n+1}(λ̂)] ≤ α.

Here λ = 1 − t: a pixel is foreground if its probability is at least t. L is the share of a patient's foreground pixels below t:
per image and class, then the mean over the patient's. Patients are exchangeable where their slices are not.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from feddp.errors import InputError


def risk(patients: Sequence[Sequence[np.ndarray]], threshold: float) -> float:
    """Returns R̂ at t: the mean over patients of the mean false-negative rate over their sorted arrays."""
    rates = [np.mean([np.searchsorted(values, threshold, "left") / len(values) for values in own]) for own in patients]
    return float(np.mean(rates))


def largest_threshold(found: Mapping[str, Sequence[np.ndarray]], alpha: float) -> float:
    """Returns the largest t with n/(n+1) · R̂(t) + 1/(n+1) ≤ alpha, and with it λ̂ = 1 − t, exactly.

    R̂ changes only just above a foreground pixel's probability, so t is one of these.

    Args:
        found: {patient: the probabilities of the true foreground pixels of each image and class, none of them empty}.
        alpha: in (0, 1).

    Raises:
        InputError: alpha is out of range, or there are fewer than 1/alpha − 1 patients: no threshold has the guarantee.
    """
    if not 0 < alpha < 1:
        raise InputError(f"alpha={alpha} must be between 0 and 1; correct it")
    patients = [[np.sort(values, axis=None) for values in own] for own in found.values() if own]
    n = len(patients)
    if 1 / (n + 1) > alpha:
        raise InputError(
            f"{n} validation patients with a mask allow alpha={1 / (n + 1):.3g} at least, not {alpha:g}; raise alpha, or add"
            " patients to split val"
        )
    values = np.unique(np.concatenate([values for own in patients for values in own]))
    low, high = 0, len(values)  # values[low] meets the bound, since nothing is below it; values[high] does not, or is beyond
    while high - low > 1:
        middle = (low + high) // 2
        meets = n / (n + 1) * risk(patients, values[middle]) + 1 / (n + 1) <= alpha
        low, high = (middle, high) if meets else (low, middle)
    return float(values[low])
