"""The gate before FLARE's cells, message by message, on FLARE's own cells. Every attack is also made where no gate stands, and
succeeds there; test_gate_deployment.py makes them over the wire."""

import inspect
import re
import threading
import time
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.cellnet.core_cell import CoreCell, TargetMessage
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessageType
from nvflare.fuel.f3.cellnet.net_manager import NetManager
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import STREAM_ACK_TOPIC, STREAM_CHANNEL, STREAM_ERROR_TOPIC, StreamHeaderKey
from nvflare.fuel.hci.server.reg import ServerCommandRegister
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils import fobs
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from feddp.errors import FedDPError
from feddp.flare import cell_gate, cells
from feddp.flare.archive import LARGEST, MOST
from feddp.flare.audit import Refusals, plain_lines
from feddp.flare.cell_gate import require_gate
from feddp.flare.gate import ServerGate, SiteGate
from support import ROOT
from support.gated import CONSOLE, JOB, OTHER, SERVER, A, B, as_bytes, in_process, with_right, zipped
from support.site import FlareSite

THREAT_MODEL = (ROOT / "docs/explanation/threat-model.md").read_text(encoding="utf-8")
KEY = "-----BEGIN PRIVATE KEY-----"
ADMIN_TOPICS = sorted(topic for processor in ClientRequestProcessors.request_processors for topic in processor.get_topics())
A_JOB, SERVER_JOB = f"{A}.{JOB}", f"{SERVER}.{JOB}"
AUX, COMMAND = "aux_communication", "server_command"
GATED = pytest.mark.parametrize("gated", [False, True], ids=["without the gate", "with it"])


@pytest.fixture
def federation(monkeypatch, tmp_path):
    with in_process(monkeypatch, tmp_path) as made:
        yield made


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A hospital's folder, in which its FLARE runs."""
    folder = tmp_path / "kit"
    for file, text in {
        "startup/client.key": KEY,
        "local/privacy.json": "{}",
        f"feddp/{OTHER}/private.safetensors": "x",
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    (folder / JOB).mkdir()
    monkeypatch.chdir(folder)
    return folder


def heard(cell, channel: str, topic: str = "*") -> list[str]:
    """The topics that reach a callback of a cell, from now on."""
    topics = []

    def callback(request):
        topics.append(request.get_header(MessageHeaderKey.TOPIC))
        return Message()

    cell.register_request_cb(channel=channel, topic=topic, cb=callback)
    return topics


def soon(holds) -> bool:
    """Streams are answered by a thread of FLARE's."""
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds())


# commands to a site's parent process


@GATED
@pytest.mark.parametrize(("origin", "by"), [(B, SERVER), (CONSOLE, SERVER), (SERVER, SERVER), (f"{SERVER}.{JOB}", SERVER)])
def test_the_key_is_not_read(federation, kit, gated, origin, by):
    """By a peer or a member through FLARE's server as it is released, and by a server that asks itself."""
    gated and SiteGate()
    federation.site(A, kit)
    said = federation.command("sys.shell", "cat startup/client.key", origin=origin, by=by)
    assert (KEY in said) is not gated
    assert said == (KEY if not gated else "sys.shell is not answered by any site" if origin == SERVER else "")
    assert len(federation.lines()) == gated


@GATED
@pytest.mark.parametrize("job", ["feddp", "local", "startup", JOB])
def test_nothing_is_deleted(federation, kit, gated, job):
    gated and SiteGate()
    federation.site(A, kit)
    federation.command("train.delete_run", job_id=job)
    assert (kit / job).exists() is gated


@pytest.mark.parametrize("topic", ADMIN_TOPICS)
def test_what_a_site_answers_is_the_table_and_the_threat_model_names_it(federation, kit, topic):
    """Every topic that any of FLARE's processors answers; asked as FLARE's server asks where a person has every right."""
    SiteGate()
    reached = heard(federation.cell(A), "admin")
    known = cells.ADMIN.get(topic)
    headers = {"job_id": JOB} | (with_right(known.right) if known and known.right else {})
    said = federation.command(topic, **headers)
    assert (reached == ["admin"]) is bool(known)
    assert known or said == f"{topic} is not answered by any site"
    assert f"`{topic}`" in THREAT_MODEL
    assert federation.command("sys.made_up") == "sys.made_up is not answered by any site"


@pytest.mark.parametrize("topic", [topic for topic, known in cells.ADMIN.items() if known.job])
@pytest.mark.parametrize(
    "job", ["local", "startup", "feddp", "..", f"../{JOB}", JOB.upper().replace("0", "A"), JOB[:-1], None, 7]
)
def test_a_job_is_named_by_its_id_and_no_folder_of_the_kit(federation, kit, topic, job):
    """FLARE's deployment deletes the folder of that name first."""
    SiteGate()
    reached = heard(federation.cell(A), "admin")
    right = with_right(cells.ADMIN[topic].right) if cells.ADMIN[topic].right else {}
    assert "has no valid job id" in federation.command(topic, **{"job_id": job}, **right)
    assert not reached
    federation.command(topic, **{"job_id": JOB}, **right)
    assert reached, "the control"


