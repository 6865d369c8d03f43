"""Who steals a site's key, after an exchange or during it, opens nothing of what was recorded; and what makes that so.

Which task drops a handshake's key: test_sealed_stage.py.
"""

import json

import pytest
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from safetensors.torch import load

from feddp.errors import FedDPError
from feddp.sealing.envelope import _LENGTHS, MAGIC, Binding, _about, recipients_of
from feddp.sealing.handshake import introduce, meet
from feddp.sealing.handshake_key import read, unwrap, wrap, written
from feddp.sealing.identity import Identity
from feddp.sealing.session import HANDSHAKE, SEALED, Session, as_bytes, as_tensor
from support.certificates import Office

JOB, WORD, TASK = "job-1", "calibration", "collect"
OWN = {"own": torch.arange(3.0)}
OAEP = padding.OAEP(padding.MGF1(SHA256()), SHA256(), label=None)
P = 2**255 - 19
# all points whose order divides 8 (RFC 7748, section 7): 0, 1, the two of order 8, and -1; then 0 and 1 again, not reduced
_OF_ORDER_8 = 325606250916557431795983626356110631294008115727848805560023387167927233504
_OF_ORDER_8_TOO = 39382357235489614581723060781553021112529911719440698176882885853963445705823
LOW_ORDER = (0, 1, _OF_ORDER_8, _OF_ORDER_8_TOO, P - 1, P, P + 1)


@pytest.fixture(scope="module")
def sites():
    """The identities of A, B and C."""
    return Office().identities("ABC")


@pytest.fixture
def sessions(sites):
    """One job's sessions of A, B and C, and their handshakes."""
    made = {name: Session(identity, JOB) for name, identity in sites.items()}
    return made, {name: session.introduce(WORD) for name, session in made.items()}


def given(made, handshakes, by="B", epoch=0, task=TASK):
    """What `by` gives its peers."""
    made[by].meet(WORD, task, epoch, handshakes, None)
    return made[by].seal(task, OWN)


def parts(envelope):
    """Header, its bytes and ciphertext."""
    start, sizes = len(MAGIC) + _LENGTHS.size, _LENGTHS.unpack_from(envelope, len(MAGIC))
    header = envelope[start : start + sizes[0]]
    return json.loads(header), header, envelope[start + sizes[0] : start + sum(sizes)]


# --- a stolen key ----------------------------------------------------------------------------------------------------------


def opened_with_the_kits_key(thief: Identity, envelope: bytes):
    """The attack: what was sealed for a site, with nothing but the record of it and the site's kit."""
    fields, header, ciphertext = parts(envelope)
    key = thief.key.decrypt(bytes.fromhex(fields["recipients"][thief.name]["key"]), OAEP)
    return load(AESGCM(key).decrypt(ciphertext[:12], ciphertext[12:], header))


def test_who_records_an_envelope_and_steals_the_key_of_a_kit_opens_nothing(sites, sessions):
    """The control: keys wrapped as in version 1, by RSA-OAEP for the certificate, are opened by the same attack."""
    made, handshakes = sessions
    envelope = as_bytes("B", SEALED, given(made, handshakes))
    for name in "ABC":
        with pytest.raises((ValueError, KeyError)):
            opened_with_the_kits_key(sites[name], envelope)
    with pytest.MonkeyPatch.context() as patch:
        public = sites["A"].certificate.public_key()
        patch.setattr("feddp.sealing.envelope.wrap", lambda peer, key, about: public.encrypt(key, OAEP))
        old = as_bytes("B", SEALED, given(made, handshakes))
    assert opened_with_the_kits_key(sites["A"], old)["own"].equal(OWN["own"])


def test_a_thief_with_the_kit_starts_the_site_again_and_opens_nothing_recorded(sites, sessions):
    """The whole kit, the job's id and all that passed the server, in a process of its own, which may send handshakes."""
    made, handshakes = sessions
    recorded = given(made, handshakes)
    thief = Session(sites["A"], JOB)
    with pytest.raises(FedDPError, match="has not sent a handshake, or the exchange of its last one is over"):
        thief.open(WORD, TASK, 0, {"B": recorded})
    thief.introduce(WORD)
    with pytest.raises(FedDPError, match="is for another handshake of this site"):
        thief.open(WORD, TASK, 0, {"B": recorded})
    # and if it passes its own handshake off as the site's, what was sealed for the site's cannot be opened either
    fields = parts(as_bytes("B", SEALED, recorded))[0]
    slot, own = fields["recipients"]["A"], thief._keys[WORD]
    with pytest.raises(InvalidTag):
        unwrap(own, bytes.fromhex(slot["key"]), b"")
    assert [*made["A"].open(WORD, TASK, 0, {"B": recorded})] == ["B"], "the control: the process that sent the handshake"


def test_a_session_that_has_dropped_its_key_opens_nothing(sessions):
    made, handshakes = sessions
    recorded = given(made, handshakes)
    made["A"].drop(but="spectra")
    with pytest.raises(FedDPError, match="the exchange of its last one is over"):
        made["A"].open(WORD, TASK, 0, {"B": recorded})
    made["C"].drop(but=WORD)
    assert [*made["C"].open(WORD, TASK, 0, {"B": recorded})] == ["B"], "the control"


