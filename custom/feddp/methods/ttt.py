"""TTT (Sun et al., ICML 2020), as in (Jiang et al., TMI 2023): FedAvg with a rotation head beside the task.

L = L_seg + weight · CE: each image of the batch is turned by a random number of quarter turns, which a linear head on the
encoder's pooled deepest features has to predict. The head is shared and averaged like everything else. At an unseen site,
`feddp adapt --how ttt` minimises the rotation loss over the encoder.

Deviations: this is a federation, while the original has one data set. The original turns the batch that the task sees; ours
turns the batch's images as they are in the data, because the loop's augmentation consists of quarter turns and flips too and
would leave nothing to predict. The weight is 1 as in the original's released code. The head branches off after the last of
the encoder's stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.methods.base import AtSite, RunPlan
from feddp.methods.fedavg import FedAvg
from feddp.training.settings import require_bounds, require_not_negative, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


@dataclass(frozen=True)
class TTTSettings:
    rotation: float = setting(1.0, "TTT: weight of the rotation head's cross-entropy")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "rotation")


class TTT(FedAvg):
    Hyper = TTTSettings
    hyper: TTTSettings

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        return {"rotation": {}}

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        import torch

        from feddp.data.loading import moved
        from feddp.networks.rotation import TURNS
        from feddp.training.rotation import rotation_loss

        images = {sample["stem"]: sample["image"] for sample in site.samples}
        upright = moved(torch.stack([images[stem] for stem in batch["stem"]]), logits.device)
        turns = torch.randint(TURNS, (len(upright),))  # by the CPU's generator: equal on every device without dropout
        return super().loss(site, logits, batch) + self.hyper.rotation * rotation_loss(site.network, upright, turns)