@pytest.mark.parametrize("topic", [topic for topic, known in cells.ADMIN.items() if known.right])
def test_what_needs_a_right_has_the_site_look_it_up(federation, kit, topic):
    """FLARE's site looks up what the sender says it should, if it says so."""
    SiteGate()
    reached = heard(federation.cell(A), "admin")
    right = with_right(cells.ADMIN[topic].right)
    for wrong in (
        {},
        right | {"require_authz": "false"},
        right | {"require_authz": True},
        right | {"admin_command": "check_status"},
    ):
        assert "needs the right" in federation.command(topic, job_id=JOB, **wrong)
    assert not reached
    federation.command(topic, job_id=JOB, **right)
    assert reached, "the control"


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ({"config/config_fed_client.json": b" " * (LARGEST + 1)}, "unpacks to 1048577 bytes"),
        ({f"config/{number}": b"" for number in range(MOST + 1)}, "holds 101 files"),
        (b"no zip", "is not a readable zip"),
        (7, "is not a zip"),
    ],
)
def test_an_app_is_small_before_flare_unpacks_it(federation, kit, app, words):
    """FLARE's site unpacks what is deployed into a temporary folder, whatever its size, before it asks a deployer."""
    SiteGate()
    reached = heard(federation.cell(A), "admin")
    body, right = zipped(app) if isinstance(app, dict) else app, with_right(cells.ADMIN["train.deploy"].right)
    assert words in federation.command("train.deploy", body, job_id=JOB, **right)
    assert not reached
    federation.command("train.deploy", zipped({"config/config_fed_client.json": b" " * LARGEST}), job_id=JOB, **right)
    assert reached, "the control"


def test_a_job_tells_the_parent_its_own_status_and_nothing_else(federation, kit):
    SiteGate()
    reached = heard(federation.cell(A), "admin")

    def tell(topic, job, inside="train.notify_job_status", **sender):
        request = AdminMessage(inside, "")
        request.set_header("job_id", job)
        federation.hand(A, "admin", topic, request, **({"origin": A_JOB} | sender))

    tell("admin", JOB)
    tell("train.notify_job_status", OTHER)
    tell("train.notify_job_status", JOB, inside="sys.shell")
    tell("train.notify_job_status", JOB, origin=f"{B}.{JOB}", by=SERVER)
    tell("train.notify_job_status", JOB, origin=A_JOB, by=SERVER)
    assert not reached
    tell("train.notify_job_status", JOB)
    assert reached == ["train.notify_job_status"], "the control"


# a site's job process


@GATED
@pytest.mark.parametrize("send", ["hand", "stream"])
@pytest.mark.parametrize("topic", ["__do_task__", "fed.event", "__sync_runner__", "__task_check__", "ObjectStreamer.Request"])
@pytest.mark.parametrize("origin", [f"{B}.{JOB}", SERVER_JOB, SERVER, CONSOLE])
def test_no_task_is_pushed(federation, gated, send, topic, origin):
    """The one message of this channel that a site's job gets is the end of the run."""
    gated and SiteGate()
    reached = heard(federation.cell(A_JOB), AUX)
    getattr(federation, send)(A_JOB, AUX, topic, {"a": 1}, origin=origin, by=SERVER)
    federation.stream(A_JOB, AUX, "__end_run__", {"a": 1}, origin=SERVER_JOB, by=SERVER)
    assert soon(lambda: "__end_run__" in reached), "the control"
    assert soon(lambda: topic in reached) if not gated else topic not in reached


@pytest.mark.parametrize("command", [command.get_command_name() for command in AdminCommands.commands])
def test_a_job_is_aborted_by_its_own_parent_alone(federation, command):
    SiteGate()
    reached = heard(federation.cell(A_JOB), "client_command")
    for origin, by in ((SERVER, SERVER), (SERVER_JOB, SERVER), (A, SERVER), (B, SERVER), (f"{B}.{JOB}", SERVER)):
        federation.hand(A_JOB, "client_command", command, {}, origin=origin, by=by)
    assert not reached
    federation.hand(A_JOB, "client_command", command, {}, origin=A)
    assert reached == (["abort"] if command == "abort" else [])
    assert f"`{command}`" in THREAT_MODEL


def test_a_sites_job_answers_no_child(federation):
    """FLARE's client hands a pending task to whoever asks it, as if a child."""
    SiteGate()
    reached = heard(federation.cell(A_JOB), COMMAND)
    for origin in (SERVER_JOB, SERVER, f"{B}.{JOB}"):
        federation.stream(A_JOB, COMMAND, "get_task", {}, origin=origin, by=SERVER)
    federation.stream(A_JOB, COMMAND, "get_task", {}, origin=f"{A_JOB}.x")
    federation.stream(A_JOB, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER)
    assert len(federation.lines()) == 4
    assert not reached


# whatever the cell


@GATED
def test_no_bulk(federation, kit, gated):
    """FLARE takes what is inside of a bulk past every filter of arriving messages."""
    gated and SiteGate()
    cell = federation.cell(A)
    reached = heard(cell, "admin")
    inside = TargetMessage(A, "admin", "admin", Message({}, b"")).to_dict()
    federation.hand(A, "cellnet.channel", "bulk", [inside], origin=B, by=SERVER)
    assert soon(lambda: reached) is not gated
    cell.core_cell.asked_to_stop = True


