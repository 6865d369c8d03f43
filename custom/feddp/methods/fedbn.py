"""FedBN (Li et al., ICLR 2021), in 004's tables: every normalisation layer's tensors are private.

Weights, biases and, for batch normalisation, running statistics and their counters: all stay.

Deviations: the paper has batch normalisation alone; PVTv2's layer normalisations and FPN's group normalisations count too.
A network without any normalisation is refused.
"""

from feddp.methods.base import Method
from feddp.partition import NORM


class FedBN(Method):
    private = (NORM,)
