"""Executors, guards and the server's stages with sealed exchanges between them, in one process, without FLARE's own."""

import csv
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.fuel.sec.audit import AuditService
from safetensors.torch import load_file

from feddp import protocol
from feddp.adaptation.request import AdaptationRequest
from feddp.errors import FedDPError
from feddp.files import WEIGHTS
from feddp.flare import messages
from feddp.flare.context import SiteContext
from feddp.networks import NETWORKS
from feddp.networks.weights import fingerprint, save_network
from feddp.partition import QUERY
from feddp.plan.resolve import build_network
from feddp.protocol import Kind, spec_of
from feddp.reporting.page import write_markdown
from feddp.sealing.envelope import recipients_of
from feddp.sealing.identity import Identity
from feddp.sealing.note import NOTE, SharedNotes
from feddp.sealing.session import HANDSHAKE, SEALED, Session, as_bytes, as_tensor
from feddp.stages import agreement, answered
from feddp.stages.exchange import introduce
from feddp.stages.message import Message
from feddp.stages.precision import halved
from feddp.stages.site import last_network
from feddp.stages.train import START, adopt
from feddp.training.store import by_site, together
from support.certificates import SERVER, Office, kit_of, server_kit
from support.server import Run
from support.site import FlareSite
from support.small import Small

NAMES = ("A", "B", "C")
EVERYTHING = ("calibration", "spectra", "outside")


@pytest.fixture(scope="module")
def office():
    return Office()


@pytest.fixture(scope="module")
def issued(office):
    return {name: office.issue(name) for name in (*NAMES, "N", "Z")} | {SERVER: office.issue(SERVER, host=SERVER)}


@pytest.fixture(autouse=True)
def _audited(tmp_path):
    """FLARE's audit file, which the sites of this process share."""
    AuditService.close()
    AuditService.initialize(str(tmp_path / "audit.txt"))
    yield
    AuditService.close()


def adopted(made):
    """As stage 1 leaves a site, with queries of its own."""
    site = made.open()
    adopt(site, {name: site.network.state_dict()[name].clone() for name in site.partition.shared}, 0)
    state = site.network.state_dict()
    chance = torch.Generator().manual_seed(ord(made.name))
    with torch.no_grad():
        for name in site.partition.private:
            if state[name].is_floating_point():
                state[name].add_(torch.randn(state[name].shape, generator=chance) / 10)
    site.save(START)
    return made


def tensors_of(site, task, sent=None, **scalars):
    return messages.unpack(site.answer(task, sent, **scalars))[0]


@pytest.fixture
def hospitals(tmp_path, office, issued, tiny_root):
    """Makes a federation of sites that have adopted γ; `policies` are one's own, by name."""

    def make(plan, secure=True, at="sites", names=NAMES, fresh=False, **policies):
        made = {}
        for i, name in enumerate(names):
            root = tmp_path / at
            if secure:
                kit_of(root / name, name, office, *issued[name])
            data = tiny_root / f"site-{i % 2 + 1}"
            policy = {"data": data, "consent": list(EVERYTHING), "seed": "plan", "min_images": 2} | policies.get(name, {})
            made[name] = FlareSite(plan, root / name, name, simulated=not secure, agrees=secure, **policy)
            if not fresh:
                adopted(made[name])
        return made

    return make


@pytest.fixture
def federated(tmp_path, office, issued):
    """Runs stages among hospitals; gives the run and everything that the server was sent."""

    def start(made, plan, *stages, secure=True, change=lambda site, task, reply: reply):
        seen = []

        def answer(site, task, tensors, scalars):
            reply = change(site, task, made[site].answer(task, tensors, **scalars))
            if reply and reply.get_return_code(ReturnCode.OK) == ReturnCode.OK:
                seen.append((site, task, dict(messages.unpack(reply)[0])))
            return reply

        folder = tmp_path / f"server-{secure}-{len(list(tmp_path.glob('server*')))}"
        server_kit(folder, office, *issued[SERVER])
        run = Run(folder, plan, list(made), answer, secure=secure).run(*stages)
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
def test_sealed_and_in_the_clear_give_the_same_bits(
    method, stage, slot, collected, hospitals, federated, plan_for, pvt, capsys
):
    """Three sites, the real stage, executors and guards. In the clear the server sees every exchanged value (the control);
    sealed, it sees handshakes and envelopes, and no value of any site's."""
    plan = plan_for(method=method, network=pvt, sites=NAMES, calibration_epochs=2, heads_epochs=2)
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


# --- the sites agree on the shared tensors ------------------------------------------------------------------------------


