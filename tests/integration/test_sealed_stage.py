"""Executors, guards and the server's stages with sealed exchanges between them, in one process, without FLARE's own."""

import json
from dataclasses import replace

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode
from safetensors.torch import load_file

from feddp import protocol
from feddp.adaptation.request import AdaptationRequest
from feddp.errors import FedDPError
from feddp.files import WEIGHTS
from feddp.flare import messages
from feddp.networks.weights import fingerprint, save_network
from feddp.partition import QUERY
from feddp.plan.resolve import build_network
from feddp.protocol import Kind, spec_of
from feddp.sealing.identity import Identity
from feddp.sealing.session import HANDSHAKE, SEALED, Session
from feddp.stages.train import adopt
from feddp.training.store import by_site, together
from support.certificates import SERVER, Office, kit_of
from support.server import Run
from support.site import FlareSite

NAMES = ("A", "B", "C")
EVERYTHING = ("calibration", "spectra", "outside")


@pytest.fixture(scope="module")
def office():
    return Office()


@pytest.fixture(scope="module")
def issued(office):
    return {name: office.issue(name) for name in (*NAMES, "N", "Z")}


def adopted(made):
    """As stage 1 leaves a site, with queries of its own."""
    site = made.open()
    state = site.network.state_dict()
    chance = torch.Generator().manual_seed(ord(made.name))
    with torch.no_grad():
        for name in site.partition.private:
            if state[name].is_floating_point():
                state[name].add_(torch.randn(state[name].shape, generator=chance) / 10)
    adopt(site, {name: state[name].clone() for name in site.partition.shared}, 0)
    return made


def tensors_of(site, task, sent=None, **scalars):
    return messages.unpack(site.answer(task, sent, **scalars))[0]


@pytest.fixture
def hospitals(tmp_path, office, issued, tiny_root):
    """Makes a federation of sites that have adopted γ; `policies` are one's own, by name."""

    def make(plan, secure=True, at="sites", names=NAMES, **policies):
        made = {}
        for i, name in enumerate(names):
            root = tmp_path / at
            if secure:
                kit_of(root / name, name, office, *issued[name])
            data = tiny_root / f"site-{i % 2 + 1}"
            policy = {"data": data, "consent": list(EVERYTHING), "seed": "plan"} | policies.get(name, {})
            made[name] = adopted(FlareSite(plan, root / name, name, simulated=not secure, **policy))
        return made

    return make


@pytest.fixture
def federated(tmp_path):
    """Runs a stage among hospitals; gives the run and everything that the server was sent."""

    def start(made, plan, stage, secure=True, change=lambda site, task, reply: reply):
        seen = []

        def answer(site, task, tensors, scalars):
            reply = change(site, task, made[site].answer(task, tensors, **scalars))
            if reply.get_return_code(ReturnCode.OK) == ReturnCode.OK:
                seen.append((site, task, dict(messages.unpack(reply)[0])))
            return reply

        folder = tmp_path / f"server-{secure}-{len(list(tmp_path.glob('server*')))}"
        folder.mkdir()
        run = Run(folder, plan, list(made), answer, secure=secure).run(stage)
        return run, seen

    return start


def bytes_of(seen):
    return [value.numpy().tobytes() for _, _, tensors in seen for value in tensors.values()]


