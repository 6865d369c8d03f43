"""Table IV by class: what networks that say the same everywhere score on a mask of halves and quarters."""

import json

import numpy as np
import pytest
import torch

from feddp.compare.scores import Result
from feddp.compare.unseen import unseen_tables
from feddp.data.folder import SiteFolder, write_site
from feddp.networks import NETWORKS
from feddp.networks.weights import save_network
from feddp.reporting.tables import BLANK

DATASET = {"name": "eyes", "channels": 3, "classes": ["disc", "cup"], "labels": "nested"}


@pytest.fixture
def unseen(tmp_path):
    """One image: half of it is disc, and a quarter is cup."""
    mask = np.zeros((32, 32), np.uint8)
    mask[:16], mask[:8] = 1, 2
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    write_site(tmp_path / "outside", DATASET, [("a", "p", "test", image, mask)])
    return SiteFolder.open(tmp_path / "outside")


@pytest.fixture
def run_of(tmp_path, toy):
    """A finished run whose sites' networks say these probabilities (disc, cup) at every pixel."""

    def make(federated=True, failed=None, **sites) -> Result:
        run = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        for site, probabilities in sites.items():
            network = NETWORKS[toy](3, 2)
            torch.nn.init.zeros_(network.head.weight)
            network.head.bias.data = torch.logit(torch.tensor(probabilities))
            about = {"network": toy, "channels": "3", "classes": '["disc", "cup"]', "labels": "nested", "size": "32"}
            save_network(run / "sites" / site / "network.safetensors", network.state_dict(), {**about, "site": site})
        run.joinpath("results.json").write_text(
            json.dumps({"sites": {site: {} for site in sites}, "selection": "val", "federated": federated})
        )
        return Result({0: run}, failed or {})

    return make


def dice(table):
    """The first row's values below the Dice heads."""
    return [cell.mean for head, cell in zip(table.heads, table.rows[0], strict=True) if head.startswith("Dice")]


def test_each_class_has_a_table(unseen, run_of):
    """A says disc everywhere and cup nowhere: Dice 2 · 1/2 / (1 + 1/2) and 0. B says both everywhere: the same and
    2 · 1/4 / (1 + 1/4). The ensemble's cup has the probability (0.1 + 0.7) / 2, below a half."""
    mean, disc, cup = unseen_tables({"fedavg": run_of(A=(0.9, 0.1), B=(0.8, 0.7))}, unseen, ["A", "B"], 32, "cpu")
    assert [table.name for table in (mean, disc, cup)] == ["unseen", "unseen_class_1", "unseen_class_2"]
    assert cup.title == "Table IV: the unseen site outside: cup alone"
    assert dice(disc) == pytest.approx([200 / 3] * 3)
    assert dice(cup) == pytest.approx([0, 40, 0])
    assert dice(mean) == pytest.approx([100 / 3, 160 / 3, 100 / 3])


def test_a_network_that_is_missing_leaves_blanks_in_each(unseen, run_of):
    """And no ensemble: that of fewer sites is another one."""
    tables = unseen_tables({"fedavg": run_of(A=(0.9, 0.1))}, unseen, ["A", "B"], 32, "cpu")
    for table in tables:
        assert [cell == BLANK for cell in table.rows[0][1:]] == [False, True, True] * 2
        assert "a network of a site is not there (fedavg)" in " ".join(table.notes)


def test_who_has_fewer_seeds_or_no_federation_does_not_compete(unseen, run_of):
    """All say cup nowhere; of disc, fedavg says nothing (Dice 0), the others everything."""
    runs = {
        "fedavg": run_of(A=(0.1, 0.1)),
        "feddp": run_of(A=(0.9, 0.1), failed={1: "out of memory"}),
        "centralized": run_of(A=(0.9, 0.1), federated=False),
    }
    for table in unseen_tables(runs, unseen, ["A"], 32, "cpu"):
        assert [row[0] for row in table.rows] == ["fedavg", "feddp (1 of 2 seeds)", "centralized"]
        assert {row for row, _ in table.best()} == {0}
        assert any("compete neither for the best value" in note for note in table.notes)