def test_a_new_handshake_replaces_the_key_of_the_one_before(sessions):
    made, handshakes = sessions
    before = given(made, handshakes)
    again = handshakes | {"A": made["A"].introduce(WORD)}
    with pytest.raises(FedDPError, match="is for another handshake of this site"):
        made["A"].open(WORD, TASK, 0, {"B": before})
    assert [*made["A"].open(WORD, TASK, 0, {"B": given(made, again)})] == ["B"]


def test_no_two_handshakes_have_the_same_key(sites):
    keys = {json.loads(introduce(sites["A"], JOB, WORD)[0])["statement"]["key"] for _ in range(8)}
    assert len(keys) == 8


def test_one_handshake_serves_many_epochs(sessions):
    """FedLC's heads: 40 envelopes for one handshake, none with the wrapped key of another."""
    made, handshakes = sessions
    wrapped = set()
    for epoch in range(1, 41):
        envelope = given(made, handshakes, epoch=epoch, task="collect_heads")
        opened = made["A"].open(WORD, "collect_heads", epoch, {"B": envelope})
        assert opened["B"]["own"].equal(OWN["own"])
        wrapped.add(parts(as_bytes("B", SEALED, envelope))[0]["recipients"]["A"]["key"])
    assert len(wrapped) == 40


# --- a key of no use -------------------------------------------------------------------------------------------------------


def with_key(identity, key):
    """A handshake that the site has signed, with whatever as its key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("feddp.sealing.handshake.written", lambda public: key)
        return {HANDSHAKE: as_tensor(introduce(identity, JOB, WORD)[0])}


@pytest.mark.parametrize(
    "key",
    [
        *(point.to_bytes(32, "little").hex() for point in LOW_ORDER),
        "",
        "00" * 31,
        "11" * 33,
        "11" * 31 + "zz",
        "AB" * 32,
        " " + "11" * 31 + "1",
        "١" * 64,  # digits of another script
        None,
        7,
        ["11" * 32],
    ],
)
def test_a_member_whose_key_is_none_is_left_out_alone(sites, sessions, key):
    """It has signed it, so nobody else did this. HPKE would raise for a point of low order, and nobody would get anything."""
    made, handshakes = sessions
    told = {}
    shown = handshakes | {"B": with_key(sites["B"], key)}
    assert made["A"].meet(WORD, TASK, 0, shown, None, told.__setitem__) == ["C"]
    assert "the key in the handshake of site B is of no use" in str(told["B"])
    assert recipients_of("A", as_bytes("A", SEALED, made["A"].seal(TASK, OWN))) == ["C"]
    good = with_key(sites["B"], written(X25519PrivateKey.generate().public_key()))
    assert made["A"].meet(WORD, TASK, 0, handshakes | {"B": good}, None) == ["B", "C"], "the control"


def test_without_that_check_a_point_of_low_order_would_cost_everybody_the_exchange():
    with pytest.raises(ValueError, match="shared key"):
        wrap(X25519PublicKey.from_public_bytes(bytes(32)), bytes(32), b"")


@pytest.mark.parametrize("changed", range(6))
def test_a_wrapped_key_opens_only_in_its_own_envelope(changed):
    """Job, task, epoch, sender, recipient and certificate are in what opens it, beside both public keys, which HPKE adds."""
    private, key = X25519PrivateKey.generate(), bytes(range(32))
    own = [JOB, TASK, 0, "B", "A", "f"]
    other = [value if at != changed else 1 if value == 0 else f"{value}x" for at, value in enumerate(own)]
    one, another = (_about(Binding(*fields[:3]), *fields[3:]) for fields in (own, other))
    wrapped = wrap(private.public_key(), key, one)
    assert unwrap(private, wrapped, one) == key, "the control"
    with pytest.raises(InvalidTag):
        unwrap(private, wrapped, another)
    with pytest.raises(InvalidTag):
        unwrap(X25519PrivateKey.generate(), wrapped, one)
    assert read(written(private.public_key())) == private.public_key()


# --- an earlier version ----------------------------------------------------------------------------------------------------


def test_a_peer_of_the_version_before_is_refused_in_plain_words(sites, sessions):
    """Its handshake held a challenge and no key; its envelopes began with feddp-1."""
    made, handshakes = sessions
    statement = {"site": "B", "job": JOB, "exchange": WORD, "challenge": "0" * 64}
    signature = sites["B"].sign(b"feddp introduction 1\n" + json.dumps(statement, sort_keys=True).encode()).hex()
    old = json.dumps({"statement": statement, "certificate": sites["B"].pem, "signature": signature}).encode()
    words = "handshake of site B is of another version of feddp, so nothing is sealed for it; install the same feddp at A and B"
    with pytest.raises(FedDPError, match=words):
        meet(sites["A"], "B", old, JOB, WORD)
    envelope = as_bytes("B", SEALED, given(made, handshakes))
    for magic in (b"feddp-1\n", b"feddp-3\n"):
        relayed = magic + envelope[len(MAGIC) :]
        words = "site B: it sealed with another version of feddp; install the same feddp at all sites"
        with pytest.raises(FedDPError, match=words):
            recipients_of("B", relayed)
        with pytest.raises(FedDPError, match=words):
            made["A"].open(WORD, TASK, 0, {"B": {SEALED: as_tensor(relayed)}})