# --- the same results, and what the server sees -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "stage", "slot", "collected"),
    [
        ("feddp", "calibrate", "calibrated", ["introduce", "collect"]),
        ("fedlc", "heads", "heads", ["introduce", "collect_heads", "collect_heads"]),
        ("feddg", "spectra", "spectra", ["introduce_spectra", "collect_spectra"]),
    ],
)
def test_sealed_and_in_the_clear_give_the_same_bits(method, stage, slot, collected, hospitals, federated, plan_for, capsys):
    """Three sites, the real stage, executors and guards. In the clear the server sees every exchanged value (the control);
    sealed, it sees handshakes and envelopes, and no value of any site's."""
    plan = plan_for(method=method, sites=NAMES, calibration_epochs=2, heads_epochs=2)
    clear, sealed = hospitals(plan, secure=False, at="clear"), hospitals(plan)
    run, seen = federated(clear, plan, stage, secure=False)
    assert run.panics == []
    given = [tensors for _, task, tensors in seen if spec_of(task).kind is Kind.COLLECTION]
    assert len(given) == 3 * (len(collected) - 1)
    pieces = [value.numpy().tobytes()[:64] for tensors in given for value in tensors.values() if value.numel() >= 16]
    assert all(any(piece in content for content in bytes_of(seen)) for piece in pieces), "the control"

    run, seen = federated(sealed, plan, stage)
    assert run.panics == []
    assert [task for task, _, _ in run.sent if spec_of(task).kind is not Kind.DELIVERY] == collected
    assert all(tensors.keys() == {SEALED} for _, task, tensors in seen if spec_of(task).kind is Kind.COLLECTION)
    assert sum(spec_of(task).kind is Kind.COLLECTION for _, task, _ in seen) == len(given)
    assert all(tensors.keys() == {HANDSHAKE} for _, task, tensors in seen if task.startswith("introduce"))
    everything = bytes_of(seen) + [v.numpy().tobytes() for _, _, data in run.sent for v in messages.unpack(data)[0].values()]
    assert not any(piece in content for content in everything for piece in pieces)
    for name in NAMES:
        one, other = (load_file(made[name].store.folder / f"{slot}.safetensors") for made in (clear, sealed))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert {e["event"] for e in sealed["A"].events()} >= {"seal", "open"}
    assert not {e["event"] for e in clear["A"].events()} & {"seal", "open"}


@pytest.fixture
def plan(toy, plan_for):
    return plan_for(network=toy, sites=NAMES)


def test_a_site_that_does_not_consent_gives_nothing_and_receives_nothing(hospitals, federated, plan):
    """C shows no certificate either; nobody seals for it. Asked again by a server that shows what it likes, C stays silent."""
    made = hospitals(plan, C={"consent": ["outside"]})
    run, seen = federated(made, plan, "calibrate")
    assert run.panics == []
    assert run.memory.peers == {"A": ["B"], "B": ["A"], "C": []}
    assert [(site, task) for site, task, tensors in seen if tensors and site == "C"] == []
    assert [e["recipients"] for e in made["A"].events() if e["event"] == "seal"] == [["B"]]
    shown = together({name: tensors_of(made[name], protocol.INTRODUCE) for name in NAMES})
    assert {name.split("/")[0] for name in shown} == {"A", "B"}
    assert tensors_of(made["C"], protocol.COLLECT, shown) == {}
    envelope = tensors_of(made["A"], protocol.COLLECT, shown)
    reply = made["C"].answer(protocol.CALIBRATE, together({"A": envelope}))
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "has not sent a handshake" in made["C"].last_error()


def test_a_policy_names_who_receives(hospitals, federated, plan):
    """A gives to B alone: C is calibrated with B, B with both, A with both, for they named nobody. The results count peers."""
    run, _ = federated(hospitals(plan, A={"recipients": ["B"]}), plan, "calibrate")
    assert run.panics == []
    assert run.memory.peers == {"A": ["B", "C"], "B": ["A", "C"], "C": ["B"]}


# --- what a server cannot do ----------------------------------------------------------------------------------------------


@pytest.fixture
def collected(hospitals, plan):
    """Three sites whose envelopes the server holds."""
    made = hospitals(plan)
    shown = together({name: tensors_of(made[name], protocol.INTRODUCE) for name in NAMES})
    return made, shown, {name: tensors_of(made[name], protocol.COLLECT, shown) for name in NAMES}


def refuses(site, task, tensors, **scalars):
    """What the site writes down for itself; the server gets a code, and the site's network is as it was."""
    before = {path.name: path.read_bytes() for path in site.store.folder.glob("*.safetensors")}
    assert site.answer(task, tensors, **scalars).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert {path.name: path.read_bytes() for path in site.store.folder.glob("*.safetensors")} == before
    return site.last_error()


