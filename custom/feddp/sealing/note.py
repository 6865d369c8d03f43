"""Signed notes: each site states which shared tensors it was told of. So a server that gives the sites different ones is found.

Before each task with shared tensors, the server tells every site their fingerprint. Every site signs a note of it, and gets
the others' notes with the tensors. It uses the tensors only if enough sites have signed the same. A note with a bad signature
counts as none; a good one of other tensors ends the task: then the server has not told all sites the same.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from feddp.errors import FedDPError, SealingError, SharedError
from feddp.reading import short
from feddp.sealing.identity import Identity, signed

NOTE = "note"  # the name of the tensor on the wire, of bytes
LIMIT = 64 * 1024  # bytes; a certificate takes 1.5 KiB, and a name of each site is in it
_MAGIC = b"feddp note 1\n"


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


class SharedNotes:
    """One site's notes in a job, and what it knows from the others'."""

    def __init__(self, identity: Identity, job: str):
        self.identity, self._job = identity, job
        self.samples: dict[str, int] = {}  # {site: its number of training images, as in its last valid note}
        self._own = threading.local()  # FLARE may run a task that the server pushes beside the one that was fetched

    def tell(self, told: Told) -> None:
        """Stores what the next note of this thread states."""
        self._own.told = told

    def sign(self, plan: str, samples: int) -> bytes:
        """Returns the note of what this site was told.

        Args:
            plan: the digest of the job's plan.
            samples: this site's number of training images.

        Raises:
            SealingError: it was told nothing.
        """
        told: Told | None = getattr(self._own, "told", None)
        if told is None:
            raise SealingError(f"site {self.identity.name}: it was asked for a note and told of no shared tensors")
        self._own.told = None
        statement = {"site": self.identity.name, "job": self._job, "plan": plan, "samples": samples, **asdict(told)}
        signature = self.identity.sign(_signed_part(statement)).hex()
        return json.dumps({"statement": statement, "certificate": self.identity.pem, "signature": signature}).encode()

    def require_same(
        self, told: Told, plan: str, notes: Mapping[str, Any], least: int, left_out: Callable[[str, FedDPError], None]
    ) -> None:
        """Requires that enough sites have signed notes of the same tensors, the same sites and the same plan.

        Args:
            told: as this site has computed it from what it was sent.
            notes: {site: its note, as text}.
            least: how many sites, this one included.
            left_out: is told each site whose note has no valid signature.

        Raises:
            SharedError: a site has signed a note of other tensors, or too few sites have signed one.
        """
        name, same = self.identity.name, {self.identity.name}
        for site in sorted(notes.keys() & set(told.sites) - same):
            try:
                statement = self._read(site, notes[site])
                theirs, samples = Told.of(statement), statement["samples"]
            except SealingError as error:
                left_out(site, error)
                continue
            if (theirs, statement["job"], statement["plan"]) != (told, self._job, plan):
                what = f"other shared tensors for {told.brought_by} of round {told.round} than this site"
                raise SharedError(
                    f"site {name}: site {site} was told of {what}, or of another job, plan or set of sites; the server does not"
                    " give all sites the same, and this site answers nothing. Ask the server's operator why"
                )
            self.samples[site] = samples
            same.add(site)
        if len(same) < least:
            raise SharedError(
                f"site {name}: {len(same)} of the {least} sites that the plan requires have signed a note of the shared tensors"
                f" of {told.brought_by}, round {told.round}; this site answers nothing. Ask the server's operator why"
            )

    def _read(self, site: str, note: Any) -> dict[str, Any]:
        """Returns the statement of a note that `site` has signed; raises SealingError if it has not."""
        try:
            content = json.loads(note if isinstance(note, str) and len(note) <= LIMIT else "")
            statement, pem, signature = content["statement"], str(content["certificate"]), bytes.fromhex(content["signature"])
            whole = statement["site"] == site and type(statement["samples"]) is int and statement["samples"] >= 0
            whole &= {"job", "plan"} <= statement.keys()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False
        if not whole or not signed(self.identity.accept(site, pem), signature, _signed_part(statement)):
            raise SealingError(f"site {site} did not sign the note that the server relayed; it counts as none")
        return dict(statement)


def told_in(site: str, note: bytes) -> Told:
    """Returns what a note states, for the server, which relays it; its signature is not checked.

    Raises:
        SealingError: it is no note, or of another site.
    """
    try:
        statement = json.loads(note)["statement"]
        own = statement["site"] == site
    except (ValueError, KeyError, TypeError, RecursionError):
        own = False
    if not own:
        raise SealingError(f"site {site}: its note {short(repr(note[:40]))} cannot be read, or is another site's")
    return Told.of(statement)


def _signed_part(statement: Mapping[str, Any]) -> bytes:
    return _MAGIC + json.dumps(statement, sort_keys=True).encode()
