"""Similarity head for real and virtual classes, and personalized affinity aggregation (PAA) in the decoder's levels.

Source: Liu et al., 2024, III-B and III-C. Eq. 3: f(x) = Conv(Z/‖Z‖, θ/‖θ‖), C + V maps. Eq. 9 to 12: Q = Conv_q(D_l),
K = Conv_k(E_{l-1}), M = Conv_m(relu(Q + K)), and Q · M. C includes the background, which is class 0.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from monai.networks.nets.basic_unet import UpCat
from segmentation_models_pytorch.decoders.fpn.decoder import FPNBlock
from torch import Tensor, nn

from feddp.errors import InputError
from feddp.networks.parts import head_of, part
from feddp.partition import AFFINITY_KEY, AFFINITY_MATRIX, AFFINITY_QUERY


def with_virtual_classes(
    network: nn.Module, classes: int, virtual: int, temperature: float, nested: bool, paa: bool
) -> nn.Module:
    """Adds similarity head and PAA to `network`, in place, and returns the network; it still has one logit per class.

    Args:
        network: has a `decoder`, and a `segmentation_head` whose first layer is the convolution to the classes.
        classes: number of foreground classes; C is one more.
        virtual: V.
        temperature: the divisor of the similarities.
        nested: whether the classes are nested, see `foreground_logits`.
        paa: whether every decoder level with a skip connection gets a layer `affinity`.

    Raises:
        InputError: the network has no such head, or PAA does not support the decoder (it supports FPN and `unet`).
    """
    head, convolution = head_of(network, "virtual_class")
    first = Similarities(convolution.in_channels, classes + 1, virtual)
    network.segmentation_head = SimilarityHead([first, *list(head)[1:]], temperature, nested)
    if paa:
        levels = [module for module in part(network, "decoder", "virtual_class").modules() if type(module) in _WIDTHS]
        if not levels:
            raise InputError(
                f"PAA does not support the decoder of {type(network).__name__}; take an FPN or 'unet', or set paa=false"
            )
        for level in levels:
            level.affinity = AffinityAggregation(*_WIDTHS[type(level)](level))
            level.register_forward_pre_hook(_aggregate)
    return network


class Similarities(nn.Module):
    """Cosines between every pixel's features and the C + V kernels, of which V are frozen (Eq. 3).

    The frozen ones travel with the shared tensors, but every site keeps its own: `constants` (`feddp.partition`).

    The kernels start orthonormal, drawn from torch's generator. If there are more kernels than features, each block of `width`
    kernels is orthonormal, and the blocks are drawn independently.
    """

    constants = ("virtual",)
    virtual: Tensor | None

    def __init__(self, width: int, real: int, virtual: int):
        super().__init__()
        blocks = [torch.empty(min(width, real + virtual - start), width) for start in range(0, real + virtual, width)]
        kernels = torch.cat([nn.init.orthogonal_(block) for block in blocks])[:, :, None, None]
        self.weight = nn.Parameter(kernels[:real].clone())
        self.register_buffer("virtual", kernels[real:].clone() if virtual else None)

    def forward(self, features: Tensor) -> Tensor:
        """(B, width, h, w) -> (B, C + V, h, w) in [-1, 1]; in float32, because bfloat16 has only three digits."""
        kernels = self.weight if self.virtual is None else torch.cat((self.weight, self.virtual))
        with torch.autocast(features.device.type, enabled=False):
            return F.conv2d(F.normalize(features.float(), dim=1), F.normalize(kernels, dim=1))


class SimilarityHead(nn.Sequential):
    """Similarities, the former head's layers after its convolution (upsampling), and the logits of the classes.

    `maps`: the C + V similarities of the last pass, divided by the temperature, (B, C + V, H, W), for the loss.
    """

    def __init__(self, layers: list[nn.Module], temperature: float, nested: bool):
        super().__init__(*layers)
        self.temperature, self.nested = temperature, nested
        self.maps: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        similarities: Tensor = super().forward(features)  # type: ignore[no-untyped-call]  # torch's Sequential
        self.maps = similarities / self.temperature
        return foreground_logits(self.maps[:, : self.real], self.nested)

    @property
    def real(self) -> int:
        """C."""
        first = self[0]
        assert isinstance(first, Similarities)
        return len(first.weight)


def foreground_logits(maps: Tensor, nested: bool) -> Tensor:
    """Returns logits whose sigmoid is the probability of a foreground class under the softmax p over `maps`.

    (B, C, H, W) -> (B, C − 1, H, W). The probability of class c is p_c or, for nested classes, p_c + … + p_{C−1} (the optic
    disc includes the cup). logit P = log Σ_in e^s − log Σ_out e^s, finite for any finite `maps`.
    """
    rows = []
    for c in range(1, maps.shape[1]):
        end = None if nested else c + 1
        outside = maps[:, :c] if nested else torch.cat((maps[:, :c], maps[:, end:]), dim=1)
        rows.append(maps[:, c:end].logsumexp(dim=1) - outside.logsumexp(dim=1))
    return torch.stack(rows, dim=1)


class AffinityAggregation(nn.Module):
    """Eq. 9 to 12 in a level: the decoder receives the output in place of the encoder's features.

    The paper states neither the resizing of D_l to E_{l-1} nor the sizes of the kernels. Here D_l is upsampled (nearest) and
    all kernels are 1 × 1, so conv_q can run before the upsampling, at a quarter of the cost.

    Args:
        deep: number of channels of D_l.
        skip: number of channels of E_{l-1}, Q, K, M and the output.
    """

    roles = {AFFINITY_QUERY: ("conv_q",), AFFINITY_KEY: ("conv_k",), AFFINITY_MATRIX: ("conv_m",)}

    def __init__(self, deep: int, skip: int):
        super().__init__()
        self.conv_q, self.conv_k, self.conv_m = (nn.Conv2d(width, skip, 1) for width in (deep, skip, skip))

    def forward(self, deep: Tensor, skip: Tensor) -> Tensor:
        """D_l (B, deep, h, w) and E_{l-1} (B, skip, H, W) -> (B, skip, H, W)."""
        query = F.interpolate(self.conv_q(deep), size=skip.shape[-2:])
        matrix: Tensor = self.conv_m(torch.relu(query + self.conv_k(skip)))
        return query * matrix


def _aggregate(level: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Runs before a level's forward: (D_l, E_{l-1}) -> (D_l, Q · M)."""
    deep, skip = inputs
    return deep, part(level, "affinity", "virtual_class")(deep, skip)


def _up_cat(level: UpCat) -> tuple[int, int]:
    up = level.upsample.deconv
    return up.in_channels, level.convs.conv_0.conv.in_channels - up.out_channels


# numbers of channels of (D_l, E_{l-1}), the inputs of each type of level that PAA supports
_WIDTHS: dict[type, Callable[[Any], tuple[int, int]]] = {
    FPNBlock: lambda level: (level.skip_conv.out_channels, level.skip_conv.in_channels),
    UpCat: _up_cat,
}
