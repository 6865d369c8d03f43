"""The device that somebody named, and a process's settings for it."""

import torch

from feddp.errors import InputError


def usable(name: str, called: str, remedy: str) -> torch.device:
    """The device `name`: "cpu", "cuda" or "cuda:N".

    Args:
        called: what the error calls it, `site A: device` say.
        remedy: what the error says to do.

    Raises:
        InputError: it is not there.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"{called} {name} cannot be used ({str(error).splitlines()[0]}); {remedy}") from None
    return torch.device(name)


def settle(device: str, threads: int) -> None:
    """Sets this process up, once, before it computes: its CPU threads, and on the CPU deterministic algorithms."""
    torch.set_num_threads(threads)
    if device == "cpu":
        torch.use_deterministic_algorithms(True)


def asked_for(name: str) -> torch.device:
    """The device of a command's --device. InputError where it is not there."""
    return usable(name, "--device", "say cpu, cuda or cuda:N")
