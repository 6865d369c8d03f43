"""A site's part in the sealed exchanges of one job: introduce itself, meet the others, seal for them, open what they sealed."""

import threading
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from feddp.errors import SealingError
from feddp.sealing.envelope import Facts, seal, unseal
from feddp.sealing.handshake import LIMIT, Peer, introduce, meet
from feddp.sealing.identity import Identity

SEALED, HANDSHAKE = "sealed", "introduction"  # the tensors that travel, each of bytes

Tensors = dict[str, Tensor]


class _Met(threading.local):
    """Whom the thread's own task has met: two at once must not seal for each other's recipients, or under the other's epoch."""

    next: tuple[Facts, list[Peer]] | None = None


class Session:
    """What a site must remember between the tasks of a job.

    It is in memory alone: FLARE gives a site one process a job, and one that ended cannot go on with the job's run. A process
    that is started again has no challenge, so it opens nothing: an envelope of before cannot be played to it.
    """

    def __init__(self, identity: Identity, job: str):
        self.identity, self.job = identity, job
        self._challenges: dict[str, str] = {}
        self._opened: dict[tuple[str, str], int] = {}  # the last epoch, by sender and task
        self._met = _Met()

    def introduce(self, exchange: str) -> Tensors:
        """This site's introduction to an exchange; with it, what was sealed for an earlier one no longer opens."""
        message, self._challenges[exchange] = introduce(self.identity, self.job, exchange)
        return {HANDSHAKE: as_tensor(message)}

    def meet(
        self,
        exchange: str,
        task: str,
        epoch: int,
        handshakes: Mapping[str, Mapping[str, Tensor]],
        recipients: Collection[str] | None,
    ) -> list[str]:
        """Takes note of whom the next collection is sealed for; their names.

        Args:
            handshakes: by site, as the server relayed them.
            recipients: the sites that this one's policy names; None where it names all of the project.

        Raises:
            SealingError: one of those that the policy names was not introduced by itself. Nothing will be sealed.
        """
        self._met.next = None
        wanted = [site for site in sorted(handshakes) if site != self.identity.name]
        peers = [
            meet(self.identity, site, as_bytes(site, HANDSHAKE, handshakes[site], LIMIT), self.job, exchange)
            for site in wanted
            if recipients is None or site in recipients
        ]
        self._met.next = Facts(self.job, task, epoch), peers
        return [peer.name for peer in peers]

    def seal(self, task: str, tensors: Mapping[str, Tensor]) -> Tensors:
        """The tensors, sealed for those this site has just met for this task; nothing where these are none.

        Raises:
            SealingError: it has met nobody for this task.
        """
        facts, peers = self._met.next or (None, [])
        self._met.next = None
        if facts is None or facts.task != task:
            raise SealingError(f"site {self.identity.name}: nobody was introduced for {task}; nothing was sent")
        return {SEALED: as_tensor(seal(self.identity, facts, peers, tensors))} if peers else {}

    def open(self, exchange: str, task: str, epoch: int, received: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensors]:
        """What the peers sealed for this site, by peer.

        Raises:
            SealingError: one of them did not, or what it sealed was opened before.
        """
        opened = {}
        for peer, tensors in received.items():
            envelope = as_bytes(peer, SEALED, tensors)
            if exchange not in self._challenges:
                raise SealingError(
                    f"site {self.identity.name}: it was sent an envelope of {peer} and has not introduced itself"
                )
            if epoch <= self._opened.get((peer, task), -1):
                raise SealingError(
                    f"site {self.identity.name}: an envelope of {peer} for {task} of epoch {epoch} or later was opened before"
                )
            facts = Facts(self.job, task, epoch)
            opened[peer] = unseal(self.identity, peer, envelope, facts, self._challenges[exchange])
        self._opened |= {(peer, task): epoch for peer in opened}
        return opened


def as_tensor(content: bytes) -> Tensor:
    """(bytes,) uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def as_bytes(site: str, name: str, tensors: Mapping[str, Tensor], limit: float = float("inf")) -> bytes:
    """The inverse of `as_tensor`, of the one tensor that a site may send.

    Raises:
        SealingError: there is another, or what there is are no bytes, or more of them than `limit`.
    """
    value = tensors.get(name)
    if tensors.keys() != {name} or not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        raise SealingError(
            f"site {site}: of it, {name} bytes alone may travel here, and these are {len(tensors)} other tensors"
        )
    if value.numel() > limit:
        raise SealingError(f"site {site}: its {name} bytes are {value.numel()}, more than the {limit} there can be")
    return value.cpu().numpy().tobytes()
