"""The gates on provisioned kits. hospital-b's own kit holds a component that sends what it likes (hostile_site/attacker.py),
and a member's console does; hospital-c has taken its gate out. First with the server's gate, then the same without.

With the server's gate nothing arrives, not even at hospital-c. Without it hospital-a's own gate holds, and hospital-c, where
all of it succeeds, is the control.

Users of the same machine connect to where the server and the hospitals listen to their own jobs. hospital-c's connections to
its jobs have no TLS, as FLARE's by default.
"""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from nvflare.fuel.f3.cellnet.registry import Registry
from nvflare.fuel.f3.message import Message
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from feddp.flare.configuration import COMMUNICATION
from feddp.provision import GATE
from feddp.run.poc import connect
from support import ROOT
from support.claimant import Claimant
from support.deployment import HOSPITALS, SERVER, Deployment, approved, decided, deployment, until

pytestmark = pytest.mark.poc

A, B, C, ABSENT = HOSPITALS
PRESENT = [A, B, C]
MEMBER = "member@consortium.org"
KEY = "PRIVATE KEY-----"
SOME = "00000000-0000-4000-8000-000000000001"  # a job that nobody runs
READ = {"channel": "admin", "topic": "admin", "command": "sys.shell", "body": "cat startup/client.key"}
# what may not end the session of tests: those that stop the site, and a deployment's body
HARMFUL = {"train.restart", "train.shutdown", "train.delete_run"}
TOPICS = sorted({t for p in ClientRequestProcessors.request_processors for t in p.get_topics()} - HARMFUL)
EXPORT = (
    f"feddp job --method {{method}} --out jobs/{{method}} --sites {','.join(PRESENT)} --size 64 --rounds {{rounds}}"
    " --set batch=4 --set min_sites=2"
)


class Attacked(Deployment):
    """A federation with a hostile hospital in it."""

    attacks = 0

    def attack(self, attacks: list[dict]) -> list[str | None]:
        """What hospital-b gets back for each, all at once."""
        self.attacks += 1
        path = self.kits / B / f"attack-{self.attacks}.json"
        path.with_suffix(".part").write_text(json.dumps(attacks))
        path.with_suffix(".part").rename(path)
        until(path.with_suffix(".out").exists, "hospital-b's component sent nothing")
        return json.loads(path.with_suffix(".out").read_text())

    def refused(self, participant: str, job: str = "") -> list[str]:
        """What its gate has written down, of the parent process or of a job's."""
        path = self.kits / participant / job / "audit.log"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [line for line in lines if "[gate refused" in line]

    def submit(self, method: str) -> str:
        """A job, when it runs at hospital-a and -c."""
        job = approved(self.folder / "jobs" / method, *(self.kits / hospital for hospital in PRESENT))
        id = self.session.submit_job(str(job))
        for hospital in (A, C):
            log = self.kits / hospital / id / "log.txt"
            until(lambda log=log: log.exists() and "synced to parent" in log.read_text(), f"{hospital} did not start {id}")
        return id

    def listens(self, participant: str) -> str:
        """Where its parent process listens to its own jobs."""
        return re.findall(r"created backbone internal listener for (\S+)", self.log(participant))[-1]

    def strangers(self, job: str, stack: ExitStack) -> dict[tuple[str, str, str], Claimant]:
        """Users of the machines of the server and of hospital-a, who claim each name there: with nothing, and with hospital-b's
        certificate. By participant, name and certificate."""
        files = {"client_cert": "client.crt", "client_key": "client.key", "ca_cert": "rootCA.pem"}
        kits = {"nobody": {}, B: {name: str(self.kits / B / "startup" / file) for name, file in files.items()}}
        claims = [(at, name) for at in (SERVER, A) for name in ("server", A, f"server.{job}", f"{A}.{job}")]
        made = {}
        for at, name in claims:
            for person, credentials in kits.items():
                url = self.listens(at) if credentials else self.listens(at).replace("stcp", "tcp")
                made[at, name, person] = Claimant(name, url, credentials, stack)
        return made

    def turned_away(self, at: str, name: str, person: str) -> bool:
        """Whether its audit file says so of this stranger; of those without a certificate, of any."""
        said = "\n".join(self.refused(at))
        if person == B:
            return bool(re.search(rf"a connection that says it is {re.escape(name)} from 127.0.0.1:\d+ {B}: ", said))
        return "without a valid certificate: WRONG_VERSION_NUMBER]" in said

    def again(self, without: str) -> None:
        """Everybody stops, a participant takes its gate out, and everybody starts."""
        self.session.close()
        for kit in reversed(self.started):
            self.kill(kit)
            (kit / "daemon_pid.fl").unlink(missing_ok=True)
        self.started.clear()
        components(self.kits / without, lambda listed: [c for c in listed if c["path"] != GATE["server"]])
        self.up(PRESENT)


