"""The sealed exchange, without FLARE's processes: what an envelope withstands, and whom a site believes.

The certificates are made by FLARE's own functions. Sites and a server: test_sealed_stage.py; a federation: test_deployment.py.
"""

import json
import re
import threading
from dataclasses import replace

import pytest
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.serialization import Encoding
from safetensors.torch import load

from feddp.errors import FedDPError
from feddp.sealing.envelope import _LENGTHS, MAGIC, OVERHEAD, Binding, recipients_of, seal, unseal
from feddp.sealing.handshake import LIMIT, introduce, meet
from feddp.sealing.handshake_key import written
from feddp.sealing.identity import Identity
from feddp.sealing.session import HANDSHAKE, SEALED, Session, as_bytes, as_tensor
from support.certificates import PROJECT, SERVER, Office, signed

JOB, WORD, TASK = "job-1", "calibration", "collect"
BINDING = Binding(JOB, TASK)
SHORT = rsa.generate_private_key(public_exponent=65537, key_size=1024)
TENSORS = {
    "half": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "single": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),  # strided
    "count": torch.tensor(7),
    "double": torch.tensor([[1e300]], dtype=torch.float64),
    "flags": torch.tensor([True, False]),
    "none": torch.zeros(0, 3),
}


@pytest.fixture(scope="module")
def office():
    return Office()


@pytest.fixture(scope="module")
def stranger():
    """Another project's root, of the same name."""
    return Office()


@pytest.fixture(scope="module")
def sites(office):
    """The identities of A, B and C."""
    return office.identities("ABC")


@pytest.fixture
def sessions(sites):
    """One job's sessions of A, B and C, and their handshakes."""
    made = {name: Session(identity, JOB) for name, identity in sites.items()}
    return made, {name: session.introduce(WORD) for name, session in made.items()}


def pem(certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def peer(sites, name, of="A", job=JOB):
    """A peer as `of` has met it, and the key of its handshake."""
    handshake, key = introduce(sites[name], job, WORD)
    return meet(sites[of], name, handshake, job, WORD), key


def same(one, other):
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and one[n].contiguous().view(-1).view(torch.uint8).equal(other[n].contiguous().view(-1).view(torch.uint8))
        for n in one
    )


# --- an envelope ---------------------------------------------------------------------------------------------------------


def test_every_recipient_opens_the_same_bits_and_nobody_else_does(sites, office):
    """Several dtypes, a NaN and a negative zero among them. C, the server, and A itself once it is sent are not named."""
    (b, key_b), (c, key_c) = peer(sites, "B"), peer(sites, "C")
    both = seal(sites["A"], BINDING, [b, c], TENSORS)
    assert same(unseal(sites["B"], "A", both, BINDING, key_b), TENSORS)
    assert same(unseal(sites["C"], "A", both, BINDING, key_c), TENSORS)
    assert recipients_of("A", both) == ["B", "C"]
    one = seal(sites["A"], BINDING, [b], TENSORS)
    server = Identity("B", *office.issue(SERVER, host=SERVER), office.root, SERVER)
    for identity, key in ((sites["C"], key_c), (sites["A"], key_b), (server, key_b)):
        with pytest.raises(FedDPError, match="is not for this site|is for another certificate"):
            unseal(identity, "A", one, BINDING, key)
    with pytest.raises(InvalidTag):
        opened_slot(one, key_c)
    assert len(opened_slot(one, key_b)) == 32, "the control"


def opened_slot(envelope, key, recipient="B"):
    """The envelope's key, out of B's slot, as HPKE of RFC 9180 gives it to who has this handshake's key."""
    slot = header_of(envelope)["recipients"][recipient]
    fields = {name: header_of(envelope)[name] for name in ("job", "task", "epoch", "sender")}
    about = json.dumps(fields | {"recipient": recipient, "certificate": slot["certificate"]}, sort_keys=True)
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    return suite.decrypt(bytes.fromhex(slot["key"]), key, info=MAGIC + about.encode())