@GATED
def test_no_address_to_connect_to(federation, gated, monkeypatch):
    """FLARE's cell connects to any address that a forwarded message names, without TLS, whatever `allow_adhoc` says."""
    gated and SiteGate()
    cell, connected = federation.cell(A).core_cell, []
    manager = cell.connector_manager
    monkeypatch.setattr(manager, "get_external_connector", lambda url, adhoc: connected.append(url))
    assert not manager.adhoc_allowed
    federation.hand(A, "admin", "admin", {}, origin=SERVER, by="relay", **{MessageHeaderKey.CONN_URL: "tcp://evil:1"})
    federation.hand(A, "admin", "admin", {}, origin=B, by=SERVER, **{MessageHeaderKey.CONN_URL: "tcp://evil:1"})
    assert connected == ([] if gated else ["tcp://evil:1"] * 2)


@GATED
@pytest.mark.parametrize("topic", ["change_root", "stop_cell", "stop", "route", "config_vars", "bulk_test", "made_up"])
def test_no_network_agent(federation, gated, topic):
    """FLARE's NetAgent changes the server's address, stops the cell, and shows a member the server's own token (`route`)."""
    gated and SiteGate()
    reached = heard(federation.cell(A), "_net_manager")
    for origin in (SERVER, B):
        federation.hand(A, "_net_manager", topic, {}, origin=origin, by=SERVER)
    assert reached == ([] if gated else [topic] * 2)
    assert "`_net_manager`" in THREAT_MODEL


@GATED
@pytest.mark.parametrize("kind", [MessageType.REPLY, MessageType.RETURN])
def test_a_reply_that_nobody_waits_for_is_not_decoded(federation, gated, kind, monkeypatch):
    """FLARE decodes a reply before it looks for who asked."""
    gated and SiteGate()
    cell = federation.cell(A).core_cell
    decoded = []
    monkeypatch.setattr(cell, "decrypt_payload", lambda message: decoded.append(message.get_header(MessageHeaderKey.REQ_ID)))
    cell.waiters["asked"] = SimpleNamespace(targets=[SERVER])

    def reply(asked, origin=SERVER, of=SERVER):
        original = {MessageHeaderKey.ORIGINAL_HEADERS: {MessageHeaderKey.DESTINATION: of}}
        headers = {"kind": kind, MessageHeaderKey.REQ_ID: asked} | (original if kind == MessageType.RETURN else {})
        federation.hand(A, "task", "heart_beat", {}, origin=origin, by=SERVER, **headers)

    for asked in ("never", [], ["asked", "never"], None, 7, [["asked"]]):
        reply(asked)
    reply("asked", SERVER_JOB, of=SERVER_JOB)
    reply("asked", B)
    before = len(decoded)
    reply(["asked"])
    assert decoded[before:] == [["asked"]], "the control"
    assert bool(before) is not gated


@GATED
def test_a_streamed_answer_comes_from_whom_was_asked(federation, gated):
    gated and SiteGate()
    cell = federation.cell(A_JOB)
    answers = []
    cell.register_blob_cb("return_only", "*", lambda future: answers.append(future.headers[MessageHeaderKey.ORIGIN]))
    cell.requests_dict["asked"] = SimpleNamespace(target=SERVER_JOB)
    for asked, origin in (("never", SERVER_JOB), ("", SERVER_JOB), ("asked", f"{B}.{JOB}"), ("asked", SERVER)):
        federation.stream(A_JOB, "return_only", "server_command:get_task", {}, asked, origin=origin, by=SERVER)
    federation.stream(A_JOB, "return_only", "server_command:get_task", {}, "asked", origin=SERVER_JOB, by=SERVER)
    expected = [SERVER_JOB] if gated else [SERVER_JOB, SERVER_JOB, f"{B}.{JOB}", SERVER, SERVER_JOB]
    assert soon(lambda: sorted(answers) == sorted(expected)), answers


def test_a_piece_of_a_stream_is_not_decoded_by_itself(federation, monkeypatch):
    SiteGate()
    cell = federation.cell(A_JOB).core_cell
    seen = []
    monkeypatch.setattr(cell, "decrypt_payload", seen.append)
    for encoding in ("fobs", None, ["fobs"]):
        headers = {
            StreamHeaderKey.CHANNEL: AUX,
            StreamHeaderKey.TOPIC: "__end_run__",
            MessageHeaderKey.PAYLOAD_ENCODING: encoding,
        }
        federation.stream(A_JOB, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER, **headers)
    assert not seen
    federation.stream(A_JOB, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER)
    assert len(seen) == 1, "the control"


