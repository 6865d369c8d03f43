"""FedRoD (Chen & Chao, ICLR 2022): a generic head trained on a balanced risk, a private head on the plain risk above it.

Encoder, decoder and the generic head are shared, and trained on the balanced risk, so that all sites optimise the same
objective whatever their shares of the classes. Each site's personal head takes the decoder's features without a gradient; its
logits are added to the generic ones, also without a gradient, and the sum is trained on the site's plain risk (L_seg). The sum
is the prediction. The layers are `feddp.networks.decoupled`. The setting `private` replaces the rule: without `personal_head`
in it (`private=none`, `private=query`) the personal heads are averaged like everything else.

Deviations: the paper classifies images, and its balanced risks weigh or shift the classes by their frequencies at the client.
Here every class is a binary problem over pixels: the balanced risk is the cross-entropy whose foreground pixels weigh 1/(2f)
and background pixels 1/(2(1−f)), where f is the share of foreground in the site's training masks. It has no Dice term. Both
heads are trained in one step with one optimiser, which is the same because no gradient is common to them. The personal head
starts at 0 (ours), so that the first prediction is the generic one; it is the paper's linear one, not a hypernetwork's.
IGC after FedRoD changes only the personal head through L_aux. Only the paper's abstract could be read, and re-implementations
by others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feddp.methods.base import AtSite, Method, RunPlan
from feddp.partition import PERSONAL_HEAD

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


class FedRoD(Method):
    private = (PERSONAL_HEAD,)

    def __init__(self, hyper: Any):
        super().__init__(hyper)
        self._foreground: Tensor | None = None  # the share of each class in this site's masks, (C,), on its device

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        return {"personal_head": {}}

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        import torch

        from feddp.data.loading import moved
        from feddp.networks.decoupled import DecoupledHeads
        from feddp.training.losses import balanced_cross_entropy

        network = site.network
        if not isinstance(network, DecoupledHeads) or network.generic is None:
            raise TypeError(f"site {site.name}: the loss needs both heads of a forward pass; call the network first")
        if self._foreground is None:
            shares = torch.stack([sample["mask"].float().mean(dim=(1, 2)) for sample in site.samples]).mean(dim=0)
            self._foreground = moved(shares, logits.device)
        generic = balanced_cross_entropy(network.generic.float(), batch["mask"], self._foreground)
        return generic + site.segmentation_loss(logits, batch["mask"])
