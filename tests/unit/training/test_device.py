"""What a site is told when its memory is too small."""

import pytest
import torch

from feddp.errors import InputError
from feddp.training.device import memory_of


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
