"""Networks by name. A new network on a timm encoder is one line of NETWORKS. Their libraries are imported only when a
network is built; reading a plan and admitting a job do not need them.

Every network has an `encoder` (images -> a list of feature maps, from high to low resolution, with `encoder.out_channels`), a
`decoder` (that list -> one map) and a `segmentation_head` (a Sequential whose first layer is the convolution to the classes),
called in this order. Its `roles` declare them; the decoder's layers declare their level (feddp.networks.levels).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import lru_cache, partial
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

from feddp.errors import InputError
from feddp.lean import no_search

if TYPE_CHECKING:
    from torch import nn

    Builder = Callable[..., nn.Module]

_ONE = RLock()  # a builder of layers may build a network itself


def build(
    name: str,
    channels: int,
    classes: int,
    weights: str | None = None,
    seed: int | None = None,
    layers: Mapping[str, Mapping[str, float]] | None = None,
) -> nn.Module:
    """Returns the network `name`, in training mode, on the CPU.

    Its forward takes images (B, channels, H, W), H and W multiples of 32, and returns logits (B, classes, H, W), one channel
    per foreground class; the probability of a class is the sigmoid of its logit.

    Args:
        weights: None starts from random numbers; "timm" fetches timm's ImageNet weights for the encoder (timm folds their three
            input channels to `channels`).
        seed: fixes the random numbers without a change of torch's generator.
        layers: layers that a method adds: {name of LAYERS: options}.

    Raises:
        InputError: the name or the weights are unknown, there is no channel or class, or the weights cannot be fetched.
    """
    if name not in NETWORKS:
        raise InputError(f"unknown network '{name}'; the networks are {', '.join(NETWORKS)}")
    if weights not in (None, "timm"):
        raise InputError(f"unknown weights '{weights}'; give 'timm', or leave it out for random weights")
    if channels < 1 or classes < 1:
        raise InputError(f"network '{name}' needs at least one channel and one class, not {channels} and {classes}")
    for extra in layers or {}:
        if extra not in LAYERS:
            raise InputError(f"unknown layers '{extra}'; choose one of {', '.join(LAYERS)}")

    extras = [(LAYERS[extra], json.dumps(dict(options))) for extra, options in (layers or {}).items()]
    if seed is None:
        return _built(NETWORKS[name], channels, classes, weights, extras)

    import torch

    where = (torch.get_default_device(), torch.get_default_dtype())
    with _ONE:  # two threads would draw from the same generator
        template = _template(NETWORKS[name], channels, classes, weights, tuple(extras), seed, where)
    return deepcopy(template)


# a process needs its plan's network several times (a site, its guard, the server), and a copy takes less than half the time
@lru_cache(maxsize=2)
def _template(
    network: Builder,
    channels: int,
    classes: int,
    weights: str | None,
    extras: tuple[tuple[Builder, str], ...],
    seed: int,
    where: tuple[Any, ...],
) -> nn.Module:
    """Returns a network that is only copied. `where`, torch's default device and type, belongs to the key: they are its own."""
    import torch

    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the accelerators' generators, which this block does not restore
        torch.default_generator.manual_seed(seed)
        return _built(network, channels, classes, weights, extras)


def _built(
    network: Builder, channels: int, classes: int, weights: str | None, extras: Iterable[tuple[Builder, str]]
) -> nn.Module:
    """Returns a network with added layers; each of `extras` is their builder and its options as JSON."""
    built = network(channels, classes, pretrained=weights == "timm")
    for layers, options in extras:
        built = layers(built, classes, **json.loads(options))
    return built


def _smp(kind: str, encoder: str, channels: int, classes: int, pretrained: bool, **changes: Any) -> nn.Module:
    """Returns the network `kind` of segmentation-models-pytorch on a timm encoder, with split key and value layers.

    Args:
        changes: arguments of the encoder that differ from timm's; timm's weights do not fit a changed encoder.
    """
    if pretrained and changes:
        options = ", ".join(f"{name} {value}" for name, value in changes.items())
        raise InputError(
            f"timm's weights for '{encoder}' do not fit this network, whose {options} are its own; leave the weights out for"
            " random ones, or name a file of this network"
        )

    with no_search():  # timm has a thousand networks
        import segmentation_models_pytorch

    from feddp.networks.attention import split_kv
    from feddp.networks.levels import with_levels
    from feddp.networks.parts import PART_ROLES, declare

    try:
        # "tu-" is segmentation-models-pytorch's prefix for timm; it treats any weights except None as pretrained
        model = getattr(segmentation_models_pytorch, kind)
        network = model(
            f"tu-{encoder}", encoder_weights=True if pretrained else None, in_channels=channels, classes=classes, **changes
        )
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise InputError(
            f"timm's weights for '{encoder}' cannot be fetched ({type(error).__name__}); connect to "
            "huggingface.co once, or fetch the file elsewhere and load it with feddp.networks.weights.load_checkpoint"
        ) from error
    declare(network, PART_ROLES)
    with_levels(network.decoder)
    return split_kv(network)


def _unet(channels: int, classes: int, pretrained: bool) -> nn.Module:
    from feddp.networks.unet import unet

    return unet(channels, classes, pretrained)


def _added(module: str, name: str, network: nn.Module, classes: int, **options: Any) -> nn.Module:
    """Returns `network` with the layers that the function or class `name` of the module `module` in this package adds."""
    added: nn.Module = getattr(import_module(f"{__name__}.{module}"), name)(network, classes, **options)
    return added


_fpn = partial(_smp, "FPN")  # a feature pyramid network: Kirillov et al., 2019
DEFAULT = "pvt_v2_b0-fpn"
NETWORKS: dict[str, Builder] = {
    DEFAULT: partial(_fpn, "pvt_v2_b0"),
    "pvt_v2_b1-fpn": partial(_fpn, "pvt_v2_b1"),
    "pvt_v2_b2-fpn": partial(_fpn, "pvt_v2_b2"),
    # for small images: at 96 px the first two stages have the 144 keys that every stage of the default has at 384 px
    "pvt_v2_b0_s-fpn": partial(_fpn, "pvt_v2_b0", sr_ratios=(2, 1, 1, 1)),
    "resnet18-fpn": partial(_fpn, "resnet18"),
    "resnet34-fpn": partial(_fpn, "resnet34"),
    "resnet50-fpn": partial(_fpn, "resnet50"),
    "unet": _unet,
    # "Unet++" and "Res-Unet" of pFLFE (Xie et al., 2024, Table 6), which names no encoder: both use ResNet-18 here
    "unetplusplus": partial(_smp, "UnetPlusPlus", "resnet18"),
    "resunet": partial(_smp, "Unet", "resnet18"),
}
# layers that a method adds to a network, by name: (network, classes, options) -> network
LAYERS: dict[str, Builder] = {
    "local_calibration": partial(_added, "local_calibration", "LocalCalibration"),
    "lora": partial(_added, "lora", "with_lora"),
    "personal_head": partial(_added, "decoupled", "DecoupledHeads"),
    "projector": partial(_added, "projector", "with_projector"),
    "rotation": partial(_added, "rotation", "with_rotation_head"),
    "spatial_adapter": partial(_added, "spatial_adapter", "SpatialAdapter"),
    "virtual_classes": partial(_added, "virtual_classes", "with_virtual_classes"),
}
