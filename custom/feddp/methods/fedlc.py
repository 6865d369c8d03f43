"""FedLC (LC-Fed; Wang et al., ECCV 2022), as in (Wang et al., TMI 2024): private heads, channel selection, head calibration.

Stage 1: the segmentation head is private. Personalized channel selection (PCS) gates the deepest encoder features by pooled
features and a one-hot embedding of the site. L = L_seg + 0.1 · −(1/(K−1)) Σ_{j≠k} MSE(h_k, h_j) pushes the sites' gates apart.
Stage 2, head calibration (HC): at every epoch all sites' heads are exchanged (Wang et al., TMI 2024, Table V). The standard
deviation and the mean of their predictions, each smoothed by a 31 × 31 Gaussian, gate the decoder's features of a new 3 × 3
head. The layers are `feddp.networks.local_calibration`; they stay in the inference path.

Deviations: in the released code HC is a separate script on a trained network; here it is a stage of the run, and the heads are
exchanged at every epoch, as (Wang et al., TMI 2024) counts them. In this stage the segmentation head and HC's own new head are
trained for `heads_epochs` at `heads_lr`, 1e-3, because HC's head is new ((Wang et al., TMI 2024) states 1e-4: `heads_lr=1e-4`).
The body is frozen, because the peers' heads were trained on the shared body; it is in training mode: it normalises by each
batch's own statistics without recording them, and its dropout acts. HC belongs to the network, so the best of its epochs is
kept, even if it is worse than the start. The mean gates too, as in FedDP's release; FedLC's takes the site's own prediction.
The new head is as FedLC's; FedDP's release has a 1 × 1 one. The Gaussian (σ = 4 pixels of the decoder's map) is fixed. A
smoothed map is scaled to [0, 1], and where the map itself is larger, it gates: both as in FedDP's release, whose Gaussian
starts about 5 pixels wide and is learnt. FedLC's is fixed at σ = 6, with a peak of 1; its smoothed maps gate as they are, the
prediction's as a whole, the deviation's of the peaks alone. The standard deviation is the population's about the mean, so that
a site without peers has 0, and is not divided. FedDP's release takes the sample's and divides it by its maximum in the batch;
FedLC's takes the deviation from the site's own prediction, the root of Σ_j (ŷ_j − ŷ_k)²/(K−1), and divides it by its maximum in
each image and class. In the contrast the pooled features have no gradient, as in FedDP's release; in FedLC's it reaches the
encoder, and the encoder alone: PCS's layers are in a plain list there, which its optimiser does not know. The released code's
first iterations of a round, on heads alone, are left out. Its script of HC (scripts/train_hc.py of jcwang123/FedLC, commit
2a862ba) frees the body after the first 10 iterations of each of 300 epochs, and averages it over the sites after each; but HC's
input is detached, so that no gradient reaches the body or the segmentation heads, and HC's own head alone is trained. Here the
segmentation head is trained too, and nothing is averaged in this stage. The gradient stops before HC, as in the released code:
IGC after FedLC changes only HC's own head through L_aux. Heads travel under the same consent as IGC's personal tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.errors import InputError
from feddp.methods.base import HEADS, TRAIN, AtSite, Method, RunPlan
from feddp.partition import CALIBRATOR, HEAD
from feddp.training.settings import require_bounds, require_not_negative, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch
    from feddp.networks.local_calibration import LocalCalibration


@dataclass(frozen=True)
class FedLCSettings:
    contrast: float = setting(0.1, "FedLC: weight of the contrast between the sites' channel gates")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "contrast")


class FedLC(Method):
    private = own = (HEAD, CALIBRATOR)
    stages = (TRAIN, HEADS)
    Hyper = FedLCSettings
    hyper: FedLCSettings

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        if len(plan.sites) < 2:
            raise InputError("fedlc needs the names of at least two sites in its plan; export it with `feddp job --sites A,B`")
        return {"local_calibration": {"sites": len(plan.sites)}}

    def opened(self, site: AtSite) -> None:
        _layers(site).embedding.set(site.plan.place(site.name))

    def receive_heads(self, site: AtSite, peers: Mapping[str, Mapping[str, Tensor]]) -> None:
        heads = {site.plan.place(name): {key.rpartition(".")[2]: v for key, v in head.items()} for name, head in peers.items()}
        _layers(site).calibrator.receive(heads)

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        network = _layers(site)
        loss = site.segmentation_loss(logits, batch["mask"]) + self.hyper.contrast * network.contrast()
        # the logits come from the calibrator, whose gradient does not reach the site's head
        if network.calibrator.peers is not None:
            if network.plain is None:
                raise RuntimeError("FedLC's loss needs the logits of a pass before it")
            loss = loss + site.segmentation_loss(network.plain.float(), batch["mask"])
        return loss


def _layers(site: AtSite) -> LocalCalibration:
    """Returns the site's network, which has FedLC's layers."""
    from feddp.networks.local_calibration import LocalCalibration

    if not isinstance(site.network, LocalCalibration):
        raise TypeError(f"site {site.name}: the network {type(site.network).__name__} lacks FedLC's layers")
    return site.network