@pytest.mark.parametrize(
    "header",
    [
        {"kind": "other"},
        {"kind": ["req"]},
        {MessageHeaderKey.ORIGIN: ["server"]},
        {MessageHeaderKey.ORIGIN: "server "},
        {MessageHeaderKey.ORIGIN: "server/../x"},
        {MessageHeaderKey.TOPIC: {"admin": 1}},
        {MessageHeaderKey.CHANNEL: ["admin"]},
        {MessageHeaderKey.CHANNEL: "admin:admin", MessageHeaderKey.TOPIC: ""},
        {MessageHeaderKey.ENCRYPTED: True},
    ],
)
def test_strange_headers_do_not_pass(federation, kit, header):
    SiteGate()
    reached = heard(federation.cell(A), "admin")
    federation.hand(A, "admin", "admin", AdminMessage("train.check_status", ""), by=SERVER, **header)
    assert not reached
    federation.hand(A, "admin", "admin", AdminMessage("train.check_status", ""))
    assert reached == ["admin"], "the control"


# the gate itself


def test_no_filter_of_another_hides_the_gate_and_others_filters_are_asked_after_it(federation):
    """FLARE asks the most specific filters alone: its server's check of tokens stands for everything."""
    ServerGate()
    cell = federation.cell(SERVER)
    asked, reached = [], heard(cell, "task")
    cell.core_cell.add_incoming_filter("*", "*", lambda message: asked.append("FLARE's"))
    for by in (B, A):
        federation.hand(SERVER, "task", "heart_beat", {}, origin=A, by=by, person=by)
    assert (asked, reached) == (["FLARE's"], ["heart_beat"])
    cell.core_cell.add_incoming_filter("task", "heart_beat", lambda message: asked.append("special"))
    federation.hand(SERVER, "task", "heart_beat", {}, origin=A, by=B, person=B)
    assert (asked, reached) == (["FLARE's"], ["heart_beat"])


def test_a_cell_that_is_there_already_gets_the_gate_and_a_site_without_it_takes_no_job(federation):
    federation.cell(A_JOB)
    with pytest.raises(FedDPError, match=f"no gate protects {A_JOB}.*cell_gate.*feddp.flare.gate.SiteGate.*resources.json"):
        require_gate(A)
    require_gate(B)  # its cells are in other processes
    SiteGate()
    require_gate(A)
    federation.cell(f"{A}.{OTHER}")
    require_gate(A)
    federation.cells[A_JOB].core_cell.in_filter_reg = cell_gate.Registry()
    with pytest.raises(FedDPError, match=A_JOB):
        require_gate(A)


@pytest.mark.parametrize("simulated", [False, True])
@GATED
def test_a_job_is_refused_where_the_gate_is_missing(federation, plan_for, gated, simulated):
    """Before anything of the job is done, by what every executor and filter asks; FLARE's simulator has no kits."""
    gated and SiteGate()
    federation.cell(A_JOB)
    site = FlareSite(plan_for(), name=A, simulated=simulated, data="x")
    if gated or simulated:
        assert str(site.component.context(site.fl_ctx).policy.data) == "x"
    else:
        with pytest.raises(FedDPError, match="no gate protects"):
            site.component.context(site.fl_ctx)


def test_a_consoles_cell_in_the_same_process_is_not_the_sites(federation):
    SiteGate(), ServerGate()
    assert not isinstance(federation.cell(CONSOLE).core_cell.in_filter_reg, cell_gate.First)


def test_who_is_refused_is_in_the_audit_file_by_name_and_no_value(federation, kit):
    SiteGate()
    federation.site(A, kit)
    federation.command("sys.shell", "cat SECRET", _userName="member@x", job_id="SECRET", **{"x y\n[E:0]": 1})
    federation.command("sys.shell", origin=f"{B}.{JOB}", by=SERVER)
    federation.hand(A, "a\nb" * 500, "t", {}, by=SERVER)
    inside, peer, strange = federation.lines()
    assert "[U:server][A:gate]" in inside
    said = "admin/admin sys.shell (_userName, job_id, x?y??E:0?) for member@x from server over server server.example.org"
    assert f"{said}: sys.shell is not answered by any site]" in inside
    assert f"admin/admin from {B}.{JOB} over server server.example.org: {B}.{JOB} may not send to this site]" in peer
    assert len(strange) < 800
    assert "SECRET" not in federation.audit.read_text()


@GATED
@pytest.mark.parametrize("person", ["", "N/A", B], ids=["no certificate", "one that FLARE does not see", "another hospital's"])
@pytest.mark.parametrize(
    ("to", "claimed", "channel", "topic"),
    [
        (A, SERVER, "admin", "admin"),
        (A, A_JOB, "admin", "train.notify_job_status"),
        (A_JOB, A, "client_command", "abort"),
        (SERVER, SERVER_JOB, "server_parent_listener", "get_clients"),
    ],
)
def test_whoever_connects_on_the_same_machine_proves_its_name(federation, kit, gated, person, to, claimed, channel, topic):
    """Should a connection have got the name of the server, of a parent or of a job, what comes over it is refused still."""
    gated and (ServerGate if to == SERVER else SiteGate)()
    reached = heard(federation.cell(to), channel)
    request = AdminMessage("train.notify_job_status" if claimed == A_JOB else "train.check_status", "")
    request.set_header("job_id", JOB)
    federation.hand(to, channel, topic, request, origin=claimed, person=person)
    assert reached == [topic] * (not gated)
    said = f"over {claimed} {person or '-'}: {person or '-'} is not the certificate of {claimed}]"
    assert [said in line for line in federation.lines()] == [True] * gated
    federation.hand(to, channel, topic, request, origin=claimed)
    assert reached == [topic] * (2 - gated), "the control"


