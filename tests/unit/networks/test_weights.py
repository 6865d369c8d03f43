"""Files of weights: foreign names, our own, and all the ways a file can be wrong."""

import copy
import json
import os
import pickle
import re

import pytest
import timm
import torch
from safetensors.torch import save_file

from feddp.errors import FedDPError
from feddp.networks import DEFAULT, build
from feddp.networks.weights import load_checkpoint, load_personal, read_network, save_network

METADATA = {"network": DEFAULT, "channels": "3", "classes": '["disc", "cup"]'}


@pytest.fixture(scope="module")
def imagenet():
    """A timm classifier that stands for pretrained weights."""
    torch.manual_seed(3)
    return timm.create_model("pvt_v2_b0", num_classes=7).eval()


@pytest.fixture(scope="module")
def built():
    return build(DEFAULT, 3, 2, seed=0).eval()


@pytest.fixture
def network(built):
    return copy.deepcopy(built)  # building takes a second


def as_timm(state):
    return state


def as_published(state):
    """The names of github.com/whai362/PVT, classification/pvt_v2.py: patch_embed{1-4}, block{1-4}, norm{1-4},
    mlp.dwconv.dwconv, head; inside a block (attn.q, attn.kv, attn.sr, attn.norm, mlp.fc1) they are timm's."""

    def rename(name):
        name = re.sub(r"^patch_embed\.", "patch_embed1.", name)
        name = re.sub(r"^stages\.(\d)\.downsample\.", lambda m: f"patch_embed{int(m[1]) + 1}.", name)
        name = re.sub(r"^stages\.(\d)\.blocks\.", lambda m: f"block{int(m[1]) + 1}.", name)
        name = re.sub(r"^stages\.(\d)\.norm\.", lambda m: f"norm{int(m[1]) + 1}.", name)
        return name.replace(".dwconv.", ".dwconv.dwconv.")

    return {rename(name): tensor for name, tensor in state.items()}


def split(state):
    """Key and value in tensors of their own."""
    halves = {}
    for name, tensor in state.items():
        if ".kv." in name:
            halves[name.replace(".kv.", ".k.")], halves[name.replace(".kv.", ".v.")] = tensor.chunk(2)
        else:
            halves[name] = tensor
    return halves


def test_the_published_names_are_what_we_think(imagenet):
    names = as_published(imagenet.state_dict())
    expected = {
        "patch_embed1.proj.weight",
        "patch_embed4.norm.bias",
        "block1.0.attn.kv.weight",
        "block2.1.attn.sr.bias",
    }
    assert expected | {"block3.1.mlp.dwconv.dwconv.weight", "norm1.weight", "norm4.bias", "head.weight"} <= names.keys()
    assert not any(name.startswith("stages") for name in names)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("parts", [dict, split], ids=["fused", "split"])
@pytest.mark.parametrize("names", [as_timm, as_published])
def test_encoder_weights_give_timm_s_features(imagenet, network, tmp_path, names, parts, suffix):
    """The classifier's own features at strides 4 to 32, after loading its weights; decoder and head keep theirs."""
    path = tmp_path / f"weights{suffix}"
    state = {name: tensor.clone() for name, tensor in parts(names(imagenet.state_dict())).items()}
    (save_file if suffix == ".safetensors" else torch.save)(state, path)
    head = network.segmentation_head[0].weight.clone()
    load_checkpoint(network, path)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = imagenet.forward_intermediates(image, intermediates_only=True), network.encoder(image)[2:]
    for theirs, ours in zip(expected, got, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(network.segmentation_head[0].weight, head)


def adapted(of):
    """A network with LoRA's adapters, whose second matrices are `of`: 0 as they start, or anything else."""
    network = build(DEFAULT, 3, 2, seed=1, layers={"lora": {"rank": 2}}).eval()
    for name, parameter in network.named_parameters():
        if name.endswith("lora_b.weight"):
            torch.nn.init.constant_(parameter, of)
    return network


def test_files_without_adapters_fit_a_network_with_adapters(imagenet, network, tmp_path):
    """A whole network's file, and ImageNet weights: the adapters keep their start, so that the function is the file's."""
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    save_network(tmp_path / "n.safetensors", network.state_dict(), METADATA)
    torch.save(imagenet.state_dict(), tmp_path / "i.pth")
    whole, encoder = adapted(0.0), adapted(0.0)
    started = {name: value.clone() for name, value in whole.state_dict().items() if ".lora_" in name}
    load_checkpoint(whole, tmp_path / "n.safetensors")
    load_checkpoint(encoder, tmp_path / "i.pth")
    with torch.no_grad():
        assert torch.equal(whole(image), network(image))
        theirs, ours = imagenet.forward_intermediates(image, intermediates_only=True), encoder.encoder(image)[2:]
    torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-4, rtol=1e-4)
    assert len(started) == 48
    assert all(
        torch.equal(value, network.state_dict()[name]) for network in (whole, encoder) for name, value in started.items()
    )


