"""Every operation in double precision, its results rounded to float32: two devices then give nearly the same bits.

In float32 each device sums in an order of its own, and AdamW makes a whole step of a gradient that is rounding alone. Correct
devices so part by up to some hundredths of what training changes, and a wrong computation can hide there. In double precision
their results differ by some 2^-50, relative, and their roundings to float32 only where the middle of two numbers lies between.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
NARROW = {wide: narrow for narrow, wide in WIDE.items()}
# they compute nothing: they move or read numbers, or change a tensor's shape in place; what is pinned has to stay so
UNCHANGED = {aten._to_copy, aten._pin_memory, aten.copy_, aten.clone, aten._local_scalar_dense}
UNCHANGED |= {aten.set_, aten.resize_, aten.t_, aten.transpose_, aten.squeeze_, aten.unsqueeze_, aten.as_strided_}
STEPS = "state_steps"  # of the fused optimiser, which reads float32 here whatever the parameters are


class Exact(TorchDispatchMode):
    """Within it, operations on float32 tensors compute in double precision. `counted` has their number by type of device.

    What PyTorch itself calls below an operation is part of it, so only attention in single steps (SDPBackend.MATH) is covered:
    the fused one has no double precision on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        own = [value for value in given if value.is_floating_point() or value.is_complex()]
        views = any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments)
        if views or func.overloadpacket in UNCHANGED or not own or {value.dtype for value in own} - WIDE.keys():
            return func(*args, **kwargs)
        named = by_name(func, args, kwargs)
        steps = {id(value) for value in tree_leaves(named.get(STEPS))}
        doubled = {id(value): value.to(WIDE[value.dtype]) for value in own if id(value) not in steps}
        wide = tree_map_only(Tensor, lambda value: doubled.get(id(value), value), (args, kwargs))
        wide = tree_map_only(torch.dtype, lambda dtype: WIDE.get(dtype, dtype), wide)
        found = func(*wide[0], **wide[1])
        kind = own[0].device.type
        self.counted[kind] = self.counted.get(kind, 0) + 1
        changed = {id(doubled[id(value)]): value for value in changed_by(func, named) if id(value) in doubled}
        for value in changed.values():
            value.copy_(doubled[id(value)])

        def narrowed(value: Tensor) -> Tensor:
            return changed[id(value)] if id(value) in changed else value.to(NARROW.get(value.dtype, value.dtype))

        return tree_map_only(Tensor, narrowed, found)


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns an operation's arguments."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs


def changed_by(func: Any, named: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation changes in place."""
    changed = [
        named.get(argument.name) for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    if "batch_norm" in func._schema.name:  # of these PyTorch does not say it
        changed += [named.get("running_mean"), named.get("running_var")]
    return [value for value in tree_leaves(changed) if isinstance(value, Tensor)]
