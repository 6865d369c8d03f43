"""A network with attention that is small enough for many attacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.partition import HEAD, KEY, QUERY, VALUE


class Attention(nn.Module):
    """Tokens (B, N, width) -> (B, N, width): one head, over all tokens."""

    roles = {QUERY: ("q",), KEY: ("k",), VALUE: ("v",)}

    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5, dim=-1)
        attended: Tensor = weights @ self.v(x)
        return attended


class Toy(nn.Module):
    """Images (B, channels, H, W), H and W even -> logits (B, classes, H, W): patches, one block of attention, a head."""

    roles = {HEAD: ("segmentation_head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False, width: int = 24):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 4, stride=2, padding=1)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.segmentation_head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x)
        tokens = patches.flatten(2).mT
        tokens = tokens + self.attention(self.before(tokens))
        tokens = tokens + self.mlp(self.after(tokens))
        head: Tensor = self.segmentation_head(F.gelu(self.up(tokens.mT.unflatten(2, patches.shape[2:]))))
        return head
