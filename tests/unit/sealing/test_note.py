"""Signed notes: a server that gives sites different shared tensors is found, and one bad note ends nothing."""

import json
from dataclasses import replace

import pytest

from feddp.errors import SealingError, SharedError
from feddp.sealing.identity import Authority, Identity
from feddp.sealing.note import LIMIT, SharedNotes, Statement, Told, statement_in
from support.certificates import SERVER, Office

PLAN, JOB = "5" * 64, "job-1"
TOLD = Told("train", 3, 0, "a" * 64, ("A", "B", "C"))


@pytest.fixture(scope="module")
def office():
    return Office()


@pytest.fixture(scope="module")
def identities(office):
    return office.identities("ABC")


@pytest.fixture
def notes(identities):
    return {name: SharedNotes(identity, JOB) for name, identity in identities.items()}


def signed(notes, name, told=TOLD, plan=PLAN, samples=10, steps=3):
    notes[name].tell(told)
    return notes[name].sign(plan, samples, steps).decode()


def required(notes, given, told=TOLD, least=3):
    """What A says of the others' notes: the sites that it leaves out."""
    out = []
    notes["A"].made = notes["A"].require_same(told, PLAN, given, least, lambda site, why: out.append(site))
    return out


def test_notes_of_the_same_tensors_are_accepted_and_say_how_many_images(notes):
    given = {name: signed(notes, name, samples=count, steps=count - 4) for name, count in (("A", 9), ("B", 6), ("C", 7))}
    assert required(notes, given) == []
    assert notes["A"].samples == {"B": 6, "C": 7}
    assert notes["A"].made == 3, "steps, of the others"


@pytest.mark.parametrize(
    "other",
    [
        replace(TOLD, shared="b" * 64),
        replace(TOLD, round=2),
        replace(TOLD, phase=1),
        replace(TOLD, brought_by="score"),
        replace(TOLD, sites=("A", "B")),
    ],
)
def test_a_server_that_tells_sites_different_things_is_found(notes, other):
    given = {"B": signed(notes, "B"), "C": signed(notes, "C", other)}
    with pytest.raises(SharedError, match="site C was told of other shared tensors for train of round 3 than this site"):
        required(notes, given)
    with pytest.raises(SharedError, match="site A: site B was told"):
        required(notes, {"B": given["B"]}, other)


def test_a_note_of_another_plan_or_job_is_none_of_this_one(notes, identities):
    with pytest.raises(SharedError, match="or of another job, plan"):
        required(notes, {"B": signed(notes, "B", plan="6" * 64), "C": signed(notes, "C")})
    other = {"B": SharedNotes(identities["B"], "job-2")}
    with pytest.raises(SharedError, match="or of another job, plan"):
        required(notes, {"B": signed(other, "B"), "C": signed(notes, "C")})


def test_a_server_cannot_sign_for_a_site(notes, office, identities):
    """Nor repeat a note as another site's, nor change one: such a note counts as none, and too few are left."""
    good = json.loads(signed(notes, "B"))
    forged = [
        good | {"statement": good["statement"] | {"samples": 1}},
        good | {"signature": "00" * 256},
        good | {"certificate": identities["C"].pem},
        json.loads(signed(notes, "C")),
        good | {"statement": {"site": "B"}},
        good | {"statement": good["statement"] | {"samples": 10**400}},
        good | {"statement": good["statement"] | {"samples": True}},
        good | {"statement": good["statement"] | {"told": {}}},
        good | {"statement": good["statement"] | {"more": 1}},
        {},
        [],
    ]
    for note in (*map(json.dumps, forged), "", "{", " " * (LIMIT + 1), 7, None):
        assert required(notes, {"B": note, "C": signed(notes, "C")}, least=2) == ["B"]
        with pytest.raises(SharedError, match="2 of the 3 sites that the plan requires"):
            required(notes, {"B": note, "C": signed(notes, "C")})
    stranger, key = Office().issue("B")  # of another root of the same name
    foreign = {"B": SharedNotes(Identity("B", stranger, key, office.root, SERVER), JOB)}
    assert required(notes, {"B": signed(foreign, "B"), "C": signed(notes, "C")}, least=2) == ["B"]


def test_a_site_that_states_no_images_is_left_out_by_name(notes):
    """Its signature is good. A site counts the others' steps by their images, and refuses a round with a number below 1."""
    given = {"B": signed(notes, "B", samples=0), "C": signed(notes, "C")}
    assert required(notes, given, least=2) == ["B"]
    assert notes["A"].samples == {"C": 10}
    with pytest.raises(SealingError, match="site B: its note is not valid"):
        statement_in("B", given["B"], notes["A"].identity.accept)


