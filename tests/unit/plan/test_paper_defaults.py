"""What a paper states, or the released code where the paper is silent, is the default; where neither decides, ours, with its
reason. The numbers come from the papers; no setting is left out."""

import pytest

from feddp.adaptation.choices import Settings
from feddp.adaptation.routing import Router
from feddp.methods import METHODS
from feddp.plan.schema import Federation
from feddp.training.settings import Calibration, Heads, Training, Tuning, defaults

IOP_FL = "Jiang et al., TMI 2023"
FEDDP = "Wang et al., TMI 2024"
LIU = "Liu et al., 2024"
XIE = "Xie et al., 2024"
APFL = "the configuration in the authors' code (MLOPTPSU/TorchFed, commit 3f4442e)"

GROUPS = [
    (Training, {"lr": 1e-3, "batch": 6, "local_epochs": 1, "clip": 1.0}, f"{FEDDP}, IV-B"),
    (Training, {"weight_decay": 0.01}, "ours: torch's default for AdamW; no paper states one"),
    (
        Training,
        {"loss": "dice_ce"},
        f"Dice and cross-entropy: {LIU}, Eq. 8, and {XIE}, Eq. 1; ours for {FEDDP}, which states none (its code: soft Dice)",
    ),
    (Training, {"augment": True}, f"flips and rotations: {IOP_FL}; ours for {FEDDP}, which states none (its code has none)"),
    (Training, {"normalise": "zscore"}, f"{IOP_FL} and {LIU}; ours for {FEDDP}, which states none (its code divides by 255)"),
    (Training, {"precision_compute": "float32"}, "ours: fp32 for the papers' protocol; no paper states another"),
    (Training, {"cuda_graphs": False}, "ours: how a GPU launches its kernels is no part of a method"),
    (Training, {"largest_component": False}, f"ours: no step of the papers (the code of {FEDDP}: on fundus images alone)"),
    (Training, {"selection": "val"}, f"{IOP_FL} and {LIU} split validation images off; the code of {FEDDP} takes test images"),
    (Calibration, {"calibration_epochs": 20, "calibration_lr": 1e-4}, f"{FEDDP}, IV-B"),
    (Calibration, {"lambda": 1.0, "delta": "frozen"}, f"{FEDDP}, Fig. 9 and Eq. 7"),
    (Tuning, {"tune_epochs": 20, "tune_lr": 1e-4}, "ours: as much training as the calibration, its control"),
    (
        Heads,
        {"heads_epochs": 20, "heads_lr": 1e-3},
        f"ours: as many epochs as the calibration; a new head, so not the 1e-4 of {FEDDP}",
    ),
    (Federation, {"aggregation": "uniform"}, "a mean over the sites in all four papers"),
    (Federation, {"start": "auto"}, f"the last round before a local stage: {FEDDP}, Algorithm 1; else the best: {FEDDP}, IV-B"),
    (Federation, {"private": None}, "the method's own roles"),
    (Federation, {"norm_factor": 0.0, "precision": "float32"}, "ours: no paper bounds a contribution or rounds what is sent"),
    (Federation, {"movement": 7.3, "statistics": 16.0}, "ours: AdamW's largest steps (`feddp.stages.movement`)"),
    (Federation, {"min_sites": 2, "task_timeout": 0}, "ours: of operation; in the papers every site answers"),
    (Settings, {"epochs": 10, "lr": 1e-3, "beta": 0.01, "noise": 0.5, "neighbourhood": 10}, f"{IOP_FL}, III-C and IV"),
    (Settings, {"mix": "softmax", "norm": "mean"}, "ours: feddp.adaptation.routing says why"),
    (Settings, {"batch": 4, "seed": 0}, f"ours: {IOP_FL} does not state them"),
]
METHOD_SETTINGS = [
    ("apfl", {"apfl_alpha": 0.5, "apfl_adaptive": False}, APFL),
    ("ditto", {"ditto_lambda": 1.0}, "Li et al., ICML 2021: 0.1, 1, 2"),
    ("fc_pflfe", {"ema": 0.99, "enhance": True}, "as pflfe's"),
    ("feddg", {"spectra": 16}, "ours: the released code has the spectra of all images in one place"),
    ("fedgkd", {"gkd_gamma": 0.2, "gkd_models": 5}, "FedGKD: γ = 0.2, M = 5"),
    ("fedlc", {"contrast": 0.1}, "Wang et al., ECCV 2022"),
    (
        "fedoap",
        {"perturbed_weight": 0.1, "perturbed_noise": 0.1, "perturbed_above": 0.75},
        "the released code (ishmamt/Federated-Tumor-Segmentation, commit 87468b8); the paper could not be read",
    ),
    ("fedrep", {"head_epochs": 1}, f"ours: Collins et al., ICML 2021, take several; {FEDDP} does not state it"),
    ("fedprox", {"prox_mu": 0.01}, "ours: Li et al., MLSys 2020, tune it from 0.001 to 1, and give no default"),
    ("iop_fl", {"tau": 0.9}, f"{IOP_FL}, IV"),
    ("lora", {"lora_rank": 4}, "ours: Hu et al., ICLR 2022, adapt other networks, and their text could not be read"),
    ("lora", {"lora_freeze": False}, "ours: a run from random weights needs its encoder trained"),
    ("moon", {"moon_mu": 1.0}, "the released code (QinbinLi/MOON, commit 8fcba3c); the paper tunes it"),
    ("moon", {"moon_temperature": 0.5}, "Li et al., CVPR 2021, their released code (QinbinLi/MOON, commit 8fcba3c)"),
    ("pfedme", {"pfedme_lambda": 15.0, "pfedme_beta": 1.0, "inner_steps": 5}, "T Dinh et al., NeurIPS 2020"),
    ("pfedme", {"pfedme_eta": 0.05}, "ours: the authors' 0.005 hardly moves w in the papers' number of rounds"),
    (
        "ttt",
        {"rotation": 1.0},
        "Sun et al., ICML 2020, their released code (yueatsprograms/ttt_cifar_release, commit e39b55b): loss += loss_ssh",
    ),
    ("pflfe", {"ema": 0.99, "enhance": True}, "ours: BYOL's lower end"),
    ("virtual_class", {"lambda_r": 1.0, "lambda_v": 1.0, "virtual": 1.0, "paa": True}, f"{LIU}, Eq. 8"),
    ("virtual_class", {"temperature": 0.1}, f"ours: {LIU} state none, and similarities in [-1, 1] need one"),
    ("virtual_class", {"mask": "excluded"}, f"ours: {LIU}, Eq. 7, literally has zeros for the real maps"),
]


