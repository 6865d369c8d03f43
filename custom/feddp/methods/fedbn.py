"""FedBN (Li et al., ICLR 2021), as in (Jiang et al., TMI 2023): every normalisation layer's tensors are private.

Weights, biases and, for batch normalisation, running statistics and their counters stay at the site.

Deviations: the paper has batch normalisation only; here PVTv2's layer normalisations and FPN's group normalisations are private
too. A network without any normalisation is refused.
"""

from feddp.methods.base import Method
from feddp.partition import NORM


class FedBN(Method):
    private = (NORM,)