def test_adapters_of_a_file_are_loaded_all_or_none(tmp_path):
    state = adapted(0.5).state_dict()
    network = adapted(0.0)
    torch.save(state, tmp_path / "a.pth")
    load_checkpoint(network, tmp_path / "a.pth")
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    del state["encoder.model.stages_0.blocks.0.attn.q.lora_b.weight"]
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(FedDPError, match=r"does not fit the network.*attn\.q\.lora_b\.weight \(missing\)"):
        load_checkpoint(network, tmp_path / "a.pth")


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_training_checkpoints_are_unwrapped(imagenet, network, tmp_path, wrapper):
    torch.save({wrapper: imagenet.state_dict(), "epoch": 300}, tmp_path / "c.pth")
    load_checkpoint(network, tmp_path / "c.pth")
    assert torch.equal(network.encoder.model.patch_embed.proj.weight, imagenet.patch_embed.proj.weight)


def test_a_convolutional_encoder_loads_with_its_buffers(tmp_path):
    network, classifier = build("resnet18-fpn", 3, 1, seed=0), timm.create_model("resnet18", num_classes=7)
    classifier.bn1.running_mean.fill_(4)
    torch.save(classifier.state_dict(), tmp_path / "r.pth")
    load_checkpoint(network, tmp_path / "r.pth")
    loaded = network.encoder.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in classifier.state_dict().items() if name in loaded)
    assert loaded["bn1.running_mean"].mean() == 4


def test_our_own_file_loads_whole(network, tmp_path):
    other = build(DEFAULT, 3, 2, seed=1).state_dict()
    save_network(tmp_path / "own.safetensors", other, METADATA)
    load_checkpoint(network, tmp_path / "own.safetensors")
    assert all(torch.equal(tensor, other[name]) for name, tensor in network.state_dict().items())


def lose(state):
    state.pop("stages.0.norm.weight")


def add(state):
    state["header.weight"] = torch.zeros(1)  # begins like the classifier, and is not it


def grow(state):
    state["norm_pre.weight"] = torch.zeros(1)
    state["stages.0.norm.bias"] = torch.zeros(33)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose, r"stages_0\.norm\.weight \(missing\)"),
        (add, r"header\.weight \(unexpected\)"),
        (grow, r"norm_pre.weight \(unexpected\), stages_0\.norm\.bias \(\(33,\) in the file, \(32,\) in the network\)"),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_loaded(imagenet, network, tmp_path, damage, message):
    state = dict(imagenet.state_dict())
    damage(state)
    torch.save(state, tmp_path / "c.pth")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(FedDPError, match=r"c\.pth does not fit the network, nothing was loaded: " + message):
        load_checkpoint(network, tmp_path / "c.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_many_mismatches_are_counted(network, tmp_path):
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "r.pth")
    with pytest.raises(FedDPError, match=r"(\S+ \(missing\)(, )?){5} and \d+ more; name another file$"):
        load_checkpoint(network, tmp_path / "r.pth")


def test_colour_weights_do_not_fit_grey_images(imagenet, tmp_path):
    torch.save(imagenet.state_dict(), tmp_path / "c.pth")
    expected = r"patch_embed\.proj\.weight \(\(32, 3, 7, 7\) in the file, \(32, 1, 7, 7\) in the network\)"
    with pytest.raises(FedDPError, match=expected):
        load_checkpoint(build(DEFAULT, 1, 1, seed=0), tmp_path / "c.pth")