def components(kit: Path, change) -> None:
    """A participant edits the components of its own kit."""
    path = kit / "local/resources.json.default"
    resources = json.loads(path.read_text())
    resources["components"] = change(resources["components"])
    path.with_name("resources.json").write_text(json.dumps(resources))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with deployment(tmp_path_factory.mktemp("gates"), Attacked) as made:
        (made.kits / B / "local/custom").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests/support/hostile_site/attacker.py", made.kits / B / "local/custom")
        components(made.kits / B, lambda listed: [*listed, {"id": "x", "path": "attacker.Attacker", "args": {}}])
        components(made.kits / C, lambda listed: [c for c in listed if c["path"] != GATE["client"]])
        (made.kits / C / "local/comm_config.json").write_text(json.dumps(COMMUNICATION))
        for hospital in PRESENT:
            decided(made.kits / hospital, bounds={"min_sites": 2})
        made.feddp(EXPORT.format(method="feddp", rounds=2) + " --calibration-epochs 1")
        made.feddp(EXPORT.format(method="fedavg", rounds=50))
        for hospital in (A, C):
            (made.kits / hospital / "feddp/of-a-run").mkdir(parents=True)
        made.up(PRESENT)
        yield made


def everything(hospital: str) -> list[dict]:
    """Every topic of the console's channel, but those that would end what is to be looked at afterwards."""
    return [{**READ, "to": hospital, "command": topic, "headers": {"job_id": "none"}} for topic in TOPICS]


def deletion(hospital: str, **more) -> dict:
    return {**READ, "to": hospital, "command": "train.delete_run", "headers": {"job_id": "feddp"}} | more


def push(hospital: str, job: str) -> dict:
    """A round of the sender's choice, pushed past the server."""
    task = {"__headers__": {"__task_name__": "train", "__task_id__": "x"}, "round": 90000}
    return {"to": f"{hospital}.{job}", "channel": "aux_communication", "topic": "__do_task__", "headers": task, "stream": True}


def ending(job: str, command: str) -> dict:
    return {"to": f"server.{job}", "channel": "server_command", "topic": command, "stream": True}


def by_member(federation, hospital: str) -> str | None:
    """What a member's console, which may look only, gets from a hospital past the server's commands."""
    session = connect(federation.kits, PRESENT, MEMBER)
    try:
        request = Message({}, AdminMessage("sys.shell", "cat startup/client.key"))
        cell = session.api.cell.core_cell
        cell.in_filter_reg = Registry()  # FLARE's own filter of this console would stop the victim's answer
        reply = cell.send_request(channel="admin", topic="admin", target=hospital, request=request, timeout=5.0)
        return getattr(reply.payload, "body", None)
    finally:
        session.close()


@pytest.fixture(scope="module")
def guarded(federation):
    """With the server's gate: what hospital-b and the member get, before and during a whole FedDP run with sealed exchange."""
    seen = {"read": federation.attack([{**READ, "to": site} for site in (A, C)])}
    seen["member"] = [by_member(federation, site) for site in (A, C)]
    seen["deleted"] = federation.attack([deletion(A), deletion(C)])
    federation.attack([deletion(site, origin=origin) for site in (A, C) for origin in ("server", f"server.{SOME}", ABSENT)])
    seen["all"] = federation.attack(everything(C))
    seen["job"] = job = federation.submit("feddp")
    with ExitStack() as stack:
        seen["strangers"] = strangers = federation.strangers(job, stack)
        seen["pushed"] = federation.attack([push(A, job), push(C, job)])
        spoofed = [{**ending(job, "abort"), "stream": False, "origin": origin} for origin in ("server", f"{A}.{job}")]
        seen["ended"] = federation.attack([ending(job, "handle_dead_job"), ending(job, "abort"), *spoofed])
        # some lines may be left out of a minute; who is turned away tries again
        until(lambda: all(federation.turned_away(*claim) for claim in strangers), "not every stranger was turned away")
    seen["status"] = federation.finished(job)["status"]
    seen["left"] = [(federation.kits / site / "feddp/of-a-run").exists() for site in (A, C)]
    return seen


