"""`feddp export --to onnx`: onnxruntime alone gives what `feddp predict` writes, for every network and every added layer."""

import json
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from benchmarks.small import FEW, shallow
from feddp.data.loading import network_input
from feddp.data.pixels import scaled
from feddp.data.preparation import KEY, Preparation
from feddp.errors import FedDPError, InputError
from feddp.export.graph import Graph, _scaled
from feddp.export.onnx_file import FILE, PROPERTY, write
from feddp.networks import LAYERS, NETWORKS, build
from feddp.networks.weights import load_personal, save_network
from feddp.run.images import Reading
from feddp.run.predict import PredictOptions, predict

PLAIN = "unet"
VIRTUAL = {"virtual": 4, "temperature": 0.1, "nested": 1, "paa": 1}
OPTIONS = {"local_calibration": {"sites": 3}, "lora": {"rank": 2}, "virtual_classes": VIRTUAL}
# with as few blocks and channels, a network of the values has the layers of the one of its key
ALIKE = {"pvt_v2_b0-fpn": ("pvt_v2_b1-fpn", "pvt_v2_b2-fpn"), "resnet18-fpn": ("resnet34-fpn",)}
EXPORTED = [name for name in NETWORKS if name not in sum(ALIKE.values(), ())]
# (network, layers, classes, labels, channels, normalise): each value of each at least once, each network and layer
CASES = [
    (name, {}, 1 + i % 2, ("nested", "exclusive")[i % 4 // 2], (3, 1)[i % 3 // 2], "zscore") for i, name in enumerate(EXPORTED)
]
CASES += [("pvt", {name: OPTIONS.get(name, {})}, 2, "nested", 3, "scale") for name in LAYERS]
ONE = (1, 1, 1, 1)  # a block of each stage
LESS = {"pvt_v2_b0_s-fpn": FEW | {"depths": ONE}, "resnet50-fpn": {"layers": ONE}}


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    """The variants of a whole PVTv2 and a whole ResNet have few blocks, the former few channels too; so has the PVTv2 that gets
    the layers. No kind of operation depends on either."""
    for name, less in LESS.items():
        monkeypatch.setitem(NETWORKS, name, partial(NETWORKS[name], **less))
    monkeypatch.setitem(NETWORKS, "pvt", shallow)


@pytest.mark.parametrize("name", ALIKE)
def test_the_other_networks_differ_from_one_that_is_exported_in_numbers_alone(name):
    """Every layer with its options, as torch writes it: with as many blocks and channels the networks are one."""
    less = FEW | {"depths": ONE} if name.startswith("pvt") else {"layers": ONE}
    written = str(NETWORKS[name](3, 1, False, **less))
    assert [str(NETWORKS[other](3, 1, False, **less)) for other in ALIKE[name]] == [written] * len(ALIKE[name])
    assert str(NETWORKS["resnet50-fpn"](3, 1, False, layers=ONE)) != written, "the control"


def saved(folder, network=PLAIN, layers=None, classes=1, labels="nested", channels=3, normalise="zscore", size=32, **texts):
    """A network whose values a training could have left: the batch normalisations have statistics, no head is 0."""
    module = build(network, channels, classes, seed=0, layers=layers or {})  # as what reads the file builds it: once
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name.endswith("running_var") or value.is_floating_point() and not value.any():
                value.add_(torch.rand_like(value).mul_(0.2))
    if "local_calibration" in (layers or {}):
        module.embedding.set(1)
        own = module.segmentation_head[0]
        module.calibrator.receive(
            {0: {"weight": own.weight * 2, "bias": own.bias}, 2: {"weight": -own.weight, "bias": own.bias}}
        )
    biases = [
        name
        for name in ("calibrator.out.bias", "personal_head.0.bias", "segmentation_head.0.bias")
        if name in module.state_dict()
    ]
    with torch.no_grad():  # about half of the pixels on either side of the threshold
        logits = module.eval()(torch.randn(1, channels, size, size))
        for name in biases[:1]:
            module.state_dict()[name].sub_(logits[0].flatten(1).median(dim=1).values)
    texts |= {
        "network": network,
        "channels": str(channels),
        "classes": json.dumps(["disc", "cup"][:classes]),
        "size": str(size),
    }
    texts |= {"labels": labels, "normalise": normalise, "method": "fedavg", "layers": json.dumps(layers or {})}
    save_network(folder / "network.safetensors", module.state_dict(), texts)
    return folder / "network.safetensors"


@pytest.mark.parametrize(("network", "layers", "classes", "labels", "channels", "normalise"), CASES)
def test_onnxruntime_gives_the_masks_of_predict(tmp_path, network, layers, classes, labels, channels, normalise):
    """Images of another size than the network's, alone and three at once: probabilities as computed here step by step from
    the package's own parts, and the masks that `feddp predict` writes."""
    file = saved(tmp_path, network, layers, classes, labels, channels, normalise)
    onnx_file = write(file, tmp_path / "out")
    session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).integers(0, 256, (3, 45, 38, channels), np.uint8)
    (tmp_path / "images").mkdir()
    for name, image in zip("abc", images, strict=True):
        Image.fromarray(image.squeeze()).save(tmp_path / f"images/{name}.png")
    predict(file, tmp_path / "images", tmp_path / "masks")
    written = np.stack([np.asarray(Image.open(tmp_path / f"masks/{name}.png")) for name in "abc"])
    module, expected = load_personal(file), []
    for image in images:
        with torch.no_grad():
            logits = module(network_input(image.squeeze(), 32, normalise)[None])
        expected.append(torch.nn.functional.interpolate(logits, (45, 38), mode="bilinear").sigmoid()[0].numpy())
    if labels == "exclusive":  # where both classes are found, the more probable one counts
        both = np.stack(expected)
        assert (written == np.where(both.max(axis=1) > 0.5, both.argmax(axis=1) + 1, 0)).mean() >= 0.9999
        assert classes == 1 or ((both > 0.5).all(axis=1) & (both[:, 0] > both[:, 1])).any()
    for some in (slice(0, 1), slice(0, 3)):
        probabilities, masks = session.run(None, {"image": images[some]})
        assert np.abs(probabilities - np.stack(expected)[some]).max() <= 1e-4
        assert (masks == written[some]).mean() >= 0.9999
    assert 0 < written.mean() < classes, "masks of both"
    weights = sum(value.nbytes for value in module.state_dict().values())
    assert onnx_file.stat().st_size < 1.02 * weights + 400_000
    assert [path.name for path in onnx_file.parent.iterdir()] == [FILE], "no data beside"


TRAINED = Preparation(size=24)


@pytest.fixture(scope="module")
def scaling(tmp_path_factory):
    """The file of a network whose training images were prepared, and its ONNX file, for images of every size."""
    folder = tmp_path_factory.mktemp("scaling")
    file = saved(folder, channels=1, **{KEY: TRAINED.text})
    return file, write(file, folder / "out")


@pytest.mark.parametrize("shape", [(45, 38), (24, 24), (96, 100), (20, 24)])
def test_a_graph_scales_as_the_training_images_were_prepared(scaling, tmp_path, shape):
    """As Pillow does, which rounds after each of its two passes: by at most half a grey level each, and the second one takes
    means of the first. `feddp predict` uses Pillow, as `feddp data prepare` did."""
    file, onnx_file = scaling
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    theirs = scaled(image, 24)
    ours = _scaled(torch.from_numpy(image)[None, None].float(), 24)[0, 0].numpy()
    assert np.abs(ours - theirs).max() <= (1.0 if shape != (24, 24) else 0.0)
    assert ours.shape == (24, 24)
    session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])
    probabilities, masks = session.run(None, {"image": image[None, :, :, None]})
    with torch.no_grad():
        logits = load_personal(file)(network_input(ours, 32)[None])
    expected = torch.nn.functional.interpolate(logits, shape, mode="bilinear").sigmoid().numpy()
    assert np.abs(probabilities - expected).max() <= 1e-4
    (tmp_path / "images").mkdir()
    Image.fromarray(image).save(tmp_path / "images/a.png")
    predict(file, tmp_path / "images", tmp_path / "masks", options=PredictOptions(Reading(trained=TRAINED)))
    assert (np.asarray(Image.open(tmp_path / "masks/a.png")) == masks[0]).mean() > 0.97, "what a grey level changes"
    (entry,) = onnx.load(str(onnx_file)).metadata_props
    assert json.loads(entry.value)["inside"].startswith("averaging resize to 24, bilinear resize to size, zscore")