def test_no_value_is_in_the_envelope_and_no_two_are_alike(sites):
    values = {"weight": torch.rand(64, generator=torch.Generator().manual_seed(1))}
    b, _ = peer(sites, "B")
    one, other = (seal(sites["A"], BINDING, [b], values) for _ in range(2))
    raw = values["weight"].numpy().tobytes()
    assert not any(raw[i : i + 8] in one for i in range(0, len(raw), 4))
    assert b"weight" not in one
    assert not any(one[i : i + 8] in other for i in range(ciphertext_of(one), len(one) - 8, 8))


def header_of(envelope):
    start = len(MAGIC) + 16
    return json.loads(envelope[start : start + int.from_bytes(envelope[len(MAGIC) : len(MAGIC) + 8], "big")])


def ciphertext_of(envelope):
    """Where it begins."""
    return len(MAGIC) + 16 + int.from_bytes(envelope[len(MAGIC) : len(MAGIC) + 8], "big")


PLACES = {
    "magic": lambda e: 2,
    "length of the header": lambda e: len(MAGIC) + 7,
    "length of the ciphertext": lambda e: len(MAGIC) + 15,
    "job": lambda e: e.index(JOB.encode()) + 2,
    "recipient's name": lambda e: e.index(b'"B": {') + 1,
    "handshake": lambda e: e.index(b'"handshake": "') + 20,
    "fingerprint": lambda e: e.index(b'"certificate": "', e.index(b'"recipients"')) + 20,
    "wrapped key": lambda e: e.index(b'"key": "') + 20,
    "sender's certificate": lambda e: e.index(b"BEGIN CERTIFICATE") + 300,
    "nonce": ciphertext_of,
    "ciphertext": lambda e: ciphertext_of(e) + 40,
    "tag": lambda e: len(e) - 257,
    "signature": lambda e: len(e) - 100,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_anywhere_is_found(sites, place):
    b, key = peer(sites, "B")
    envelope = bytearray(seal(sites["A"], BINDING, [b], TENSORS))
    assert same(unseal(sites["B"], "A", bytes(envelope), BINDING, key), TENSORS), "the control"
    envelope[PLACES[place](bytes(envelope))] ^= 1
    with pytest.raises(
        FedDPError, match="was changed after it was signed|did not send a sealed envelope|the certificate for site A"
    ):
        unseal(sites["B"], "A", bytes(envelope), BINDING, key)


@pytest.mark.parametrize("cut", [slice(0, 0), slice(0, 10), slice(0, 400), slice(0, -1), slice(0, -256)])
def test_a_part_of_an_envelope_is_none(sites, cut):
    b, key = peer(sites, "B")
    envelope = seal(sites["A"], BINDING, [b], TENSORS)
    for broken in (envelope[cut], envelope + b"more"):
        with pytest.raises(FedDPError, match="was changed after it was signed|did not send a sealed envelope"):
            unseal(sites["B"], "A", broken, BINDING, key)


def reheaded(envelope, change):
    """The envelope with another header, and the old signature: what a relay could do."""
    said = header_of(envelope)
    change(said)
    header = json.dumps(said, sort_keys=True).encode()
    rest = envelope[ciphertext_of(envelope) :]
    return MAGIC + len(header).to_bytes(8, "big") + envelope[len(MAGIC) + 8 : len(MAGIC) + 16] + header + rest


def test_a_relay_cannot_add_a_recipient_or_change_what_it_says(sites):
    (b, key_b), (c, _) = peer(sites, "B"), peer(sites, "C")
    envelope = seal(sites["A"], BINDING, [b], TENSORS)
    again = reheaded(envelope, lambda said: None)
    assert same(unseal(sites["B"], "A", again, BINDING, key_b), TENSORS), "the control: the header alone was rewritten"
    added = {"certificate": "0" * 64, "handshake": written(c.key), "key": "00"}
    for change in (
        lambda said: said["recipients"].update(C=added),
        lambda said: said.update(epoch=1),
        lambda said: said.update(certificate=pem(sites["C"].certificate)),
        lambda said: said["recipients"]["B"].update(handshake=written(c.key)),
    ):
        with pytest.raises(FedDPError, match="was changed after it was signed|the certificate for site A belongs to C"):
            unseal(sites["B"], "A", reheaded(envelope, change), BINDING, key_b)


@pytest.mark.parametrize(
    "content", [b"[]", b'{"recipients": 3}', b'{"recipients": {"B": 3}}', b'{"recipients": {"B": {}}}', b"\xff"]
)
def test_what_no_site_of_ours_sealed_is_refused_in_one_line(sites, content):
    """As the relay reads it, and as the recipient does."""
    envelope = MAGIC + len(content).to_bytes(8, "big") + (0).to_bytes(8, "big") + content
    with pytest.raises(FedDPError, match="site A: it did not send a sealed envelope"):
        recipients_of("A", envelope)
    with pytest.raises(FedDPError, match="site A: it did not send a sealed envelope"):
        unseal(sites["B"], "A", envelope, BINDING, X25519PrivateKey.generate())


def test_an_envelope_under_anothers_name_is_refused(sites):
    b, key = peer(sites, "B")
    envelope = seal(sites["A"], BINDING, [b], TENSORS)
    with pytest.raises(FedDPError, match="the certificate for site C belongs to A"):
        unseal(sites["B"], "C", envelope, BINDING, key)
    with pytest.raises(FedDPError, match="names another sender"):
        recipients_of("C", envelope)


def test_an_envelope_that_names_another_sender_than_its_signer_is_refused(sites):
    """A signs it with its own certificate, and writes that it is C's."""
    b, key = peer(sites, "B")
    envelope = seal(replace(sites["A"], name="C"), BINDING, [b], TENSORS)
    with pytest.raises(FedDPError, match="the envelope of A belongs to another site"):
        unseal(sites["B"], "A", envelope, BINDING, key)


def test_an_envelope_is_made_as_its_format_says(sites):
    """As another implementation would open it: HPKE, AES-256-GCM, 12 bytes of nonce, the header as associated data."""
    b, key = peer(sites, "B")
    envelope = seal(sites["A"], BINDING, [b], TENSORS)
    length = int.from_bytes(envelope[len(MAGIC) + 8 : len(MAGIC) + 16], "big")
    start = ciphertext_of(envelope)
    header, ciphertext = envelope[len(MAGIC) + 16 : start], envelope[start : start + length]
    opened = AESGCM(opened_slot(envelope, key))
    assert same(load(opened.decrypt(ciphertext[:12], ciphertext[12:], header)), TENSORS)
    with pytest.raises(InvalidTag):
        opened.decrypt(ciphertext[:12], ciphertext[12:], None)


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        (replace(BINDING, job="job-2"), "is of job 'job-1', not 'job-2'"),
        (replace(BINDING, task="collect_heads"), "is of task 'collect', not 'collect_heads'"),
        (replace(BINDING, epoch=1), "is of epoch 0, not 1"),
    ],
)
def test_an_envelope_of_something_else_is_refused(sites, binding, words):
    b, key = peer(sites, "B")
    envelope = seal(sites["A"], BINDING, [b], TENSORS)
    with pytest.raises(FedDPError, match=words):
        unseal(sites["B"], "A", envelope, binding, key)