def trained(federated, made, plan, alter=lambda site, task, tensors, scalars: (tensors, scalars), stages=("train",)):
    """Stage 1 among hospitals, of which each is sent what `alter` makes of it."""
    told = {name: site.answer for name, site in made.items()}
    for name, site in made.items():

        def answer(task, tensors=None, name=name, **scalars):
            tensors, scalars = alter(name, task, tensors, scalars)
            return told[name](task, tensors, **scalars)

        site.answer = answer
    return federated(made, plan, *stages)


def refusals(run):
    """{site: the first reason}."""
    return {event["site"]: event["reason"] for event in reversed(run.progress("refused"))}


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_sites_sign_what_they_are_sent(precision, hospitals, federated, plan_for, toy):
    """As in the clear, to the bit. Each of them signs a note before each task with shared tensors; half precision is rounded
    by the server's filter, which this run in one process does not have, so its γ is of the sort that has nothing to round."""
    plan = plan_for(method="fedavg", network=toy, sites=NAMES, rounds=2, start="last", precision=precision)
    made = hospitals(plan, fresh=True)
    if precision == "float16":
        run, seen = trained(federated, made, plan, lambda site, task, tensors, scalars: (halved(tensors or {}), scalars))
    else:
        run, seen = trained(federated, made, plan)
    assert run.panics == []
    assert refusals(run) == {}
    asked = [task for task, _, _ in run.sent]
    assert asked == ["agree", "train", "agree", "train", "agree", "adopt"]
    notes = [tensors for _, task, tensors in seen if task == "agree"]
    assert len(notes) == 3 * asked.count("agree")
    assert all(tensors.keys() == {NOTE} for tensors in notes)
    assert max(tensors[NOTE].numel() for tensors in notes) < 4096


def test_a_server_that_gives_one_site_other_tensors_is_found_at_once(hospitals, federated, plan_for, toy, monkeypatch):
    """By one bit. C is sent another γ than A and B, once as A and B are told, and once as it is told itself."""
    plan = plan_for(method="fedavg", network=toy, sites=NAMES, rounds=1, min_sites=2)

    def other(site, task, tensors, scalars):
        if site == "C" and task == "train":
            name = next(iter(tensors))
            tensors = tensors | {name: tensors[name] + 1e-7}
        return tensors, scalars

    made = hospitals(plan, fresh=True)
    run, _ = trained(federated, made, plan, other)
    assert "it refused the shared tensors of train" in refusals(run)["C"]
    assert refusals(run).keys() == {"C"}
    assert "site C: it was sent other shared tensors for train of round 0 than this site was told of" in made["C"].last_error()

    def lied(site, task, tensors, scalars):
        tensors, scalars = other(site, task, tensors, scalars)
        if site == "C" and task == "agree":
            scalars = scalars | {"shared": "0" * 64}
        return tensors, scalars

    run, _ = trained(federated, hospitals(plan, fresh=True, at="honest"), plan, lied)
    assert "its note states something else than it was told" in refusals(run)["C"], (
        "a server that is honest takes C for the liar"
    )
    monkeypatch.setattr(agreement, "statement_in", lambda site, note, accept: Anything())
    made = hospitals(plan, fresh=True, at="lied")
    run, _ = trained(federated, made, plan, lied)
    assert run.panics
    assert refusals(run).keys() == set(NAMES), "each sees that another one was told otherwise"
    assert "site C was told of other shared tensors" in made["A"].last_error()


def test_a_site_that_states_no_images_ends_no_round(hospitals, federated, plan_for, toy, monkeypatch):
    """It would be the others' reason to refuse the round, the server would blame them, and they would keep the number."""
    plan = plan_for(method="fedavg", network=toy, sites=NAMES, rounds=1, min_sites=2)
    made, sign = hospitals(plan, fresh=True), SharedNotes.sign

    def none(notes, plan, samples, steps):
        return sign(notes, plan, 0 if notes.identity.name == "C" else samples, steps)

    monkeypatch.setattr(SharedNotes, "sign", none)
    run, _ = trained(federated, made, plan)
    assert run.panics == []
    assert refusals(run).keys() == {"C"}
    assert "site C: its note" in refusals(run)["C"]
    assert "C" not in json.loads((made["A"].store.folder / "samples.json").read_text())


@pytest.mark.parametrize("least", [2, 3])
def test_who_signs_badly_is_left_out_by_name_and_nobody_else_is_blamed(least, hospitals, federated, plan_for, toy, monkeypatch):
    """If the server relayed the note, A and B would have too few notes and refuse the round."""
    plan = plan_for(method="fedavg", network=toy, sites=NAMES, rounds=1, min_sites=least)
    made, sign = hospitals(plan, fresh=True), SharedNotes.sign

    def spoilt(notes, *given):
        note = json.loads(sign(notes, *given))
        return json.dumps(note | ({"signature": "00" * 256} if notes.identity.name == "C" else {})).encode()

    monkeypatch.setattr(SharedNotes, "sign", spoilt)
    run, _ = trained(federated, made, plan)
    assert refusals(run).keys() == {"C"}
    assert "site C: it did not sign the note" in refusals(run)["C"]
    assert len(run.panics) == least - 2
    assert all("site C: it did not sign" in panic and "site A" not in panic for panic in run.panics)


