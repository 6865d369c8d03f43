"""Declares the layers of each decoder level: the roles `decoder.1`, next to the output, `decoder.2`, and so on.

A level consists of the decoder's layers at one resolution and the layers that bring the map to that resolution. All levels
together are the decoder.
"""

from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder
from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoder
from segmentation_models_pytorch.decoders.unetplusplus.decoder import UnetPlusPlusDecoder
from torch import nn

from feddp.networks.parts import declare
from feddp.partition import LEVELS


def declare_levels(holder: nn.Module, *levels: str) -> None:
    """Declares the level of `holder`'s children: `levels[0]` belongs to level 1, `levels[1]` to level 2, ..."""
    declare(holder, {role: (child,) for role, child in zip(LEVELS, levels, strict=False)})


def declare_stages(stages: nn.ModuleList) -> None:
    """Declares each of `stages` as a level; the last one is level 1."""
    declare_levels(stages, *(str(index) for index in reversed(range(len(stages)))))


def with_levels(decoder: nn.Module) -> None:
    """Declares the levels of a decoder of segmentation-models-pytorch, in place; other decoders do not change."""
    if isinstance(decoder, FPNDecoder):
        declare_levels(decoder, "p2", "p3", "p4", "p5")
        declare_levels(decoder.seg_blocks, "3", "2", "1", "0")
    elif isinstance(decoder, UnetDecoder):
        declare_stages(decoder.blocks)
    elif isinstance(decoder, UnetPlusPlusDecoder):
        # the blocks x_i_j, i <= j, have the resolution of level depth + 1 - j; the last block has no skip and is a level alone
        rows: list[tuple[str, ...]] = [tuple(f"x_{i}_{j}" for i in range(j + 1)) for j in range(decoder.depth)]
        rows.append((f"x_0_{decoder.depth}",))
        declare(decoder.blocks, dict(zip(LEVELS, rows[::-1], strict=True)))