# --- whom a site believes ------------------------------------------------------------------------------------------------


def shown(office, stranger, sites, kind):
    """What a server could show for B, as a certificate."""
    made = {
        "another root, the same names": lambda: stranger.issue("B"),
        "another root, of another name": lambda: (signed("B", "another", sites["C"].key, stranger.key), sites["C"].key),
        "the same root, another site": lambda: (sites["C"].certificate, None),
        "the server's": lambda: office.issue(SERVER, host=SERVER),
        "the server's, as nvflare cert approve makes it": lambda: office.issue("B", role="server", host="B"),
        "a person's": lambda: office.issue("B", role="lead"),
        "a person's own": lambda: office.issue("admin@b.org", role="org_admin"),
        "expired": lambda: office.issue("B", since=-20, until=-1),
        "not yet valid": lambda: office.issue("B", since=1),
        "the root's certificate": lambda: (office.root, office.key),
        "a short key": lambda: (signed("B", PROJECT, SHORT, office.key), SHORT),
    }
    return made[kind]()


def refused(session, handshakes, name, words):
    """The site `name` is refused, with these words: left out where another one is good, who alone can open what is sealed;
    and where it is the only one, nothing is sealed at all."""
    told = {}
    others = [site for site in "ABC" if site not in (session.identity.name, name)]
    assert session.meet(WORD, TASK, 0, handshakes, None, told.__setitem__) == others
    assert [*told] == [name]
    assert re.search(words, str(told[name]))
    assert recipients_of(session.identity.name, as_bytes(session.identity.name, SEALED, session.seal(TASK, TENSORS))) == others
    with pytest.raises(FedDPError, match=words):
        session.meet(WORD, TASK, 0, {name: handshakes[name]}, None)
    with pytest.raises(FedDPError, match="collect came without handshakes of peers; nothing was sent"):
        session.seal(TASK, TENSORS)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("another root, the same names", "was not issued by this project's root"),
        ("another root, of another name", "was not issued by this project's root"),
        ("the same root, another site", "belongs to C"),
        ("the server's", f"belongs to {SERVER}"),
        ("the server's, as nvflare cert approve makes it", "is not a site's certificate: its role is server"),
        ("a person's", "is not a site's certificate: its role is lead"),
        ("a person's own", "belongs to admin@b.org"),
        ("expired", "expired on"),
        ("not yet valid", "is not valid before"),
        ("the root's certificate", f"belongs to {PROJECT}"),
        ("a short key", "has an RSA key of 1024 bits; at least 2048 are needed"),
    ],
)
def test_a_swapped_certificate_is_refused_as_recipient_and_as_sender(office, stranger, sites, sessions, kind, words):
    """The server has the key of whatever it shows, so handshake and envelope are signed as they should be."""
    certificate, key = shown(office, stranger, sites, kind)
    false = replace(sites["B"], certificate=certificate, key=key or sites["C"].key)
    made, handshakes = sessions
    swapped = handshakes | {"B": Session(false, JOB).introduce(WORD)}
    refused(made["A"], swapped, "B", f"the certificate for site B {words}")
    a = meet(sites["B"], "A", as_bytes("A", HANDSHAKE, handshakes["A"]), JOB, WORD)
    envelope = {SEALED: as_tensor(seal(false, BINDING, [a], TENSORS))}
    with pytest.raises(FedDPError, match=f"the certificate for site B {words}"):
        made["A"].open(WORD, TASK, 0, {"B": envelope})


