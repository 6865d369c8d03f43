"""What a site is told when its memory is too small, and which site gets which of several devices."""

import pytest
import torch

from feddp.errors import InputError
from feddp.training.device import dealt, memory_of


def test_a_gpu_s_want_of_memory_names_the_site_and_what_to_lower():
    text = "CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total capacity of ..."
    with pytest.raises(InputError) as raised, memory_of("A"):
        raise torch.OutOfMemoryError(text)
    assert str(raised.value) == (
        "site A: its GPU has too little memory (CUDA out of memory. Tried to allocate 20.00 MiB.); submit the job with a"
        " smaller --set batch, --size or --network, or let fewer sites share the GPU"
    )


def test_a_machine_s_want_of_memory_does_too():
    """torch's own error for 2^62 numbers, which no machine has room for."""
    with pytest.raises(InputError, match="site A: its machine has too little memory .*--size or --network$"), memory_of("A"):
        torch.empty(2**60, dtype=torch.float32)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("can't allocate memory")])
def test_other_errors_pass(error):
    with pytest.raises(type(error), match=str(error)), memory_of("A"):
        raise error


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("cpu", ["cpu", "cpu", "cpu"]),
        ("cpu,cpu:0", ["cpu", "cpu:0", "cpu"]),
        ("cpu:0, cpu", ["cpu:0", "cpu", "cpu:0"]),
        ("cpu,cpu,cpu:0,cpu:0", ["cpu", "cpu", "cpu:0"]),
    ],
)
def test_devices_are_dealt_to_the_sites_in_turn(names, wanted):
    """Site i gets device i modulo their number: of two, sites 0 and 2 the first; of four, the last gets none of three sites."""
    assert dealt(names, ["B", "A", "C"]) == dict(zip("BAC", wanted, strict=True))


@pytest.mark.parametrize(("names", "wrong"), [("cpu,cuda:99", "cuda:99"), ("cpu,,cpu", ""), ("cuda:99,cpu", "cuda:99")])
def test_each_of_several_devices_must_be_there(names, wrong):
    with pytest.raises(InputError, match=rf"^--device {wrong} cannot be used \(.*\); say cpu, cuda or cuda:N$"):
        dealt(names, ["A"])
