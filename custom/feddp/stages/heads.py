"""FedLC's head calibration (Wang et al., ECCV 2022): sites exchange their segmentation heads before every epoch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from feddp import protocol
from feddp.methods.base import HEADS, STAGES
from feddp.partition import Tensors
from feddp.plan.resolve import head_names
from feddp.protocol import Sent
from feddp.sealing.peers import LeftOut, unnoted, whole
from feddp.stages import exchange
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.order import require, state_before
from feddp.stages.round import LocalRound, keep
from feddp.stages.server import Server
from feddp.stages.site import Site
from feddp.stages.tune import NUMBERS, summary
from feddp.training.calibration import Tuned
from feddp.training.store import State, by_site

SLOT = STAGES[HEADS]


def serve(server: Server) -> None:
    exchange.prepare(server, protocol.INTRODUCE)
    memory = server.memory
    for epoch in range(memory.epoch + 1, server.plan.heads.heads_epochs + 1):
        heads = exchange.collect(server, protocol.COLLECT_HEADS, epoch=epoch)
        peers = exchange.hand_out(server, protocol.CALIBRATE_HEADS, heads, NUMBERS, epoch=epoch)
        memory.note_peers(peers)
        memory.epoch = epoch
        memory.note()


def answer(task: str, message: Message, host: Host) -> Message:
    site = host.open()
    epoch: Any = message.scalars.get("epoch")  # checked by `_open`
    if task == protocol.COLLECT_HEADS:
        return Message(head(site, epoch))
    return summary(calibrate(site, by_site(message.tensors), epoch, partial(host.left_out, task)))


def head(site: Site, epoch: int) -> Tensors:
    """Returns this site's segmentation head before `epoch` of the head calibration. It leaves only with consent.

    Raises:
        PolicyError: the plan has no such epoch, or the site no longer has the state before it.
    """
    _open(site, epoch)
    state = site.copy()
    return {name: state[name] for name in head_names(site.network)}


def calibrate(site: Site, peers: Mapping[str, Tensors], epoch: int, left_out: LeftOut = unnoted) -> Tuned:
    """Trains one epoch (from 1) of the head calibration with the peers' heads, and keeps the best epoch so far.

    The state before the first epoch is no candidate for the best: without calibrated heads it is another network.
    The numbers of the site's states on disk continue after the last round. A peer whose tensors are not exactly a head is left
    out.

    Raises:
        FedDPError: this is so of every peer, a peer is not among the plan's sites, or as for `head`.
    """
    before = _open(site, epoch)
    settings, step = site.plan.heads, _exchanges(site) + epoch
    # no network is tried: a head is one convolution, so finite features and weights in their domain give finite maps
    peers = whole(peers, partial(site.expected.check, Sent.HEADS), left_out)
    losses, scores = (before.memory[name].tolist() if before.memory else [] for name in ("losses", "scores"))
    scores = scores or [site.validate()["iou"]]
    scores += [float("-inf")] * (epoch - len(scores))  # epochs that this site missed
    site.method.receive_heads(site, peers)
    local = LocalRound(site, before, step, settings.heads_lr)
    losses.append(local.fit(1, train=site.method.private))
    scores.append(site.validate()["iou"])
    best = scores.index(max(scores[1:]), 1)
    if best == epoch:
        site.save(SLOT)
    history = {"losses": torch.tensor(losses, dtype=torch.float64), "scores": torch.tensor(scores, dtype=torch.float64)}
    after = local.state()
    keep(site, State(step, after.private, optimizer=after.optimizer, memory=history), {step - 1, step - 2, _exchanges(site)})
    site.store.record(SLOT, epoch=epoch, of=settings.heads_epochs, loss=losses[-1], iou=scores[-1])
    return Tuned(losses, scores, best)


def _exchanges(site: Site) -> int:
    """Returns the number of states that stage 1 leaves."""
    return site.plan.rounds * site.plan.phases


def _open(site: Site, epoch: int) -> State:
    """Loads the network as it is before `epoch`; returns the site's state, empty before its first epoch."""
    require(site.name, "epoch", epoch, 1, site.plan.heads.heads_epochs)
    start, _ = site.store.read(site.latest(before=SLOT))
    exchanges = _exchanges(site)
    state = state_before(site.name, site.store, exchanges + epoch - 1, f"epoch {epoch}", first=epoch == 1)
    if state.round <= exchanges:
        state = State(exchanges)
    site.network.load_state_dict(start | state.private)
    return state