def test_tensors_in_the_clear_are_refused_by_a_site(collected):
    made, _, given = collected
    site = made["B"].open()
    personal = {name: site.network.state_dict()[name].clone() for name in site.partition.private}
    assert "may send only the bytes sealed" in refuses(made["A"], protocol.CALIBRATE, together({"B": personal}))
    assert "may send only the bytes sealed" in refuses(
        made["A"], protocol.CALIBRATE, together({"B": personal, "C": given["C"]})
    )
    assert made["A"].answer(protocol.CALIBRATE, together({"B": given["B"], "C": given["C"]})).get_return_code("") == "", (
        "control"
    )


def test_a_spoilt_swapped_or_repeated_envelope_costs_a_site_the_stage_and_not_its_network(collected):
    made, _, given = collected
    spoilt = given["B"][SEALED].clone()
    spoilt[-300] ^= 1
    assert "was changed after it was signed" in refuses(made["A"], protocol.CALIBRATE, together({"B": {SEALED: spoilt}}))
    assert "certificate for site C belongs to B" in refuses(made["A"], protocol.CALIBRATE, together({"C": given["B"]}))
    assert "is of task 'collect'" in refuses(made["A"], protocol.CALIBRATE_HEADS, together({"B": given["B"]}), epoch=1)
    made["A"].answer(protocol.CALIBRATE, together({"B": given["B"]}))
    assert "was opened before" in refuses(made["A"], protocol.CALIBRATE, together({"B": given["B"]}))


def test_a_certified_site_of_the_project_that_is_not_of_the_job_gives_nothing(collected, office, issued):
    """Z has a certificate of the project, and seals for A what a peer would give; the plan's sites are A, B and C. A opens
    nothing, of B neither. The controls: Z's envelope is a valid one, and without Z the same task is answered."""
    made, shown, given = collected
    site, a = made["B"].open(), made["A"]
    personal = {name: site.network.state_dict()[name].clone() for name in site.partition.private}
    envelope = sealed_by("Z", office, issued, personal, shown, "calibration", "collect")
    message = refuses(a, protocol.CALIBRATE, together({"B": given["B"], "Z": envelope}))
    assert "calibrate brought tensors of Z, not among this job's sites; nothing was opened" in message
    assert not [event for event in a.events() if event["event"] == "open"]
    assert a.component.seals(a.fl_ctx).open("calibration", "collect", 0, {"Z": envelope})["Z"].keys() == personal.keys()
    assert a.answer(protocol.CALIBRATE, together({"B": given["B"]})).get_return_code("") == ""


def sealed_by(name, office, issued, tensors, shown, word, task):
    """What a certified site seals for those whose handshakes are `shown`, whatever the job says."""
    session = Session(Identity(name, *issued[name], office.root, SERVER), "job")
    session.meet(word, task, 0, by_site(shown), None)
    return session.seal(task, tensors)


def test_a_false_handshake_ends_the_exchange_at_the_giver(hospitals, plan):
    """The server shows C's certificate as B's, and then asks without showing anyone at all: nothing is sent."""
    made = hospitals(plan)
    shown = together({name: tensors_of(made[name], protocol.INTRODUCE) for name in NAMES})
    message = refuses(made["A"], protocol.COLLECT, shown | {f"B/{HANDSHAKE}": shown[f"C/{HANDSHAKE}"]})
    assert message.startswith("the certificate for site B belongs to C")
    assert tensors_of(made["A"], protocol.COLLECT) == {}
    assert tensors_of(made["A"], protocol.COLLECT, shown).keys() == {SEALED}, "the control"


