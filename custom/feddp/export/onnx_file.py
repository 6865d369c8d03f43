"""A network as an ONNX file with which onnxruntime alone writes the masks of `feddp predict`."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

from feddp.export.graph import Graph, tracing
from feddp.files import replacing
from feddp.networks.weights import read_network
from feddp.training.metrics import THRESHOLD

FILE = "network.onnx"
PROPERTY = "feddp"  # entry of the file's metadata_props: JSON (`declaration`)
OPSET = 18
# what no graph says: what happens to an image before and after it
_OUTSIDE = {
    "before": "8-bit pixels as a PNG holds them, made of other formats as `prepared` says; no scaling; one size per batch",
    "after": "nothing; the network's run may have measured the largest component of each class alone (largest_component)",
}


def write(network: Path, out: Path) -> Path:
    """Writes FILE to the folder `out` and returns its path. The file replaces an older one only after `Graph.verify`.

    Inputs: `image` uint8 (batch, height, width, channels). Outputs: `probabilities` float32 (batch, classes, height, width) and
    `mask` uint8 (batch, height, width) of 0 to C. Batch, height and width are free. The metadata have the entry PROPERTY.

    The exporter that traces is used: in it a tensor of the file that steers the forward pass, as in FedLC's layers, is a
    constant, whereas torch.export refuses it; and it takes a tenth of the time.

    Raises:
        InputError: the file does not hold a network of FedDP.
        FedDPError: the written file does not reproduce the network.
    """
    graph, metadata = Graph.of(network)
    example = torch.zeros(2, metadata.size, metadata.size + 1, metadata.channels, dtype=torch.uint8)
    axes = {"image": {0: "batch", 1: "height", 2: "width"}, "probabilities": {0: "batch", 2: "height", 3: "width"}}
    axes["mask"] = axes["image"]
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / FILE) as part:
        with tracing():
            torch.onnx.export(
                graph, (example,), str(part), dynamo=False, opset_version=OPSET, dynamic_axes=axes,
                input_names=["image"], output_names=["probabilities", "mask"],
            )  # fmt: skip
        model = onnx.load(str(part))
        onnx.helper.set_model_props(model, {PROPERTY: json.dumps(declaration(network, graph))})
        onnx.checker.check_model(model)
        onnx.save(model, str(part))
        session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        graph.verify(lambda images: tuple(session.run(None, {"image": images})), out / FILE)
    return out / FILE


def declaration(network: Path, graph: Graph) -> dict[str, Any]:
    """Returns what the file says of itself: the network's metadata, what the graph does, and what is left outside."""
    metadata = graph.metadata
    scaled = f"averaging resize to {graph.prepared}, " if graph.prepared else ""
    steps = f"bilinear resize to size, {metadata.normalise}, network, bilinear resize back, sigmoid, threshold, labels"
    return {
        **read_network(network)[1],
        "classes": list(metadata.classes),
        "channels": metadata.channels,
        "size": metadata.size,
        "normalise": metadata.normalise,
        "threshold": THRESHOLD,
        "inside": scaled + steps,
        **_OUTSIDE,
    }
