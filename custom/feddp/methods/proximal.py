"""The proximal loss of Ditto, FedProx and pFedMe: the distance to another network beside the method's own loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from feddp.methods.base import Method, Round

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch
    from feddp.training.loop import BatchLoss


def near(method: Method, site: Round, weight: float, anchor: Mapping[str, Tensor]) -> BatchLoss:
    """Returns the loss L(v) + (weight/2) ‖v − anchor‖² over the parameters v of the site's network.

    Args:
        anchor: the parameters on the site's device (`site.parameters`); read at every batch, so the method may move them.
    """
    from feddp.training.losses import squared_distance

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return method.loss(site, logits, batch) + weight / 2 * squared_distance(site.network, anchor)

    return loss
