"""The KL divergence between foreground and background features, for pFLFE's Table 5 (Xie et al., 2024).

Deviations: the paper gives no formula and names no direction. Ours is the closed form between Gaussians with diagonal
covariances, fitted to the two sets, as the mean of both directions. It is 0 where the sets are alike and grows with their
distance. The paper says that a smaller value "indicates the global feature of foreground and background are better
separated", so what it computed shrinks with the distance (it may be t-SNE's own objective, also a KL divergence): its numbers
and ours cannot be compared.
"""

import numpy as np

FLOOR = 1e-6  # smallest variance of a feature in a set, as a fraction of its variance over both sets


def divergence(foreground: np.ndarray, background: np.ndarray) -> float | None:
    """Returns ½ KL(F‖B) + ½ KL(B‖F) in nats, or None below 2 pixels. It is a sum over features, so compare equal widths only.

    foreground (n, width) and background (m, width). A feature that is equal at all pixels is left out. A feature that is
    constant in one set only, for which the divergence would be infinite, gets FLOOR times its variance over both sets.
    """
    if min(len(foreground), len(background)) < 2:
        return None
    sets = foreground.astype(np.float64), background.astype(np.float64)
    together = np.concatenate(sets).var(axis=0)
    varied = together > 0
    (f, f_var), (b, b_var) = ((s.mean(axis=0)[varied], np.maximum(s.var(axis=0), FLOOR * together)[varied]) for s in sets)
    return (gaussian_kl(f, f_var, b, b_var) + gaussian_kl(b, b_var, f, f_var)) / 2


def gaussian_kl(mean: np.ndarray, variance: np.ndarray, other_mean: np.ndarray, other_variance: np.ndarray) -> float:
    """Returns KL(N(mean, variance) ‖ N(other_mean, other_variance)), diagonal, (width,) each:

    ½ Σ [ln(σ'²/σ²) + (σ² + (μ − μ')²)/σ'² − 1], in nats.
    """
    ratio = (variance + (mean - other_mean) ** 2) / other_variance
    return float(0.5 * np.sum(np.log(other_variance / variance) + ratio - 1))