def test_another_number_of_images_is_named_with_its_remedy(hospitals, federated, plan_for, toy, monkeypatch):
    """Of a site that was started again with other images, in its note, before it trains."""
    plan = plan_for(method="fedavg", network=toy, sites=NAMES, rounds=1, min_sites=2)
    made, sign = hospitals(plan, fresh=True), SharedNotes.sign

    def more(notes, plan, samples, steps):
        return sign(notes, plan, samples + (notes.identity.name == "C"), steps)

    monkeypatch.setattr(SharedNotes, "sign", more)
    run, _ = trained(federated, made, plan, stages=("ready", "train"))
    assert refusals(run).keys() == {"C"}
    assert refusals(run)["C"].startswith("site C: it trains on 9 images, and stated 8 when the job began; restore its images")


@pytest.mark.parametrize("asked", [{"round": 10**6}, {"round": -1}, {"round": True}, {"phase": 1}, {"phase": -1}])
def test_a_site_signs_for_the_steps_of_its_plan_alone(asked, hospitals, plan):
    """It keeps what it has signed: a server that asks for ever would fill its memory."""
    made = hospitals(plan, fresh=True, at=str(asked))
    told = {"brought_by": protocol.TRAIN, "round": 0, "phase": 0, "shared": "0" * 64, "sites": list(NAMES)}
    assert made["A"].answer(protocol.AGREE, **told).get_return_code() == ReturnCode.OK
    assert made["A"].answer(protocol.AGREE, **told | asked).get_return_code() != ReturnCode.OK


@pytest.mark.parametrize(("method", "phases"), [("fedavg", 1), ("pflfe", 2)])
def test_a_site_that_does_not_sign_is_waited_for_once_a_round(method, phases, hospitals, federated, plan_for, monkeypatch):
    """C lives, and does not answer the first round's question for a note. The others train without waiting for it, in each
    phase; in the second round it is asked again."""
    monkeypatch.setitem(NETWORKS, "small", Small)  # pFLFE asks for an encoder
    plan = plan_for(method=method, network="small", sites=NAMES, rounds=2, min_sites=2, start="last")
    made = hospitals(plan, fresh=True)
    told = []

    def silent(site, task, reply):
        told.append((site, task))
        return None if site == "C" and task == "agree" and told.count((site, task)) == 1 else reply

    run, _ = federated(made, plan, "train", change=silent)
    assert run.panics == []
    asked = [(task, targets) for task, targets, _ in run.sent if task in ("agree", "train")]
    every, signed = list(NAMES), list(NAMES[:2])
    first = [("agree", every), ("train", signed)] + [("agree", signed), ("train", signed)] * (phases - 1)
    assert asked[: 2 * phases] == first
    assert all(targets == every for _, targets in asked[2 * phases :])
    assert [(event["site"], event["reason"]) for event in run.progress("refused")] == [
        ("C", "site C: no answer to agree, so it is not asked for train either")
    ]
    assert run.memory.missed == {"C": 1}


@pytest.mark.parametrize("sent", [True, False], ids=["with its note", "without"])
def test_who_joins_late_knows_how_many_images_a_lost_site_has(sent, hospitals, federated, plan_for, toy, monkeypatch):
    """C, of 400 images, trains in two rounds and is gone; B, of 8 as A, joins in the third. C counts as 18 · 8 images, 36 steps
    of batches of 4. It moves by 68 lr a round, the mean of A and C by 34 lr, 68 lr in all. B allows 7.3 lr for each step of a
    mean of two: 2 rounds of (36 + 2) / 2 steps, 277 lr; without C's number 2 rounds of 2 steps, 29 lr.
    """
    monkeypatch.setattr(SiteContext, "samples", property(lambda site: 400 if site.name == "C" else 8))
    plan = plan_for(method="fedavg", network=toy, sites=NAMES, rounds=3, min_sites=2, start="last", batch=4, lr=1e-3)
    made, asked = hospitals(plan, fresh=True), Counter()

    def present(site, task, reply):
        asked[site] += task == "agree"
        if site == "B" and asked[site] <= 2 or site == "C" and asked[site] > 2:
            return None
        if (site, task) == ("C", "train"):
            tensors, scalars = messages.unpack(reply)
            return messages.pack(tensors | {"head.bias": tensors["head.bias"] + 68 * 1e-3}, **scalars)
        return reply

    if not sent:
        told = made["B"].answer
        made["B"].answer = lambda task, tensors=None, earlier=None, **scalars: told(task, tensors, **scalars)
    run, _ = federated(made, plan, "train", change=present)
    assert run.memory.missed == ({"B": 2, "C": 1} if sent else {"B": 2})
    assert bool(run.panics) is not sent
    if not sent:
        assert "it refuses the shared tensors of step 2, 2 after the first ones: head.bias" in made["B"].last_error()


