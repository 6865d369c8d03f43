"""Checks that only the machine on which a kit will run can make: the server answers, the device exists."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch
from cryptography import x509

from feddp.errors import FedDPError, Problem
from feddp.flare.scopes import scopes_of
from feddp.kit.components import args_of
from feddp.kit.containers import runtime
from feddp.kit.privacy import privacy_file
from feddp.sealing.kit import ADMIN, CLIENT, SERVER, Kit, components
from feddp.sealing.reach import reach
from feddp.training.device import usable

_PROXIES = {f"{kind}_proxy" for kind in ("http", "https", "ws", "wss", "all", "no", "socks", "socks5", "grpc")}


def here_problems(kit: Kit) -> tuple[list[Problem], x509.Certificate | None]:
    """Returns the problems of the connection to the server, made with the kit's certificate, and of a site's devices; and the
    certificate that the server showed."""
    problem, server = (None, None) if kit.kind == SERVER else reach(kit)
    if problem and (unused := proxies()):
        problem = replace(problem, remedy=f"{problem.remedy}. {unused}")
    problems = [*odd_paths(kit), *([problem] if problem else [])]
    if kit.kind == CLIENT and runtime(kit) is None:
        problems += _devices(kit)
    return problems, server


def proxies() -> str:
    """Returns a sentence about the variables of this process that name a proxy, which FLARE does not use; "" without any."""
    found = [name for name, value in sorted(os.environ.items()) if name.lower() in _PROXIES and value]
    if not found:
        return ""
    one = len(found) == 1
    seen = f"{', '.join(found)} {'is' if one else 'are'} set here, but {'is' if one else 'are'} not used"
    return f"{seen}: FLARE connects to the server directly, so the firewall must let it"


def odd_paths(kit: Kit) -> list[Problem]:
    """Returns the paths that FLARE takes apart because it does not quote them: the kit's in its start scripts, which then start
    nothing and say so nowhere, and in the commands of jobs; in these also that of Python. A person's kit starts none."""
    path, python = kit.folder.resolve(), Path(sys.executable)
    problems = []
    if _taken_apart(path) or any(letter in "*?[" for letter in str(path)):
        what = "FLARE cannot start a kit below a path with blanks or any of * ? [ # ' \" \\"
        problems.append(Problem(path, what, "Move the kit to another path"))
    if kit.kind != ADMIN and runtime(kit) is None and _taken_apart(python):
        what = "FLARE cannot start jobs with a Python below a path with blanks or any of # ' \" \\"
        problems.append(Problem(python, what, "Make the environment anew at another path"))
    return problems


def _taken_apart(path: Path) -> bool:
    """Whether a job's command with this path is cut there, as FLARE's launcher cuts it."""
    try:
        return shlex.split(str(path), comments=True) != [str(path)]
    except ValueError:  # a quote without its end
        return True


def _devices(kit: Kit) -> list[Problem]:
    """Checks that each scope's device exists, and the GPUs that FLARE manages: without them its client does not start."""
    problems = []
    path = kit.effective("resources.json")
    wanted = max((args_of(c).get("num_of_gpus", 0) for c in components(path)), default=0)
    if wanted > (there := torch.cuda.device_count()):
        problems.append(Problem(path, f"has num_of_gpus {wanted}, but this machine has {there}", "Correct it"))
    path = privacy_file(kit)
    for name, scope in scopes_of(path).items():
        try:
            usable(scope["properties"].get("device", "cpu"), f"scope {name}: device", "write cpu, cuda or cuda:N")
        except FedDPError as error:
            problems.append(Problem(path, str(error), "Correct it"))
    return problems
