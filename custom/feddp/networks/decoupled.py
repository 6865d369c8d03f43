"""FedRoD's two heads on one network (Chen & Chao, ICLR 2022): a generic one, and a personal one on detached features."""

import copy

from torch import Tensor, nn

from feddp.networks.parts import PART_ROLES, parts_of
from feddp.partition import PERSONAL_HEAD


class DecoupledHeads(nn.Module):
    """`network` with a second head, `personal_head`, whose logits are added; its tensors keep their names.

    Takes over the layers of `network`, which must not be used afterwards. The personal head has the generic one's layers and
    starts at 0, so the predictions do not change. The gradient of the logits reaches the personal head alone; `generic` holds
    the generic head's logits of the last pass, (B, classes, H, W), with a gradient to everything else.

    Raises:
        InputError: the network lacks an encoder, a decoder or a segmentation head.
    """

    roles = {**PART_ROLES, PERSONAL_HEAD: ("personal_head",)}

    def __init__(self, network: nn.Module, classes: int):
        super().__init__()
        self.encoder, self.decoder, self.segmentation_head, _ = parts_of(network, "FedRoD")
        self.personal_head = copy.deepcopy(self.segmentation_head)
        for parameter in self.personal_head.parameters():
            nn.init.zeros_(parameter)
        self.generic: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        decoded = self.decoder(list(self.encoder(x)))
        generic: Tensor = self.segmentation_head(decoded)
        self.generic = generic
        personal: Tensor = self.personal_head(decoded.detach())
        return generic.detach() + personal
