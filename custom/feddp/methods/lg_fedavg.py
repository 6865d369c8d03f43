"""LG-FedAvg (Liang et al., 2020), in 002's tables: the encoder is private, decoder and head are shared.

The reverse of FedPer: local representations, a global model on top of them.

Deviations: the paper's auxiliary losses on the representation are left out, as in 002's comparison.
"""

from feddp.methods.base import Method
from feddp.partition import ENCODER


class LGFedAvg(Method):
    private = (ENCODER,)