def test_a_flood_of_refusals_does_not_fill_the_disk(federation):
    now = [0.0]
    refusals = Refusals(most=3, clock=lambda: now[0])
    for _ in range(1000):
        refusals.add("", "x", "y" * 10**5)
    assert len(federation.lines()) == 3
    assert len(federation.audit.read_text()) < 3000
    now[0] = 61
    refusals.add("", "x", "z")
    assert "(997 refusals before this one are not shown)]" in federation.lines()[3]
    refusals.add(JOB, "x", "z")
    assert f"[J:{JOB}][gate refused z]" in federation.lines()[4]


def test_the_audit_file_has_what_happened_and_not_what_a_server_words(tmp_path, monkeypatch):
    """Who asks, and the number of an event, come with a command and with a task; FLARE writes them as they are, the control."""
    now, forged = [0.0], "lead][A:look]\n[E:0][T:0][U:other\x1b[2J"
    for name in ("add_event", "add_job_event"):
        monkeypatch.setattr(Auditor, name, inspect.unwrap(getattr(Auditor, name)))
    (as_flare := Auditor(str(tmp_path / "flare.txt"))).add_event(forged, "abort", ref=forged * 9)
    assert len((tmp_path / "flare.txt").read_text().splitlines()) == 11
    plain_lines(most=3, clock=lambda: now[0])
    plain_lines()  # a second gate in a process changes nothing
    auditor = Auditor(str(tmp_path / "ours.txt"))
    auditor.add_event(forged, "abort", ref=forged * 10**6)
    auditor.add_job_event(JOB, scope_name="feddp", task_name="train", task_id=forged, ref=forged, msg="[said\nso]" * 10**6)
    for _ in range(1000):
        auditor.add_event("lead", "look")
    now[0] = 61
    auditor.add_event("lead", "look")
    for used in (auditor, as_flare):
        used.close()
    one, two, *more = (tmp_path / "ours.txt").read_text().splitlines()
    assert one.count("[U:") == one.count("[A:") == two.count("[E:") == 1
    assert "[U:lead)(A:look)?(E:0)(T:0)(U:other?(2J][A:abort]" in one
    assert f"[S:feddp][J:{JOB}][A:train#lead)(A:look)?" in two
    assert "[said?so][said?so]" in two
    assert max(len(one), len(two)) < 1200  # five fields of 100 characters at most, and what is said
    assert len(more) == 2
    assert more[1].endswith("[U:lead][A:look][999 lines before this one were left out]")


def test_a_gate_makes_the_audit_file_safe(tmp_path, monkeypatch):
    for name in ("add_event", "add_job_event"):
        monkeypatch.setattr(Auditor, name, inspect.unwrap(getattr(Auditor, name)))
    with in_process(monkeypatch, tmp_path):
        SiteGate()
    (auditor := Auditor(str(tmp_path / "ours.txt"))).add_event("lead][A:look]\n[E:0", "abort")
    auditor.close()
    assert len((tmp_path / "ours.txt").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["subprocess.Popen", "builtins.eval", "feddp.flare.gate.SiteGate", "logging.FileHandler"])
@pytest.mark.parametrize("by", ["", "DataClassDecomposer", "EnumTypeDecomposer", "DictDecomposer"])
def test_what_is_decoded_builds_no_class_by_its_name(name, by):
    """FLARE's own lists, which this version has: what the gate lets in is decoded by it."""
    made = {"__fobs_type__": name, "__fobs_data__": {"data": {}}}
    if by:
        made["__fobs_dc__"] = f"nvflare.fuel.utils.fobs.decomposer.{by}"
    with pytest.raises(ValueError, match="is not allowed|must be registered"):
        fobs.loads(as_bytes(fobs.dumps(made)))
    known = AdminMessage("train.check_status", "")
    assert fobs.loads(as_bytes(fobs.dumps(known))).topic == known.topic, "the control"


# the server's


def between(of: str, to: str, **more) -> dict:
    """Of one client to another, by the first's own connection."""
    return {"origin": of, "by": of, "person": of.split(".")[0], "destination": to, **more}


def forwarded(federation, gated=True) -> list[str]:
    """Where the server's parent process sends on what it gets."""
    gated and ServerGate()
    cell, sent = federation.cell(SERVER).core_cell, []
    cell._forward = lambda endpoint, origin, destination, kind, message: sent.append(destination)
    return sent


@GATED
@pytest.mark.parametrize("of", [B, f"{B}.{JOB}", CONSOLE])
@pytest.mark.parametrize("to", [A, A_JOB, CONSOLE[:-1] + "9"])
def test_nothing_goes_from_one_client_to_another(federation, gated, of, to):
    sent = forwarded(federation, gated)
    for channel, topic in (("admin", "admin"), (AUX, "__do_task__"), ("client_command", "abort"), ("cellnet.channel", "bulk")):
        federation.hand(SERVER, channel, topic, {}, **between(of, to))
        federation.stream(SERVER, channel, topic, {}, **between(of, to))
        for kind in (MessageType.REPLY, MessageType.RETURN):
            federation.hand(SERVER, channel, topic, {}, **between(of, to, kind=kind))
    assert len(sent) == (0 if gated else 16)


