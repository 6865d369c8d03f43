"""Saves networks to files and loads them. It reads only tensors: safetensors, or PyTorch files with weights_only."""

import errno
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from feddp.archive import Archive
from feddp.errors import FedDPError, InputError, StorageError
from feddp.files import folder_of, replacing, writing
from feddp.limits import NETWORK_BYTES, PICKLE_BYTES
from feddp.networks.header import Shapes, outline, unreadable
from feddp.networks.metadata import Metadata
from feddp.partition import ADAPTER, Tensors, select, some
from feddp.reading import opened, short

_CLASSIFIERS = ("head", "fc")  # first part of the names of the ImageNet classifier's tensors, in timm and the public files
_SUFFIX = ".safetensors"
CHECKSUM = "checksum"  # metadata entry: SHA-256 of the tensors' fingerprint and the other metadata


def load_checkpoint(network: nn.Module, path: str | Path) -> None:
    """Loads a local file into `network`: all of it or, on any mismatch, nothing.

    The file holds either this network's state_dict, or ImageNet weights for its encoder, with names as in timm or as in the
    PVTv2 authors' files (github.com/whai362/PVT, classification/pvt_v2.py), key and value fused or split. The ImageNet
    classifier (`head.*`, `fc.*`) is left out. Where the file has no adapter at all, the network keeps its own.

    Raises:
        InputError: the file cannot be read as tensors, or does not fit; names up to five tensors that are missing, unexpected
            or of another shape.
    """
    path = Path(path)
    state = _read(path)
    own = network.state_dict()
    if own.keys() & state.keys():
        _load(network, _with_adapters(state, network), path)
        return
    try:
        encoder = network.get_submodule("encoder.model")
    except AttributeError as error:
        raise InputError(
            f"{path} has no tensor of {type(network).__name__}, and that network has no encoder for ImageNet weights; "
            "name a file of this network"
        ) from error
    _load(encoder, _with_adapters(_encoder_state(state, encoder), encoder), path)


