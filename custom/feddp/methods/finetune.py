"""FineTune (Wang et al., TMI 2024, Table I): FedAvg, then local epochs at each site at a reduced rate.

Deviations: 20 epochs at 1e-4 (`tune_epochs`, `tune_lr`), ours: the same as for IGC's control, so that the two compare.
"""

from feddp.methods.base import TRAIN, TUNE
from feddp.methods.fedavg import FedAvg


class FineTune(FedAvg):
    stages = (TRAIN, TUNE)