def test_earlier_notes_tell_numbers_of_images_and_nothing_else(notes, office, identities):
    """C signed in a round before and is gone. What A knows stays; a note of another job, plan or signer tells nothing."""
    gone, out = replace(TOLD, round=1, shared="b" * 64), []
    assert required(notes, {"B": signed(notes, "B", samples=6)}, least=2) == []

    def remember(**given):
        out.clear()
        notes["A"].remember(PLAN, given, lambda site, why: out.append(site))
        return notes["A"].samples

    other = {"C": SharedNotes(identities["C"], "job-2")}
    for note in (signed(notes, "C", gone, plan="6" * 64), signed(other, "C", gone), signed(notes, "B", gone), "x", 7):
        assert (remember(C=note), out) == ({"B": 6}, ["C"])
    early = signed(notes, "C", gone, samples=400, steps=99)
    assert remember(C=early, A=early, B=signed(notes, "B", gone, samples=9)) == {"B": 6, "C": 400}
    assert out == []
    assert notes["A"].made == 3, "steps of B, who signs now"


def test_a_site_counts_once_and_only_if_it_is_of_the_run(notes, identities, office):
    with pytest.raises(SharedError, match="1 of the 2 sites"):
        required(notes, {"A": signed(notes, "A")}, least=2)
    certificate, key = office.issue("Z")
    notes["Z"] = SharedNotes(Identity("Z", certificate, key, office.root, SERVER), JOB)
    with pytest.raises(SharedError, match="1 of the 2 sites"):
        required(notes, {"Z": signed(notes, "Z")}, least=2)


def test_a_site_signs_once_what_it_was_told(notes):
    with pytest.raises(SealingError, match="told of no shared tensors"):
        notes["A"].sign(PLAN, 10, 0)
    signed(notes, "A")
    with pytest.raises(SealingError, match="told of no shared tensors"):
        notes["A"].sign(PLAN, 10, 0)


def test_a_site_signs_one_set_of_tensors_for_a_task(notes):
    """A server that asks twice, once for each half of the sites, would have notes of both from all."""
    signed(notes, "A")
    signed(notes, "A")
    signed(notes, "A", replace(TOLD, round=4, shared="b" * 64))
    with pytest.raises(SharedError, match="told of two sets of shared tensors for train of round 3"):
        notes["A"].tell(replace(TOLD, shared="b" * 64))


def test_a_site_takes_what_it_has_signed(notes):
    """Also where all others have signed what it is sent."""
    signed(notes, "A")
    other = replace(TOLD, shared="b" * 64)
    with pytest.raises(SharedError, match="site A: it was sent other shared tensors"):
        required(notes, {name: signed(notes, name, other) for name in "BC"}, other)


def test_the_server_checks_what_it_relays(notes, office):
    """With the root and its own name alone: as a site does, since sites would refuse its round for a note that is none."""
    accept, note = Authority(office.root, SERVER).accept, signed(notes, "B")
    assert statement_in("B", note, accept) == Statement("B", JOB, PLAN, 10, 3, TOLD)
    for wrong in ("", "[]", "{}", '{"statement": 7}', "\ufffd", note + "\ufffd", note.replace("-----BEGIN", "\\ud800")):
        with pytest.raises(SealingError, match="site B"):
            statement_in("B", wrong, accept)
    with pytest.raises(SealingError, match="site C: it did not sign the note"):
        statement_in("C", note, accept)
    late, key = office.issue("B", since=-2, until=-1)
    expired = {"B": SharedNotes(Identity("B", late, key, office.root, SERVER), JOB)}
    with pytest.raises(SealingError, match="the certificate for site B expired"):
        statement_in("B", signed(expired, "B"), accept)


@pytest.mark.parametrize(
    "changed",
    [
        {"round": "3"},
        {"round": True},
        {"phase": 0.0},
        {"shared": "a" * 63},
        {"shared": 7},
        {"brought_by": None},
        {"sites": [1]},
    ],
)
def test_what_is_told_has_a_form(changed):
    content = {"brought_by": "train", "round": 3, "phase": 0, "shared": "a" * 64, "sites": ["A", "B", "C"]}
    assert Told.of(content) == TOLD
    with pytest.raises(SealingError, match="another version"):
        Told.of(content | changed)
    for name in content:
        with pytest.raises(SealingError, match="another version"):
            Told.of({key: value for key, value in content.items() if key != name})