def save_network(path: str | Path, state: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes tensors and texts to a safetensors file, whole or not at all: after a crash, the former file is still there.

    The file's metadata also get a checksum of tensors and texts, which `read_network` compares.

    Raises:
        StorageError: the disk is full, or the folder is read-only.
    """
    path = Path(path)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that share memory or are not contiguous
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}
    with replacing(path) as part:
        try:
            save_file(tensors, part, {**metadata, CHECKSUM: _checksum(tensors, metadata)})
        except SafetensorError as error:
            if not (refused := re.search(r"\(os error (\d+)\)", str(error))):
                raise
            raise OSError(int(refused[1]), str(error)) from error  # safetensors hides the system's error in a text


def read_network(path: str | Path, most: int = NETWORK_BYTES) -> tuple[Tensors, dict[str, str]]:
    """Returns (tensors, metadata) of a safetensors file of at most `most` bytes.

    Raises:
        InputError: the file cannot be read, or its content differs from the checksum that `save_network` wrote, if it has one.
        StorageError: the system cannot read it now; the file may be sound.
    """
    try:
        _, metadata = outline(Path(path), most)
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FedDPError as error:
        _require_damaged(Path(path), error.__cause__)
        raise
    except Exception as error:  # safetensors raises many kinds of errors for damaged files
        _require_damaged(Path(path), error)
        raise unreadable(Path(path), type(error).__name__) from error
    written = metadata.pop(CHECKSUM, None)
    if written is not None and written != _checksum(tensors, metadata):
        raise unreadable(Path(path), "its content does not match its checksum: the file is damaged")
    return tensors, metadata


def _require_damaged(path: Path, error: BaseException | None) -> None:
    """Raises StorageError if the system is the cause: a file that cannot be read now must not be taken for a damaged one."""
    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError) or number in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM):
        what = os.strerror(number) if number is not None else "out of memory"
        raise StorageError(f"{path} cannot be read now ({what}); mend that, then continue the run") from error


def _checksum(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(f"{fingerprint(state)}{json.dumps(metadata, sort_keys=True)}".encode()).hexdigest()


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256, in hex, of tensors: sorted names, each with type, shape and bytes (little-endian, as in memory).

    It does not depend on the tensors' file, order, strides or device; `-0.0` and `0.0` differ.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        header = json.dumps([name, str(value.dtype), list(value.shape)]).encode()
        # the length comes first, so different states never give the same bytes
        digest.update(len(header).to_bytes(8, "big") + header)
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_personal(path: str | Path) -> nn.Module:
    """Returns the network saved at `path`, in eval mode on the CPU.

    The file's metadata (`Metadata.of`) define the network. The network is built, and tensors are read, only after the shapes in
    the file fit.

    Raises:
        InputError: metadata are missing, wrong or out of range, or the tensors do not fit.
    """
    path = Path(path)
    shapes, texts = outline(path)
    metadata = Metadata.of(path, texts)
    _fit(shapes, _shapes(metadata.outline()), path)
    network = metadata.build()
    _load(network, read_network(path)[0], path)
    return network.eval()


def _read(path: Path) -> Tensors:
    if path.suffix == _SUFFIX:
        return read_network(path)[0]
    try:
        with opened(path, NETWORK_BYTES, folder_of(path)) as file:
            if zipfile.is_zipfile(file):
                _require_plain(path)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except FedDPError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; name a .safetensors or PyTorch file of weights") from None
    except Exception as error:  # the file may hold any bytes, and the unpickler then raises many kinds of errors
        raise unreadable(path, type(error).__name__) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(name, str) and _is_plain(value) for name, value in content.items()):
        raise InputError(f"{path} is not a checkpoint: it must hold tensors by name and nothing else; save a plain state_dict")
    return content


def _is_plain(value: object) -> bool:
    """Returns whether this is a tensor of values that a network can take; torch's loader makes other kinds, too."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return not value.is_quantized and not value.is_complex()


def _require_plain(path: Path) -> None:
    """Raises InputError if a PyTorch file has compressed parts, which PyTorch never writes, or a huge pickle."""
    archive = Archive(path)
    archive.close()
    for name, (size, packed) in archive.sizes.items():
        if size != packed or (name.endswith(".pkl") and size > PICKLE_BYTES):
            raise InputError(
                f"{path} has {short(name)} with {size} bytes, {packed} when packed, which PyTorch does not write; save it again"
            )


def _with_adapters(state: Tensors, network: nn.Module) -> Tensors:
    """Returns `state`, with the adapters of `network` if it has none of them: LoRA's start leaves the function as it is."""
    adapters = select(network, ADAPTER)
    if adapters & state.keys():
        return state
    return state | {name: value for name, value in network.state_dict().items() if name in adapters}


def _encoder_state(state: Tensors, encoder: nn.Module) -> Tensors:
    """Renames a checkpoint's tensors to the names of `encoder`, timm's feature extractor with split key and value."""
    if "patch_embed1.proj.weight" in state:
        from timm.models.pvt_v2 import checkpoint_filter_fn

        state = checkpoint_filter_fn(state, encoder)
    renamed: Tensors = {}
    for name, tensor in state.items():
        first = name.split(".")[0]
        if first in _CLASSIFIERS:
            continue
        name = _flattened(name, encoder)
        owner, _, kind = name.rpartition(".kv.")
        if owner and tensor.ndim:
            renamed[f"{owner}.k.{kind}"], renamed[f"{owner}.v.{kind}"] = tensor.tensor_split(2)
        else:
            renamed[name] = tensor
    return renamed


def _flattened(name: str, encoder: nn.Module) -> str:
    """Renames `stages.0.x` to `stages_0.x` if `encoder` has `stages_0`: timm's feature extractor joins name and index."""
    match = re.match(r"(\w+)\.(\d+)\.", name)
    if match and hasattr(encoder, joined := f"{match[1]}_{match[2]}"):
        return f"{joined}.{name[match.end() :]}"
    return name


def _load(network: nn.Module, state: Tensors, path: Path) -> None:
    _fit(_shapes(state), _shapes(network.state_dict()), path)
    network.load_state_dict(state)


def _shapes(state: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in state.items()}


def _fit(shapes: Shapes, own: Shapes, path: Path) -> None:
    """Raises InputError if the shapes in a file are not exactly those of the network, `own`."""
    faults = [f"{name} (missing)" for name in own if name not in shapes]
    faults += [f"{short(name)} (unexpected)" for name in shapes if name not in own]
    faults += [
        f"{name} ({shapes[name]} in the file, {own[name]} in the network)"
        for name in own
        if name in shapes and shapes[name] != own[name]
    ]
    if faults:
        raise InputError(f"{path} does not fit the network, nothing was loaded: {some(faults, 5)}; name another file")
