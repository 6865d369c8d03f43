"""LG-FedAvg (Liang et al., 2020), as in (Xie et al., 2024): the encoder is private, decoder and head are shared.

The reverse of FedPer: local representations, a global model on top of them.

Deviations: the paper's auxiliary losses on the representation are left out, as in the comparison of (Xie et al., 2024).
"""

from feddp.methods.base import Method
from feddp.partition import ENCODER


class LGFedAvg(Method):
    private = (ENCODER,)