class Anything:
    """What a server is told that does not look."""

    samples = steps = 8

    def __ne__(self, other):
        return False


@pytest.mark.parametrize("given", [{}, None, {"A": "x", "B": "y"}, "notes", ["A"]])
def test_without_notes_a_site_takes_no_shared_tensors(given, hospitals, plan, tmp_path):
    made = hospitals(plan, fresh=True, at=str(hash(str(given))))
    more = {} if given is None else {"notes": given}
    reply = made["C"].answer(protocol.TRAIN, made["C"].shared, round=0, phase=0, **more)
    assert reply.get_return_code() == messages.SHARED_REFUSED
    assert "1 of the 2 sites that the plan requires have signed a note" in made["C"].last_error()
    assert "1 of the 2 sites" in (tmp_path / "audit.txt").read_text()


def test_a_policy_names_whose_tensors_are_used(hospitals, federated, plan):
    """A distrusts B. B left out of A's `recipients` still sends to A, who would use it (the control); left out of `senders`, it
    gives what nobody at A opens. A is calibrated with C alone, and so say its record, its audit file and the results."""
    control = hospitals(plan, at="control", A={"recipients": ["C"]})
    federated(control, plan, "calibrate")
    assert {name[0] for name in load_file(control["A"].store.folder / "peers.safetensors")} == {"B", "C"}
    made = hospitals(plan, **(EVALUATED | {"A": {"senders": ["C"], **EVALUATED["A"]}}))
    run, _ = federated(made, plan, "calibrate")
    assert run.panics == []
    assert run.memory.peers == {"A": ["B", "C"], "B": ["A", "C"], "C": ["A", "B"]}
    assert "`senders` in this site's privacy.json does not name it" in noted(made["A"], "calibrate", "B")
    assert {name[0] for name in load_file(made["A"].store.folder / "peers.safetensors")} == {"C"}
    assert [e["senders"] for e in made["A"].events() if e["event"] == "open"] == [["C"]]
    run.run("evaluate")
    sites = json.loads((run.folder / "results.json").read_text())["sites"]
    assert sites["A"]["calibration"] == {"calibrated": True, "peers": 1, "tuned": True, "left_out": ["B"]}
    assert sites["B"]["calibration"] == {"calibrated": True, "peers": 2, "tuned": True}


def test_who_uses_nobody_s_tensors_is_tuned_as_a_site_without_peers(hospitals, federated, plan):
    made = hospitals(plan, **(EVALUATED | {"A": {"senders": [], **EVALUATED["A"]}}))
    run, _ = federated(made, plan, "calibrate")
    assert (run.panics, list(run.progress("refused"))) == ([], [])
    assert not made["A"].store.has("peers")
    run.run("evaluate")
    found = json.loads((run.folder / "results.json").read_text())["sites"]["A"]["calibration"]
    assert found == {"calibrated": False, "peers": 0, "tuned": True, "left_out": ["B", "C"]}


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
    assert "were opened before" in refuses(made["A"], protocol.CALIBRATE, together({"B": given["B"]}))


def test_a_certified_site_of_the_project_that_is_not_of_the_job_gives_nothing(collected, office, issued):
    """Z has a certificate of the project, and seals for A what a peer would give; the plan's sites are A, B and C. A seals
    nothing for Z, whose handshake is valid, and opens nothing, of B neither. The controls: Z's envelope is a valid one, and
    without Z the same task is answered."""
    made, shown, given = collected
    z = Session(Identity("Z", *issued["Z"], office.root, SERVER), "job").introduce("calibration")
    sealed = tensors_of(made["B"], protocol.COLLECT, shown | together({"Z": z}))
    assert recipients_of("B", as_bytes("B", SEALED, sealed)) == ["A", "C"]
    site, a = made["B"].open(), made["A"]
    personal = {name: site.network.state_dict()[name].clone() for name in site.partition.private}
    envelope = sealed_by("Z", office, issued, personal, shown, "calibration", "collect")
    message = refuses(a, protocol.CALIBRATE, together({"B": given["B"], "Z": envelope}))
    assert "calibrate brought tensors of Z, not among this job's sites; nothing was opened" in message
    assert not [event for event in a.events() if event["event"] == "open"]
    session = a.component.seals(a.fl_ctx)
    assert session.open("calibration", "collect", 0, {"Z": envelope})["Z"].keys() == personal.keys()
    session._opened.clear()  # the epoch of that control
    assert a.answer(protocol.CALIBRATE, together({"B": given["B"]})).get_return_code("") == ""


