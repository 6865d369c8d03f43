"""Checks that only the machine on which a kit will run can make: the server answers, the device exists."""

import socket
import ssl
from typing import Any

import torch

from feddp.errors import FedDPError, Problem
from feddp.flare.scopes import scopes_of
from feddp.kit.components import args_of
from feddp.kit.containers import runtime
from feddp.kit.privacy import privacy_file
from feddp.sealing.kit import CLIENT, SERVER, Kit, components
from feddp.training.device import usable

PATIENCE = 5  # seconds for the server to accept a connection and to refuse a certificate


def here_problems(kit: Kit) -> list[Problem]:
    """Returns the problems of the connection to the server, made with the kit's certificate, and of a site's devices."""
    problems = [*_blank(kit), *([] if kit.kind == SERVER else _reach(kit))]
    if kit.kind == CLIENT and runtime(kit) is None:
        problems += _devices(kit)
    return problems


def _blank(kit: Kit) -> list[Problem]:
    """FLARE's start scripts do not quote the kit's path: with a blank in it they start nothing, and say so nowhere."""
    path = kit.folder.resolve()
    odd = any(letter.isspace() or letter in "*?[" for letter in str(path))
    what = "FLARE's start scripts cannot start a kit below a path with blanks, *, ? or ["
    return [Problem(path, what, "Move the kit to another path")] if odd else []


def _reach(kit: Kit) -> list[Problem]:
    """Checks that a server of this project listens and accepts this certificate."""
    host, port = kit.server
    wrong, remedy = "", "Start the server, open the firewall, or leave this out with --offline"
    try:
        context = ssl.create_default_context(cafile=kit.root)
        context.check_hostname = False  # FLARE's clients check the root and the common name, not the host
        context.load_cert_chain(kit.certificate, kit.key)
        with socket.create_connection((host, port), timeout=PATIENCE) as plain, context.wrap_socket(plain) as secured:
            secured.settimeout(1)
            if (shown := _name(secured)) != kit.server_identity:
                wrong = f"shows the certificate of {shown}, but the kit names {kit.server_identity}"
                remedy = "Correct the address, or ask for a new kit"
            elif _hangs_up(secured):
                wrong = "refuses this kit's certificate"
    except ssl.SSLCertVerificationError as error:
        wrong, remedy = f"is not of this project ({error.verify_message})", "Correct the address, or ask for a new kit"
    except ssl.SSLError as error:
        wrong = f"makes no TLS connection with this kit's certificate ({error.reason})"
    except OSError as error:
        wrong = f"does not answer ({error})"
    return [Problem(kit.configuration, f"the server {host}:{port} {wrong}", remedy)] if wrong else []


def _name(secured: ssl.SSLSocket) -> str:
    """Returns the common name in the other side's certificate. A site's FLARE compares it with the name in the kit."""
    subject: Any = (secured.getpeercert() or {}).get("subject", ())  # sequences of pairs (name, value)
    return next((str(value) for part in subject for key, value in part if key == "commonName"), "nobody")


def _hangs_up(secured: ssl.SSLSocket) -> bool:
    """Whether the server closes the connection. If it accepts the certificate, it waits for our first message."""
    try:
        return not secured.recv(1)
    except TimeoutError:
        return False


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
