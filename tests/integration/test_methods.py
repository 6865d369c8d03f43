"""Every method of the table: what is private, what its messages hold, and that nothing personal is among it."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import torch
from nvflare.fuel.utils import fobs

from feddp import protocol
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.methods import GROUP, METHODS, OWN, Methods
from feddp.methods.aggregation import average
from feddp.methods.base import Method
from feddp.networks import DEFAULT, NETWORKS
from feddp.plan.resolve import build_network, partition_of
from feddp.plan.schema import Plan
from feddp.stages.calibrate import personal
from feddp.stages.site import Site
from feddp.stages.train import adopt, train
from feddp.training.settings import setting
from feddp.training.store import Store
from support import NEEDS
from support.captured import those_in
from support.driven import drive
from support.server import Run
from support.site import FlareSite
from support.small import Small

pytestmark = pytest.mark.usefixtures("toy", "pvt", "resnet", "_small")

SITES = ("site-1", "site-2")
BLOCKS = [f"encoder.model.stages_{stage}.blocks.{block}" for stage in range(4) for block in range(2)]
BOTH = ("weight", "bias")
QUERIES = {f"{block}.attn.q.{kind}" for block in BLOCKS for kind in BOTH}
HEAD = {f"segmentation_head.0.{kind}" for kind in BOTH}
CALIBRATOR = {"embedding.one_hot"} | {
    f"calibrator.{k}" for k in ("weights", "biases", "known", "active", "out.weight", "out.bias")
}
AFFINITY = {f"decoder.{level}.affinity.conv_{c}.{kind}" for level in ("p4", "p3", "p2") for c in "qm" for kind in BOTH}
# two in a block, one more where the attention reduces its keys (stages 0 to 2); one where a stage begins and one where it
# ends; FPN's levels of stride 32, 16, 8 and 4 have 3, 2, 1 and 1 blocks
NORMS = {
    f"{name}.{kind}"
    for kind in BOTH
    for name in (
        *(f"{block}.norm{n}" for block in BLOCKS for n in (1, 2)),
        *(f"{block}.attn.norm" for block in BLOCKS[:6]),
        "encoder.model.patch_embed.norm",
        *(f"encoder.model.stages_{stage}.downsample.norm" for stage in (1, 2, 3)),
        *(f"encoder.model.stages_{stage}.norm" for stage in range(4)),
        *(f"decoder.seg_blocks.{level}.block.{b}.block.1" for level, n in enumerate((3, 2, 1, 1)) for b in range(n)),
    )
}

PERSONAL_HEAD = {name.replace("segmentation", "personal") for name in HEAD}
SPATIAL_ADAPTER = {
    f"adapter.{layer}.{kind}" for layer in ("body.0", "body.1", "body.3", "body.4", "skip.0", "skip.1") for kind in BOTH
}
SPATIAL_ADAPTER -= {"adapter.skip.0.bias"}
ADAPTERS = {f"{block}.attn.{layer}.lora_{matrix}.weight" for block in BLOCKS for layer in "qkv" for matrix in "ab"}


def encoder(state):
    return {name for name in state if name.startswith("encoder.")}


def pflfe(state):
    return {name for name in state if name.startswith(("decoder.", "segmentation_head.", "projector."))}


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setitem(NETWORKS, "small", Small)


def whole(method):
    """A network that has all parts, and whatever the method needs besides."""
    return "resnet" if method in NEEDS else "pvt"


PRIVATE = {
    "apfl": lambda state: set(),
    "centralized": set,
    "ditto": lambda state: set(),
    "fc_pflfe": pflfe,
    "fedavg": lambda state: set(),
    "fedbabu": lambda state: HEAD,
    "fedbn": lambda state: NORMS,
    "feddg": lambda state: set(),
    "feddp": lambda state: QUERIES,
    "fedgkd": lambda state: set(),
    "fedlc": lambda state: HEAD | CALIBRATOR,
    "fednova": lambda state: set(),
    "fedoap": lambda state: QUERIES | SPATIAL_ADAPTER | HEAD,
    "fedper": lambda state: HEAD,
    "fedprox": lambda state: set(),
    "fedrep": lambda state: HEAD,
    "fedrod": lambda state: PERSONAL_HEAD,
    "finetune": lambda state: set(),
    "iop_fl": lambda state: set(),
    "lg_fedavg": encoder,
    "local": set,
    "lora": lambda state: ADAPTERS,
    "moon": lambda state: set(),
    "pfedme": lambda state: set(),
    "pflfe": pflfe,
    "silobn": lambda state: buffers_of(state),
    "ttt": lambda state: set(),
    "virtual_class": lambda state: AFFINITY,
}


@pytest.mark.parametrize("method", METHODS)
def test_which_tensors_are_private_as_exact_keys(plan_for, method):
    """On the default network, or one that the method needs.

    FedDP: PVTv2-b0 has two blocks at each width d = 32, 64, 160, 256, a query is d² weights and d biases:
    2 · (1056 + 4160 + 25,760 + 65,792) = 2 · 96,768 = 193,536 parameters in 4 · 2 · 2 = 16 tensors.
    """
    plan = plan_for(method=method, network=NEEDS.get(method, DEFAULT))
    network = build_network(plan)
    state = network.state_dict()
    partition = partition_of(plan, network)
    assert set(partition.private) == PRIVATE[method](state)
    assert set(partition.shared) == set(state) - set(partition.private)
    if method == "feddp":
        assert len(partition.private) == 16
        assert sum(state[name].numel() for name in partition.private) == 193_536


def windows(tensor):
    raw = tensor.contiguous().numpy().tobytes()
    return {raw[start : start + 32] for start in range(0, max(1, len(raw) - 31), max(32, len(raw) // 4))}


FEDERATED = [name for name in METHODS if METHODS[name].federated]
# those that need a part which the toy network does not have run on a small one with parts, and those that replace layers of
# the default network on one with these
PARTS = {"fc_pflfe", "fedlc", "fedoap", "fedrod", "lg_fedavg", "moon", "pflfe", "ttt"}
REPLACED = {"lora", "virtual_class"}


def smallest(method):
    return "pvt" if method in REPLACED else "small" if method in PARTS else "toy"


SMALLEST = [(m, smallest(m)) for m in FEDERATED]
# batch normalisation has tensors that no optimiser steps: a whole personal model's may not leave either
ON = [(m, whole(m)) for m in FEDERATED] + [(m, "toy") for m in FEDERATED if METHODS[m].personal]


@pytest.mark.parametrize(("method", "network"), ON)
def test_no_message_of_stage_1_holds_a_private_key_or_a_personal_value(plan_for, few_root, tmp_path, method, network):
    """Two rounds of a site through its executor; each answer's bytes, as FLARE would send them with its tensors inline.

    No private tensor's name and none of its values after the round; nor a value of the whole personal model, whose names are
    the shared ones'. Controls: every shared tensor's name and values are found, and the private values differ from them. At 32
    pixels PVTv2's last stage has one pixel: its queries would have no gradient, and nothing of a site's own. A round is one
    step, or two where there is a personal model, whose first one may be that of the model that is sent.
    """
    messages.register_tensors()
    batch = 2 if METHODS[method].personal else 4
    plan = plan_for(method=method, network=network, size=64 if network == "pvt" else 32, batch=batch)
    site = FlareSite(plan, tmp_path, simulated=True, data=few_root / "site-1", consent=["calibration"])
    partition, shared = site.component.expected.partition, site.shared
    for round in range(2):  # or both phases of one
        answer = site.executed(protocol.TRAIN, shared, round=round // plan.phases, phase=round % plan.phases)
        sent, (shared, _) = fobs.dumps(answer), messages.unpack(answer)
        state = site.store.load_state(round + 1)
        assert shared.keys() == set(partition.shared)
        assert state.private.keys() == set(partition.private)
        assert bool(state.personal) == METHODS[method].personal
        assert all(name.encode() in sent for name in shared)
        given = set().union(*map(windows, shared.values()))
        assert those_in(sent, given) == given
        for name in state.private:
            assert name.encode() not in sent
        # IOP-FL's accumulation begins with what it sends in its first round (004: P^0 = w^1); from then on it is its own
        personal = {} if method == "iop_fl" and round == 0 else state.personal
        own = [value for value in (*state.private.values(), *personal.values()) if value.is_floating_point()]
        own = [windows(value) for value in own if value.unique().numel() > 4]  # a layer of zeros looks like any other
        assert those_in(sent, set().union(*own)) == set()
    assert METHODS[method].personal or state.private or not partition.private


@pytest.mark.parametrize("method", FEDERATED)
def test_no_other_message_holds_a_tensor_without_consent(plan_for, few_root, tmp_path, method):
    """After a round, every task of the local stages and the evaluation, from a site that consents to nothing: numbers."""
    stages = tuple(dict.fromkeys((*METHODS[method].stages, "calibrate")))
    plan = plan_for(method=method, network=smallest(method), stages=stages, tune_epochs=1)
    asked = FlareSite(plan, tmp_path, simulated=True, data=few_root / "site-1", consent=[])
    site = asked.open()
    shared = site.partition.split(site.copy())[0]
    for phase in range(plan.phases):
        shared = train(site, shared, 0, phase=phase)[0]
    home = {"tune": [(protocol.TUNE, {})], "calibrate": [(protocol.COLLECT, {}), (protocol.CALIBRATE, {})]}
    home["heads"] = [(protocol.COLLECT_HEADS, {"epoch": 1}), (protocol.CALIBRATE_HEADS, {"epoch": 1})]
    tasks = [(protocol.SCORE, {"round": 1}), (protocol.ADOPT, {"round": 1})]
    tasks += [task for stage in plan.home for task in home[stage]]
    if "spectra" in stages:
        tasks += [(protocol.COLLECT_SPECTRA, {}), (protocol.TAKE_SPECTRA, {})]
    for task, scalars in [*tasks, (protocol.EVALUATE, {})]:
        message = shared if task in protocol.with_shared() else {}
        tensors, said = messages.unpack(asked.executed(task, message, **scalars))
        assert tensors == {}, task
        assert said, task


def test_a_head_is_given_with_consent_only(plan_for, few_root, tmp_path):
    """FedLC's exchange: the head's two tensors from a consenting site, none from the other."""
    plan = plan_for(method="fedlc", network="pvt")
    for name, consent, wanted in (("site-1", ["calibration"], HEAD), ("site-2", [], set())):
        site = FlareSite(plan, tmp_path / name, name, simulated=True, data=few_root / name, consent=consent)
        opened = site.open()
        adopt(opened, opened.partition.split(opened.network.state_dict())[0], 0)
        tensors, scalars = messages.unpack(site.executed(protocol.COLLECT_HEADS, epoch=1))
        assert tensors.keys() == wanted
        assert scalars == {"consent": bool(consent)}


# one of each shape: a private rule and an exchange, a whole personal model, one that is mixed, one that is accumulated, two
# phases of a round, a tuning, an exchange before the rounds
FORGETTING = ("feddp", "ditto", "apfl", "iop_fl", "fedrep", "fedbabu", "feddg")


@pytest.mark.parametrize("method", FORGETTING)
def test_a_site_that_forgets_after_every_task_comes_to_the_same_bits(plan_for, few_root, tmp_path, method):
    """FLARE may start a process for each. Two rounds, each of two steps of two images, so that what one leaves behind is needed
    in the next, and an epoch in each local stage. A network with dropout, by a method of each shape: test_pretended_gpu.py does
    this to one without, by every method, with adapters too."""
    plan = plan_for(method=method, network="toy", start="last", batch=2, tune_epochs=1)
    ends = []
    for fresh in (False, True):
        sites = drive(plan, few_root, tmp_path / str(fresh), fresh=fresh)
        ends.append({name: site.store.read(site.latest())[0] for name, site in sites.items()})
    for name, own in ends[0].items():
        assert own.keys() == ends[1][name].keys()
        assert all(own[key].equal(ends[1][name][key]) for key in own)


@pytest.mark.parametrize("method", ["fedlc", "feddg", "iop_fl", "virtual_class", "pflfe", "fedbabu", "ditto"])
def test_flares_controllers_and_executors_come_to_the_bits_of_one_process(plan_for, few_root, tmp_path, method):
    """Of the shapes that test_simulator.py does not run in FLARE's simulator: an exchange at every epoch, one before the
    rounds, a personal model that is accumulated from what is sent, a network of the method's own, two aggregations a round,
    a tuning, and a personal model that IGC exchanges."""
    igc = {"stages": (*METHODS["ditto"].stages, "calibrate")}
    more = {"fedbabu": {"tune_epochs": 1}, "fedlc": {"heads_epochs": 2}, "ditto": igc}.get(method, {})
    network, batch = ("pvt", 4) if method in REPLACED else ("small", 2)
    plan = plan_for(method=method, network=network, start="last", batch=batch, **more)
    (tmp_path / "server").mkdir()
    policy = {"consent": list(protocol.CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1}
    sites = {name: FlareSite(plan, tmp_path / name, name, simulated=True, data=few_root / name, **policy) for name in SITES}

    def answer(site, task, tensors, scalars):
        return sites[site].answer(task, tensors, **scalars)

    run = Run(tmp_path / "server", plan, list(SITES), answer).run(*plan.stages, "evaluate")
    assert run.panics == []
    for name, site in drive(plan, few_root, tmp_path / "plain").items():
        wanted, found = (made.store.read(made.latest())[0] for made in (site, sites[name].open()))
        assert found.keys() == wanted.keys()
        assert all(found[key].equal(wanted[key]) for key in wanted)


# --- batch normalisation: what happens to buffers ---------------------------------------------------------------------------


def buffers_of(names):
    return {name for name in names if name.rsplit(".", 1)[1] in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("method", [name for name in FEDERATED if name != "lora"])  # it refuses a network without attention
def test_buffers_go_with_their_layers(plan_for, method):
    """ResNet-18 has 20 batch normalisations, FPN none: 60 buffers, private with the encoder or the normalisations."""
    if method in ("feddp", "fedoap"):  # a network without queries is refused; keys of another rule stand for it
        plan = plan_for(method=method, network="resnet18-fpn", private="head")
    else:
        plan = plan_for(method=method, network="resnet18-fpn")
    partition = partition_of(plan, build_network(plan))
    private, shared = buffers_of(partition.private), buffers_of(partition.shared)
    assert (len(private), len(shared)) == ((60, 0) if method in ("fedbn", "lg_fedavg", "local", "silobn") else (0, 60))


def sites_of(plan, root, tmp_path, names=SITES):
    return [Site(name, SiteFolder.open(root / name), plan, Store(tmp_path / name)) for name in names]


def test_fedbn_keeps_every_site_s_statistics(plan_for, few_root, tmp_path):
    """After a round and an average, each site still has its own running statistics and its own γ and β of every layer."""
    sites = sites_of(plan_for(method="fedbn", network="resnet"), few_root, tmp_path)
    first = sites[0].partition.split(sites[0].network.state_dict())[0]
    mean = average({site.name: train(site, first, 0)[0] for site in sites}, dict.fromkeys(SITES, 1.0))
    own = [site.store.load_state(1).private for site in sites]
    for site, private in zip(sites, own, strict=True):
        adopt(site, mean, 1)
        adopted = site.store.read("start")[0]
        assert all(adopted[name].equal(private[name]) for name in private)
    differing = [name for name in own[0] if not own[0][name].equal(own[1][name])]
    assert {name for name in own[0] if name.endswith(("running_mean", "running_var"))} <= set(differing)


def test_a_rule_that_selects_nothing_is_an_error(plan_for, monkeypatch):
    """FedBN on a network without normalisation; NONE and ALL are explicit, and select nothing and everything."""
    monkeypatch.setitem(NETWORKS, "plain", lambda channels, classes, pretrained: torch.nn.Sequential(torch.nn.Conv2d(3, 1, 1)))
    plan = plan_for(method="fedbn", network="plain")
    with pytest.raises(FedDPError, match="the role 'norm' selects no tensor of Sequential"):
        partition_of(plan, build_network(plan))
    for rule, private in (("none", 0), ("all", 2)):
        plan = plan_for(method="fedbn", network="plain", private=rule)
        assert len(partition_of(plan, build_network(plan)).private) == private


# --- the calibration after any method -------------------------------------------------------------------------------------


ALIKE = ("fedavg", "feddg", "fedgkd", "moon", "fednova", "fedprox", "ttt")


@pytest.mark.parametrize(("method", "network"), SMALLEST)
def test_igc_follows_any_method(plan_for, few_root, tmp_path, method, network):
    """What a site gives, joined with the start of its peer, is its own network to the bit; and the calibration runs with it.

    Where every site ends with the same network there is nothing to give, and no peer.
    """
    stages = tuple(dict.fromkeys((*METHODS[method].stages, "calibrate")))
    plan = plan_for(method=method, network=network, stages=stages, rounds=1, tune_epochs=1, calibration_epochs=1)
    one, two = drive(plan, few_root, tmp_path).values()
    given = personal(one)
    own = one.store.read(one.latest(before="calibrated"))[0]
    rebuilt = two.store.read("start")[0] | given
    assert rebuilt.keys() == own.keys()
    assert all(rebuilt[name].equal(own[name]) for name in own)
    assert one.store.has("calibrated")
    assert bool(given) == one.store.has("peers") == (method not in ALIKE)


# --- methods of other packages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([("mine", "no_such_package:Mine")], "'mine' of no_such_package:Mine cannot be loaded: No module named"),
        ([("mine", "feddp.methods.fedavg:Mine")], "'mine' of feddp.methods.fedavg:Mine cannot be loaded"),
        ([("mine", "pathlib:Path")], "'mine' of pathlib:Path is not a feddp.methods.base.Method"),
        ([("fedavg", "feddp.methods.fedper:FedPer")], "there are two methods 'fedavg'"),
        ([("mine", "feddp.methods.fedper:FedPer"), ("mine", "feddp.methods.fedavg:FedAvg")], "there are two methods 'mine'"),
    ],
)
def test_another_package_s_mistake_is_named(monkeypatch, points, message):
    """Broken, missing or taken: said with the entry point it comes from; our own methods are still there."""
    monkeypatch.setattr(
        "feddp.methods.entry_points", lambda group: [EntryPoint(name, value, group) for name, value in points if group == GROUP]
    )
    found = Methods()
    assert found["fedavg"] is METHODS["fedavg"]
    with pytest.raises(FedDPError, match=message):
        _ = found["mine"], list(found)


def test_a_setting_that_takes_another_s_name_is_refused(monkeypatch):
    """A method's `lr` would silently be the training's too."""

    @dataclass(frozen=True)
    class Hyper:
        lr: float = setting(0.5, "a rate of its own")

    class Mine(Method):
        pass

    Mine.Hyper = Hyper
    monkeypatch.setitem(OWN, "mine", Mine)
    with pytest.raises(FedDPError, match="method mine: the setting 'lr' exists already"):
        Plan.known_settings("mine")