@pytest.mark.parametrize(("group", "stated", "source"), GROUPS)
def test_a_group_of_settings_starts_as_stated(group, stated, source):
    own = defaults(group)
    assert {name: own[name] for name in stated} == stated, source


@pytest.mark.parametrize(("method", "stated", "source"), METHOD_SETTINGS)
def test_a_method_starts_as_stated(method, stated, source):
    own = defaults(METHODS[method].Hyper)
    assert {name: own[name] for name in stated} == stated, source


def test_no_default_is_left_out():
    """Every setting of the groups and of every method is stated once above: a new one needs a source, or a reason for ours."""
    groups = [(group, name) for group, stated, _ in GROUPS for name in stated]
    assert sorted(groups, key=str) == sorted(((g, name) for g in {g for g, _, _ in GROUPS} for name in defaults(g)), key=str)
    methods = [(method, name) for method, stated, _ in METHOD_SETTINGS for name in stated]
    assert sorted(methods) == sorted((method, name) for method in METHODS for name in defaults(METHODS[method].Hyper))


def test_routers_mix_by_a_softmax_unless_told_otherwise():
    """A router whose models have the logits 0, ln 2 and ln 5 gives 1/8, 2/8, 5/8; sigmoids would be 1/2, 2/3, 5/6."""
    import torch

    router = Router(4, 3)
    router.choose.bias.data = torch.tensor([1.0, 2.0, 5.0]).log()
    assert router(torch.rand(1, 4)).flatten().tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8])
