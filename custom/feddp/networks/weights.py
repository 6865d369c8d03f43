"""Networks to and from files. Only tensors are ever read: safetensors, or PyTorch files with weights_only."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from feddp.errors import FedDPError
from feddp.networks import build
from feddp.partition import some

State = dict[str, Tensor]

_CLASSIFIERS = ("head", "fc")  # first component of the ImageNet classifier's names, in timm and in the public files
_SUFFIX = ".safetensors"


def load_checkpoint(network: nn.Module, path: str | Path) -> None:
    """Loads a local file into `network`: all of it or, on any mismatch, nothing.

    The file holds either this network's own state_dict, or ImageNet weights for its encoder in timm's names or in those
    of the PVTv2 authors (github.com/whai362/PVT, classification/pvt_v2.py), key and value fused or split. The
    ImageNet classifier (`head.*`, `fc.*`) is left out. FedDPError where the file cannot be read as tensors, or
    names up to five tensors that are missing, unexpected or of another shape.
    """
    path = Path(path)
    state = _read(path)
    own = network.state_dict()
    if own.keys() & state.keys():
        _load(network, state, path)
        return
    try:
        encoder = network.get_submodule("encoder.model")
    except AttributeError as error:
        raise FedDPError(
            f"{path} holds none of the tensors of {type(network).__name__}, which has no encoder that takes ImageNet weights; "
            "name a file of this network's own"
        ) from error
    _load(encoder, _encoder_state(state, encoder), path)


def save_network(path: str | Path, state: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes tensors and text to a safetensors file, whole or not at all: a crash leaves the former file in place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # safetensors refuses tensors that share memory or are strided
        save_file({k: v.detach().to("cpu", copy=True).contiguous() for k, v in state.items()}, temporary, metadata)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_network(path: str | Path) -> tuple[State, dict[str, str]]:
    """(tensors, metadata) of a safetensors file, on the CPU. FedDPError where it cannot be read."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # safetensors has an exception for each way to be damaged, and OSError besides
        raise _unreadable(path, error) from error


def load_personal(path: str | Path) -> nn.Module:
    """The network saved at `path`, in eval mode on the CPU.

    The file's metadata says which: `network` (a name in NETWORKS), `channels` (a number), `classes` (a JSON list of
    names), and where a method added layers, `layers` (JSON). FedDPError where one is absent or wrong, or the tensors do
    not fit.
    """
    state, metadata = read_network(path)
    try:
        name, channels, classes = metadata["network"], int(metadata["channels"]), json.loads(metadata["classes"])
        layers = json.loads(metadata.get("layers", "{}"))
    except (KeyError, ValueError) as error:
        raise FedDPError(
            f"{path} is no network that feddp saved ({error!r}): its metadata must say network, channels and classes"
        ) from error
    if not isinstance(classes, list):
        raise FedDPError(f"{path}: the metadata's 'classes' must be a JSON list of names, not {classes!r}")
    network = build(name, channels, len(classes), seed=0, layers=layers)  # a seed leaves the caller's random numbers alone
    _load(network, state, Path(path))
    return network.eval()


def _read(path: Path) -> State:
    if path.suffix == _SUFFIX:
        return read_network(path)[0]
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the file may hold any bytes: the unpickler fails in as many ways
        raise _unreadable(path, error) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise FedDPError(f"{path} is no checkpoint: it must hold tensors by name and nothing else")
    return content


def _encoder_state(state: State, encoder: nn.Module) -> State:
    """A checkpoint's tensors under the names of `encoder`, timm's feature extractor with split key and value."""
    if "patch_embed1.proj.weight" in state:
        from timm.models.pvt_v2 import checkpoint_filter_fn

        state = checkpoint_filter_fn(state, encoder)
    renamed: State = {}
    for name, tensor in state.items():
        first = name.split(".")[0]
        if first in _CLASSIFIERS:
            continue
        name = _flattened(name, encoder)
        owner, _, kind = name.rpartition(".kv.")
        if owner:
            renamed[f"{owner}.k.{kind}"], renamed[f"{owner}.v.{kind}"] = tensor.tensor_split(2)
        else:
            renamed[name] = tensor
    return renamed


def _flattened(name: str, encoder: nn.Module) -> str:
    """timm's feature extractor joins a sequence and its index: `stages.0.x` becomes `stages_0.x` where it has that."""
    match = re.match(r"(\w+)\.(\d+)\.", name)
    if match and hasattr(encoder, joined := f"{match[1]}_{match[2]}"):
        return f"{joined}.{name[match.end() :]}"
    return name


def _load(network: nn.Module, state: State, path: Path) -> None:
    own = network.state_dict()
    faults = [f"{name} (missing)" for name in own if name not in state]
    faults += [f"{name} (unexpected)" for name in state if name not in own]
    faults += [
        f"{name} ({tuple(state[name].shape)} in the file, {tuple(own[name].shape)} in the network)"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if faults:
        raise FedDPError(f"{path} does not fit the network, nothing was loaded: {some(faults, 5)}")
    network.load_state_dict(state)


def _unreadable(path: str | Path, error: Exception) -> FedDPError:
    if isinstance(error, FileNotFoundError):
        return FedDPError(f"{path} does not exist; name a .safetensors or PyTorch file of weights")
    return FedDPError(
        f"{path} cannot be read as tensors ({type(error).__name__}); a file with code in it is never loaded: "
        f"save it again as {_SUFFIX}, or as a plain state_dict"
    )
