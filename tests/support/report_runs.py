"""A run's folder with a toy network for each of the two sites of `tiny_root`, without training."""

from pathlib import Path

from feddp.networks import build
from feddp.networks.weights import save_network
from support.compare_runs import SITES, write_run

METADATA = {"channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "32", "method": "feddp", "seed": "0"}


def save_toy(path: Path, network: str, seed: int) -> Path:
    """A network that `feddp predict` reads, with random weights of this seed."""
    save_network(path, build(network, 3, 1, seed=seed).state_dict(), METADATA | {"network": network, "normalise": "zscore"})
    return path


def toy_run(folder: Path, network: str) -> Path:
    write_run(folder, {site: {"start": {"a": 0.5, "b": 0.7}} for site in SITES})
    for seed, site in enumerate(SITES):
        save_toy(folder / "sites" / site / "network.safetensors", network, seed)
    return folder
