"""Checks a device's name, and sets up a process for the device."""

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from feddp.errors import InputError
from feddp.reading import short

FULL = ("error: out of memory", "ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED")  # as CUDA, cuBLAS and cuDNN say it of a GPU
BFLOAT16 = ("avx512_bf16", "bf16")  # a CPU's instructions for it: x86, ARM


class FullGPU(InputError):
    """A GPU has too little memory."""


def usable(name: str, called: str, remedy: str) -> torch.device:
    """Returns the device `name`, "cpu", "cuda" or "cuda:N", on which float32 then is float32 in this process.

    Args:
        called: the device's description in the error, for example `site A: device`.
        remedy: the remedy in the error.

    Raises:
        InputError: the device is not available.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        if is_full(error):
            remedy = "let fewer processes share the GPU"
        raise InputError(f"{called} {name} cannot be used ({str(error).splitlines()[0]}); {remedy}") from None
    _without_tf32()
    return torch.device(name)


def require_bfloat16(device: torch.device, called: str) -> None:
    """Raises InputError if the device is a GPU without bfloat16: emulated, it is slower than float32. Of a CPU it only warns.

    There, bfloat16 still takes less memory.
    """
    if device.type == "cpu" and not any(torch.cpu.get_capabilities().get(name) for name in BFLOAT16):
        logging.getLogger("feddp").warning("%s: its CPU has no instructions for bfloat16; float32 may be faster", called)
    if device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                name = torch.cuda.get_device_name(device)
                raise InputError(f"{called}: its {name} has no bfloat16; submit the job with --set precision_compute=float32")


def memory_of(site: str) -> AbstractContextManager[None]:
    """As `memory`, for what a site computes in a job."""
    lower = "submit the job with a smaller --set batch, --size or --network"
    return memory(f"site {site}: its", lower, "let fewer sites share the GPU")


@contextmanager
def memory(whose: str, remedy: str, of_gpu: str) -> Iterator[None]:
    """Names the remedy where torch lacks memory in the block.

    Args:
        whose: goes before "GPU" or "machine".
        of_gpu: another remedy, of a GPU alone.

    Raises:
        FullGPU: in place of torch's error. What the GPU's cache holds is freed for other processes.
        InputError: the same where the machine's memory is full, as torch, NumPy or Python finds.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        gpu = is_full(error)
        if not (gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
            raise
        cause: BaseException | None = error
        cleared: list[BaseException] = []
        while cause is not None and cause not in cleared:  # their frames hold the failed step's tensors
            traceback.clear_frames(cause.__traceback__)
            cleared.append(cause)
            cause = cause.__cause__ or cause.__context__
        if gpu:
            torch.cuda.empty_cache()
        what = "GPU" if gpu else "machine"
        why = short((str(error) or type(error).__name__).splitlines()[0], 200)
        remedies = f"{remedy}, or {of_gpu}" if gpu else remedy
        raise (FullGPU if gpu else InputError)(f"{whose} {what} has too little memory ({why}); {remedies}") from error


def is_full(error: BaseException) -> bool:
    """Whether a GPU's memory is full: torch has a type for its own allocator's error, but not for those of CUDA's libraries."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in FULL)


def wait(device: str) -> None:
    """Waits until the device has computed what it was given, before a time is taken."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)  # a GPU answers before it has computed


def _without_tf32() -> None:
    """On a GPU, torch's default lets convolutions round float32 to TF32, which has ten bits; an environment, products too."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def settle(device: str, threads: int) -> None:
    """Sets the CPU threads of this process and, on the CPU, deterministic algorithms; called once, before computing."""
    _without_tf32()
    torch.set_num_threads(threads)
    # as use_deterministic_algorithms, which also tells torch's compiler, and imports it for that
    torch.set_deterministic_debug_mode("error" if device == "cpu" else "default")


def dealt(names: str, sites: Sequence[str]) -> dict[str, str]:
    """Returns each site's device: those of `names`, comma-separated, dealt to the sites in their order, again and again.

    Raises:
        InputError: a device is not available, or CPU and GPU are mixed: `settle` holds for a whole process.
    """
    each = [name.strip() for name in names.split(",")]
    if not all(each):
        raise InputError(f"--device {names}: a name is empty; say cpu, cuda or cuda:N, or several, separated by commas")
    devices = [str(asked_for(name)) for name in each]
    if len({torch.device(device).type for device in devices}) > 1:
        raise InputError(f"--device {names}: name GPUs alone, or the CPU alone")
    return {site: devices[i % len(devices)] for i, site in enumerate(sites)}


def asked_for(name: str) -> torch.device:
    """Returns the device given as --device; raises InputError if it is not available."""
    return usable(name, "--device", "say cpu, cuda or cuda:N")
