"""A list of samples moves to a GPU as a whole, or not at all. "meta" is torch's device without memory: a stand-in for a GPU."""

import pytest
import torch

from feddp.data import placing
from feddp.data.loading import batches
from feddp.data.placing import placed, within

META = torch.device("meta")
BYTES = 4 * (3 + 1) * 8 * 8  # of one sample: float32, three channels and one class


def toy(count=3):
    images = torch.arange(count * 4 * 64.0).view(count, 4, 8, 8)
    return [{"image": v[:3], "mask": v[3:], "stem": str(n), "patient": "p"} for n, v in enumerate(images)]


def test_samples_move_where_all_of_them_have_room():
    samples = toy()
    moved = within(3 * BYTES, samples, META)
    assert [(s["image"].device, s["mask"].device, s["image"].shape, s["stem"]) for s in moved] == [
        (META, META, (3, 8, 8), n) for n in ("0", "1", "2")
    ]
    assert samples[0]["image"].device.type == "cpu"
    assert within(3 * BYTES - 1, samples, META) is samples


def test_what_is_there_takes_no_more_room():
    """The calibration adds δ, which has one map, 4 · 8 · 8 bytes, to samples that lie on the GPU."""
    weighted = [{**sample, "delta": torch.zeros(1, 8, 8)} for sample in within(3 * BYTES, toy(), META)]
    assert [s["delta"].device for s in within(3 * 4 * 64, weighted, META)] == [META] * 3
    assert within(3 * 4 * 64 - 1, weighted, META) is weighted


def test_batches_of_placed_samples_are_there():
    part = next(batches(within(3 * BYTES, toy(), META), 2, 0, False, META))
    assert (part["image"].device, part["image"].shape, part["mask"].device) == (META, (2, 3, 8, 8), META)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of which `free` bytes are free for all processes, and 100 of the 300 that torch keeps are unused."""

    def make(free: int) -> torch.device:
        found = {"mem_get_info": (free, 1 << 40), "memory_reserved": 300, "memory_allocated": 200}
        for name, value in found.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        monkeypatch.setattr(placing, "within", lambda room, samples, device: ("within", room, device))
        return torch.device("cuda:1")

    return make


@pytest.mark.parametrize(("free", "room"), [(1500, 100), (1499, 99), (0, 6)])
def test_a_sixteenth_of_a_gpu_s_free_memory_is_for_one_list(gpu, free, room):
    """(1500 + 100) / 16 = 100 bytes; 1599 / 16 and 100 / 16 are rounded down.

    What other processes use counts as used; what torch keeps unused counts as free."""
    device = gpu(free)
    assert placed(toy(), device) == ("within", room, device)


def test_where_another_process_was_quicker_they_stay(gpu, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    emptied, samples, device = [], toy(), gpu(1500)
    monkeypatch.setattr(placing, "within", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    assert placed(samples, device) is samples
    assert emptied == [True]


def test_on_the_cpu_they_stay():
    samples = toy()
    assert placed(samples, torch.device("cpu")) is samples
