"""A network as a MONAI bundle, which MONAI runs without this package.

The network is TorchScript. A state_dict would need this package's code to build the network; a pickled module would run code of
whoever wrote the file; TorchScript holds tensors and its own operations, needs torch alone, and is MONAI's own form
(`models/model.ts`). Resizing and normalising are inside, so the configuration cannot disagree with the training.

    configs/metadata.json, configs/inference.json    what it is; how an image becomes a mask, with MONAI's transforms
    models/model.ts                                  pixels of 0 to 255, (B, channels, H, W) -> probabilities (B, classes, H, W)
    docs/README.md                                   the model card
"""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import monai
import numpy as np
import PIL
import torch
from torch import Tensor, nn

from feddp.export.card import UNKNOWN, applied, as_markdown
from feddp.export.facts import Facts
from feddp.export.graph import Graph, tracing
from feddp.files import replacing, write_json, write_text
from feddp.training.metrics import THRESHOLD

METADATA, INFERENCE, MODEL, README = "configs/metadata.json", "configs/inference.json", "models/model.ts", "docs/README.md"
SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
_RUN = """
## Run this bundle

With MONAI, Pillow and fire, in the bundle's folder:

```bash
python -m monai.bundle run --config_file configs/inference.json --dataset_dir PNGS --output_dir MASKS
```
"""


def write(network: Path, out: Path) -> Path:
    """Writes the bundle to the folder `out` and returns the path of its inference.json.

    Raises:
        InputError: the file holds no network of FedDP, or a file of its run is damaged.
        FedDPError: the TorchScript does not reproduce the network.
    """
    facts = Facts.of(network)
    card = applied(facts)
    graph, _ = Graph.of(network)
    for file in (METADATA, MODEL, README):
        (out / file).parent.mkdir(parents=True, exist_ok=True)
    _write_script(graph, out / MODEL)
    write_json(out / INFERENCE, inference(facts))
    write_json(out / METADATA, metadata(facts, card))
    write_text(out / README, "\n".join([*as_markdown(card, facts), _RUN]))
    return out / INFERENCE


class _Probabilities(nn.Module):
    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph

    def forward(self, image: Tensor) -> Tensor:
        return self.graph.probabilities(image)


def _write_script(graph: Graph, file: Path) -> None:
    size = graph.metadata.size
    with tracing(), replacing(file) as part:
        example = torch.zeros(2, graph.metadata.channels, size, size + 1)
        script = io.BytesIO()
        # not to the file: on a full disk, PyTorch's writer ends the process
        torch.jit.save(torch.jit.trace(_Probabilities(graph), example, check_trace=False), script)
        part.write_bytes(_without_paths(script))
        loaded = torch.jit.load(str(part))
        graph.verify(lambda images: (_probabilities(loaded, images),), file)


def _probabilities(script: torch.jit.ScriptModule, images: np.ndarray) -> np.ndarray:
    found: np.ndarray = script(torch.from_numpy(images).permute(0, 3, 1, 2).float()).numpy()
    return found


def _without_paths(script: io.BytesIO) -> bytes:
    """Returns a TorchScript file without its debug entries, which name the source files of this machine."""
    with zipfile.ZipFile(script) as archive:
        kept = {name: archive.read(name) for name in archive.namelist() if not name.endswith(".debug_pkl")}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:  # uncompressed, as PyTorch writes it
        for name, content in kept.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return written.getvalue()


def inference(facts: Facts) -> dict[str, Any]:
    """Returns inference.json: PNGs of `dataset_dir` -> masks of 0 to C of the same names in `output_dir`.

    It has no ignite engine, so MONAI, Pillow and, for the command line, fire suffice.
    """
    # as `feddp.data.images.label_mask`
    nested = f"$lambda m: (m > {THRESHOLD}).int().cumprod(0).sum(0, keepdim=True)"
    exclusive = f"$lambda m: (m.argmax(0, keepdim=True) + 1) * (m.amax(0, keepdim=True) > {THRESHOLD})"
    turn = {"_target_": "Transposed", "indices": [0, 2, 1]}  # MONAI reads and writes pictures as (width, height)
    predicted = "@inferer(item['image'].as_tensor()[None].to(@device), @network_def)[0].cpu()"
    item = f"{{'pred': MetaTensor({predicted}, meta=item['image'].meta)}}"
    return {
        "imports": ["$import pathlib", "$import torch", "$from monai.data import MetaTensor"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cpu')",
        "data": "$[{'image': str(f)} for f in sorted(pathlib.Path(@dataset_dir).glob('*')) if f.suffix.lower() == '.png']",
        "network_def": "$torch.jit.load(@bundle_root + '/models/model.ts', map_location=@device).eval()",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "LoadImaged", "keys": "image", "reader": "PILReader"},
                {"_target_": "EnsureChannelFirstd", "keys": "image"},
                turn | {"keys": "image"},
            ],
        },
        "dataset": {"_target_": "Dataset", "data": "@data", "transform": "@preprocessing"},
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "Lambdad", "keys": "pred", "func": nested if facts.metadata.labels == "nested" else exclusive},
                turn | {"keys": "pred"},
                {
                    "_target_": "SaveImaged",
                    "keys": "pred",
                    "output_dir": "@output_dir",
                    "output_ext": ".png",
                    "output_postfix": "",
                    "output_dtype": "$np.uint8",
                    "resample": False,
                    "separate_folder": False,
                },
            ],
        },
        # keeps no mask in memory
        "evaluator": f"$torch.no_grad()(lambda: sum(1 for item in @dataset if @postprocessing({item})))",
        "run": ["$print(@evaluator(), 'masks in', @output_dir)"],
    }


def metadata(facts: Facts, card: dict[str, Any]) -> dict[str, Any]:
    """Returns metadata.json, with the entries that SCHEMA requires."""
    classes = dict(enumerate(("background", *facts.metadata.classes)))
    image = {"type": "image", "format": "magnitude", "modality": "n/a", "num_channels": facts.metadata.channels}
    image |= {"spatial_shape": ["*", "*"], "dtype": "float32", "value_range": [0, 255], "is_patch_data": False}
    image["channel_def"] = {str(i): f"channel {i}" for i in range(facts.metadata.channels)}
    pred = {"type": "image", "format": "segmentation", "num_channels": len(facts.metadata.classes), "spatial_shape": ["*", "*"]}
    pred |= {"dtype": "float32", "value_range": [0, 1], "is_patch_data": False}
    # MONAI evaluates a text that begins with $, @ or %, and a class's name may be any text; so no text here begins with one
    pred["channel_def"] = {str(i): f"class {name}" for i, name in enumerate(facts.metadata.classes)}
    return {
        "schema": SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": f"tensors {facts.tensors_sha256}"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {"pillow": PIL.__version__},
        "name": card["BasicInfo"]["ModelName"],
        "task": f"Segmentation of {', '.join(facts.metadata.classes)}",
        "description": card["ModelSummary"]["Summary"],
        "authors": card["BasicInfo"]["ModelDeveloper"],
        "copyright": UNKNOWN,
        "data_source": card["TrustIngredients"]["AISystemFacts"]["InputDataSource"],
        "data_type": "png",
        "pred_classes": json.dumps(classes),
        # of this network: the other rows are of other sites' own networks
        "eval_metrics": {
            f"{row['site']}: {row['metric']}": row["mean"] for row in facts.measured() if row["site"] == facts.site
        },
        "intended_use": card["UsesAndDirections"]["IntendedUseAndWorkflow"],
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
    }