def test_the_server_is_no_site_under_its_own_name_either(office, sites, sessions):
    """In central provisioning the server's certificate says no role: the kit says its name."""
    made, handshakes = sessions
    server = Identity(SERVER, *office.issue(SERVER, host=SERVER), office.root, SERVER)
    shown = handshakes | {SERVER: Session(server, JOB).introduce(WORD)}
    refused(made["A"], shown, SERVER, f"the certificate for site {SERVER} is the server's")
    # and the root is none under the project's
    root = Identity(PROJECT, office.root, office.key, office.root, SERVER)
    refused(made["A"], handshakes | {PROJECT: Session(root, JOB).introduce(WORD)}, PROJECT, "is the root's certificate")


def test_passes_a_second_certificate_of_a_sites_own_name(office, sites, sessions):
    """The office names who is who: what it and the server make between them, no other site can tell. For the threat model."""
    made, handshakes = sessions
    double = Session(Identity("B", *office.issue("B"), office.root, SERVER), JOB)
    assert made["A"].meet(WORD, TASK, 0, handshakes | {"B": double.introduce(WORD)}, ("B",)) == ["B"]
    double.meet(WORD, TASK, 0, handshakes, None)
    assert same(double.open(WORD, TASK, 0, {"A": made["A"].seal(TASK, TENSORS)})["A"], TENSORS)


