"""FedAvg (McMahan et al., 2017), as in (Wang et al., TMI 2024, Eq. 1): everything is shared and averaged.

Deviations: the mean over sites is uniform, as in all four papers; `aggregation=samples` weighs by training samples. The
paper's optimiser is SGD, which remembers nothing. Here, and in every method of this package, a site's AdamW keeps its moments
from round to round, although the mean replaces the shared tensors; so does Adam in the released code of FedDP and FedLC. A
local stage begins with a new one.
"""

from feddp.methods.base import Method


class FedAvg(Method):
    pass
