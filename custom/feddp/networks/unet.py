"""U-Net with batch normalisation (Ronneberger et al., MICCAI 2015), built from MONAI's layers.

Widths, normalisation and transposed convolutions are those of IOP-FL's released code (github.com/med-air/IOP-FL,
nets/models.py), without its rotation head. MONAI's BasicUNet is not used: its last up-sampling has twice the features.
"""

from monai.networks.nets.basic_unet import Down, TwoConv, UpCat
from torch import Tensor, nn

from feddp.errors import InputError
from feddp.networks.levels import declare_stages
from feddp.networks.parts import PART_ROLES

FEATURES = (32, 64, 128, 256, 512)  # channels per resolution, from the image's resolution to a sixteenth of it
# two 3 x 3 convolutions without bias, each followed by batch normalisation and ReLU
_LAYERS = {"act": ("relu", {"inplace": True}), "norm": "batch", "bias": False}


class UNet(nn.Module):
    """Images (B, channels, H, W), H and W multiples of 16 -> logits (B, classes, H, W).

    Encoder, decoder and segmentation head are called as in segmentation-models-pytorch's networks, except that the encoder's
    first feature map is computed, not the image itself.
    """

    roles = PART_ROLES

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.encoder = Encoder(channels)
        self.decoder = Decoder()
        self.segmentation_head = nn.Sequential(nn.Conv2d(FEATURES[0], classes, kernel_size=1))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.segmentation_head(self.decoder(self.encoder(x)))
        return logits


class Encoder(nn.Module):
    """(B, channels, H, W) -> five feature maps with FEATURES channels, each half as high and wide as the map before."""

    out_channels = FEATURES

    def __init__(self, channels: int):
        super().__init__()
        down = [Down(2, above, below, **_LAYERS) for above, below in zip(FEATURES, FEATURES[1:], strict=False)]
        self.stages = nn.ModuleList([TwoConv(2, channels, FEATURES[0], **_LAYERS), *down])

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class Decoder(nn.Module):
    """The encoder's five feature maps -> (B, FEATURES[0], H, W)."""

    def __init__(self) -> None:
        super().__init__()
        levels = list(zip(FEATURES, FEATURES[1:], strict=False))[::-1]
        # no padding: H and W are multiples of 16
        self.stages = nn.ModuleList([UpCat(2, deep, skip, skip, is_pad=False, **_LAYERS) for skip, deep in levels])
        declare_stages(self.stages)

    def forward(self, features: list[Tensor]) -> Tensor:
        *skips, x = features
        for stage, skip in zip(self.stages, skips[::-1], strict=True):
            x = stage(x, skip)
        return x


def unet(channels: int, classes: int, pretrained: bool) -> UNet:
    """Returns the U-Net; raises InputError if `pretrained`."""
    if pretrained:
        raise InputError(
            "there are no public weights for 'unet'; leave the weights out for random ones, or name a file of this network"
        )
    return UNet(channels, classes)
