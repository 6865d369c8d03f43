"""`feddp export`: a finished network in the formats of others."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import cast

# what a network becomes: the module of this package whose `write(network, out)` writes it
FORMATS = {"onnx": "onnx_file", "bundle": "bundle", "card": "card"}


def export(network: Path, to: str, out: Path) -> Path:
    """Writes the network of a file in one of FORMATS to the new folder `out`; returns the file to begin with.

    Raises:
        InputError: the file holds no network of FedDP, or `out` is not empty.
        FedDPError: the export does not compute what the network does. In both cases nothing is left in `out`.
    """
    from feddp.data.folder import refuse_occupied

    refuse_occupied([out])
    try:
        return cast(Path, import_module(f"{__name__}.{FORMATS[to]}").write(network, out))
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # it was new or empty, and the user may repeat the command
        raise
