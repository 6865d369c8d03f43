"""FedPer (Arivazhagan et al., 2019): the segmentation head is private, and trained together with the shared body.

Deviations: none of note; the paper's personal layers are a classifier's last ones, here the segmentation head.
"""

from feddp.methods.base import Method
from feddp.partition import HEAD


class FedPer(Method):
    private = (HEAD,)