def test_the_guard_seals_even_where_the_executor_was_not_asked_well(collected):
    """What the guard lets pass of a collection is sealed for those met for it, once; a second result has met nobody."""
    made, _, _ = collected
    a = made["A"]
    site = a.open()
    personal = messages.pack({name: site.network.state_dict()[name].clone() for name in site.partition.private}, consent=True)
    with pytest.raises(FedDPError, match="site A: collect came without handshakes of peers; nothing was sent"):
        a.guarded(protocol.COLLECT, personal)
    a.component.context(a.fl_ctx).simulated = True
    assert a.sends(protocol.COLLECT, personal)[0].keys() == set(site.partition.private), "control"


def test_the_guard_looks_before_it_seals(hospitals, plan):
    """A hospital that never shares its queries gives none, sealed or not."""
    made = hospitals(plan, A={"private": [QUERY]})
    shown = together({name: tensors_of(made[name], protocol.INTRODUCE) for name in NAMES})
    assert made["A"].answer(protocol.COLLECT, shown).get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "tried to send 2 tensors that may not leave" in made["A"].guard_error


def test_a_handshake_carries_nothing_of_the_executors(hospitals, plan):
    """Not even bytes under its name; and without consent it is empty."""
    made = hospitals(plan, B={"consent": []})
    riding = messages.pack({HANDSHAKE: torch.zeros(9, dtype=torch.uint8)}, consent=True)
    with pytest.raises(FedDPError, match=r"task introduce tried to send 1 tensors that may not leave \(introduction"):
        made["A"].guarded(protocol.INTRODUCE, riding)
    said = json.loads(tensors_of(made["A"], protocol.INTRODUCE)[HANDSHAKE].numpy().tobytes())
    assert said["certificate"] == (made["A"].folder / "startup/client.crt").read_text()
    assert said["statement"].keys() == {"site", "job", "exchange", "challenge"}
    assert tensors_of(made["B"], protocol.INTRODUCE) == {}


def test_a_site_whose_own_kit_is_wrong_says_so_at_home(hospitals, plan, issued, office, tmp_path):
    """A key that is not the certificate's: the server gets a code, and the exchange has two sites."""
    made = hospitals(plan)
    other = kit_of(tmp_path / "other", "A", office, *issued["B"]) / "startup/client.key"
    (made["A"].folder / "startup/client.key").write_bytes(other.read_bytes())
    assert made["A"].answer(protocol.INTRODUCE).get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "site A: it cannot seal or open tensors:" in made["A"].guard_error
    assert "client.key: is not the key of client.crt" in made["A"].guard_error


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda sent: {"q.weight": torch.zeros(4, 3, 1, 1), "q.bias": torch.zeros(4)}, "may send only the bytes sealed"),
        (lambda sent: sent | {"q.bias": torch.zeros(4)}, "may send only the bytes sealed"),
        (lambda sent: {SEALED: sent[SEALED].float()}, "may send only the bytes sealed"),
        (lambda sent: {SEALED: torch.zeros(99, dtype=torch.uint8)}, "did not send a sealed envelope"),
        (lambda sent: {SEALED: torch.zeros(2**20 + 999, dtype=torch.uint8)}, "the limit is"),
    ],
)
def test_the_server_takes_envelopes_alone(hospitals, federated, plan, change, reason):
    """B's answer is replaced; A and C go on with each other's."""

    def spoil(site, task, reply):
        if (site, task) != ("B", "collect"):
            return reply
        tensors, scalars = messages.unpack(reply)
        return messages.pack(change(tensors), **scalars)

    run, _ = federated(hospitals(plan), plan, "calibrate", change=spoil)
    assert run.panics == []
    (refused,) = run.progress("refused")
    assert reason in refused["reason"]
    assert run.memory.peers == {"A": ["C"], "B": [], "C": ["A"]}


