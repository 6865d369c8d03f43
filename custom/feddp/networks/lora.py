"""Low-rank adapters beside the query, key and value layers of PVTv2's attention (LoRA; Hu et al., ICLR 2022)."""

from torch import Tensor, nn

from feddp.errors import InputError
from feddp.networks.attention import SplitAttention
from feddp.partition import ADAPTER


class AdaptedLinear(nn.Linear):
    """`layer` with an adapter: W x + b + B A x, with A (rank, in) and B (out, rank); W and b keep their names.

    A starts as a linear layer does, B at 0, so that the function does not change. Takes over the tensors of `layer`.
    """

    roles = {ADAPTER: ("lora_a", "lora_b")}

    def __init__(self, layer: nn.Linear, rank: int):
        # not Linear.__init__, which would build new tensors and draw random numbers for them
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Linear(self.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, self.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = super().forward(x) + self.lora_b(self.lora_a(x))
        return adapted


def with_lora(network: nn.Module, classes: int, rank: int) -> nn.Module:
    """Adds adapters to every attention of `network`, in place, and returns the network; its predictions do not change.

    Raises:
        InputError: the network has no attention with separate query, key and value layers.
    """
    attentions = [module for module in network.modules() if isinstance(module, SplitAttention)]
    if not attentions:
        raise InputError(f"{type(network).__name__} has no attention for LoRA's adapters; take a network on PVTv2")
    for attention in attentions:
        for name in ("q", "k", "v"):
            setattr(attention, name, AdaptedLinear(getattr(attention, name), rank))
    return network
