"""Signed notes: each site states which shared tensors it was told of. So a server that gives the sites different ones is found.

Before each task with shared tensors, the server tells every site their fingerprint. Every site signs a note of it, and gets
the others' notes with the tensors. It uses the tensors only if enough sites have signed the same. A note with a bad signature
counts as none; a good one of other tensors ends the task: then the server has not told all sites the same.
"""

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cryptography import x509

from feddp.errors import FedDPError, SealingError, SharedError
from feddp.sealing.document import UNREADABLE, is_signed, read, write
from feddp.sealing.identity import Identity

NOTE = "note"  # the name of the tensor on the wire, of bytes
LARGEST = 2**53
LIMIT = 64 * 1024  # bytes; a certificate takes 1.5 KiB, and a name of each site is in it
_PURPOSE = b"feddp note 1"
Accept = Callable[[str, str], x509.Certificate]


@dataclass(frozen=True)
class Told:
    """Shared tensors: the task that brings them, its round and phase, their SHA-256 in hex, and the sites that are asked."""

    brought_by: str
    round: int
    phase: int
    shared: str
    sites: tuple[str, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Told":
        """Reads it from the scalars of a message or from a note; raises SealingError if they are not what it is."""
        try:
            made = cls(content["brought_by"], content["round"], content["phase"], content["shared"], tuple(content["sites"]))
        except (KeyError, TypeError):
            raise SealingError("a note of shared tensors is incomplete; the server or a site runs another version") from None
        texts, numbers = (made.brought_by, made.shared, *made.sites), (made.round, made.phase)
        plain = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
        if not plain or not re.fullmatch("[0-9a-f]{64}", made.shared):
            raise SealingError("a note of shared tensors holds wrong values; the server or a site runs another version")
        return made


@dataclass(frozen=True)
class Statement:
    """What a site signs beside what it was told.

    Args:
        plan: the digest of the job's plan.
        samples: the site's number of training images, at least 1.
        steps: how many steps (phases of rounds) of the run it has made.
    """

    site: str
    job: str
    plan: str
    samples: int
    steps: int
    told: Told

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Statement":
        """Reads a note's; raises SealingError if it is not what `sign` writes."""
        try:
            words = content["site"], content["job"], content["plan"]
            made = cls(*words, content["samples"], content["steps"], Told.of(content["told"]))
        except (KeyError, TypeError):
            raise SealingError("a note of shared tensors is incomplete; the server or a site runs another version") from None
        # a site without images takes no part: its number would be a reason for the others to refuse the round
        bounds = (made.samples, 1), (made.steps, 0)
        counts = all(type(number) is int and least <= number <= LARGEST for number, least in bounds)
        if content.keys() != asdict(made).keys() or not all(isinstance(word, str) for word in words) or not counts:
            raise SealingError("a note of shared tensors holds wrong values; the server or a site runs another version")
        return made


class SharedNotes:
    """One site's notes in a job, and what it knows from the others'."""

    def __init__(self, identity: Identity, job: str):
        self.identity, self._job = identity, job
        self.samples: dict[str, int] = {}  # {site: its number of training images, as in its last valid note}
        self._signed: dict[tuple[str, int, int], Told] = {}  # {(task, round, phase): what this site has signed}
        self._own = threading.local()  # FLARE may run a task that the server pushes beside the one that was fetched

    def tell(self, told: Told) -> None:
        """Stores what the next note of this thread states.

        Raises:
            SharedError: this site has signed a note of other tensors for this task.
        """
        key = told.brought_by, told.round, told.phase
        if self._signed.setdefault(key, told).shared != told.shared:
            raise SharedError(
                f"site {self.identity.name}: it was told of two sets of shared tensors for {told.brought_by} of round"
                f" {told.round}, and signs the first one only. Ask the server's operator why"
            )
        self._signed[key] = self._own.told = told

    def sign(self, plan: str, samples: int, steps: int) -> bytes:
        """Returns the note of what this site was told; the arguments are those of Statement.

        Raises:
            SealingError: it was told nothing.
        """
        told: Told | None = getattr(self._own, "told", None)
        if told is None:
            raise SealingError(f"site {self.identity.name}: it was asked for a note and told of no shared tensors")
        self._own.told = None
        statement = Statement(self.identity.name, self._job, plan, samples, steps, told)
        return write(self.identity, _PURPOSE, asdict(statement))

    def require_same(
        self, told: Told, plan: str, notes: Mapping[str, Any], least: int, left_out: Callable[[str, FedDPError], None]
    ) -> int:
        """Requires that enough sites have signed notes of the same tensors, the same sites and the same plan.

        Args:
            told: as this site has computed it from what it was sent.
            notes: {site: its note, as text}.
            least: how many sites, this one included.
            left_out: is told each site whose note has no valid signature.

        Returns:
            The most steps that another site has made.

        Raises:
            SharedError: a site, or this one, has signed a note of other tensors, or too few sites have signed one.
        """
        name, what = self.identity.name, f"other shared tensors for {told.brought_by} of round {told.round} than this site"
        statements = {}
        if self._signed.get((told.brought_by, told.round, told.phase), told) != told:
            raise SharedError(f"site {name}: it was sent {what} was told of; it answers nothing. Ask the server's operator why")
        for site in sorted(notes.keys() & set(told.sites) - {name}):
            try:
                statements[site] = statement_in(site, notes[site], self.identity.accept)
            except SealingError as error:
                left_out(site, error)
        for site, statement in statements.items():
            if (statement.told, statement.job, statement.plan) != (told, self._job, plan):
                raise SharedError(
                    f"site {name}: site {site} was told of {what}, or of another job, plan or set of sites; the server does not"
                    " give all sites the same, and this site answers nothing. Ask the server's operator why"
                )
        if len(statements) + 1 < least:
            raise SharedError(
                f"site {name}: {len(statements) + 1} of the {least} sites that the plan requires have signed a note of the"
                f" shared tensors of {told.brought_by}, round {told.round}; it answers nothing. Ask the server's operator why"
            )
        self.samples |= {site: statement.samples for site, statement in statements.items()}
        return max((statement.steps for statement in statements.values()), default=0)

    def remember(self, plan: str, notes: Mapping[str, Any], left_out: Callable[[str, FedDPError], None]) -> None:
        """Takes from earlier notes of this job how many images sites have that do not sign now, for nothing else.

        They have moved the shared tensors too, and a site that joins late has not seen their notes.

        Args:
            plan, left_out: as for `require_same`.
            notes: {site of the plan: the last note that it signed, as text}.
        """
        for site in sorted(notes.keys() - self.samples.keys() - {self.identity.name}):
            try:
                statement = statement_in(site, notes[site], self.identity.accept)
                if (statement.job, statement.plan) != (self._job, plan):
                    raise SealingError(f"site {site}: it signed its earlier note in another job, which counts as none")
            except SealingError as error:
                left_out(site, error)
            else:
                self.samples[site] = statement.samples


def statement_in(site: str, note: Any, accept: Accept) -> Statement:
    """Returns the statement of a note, given as text.

    Args:
        accept: returns the certificate of a site, from its name and PEM; raises SealingError if it is not the site's.

    Raises:
        SealingError: it is no note, or `site` has not signed it.
    """
    try:
        statement, pem, signature = read(note if isinstance(note, str) and len(note) <= LIMIT else "")
        made = Statement.of(statement)
    except (SealingError, *UNREADABLE):
        raise SealingError(f"site {site}: its note is not valid, and counts as none") from None
    if made.site != site or not is_signed(accept(site, pem), signature, _PURPOSE, asdict(made)):
        raise SealingError(f"site {site}: it did not sign the note that bears its name, which counts as none")
    return made