@pytest.fixture
def adapting(hospitals, plan):
    """An unseen site N of the donors A and B, before any task; C is a site of the run and no donor."""
    made = hospitals(plan, names=(*NAMES, "N"))
    asked = AdaptationRequest("N", ("A", "B"), "earlier", "average").to_json()
    part = made["N"].component.expected.partition
    shared = {name: value for name, value in build_network(plan).state_dict().items() if name in part.shared}
    late = replace(plan, weights=fingerprint(shared), settings=plan.settings | {"min_sites": 1})
    for site in made.values():
        site.request = asked
        site.submitted(late)
    return made, late, shared


def test_a_site_that_is_no_donor_gives_an_unseen_site_nothing(adapting, office, issued, plan):
    """C consents, is certified and took part in the run; the request names A and B. The control: A's model is adapted."""
    made, _, shared = adapting
    n = made["N"]
    shown = together({"N": tensors_of(n, protocol.JOIN)})
    model = personal(made["A"], plan)
    a = tensors_of(made["A"], protocol.GIVE_MODEL, shown)
    c = sealed_by("C", office, issued, model, shown, "outside", "give_model")
    message = refuses(n, protocol.ADAPT, together({"A": a, "C": c, "global": shared}))
    assert "adapt brought tensors of C, not among this job's donors; nothing was opened" in message
    assert not (n.store.folder / "masks").exists()
    assert n.answer(protocol.ADAPT, together({"A": a, "global": shared})).get_return_code("") == ""
    assert json.loads((n.store.folder / "masks/adapt.json").read_text())["models"] == ["A", "global"]


def test_models_for_a_newcomer_are_sealed_for_it_alone(hospitals, plan, tmp_path):
    """The real stage, two donors and one whose policy names others. The newcomer's masks are those of a run in the clear. No
    tensor of a donor's is in what the server gets or sends; γ, which the job brought, is (the control), and so they are in the
    clear."""
    masks = {}
    for secure, donors in ((False, "AB"), (True, "ABC")):
        made = hospitals(plan, secure, at=f"late-{secure}", names=(*donors, "N"), C={"recipients": ["A", "B"]})
        own = {name: personal(made[name], plan) for name in donors}
        asked = AdaptationRequest("N", tuple(donors), "earlier", "routing", {"epochs": 1}).to_json()
        part = made["N"].component.expected.partition
        shared = {name: value for name, value in build_network(plan).state_dict().items() if name in part.shared}
        folder = tmp_path / f"server-{secure}"
        save_network(folder / "config" / WEIGHTS, shared, {})
        passed = []

        def answer(site, task, tensors, scalars, made=made, passed=passed):
            reply = made[site].answer(task, tensors, **scalars)
            passed += [*tensors.values(), *messages.unpack(reply)[0].values()]
            return reply

        late = replace(plan, weights=fingerprint(shared), settings=plan.settings | {"min_sites": 1})
        for site in made.values():
            site.request = asked
            site.submitted(late)
        run = Run(folder, late, [*made], answer, secure=secure, request=asked).run("adapt")
        assert run.panics == []
        left = json.loads((folder / "results.json").read_text())
        assert (left["sealed"], left["donors"]) == (secure, ["A", "B"])
        assert left["without"] == ({"C": "its policy does not name the unseen site among its recipients"} if secure else {})
        contents = [value.numpy().tobytes() for value in passed]
        for name in donors:
            for value in own[name].values():
                if value.numel() >= 4:
                    assert any(value.numpy().tobytes() in content for content in contents) != secure
        assert any(shared["head.weight"].numpy().tobytes() in content for content in contents)
        masks[secure] = {path.name: path.read_bytes() for path in (made["N"].store.folder / "masks").glob("*.png")}
    assert masks[True] == masks[False]
    assert len(masks[True]) >= 2


def personal(hospital, plan):
    """What an earlier job left at a donor: a network whose every value is its own."""
    chance = torch.Generator().manual_seed(ord(hospital.name))
    state = hospital.component.expected.network.state_dict()
    state = {k: torch.rand(v.shape, generator=chance) if v.is_floating_point() else v for k, v in state.items()}
    save_network(hospital.folder / "feddp/earlier/calibrated.safetensors", state, plan.metadata)
    return state