def test_a_certificate_of_nvflare_cert_approve_is_a_sites(office, sites, sessions):
    """It has the role client in it."""
    made, handshakes = sessions
    approved = Identity("D", *office.issue("D", role="client"), office.root, SERVER)
    met = made["A"].meet(WORD, TASK, 0, handshakes | {"D": Session(approved, JOB).introduce(WORD)}, None)
    assert met == ["B", "C", "D"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said, sites: said["statement"].update(key="0" * 64), "did not sign"),
        (lambda said, sites: said["statement"].update(site="C"), "did not sign"),
        (lambda said, sites: said["statement"].update(more=1), "did not sign"),
        (lambda said, sites: said.update(signature="00" * 256), "did not sign"),
        (lambda said, sites: said.update(certificate=pem(sites["C"].certificate)), "belongs to C"),
        (lambda said, sites: said.update(certificate="none"), "cannot be read"),
        (lambda said, sites: said.pop("signature"), "relayed no valid handshake of site B"),
        (lambda said, sites: said.update(statement=[]), "relayed no valid handshake of site B"),
    ],
)
def test_a_handshake_that_its_site_did_not_sign_is_refused(sites, sessions, change, words):
    """A server cannot have a site take part that did not say it does, nor give it a key of the server's own."""
    made, handshakes = sessions
    said = json.loads(as_bytes("B", HANDSHAKE, handshakes["B"]))
    change(said, sites)
    changed = handshakes | {"B": {HANDSHAKE: as_tensor(json.dumps(said).encode())}}
    refused(made["A"], changed, "B", words)
    assert made["A"].meet(WORD, TASK, 0, handshakes, None) == ["B", "C"], "the control"


@pytest.mark.parametrize(("job", "word"), [("job-0", WORD), (JOB, "spectra")])
def test_a_handshake_to_something_else_is_none_to_this(sites, sessions, job, word):
    """Consent is given for a job and for an exchange of it."""
    made, handshakes = sessions
    shown = handshakes | {"B": Session(sites["B"], job).introduce(word)}
    refused(made["A"], shown, "B", "site B did not sign the handshake that the server relayed")


# --- a job -----------------------------------------------------------------------------------------------------------------


def exchanged(made, handshakes, task=TASK, epoch=0, recipients=None):
    """What each gives when the server relays all handshakes."""
    for session in made.values():
        session.meet(WORD, task, epoch, handshakes, recipients)
    return {name: session.seal(task, {"own": torch.full((2,), float(ord(name)))}) for name, session in made.items()}


def test_all_open_what_all_sealed_and_nobody_meets_itself(sessions):
    made, handshakes = sessions
    given = exchanged(made, handshakes)
    for name, session in made.items():
        opened = session.open(WORD, TASK, 0, {other: given[other] for other in given if other != name})
        assert {other: tensors["own"].tolist() for other, tensors in opened.items()} == {
            other: [float(ord(other))] * 2 for other in "ABC" if other != name
        }


def test_an_envelope_opens_once_and_epochs_only_rise(sessions):
    made, handshakes = sessions
    given = {e: exchanged(made, handshakes, "collect_heads", e)["B"] for e in (1, 2, 3)}

    def opens(e, envelope):
        return made["A"].open(WORD, "collect_heads", e, {"B": given[envelope]})

    assert opens(1, 1)["B"]["own"].tolist() == [66.0, 66.0]
    with pytest.raises(FedDPError, match="for collect_heads of epoch 1 or later were opened before, so that of B is refused"):
        opens(1, 1)
    with pytest.raises(FedDPError, match="the envelope of B is of epoch 1, not 2"):
        opens(2, 1)  # replayed as the next
    with pytest.raises(FedDPError, match="the envelope of B is of epoch 3, not 2"):
        opens(2, 3)  # out of order
    assert opens(3, 3)["B"]["own"].tolist() == [66.0, 66.0]
    with pytest.raises(FedDPError, match="of epoch 2 or later were opened before"):
        opens(2, 2)  # late


