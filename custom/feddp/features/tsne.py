"""t-SNE of pixel features (Xie et al., 2024, Fig. 1; Liu et al., 2024, Fig. 8 a, b), by scikit-learn."""

import numpy as np
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from feddp.errors import InputError

PERPLEXITY = 30.0  # scikit-learn's default; less where there are few pixels


def embed(features: np.ndarray, seed: int) -> np.ndarray:
    """(n, width) -> (n, 2), the same bits for the same seed on one machine. InputError below 3 pixels.

    It uses one thread: several would sum in any order, and t-SNE magnifies differences in the last bits.
    """
    if len(features) < 3:
        raise InputError(f"{len(features)} pixels are too few for a t-SNE; raise --pixels, or name more sites")
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(1):
        points: np.ndarray = TSNE(perplexity=perplexity, init="pca", random_state=seed % 2**32).fit_transform(features)
    return points
