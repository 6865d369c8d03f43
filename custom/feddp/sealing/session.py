"""A site's part in the sealed exchanges of one job: it sends its handshake, checks its peers', seals and opens envelopes."""

import threading
from collections.abc import Collection, Mapping

import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from feddp.errors import SealingError
from feddp.sealing.envelope import Binding, seal, unseal
from feddp.sealing.handshake import LIMIT, Peer, introduce, meet
from feddp.sealing.identity import Identity
from feddp.sealing.note import SharedNotes
from feddp.sealing.peers import LeftOut, good, unnoted

SEALED, HANDSHAKE = "sealed", "introduction"  # names of the tensors on the wire, each of bytes


class _Met(threading.local):
    """Recipients accepted for this thread's task; concurrent tasks must not seal for each other's recipients or epoch."""

    next: tuple[Binding, list[Peer]] | None = None


class Session:
    """A site's sealing state between the tasks of a job.

    It is only in memory: a restarted process has no handshake's key, so earlier envelopes cannot be replayed to it. Nor does it
    open those that were sealed for the handshake of the process before. Its owner calls `drop` when an exchange is over; a new
    handshake replaces the key of the one before.
    """

    def __init__(self, identity: Identity, job: str):
        self.identity, self.job, self.notes = identity, job, SharedNotes(identity, job)
        self.met: dict[str, x509.Certificate] = {}  # the certificate of each peer whose handshake was valid
        self._keys: dict[str, X25519PrivateKey] = {}  # of the last handshake, by exchange
        self._opened: dict[str, int] = {}  # the last epoch, by task
        self._met = _Met()

    def introduce(self, exchange: str) -> dict[str, Tensor]:
        """Returns this site's handshake for an exchange; envelopes for its earlier handshakes can no longer be opened."""
        message, self._keys[exchange] = introduce(self.identity, self.job, exchange)
        return {HANDSHAKE: as_tensor(message)}

    def drop(self, but: str = "") -> None:
        """Drops the keys of all handshakes but those for the exchange `but`: nobody opens envelopes for them any more."""
        self._keys = {exchange: key for exchange, key in self._keys.items() if exchange == but}

    def meet(
        self,
        exchange: str,
        task: str,
        epoch: int,
        handshakes: Mapping[str, Mapping[str, Tensor]],
        recipients: Collection[str] | None,
        left_out: LeftOut = unnoted,
    ) -> list[str]:
        """Checks the handshakes, stores the recipients of the next collection and returns their names.

        Args:
            handshakes: by site, as the server relayed them.
            recipients: the sites that this site's policy names; None: all sites of the project.
            left_out: is told each of these whose handshake is not valid; nothing will be sealed for it.

        Raises:
            SealingError: no handshake of these is valid, or one is not even bytes, which no honest server relays. Nothing will
                be sealed.
        """
        self._met.next = None
        others = [site for site in sorted(handshakes) if site != self.identity.name]
        wanted = [site for site in others if recipients is None or site in recipients]
        relayed = {site: as_bytes(site, HANDSHAKE, handshakes[site], LIMIT) for site in wanted}
        met = good(wanted, lambda site: meet(self.identity, site, relayed[site], self.job, exchange), left_out)
        self._met.next = Binding(self.job, task, epoch), list(met.values())
        self.met |= {site: peer.certificate for site, peer in met.items()}
        return list(met)

    def seal(self, task: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors sealed for the recipients accepted for this task; {} if there are no recipients.

        Raises:
            SealingError: no handshakes were checked for this task.
        """
        binding, peers = self._met.next or (None, [])
        self._met.next = None
        if binding is None or binding.task != task:
            raise SealingError(f"site {self.identity.name}: {task} came without handshakes of peers; nothing was sent")
        return {SEALED: as_tensor(seal(self.identity, binding, peers, tensors))} if peers else {}

    def open(
        self,
        exchange: str,
        task: str,
        epoch: int,
        received: Mapping[str, Mapping[str, Tensor]],
        left_out: LeftOut = unnoted,
    ) -> dict[str, dict[str, Tensor]]:
        """Opens the envelopes of the peers and returns their tensors by peer.

        Args:
            left_out: is told each peer whose envelope is not valid for this site and exchange.

        Raises:
            SealingError: no envelope is valid, one is not even bytes, or one was opened before: no honest server relays these.
                Or this process has no handshake's key.
        """
        relayed = {}
        for peer, tensors in received.items():
            relayed[peer] = as_bytes(peer, SEALED, tensors)
            if epoch <= self._opened.get(task, -1):
                raise SealingError(
                    f"site {self.identity.name}: envelopes for {task} of epoch {epoch} or later were opened before, so that of"
                    f" {peer} is refused"
                )
            if exchange not in self._keys:
                raise SealingError(
                    f"site {self.identity.name}: it received an envelope of {peer} but has not sent a handshake, or the"
                    " exchange of its last one is over"
                )
        binding = Binding(self.job, task, epoch)
        opened = good(
            relayed,
            lambda peer: unseal(self.identity, peer, relayed[peer], binding, self._keys[exchange]),
            left_out,
        )
        if relayed:  # of whatever peers: the server cannot have the site repeat the epoch with others
            self._opened[task] = epoch
        return opened


def as_tensor(content: bytes) -> Tensor:
    """Returns the bytes as a tensor (bytes,) uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def as_bytes(site: str, name: str, tensors: Mapping[str, Tensor], limit: float = float("inf")) -> bytes:
    """Inverts `as_tensor` for the tensor `name`, the only one that a site may send here.

    Raises:
        SealingError: there is another tensor, or `name` is missing, not of bytes, or has more than `limit` bytes.
    """
    value = tensors.get(name)
    if tensors.keys() != {name} or not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        raise SealingError(f"site {site}: it may send only the bytes {name} here, but sent {len(tensors)} other tensors")
    if value.numel() > limit:
        raise SealingError(f"site {site}: it sent {value.numel()} bytes {name}; the limit is {limit}")
    return value.cpu().numpy().tobytes()