def sealed_by(name, office, issued, tensors, shown, word, task):
    """What a certified site seals for those whose handshakes are `shown`, whatever the job says."""
    session = Session(Identity(name, *issued[name], office.root, SERVER), "job")
    session.meet(word, task, 0, by_site(shown), None)
    return session.seal(task, tensors)


def test_nothing_is_sealed_for_a_false_handshake(hospitals, plan):
    """The server shows C's certificate as B's: A seals for C alone, or for nobody if B is all that it is shown. And then it
    asks without showing anyone at all: nothing is sent."""
    made = hospitals(plan)
    shown = together({name: tensors_of(made[name], protocol.INTRODUCE) for name in NAMES})
    false = {f"B/{HANDSHAKE}": shown[f"C/{HANDSHAKE}"]}
    assert recipients_of("A", as_bytes("A", SEALED, tensors_of(made["A"], protocol.COLLECT, shown | false))) == ["C"]
    assert noted(made["A"], "collect", "B").startswith("the certificate for site B belongs to C")
    message = refuses(made["A"], protocol.COLLECT, false)
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
    assert said["statement"].keys() == {"version", "site", "job", "exchange", "key"}
    assert tensors_of(made["B"], protocol.INTRODUCE) == {}


def test_a_site_whose_own_kit_is_wrong_says_so_at_home(hospitals, plan, issued, office, tmp_path):
    """A key that is not the certificate's: the server gets a code, and the exchange has two sites."""
    made = hospitals(plan)
    other = kit_of(tmp_path / "other", "A", office, *issued["B"]) / "startup/client.key"
    (made["A"].folder / "startup/client.key").write_bytes(other.read_bytes())
    assert made["A"].answer(protocol.INTRODUCE).get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "site A: it cannot seal or open tensors:" in made["A"].guard_error
    assert "client.key: is not the key of client.crt" in made["A"].guard_error


def test_a_peer_whose_certificate_ends_soon_is_named_by_server_and_site(hospitals, plan, issued, office, monkeypatch):
    """Once a job, and it is good all the same. What a site sends in place of its handshake says nothing to the server."""
    monkeypatch.setitem(issued, "B", office.issue("B", until=12))
    made = hospitals(plan, names=("A", "B"))
    handshake = tensors_of(made["B"], protocol.INTRODUCE)
    blank = Message({HANDSHAKE: torch.zeros(4, dtype=torch.uint8)}, {"consent": True})
    answers, told = {"B": Message(handshake, {"consent": True}), "C": blank, "D": Message({}, {"consent": False})}, []
    server = SimpleNamespace(
        ask=lambda *asked: answers,
        memory=SimpleNamespace(handshakes={}),
        progress=lambda event, **entries: told.append((event, entries["message"])),
    )
    introduce(server, protocol.INTRODUCE)
    ((event, line),) = told
    assert (event, line[: line.index(" until")]) == ("certificate", "warning: the certificate of site B is valid")
    assert line.endswith(" UTC (11 days left). Have B renew it.")
    for _ in range(2):
        assert tensors_of(made["A"], protocol.COLLECT, together({"B": handshake})).keys() == {SEALED}
    lines = (made["A"].folder.parents[1] / "audit.txt").read_text().splitlines()
    assert len([entry for entry in lines if f"[A:collect#?][{line}" in entry]) == 1


# --- forward secrecy -------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch):
    """The exchanges for which a site's process has a handshake's key while it works at a task: [(site, task, epoch, words)]."""
    seen = []

    def look(task, message, host):
        keys = sorted(by_name[host.name].component._seals._keys) if by_name[host.name].component._seals else []
        seen.append((host.name, task, message.scalars.get("epoch", 0), keys))
        return answered(task, message, host)

    by_name = {}
    monkeypatch.setattr("feddp.flare.executor.answered", look)
    return by_name, seen


def test_a_handshakes_key_is_gone_when_the_last_tensors_of_its_exchange_are_opened(hospitals, federated, plan_for, pvt, held):
    """FedLC's two epochs of heads under one handshake, then the calibration under another: before the work that follows the
    last delivery, which may take hours, and in the evaluation, no process has a key."""
    plan = plan_for(method="fedlc", network=pvt, sites=NAMES, heads_epochs=2, stages=("train", "heads", "calibrate"))
    by_name, seen = held
    by_name |= hospitals(plan, **EVALUATED)
    run, _ = federated(by_name, plan, "heads")
    run.run("calibrate", "evaluate")
    assert run.panics == []
    with_key = ["calibration"]
    assert [of[1:] for of in seen if of[0] == "A"] == [
        ("introduce", 0, []),
        ("collect_heads", 1, with_key),
        ("calibrate_heads", 1, with_key),
        ("collect_heads", 2, with_key),
        ("calibrate_heads", 2, []),
        ("introduce", 0, []),
        ("collect", 0, with_key),
        ("calibrate", 0, []),
        ("evaluate", 0, []),
    ]
    assert run.memory.peers == {"A": ["B", "C"], "B": ["A", "C"], "C": ["A", "B"]}, "the control: they opened each other's"
    assert {e["task"] for e in by_name["A"].events() if e["event"] == "open"} == {"calibrate_heads", "calibrate"}