def test_a_replay_from_an_earlier_exchange_of_the_same_job_id_is_refused(sites, sessions):
    """A new process of the same site, which a server leads through a job of the same id; and another job's envelope."""
    made, handshakes = sessions
    old = exchanged(made, handshakes)["B"]
    again = Session(sites["A"], JOB)
    with pytest.raises(FedDPError, match="it received an envelope of B but has not sent a handshake"):
        again.open(WORD, TASK, 0, {"B": old})
    again.introduce(WORD)
    with pytest.raises(FedDPError, match="is for another handshake of this site: it is of an earlier exchange"):
        again.open(WORD, TASK, 0, {"B": old})
    assert made["A"].open(WORD, TASK, 0, {"B": old}), "the control"
    other = Session(sites["A"], "job-2")
    other.introduce(WORD)
    with pytest.raises(FedDPError, match="is of job 'job-1', not 'job-2'"):
        other.open(WORD, TASK, 0, {"B": old})


def test_an_envelope_for_the_certificate_of_before_a_renewal_is_refused(office, sites, sessions):
    made, handshakes = sessions
    old = exchanged(made, handshakes)["B"]
    made["A"].identity = Identity("A", *office.issue("A"), office.root, SERVER)
    with pytest.raises(FedDPError, match="is for another certificate of this site"):
        made["A"].open(WORD, TASK, 0, {"B": old})


def test_a_policy_that_names_recipients_seals_for_no_other(office, stranger, sites, sessions):
    """C is left out, whatever is shown for it; who is named and falsely shown gets nothing either, and ends the exchange
    where nobody else is named."""
    made, handshakes = sessions
    false = {"C": Session(replace(sites["C"], certificate=stranger.issue("C")[0]), JOB).introduce(WORD)}
    assert made["A"].meet(WORD, TASK, 0, handshakes | false, ("B",)) == ["B"]
    given = made["A"].seal(TASK, TENSORS)
    assert recipients_of("A", as_bytes("A", SEALED, given)) == ["B"]
    assert same(made["B"].open(WORD, TASK, 0, {"A": given})["A"], TENSORS)
    with pytest.raises(FedDPError, match="is not for this site"):
        made["C"].open(WORD, TASK, 0, {"A": given})
    assert made["A"].meet(WORD, TASK, 0, handshakes | false, ("B", "C")) == ["B"]
    assert recipients_of("A", as_bytes("A", SEALED, made["A"].seal(TASK, TENSORS))) == ["B"]
    with pytest.raises(FedDPError, match="certificate for site C was not issued"):
        made["A"].meet(WORD, TASK, 0, handshakes | false, ("C",))
    assert made["A"].meet(WORD, TASK, 0, handshakes, ()) == []
    assert made["A"].seal(TASK, TENSORS) == {}, "nobody to seal for: nothing leaves"


def test_two_collections_at_once_keep_to_their_own_recipients_and_epochs(sessions):
    """FLARE has two threads for them, and each has met whom it was shown."""
    made, handshakes = sessions
    made["A"].meet(WORD, TASK, 1, handshakes, ("B",))
    other = threading.Thread(target=lambda: made["A"].meet(WORD, TASK, 2, handshakes, None))
    other.start()
    other.join()
    given = made["A"].seal(TASK, TENSORS)
    assert recipients_of("A", as_bytes("A", SEALED, given)) == ["B"]
    assert same(made["B"].open(WORD, TASK, 1, {"A": given})["A"], TENSORS)


