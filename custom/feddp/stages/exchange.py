"""What goes from consenting sites to consenting sites by way of the server, which relays it in memory and writes none.

Where there are certificates, it relays sealed envelopes (`feddp.sealing`) which it cannot open; without them, in FLARE's
simulator or in one process, the tensors themselves.
"""

from collections.abc import Mapping, Sequence

from feddp import protocol
from feddp.sealing.envelope import recipients_of
from feddp.sealing.session import SEALED, as_bytes
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.training.store import Tensors, together


def prepare(server: Server, task: str) -> None:
    """Introduces all sites to each other, once a job and consent, where they have certificates; otherwise warns."""
    consent, introductions = protocol.spec_of(task).consent, server.memory.introductions
    if consent in introductions:
        return
    if server.sealed:
        introduce(server, task)
    else:
        introductions[consent] = {}
        server.warn("no certificates: what sites exchange passes the server in the clear")


def introduce(server: Server, task: str, sites: Sequence[str] | None = None) -> dict[str, Message]:
    """Asks the sites, all unless they are named, whether they consent; what those show that do is relayed with the collections
    under the same consent."""
    data = Message() if sites is None else {site: Message() for site in sites}
    answers = server.ask(task, data, ("consent",))
    shown = together({site: answer.tensors for site, answer in answers.items()})
    server.memory.introductions[protocol.spec_of(task).consent] = shown
    return answers


def collect(server: Server, task: str, sites: Sequence[str] | None = None, **facts: int) -> dict[str, Message]:
    """What the sites, all unless they are named, gave: every good answer, those of sites that gave nothing too."""
    message = Message(server.memory.introductions.get(protocol.spec_of(task).consent, {}), facts)
    data = message if sites is None else dict.fromkeys(sites, message)
    return server.ask(task, data, ("consent",), **facts)


def peers_of(server: Server, site: str, answers: Mapping[str, Message]) -> list[str]:
    """The others whose tensors a site is to receive: all that gave some, or sealed them for it."""
    others = [peer for peer in sorted(answers) if peer != site and answers[peer].tensors]
    if not server.sealed:
        return others
    return [peer for peer in others if site in recipients_of(peer, as_bytes(peer, SEALED, answers[peer].tensors))]


def hand_out(
    server: Server, task: str, answers: Mapping[str, Message], numbers: Sequence[str], **facts: int
) -> dict[str, list[str]]:
    """Every site receives what its peers gave; a site that gave nothing receives nothing.

    Returns:
        The peers of every site that answered well, by site.
    """
    gave = {site for site, answer in answers.items() if answer.tensors}
    peers = {site: peers_of(server, site, answers) if site in gave else [] for site in server.sites()}
    parcels = {site: Message(of_peers(peers[site], answers), facts) for site in peers}
    return {site: peers[site] for site in server.ask(task, parcels, numbers, **facts)}


def of_peers(peers: Sequence[str], answers: Mapping[str, Message]) -> Tensors:
    """What one site receives: its peers' tensors, named `<peer>/<tensor>`."""
    return together({peer: answers[peer].tensors for peer in peers})