class Malice:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("name", ["bad.pth", "bad.safetensors"])
@pytest.mark.parametrize(
    "content",
    [b"", b"not a checkpoint", bytes(range(64)), pickle.dumps(Malice(), protocol=2)],
    ids=["empty", "text", "bytes", "code"],
)
def test_unreadable_files_are_refused_and_never_run(network, tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FedDPError, match=rf"{name}: cannot be read as tensors"):
        load_checkpoint(network, tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_pickled_networks_are_refused(network, tmp_path):
    torch.save(network, tmp_path / "whole.pth")
    with pytest.raises(FedDPError, match="A file that contains code is never loaded: save it again as .safetensors"):
        load_checkpoint(network, tmp_path / "whole.pth")


def test_a_file_of_other_things_is_refused(network, tmp_path):
    torch.save({"epoch": 3}, tmp_path / "c.pth")
    with pytest.raises(FedDPError, match=r"c\.pth is not a checkpoint"):
        load_checkpoint(network, tmp_path / "c.pth")


@pytest.mark.parametrize(
    "odd",
    [
        lambda value: value.to_sparse(),
        lambda value: value.to("meta"),
        lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        lambda value: value.to(torch.complex64),
    ],
    ids=["sparse", "without values", "quantized", "complex"],
)
@pytest.mark.filterwarnings("ignore")  # torch's, of types that it will drop
def test_tensors_that_a_network_cannot_take_are_refused(network, tmp_path, odd):
    """Their names and shapes fit. torch refuses the first three, with a RuntimeError, and cuts the imaginary part."""
    state = network.state_dict()
    first = next(iter(state))
    torch.save(state | {first: odd(state[first])}, tmp_path / "c.pth")
    with pytest.raises(FedDPError, match=r"c\.pth is not a checkpoint"):
        load_checkpoint(network, tmp_path / "c.pth")


def test_a_name_that_is_no_text_is_refused(network, tmp_path):
    torch.save({**network.state_dict(), 1: torch.zeros(1)}, tmp_path / "c.pth")
    with pytest.raises(FedDPError, match=r"c\.pth is not a checkpoint"):
        load_checkpoint(network, tmp_path / "c.pth")


def test_a_key_and_value_of_one_number_is_a_mismatch(imagenet, network, tmp_path):
    name = "stages.0.blocks.0.attn.kv.weight"
    save_file(imagenet.state_dict() | {name: torch.tensor(1.0)}, tmp_path / "c.safetensors")
    with pytest.raises(FedDPError, match=r"attn\.k\.weight \(missing\).*attn\.kv\.weight \(unexpected\)"):
        load_checkpoint(network, tmp_path / "c.safetensors")


@pytest.mark.parametrize("name", ["absent.pth", "absent.safetensors"])
def test_a_file_that_is_not_there(network, tmp_path, name):
    with pytest.raises(FedDPError, match=f"{name} does not exist"):
        load_checkpoint(network, tmp_path / name)


def test_encoder_weights_need_an_encoder(tmp_path):
    torch.save({"x": torch.zeros(1)}, tmp_path / "c.pth")
    with pytest.raises(FedDPError, match="Linear, and that network has no encoder for ImageNet weights"):
        load_checkpoint(torch.nn.Linear(1, 1), tmp_path / "c.pth")


def test_saving_returns_the_same_bits_and_text(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    state = {"strided": base.T, "shared": base, "half": base.bfloat16(), "counter": torch.tensor(3)}
    save_network(tmp_path / "new" / "n.safetensors", state, {"round": "7"})
    loaded, metadata = read_network(tmp_path / "new" / "n.safetensors")
    assert metadata == {"round": "7"}
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) and loaded[name].dtype == state[name].dtype for name in state)


def test_a_crash_while_saving_keeps_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "n.safetensors"
    save_network(path, {"a": torch.zeros(1)}, {})

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save_network(path, {"a": torch.ones(1)}, {})
    assert read_network(path)[0]["a"].item() == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_personal_network_comes_back_ready(network, tmp_path):
    save_network(tmp_path / "p.safetensors", network.state_dict(), METADATA)
    random = torch.get_rng_state()
    personal = load_personal(tmp_path / "p.safetensors")
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module.training for module in personal.modules())
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(personal(image), network(image))


@pytest.mark.parametrize(("layers", "named"), [({"personal_head": {}}, "personal_head.0"), ({"lora": {"rank": 3}}, "lora_b")])
def test_a_personal_network_comes_back_with_its_layers(tmp_path, layers, named):
    """As `feddp predict` loads it: from the file alone, with another start than 0 in what the method adds."""
    network = build(DEFAULT, 3, 2, seed=0, layers=layers).eval()
    for name, parameter in network.named_parameters():
        if named in name:
            torch.nn.init.constant_(parameter, 0.5)
    save_network(tmp_path / "p.safetensors", network.state_dict(), {**METADATA, "layers": json.dumps(layers)})
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = load_personal(tmp_path / "p.safetensors")(image)
        assert torch.equal(found, network(image))
        assert not torch.equal(found, build(DEFAULT, 3, 2, seed=0).eval()(image))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": '["disc"]'}, r"segmentation_head\.0\.weight \(\(2, 128, 1, 1\) in the file"),
        ({"classes": "disc"}, "must have network, channels and classes"),
        ({"classes": "2"}, "JSON list of names"),
        ({"channels": "three"}, "must have network, channels and classes"),
        ({"network": "unet9000"}, "unknown network 'unet9000'"),
    ],
)
def test_a_personal_file_with_wrong_metadata_is_refused(network, tmp_path, change, message):
    save_network(tmp_path / "p.safetensors", network.state_dict(), METADATA | change)
    with pytest.raises(FedDPError, match=message):
        load_personal(tmp_path / "p.safetensors")


def test_a_file_without_metadata_is_no_personal_network(network, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "p.safetensors")
    with pytest.raises(FedDPError, match=r"KeyError\('network'\)"):
        load_personal(tmp_path / "p.safetensors")
