"""LoRA (Hu et al., ICLR 2022) in a federation: low-rank adapters in the attention are private, the rest is shared.

Beside each query, key and value layer W of PVTv2 an adapter is trained: W x + B A x, with A (r × d) random and B (d × r) 0 at
the start (`feddp.networks.lora`). Each site keeps its own A and B. With `private=none` they are shared and averaged like
everything else. `lora_freeze=true` freezes the encoder apart from the adapters, as LoRA does: then adapters, decoder and head
are trained, and a run should start from trained weights. A weights file without adapters fits: W and b keep their names, and
the adapters keep their start, which changes nothing.

Deviations: the adapters are neither scaled by α/r (here α = r) nor given dropout. By default the shared tensors are trained
too, because a run from random weights needs it. Freezing ends with the rounds: local stages train the whole network. Federated
adapters are as in pFedSAM (Wang et al., 2025) only in part: there LoRA's tensors in the encoder of SAM are shared, a local
mixture of experts is private, and a distillation follows; of that paper, only the abstract and a summary could be read. Of
LoRA's, the released code was read.
"""

from __future__ import annotations

from dataclasses import dataclass

from feddp.methods.base import Method, Round, RunPlan
from feddp.partition import ADAPTER, DECODER, HEAD
from feddp.training.settings import require_bounds, require_positive, setting


@dataclass(frozen=True)
class LoRASettings:
    lora_rank: int = setting(4, "LoRA: r, rank of the adapters; our choice", most=256)
    lora_freeze: bool = setting(False, "LoRA: train adapters, decoder and head only; for runs that start from trained weights")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "lora_rank")


class LoRA(Method):
    private = (ADAPTER,)
    Hyper = LoRASettings
    hyper: LoRASettings

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        return {"lora": {"rank": plan.hyper.lora_rank}}

    def round(self, site: Round) -> float:
        train = (ADAPTER, DECODER, HEAD) if self.hyper.lora_freeze else ()
        return site.fit(epochs=site.plan.training.local_epochs, train=train)