@GATED
@pytest.mark.parametrize("claimed", [A, A_JOB, SERVER, SERVER_JOB, CONSOLE])
def test_a_claimed_origin_is_held_against_the_connection(federation, gated, claimed):
    sent = forwarded(federation, gated)
    reached = heard(federation.cells[SERVER], "task")
    for by in (B, f"{B}.{JOB}"):
        federation.hand(SERVER, "task", "quit", {}, origin=claimed, by=by, person=B)
        federation.stream(SERVER, COMMAND, "get_task", {}, origin=claimed, by=by, person=B, destination=SERVER_JOB)
    assert (len(reached), len(sent)) == ((0, 0) if gated else (2, 2))


def test_a_connection_is_held_against_its_certificate(federation):
    """FLARE does so where it shakes hands; on the port inside of the server's machine nobody shows one."""
    ServerGate()
    reached = heard(federation.cell(SERVER), "task")
    for person in ("", B, "N/A"):
        federation.hand(SERVER, "task", "heart_beat", {}, origin=A, person=person)
    assert not reached
    federation.hand(SERVER, "task", "heart_beat", {}, origin=A, person=A)
    assert reached == ["heart_beat"], "the control"


def test_a_console_without_a_certificate_is_none(federation):
    """Whoever reaches the port inside of the server's machine may call himself a console."""
    ServerGate()
    reached = heard(federation.cell(SERVER), "task")
    federation.hand(SERVER, "task", "challenge", {}, origin=CONSOLE, person="")
    assert not reached
    federation.hand(SERVER, "task", "challenge", {}, origin=CONSOLE, person=CONSOLE)
    assert reached == ["challenge"], "the control"


@GATED
@pytest.mark.parametrize("kind", [MessageType.REPLY, MessageType.RETURN])
def test_the_server_decodes_no_reply_that_it_does_not_wait_for(federation, gated, kind, monkeypatch):
    """Of a site, under its own name; nor does the parent process forward one of a site's job to the server's job."""
    sent = forwarded(federation, gated)
    cell, decoded = federation.cells[SERVER].core_cell, []
    monkeypatch.setattr(cell, "decrypt_payload", lambda message: decoded.append(message.get_header(MessageHeaderKey.REQ_ID)))
    cell.waiters["asked"] = SimpleNamespace(targets=[A])
    original = {MessageHeaderKey.ORIGINAL_HEADERS: {MessageHeaderKey.DESTINATION: A}}
    for asked in ("never", "asked"):
        federation.hand(SERVER, "admin", "x", {}, origin=A, person=A, kind=kind, **{MessageHeaderKey.REQ_ID: asked}, **original)
    assert decoded == (["asked"] if gated else ["never", "asked"])
    federation.hand(SERVER, COMMAND, "get_task", {}, **between(A_JOB, SERVER_JOB, kind=kind))
    assert sent == ([] if gated else [SERVER_JOB])


SERVER_COMMANDS = ("abort", "handle_dead_job", "show_stats", "get_errors", "reset_errors", "configure_job_log", "get_run_info")
FROM_SITES = {(COMMAND, "get_task"), (COMMAND, "submit_update"), (AUX, "__sync_runner__"), (AUX, "__task_check__")}


@GATED
@pytest.mark.parametrize(
    ("channel", "topic"),
    [*((COMMAND, topic) for topic in (*SERVER_COMMANDS, "shutdown", "app_command")), *sorted(FROM_SITES), (AUX, "fed.event")],
)
def test_of_a_running_job_a_site_gets_its_tasks_and_nothing_else(federation, gated, channel, topic):
    """At the parent process, which hands it on, and at the job's, whatever the parent did."""
    sent = forwarded(federation, gated)
    reached = heard(federation.cell(SERVER_JOB), channel)
    of = between(f"{B}.{JOB}", SERVER_JOB)
    passes = not gated or (channel, topic) in FROM_SITES
    federation.stream(SERVER, channel, topic, {}, **of)
    assert sent == [SERVER_JOB] * passes
    federation.stream(SERVER_JOB, channel, topic, {}, **(of | {"by": SERVER, "person": None}))
    assert soon(lambda: reached == [topic]) if passes else not reached


def test_a_sites_job_speaks_to_the_same_job(federation):
    sent = forwarded(federation)
    federation.stream(SERVER, COMMAND, "get_task", {}, **between(f"{B}.{OTHER}", SERVER_JOB))
    federation.stream(SERVER, COMMAND, "get_task", {}, **between(B, SERVER_JOB))
    federation.stream(SERVER, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER_JOB, destination=f"{A}.{OTHER}")
    assert not sent
    federation.stream(SERVER, COMMAND, "get_task", {}, **between(f"{B}.{JOB}", SERVER_JOB))
    federation.stream(SERVER, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER_JOB, destination=A_JOB)
    assert sent == [SERVER_JOB, A_JOB], "the control"


