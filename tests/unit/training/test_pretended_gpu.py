"""Every method on a pretended GPU (`support.pretended_gpu`), against the CPU to the bit; and no step makes the host wait."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.small import narrow
from feddp.adaptation.choices import Settings
from feddp.adaptation.models import Models, completed
from feddp.adaptation.strategies import STRATEGIES, predict
from feddp.data import placing
from feddp.methods import OWN
from feddp.methods.base import Method
from feddp.networks import NETWORKS
from feddp.plan.resolve import build_network
from feddp.stages.evaluate import evaluate
from feddp.stages.train import train
from feddp.training import loop
from feddp.training.seeds import seeded
from support.driven import drive
from support.pretended_gpu import GPU, OnGPU, pretended_gpu
from support.small import Small

SITES = "site-1", "site-2"
COMPUTES = "float32", "bfloat16"
LAYERS = {"lora": "still", "virtual_class": "still"}  # methods that ask for the default network's layers


def still(channels: int, classes: int, pretrained: bool = False) -> nn.Module:
    """The default network's layers, a block of each stage, without dropout, whose masks each device draws for itself."""
    network = narrow(channels, classes, pretrained, depths=(1, 1, 1, 1))
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return network


@pytest.fixture(autouse=True)
def _networks(monkeypatch):
    monkeypatch.setitem(NETWORKS, "small", Small)
    monkeypatch.setitem(NETWORKS, "still", still)


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU. What the host waits for is counted in the training loop, between a batch and the next."""
    plain = loop.batches

    def watched(samples, batch, seed, *arguments, **named):
        for given in plain(samples, batch, seed, *arguments, **named):
            waits.counting = seed is not None  # prediction, which has no seed, ends in numbers on the host
            yield given
            waits.counting = False

    with pretended_gpu() as waits:
        monkeypatch.setattr(loop, "batches", watched)
        yield waits


def kept(sites):
    """Each site's last network, as it is on its disk, and its evaluation."""
    return {name: (site.store.read(site.latest())[0], evaluate(site)) for name, site in sites.items()}


def same(found, other) -> bool:
    pairs = [(found[name], other[name]) for name in other]
    return all(a.keys() == b.keys() and all(map(torch.equal, a.values(), b.values())) for (a, _), (b, _) in pairs) and all(
        a == b for (_, a), (_, b) in pairs
    )


@pytest.mark.parametrize("method", OWN)
def test_a_run_on_a_gpu_is_that_on_the_cpu_and_no_step_waits(method, plan_for, few_root, tmp_path, request):
    """Two rounds of two steps each, or one of one step of a larger network, and every later stage. On the GPU, every task opens
    its site from its disk. With CUDA graphs, whose pretended ones change no bit: the tests below go without."""
    rounds, batch = (1, 4) if method in LAYERS else (2, 2)
    settings = {"batch": batch, "tune_epochs": 1, "cuda_graphs": True}
    plan = plan_for(method=method, network=LAYERS.get(method, "small"), start="last", rounds=rounds, settings=settings)
    names = SITES if OWN[method].federated else SITES[:1]
    cpu = kept(drive(plan, few_root, tmp_path / "cpu", names))
    waits = request.getfixturevalue("gpu")
    sites = drive(plan, few_root, tmp_path / "gpu", names, fresh=True, device="cuda")
    assert all(isinstance(value, OnGPU) for value in sites[SITES[0]].network.state_dict().values())
    assert same(kept(sites), cpu)
    assert waits.found == []


@pytest.mark.parametrize("method", ["feddg", "feddp", "fedrod", "ttt"])
def test_where_the_gpu_has_no_room_for_the_images_nothing_else_changes(
    method, plan_for, few_root, tmp_path, request, monkeypatch
):
    """The methods and the stage that look at images beside the batch."""
    plan = plan_for(method=method, network="small", start="last", rounds=1, batch=2)
    cpu = kept(drive(plan, few_root, tmp_path / "cpu"))
    waits = request.getfixturevalue("gpu")
    monkeypatch.setattr(placing, "SHARE", 1 << 40)
    sites = drive(plan, few_root, tmp_path / "gpu", device="cuda")
    assert sites[SITES[0]].samples[0]["image"].device.type == "cpu"
    assert same(kept(sites), cpu)
    assert waits.found == []


