"""Networks by name. A new one on a timm encoder is one line of NETWORKS."""

from functools import partial

import segmentation_models_pytorch as smp
import torch
from torch import nn

from feddp.errors import FedDPError
from feddp.networks.attention import split_kv
from feddp.partition import DECODER, ENCODER, HEAD


def build(name: str, channels: int, classes: int, weights: str | None = None, seed: int | None = None) -> nn.Module:
    """The network `name`, in training mode, on the CPU.

    Its forward takes images (B, channels, H, W), H and W multiples of 32, and returns logits (B, classes, H, W): the
    probability of a class is the sigmoid of its logit, one channel a foreground class.

    `weights`: None starts from random numbers; "timm" fetches timm's ImageNet weights for the encoder (timm folds their
    three input channels to `channels`). `seed` fixes the random numbers and leaves torch's own generator untouched.
    FedDPError: unknown name or weights, no channel or class, weights that cannot be fetched.
    """
    if name not in NETWORKS:
        raise FedDPError(f"unknown network '{name}'; the networks are {', '.join(NETWORKS)}")
    if weights not in (None, "timm"):
        raise FedDPError(f"unknown weights '{weights}'; say 'timm', or leave it out for random weights")
    if channels < 1 or classes < 1:
        raise FedDPError(f"network '{name}' needs at least one channel and one class, not {channels} and {classes}")
    builder = partial(NETWORKS[name], channels, classes, pretrained=weights == "timm")
    if seed is None:
        return builder()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reach the accelerators' generators, which this block does not restore
        torch.default_generator.manual_seed(seed)
        return builder()


def _fpn(encoder: str, channels: int, classes: int, pretrained: bool) -> nn.Module:
    """A feature pyramid network (Kirillov et al., 2019) on the timm encoder `encoder`, key and value layers split."""
    try:
        # "tu-" is segmentation-models-pytorch's prefix for timm; there, any weights but None mean pretrained
        network = smp.FPN(f"tu-{encoder}", encoder_weights=True if pretrained else None, in_channels=channels, classes=classes)
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise FedDPError(
            f"timm's weights for '{encoder}' cannot be fetched ({type(error).__name__}); connect to "
            "huggingface.co once, or fetch the file elsewhere and load it with feddp.networks.weights.load_checkpoint"
        ) from error
    network.roles = {HEAD: ("segmentation_head",), ENCODER: ("encoder",), DECODER: ("decoder",)}
    return split_kv(network)


DEFAULT = "pvt_v2_b0-fpn"
NETWORKS = {
    DEFAULT: partial(_fpn, "pvt_v2_b0"),
    "resnet18-fpn": partial(_fpn, "resnet18"),
}