def test_the_file_says_what_it_is_and_not_where_it_was_made(tmp_path):
    file = write(saved(tmp_path, classes=2, labels="exclusive"), tmp_path / "out")
    (entry,) = onnx.load(str(file)).metadata_props
    said = json.loads(entry.value)
    assert entry.key == PROPERTY
    expected = {"classes": ["disc", "cup"], "labels": "exclusive", "size": 32, "normalise": "zscore", "threshold": 0.5}
    assert {name: said[name] for name in expected} == expected
    assert str(tmp_path).encode() not in file.read_bytes()
    assert b"feddp/networks" not in file.read_bytes()


def test_an_image_without_contrast_becomes_zero(tmp_path):
    """As `network_input` says: what the network makes of zeros. Resizing may leave 1e-5 of noise in a channel of one value,
    which a division by its deviation would make an image of."""
    file = saved(tmp_path)
    session = onnxruntime.InferenceSession(str(write(file, tmp_path / "out")), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        logits = torch.nn.functional.interpolate(load_personal(file)(torch.zeros(1, 3, 32, 32)), (45, 38), mode="bilinear")
    for colour in ((77, 201, 3), (255, 0, 129)):
        probabilities, _ = session.run(None, {"image": np.full((1, 45, 38, 3), colour, np.uint8)})
        assert np.abs(probabilities - logits.sigmoid().numpy()).max() < 1e-4
    graph, _ = Graph.of(file)
    assert graph._normalised(graph._resized(torch.full((1, 3, 45, 38), 77.3), (32, 32))).abs().max() < 1e-3


def test_what_differs_is_not_exported(tmp_path):
    """Probabilities that are 0.001 off, or one clear pixel."""
    graph, _ = Graph.of(saved(tmp_path))

    def exported(images, off, pixels):
        with torch.no_grad():
            probabilities, mask = (tensor.numpy() for tensor in graph(torch.from_numpy(images)))
        clear = np.flatnonzero(np.abs(probabilities - 0.5) > 1e-3)[:pixels]
        mask.flat[clear] = 1 - mask.flat[clear]
        return probabilities + np.float32(off), mask

    graph.verify(lambda images: exported(images, 0, 0), tmp_path / FILE)
    for wrong in ((0.001, 0), (0, 1)):
        with pytest.raises(FedDPError, match="differ by"):
            graph.verify(lambda images, wrong=wrong: exported(images, *wrong), tmp_path / FILE)


def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, feddp):
    (tmp_path / "bad.safetensors").write_bytes(b"no network")
    code, _, said = feddp("export", "--network", tmp_path / "bad.safetensors", "--to", "onnx", "--out", tmp_path / "out")
    assert (code, len(said.strip().splitlines())) == (2, 1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError):
        write(tmp_path / "nowhere.safetensors", tmp_path / "out")