def test_bfloat16_on_a_gpu_is_that_on_the_cpu(plan_for, few_root, tmp_path, request):
    plans = [
        plan_for(method="feddp", network="small", start="last", rounds=1, batch=2, precision_compute=word) for word in COMPUTES
    ]
    exact, cpu = (kept(drive(plan, few_root, tmp_path / f"cpu-{n}")) for n, plan in enumerate(plans))
    request.getfixturevalue("gpu")
    assert same(kept(drive(plans[1], few_root, tmp_path / "gpu", device="cuda")), cpu)
    assert not same(cpu, exact)


@pytest.mark.parametrize("how", STRATEGIES)
def test_an_unseen_site_adapts_on_a_gpu_as_on_the_cpu(how, plan_for, request):
    plan = plan_for(method="ttt", network="small")
    states = {site: build_network(replace(plan, seed=n)).state_dict() for n, site in enumerate(SITES)}
    models = Models.of(states, completed(states["site-1"], states), plan.metadata)
    images = list(torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)))

    def adapted(device):
        outcome = STRATEGIES[how](models, images, Settings(epochs=1, batch=3), device, lambda epoch, loss: None)
        return outcome.fit, torch.stack(list(predict(outcome.networks, images, 2, device)))

    fit, logits = adapted(torch.device("cpu"))
    request.getfixturevalue("gpu")
    found, others = adapted(torch.device("cuda"))
    assert found == fit
    assert torch.equal(others, logits)


# --- what the pretended GPU can find ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3).add_(x),
        lambda x: torch.tensor(1.0).add_(x[0]),
        lambda x: torch.stack([x[0], torch.tensor(1.0)]),
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(2)),
        lambda x: nn.Linear(3, 1)(x),
        lambda x: torch.randn(3, device="cuda", generator=torch.Generator()),
        lambda x: x.pin_memory(),
        lambda x: x.to("cpu", non_blocking=True),
    ],
)
def test_what_cuda_refuses_is_refused(mixed, gpu):
    with pytest.raises(RuntimeError, match=r"device|cannot pin|non_blocking"):
        mixed(torch.ones(3, device="cuda"))


def test_numpy_of_a_tensor_on_the_gpu_is_refused(gpu):
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(3).to("cuda").numpy()
    assert torch.ones(3).to("cuda").cpu().numpy().tolist() == [1, 1, 1]


def test_a_misplaced_tensor_in_a_loss_ends_the_round(open_site, gpu, monkeypatch):
    site = opened(open_site, monkeypatch, lambda value: value + torch.zeros(1))
    with pytest.raises(RuntimeError, match="at least two devices"):
        train(site, site.partition.split(site.copy())[0], 0)


@pytest.mark.parametrize(
    "read",
    [
        lambda value: value.item(),
        lambda value: bool(value > 0),
        lambda value: float(value),
        lambda value: value.tolist(),
        lambda value: value.cpu(),
        lambda value: value.nonzero(),
        lambda value: value[None][value[None] > 0],
        lambda value: torch.zeros(2).to(value),
        lambda value: torch.zeros(2).to(value.device, non_blocking=True),  # not pinned
        lambda value: torch.tensor([1.0], device=value.device),
    ],
)
def test_a_wait_in_a_step_is_counted_with_its_place(read, open_site, gpu, monkeypatch):
    """In two batches of 4."""

    def loss(value):
        read(value.detach())
        return value

    site = opened(open_site, monkeypatch, loss)
    train(site, site.partition.split(site.copy())[0], 0)
    assert len(gpu.found) == 2
    assert all(f"/{Path(__file__).name}:" in line for line in gpu.found)


def opened(open_site, monkeypatch, change):
    """A site on the GPU whose loss is changed."""
    plain = Method.loss
    monkeypatch.setattr(Method, "loss", lambda self, site, logits, batch: change(plain(self, site, logits, batch)))
    site = open_site(method="fedavg", network="small")
    site.device = GPU
    site.network.to(GPU)
    return site


def test_a_seed_is_for_the_gpu_s_draws_too_and_leaves_its_generator_as_it_was(gpu):
    def drawn():
        return nn.functional.dropout(torch.ones(64, device="cuda"), 0.5).tolist()

    torch.cuda.manual_seed(7)
    after = [drawn(), drawn()][1]
    torch.cuda.manual_seed(7)
    drawn()
    found = []
    for _ in range(2):
        with seeded(torch.device("cuda"), 1, "dropout"):
            found.append(drawn())
    assert found[0] == found[1] != after
    assert drawn() == after


def test_only_the_gpu_s_autocast_casts_on_the_gpu(gpu):
    layer, x = nn.Linear(3, 3).to("cuda"), torch.ones(2, 3, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float32
