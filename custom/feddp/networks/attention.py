"""PVTv2's attention with separate key and value layers, so that each can be private by name.

timm computes key and value with one fused layer `kv`: its first `dim` output rows are the keys, the others the values.
"""

import torch
from timm.models.pvt_v2 import Attention
from torch import Tensor, nn

from feddp.partition import KEY, QUERY, VALUE


class SplitAttention(Attention):
    """timm's attention with the same function and weights, but with `q`, `k` and `v` as separate layers.

    Takes over the layers of `fused`, which must not be used afterwards. The forward pass is timm's, except that two layers
    compute `kv`.
    """

    roles = {QUERY: ("q",), KEY: ("k",), VALUE: ("v",)}

    def __init__(self, fused: Attention):
        # not Attention.__init__, which would build new layers and draw random numbers for them
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in vars(fused).items() if not name.startswith("_")})
        for name, layer in fused.named_children():
            if name == "kv":
                self.k, self.v = _halves(layer)
            else:
                setattr(self, name, layer)

    def kv(self, x: Tensor) -> Tensor:
        """Returns keys and values of the tokens x as timm's fused layer does: (B, N, dim) -> (B, N, 2 dim)."""
        return torch.cat((self.k(x), self.v(x)), dim=-1)


def keys_of(network: nn.Module, channels: int, size: int) -> list[int]:
    """Returns the number of keys of each SplitAttention of `network`, for images of size x size pixels.

    Of a network on the meta device, nothing is computed. The network is in eval mode afterwards.
    """
    found: list[int] = []

    def note(layer: nn.Module, tokens: tuple[Tensor, ...]) -> None:
        found.append(tokens[0].shape[1])

    hooks = [m.k.register_forward_pre_hook(note) for m in network.modules() if isinstance(m, SplitAttention)]
    if hooks:
        with torch.no_grad():
            network.eval()(torch.zeros(1, channels, size, size, device=next(network.parameters()).device))
    for hook in hooks:
        hook.remove()
    return found


def split_kv(network: nn.Module) -> nn.Module:
    """Replaces every timm PVTv2 attention of `network` by a SplitAttention, in place, and returns `network`."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if type(child) is Attention:
                setattr(parent, name, SplitAttention(child))
    return network


def _halves(fused: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    def part(rows: int) -> nn.Linear:
        layer: nn.Linear = nn.utils.skip_init(
            nn.Linear,
            fused.in_features,
            fused.out_features // 2,
            bias=fused.bias is not None,
            device=fused.weight.device,
            dtype=fused.weight.dtype,
        )
        layer.load_state_dict({name: tensor.chunk(2)[rows] for name, tensor in fused.state_dict().items()})
        return layer

    return part(0), part(1)