def test_an_unseen_sites_key_is_gone_before_it_adapts(adapting, plan, tmp_path, held):
    by_name, seen = held
    by_name |= adapting[0]
    for name in "AB":
        personal(by_name[name], plan)
    run = adaptation(adapting, tmp_path / "server")
    assert run.panics == []
    assert [of for of in seen if of[0] == "N"] == [("N", "join", 0, []), ("N", "adapt", 0, [])]
    assert json.loads((by_name["N"].store.folder / "masks/adapt.json").read_text())["models"] == ["A", "B", "global"], "control"


@pytest.mark.parametrize("how", ["another task", "the end of the job", "an empty delivery"])
def test_an_exchange_without_its_delivery_ends_all_the_same(collected, how):
    """The server never hands out what it collected. The control: without that event A opens it."""
    made, shown, given = collected
    a = made["A"]
    session = a.component.seals(a.fl_ctx)
    a.answer(protocol.COLLECT, shown)
    assert [*session._keys] == ["calibration"], "the control"
    if how == "another task":
        a.answer(protocol.EVALUATE)
    elif how == "an empty delivery":
        a.answer(protocol.CALIBRATE)
    else:
        a.component.handle_event(EventType.START_RUN, a.fl_ctx)
        assert session._keys, "the control"
        a.component.handle_event(EventType.END_RUN, a.fl_ctx)
    assert session._keys == {}
    assert "the exchange of its last one is over" in refuses(a, protocol.CALIBRATE, together({"B": given["B"]}))


def test_a_job_that_goes_on_asks_for_new_handshakes(hospitals, federated, plan):
    """All processes are new, and the server relays what it recorded: nobody opens it. With new handshakes the stage runs."""
    made = hospitals(plan)
    shown = together({name: tensors_of(made[name], protocol.INTRODUCE) for name in NAMES})
    recorded = {name: tensors_of(made[name], protocol.COLLECT, shown) for name in NAMES}
    for site in made.values():
        site.submitted(plan, "job-2", resume="job")
    message = refuses(made["A"], protocol.CALIBRATE, together({"B": recorded["B"]}))
    assert "has not sent a handshake" in message
    run, _ = federated(made, plan, "calibrate")
    assert run.panics == []
    assert made["A"].store.has("calibrated")


# --- one bad peer ---------------------------------------------------------------------------------------------------------


def noted(site, task, peer):
    """Why the site left `peer` out of `task`, as its record says, once; the audit file has the same words."""
    (why,) = [e["message"] for e in site.events() if (e["event"], e.get("task"), e.get("peer")) == ("left_out", task, peer)]
    lines = (site.folder.parents[1] / "audit.txt").read_text().splitlines()
    assert any(f"[A:{task}#?][left site {peer} out: {why[:300]}" in line for line in lines)
    return why


def spoilt(reply):
    """The answer with another signature of its envelope: who seals so gives an envelope that nobody opens."""
    tensors, scalars = messages.unpack(reply)
    changed = tensors[SEALED].clone()
    changed[-1] ^= 1
    return messages.pack({SEALED: changed}, **scalars)


def seals(site, harm):
    """The site seals `harm` of what its guard lets out: its software was changed."""
    session = site.component.seals(site.fl_ctx)
    own = session.seal
    session.seal = lambda task, tensors: own(task, harm(tensors))


HARMS = {
    "NaN": (lambda sent: {n: v * float("nan") if v.is_floating_point() else v for n, v in sent.items()}, "not finite"),
    "values": (lambda sent: {n: v + 1e9 for n, v in sent.items()}, "but a weight is from -65504 to 65504"),
    "names": (lambda sent: {f"{name}s": value for name, value in sent.items()}, "wrong tensor names"),
    "shapes": (lambda sent: {name: value[None] for name, value in sent.items()}, "expected"),
}
EVALUATED = dict.fromkeys(NAMES, {"min_images": 1, "std_images": 1})  # two test images


