"""Samples are what the PNGs say; an epoch's batches follow from their seed and from nothing else."""

import random

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from PIL import Image

from feddp.data.folder import SiteFolder, write_site
from feddp.data.loading import batches, load, network_input
from feddp.errors import FedDPError

REQUIRED = {"name": "toy", "channels": 3, "classes": ["disc", "cup"], "labels": "nested"}


def site(path, metadata=REQUIRED, count=7):
    chance = np.random.default_rng(0)
    rows = [
        (
            f"i{n}",
            f"p{n}",
            "train",
            chance.integers(0, 256, (8, 8, 3), np.uint8),
            chance.integers(0, 3, (8, 8), np.uint8),
        )
        for n in range(count)
    ]
    write_site(path, metadata, rows)
    return SiteFolder.open(path), rows


def toy(count=7, size=4):
    """Samples whose every pixel is distinct, over all tensors: what was moved where can be read off the values."""
    values = torch.arange(count * 3 * size * size, dtype=torch.float32).view(count, 3, size, size)
    return [{"image": v, "mask": v[:1] * 2, "delta": v[1:] + 0.5, "stem": str(n)} for n, v in enumerate(values)]


def epoch(samples, seed, augment=True, batch=3):
    return list(batches(samples, batch, seed, augment))


def same(left, right):
    return len(left) == len(right) and all(
        a["stem"] == b["stem"] and all(torch.equal(a[k], b[k]) for k in ("image", "mask"))
        for a, b in zip(left, right, strict=True)
    )


def test_at_native_size_pixels_are_normalised_and_classes_nested(tmp_path):
    """size 8 of 8: no resampling, so image = (x - mean) / std of each channel (population std); map c is mask >= c."""
    folder, rows = site(tmp_path / "A")
    samples = load(folder, "train", 8)
    assert [(sample["stem"], sample["patient"]) for sample in samples] == [row[:2] for row in rows]
    for sample, (*_, image, mask) in zip(samples, rows, strict=True):
        x = image.astype(np.float64).transpose(2, 0, 1)
        expected = (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True)
        assert np.allclose(sample["image"].numpy(), expected, atol=1e-5)
        assert np.array_equal(sample["mask"].numpy(), np.stack([mask >= 1, mask >= 2]).astype(np.float32))
        for key in ("image", "mask"):
            assert sample[key].dtype == torch.float32
            assert not isinstance(sample[key], MetaTensor)


def test_scaled_pixels_are_divided_by_255(tmp_path):
    """At native size x / 255, whatever the image's mean; of a flat image too, whose z-scores are 0."""
    folder, rows = site(tmp_path / "A")
    for sample, (*_, image, _) in zip(load(folder, "train", 8, "scale"), rows, strict=True):
        assert np.allclose(sample["image"].numpy(), image.astype(np.float64).transpose(2, 0, 1) / 255, atol=1e-6)
    flat = np.full((2, 2), 51, np.uint8)
    assert network_input(flat, 2, "scale").flatten().tolist() == pytest.approx([0.2] * 4)
    assert network_input(flat, 2, "zscore").flatten().tolist() == [0] * 4


def test_exclusive_labels_are_one_map_a_value(tmp_path):
    folder, rows = site(tmp_path / "A", REQUIRED | {"labels": "exclusive"})
    for sample, (*_, mask) in zip(load(folder, "train", 8), rows, strict=True):
        assert np.array_equal(sample["mask"].numpy(), np.stack([mask == 1, mask == 2]).astype(np.float32))


def test_resized_mask_stays_binary_and_in_place(tmp_path):
    """A 4x4 mask whose lower right quarter is 1, doubled: every pixel becomes 2x2, its quarter 4x4 of 8x8."""
    mask = np.zeros((4, 4), np.uint8)
    mask[2:, 2:] = 1
    write_site(tmp_path / "A", REQUIRED, [("a", "p", "test", np.zeros((4, 4, 3), np.uint8), mask)])
    (sample,) = load(SiteFolder.open(tmp_path / "A"), "test", 8)
    expected = torch.zeros(8, 8)
    expected[4:, 4:] = 1
    assert torch.equal(sample["mask"][0], expected)
    assert torch.equal(sample["image"], torch.zeros(3, 8, 8))  # a channel without contrast


def test_a_shrunk_mask_is_read_at_pixel_centres(tmp_path):
    """6 -> 2: the new centres, 0.5 and 1.5 of 2, lie at 1.5 and 4.5 of 6, in pixels 1 and 4 and not in 0 and 3."""
    mask = np.zeros((6, 6), np.uint8)
    mask[np.ix_([1, 4], [1, 4])] = 2
    write_site(tmp_path / "A", REQUIRED, [("a", "p", "test", np.zeros((6, 6, 3), np.uint8), mask)])
    (sample,) = load(SiteFolder.open(tmp_path / "A"), "test", 2)
    assert torch.equal(sample["mask"], torch.ones(2, 2, 2))


