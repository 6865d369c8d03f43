"""Exchanges between consenting sites. The server relays the tensors in memory and writes none of them to disk.

With certificates, the server relays sealed envelopes (`feddp.sealing`), which it cannot open. Without certificates (FLARE's
simulator, one process), it relays the tensors themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from feddp import protocol
from feddp.partition import Tensors
from feddp.sealing.ends import of_peer, warnings
from feddp.sealing.envelope import recipients_of
from feddp.sealing.handshake import LIMIT, certificate_in
from feddp.sealing.session import HANDSHAKE, SEALED, as_bytes
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.training.store import together

NO_CONSENT, FEW = "does not consent", "has too few patients for a mean that may leave by its policy"


def prepare(server: Server, task: str) -> None:
    """Runs the handshake among all sites, for each stage anew: a site drops its handshake's key at the end of an exchange.
    Without certificates it only warns."""
    if server.sealed:
        introduce(server, task)
    else:
        server.warn("no certificates: the server can read the tensors that sites exchange")


def introduce(server: Server, task: str, sites: Sequence[str] | None = None) -> dict[str, Message]:
    """Asks `sites` (default: all) whether they consent. The server relays the handshakes of those that do, together with
    the collections under the same consent word."""
    data = Message() if sites is None else {site: Message() for site in sites}
    answers = server.ask(task, data, ("consent",))
    for line in _ending(answers):
        server.progress("certificate", message=line)
    shown = together({site: answer.tensors for site, answer in answers.items()})
    server.memory.handshakes[protocol.spec_of(task).consent] = shown
    return answers


def _ending(answers: Mapping[str, Message]) -> list[str]:
    """Returns a line for each site whose handshake has a certificate that ends soon. The server judges nothing by it."""
    sent = {site: answer.tensors for site, answer in sorted(answers.items()) if HANDSHAKE in answer.tensors}
    found = {site: certificate_in(as_bytes(site, HANDSHAKE, tensors, LIMIT)) for site, tensors in sent.items()}
    return warnings(of_peer(site, certificate) for site, certificate in found.items() if certificate)


def collect(server: Server, task: str, sites: Sequence[str] | None = None, **metadata: Any) -> dict[str, Message]:
    """Collects tensors from `sites` (default: all). Returns every accepted answer, also those without tensors."""
    consent = protocol.spec_of(task).consent
    message = Message(server.memory.handshakes.get(consent, {}), metadata)
    data = message if sites is None else dict.fromkeys(sites, message)
    answers = server.ask(task, data, ("consent",), **metadata)
    for site, answer in answers.items():
        if not answer.scalars["consent"]:
            why = FEW if answer.scalars.get(protocol.TOO_FEW) else NO_CONSENT
            server.memory.without.setdefault(consent, {})[site] = why
    return answers


def peers_of(server: Server, answers: Mapping[str, Message], sites: Sequence[str]) -> dict[str, list[str]]:
    """Returns {site: the peers whose tensors it receives}: all that gave tensors or, with certificates, sealed them for it."""
    gave = [peer for peer in sorted(answers) if answers[peer].tensors]
    recipients = dict.fromkeys(gave, sites)
    if server.sealed:  # each envelope once, not for every site: its header is reached through a copy of it
        recipients = {peer: recipients_of(peer, as_bytes(peer, SEALED, answers[peer].tensors)) for peer in gave}
    return {site: [peer for peer in gave if peer != site and site in recipients[peer]] for site in sites}


def hand_out(
    server: Server, task: str, answers: Mapping[str, Message], numbers: Sequence[str], **metadata: Any
) -> dict[str, list[str]]:
    """Sends every site its peers' tensors. A site that gave nothing receives nothing.

    Returns:
        {site: its peers} of every site whose answer was accepted.
    """
    gave = {site for site, answer in answers.items() if answer.tensors}
    found = peers_of(server, answers, server.sites())
    peers = {site: found[site] if site in gave else [] for site in found}
    parcels = {site: Message(of_peers(peers[site], answers), metadata) for site in peers}
    return {site: peers[site] for site in server.ask(task, parcels, numbers, **metadata)}


def of_peers(peers: Sequence[str], answers: Mapping[str, Message]) -> Tensors:
    """Returns the message for one site: its peers' tensors, named `<peer>/<tensor>`."""
    return together({peer: answers[peer].tensors for peer in peers})
