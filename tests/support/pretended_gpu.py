"""A pretended GPU: tensors in the CPU's memory that say they are on cuda:0, so that what would fail on CUDA fails here.

Every operation computes with the CPU's kernels, so a run gives the bits of a run on the CPU, if both draw the same numbers.
As on CUDA, an operation on tensors of both devices raises RuntimeError, `numpy()` raises TypeError, a generator has a device,
the GPU draws from a generator of its own, `torch.autocast("cpu")` does nothing there, and what the host has to wait for can be
counted (`Waits`).

The technique is that of torch's FakeTensor, with real values. A tensor's device is CUDA's in Python alone: in C++, autograd's
engine and autocast would ask the driver about it.

It cannot show what a GPU's kernels compute, that one is missing or refuses a type, which operations CUDA's autocast casts (they
are not quite the CPU's), streams and copies that overtake a computation, memory, other processes, a second GPU. It takes every
operation but `cat` and `stack` for one that accepts a CPU's scalar beside tensors on the GPU; some of CUDA's do not.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from feddp import lean

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
INDEXED = "index", "index_put", "index_put_", "_index_put_impl_"
JOINED = "cat", "stack"  # these take no scalar of another device
READ = "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim", "_unique2", "unique_consecutive"
SEVERAL = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


@dataclass
class Waits:
    """What the host waited for while `counting`: the operation and the line of code, one text each."""

    counting: bool = False
    found: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if not self.counting:
            return
        frame = sys._getframe(1)
        while frame.f_back and (frame.f_code.co_filename in (__file__, lean.__file__) or "/torch/" in frame.f_code.co_filename):
            frame = frame.f_back  # lean.py stands between torch's own functions
        self.found.append(f"{what} in {'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}")


waits = Waits()
_own = torch.Generator()  # the GPU's
_within = threading.local()  # its `depth`: how many calls with tensors on the GPU this thread is in


class OnGPU(Tensor):
    """A tensor on the GPU; `plain` is its memory as the CPU sees it."""

    plain: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, plain: Tensor) -> "OnGPU":
        made = Tensor._make_subclass(cls, plain)
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), named=None):
        return _run(operation, args, named or {})

    device, is_cuda, is_cpu = (property(lambda self, value=value: value) for value in (GPU, True, False))

    def get_device(self) -> int:
        return 0

    def is_pinned(self) -> bool:
        return False

    def pin_memory(self) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def to(self, *args: Any, **named: Any) -> Tensor:
        return _to(self, args, named)

    def cpu(self) -> Tensor:
        return self.to(CPU)

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.to(CPU).tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = self.detach().clone().requires_grad_(self.requires_grad)
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "plain"})  # a parameter is one
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnGPU({self.plain!r})"


class _Moved(torch.autograd.Function):
    """Copies a tensor to the other device; its gradient goes the other way."""

    @staticmethod
    def forward(ctx, value: Tensor, device: torch.device) -> Tensor:
        ctx.back = value.device
        copy = (value.plain if isinstance(value, OnGPU) else value).detach().clone()
        return OnGPU(copy) if device.type == "cuda" else copy

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _Moved.apply(gradient, ctx.back), None


def _to(value: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """`Tensor.to`, from one device to the other too."""
    copy = named.pop("copy", False) if (named := dict(named)) else False
    device, dtype, asynchronous, memory_format = torch._C._nn._parse_to(*args, **named)
    if args and isinstance(args[0], Tensor):
        device = args[0].device
    if device is not None and device.type != value.device.type:
        if device.type == "cpu" and asynchronous:
            raise RuntimeError("what is copied to the CPU with non_blocking may be read before it is there")
        if not (asynchronous and getattr(value, "pinned", False)):
            waits.note(f"copy to {device.type}")
        value, copy = _Moved.apply(value, device), False
    return Tensor.to(value, dtype or value.dtype, copy=copy, memory_format=memory_format or torch.preserve_format)


class _Functions(TorchFunctionMode):
    """What calls of torch with no tensor on the GPU put there, or pin; and which calls have such a tensor."""

    def __torch_function__(self, function, types, args=(), named=None):
        named = named or {}
        on_cpu = args and isinstance(args[0], Tensor) and not isinstance(args[0], OnGPU)
        if on_cpu and function in (Tensor.to, Tensor.cuda):
            return _to(args[0], args[1:] if function is Tensor.to else (GPU,), named)
        if on_cpu and function is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        if on_cpu and len(args) == 1 and not named:  # most calls: what a tensor on the CPU says of itself
            return function(*args)
        device = None if named.get("device") is None else torch.device(named["device"])
        given = any(isinstance(value, OnGPU) for value in _tensors((args, named)))
        if given and device == CPU:
            raise NotImplementedError(f"{function.__name__} of a tensor on the GPU for the CPU")
        if device is not None and device.type == "cuda":
            if named.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            if function in (torch.tensor, torch.as_tensor):
                waits.note(function.__name__)
            named, given = {**named, "device": CPU}, True
        if not given:
            return function(*args, **named)
        _within.depth = getattr(_within, "depth", 0) + 1  # the call's new tensors, if it makes any, are on the GPU
        try:
            return function(*args, **named)
        finally:
            _within.depth -= 1


# torch's own functions for nested arguments take more time than all operations of a small network


def _tensors(given: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, tuple | list):
        return []
    return [tensor for value in given for tensor in _tensors(value)]


def _changed(given: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same, with each tensor changed."""
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, dict):
        return {name: _changed(value, change) for name, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)([_changed(value, change) for value in given])
    assert not _tensors(given), f"tensors in a {type(given).__name__}"
    return given


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), named=None):
        return _run(operation, args, named or {})


