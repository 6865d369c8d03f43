"""Centralized: one network, all images in one place (002, Tables 1-3), the upper bound. It is no federation.

`feddp run` trains it in one process, outside FLARE, and says so; no job can carry it to hospitals.

Deviations: none of the paper's own numbers is stated; a round is `local_epochs` epochs over all sites' images, so that its
curve compares with the others'. Batches mix the sites; the best round is by the mean over all validation images.
"""

from feddp.methods.base import Method
from feddp.partition import ALL


class Centralized(Method):
    private = (ALL,)
    federated = False
