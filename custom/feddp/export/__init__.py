"""`feddp export`: a finished network in the formats of others."""

from importlib import import_module
from pathlib import Path
from typing import cast

# what a network becomes: the module of this package whose `write(network, out)` writes it
FORMATS = {"onnx": "onnx_file", "bundle": "bundle", "card": "card"}


def export(network: Path, to: str, out: Path) -> Path:
    """Writes the network of a file in one of FORMATS to the new folder `out`; returns the file to begin with.

    Raises:
        InputError: the file holds no network of FedDP, or `out` is not empty. Then no file is written.
    """
    from feddp.data.folder import refuse_occupied

    refuse_occupied([out])
    return cast(Path, import_module(f"{__name__}.{FORMATS[to]}").write(network, out))