def _run(operation, args, named):
    """Runs one operation on the tensors' memory; what it returns is on the GPU if a tensor of it is."""
    tensors = _tensors((args, named))
    there = {id(value.plain): value for value in tensors if isinstance(value, OnGPU)}
    name = operation.overloadpacket.__name__
    if there:
        _check(name, operation, args, named, tensors)
    plain_args, plain_named = _changed((args, named), _plain) if there else (args, named)
    on_gpu = bool(there) or getattr(_within, "depth", 0) > 0
    with _drawing() if on_gpu and torch.Tag.nondeterministic_seeded in operation.tags else nullcontext():
        found = operation(*plain_args, **plain_named)
    if name == "copy_":
        return args[0]
    if there and torch.Tag.inplace_view in operation.tags:
        with no_dispatch():
            operation(*args, **named)  # the shape of the tensor itself
    if not on_gpu or name == "_local_scalar_dense":
        return found
    return _changed(found, lambda value: there.get(id(value)) if id(value) in there else OnGPU(value))


def _plain(value: Tensor) -> Tensor:
    return value.plain if isinstance(value, OnGPU) else value


def _check(name, operation, args, named, tensors) -> None:
    """Raises what CUDA raises for tensors of two devices, and notes what the host waits for."""
    plain = [value for value in tensors if not isinstance(value, OnGPU)]
    if name in READ:
        waits.note(name)
    if name in INDEXED and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        waits.note(f"{name} by a mask")
    if name == "copy_" and plain:
        if not (named.get("non_blocking", args[2:] == (True,)) and getattr(tensors[1], "pinned", False)):
            waits.note("copy_ between the devices")
    elif name in INDEXED and plain:
        if not isinstance(args[0], OnGPU):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if name != "index" and not isinstance(args[2], OnGPU) and args[2].dim():
            raise RuntimeError(SEVERAL)
        waits.note(f"{name} by indices on the CPU")
    elif any(value.dim() or name in JOINED for value in plain) or (
        plain and operation._schema.is_mutable and tensors[0] is plain[0]
    ):
        raise RuntimeError(f"{SEVERAL} ({operation})")


@contextmanager
def _drawing() -> Iterator[None]:
    """For an operation that draws on the GPU."""
    host = torch.default_generator.get_state()
    torch.default_generator.set_state(_own.get_state())
    yield
    _own.set_state(torch.default_generator.get_state())
    torch.default_generator.set_state(host)


@contextmanager
def pretended_gpu() -> Iterator[Waits]:
    """For a block in which torch, in all threads, has a GPU."""
    run, apply, swap = threading.Thread.run, nn.Module._apply, torch.__future__.set_swap_module_params_on_conversion

    def started(thread: threading.Thread) -> None:
        with _Functions(), _Operations():
            run(thread)

    def moved(module: nn.Module, *args: Any, **named: Any) -> nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()  # of a module around this one
        swap(True)  # a parameter that moves stays the object that it is, as on a GPU
        try:
            return apply(module, *args, **named)
        finally:
            swap(before)

    autocast = torch.autocast

    def cast(device: str, *args: Any, enabled: bool = True, **named: Any) -> torch.autocast:
        return autocast("cpu", *args, enabled=enabled and device == "cuda", **named)

    def graphed(module: nn.Module, images: tuple[Tensor, ...], **_: Any) -> nn.Module:
        """As torch's: computes some times, then replaces the module's forward. What calls that runs none of the module's own
        code: no hook, and its layers keep no other results than those of the capture."""
        for _ in range(2):
            module(*images)
        forward = module.forward

        def replayed(images: Tensor) -> Tensor:
            before = {part: dict(vars(part)) for part in module.modules()}
            found = forward(images)
            for part, attributes in before.items():
                vars(part).update(attributes)
            return found

        module.forward = replayed
        return module

    bytes_free, stream = (1 << 34, 1 << 35), SimpleNamespace(is_capturing=lambda: False)
    answers = {
        "_lazy_init": None,
        "current_device": 0,
        "device": nullcontext(),
        "device_count": 1,
        "empty_cache": None,
        "get_device_name": "pretended GPU",
        "get_device_properties": SimpleNamespace(name="pretended GPU", total_memory=bytes_free[1]),
        "is_available": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": bytes_free,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "synchronize": None,
    }
    waits.counting, waits.found = False, []
    with ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        patches.enter_context(patch.object(torch.cuda, "make_graphed_callables", graphed))
        for name in ("manual_seed", "manual_seed_all"):
            patches.enter_context(patch.object(torch.cuda, name, _own.manual_seed))
        patches.enter_context(patch.object(torch.cuda, "get_rng_state", lambda *_: _own.get_state()))
        patches.enter_context(patch.object(torch.cuda, "set_rng_state", lambda state, *_: _own.set_state(state)))
        patches.enter_context(patch.object(torch.accelerator, "current_stream", lambda *_: stream))
        patches.enter_context(patch.object(torch, "autocast", cast))
        patches.enter_context(patch.object(threading.Thread, "run", started))
        patches.enter_context(patch.object(nn.Module, "_apply", moved))
        patches.enter_context(_Functions())
        patches.enter_context(_Operations())
        yield waits
