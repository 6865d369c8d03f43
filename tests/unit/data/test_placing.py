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


@pytest.mark.parametrize("free", [8 * 3 * BYTES, 8 * 3 * BYTES - 1])
def test_an_eighth_of_a_gpu_s_free_memory_is_for_one_list(monkeypatch, free):
    """The remaining seven are for training; `total` does not matter, because other processes may use the GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    rooms = []
    monkeypatch.setattr(placing, "within", lambda room, samples, device: rooms.append((room, device)))
    placed(toy(), torch.device("cuda:1"))
    assert rooms == [(free // 8, torch.device("cuda:1"))]


def test_on_the_cpu_they_stay():
    samples = toy()
    assert placed(samples, torch.device("cpu")) is samples
