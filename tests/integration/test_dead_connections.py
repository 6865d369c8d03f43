"""Connections that a firewall or a dead link cuts without a word, on links between namespaces (tests/support/net), with each of
FLARE's drivers: noticed at both ends and built anew; and what is only slow, or idle, is left alone."""

import json
import sys
import threading
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from feddp.flare.admin_session import opened_session
from feddp.flare.dead_connections import Limits
from feddp.flare.gate import ServerGate, SiteGate
from support import cell_process
from support.gated import in_process
from support.links import links, needs_links

DRIVERS = {"http": 9001, "tcp": 9002, "grpc": 9003}
SITES = {f"site-{driver}": driver for driver in DRIVERS}
LIMITS = {"silent": 6, "idle": 2, "probe": 1, "ping": 2, "period": 0.5}
FORGETS = 4  # seconds: the firewall's limit for an idle flow, beyond that of the probes
RATE = 1.0  # Mbit/s


class Machine:
    """A process of cells on a machine of the net, and what it has told so far."""

    def __init__(self, net, name: str, places: list[str], limits=LIMITS):
        command = [sys.executable, cell_process.__file__, json.dumps(limits), *places]
        self.told: list[dict] = []
        self.process = net.start(name, *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.told.append(json.loads(line) | {"at": time.monotonic()})

    def send(self, size: int) -> None:
        self.process.stdin.write(f"{size}\n")
        self.process.stdin.flush()

    def seen(self, since: int, **what) -> dict[tuple[str, str], float]:
        """When its cells told so, since line `since`: by the cell and the one that it saw."""
        fits = [line for line in self.told[since:] if what.items() <= line.items()]
        return {(line["cell"], line.get("other", "")): line["at"] for line in fits}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def within(seconds: float, machine: Machine, since: int, **what) -> dict[tuple[str, str], float]:
    """Waits until all three connections were told of so; returns when."""
    deadline = time.monotonic() + seconds
    while len(seen := machine.seen(since, **what)) < len(DRIVERS):
        assert time.monotonic() < deadline, f"{what}: only {seen} of {machine.told}"
        time.sleep(0.1)
    return seen


def noticed(machine: Machine, since: int) -> None:
    """All three connections are gone, from now on within what the limits say, and a second for a busy machine."""
    now = time.monotonic()
    gone = within(2 * LIMITS["silent"], machine, since, state="DISCONNECTED")
    assert max(gone.values()) - now < LIMITS["silent"] + LIMITS["period"] + 1, gone


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """A server that listens with all drivers, and a machine with a site for each of them."""
    folder = tmp_path_factory.mktemp("net")
    with links(folder, "dead", "10.46", ["a"], delay=20, rate=RATE, idle=FORGETS) as net:
        listens = ",".join(f"{driver}://0.0.0.0:{port}" for driver, port in DRIVERS.items())
        server = Machine(net, "server", [f"server={listens}"])
        site = Machine(net, "a", [f"{site}={on}://server.example.org:{DRIVERS[on]}" for site, on in SITES.items()])
        try:
            for machine in (server, site):
                within(60, machine, 0, state="READY")
            yield net, server, site
        finally:
            site.end()
            server.end()


@pytest.mark.tools
@needs_links
def test_an_idle_connection_is_not_forgotten(machines):
    """The firewall forgets what is silent for `FORGETS`; FLARE alone was silent for a minute."""
    net, server, site = machines
    before = len(server.told), len(site.told)
    time.sleep(2 * FORGETS)
    assert (len(server.told), len(site.told)) == before
    site.send(1)
    within(5, site, before[1], sent=1, answer=1)
    assert "forgotten" not in net.log("a")


@pytest.mark.tools
@needs_links
def test_a_slow_message_and_a_short_outage_cost_no_connection(machines):
    """Three messages share the link for 9.6 s. Until the first is through, neither end has had a whole frame for longer than a
    dead connection may be silent, and PINGs wait behind them. In the middle the link is down, for less than that."""
    net, server, site = machines
    before, size = len(site.told), 400_000
    lasts = 8 * size * len(DRIVERS) / (RATE * 1e6)
    assert lasts > LIMITS["silent"]
    site.send(size)
    time.sleep(lasts / 3)
    net.signal("a", "USR1")
    time.sleep(LIMITS["silent"] / 3)
    net.signal("a", "USR2")
    within(4 * lasts, site, before, sent=size, answer=size)
    states = [line for line in [*server.told, *site.told[before:]] if "state" in line and line["state"] != "READY"]
    assert states == []


@pytest.mark.tools
@needs_links
def test_a_forgotten_connection_is_built_anew(machines):
    net, _, site = machines
    before = len(site.told)
    net.signal("a", "WINCH")
    noticed(site, before)
    within(10, site, before, state="READY")
    since = len(site.told)
    site.send(1000)
    within(10, site, since, sent=1000, answer=1000)


@pytest.mark.tools
@needs_links
def test_each_end_notices_alone(machines):
    """No new connection can tell the other end, because the link stays down."""
    net, server, site = machines
    before = len(server.told), len(site.told)
    net.signal("a", "USR1")
    try:
        for machine, since in zip((server, site), before, strict=True):
            noticed(machine, since)
    finally:
        net.signal("a", "USR2")
    within(30, site, before[1], state="READY")


def test_the_limits_keep_what_the_pages_promise():
    """A dead connection is noticed within 60 s; after an outage of 40 s an idle one has been probed again before it is given
    up; something is sent every 30 s, also if a probe is lost."""
    limits = Limits()
    assert limits.silent + limits.period < 60
    assert limits.idle + 40 + limits.probe <= limits.silent
    assert limits.idle + limits.probe < 30
    assert limits.ping + 5 < 30  # FLARE looks every 5 s


def test_a_console_looks_after_its_connection(monkeypatch):
    started = []
    monkeypatch.setattr("feddp.flare.admin_session.close_dead_connections", lambda: started.append("console"))
    with pytest.raises(Exception, match="no-kit"):
        opened_session("nobody", Path("no-kit"))
    assert started == ["console"]


@pytest.mark.parametrize("gate", [SiteGate, ServerGate])
def test_every_process_of_a_kit_looks_after_its_connections_and_streams(gate, monkeypatch, tmp_path):
    """`feddp kit check` requires the gate of every kit; FLARE builds it in the parent's process and in every job's."""
    started = []
    for name in ("close_dead_connections", "by_progress"):
        monkeypatch.setattr(f"feddp.flare.cell_gate.{name}", lambda name=name: started.append(name))
    with in_process(monkeypatch, tmp_path):
        gate()
    assert sorted(started) == ["by_progress", "close_dead_connections"]