def test_a_peer_that_gives_something_wrong_is_left_out_and_the_others_go_on(hospitals, federated, plan, monkeypatch):
    """A and C calibrate with each other's tensors alone, to the bits of a federation in which B does not consent (the control:
    with B's good ones they get others); B, who does nothing wrong but give, with both. The results count those that were used,
    and say whom A and C left out. Every epoch betters the score, so that the last network is kept."""
    scores = iter(range(10**6))
    monkeypatch.setattr("feddp.training.calibration.mean_scores", lambda *_: {"iou": next(scores) / 10**6, "dice": 0.0})
    plan = replace(plan, settings=plan.settings | {"calibration_lr": 0.1, "lambda": 100})
    without, good = hospitals(plan, at="without", B={"consent": []}), hospitals(plan, at="good")
    federated(without, plan, "calibrate")
    federated(good, plan, "calibrate")
    for how in ("signature", *HARMS):
        made = hospitals(plan, at=how, **EVALUATED)
        if how in HARMS:
            seals(made["B"], HARMS[how][0])
        spoils = how == "signature"
        spoiler = (lambda *of: spoilt(of[2]) if of[:2] == ("B", "collect") else of[2]) if spoils else lambda *of: of[2]
        run, _ = federated(made, plan, "calibrate", change=spoiler)
        assert (run.panics, list(run.progress("refused"))) == ([], []), how
        for name, other in (("A", "C"), ("C", "A")):
            reason = noted(made[name], "calibrate", "B")
            assert ("was changed after it was signed" if spoils else HARMS[how][1]) in reason, how
            peers = load_file(made[name].store.folder / "peers.safetensors")
            given = load_file(made[other].store.folder / "start.safetensors")
            assert {key: value.tolist() for key, value in peers.items()} == {
                f"{other}/{key}": given[key].tolist() for key in ("q.weight", "q.bias")
            }, how
            one, wanted, other = (load_file(at[name].store.folder / "calibrated.safetensors") for at in (made, without, good))
            assert all(torch.equal(one[key], wanted[key]) for key in wanted), how
            assert not all(torch.equal(one[key], other[key]) for key in other), how
        assert load_file(made["B"].store.folder / "peers.safetensors").keys() >= {"A/q.bias", "C/q.bias"}, how
        run.run("evaluate")
        results = json.loads((run.folder / "results.json").read_text())
        assert {name: entry["calibration"] for name, entry in results["sites"].items()} == {
            **dict.fromkeys("AC", {"calibrated": True, "peers": 1, "tuned": True, "left_out": ["B"]}),
            "B": {"calibrated": True, "peers": 2, "tuned": True},
        }, how
        assert "A: calibrated with 1 peers, without B, whose tensors it refused." in write_markdown(results), how


def test_who_gave_a_wrong_handshake_receives_nothing_and_the_others_go_on(hospitals, federated, plan):
    """B's handshake holds another key than it signed: A and C seal for each other alone. What B gives is good, and
    so both have it; B, who has nobody's, is tuned without peers, and the server knows it."""

    def spoil(site, task, reply):
        if (site, task) != ("B", "introduce"):
            return reply
        tensors, scalars = messages.unpack(reply)
        said = json.loads(tensors[HANDSHAKE].numpy().tobytes())
        said["statement"]["key"] = "0" * 64
        return messages.pack({HANDSHAKE: as_tensor(json.dumps(said).encode())}, **scalars)

    made = hospitals(plan)
    run, _ = federated(made, plan, "calibrate", change=spoil)
    assert (run.panics, list(run.progress("refused"))) == ([], [])
    assert run.memory.peers == {"A": ["B", "C"], "B": [], "C": ["A", "B"]}
    for name, other in (("A", "C"), ("C", "A")):
        assert "site B did not sign the handshake" in noted(made[name], "collect", "B")
        assert [e["recipients"] for e in made[name].events() if e["event"] == "seal"] == [[other]]
        assert load_file(made[name].store.folder / "peers.safetensors").keys() >= {"B/q.bias", f"{other}/q.bias"}


def test_a_site_whose_peers_are_all_bad_refuses_and_keeps_its_network(hospitals, federated, plan):
    """B seals NaN, C's envelope is spoilt: A has nobody, and must not calibrate as if it had been sent nobody. B and C
    have A's."""
    made = hospitals(plan)
    seals(made["B"], HARMS["NaN"][0])
    run, _ = federated(made, plan, "calibrate", change=lambda *of: spoilt(of[2]) if of[:2] == ("C", "collect") else of[2])
    assert run.memory.peers == {"B": ["A", "C"], "C": ["A", "B"]}
    assert [event["site"] for event in run.progress("refused")] == ["A"]
    assert "site B: q.weight holds values that are not finite" in made["A"].last_error()
    assert not made["A"].store.has("calibrated")
    assert made["B"].store.has("calibrated")


