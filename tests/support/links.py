"""Machines on one machine, joined by links that are slow or die: net/net.sh for tests."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NET = Path(__file__).parent / "net/net.sh"


def _missing() -> str:
    """What this machine lacks for namespaces and links; "" if nothing. CI has it all, and skips nothing."""
    if "CI" in os.environ:
        return ""
    lacks = [] if os.geteuid() == 0 else ["you are not root"]
    lacks += [f"there is no {name}" for name in ("ip", "cc", "unshare") if shutil.which(name) is None]
    return "; ".join(lacks + ([] if os.access("/dev/net/tun", os.W_OK) else ["/dev/net/tun cannot be written"]))


needs_links = pytest.mark.skipif(bool(_missing()), reason=f"NOT TESTED HERE: links between namespaces; {_missing()}")


@dataclass
class Net:
    """Namespaces PREFIX-server and PREFIX-SITE; `server.example.org` is the server in all of them."""

    folder: Path
    prefix: str
    subnet: str

    def do(self, *command: str) -> None:
        subprocess.run([NET, *command], env=self.env, check=True, timeout=60)

    def signal(self, site: str, name: str) -> None:
        """USR1: its link is down; USR2: it is up; WINCH: the firewall on it forgets all flows."""
        self.do("signal", site, name)

    def start(self, machine: str, *command: str, env: Mapping[str, str] = os.environ, **more: Any) -> subprocess.Popen:
        return subprocess.Popen([NET, "in", machine, *command], env={**env, **self.env}, **more)

    def carried(self, site: str) -> int:
        """The bytes that its link has carried both ways until now, with all headers."""
        before = self.log(site).count("B>A")
        self.signal(site, "HUP")
        while (log := self.log(site)).count("B>A") == before or not log.endswith("\n"):
            time.sleep(0.05)
        return sum(int(re.findall(rf"{way} sent .* bytes (\d+)", log)[-1]) for way in ("A>B", "B>A"))

    def log(self, site: str) -> str:
        """What happened to its link: flows that were forgotten, when it was down."""
        return (self.folder / f"link.{site}.log").read_text(encoding="ascii")

    @property
    def env(self) -> dict[str, str]:
        own = {"FED_NET": str(self.folder), "FED_PREFIX": self.prefix, "FED_SUBNET": self.subnet}
        return {"PATH": os.environ["PATH"], **own}


@contextmanager
def links(folder: Path, prefix: str, subnet: str, sites: list[str], delay=0.0, loss=0.0, rate=0.0, idle=0.0) -> Iterator[Net]:
    """Links of these sites to the server. No two nets at a time may share a prefix or a subnet.

    Args:
        delay: milliseconds, one way. `loss`: of packets, from 0 to 1. `rate`: Mbit/s, 0 for no limit.
        idle: seconds after which a firewall forgets a silent flow, 0 for never.
    """
    net = Net(folder, prefix, subnet)
    try:
        net.do("up", *(str(value) for value in (delay, loss, rate, idle)), *sites)
        yield net
    finally:
        net.do("down")
