"""What a paper states, or the released code where the paper is silent, is the default; where neither decides, ours, with its
reason. The numbers come from the papers."""

import pytest

from feddp.adaptation.choices import Settings
from feddp.adaptation.routing import Router
from feddp.methods import METHODS
from feddp.plan.schema import Federation
from feddp.training.settings import Calibration, Heads, Training, Tuning, defaults

IOP_FL = "Jiang et al., TMI 2023"
FEDDP = "Wang et al., TMI 2024"


@pytest.mark.parametrize(
    ("group", "stated", "source"),
    [
        (Training, {"lr": 1e-3, "batch": 6, "local_epochs": 1, "clip": 1.0}, f"{FEDDP}, IV-B"),
        (Calibration, {"calibration_epochs": 20, "calibration_lr": 1e-4}, f"{FEDDP}, IV-B"),
        (Calibration, {"lambda": 1.0, "delta": "frozen"}, f"{FEDDP}, Fig. 9 and Eq. 7"),
        (Tuning, {"tune_epochs": 20, "tune_lr": 1e-4}, "ours: as much training as the calibration, its control"),
        (
            Heads,
            {"heads_epochs": 20, "heads_lr": 1e-3},
            f"ours: as many epochs as the calibration; a new head, so not the 1e-4 of {FEDDP}",
        ),
        (Federation, {"aggregation": "uniform"}, "a mean over the sites in all four papers"),
        (Settings, {"epochs": 10, "lr": 1e-3, "beta": 0.01, "noise": 0.5, "neighbourhood": 10}, f"{IOP_FL}, III-C and IV"),
        (
            Settings,
            {"mix": "softmax", "norm": "mean"},
            "ours: feddp.adaptation.routing says why",
        ),
    ],
)
def test_a_group_of_settings_starts_as_stated(group, stated, source):
    own = defaults(group)
    assert {name: own[name] for name in stated} == stated, source


@pytest.mark.parametrize(
    ("method", "stated", "source"),
    [
        ("ditto", {"ditto_lambda": 1.0}, "Li et al., ICML 2021: 0.1, 1, 2"),
        ("fedgkd", {"gkd_gamma": 0.2, "gkd_models": 5}, "FedGKD: γ = 0.2, M = 5"),
        ("fedlc", {"contrast": 0.1}, "Wang et al., ECCV 2022"),
        (
            "fedoap",
            {"perturbed_weight": 0.1, "perturbed_noise": 0.1, "perturbed_above": 0.75},
            "the released code (ishmamt/Federated-Tumor-Segmentation, commit 87468b8); the paper could not be read",
        ),
        ("fedprox", {"prox_mu": 0.01}, "ours: Li et al., MLSys 2020, tune it from 0.001 to 1, and give no default"),
        ("iop_fl", {"tau": 0.9}, f"{IOP_FL}, IV"),
        ("lora", {"lora_rank": 4}, "ours: Hu et al., ICLR 2022, adapt other networks, and their text could not be read"),
        ("moon", {"moon_mu": 1.0}, "the released code (QinbinLi/MOON, commit 8fcba3c); the paper tunes it"),
        ("moon", {"moon_temperature": 0.5}, "Li et al., CVPR 2021, their released code (QinbinLi/MOON, commit 8fcba3c)"),
        ("pfedme", {"pfedme_lambda": 15.0, "pfedme_beta": 1.0, "inner_steps": 5}, "T Dinh et al., NeurIPS 2020"),
        (
            "ttt",
            {"rotation": 1.0},
            "Sun et al., ICML 2020, their released code (yueatsprograms/ttt_cifar_release, commit e39b55b): loss += loss_ssh",
        ),
        ("pflfe", {"ema": 0.99, "enhance": True}, "ours: BYOL's lower end"),
        ("virtual_class", {"lambda_r": 1.0, "lambda_v": 1.0, "virtual": 1.0, "paa": True}, "Liu et al., 2024, Eq. 8"),
    ],
)
def test_a_method_starts_as_stated(method, stated, source):
    own = defaults(METHODS[method].Hyper)
    assert {name: own[name] for name in stated} == stated, source


def test_routers_mix_by_a_softmax_unless_told_otherwise():
    """A router whose models have the logits 0, ln 2 and ln 5 gives 1/8, 2/8, 5/8; sigmoids would be 1/2, 2/3, 5/6."""
    import torch

    router = Router(4, 3)
    router.choose.bias.data = torch.tensor([1.0, 2.0, 5.0]).log()
    assert router(torch.rand(1, 4)).flatten().tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8])
