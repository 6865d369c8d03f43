"""Networks that train in milliseconds: one with the parts that a method asks for, others with a larger one's layers."""

from functools import partial

import torch
from torch import Tensor, nn

from feddp.networks import DEFAULT, NETWORKS, _smp
from feddp.networks.parts import PART_ROLES
from feddp.partition import QUERY


class Encoder(nn.Module):
    roles = {QUERY: ("q",)}
    out_channels = (4, 8)

    def __init__(self, channels: int):
        super().__init__()
        self.q = nn.Conv2d(channels, 4, 1)
        self.down = nn.Sequential(nn.Conv2d(4, 8, 2, stride=2), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> list[Tensor]:
        first = torch.relu(self.q(x))
        return [first, self.down(first)]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.relu(self.up(features[-1]) + features[0])


class Small(nn.Module):
    """Images (B, channels, H, W), H and W even -> logits (B, classes, H, W). Its query is the encoder's first layer."""

    roles = PART_ROLES

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.encoder, self.decoder = Encoder(channels), Decoder()
        self.segmentation_head = nn.Sequential(nn.Conv2d(4, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.segmentation_head(self.decoder(self.encoder(x)))


FEW = {"embed_dims": (8, 16, 16, 16), "num_heads": (1, 2, 2, 2)}  # a PVTv2's channels and heads, by stage
# the default network's layers and tensors by name, with 107 thousand parameters instead of 5.2 million
narrow = partial(NETWORKS[DEFAULT], **FEW, decoder_pyramid_channels=16, decoder_segmentation_channels=32)
# its decoder normalises groups of two channels, so that it takes a single image of 32 pixels, which is one pixel in the end
paired = partial(narrow, decoder_segmentation_channels=64)
shallow = partial(paired, depths=(1, 1, 1, 1))  # a block of each stage instead of two
# resnet18-fpn's kinds of layers, with 527 thousand parameters instead of 13 million: timm has it for tests
narrow_resnet = partial(_smp, "FPN", "test_resnet", decoder_pyramid_channels=16, decoder_segmentation_channels=64)
