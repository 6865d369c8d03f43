"""Centralized: one network, all images in one place (Xie et al., 2024, Tables 1 to 3): the upper bound, not a federation.

`feddp run` trains it in one process, outside FLARE, and says so; no job can carry it to hospitals.

Deviations: the paper states none of its settings; a round is `local_epochs` epochs over all sites' images, so that its curve
compares with the others'. Batches mix the sites; the best round is selected by the mean over all validation images.
"""

from feddp.methods.base import Method
from feddp.partition import ALL


class Centralized(Method):
    private = (ALL,)
    federated = False