def test_a_site_killed_before_it_answered_keeps_its_network_of_before_and_the_results_say_so(hospitals, plan, tmp_path):
    """A's process ends once its calibrated network is on the disk. The next one is asked again, and cannot open what was sealed
    for the first. Results, networks and images.csv then agree: A's network is stage 1's, and its peers' are gone. The control:
    B and C keep their calibrated networks."""
    made, killed = hospitals(plan, **EVALUATED), []

    def answer(site, task, tensors, scalars):
        if (site, task) == ("A", "calibrate"):
            made["A"].answer(task, tensors, **scalars)
            killed.append(made["A"].store.has("calibrated"))
            made["A"].submitted(plan)
        return made[site].answer(task, tensors, **scalars)

    folder = tmp_path / "server"
    folder.mkdir()
    run = Run(folder, plan, list(made), answer, secure=True).run("calibrate", "evaluate")
    assert (run.panics, killed) == ([], [True])
    assert "has not sent a handshake" in made["A"].last_error()
    results = json.loads((folder / "results.json").read_text())
    entries = {name: entry["calibration"] for name, entry in results["sites"].items()}
    assert entries["A"] == {"calibrated": False, "peers": 0, "tuned": False}
    assert entries["B"] == entries["C"] == {"calibrated": True, "peers": 2, "tuned": True}
    assert results["sites"]["A"]["final"] == results["sites"]["A"]["before_calibration"]
    assert results["matrix"].keys() == {"B", "C"}
    for name, slots in (("A", {"start"}), ("B", {"start", "calibrated"})):
        store = made[name].store
        assert last_network(store.folder).stem == ("start" if name == "A" else "calibrated")
        with open(store.folder / "images.csv", encoding="utf-8") as file:
            assert {row["network"] for row in csv.DictReader(file)} == slots
        assert not store.has("peers")
    assert [e["networks"] for e in made["A"].events() if e["event"] == "removed"] == [["calibrated"]]


@pytest.mark.parametrize("untuned", [5, "ABC", {"A": 1}, ["B"], None])
def test_a_site_goes_back_only_where_a_list_of_the_server_names_it(hospitals, plan, untuned):
    (site,) = hospitals(plan, names=["A"], **EVALUATED).values()
    site.answer("calibrate", {})
    reply = site.answer("evaluate", {}, untuned=untuned)
    assert reply.get_return_code(ReturnCode.OK) == ReturnCode.OK
    assert site.store.has("calibrated")


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


def adaptation(adapting, folder, change=lambda site, task, reply: reply):
    """The whole job of `adapting`; gives its run."""
    made, late, shared = adapting
    save_network(folder / "config" / WEIGHTS, shared, {})

    def answer(site, task, tensors, scalars):
        return change(site, task, made[site].answer(task, tensors, **scalars))

    return Run(folder, late, [*made], answer, secure=True, request=made["N"].request).run("adapt")


@pytest.mark.parametrize("how", ["signature", *HARMS])
def test_a_donor_that_gives_something_wrong_is_left_out_and_the_other_is_adapted(how, adapting, plan, tmp_path):
    """B's is A's model's bits no longer, or not what it was sealed as. N adapts A's and the global one, and says so at home."""
    made, n = adapting[0], adapting[0]["N"]
    for name in "AB":
        personal(made[name], plan)
    spoils = how == "signature"
    if not spoils:
        seals(made["B"], HARMS[how][0])
    change = lambda *of: spoilt(of[2]) if spoils and of[:2] == ("B", "give_model") else of[2]  # noqa: E731
    run = adaptation(adapting, tmp_path / "server", change)
    assert (run.panics, list(run.progress("refused"))) == ([], [])
    assert ("was changed after it was signed" if spoils else HARMS[how][1]) in noted(n, "adapt", "B")
    assert json.loads((n.store.folder / "masks/adapt.json").read_text())["models"] == ["A", "global"]
    results = json.loads((run.folder / "results.json").read_text())
    assert (results["donors"], results["without"]) == (["A", "B"], {}), "to whom the server sent whose"


def test_an_unseen_site_whose_donors_are_all_bad_writes_no_mask(adapting, plan, tmp_path):
    made, n = adapting[0], adapting[0]["N"]
    for name in "AB":
        personal(made[name], plan)
    seals(made["A"], HARMS["names"][0])
    run = adaptation(adapting, tmp_path / "server", lambda *of: spoilt(of[2]) if of[:2] == ("B", "give_model") else of[2])
    assert "adapt: 0 of 1 sites answered well" in run.panics[0]
    assert "site A: " in n.last_error()
    assert "wrong tensor names" in n.last_error()
    assert not (n.store.folder / "masks").exists()
    assert not (run.folder / "results.json").exists()


def personal(hospital, plan):
    """What an earlier job left at a donor: a network whose every value is its own."""
    chance = torch.Generator().manual_seed(ord(hospital.name))
    state = hospital.component.expected.network.state_dict()
    state = {k: torch.rand(v.shape, generator=chance) if v.is_floating_point() else v for k, v in state.items()}
    save_network(hospital.folder / "feddp/earlier/calibrated.safetensors", state, plan.metadata)
    return state
