"""Tensors in an envelope that the named sites can open and nobody else can read, change or make.

An envelope is MAGIC, the lengths of its header and of its ciphertext (8 bytes each, big-endian), the header, the ciphertext
(12 bytes of nonce first) and the sender's signature over both. The ciphertext is AES-256-GCM of a safetensors file under a key
of its own, with the header as associated data. The header is JSON that anyone can read: the facts, the sender and its
certificate, and for each recipient the fingerprint of its certificate, its challenge, and the key wrapped for it.
"""

import json
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from feddp.errors import SealingError
from feddp.sealing.handshake import Peer
from feddp.sealing.identity import Identity, fingerprint, signed, wrap

MAGIC = b"feddp-1\n"
_LENGTHS = struct.Struct(">QQ")
_NONCE = 12
OVERHEAD = 1024 * 1024  # bytes: more than the header and the tensors' names take


@dataclass(frozen=True)
class Facts:
    """What an envelope is for: the job, the task that collects it, and the epoch where that comes again (0 elsewhere)."""

    job: str
    task: str
    epoch: int = 0


def seal(identity: Identity, facts: Facts, recipients: Sequence[Peer], tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors, of any dtype, for the recipients alone."""
    key = secrets.token_bytes(32)
    slots = {
        peer.name: {
            "certificate": fingerprint(peer.certificate),
            "challenge": peer.challenge,
            "key": wrap(peer.certificate, key).hex(),
        }
        for peer in recipients
    }
    said = {**asdict(facts), "sender": identity.name, "certificate": identity.pem, "recipients": slots}
    header = json.dumps(said, sort_keys=True).encode()
    # safetensors refuses tensors that share memory or are strided
    plain = save({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()})
    nonce = secrets.token_bytes(_NONCE)
    ciphertext = nonce + AESGCM(key).encrypt(nonce, plain, header)
    signature = identity.sign(_signed_part(header, ciphertext))
    return MAGIC + _LENGTHS.pack(len(header), len(ciphertext)) + header + ciphertext + signature


def unseal(identity: Identity, sender: str, envelope: bytes, facts: Facts, challenge: str) -> dict[str, Tensor]:
    """The tensors that `sender` sealed for this site, after `challenge`, for exactly these facts.

    Raises:
        SealingError: any of that is not so.
    """

    def refuse(why: str) -> SealingError:
        return SealingError(f"site {identity.name}: the envelope of {sender} {why}; nothing of it was used")

    said, header, ciphertext, signature = _parts(sender, envelope)
    certificate = identity.accept(sender, str(said.get("certificate")))
    if not signed(certificate, signature, _signed_part(header, ciphertext)):
        raise refuse("is not as it was signed")
    if said.get("sender") != sender:
        raise refuse("is another site's")
    for name, value in asdict(facts).items():
        if said.get(name) != value:
            raise refuse(f"is of {name} {said.get(name)!r}, not {value!r}")
    slot = said["recipients"].get(identity.name)
    if slot is None:
        raise refuse("is not for this site")
    if slot["certificate"] != fingerprint(identity.certificate):
        raise refuse("is for another certificate than this site's")
    if slot["challenge"] != challenge:
        raise refuse("answers another challenge: it is of an earlier exchange")
    try:
        key = identity.unwrap(bytes.fromhex(slot["key"]))
        return load(AESGCM(key).decrypt(ciphertext[:_NONCE], ciphertext[_NONCE:], header))
    except (ValueError, InvalidTag, SafetensorError) as error:
        raise refuse(f"cannot be opened ({type(error).__name__})") from error


def recipients_of(sender: str, envelope: bytes) -> list[str]:
    """For whom an envelope says that it is: all that a relay needs to know. Nothing of it is verified.

    Raises:
        SealingError: it is no envelope of `sender`.
    """
    said = _parts(sender, envelope)[0]
    if said.get("sender") != sender:
        raise SealingError(f"site {sender}: its envelope says that it is another site's")
    return sorted(said["recipients"])


def _parts(sender: str, envelope: bytes) -> tuple[dict[str, Any], bytes, bytes, bytes]:
    """The header as it reads, and as bytes; ciphertext and signature."""
    start = len(MAGIC) + _LENGTHS.size
    try:
        sizes = _LENGTHS.unpack(envelope[len(MAGIC) : start])
        header, ciphertext = envelope[start : start + sizes[0]], envelope[start + sizes[0] : start + sum(sizes)]
        whole = envelope.startswith(MAGIC) and (len(header), len(ciphertext)) == sizes and len(header) <= OVERHEAD
        said = json.loads(header if whole else b"")  # what is read of JSON takes many times its bytes
        slots = said["recipients"].values()
        whole &= all(isinstance(slot[part], str) for slot in slots for part in ("certificate", "challenge", "key"))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise SealingError(f"site {sender}: what it sent is no sealed envelope")
    return said, header, ciphertext, envelope[start + sum(sizes) :]


def _signed_part(header: bytes, ciphertext: bytes) -> bytes:
    return MAGIC + sha256(header).digest() + sha256(ciphertext).digest()