def test_a_relay_cannot_have_a_site_read_json_without_end(sites, sessions):
    """It would take the site's memory. Blanks are the cheapest JSON there is; a header of them is signed by a site here."""
    made, handshakes = sessions
    long = handshakes["B"][HANDSHAKE].numpy().tobytes() + b" " * LIMIT
    with pytest.raises(FedDPError, match=f"the limit is {LIMIT}"):
        made["A"].meet(WORD, TASK, 0, handshakes | {"B": {HANDSHAKE: as_tensor(long)}}, None)
    assert made["A"].meet(WORD, TASK, 0, handshakes, None) == ["B", "C"], "the control"
    given = exchanged(made, handshakes)["B"][SEALED].numpy().tobytes()
    start, sizes = len(MAGIC) + _LENGTHS.size, _LENGTHS.unpack_from(given, len(MAGIC))
    for blanks, opens in ((OVERHEAD - sizes[0], True), (OVERHEAD - sizes[0] + 1, False)):
        header = given[start : start + sizes[0]] + b" " * blanks
        padded = MAGIC + _LENGTHS.pack(len(header), sizes[1]) + header + given[start + sizes[0] :]
        if opens:
            assert recipients_of("B", padded) == ["A", "C"], "the control"
        else:
            with pytest.raises(FedDPError, match="did not send a sealed envelope"):
                recipients_of("B", padded)


def spoilt(given):
    """An envelope with another signature."""
    changed = given[SEALED].clone()
    changed[-1] ^= 1
    return {SEALED: changed}


def test_a_spoilt_envelope_costs_its_sender_alone(sessions):
    """C's is opened as it was sealed. The epoch is over for both: the server cannot have A take B's good one afterwards. Where
    nothing can be opened, the epoch is not over."""
    made, handshakes = sessions
    given, told = exchanged(made, handshakes), {}
    both = {"B": spoilt(given["B"]), "C": spoilt(given["C"])}
    words = "envelope of B was changed after it was signed.*; site A: the envelope of C was changed"
    with pytest.raises(FedDPError, match=words):
        made["A"].open(WORD, TASK, 0, both, told.__setitem__)
    assert told == {}, "an error names them, and nothing goes on without them"
    opened = made["A"].open(WORD, TASK, 0, both | {"C": given["C"]}, told.__setitem__)
    assert ([*opened], [*told]) == (["C"], ["B"])
    assert opened["C"]["own"].tolist() == [67.0, 67.0]
    assert "the envelope of B was changed after it was signed; nothing of it was used" in str(told["B"])
    with pytest.raises(
        FedDPError, match="envelopes for collect of epoch 0 or later were opened before, so that of B is refused"
    ):
        made["A"].open(WORD, TASK, 0, {"B": given["B"]})


def test_what_is_not_one_peers_fault_is_refused_whole(sites, sessions):
    """A process that has sent no handshake; a repeated epoch; what is no envelope at all, which no honest server relays."""
    made, handshakes = sessions
    given = exchanged(made, handshakes)
    with pytest.raises(FedDPError, match="has not sent a handshake"):
        Session(sites["A"], JOB).open(WORD, TASK, 0, {"B": given["B"], "C": given["C"]})
    with pytest.raises(FedDPError, match="site B: it may send only the bytes sealed here"):
        made["A"].open(WORD, TASK, 0, {"B": {"own": torch.zeros(2)}, "C": given["C"]})
    assert [*made["A"].open(WORD, TASK, 0, {"B": given["B"]})] == ["B"], "the control"
    with pytest.raises(FedDPError, match="were opened before, so that of C is refused"):
        made["A"].open(WORD, TASK, 0, {"C": given["C"]})  # the same epoch with a peer of the server's choice
    with pytest.raises(
        FedDPError, match="envelopes for collect of epoch 0 or later were opened before, so that of B is refused"
    ):
        made["A"].open(WORD, TASK, 0, {"B": given["B"], "C": given["C"]})


