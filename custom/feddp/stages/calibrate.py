"""Inconsistency-guided calibration (FedDP; Wang et al., TMI 2024, Algorithm 1, lines 13 to 16): personal tensors travel once,
among the sites that consent; then every site tunes its own network, guided by the sites' disagreement."""

from collections.abc import Mapping
from functools import partial

from feddp import protocol
from feddp.errors import FedDPError
from feddp.methods.base import CALIBRATE, STAGES, TRAIN
from feddp.partition import Tensors
from feddp.plan.resolve import exchanged
from feddp.protocol import Sent
from feddp.sealing.peers import LeftOut, unnoted, whole
from feddp.stages import exchange
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import PEERS, Site
from feddp.stages.tune import NUMBERS, summary, tuned
from feddp.training.calibration import Tuned, calibration_loss, with_inconsistency
from feddp.training.loop import BatchLoss
from feddp.training.store import by_site, together

SLOT = STAGES[CALIBRATE]


def serve(server: Server) -> None:
    """Exchanges the personal tensors, unless λ = 0 makes them unnecessary, and starts the calibration at every site."""
    personal: dict[str, Message] = {}
    if server.plan.calibration.lambda_ > 0:
        exchange.prepare(server, protocol.INTRODUCE)
        personal = exchange.collect(server, protocol.COLLECT)
    server.memory.note_peers(exchange.hand_out(server, protocol.CALIBRATE, personal, NUMBERS))


def answer(task: str, message: Message, host: Host) -> Message:
    site = host.open()
    if task == protocol.COLLECT:
        return Message(personal(site))
    return summary(calibrate(site, by_site(message.tensors), partial(host.left_out, task)))


def personal(site: Site) -> Tensors:
    """Returns the tensors from which a peer that has γ rebuilds this site's network. They leave only with consent."""
    state, _ = site.store.read(site.latest(before=SLOT))
    return {name: state[name] for name in exchanged(site.plan, site.partition)}


def calibrate(site: Site, peers: Mapping[str, Tensors], left_out: LeftOut = unnoted) -> Tuned:
    """Runs the calibration with the peers' personal tensors {site: tensors}. Without peers, λ is 0.

    A peer is left out whose tensors are not exactly what rebuilds its network, or whose network gives maps that are not finite.

    Raises:
        ContributionError: this is so of every peer.
    """
    settings, samples = site.plan.calibration, site.samples
    loss: BatchLoss = site.batch_loss
    site.restore(site.latest(before=SLOT))
    site.store.remove(PEERS)
    if peers and settings.lambda_ > 0:
        used = whole(peers, partial(site.expected.check, Sent.PERSONAL), left_out)

        def unusable(peer: str, why: FedDPError) -> None:
            del used[peer]
            left_out(peer, why)

        networks = _networks(site, used)
        samples = site.placed(with_inconsistency(site.network, networks, samples, settings.delta, unusable))
        site.store.write(PEERS, together(used))
        loss = calibration_loss(loss, settings.lambda_, settings.delta)
    return tuned(site, SLOT, settings.calibration_epochs, settings.calibration_lr, loss, samples)


def peer_networks(site: Site) -> dict[str, Tensors]:
    """Rebuilds the networks of the peers that were used, from γ of the common start and each one's personal tensors."""
    return _networks(site, by_site(site.store.read(PEERS)[0])) if site.store.has(PEERS) else {}


def _networks(site: Site, peers: Mapping[str, Tensors]) -> dict[str, Tensors]:
    start, _ = site.store.read(STAGES[TRAIN])
    return {peer: start | given for peer, given in peers.items()}