@GATED
def test_no_site_ends_the_servers_job_by_a_report(federation, gated, monkeypatch):
    """FLARE's job process ends itself where a stream of its is reported too large, whoever reports it."""
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    gated and ServerGate()
    of = f"{B}.{JOB}"
    sent = federation.cell(SERVER_JOB).send_blob("return_only", "x:y", of, Message({}, b"z"))
    assert soon(lambda: sent.stream_id in ByteStreamer.error_context_map), "it could not be sent, and FLARE remembers it"
    for error in ("StreamError", "BlobSizeError"):
        report = {StreamHeaderKey.ERROR_TYPE: error, StreamHeaderKey.STREAM_ID: sent.stream_id}
        report |= {StreamHeaderKey.CHANNEL: "return_only", StreamHeaderKey.TOPIC: "x:y"}
        federation.hand(SERVER_JOB, STREAM_CHANNEL, STREAM_ERROR_TOPIC, None, origin=of, by=SERVER, **report)
    assert ended == ([] if gated else [1])
    assert len(federation.lines()) == gated, "the other report passes"


@GATED
@pytest.mark.parametrize("topic", [STREAM_ACK_TOPIC, STREAM_ERROR_TOPIC])
@pytest.mark.parametrize(("stream", "written", "own"), [(77, 77, 1), (77, 77.0, 0), (1, True, 0)])
def test_a_site_reports_of_its_own_streams_alone(federation, gated, topic, stream, written, own, monkeypatch):
    """FLARE stops a stream at an error from anybody, and finds it by any value that equals its number."""
    gated and ServerGate()
    reached = heard(federation.cell(SERVER_JOB), STREAM_CHANNEL, topic)
    monkeypatch.setitem(ByteStreamer.tx_task_map, stream, SimpleNamespace(target=A_JOB))
    for of in (f"{B}.{JOB}", A_JOB):
        report = {StreamHeaderKey.STREAM_ID: written, StreamHeaderKey.ERROR_MSG: "x"}
        federation.hand(SERVER_JOB, STREAM_CHANNEL, topic, None, origin=of, by=SERVER, **report)
    assert len(reached) == (own if gated else 2)


@GATED
@pytest.mark.parametrize("topic", [STREAM_ACK_TOPIC, STREAM_ERROR_TOPIC])
def test_a_console_reports_of_its_own_streams_alone(federation, gated, topic, monkeypatch):
    """FLARE's numbers of streams follow each other: a member could stop the answers and downloads of all other people."""
    gated and ServerGate()
    reached = heard(federation.cell(SERVER), STREAM_CHANNEL, topic)
    monkeypatch.setitem(ByteStreamer.tx_task_map, 77, SimpleNamespace(target=CONSOLE))
    for of in (CONSOLE[:-1] + "9", CONSOLE):
        for error in ("StreamError", "BlobSizeError"):  # the second one ends a job's process, and not this one
            report = {StreamHeaderKey.STREAM_ID: 77, StreamHeaderKey.ERROR_MSG: "x", StreamHeaderKey.ERROR_TYPE: error}
            federation.hand(SERVER, STREAM_CHANNEL, topic, None, origin=of, person=of, **report)
    assert len(reached) == (2 if gated else 4)
    assert len(re.findall("the stream goes to another receiver", federation.audit.read_text())) == (2 if gated else 0)


@pytest.mark.parametrize("topic", ["get_clients", "update_run_status", "heartbeat"])
def test_what_the_servers_own_jobs_say_is_taken_from_them_alone(federation, topic):
    ServerGate()
    reached = heard(federation.cell(SERVER), "server_parent_listener")
    for of in (B, f"{B}.{JOB}", CONSOLE):
        federation.hand(SERVER, "server_parent_listener", topic, {}, origin=of, person=of.split(".")[0])
        federation.hand(SERVER, "server_parent_listener", topic, {}, origin=SERVER_JOB, by=of, person=of.split(".")[0])
    assert not reached
    federation.hand(SERVER, "server_parent_listener", topic, {}, origin=SERVER_JOB)
    assert reached == [topic], "the control"


def test_a_console_speaks_to_the_servers_console_and_a_site_does_not(federation):
    ServerGate()
    cell = federation.cell(SERVER)
    reached = [heard(cell, channel) for channel in ("hci_channel", "task", AUX)]
    for of in (B, CONSOLE):
        federation.stream(SERVER, "hci_channel", "command", {}, origin=of, person=of)
        federation.hand(SERVER, "task", "report_job_failure", {}, origin=of, person=of)
        federation.stream(SERVER, AUX, "ObjectStreamer.Request", {}, origin=of, person=of)
    assert soon(lambda: reached == [["command"], ["report_job_failure"], ["ObjectStreamer.Request"]]), reached
    said = re.findall(r"is not accepted from a (\w+)\]", federation.audit.read_text())
    assert sorted(said) == ["console", "site", "site"]


@pytest.mark.parametrize("by", [A, A_JOB])
def test_what_a_federation_lives_by_passes_the_servers_gate(federation, by):
    """Every message that a FedDP run of provisioned kits sends (test_gate_deployment.py runs one), also by the job's parent."""
    sent = forwarded(federation)
    reached = heard(federation.cells[SERVER], "task")
    for topic in ("challenge", "register", "heart_beat", "quit", "report_job_failure"):
        federation.hand(SERVER, "task", topic, {}, origin=A, person=A)
    for channel, topic in (*FROM_SITES, (AUX, "__job_heartbeat__"), ("download_service__", "download_service__download")):
        federation.stream(SERVER, channel, topic, {}, origin=A_JOB, by=by, person=A, destination=SERVER_JOB)
    assert (len(reached), sent) == (5, [SERVER_JOB] * 6)
    assert federation.lines() == []


