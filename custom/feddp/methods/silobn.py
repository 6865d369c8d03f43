"""SiloBN (Andreux et al., 2020): batch normalisation's running statistics are private, its weights and biases are shared.

A site's running means, variances and counters of batches stay at the site; everything else is averaged. In training a batch is
normalised by its own statistics, so the shared tensors are trained as in FedAvg; the sites' networks differ in what they
predict with.

Deviations: a network without batch normalisation, such as the default one, is refused (`--network resnet18-fpn`). At an unseen
site, `feddp adapt` starts from the mean of the sites' statistics. The mean over sites is uniform (`aggregation=samples` weighs
by training samples). AdamW and the loss are this package's.
"""

from feddp.methods.base import Method
from feddp.partition import NORM_STATISTICS


class SiloBN(Method):
    private = (NORM_STATISTICS,)