def test_with_the_servers_gate_a_peer_and_a_member_reach_nobody(federation, guarded):
    """hospital-c has no gate of its own here. Spoofed: with the headers and the token that the server shows in each message."""
    for name in ("read", "member", "deleted", "all", "pushed", "ended"):
        assert set(guarded[name]) == {None}, name
    assert guarded["left"] == [True, True]
    said = "\n".join(federation.refused(SERVER))
    for to in (A, C):
        assert f"admin/admin from {B} over {B} {B}: no message may go from {B} to {to}]" in said
        assert re.search(rf"admin/admin from (_admin_\S+) over \1 {MEMBER}: no message may go from \1 to {to}\]", said)
    for claimed in ("server", f"server.{SOME}", ABSENT):
        assert f"admin/admin from {claimed} over {B} {B}: {B} may not send for {claimed}]" in said
    assert federation.refused(C) == []


def test_a_whole_feddp_run_goes_on_meanwhile(federation, guarded):
    """With sealed exchange, both gates on, and a hostile hospital that otherwise takes part as it should; hospital-c, which has
    no gate, answers no task."""
    assert guarded["status"] == "FINISHED:COMPLETED", federation.log(SERVER)[-3000:]
    results = json.loads((federation.results(guarded["job"]) / "results.json").read_text())
    assert set(results["sites"]) == {A, B}
    assert results["sealed"] is True
    assert results["sites"][A]["calibration"]["peers"] == 1
    audit = (federation.kits / C / guarded["job"] / "audit.log").read_text()
    assert f"site {C}: no gate protects {C}.{guarded['job']}, so the server can bypass the policy" in audit


@pytest.mark.parametrize("at", [SERVER, A])
def test_a_user_of_the_same_machine_is_nobody(federation, guarded, at):
    """While the job ran to its end with the connections that it had: nobody's was closed for a stranger's."""
    claimed = {key: stranger for key, stranger in guarded["strangers"].items() if key[0] == at}
    assert len(claimed) == 8
    assert {key: stranger.got for key, stranger in claimed.items() if stranger.got} == {}
    assert all(federation.turned_away(*claim) for claim in claimed)
    assert " is evicted for " not in federation.log(at)


@pytest.fixture(scope="module")
def bare(federation, guarded):
    """The same without the server's gate."""
    federation.again(SERVER)
    seen = {site: [*federation.attack([{**READ, "to": site}]), by_member(federation, site)] for site in (A, C)}
    federation.attack([deletion(A, origin="server"), deletion(C, origin="server")])
    until(lambda: not (federation.kits / C / "feddp").exists(), "the control: hospital-c's folder was not deleted")
    seen["all"] = {site: federation.attack(everything(site)) for site in (A, C)}
    seen["job"] = job = federation.submit("fedavg")
    seen["pushed"] = federation.attack([push(A, job), push(C, job)])
    federation.attack([ending(job, "abort")])
    federation.finished(job)
    seen["left"] = (federation.kits / A / "feddp/of-a-run").exists()
    return seen


def test_without_the_servers_gate_the_sites_own_holds(federation, bare):
    assert bare[A] == [None, None]
    assert set(bare["all"][A]) == {None}
    assert bare["pushed"][0] is None
    assert bare["left"], "nothing deleted, though the server's own name and token stood on it"
    said = "\n".join(federation.refused(A))
    assert f"admin/admin from {B} over server {SERVER}: {B} may not send to this site]" in said
    assert "sys.shell" not in said, "a peer's message is not even decoded"
    assert f"(job_id) for - from server over server {SERVER}: train.delete_run is not answered by any site]" in said
    assert f"__do_task__ from {B} over server {SERVER}: {B} may not send" in "\n".join(federation.refused(A, bare["job"]))


def test_without_any_gate_all_of_it_succeeds(federation, bare):
    """The control, at hospital-c and at the server."""
    assert [said and KEY in said for said in bare[C]] == [True, True], "a peer and a member read the private key"
    assert None not in bare["all"][C], dict(zip(TOPICS, bare["all"][C], strict=True))
    assert bare["pushed"][1] is not None
    # the abort's answer may come after the attacker's five seconds, and FLARE calls the job completed; its results are not
    assert not (federation.results(bare["job"]) / "results.json").exists(), "50 rounds were not over"


def test_without_them_a_user_of_the_same_machine_is_the_server(federation, bare):
    """The control, at hospital-c, without the gate and without TLS: what is meant for the server comes to whoever says so last,
    with the hospital's token, and the server's own connection is closed."""
    with ExitStack() as stack:
        stranger = Claimant("server", federation.listens(C), {}, stack)
        until(lambda: any(headers.get(CellMessageHeaderKeys.TOKEN) for headers in stranger.headers), "nothing came")
    assert " is evicted for " in federation.log(C)