def test_grey_images_and_other_shapes(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (6, 10), np.uint8)
    metadata = {"name": "grey", "channels": 1, "classes": ["a"], "labels": "nested"}
    write_site(tmp_path / "A", metadata, [("a", "p", "val", image, np.zeros((6, 10), np.uint8))])
    (sample,) = load(SiteFolder.open(tmp_path / "A"), "val", 16)
    assert (sample["image"].shape, sample["mask"].shape) == ((1, 16, 16), (1, 16, 16))
    assert abs(sample["image"].mean()) < 1e-5
    assert abs(sample["image"].std(correction=0) - 1) < 1e-4
    assert load(SiteFolder.open(tmp_path / "A"), "train", 16) == []


@pytest.mark.parametrize(
    ("file", "pixels", "message"),
    [
        ("masks/i3.png", np.full((8, 8), 3, np.uint8), r"value\(s\) 3"),
        ("masks/i3.png", np.zeros((8, 8, 3), np.uint8), "3 channel"),
        ("masks/i3.png", np.zeros((8, 9), np.uint8), "its mask 9 x 8"),
        ("images/i3.png", np.zeros((8, 8), np.uint8), "dataset.json has 3"),
        ("images/i3.png", None, "is missing"),
    ],
)
def test_a_bad_png_is_refused_by_name(tmp_path, file, pixels, message):
    folder, _ = site(tmp_path / "A")
    (folder.path / file).unlink()
    if pixels is not None:
        Image.fromarray(pixels).save(folder.path / file)
    with pytest.raises(FedDPError, match=message) as error:
        load(folder, "train", 8)
    assert "i3.png" in str(error.value)


def test_same_seed_same_bits_other_seed_other_order():
    samples = toy()
    assert same(epoch(samples, 5), epoch(samples, 5))
    stems = {tuple(s for b in epoch(samples, seed, batch=7) for s in b["stem"]) for seed in range(6)}
    assert len(stems) == 6  # 7! orders: six equal ones by chance has odds of about 15 / 5040


def test_the_order_does_not_depend_on_augmentation():
    samples = toy()
    assert [b["stem"] for b in epoch(samples, 5, True)] == [b["stem"] for b in epoch(samples, 5, False)]


def test_no_global_generator_is_read_or_advanced():
    samples = toy()
    states = []
    for before in (1, 2):
        random.seed(before), np.random.seed(before), torch.manual_seed(before)
        untouched = random.random(), np.random.random(), torch.rand(1).item()
        random.seed(before), np.random.seed(before), torch.manual_seed(before)
        states.append(epoch(samples, 5))
        assert (random.random(), np.random.random(), torch.rand(1).item()) == untouched
    assert same(*states)


def test_every_tensor_is_warped_alike_and_none_is_lost():
    """mask = 2 image[0] and delta = image[1:] + 0.5 by construction; a common warp keeps that, pixel by pixel.

    Each of the eight symmetries of a square has 1/8 of 64 draws; one is missed with odds below 8 (1 - 1/8)^64 < 0.2 %.
    """
    samples = toy(64)
    met = set()
    for batch in epoch(samples, 0):
        assert torch.equal(batch["mask"], 2 * batch["image"][:, :1])
        assert torch.equal(batch["delta"], batch["image"][:, 1:] + 0.5)
        assert not isinstance(batch["image"], MetaTensor)
        for stem, image in zip(batch["stem"], batch["image"], strict=True):
            original = samples[int(stem)]["image"]
            assert torch.equal(image.flatten().sort().values, original.flatten().sort().values)
            met |= {
                (turns, flip)
                for turns in range(4)
                for flip in (False, True)
                if torch.equal(image, torch.rot90(original.flip(1) if flip else original, turns, (1, 2)))
            }
    assert len(met) == 8


def test_samples_are_not_modified():
    samples = toy()
    before = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in samples]
    for batch in epoch(samples, 1):
        batch["image"].zero_()
    for now, then in zip(samples, before, strict=True):
        assert now.keys() == then.keys()
        assert all(torch.equal(now[k], then[k]) for k in ("image", "mask", "delta"))
        assert type(now["image"]) is torch.Tensor


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [
        (7, 3, [3, 3]),  # 7 = 3 + 3 + 1: the lone one is dropped
        (8, 3, [3, 3, 2]),
        (6, 3, [3, 3]),
        (1, 3, [1]),  # there is no other
        (3, 1, [1, 1, 1]),  # asked for
        (0, 3, []),
    ],
)
def test_a_lone_last_sample_is_dropped_in_training_only(count, batch, sizes):
    samples = toy(count) if count else []
    assert [len(b["stem"]) for b in epoch(samples, 0, True, batch)] == sizes
    evaluated = epoch(samples, None, False, batch)
    assert [s for b in evaluated for s in b["stem"]] == [s["stem"] for s in samples]


def test_the_dropped_sample_changes_with_the_seed():
    samples = toy()
    dropped = [{s["stem"] for s in samples} - {s for b in epoch(samples, n) for s in b["stem"]} for n in range(20)]
    assert all(len(one) == 1 for one in dropped)
    assert len(set.union(*dropped)) > 1


def test_senseless_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="at least 1"):
        batches(toy(), 0, 0, False)
    with pytest.raises(ValueError, match="needs a seed"):
        batches(toy(), 2, None, True)
