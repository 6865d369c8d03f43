"""Sealed envelopes of tensors: only the named sites can open one, and only the sender can make one.

An envelope is MAGIC, the lengths of header and ciphertext (8 bytes each, big-endian), the header, the ciphertext (starting with
12 bytes of nonce) and the sender's signature over both. The ciphertext is AES-256-GCM of a safetensors file with a new key per
envelope and the header as associated data. The header is plain JSON: the binding (job, task, epoch), the sender and its
certificate and, for each recipient, the fingerprint of its certificate, its handshake's key and the envelope's key wrapped for
that one (`handshake_key`; HPKE's info is `_about`).
"""

import json
import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from safetensors.torch import load, save
from torch import Tensor

from feddp.errors import SealingError
from feddp.reading import short
from feddp.sealing.handshake import VERSION, Peer
from feddp.sealing.handshake_key import unwrap, wrap, written
from feddp.sealing.identity import Identity, fingerprint, signed

MAGIC = b"feddp-%d\n" % VERSION
_LENGTHS = struct.Struct(">QQ")
_NONCE = 12
OVERHEAD = 1024 * 1024  # bytes, more than the header and the tensors' names need


@dataclass(frozen=True)
class Binding:
    """What an envelope is bound to: the job, the task that collects it, and the epoch of a repeated task (else 0)."""

    job: str
    task: str
    epoch: int = 0


def seal(identity: Identity, binding: Binding, recipients: Sequence[Peer], tensors: Mapping[str, Tensor]) -> bytes:
    """Returns an envelope of the tensors, of any dtype, that only the recipients can open."""
    key = secrets.token_bytes(32)
    slots = {
        peer.name: {
            "certificate": fingerprint(peer.certificate),
            "handshake": written(peer.key),
            "key": wrap(peer.key, key, _about(binding, identity.name, peer.name, fingerprint(peer.certificate))).hex(),
        }
        for peer in recipients
    }
    fields = {**asdict(binding), "sender": identity.name, "certificate": identity.pem, "recipients": slots}
    header = json.dumps(fields, sort_keys=True).encode()
    # safetensors refuses tensors that share memory or are not contiguous
    plain = save({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()})
    nonce = secrets.token_bytes(_NONCE)
    ciphertext = nonce + AESGCM(key).encrypt(nonce, plain, header)
    signature = identity.sign(_signed_part(header, ciphertext))
    return MAGIC + _LENGTHS.pack(len(header), len(ciphertext)) + header + ciphertext + signature


def unseal(
    identity: Identity, sender: str, envelope: bytes, binding: Binding, handshake: X25519PrivateKey
) -> dict[str, Tensor]:
    """Returns the tensors that `sender` sealed for this site's handshake with this binding.

    Raises:
        SealingError: sender, recipient, binding, handshake, signature or ciphertext is wrong.
    """

    def refuse(why: str) -> SealingError:
        return SealingError(f"site {identity.name}: the envelope of {sender} {why}; nothing of it was used")

    fields, header, ciphertext, signature = _parts(sender, envelope)
    certificate = identity.accept(sender, str(fields.get("certificate")))
    if not signed(certificate, signature, _signed_part(header, ciphertext)):
        raise refuse("was changed after it was signed")
    if fields.get("sender") != sender:
        raise refuse("belongs to another site")
    for name, value in asdict(binding).items():
        if fields.get(name) != value:
            raise refuse(f"is of {name} {short(repr(fields.get(name)))}, not {value!r}")
    slot = fields["recipients"].get(identity.name)
    if slot is None:
        raise refuse("is not for this site")
    if slot["certificate"] != (own := fingerprint(identity.certificate)):
        raise refuse("is for another certificate of this site")
    if slot["handshake"] != written(handshake.public_key()):
        raise refuse("is for another handshake of this site: it is of an earlier exchange")
    try:
        key = unwrap(handshake, bytes.fromhex(slot["key"]), _about(binding, sender, identity.name, own))
        tensors = load(AESGCM(key).decrypt(ciphertext[:_NONCE], ciphertext[_NONCE:], header))
    except Exception as error:  # of any type: what a site may write as a tensor's type or shape, torch refuses in many ways
        raise refuse(f"cannot be opened ({type(error).__name__})") from error
    if not tensors:
        raise refuse("holds no tensors")
    return tensors


def recipients_of(sender: str, envelope: bytes) -> list[str]:
    """Returns the recipients in an envelope's header, for the relay. They are not verified.

    Raises:
        SealingError: the envelope is malformed, or names another sender.
    """
    fields = _parts(sender, envelope)[0]
    if fields.get("sender") != sender:
        raise SealingError(f"site {sender}: its envelope names another sender; it was refused")
    return sorted(fields["recipients"])


def _parts(sender: str, envelope: bytes) -> tuple[dict[str, Any], bytes, bytes, bytes]:
    """Returns the header's fields, the header's bytes, the ciphertext and the signature."""
    start = len(MAGIC) + _LENGTHS.size
    try:
        sizes = _LENGTHS.unpack(envelope[len(MAGIC) : start])
        header, ciphertext = envelope[start : start + sizes[0]], envelope[start + sizes[0] : start + sum(sizes)]
        whole = envelope.startswith(MAGIC) and (len(header), len(ciphertext)) == sizes and len(header) <= OVERHEAD
        fields = json.loads(header if whole else b"")  # parsed JSON takes many times its bytes
        slots = fields["recipients"].values()
        whole &= all(isinstance(slot[part], str) for slot in slots for part in ("certificate", "handshake", "key"))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole and re.match(rb"feddp-\d+\n", envelope) and not envelope.startswith(MAGIC):
        raise SealingError(f"site {sender}: it sealed with another version of feddp; install the same feddp at all sites")
    if not whole:
        raise SealingError(f"site {sender}: it did not send a sealed envelope; it was refused")
    return fields, header, ciphertext, envelope[start + sum(sizes) :]


def _about(binding: Binding, sender: str, recipient: str, certificate: str) -> bytes:
    """Returns what opens a wrapped key beside the handshake's key: a key copied to another envelope opens nothing."""
    fields = {**asdict(binding), "sender": sender, "recipient": recipient, "certificate": certificate}
    return MAGIC + json.dumps(fields, sort_keys=True).encode()


def _signed_part(header: bytes, ciphertext: bytes) -> bytes:
    return MAGIC + sha256(header).digest() + sha256(ciphertext).digest()