@pytest.mark.parametrize(
    ("tensor", "nbytes", "words"),
    [
        ({"dtype": "F0", "shape": [8]}, 8, r"cannot be opened \("),
        ({"dtype": "F32", "shape": [0, 2**63]}, 0, r"cannot be opened \("),
        ({"dtype": "F32", "shape": [0, 2**62, 2**62]}, 0, r"cannot be opened \("),
        (None, 0, "holds no tensors"),
    ],
)
def test_what_torch_cannot_read_is_its_senders_fault(sites, tensor, nbytes, words):
    """In an envelope that is valid otherwise: a type that there is not; shapes of no element that
    overflow in torch, in two ways; nothing."""
    b, key = peer(sites, "B")
    header = json.dumps({} if tensor is None else {"x": tensor | {"data_offsets": [0, nbytes]}}).encode()
    plain = len(header).to_bytes(8, "little") + header + bytes(nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("feddp.sealing.envelope.save", lambda tensors: plain)
        envelope = seal(sites["A"], BINDING, [b], TENSORS)
    with pytest.raises(FedDPError, match=f"the envelope of A {words}"):
        unseal(sites["B"], "A", envelope, BINDING, key)


def test_every_collection_needs_its_own_handshakes(sessions):
    made, handshakes = sessions
    made["A"].meet(WORD, TASK, 0, handshakes, None)
    with pytest.raises(FedDPError, match="give_model came without handshakes of peers"):
        made["A"].seal("give_model", TENSORS)
    made["A"].meet(WORD, TASK, 0, handshakes, None)
    assert made["A"].seal(TASK, TENSORS).keys() == {SEALED}
    with pytest.raises(FedDPError, match="collect came without handshakes of peers"):
        made["A"].seal(TASK, TENSORS)


def test_after_handshakes_that_were_refused_nothing_is_sealed_for_those_before(stranger, sites, sessions):
    """A site that has accepted B, and then is shown a false B for the same task, must not seal for the B of before."""
    made, handshakes = sessions
    false = {"B": Session(replace(sites["B"], certificate=stranger.issue("B")[0]), JOB).introduce(WORD)}
    assert made["A"].meet(WORD, TASK, 0, handshakes, ("B",)) == ["B"]
    with pytest.raises(FedDPError, match="was not issued by this project's root"):
        made["A"].meet(WORD, TASK, 0, handshakes | false, ("B",))
    with pytest.raises(FedDPError, match="collect came without handshakes of peers; nothing was sent"):
        made["A"].seal(TASK, TENSORS)


def test_each_exchange_of_a_job_has_its_own_key(sessions):
    """A introduces itself for two exchanges. What is sealed for its handshake of one opens there, and not in the other."""
    made, handshakes = sessions
    spectra = {name: session.introduce("spectra") for name, session in made.items()}
    envelope = exchanged(made, handshakes)["B"]
    with pytest.raises(FedDPError, match="is for another handshake"):
        made["A"].open("spectra", TASK, 0, {"B": envelope})
    assert [*made["A"].open(WORD, TASK, 0, {"B": envelope})] == ["B"]
    made["B"].meet("spectra", "collect_spectra", 0, spectra, None)
    other = made["B"].seal("collect_spectra", TENSORS)
    with pytest.raises(FedDPError, match="is for another handshake"):
        made["A"].open(WORD, "collect_spectra", 0, {"B": other})
    assert same(made["A"].open("spectra", "collect_spectra", 0, {"B": other})["B"], TENSORS)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"weight": torch.zeros(3)},
        {SEALED: torch.zeros(3)},
        {SEALED: torch.zeros(2, 2, dtype=torch.uint8)},
        {SEALED: torch.zeros(3, dtype=torch.uint8), "weight": torch.zeros(3)},
        {SEALED: b"bytes"},
    ],
)
def test_what_is_not_sealed_is_not_opened(sessions, tensors):
    made, _ = sessions
    with pytest.raises(FedDPError, match="site B: it may send only the bytes sealed here"):
        made["A"].open(WORD, TASK, 0, {"B": tensors})
