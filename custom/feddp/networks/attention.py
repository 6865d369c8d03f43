"""PVTv2's attention with separate key and value layers, so that each can be private by name.

timm computes key and value with one fused layer `kv`: its first `dim` output rows are the keys, the others the values.
"""

import math

import torch
from timm.layers import use_fused_attn
from timm.models.pvt_v2 import Attention
from torch import Tensor, nn

from feddp.partition import KEY, QUERY, VALUE


class SplitAttention(Attention):
    """timm's attention with the same function and weights, but with `q`, `k` and `v` as separate layers.

    Takes over the layers of `fused`, which must not be used afterwards. The forward pass is timm's, except that two layers
    compute `kv`, and that the softmax is not fused where a CPU computes in bfloat16.
    """

    roles = {QUERY: ("q",), KEY: ("k",), VALUE: ("v",)}

    def __init__(self, fused: Attention):
        # not Attention.__init__, which would build new layers and draw random numbers for them
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in vars(fused).items() if not name.startswith("_")})
        del self.__dict__["fused_attn"]  # below
        for name, layer in fused.named_children():
            if name == "kv":
                self.k, self.v = _halves(layer)
            else:
                setattr(self, name, layer)

    @property
    def fused_attn(self) -> bool:
        """Whether torch's fused attention computes. In bfloat16 on a CPU its backward pass takes six times float32's."""
        return use_fused_attn() and not torch.is_autocast_enabled("cpu")

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


@torch.no_grad()
def attention_of(network: nn.Module, image: Tensor, pixel: tuple[int, int]) -> Tensor | None:
    """Where a pixel's query looks: softmax(q kᵀ / √d), the mean over the heads, (h, w) over the keys' places; its sum is 1.

    Of all attention layers, it is the one with the most keys; of those, the last, which is nearest to the prediction.

    Args:
        image: the network's input (channels, size, size).
        pixel: (x, y), pixels from the left and from the top.

    Returns:
        None if the network has no attention.
    """
    layers = [module for module in network.modules() if isinstance(module, SplitAttention)]
    taken: dict[int, dict[str, Tensor]] = {i: {} for i in range(len(layers))}
    hooks = [
        getattr(layer, name).register_forward_hook(lambda _, __, out, i=i, name=name: taken[i].__setitem__(name, out))
        for i, layer in enumerate(layers)
        for name in ("q", "k")
    ]
    try:
        network.eval()(image[None])
    finally:
        for hook in hooks:
            hook.remove()
    if not layers:
        return None
    chosen = max(taken, key=lambda i: (taken[i]["k"].shape[1], i))
    heads, scale = layers[chosen].num_heads, layers[chosen].scale
    queries, keys = (taken[chosen][name][0].unflatten(1, (heads, -1)).transpose(0, 1) for name in ("q", "k"))
    grid, side = math.isqrt(queries.shape[1]), image.shape[-1]
    x, y = (min(grid - 1, place * grid // side) for place in pixel)
    weights = (scale * queries[:, y * grid + x, None] @ keys.transpose(1, 2)).softmax(dim=-1)  # (heads, 1, keys)
    looking: Tensor = weights.mean(dim=(0, 1)).unflatten(0, (-1, math.isqrt(keys.shape[1])))
    return looking