@pytest.mark.parametrize("by", [A, SERVER])
def test_what_a_federation_lives_by_passes_the_sites_gate(federation, by):
    SiteGate()
    job = federation.cell(A_JOB)
    reached = [heard(job, AUX), heard(job, "download_service__")]
    federation.stream(A_JOB, AUX, "__end_run__", {}, origin=SERVER_JOB, by=by)
    federation.stream(A_JOB, "download_service__", "download_service__download", {}, origin=SERVER_JOB, by=by)
    assert soon(lambda: [len(topics) for topics in reached] == [1, 1])
    parent, sent = federation.cell(A).core_cell, []
    parent._forward = lambda endpoint, origin, destination, kind, message: sent.append(destination)
    federation.stream(A, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER, destination=A_JOB)
    federation.stream(A, COMMAND, "get_task", {}, origin=A_JOB, destination=SERVER_JOB)
    assert sent == [A_JOB, SERVER_JOB]
    assert federation.lines() == []
    federation.stream(A, COMMAND, "get_task", {}, origin=A_JOB, destination=f"{SERVER}.{OTHER}")
    federation.stream(A, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER, destination=f"{A}.{OTHER}")
    federation.stream(A, AUX, "__end_run__", {}, origin=SERVER_JOB, by=SERVER, destination=B)
    federation.stream(A, AUX, "__end_run__", {}, origin=f"{B}.{JOB}", by=SERVER, destination=A_JOB)
    assert len(sent) == 2
    assert len(federation.lines()) == 4


@pytest.mark.parametrize("by", [A, SERVER])
def test_another_job_of_the_server_does_not_end_a_sites_job(federation, by):
    SiteGate()
    reached = heard(federation.cell(A_JOB), AUX)
    federation.stream(A_JOB, AUX, "__end_run__", {}, origin=f"{SERVER}.{OTHER}", by=by)
    assert f"{SERVER}.{OTHER} may not send to this site" in federation.lines()[0]
    federation.stream(A_JOB, AUX, "__end_run__", {}, origin=SERVER_JOB, by=by)
    assert soon(lambda: reached == ["__end_run__"]), "the control"
    assert len(federation.lines()) == 1


@pytest.mark.parametrize("by", [A, SERVER])
def test_a_sites_job_forwards_nothing(federation, by):
    """Also what its parent process would forward: from the server to another job of the same site."""
    SiteGate()
    for name in (A, A_JOB):
        federation.cell(name)
    sent = {name: [] for name in (A, A_JOB)}
    for name, cell in ((name, federation.cells[name].core_cell) for name in sent):
        cell._forward = lambda endpoint, origin, destination, kind, message, to=sent[name]: to.append(destination)
    federation.stream(A_JOB, AUX, "__end_run__", {}, origin=SERVER, by=by, destination=f"{A}.{OTHER}")
    assert f"this site forwards nothing to {A}.{OTHER}" in federation.lines()[0]
    federation.stream(A, AUX, "__end_run__", {}, origin=SERVER, by=SERVER, destination=f"{A}.{OTHER}")
    assert sent == {A: [f"{A}.{OTHER}"], A_JOB: []}, "the parent process is the control"


@GATED
@pytest.mark.parametrize("command", ["cells", "route", "show_config_vars", "stress", "process_info"])
def test_no_console_rules_the_network(federation, gated, command):
    """FLARE asks no right of whoever types them: its filter passes over a command without `authz_func`."""
    gated and ServerGate()
    register = ServerCommandRegister(app_ctx=None)
    register.register_module(NetManager(None))
    register.finalize()
    found = register.get_command_entries(command)
    assert [entry.authz_func for entry in found] == ([] if gated else [None])


def test_a_cells_name_is_its_parents_and_its_job():
    assert cells.split(A) == (A, "")
    assert cells.split(A_JOB) == (A, JOB)
    assert cells.split(f"relay.{A}") == (f"relay.{A}", "")
    assert cells.split(JOB) == (JOB, ""), "a parent process, whatever it is called"
    assert cells.split(f"{A}.ws_transfer_{JOB}") == (A, f"ws_transfer_{JOB}")
    assert cells.is_bootstrap(f"{A}.ws_transfer_{JOB}")
    assert not cells.is_bootstrap(A_JOB)
    assert not cells.is_job("ws_transfer_" + JOB)


def test_gates_are_harmless_twice(federation):
    """FLARE builds the component in every process; a second one in the same process adds nothing."""
    SiteGate()
    before = set(threading.enumerate())
    SiteGate()
    assert set(threading.enumerate()) <= before
    cell = federation.cell(A)
    federation.hand(A, "admin", "admin", {}, origin=B, by=SERVER)
    assert len(federation.lines()) == 1
    assert isinstance(cell.core_cell.in_filter_reg, cell_gate.First)
    assert CoreCell.__init__.__name__ == "__init__"
