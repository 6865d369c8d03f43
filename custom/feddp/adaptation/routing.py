"""Test-time routing (Jiang et al., TMI 2023, III-C): every layer mixes the weights of the M models, depending on its input.

W_mix = Σ_m r_m W_m, and the same for the bias. A small network computes r = (r_1, ..., r_M) for each sample and each layer from
the layer's globally average-pooled input. Convolutions, transposed convolutions and linear layers are routed. All other tensors
(affine parameters and running statistics of normalisations) are the mean of the M models.

The weights are mixed per sample first and applied once: no layer is evaluated M times. Training holds one mixed weight per
sample of the batch in addition to the M weights.

Deviations: at most HIDDEN units lie between the two linear layers (the released code: twice the layer's channels, which on a
PVT are more parameters than the network has), and there is no dropout. As in the released code, no non-linearity lies between
them (the paper: "multi-layer linear network"). They start with every r_m = 1/M, the mean model. The released code starts at
random with about ½ each, which works only in a network with a batch normalisation after every layer.

With a sigmoid, the sum of the r_m is free. Without a batch normalisation that compensates for it, training can shrink all
weights until every image gets the same, empty prediction, where the unsupervised loss is lowest. This happened on
`pvt_v2_b0-fpn` with MRI at 64 px within 10 epochs, and with the softmax it did not (seen before 2026-11-22; neither the command
nor the figures were kept). Our default is therefore the softmax, and `feddp adapt` warns if all masks are empty.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from feddp.adaptation.choices import SIGMOID, SOFTMAX
from feddp.errors import InputError

HIDDEN = 64
_MIXES: dict[str, Callable[[Tensor], Tensor]] = {SIGMOID: torch.sigmoid, SOFTMAX: partial(torch.softmax, dim=-1)}


class Router(nn.Module):
    """r (B, M) from a layer's pooled input (B, C).

    Args:
        channels: C.
        models: M, at least 2.
        mix: "sigmoid", each r_m in (0, 1) (as in the released code), or "softmax", whose r_m sum to 1.
    """

    def __init__(self, channels: int, models: int, mix: str = "softmax"):
        super().__init__()
        self.squeeze = nn.Linear(channels, min(2 * channels, HIDDEN))
        self.choose = nn.Linear(self.squeeze.out_features, models)
        nn.init.zeros_(self.choose.weight)
        nn.init.constant_(self.choose.bias, -math.log(models - 1) if mix == "sigmoid" else 0.0)
        self.mix = _MIXES[mix]

    def forward(self, pooled: Tensor) -> Tensor:
        mixed: Tensor = self.mix(self.choose(self.squeeze(pooled)))
        return mixed


class Routed(nn.Module):
    """A layer with M weights, mixed per sample.

    Args:
        channels: C, of the layer's input.
        weights: (M, *the layer's weight), not copied.
        biases: (M, outputs), or None.
        mix: as `Router`.
    """

    weights: Tensor
    biases: Tensor | None

    def __init__(self, channels: int, weights: Tensor, biases: Tensor | None, mix: str):
        super().__init__()
        # not persistent: they belong to the given models, not to this network's state
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("biases", biases, persistent=False)
        self.router = Router(channels, len(weights), mix)

    def pool(self, x: Tensor) -> Tensor:
        """Returns the mean over the pixels: x (B, C, H, W) -> (B, C)."""
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        r = self.router(self.pool(x))
        weights = (r @ self.weights.flatten(1)).view(-1, *self.weights.shape[1:])
        return self.apply_each(x, weights, None if self.biases is None else r @ self.biases)

    def apply_each(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        """Applies weights[b] and biases[b] to sample b of x."""
        raise NotImplementedError


class RoutedLinear(Routed):
    """x (B, ..., C) -> (B, ..., outputs); pooled over the dimensions in between."""

    def __init__(self, layer: nn.Linear, weights: Tensor, biases: Tensor | None, mix: str):
        super().__init__(layer.in_features, weights, biases, mix)

    def pool(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).mean(dim=1) if x.ndim > 2 else x

    def apply_each(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        tokens = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
        mixed = weights.transpose(1, 2)
        result = tokens @ mixed if biases is None else torch.baddbmm(biases[:, None], tokens, mixed)
        return result.view(*x.shape[:-1], -1)


class RoutedConv(Routed):
    """x (B, C, H, W) -> (B, outputs, H', W'): one convolution with B times the groups; each sample has its own groups."""

    def __init__(self, layer: nn.Conv2d, weights: Tensor, biases: Tensor | None, mix: str):
        super().__init__(layer.in_channels, weights, biases, mix)
        self.mode, self.around = layer.padding_mode, layer._reversed_padding_repeated_twice
        padding = layer.padding if self.mode == "zeros" else 0
        self.convolve = partial(F.conv2d, stride=layer.stride, dilation=layer.dilation, padding=padding)
        self.groups = layer.groups

    def apply_each(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        if self.mode != "zeros":
            x = F.pad(x, self.around, mode=self.mode)
        return _side_by_side(self.convolve, x, weights, biases, self.groups)


class RoutedTransposed(Routed):
    """`RoutedConv` for a transposed convolution, whose weight is (C, outputs / groups, h, w)."""

    def __init__(self, layer: nn.ConvTranspose2d, weights: Tensor, biases: Tensor | None, mix: str):
        super().__init__(layer.in_channels, weights, biases, mix)
        self.convolve = partial(
            F.conv_transpose2d,
            stride=layer.stride,
            padding=_pixels(layer),
            output_padding=layer.output_padding,
            dilation=layer.dilation,
        )
        self.groups = layer.groups

    def apply_each(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        return _side_by_side(self.convolve, x, weights, biases, self.groups)


ROUTED = {nn.Linear: RoutedLinear, nn.Conv2d: RoutedConv, nn.ConvTranspose2d: RoutedTransposed}


def route(network: nn.Module, stacks: Mapping[str, Tensor], mix: str = "softmax") -> nn.Module:
    """Replaces every layer of a type in ROUTED by a routed layer, in place, and returns `network`.

    Only the parameters of the routers require gradients afterwards.

    Args:
        network: has the mean of the models in the layers that are not routed.
        stacks: every tensor of the network by name, (M, ...), M at least 2; used without a copy, never written to.

    Raises:
        InputError: a linear or convolutional layer has another type, or two layers share a weight.
    """
    network.requires_grad_(False)
    layers = {path: module for path, module in network.named_modules() if type(module) in ROUTED}
    for path, module in network.named_modules():
        if path not in layers and isinstance(module, (nn.Linear, nn.Bilinear, _ConvNd)):
            raise InputError(f"the layer {path} is a {type(module).__name__}, which cannot be routed; choose another --how")
    if len({id(layer.weight) for layer in layers.values()}) < len(layers):
        raise InputError("two layers of the network share a weight, which cannot be routed; choose another --how")
    for path, layer in layers.items():
        owner, _, name = path.rpartition(".")
        biases = None if layer.bias is None else stacks[f"{path}.bias"]
        setattr(network.get_submodule(owner), name, ROUTED[type(layer)](layer, stacks[f"{path}.weight"], biases, mix))
    return network


def _pixels(layer: nn.ConvTranspose2d) -> tuple[int, ...]:
    """Its padding, which in torch is a word for convolutions alone."""
    if isinstance(layer.padding, str):
        raise TypeError(f"a transposed convolution has no padding {layer.padding!r}")
    return layer.padding


def _side_by_side(convolve: Callable[..., Tensor], x: Tensor, weights: Tensor, biases: Tensor | None, groups: int) -> Tensor:
    samples = len(x)
    merged = x.reshape(1, -1, *x.shape[2:])
    flat = None if biases is None else biases.flatten()
    result = convolve(merged, weights.flatten(0, 1), flat, groups=samples * groups)
    return result.view(samples, -1, *result.shape[2:])
