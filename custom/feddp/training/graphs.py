"""A network's forward and backward pass as CUDA graphs: one call launches all kernels of a pass.

A training step of the default network has about a thousand kernels. Launched one by one they take longer than a fast GPU needs
to compute a small batch, and in bfloat16 several times as long (docs/results/gpu.md). The kernels are the same ones.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from feddp.errors import InputError
from feddp.reading import short
from feddp.training.device import is_full

Forward = Callable[[Tensor], Tensor]  # images (B,C,H,W) -> logits (B,C,H,W)
_HELD = "_feddp_graphs"  # a network's attribute


class _Graphs(dict[Hashable, Forward]):
    """A network's captured passes, by what they depend on. They use the network's tensors, so a copy starts with none."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Hashable = None
        self.tried = self.unwanted = False
        self.keeping: bool | None = None  # whether a layer keeps a result; None: not looked at yet

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Graphs":
        return _Graphs()


def replayed(network: nn.Module, shape: Sequence[int], mixed: bool) -> Forward:
    """Returns what computes network(images) on its GPU, for training: CUDA graphs for images of `shape`, else the network.

    The graphs are captured once for the network's present layers and tensors, whose values may change. The next call
    overwrites the logits. A network is returned itself where a graph would leave something out: it has hooks, or a layer keeps
    a tensor of its own, which a loss may read (FedLC, FedRoD, virtual classes). So is one on the CPU.

    Args:
        mixed: whether the forward pass computes in bfloat16.

    Raises:
        InputError: CUDA cannot capture the network. Then this process cannot go on: CUDA may still believe that it captures.
    """
    parameters = list(network.parameters())
    if parameters[0].device.type != "cuda":
        return network
    held = network.__dict__.setdefault(_HELD, _Graphs())
    trained = any(parameter.requires_grad for parameter in parameters)
    if held.unwanted or held.keeping or not trained or "forward" in network.__dict__ or _hooks(network):
        return network
    tensors = tuple((id(value), value.data_ptr()) for value in [*parameters, *network.buffers()])
    if tensors != held.tensors:  # a graph reads and writes where they were
        held.clear()
        held.tensors = tensors
    modes = tuple((module.training, getattr(module, "track_running_stats", None)) for module in network.modules())
    key = (tuple(shape), mixed, tuple(parameter.requires_grad for parameter in parameters), modes)
    if key not in held:
        with _statistics_kept(network):
            images = torch.zeros(*shape, device=parameters[0].device)
            if held.keeping is None:
                held.keeping = _keeps(network, images)
            if held.keeping:
                return network
            held.tried = True
            held[key] = _captured(network, images, mixed)
    graph = held[key]
    return lambda images: (graph if images.shape == torch.Size(shape) else network)(images)


def leave(network: nn.Module) -> bool:
    """Frees the network's graphs, which hold memory, and captures none from now on; returns whether one had been tried."""
    held = network.__dict__.setdefault(_HELD, _Graphs())
    left, held.unwanted = held.tried and not held.unwanted, True
    held.clear()
    if left:
        gc.collect()  # what torch makes of a graph refers to itself
        torch.cuda.empty_cache()
    return left


def _keeps(network: nn.Module, images: Tensor) -> bool:
    """Whether a layer keeps a tensor of its forward pass, alone or in a tuple."""
    with torch.no_grad():
        network(images)
    torchs = "_parameters", "_buffers", "_modules"
    kept = [value for module in network.modules() for name, value in vars(module).items() if name not in torchs]
    return any(isinstance(value, Tensor) for value in tree_leaves(kept))


def _hooks(network: nn.Module) -> bool:
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, kind) for module in network.modules() for kind in kinds)


@contextmanager
def _statistics_kept(network: nn.Module) -> Iterator[None]:
    """Undoes what passes in the block do to running statistics. Not after an error of CUDA's, which may refuse everything."""
    buffers = {name: value.clone() for name, value in network.named_buffers()}

    @torch.no_grad()
    def restore() -> None:
        for name, value in network.named_buffers():
            value.copy_(buffers[name])

    try:
        yield
    except torch.OutOfMemoryError:
        restore()
        raise
    restore()


def _captured(network: nn.Module, images: Tensor, mixed: bool) -> Forward:
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a capture has a stream of its own
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed, cache_enabled=False):
            # replaces the network's forward, which is taken back below
            torch.cuda.make_graphed_callables(network, (images,), allow_unused_input=True)
        return network.forward
    except RuntimeError as error:
        if is_full(error):
            raise
        raise InputError(
            f"CUDA cannot capture this network as graphs ({short(str(error).splitlines()[0], 200)}); submit the job without"
            " --set cuda_graphs=true"
        ) from error
    finally:
        network.__dict__.pop("forward", None)
