"""FedAvg (McMahan et al., 2017), as in (Wang et al., TMI 2024, Eq. 1): everything is shared and averaged.

Deviations: the mean over sites is uniform, as in all four papers; `aggregation=samples` weighs by training samples.
"""

from feddp.methods.base import Method


class FedAvg(Method):
    pass
