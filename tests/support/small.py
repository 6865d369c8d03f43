"""A network that trains in milliseconds, with the parts that a method asks for."""

import torch
from torch import Tensor, nn

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
