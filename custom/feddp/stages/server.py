"""The interface through which a stage's server half sees the server: it asks sites and checks their answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from cryptography import x509
from torch import Tensor

from feddp import protocol
from feddp.errors import ContributionError, FedDPError, SealingError, StorageError
from feddp.methods.aggregation import outliers
from feddp.partition import Tensors
from feddp.plan.schema import Plan
from feddp.protocol import COUNT, MEASURED, STD_WITHHELD, WITHHELD, Kind, Number
from feddp.reading import short, shown
from feddp.sealing.envelope import OVERHEAD, recipients_of
from feddp.sealing.handshake import LIMIT
from feddp.sealing.note import LIMIT as NOTE_LIMIT
from feddp.sealing.note import NOTE
from feddp.sealing.session import HANDSHAKE, SEALED, as_bytes
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.spool import Spool

Check = Callable[[str, Message], None]
Received = Callable[[str, Callable[[], Message]], None]


@dataclass(frozen=True)
class Unanswered:
    """A task without an answer: whether its site vanished, or was only too slow, and what is known of the task's way."""

    vanished: bool
    known: str = ""


class Server(ABC):
    """Asks sites and checks their answers. Subclasses carry the messages: in FLARE, or on one machine without it.

    Args:
        memory: the server's state of the run.
        job: this job's id, which sites sign; empty where they sign nothing.
        sealed: whether sites exchange sealed envelopes, which the server cannot open (with certificates), or plain tensors.
    """

    def __init__(self, memory: ServerMemory, sealed: bool, job: str = ""):
        self.memory, self.sealed, self.job = memory, sealed, job

    @property
    def plan(self) -> Plan:
        return self.memory.plan

    def accept(self, site: str, pem: str) -> x509.Certificate:
        """Returns the certificate in `pem` if it belongs to the site; raises SealingError if not, or if there are none."""
        raise SealingError(f"site {site}: this run has no certificates")

    @abstractmethod
    def joined(self) -> Collection[str]:
        """Returns the names of the job's sites, lost ones included."""

    @abstractmethod
    def send(
        self, task: str, sites: Sequence[str], data: Message | Mapping[str, Message], received: Received
    ) -> dict[str, Unanswered]:
        """Sends a task to sites, one message for all or each its own, and waits until all have answered or cannot.

        Calls `received(site, reply)` for every answer; `reply()` returns the answer or raises FedDPError.

        Returns:
            {site without an answer: why}.

        Raises:
            Stopped: the job was aborted.
        """

    @abstractmethod
    def warn(self, message: str) -> None:
        """Writes to the server's own log."""

    def present(self) -> list[str]:
        """Returns the job's sites without lost ones, in alphabetical order, before they have told their versions too."""
        return sorted(set(self.joined()) - self.memory.lost.keys())

    def sites(self) -> list[str]:
        """Returns those that take part, in alphabetical order: every loop over sites uses it."""
        return [site for site in self.present() if self.memory.takes_part(site)]

    def save(self, shared: Tensors, round: int) -> None:
        """Saves γ of `round`."""
        self.memory.save(shared, round)

    def progress(self, event: str, **metadata: Any) -> None:
        """Appends a line to the run's progress, which users follow."""
        self.memory.progress(event, **metadata)

    def ask(
        self,
        task: str,
        data: Message | Mapping[str, Message],
        numbers: Sequence[str],
        check: Check = lambda site, answer: None,
        spool: Spool | None = None,
        least: int | None = None,
        among: Collection[str] | None = None,
        **metadata: Any,
    ) -> dict[str, Message]:
        """Sends a task to every site, or to each site its own, and waits for the answers.

        An answer is accepted if it holds exactly the task's tensors (`feddp.protocol`) and passes `check`.

        Args:
            task: the task's name.
            data: one message for all sites, or {site: message}, which asks only these sites.
            numbers: the finite scalars that an answer must hold; a site may withhold a mean by its policy.
            check: raises ContributionError for an answer that must be refused.
            spool: takes the tensors of every accepted answer when it comes, so that they do not stay in memory.
            among: asks these sites at most; default: all.
            least: how many accepted answers are needed; default: the plan's `min_sites`.
            metadata: further entries of this task's progress lines.

        Returns:
            {site: accepted answer} in alphabetical order. The progress has the refused ones with the reason.

        Raises:
            ContributionError: fewer than `least` answers were accepted; names the sites and the reasons.
            Stopped: the job was aborted.
            StorageError: the server's disk is full.
        """
        half = task in protocol.with_shared() and self.plan.federation.half
        here = self.present() if task == protocol.READY else self.sites()
        wanted = here if among is None else among
        sites = [site for site in here if site in wanted and (isinstance(data, Message) or site in data)]
        known = protocol.numbers_of(task, sorted(self.joined()), self.plan.classes)
        accepted: dict[str, Message] = {}
        refused: dict[str, str] = {}

        def refuse(site: str, reason: str, **more: Any) -> None:
            refused[site] = reason
            self.progress("refused", site=site, task=task, reason=reason, **more, **metadata)

        def received(site: str, reply: Callable[[], Message]) -> None:
            try:
                answer = reply()
                check_numbers(site, answer.scalars, numbers, known)
                self._check_tensors(task, site, answer)
                check(site, answer)
                kept = answer if spool is None else replace(answer, tensors=spool.put(answer.tensors))
            except StorageError:  # the server's own: no site is to blame
                raise
            except FedDPError as error:
                refuse(site, str(error) if site in str(error) else f"site {site}: {error}")
                self.warn(f"refused: {refused[site]}")
            else:
                accepted[site] = kept
                scalars = {n: answer.scalars[n] for n in (*numbers, WITHHELD) if n in answer.scalars}
                self.progress("answer", site=site, task=task, **metadata, bytes=nbytes(answer.tensors, half), scalars=scalars)

        sent = {site: nbytes((data if isinstance(data, Message) else data[site]).tensors, half) for site in sites}
        self.progress("ask", task=task, sites=sites, **metadata, bytes=sent)
        for site, why in self.send(task, sites, data, received).items():
            rest = f", so it is not asked for {metadata['brought_by']} either" if task == protocol.AGREE else ""
            refuse(site, f"site {site}: no answer to {task}{rest}{why.known and f'; {why.known}'}", late=True)
            if why.vanished:
                self.memory.lost[site] = f"site {site} was lost at {task}"
        for site, reason in self._outliers(task, data, accepted).items():
            del accepted[site]
            refuse(site, reason)
        if len(accepted) < (self.plan.federation.min_sites if least is None else least):
            raise ContributionError(
                f"{task}: {len(accepted)} of {len(sites)} sites answered well, "
                f"min_sites={self.plan.federation.min_sites}. {'; '.join(refused[s] for s in sorted(refused))}"
            )
        return {site: accepted[site] for site in sorted(accepted)}

    def _outliers(self, task: str, data: Message | Mapping[str, Message], accepted: Mapping[str, Message]) -> dict[str, str]:
        """Returns {site: the reason} of the contributions that the plan's `norm_factor` refuses."""
        federation = self.plan.federation
        asked = federation.norm_factor and protocol.spec_of(task).kind is Kind.ROUND and len(accepted) >= federation.min_sites
        if not asked or not isinstance(data, Message):
            return {}
        contributions = {site: answer.tensors for site, answer in accepted.items()}
        found = outliers(contributions, data.tensors, federation.norm_factor)
        what = f"norm_factor={federation.norm_factor:g} times the median norm"
        return {
            site: f"site {site}: its tensors changed by {norm:.3g}, more than {most:.3g}, {what}"
            for site, (norm, most) in found.items()
        }

    def _check_tensors(self, task: str, site: str, answer: Message) -> None:
        """Raises FedDPError for other tensors than the task's, and for sealed messages larger than they need to be."""
        spec, expected = protocol.spec_of(task), self.memory.expected
        if spec.kind is Kind.HANDSHAKE and self.sealed and answer.scalars["consent"]:
            as_bytes(site, HANDSHAKE, answer.tensors, LIMIT)
        elif spec.kind is Kind.AGREEMENT:
            as_bytes(site, NOTE, answer.tensors, NOTE_LIMIT)
        elif spec.kind is not Kind.COLLECTION:
            expected.check(spec.tensors, site, answer.tensors)
        elif self.sealed and answer.tensors:
            most = expected.spec(spec.tensors).nbytes + OVERHEAD
            recipients_of(site, as_bytes(site, SEALED, answer.tensors, most))
        elif not self.sealed and (answer.scalars["consent"] or answer.tensors):
            expected.check(spec.tensors, site, answer.tensors)


def check_numbers(site: str, scalars: Mapping[str, Any], names: Sequence[str], known: Mapping[str, Any]) -> None:
    """Checks an answer's numbers.

    Args:
        names: those that it must hold, unless its policy withholds them.
        known: the bounds of every number that it may hold (`feddp.protocol.numbers_of`).

    Raises:
        ContributionError: a number is missing or outside its bounds, or a table holds an unknown name; names the site.
    """
    withheld = MEASURED - scalars.keys() if WITHHELD in scalars else frozenset()
    bounds = {**known, WITHHELD: COUNT, STD_WITHHELD: COUNT}
    required = [name for name in names if name not in withheld]
    for name in dict.fromkeys((*required, *(name for name in bounds if name in scalars))):
        _check_number(site, name, scalars.get(name), bounds[name])


def _check_number(site: str, name: str, value: Any, known: Any) -> None:
    if isinstance(known, Number):
        if not known.fits(value):
            wanted = "true or false" if known.flag else f"a finite number from {known.least} to {known.most}"
            raise ContributionError(f"site {site}: its answer's {name} is {shown(value)}, not {wanted}")
    elif not isinstance(value, Mapping) or not value.keys() <= known.keys():
        raise ContributionError(f"site {site}: its answer's {name} is {shown(value)}, not a table of {short(', '.join(known))}")
    else:
        for below, each in value.items():
            _check_number(site, f"{name}/{below}", each, known[below])


def nbytes(tensors: Mapping[str, Tensor], half: bool) -> int:
    """Returns the tensors' size in bytes without transport overhead; `half`: float32 travels as float16."""
    found = [value for value in tensors.values() if isinstance(value, Tensor)]
    return sum(value.nbytes // (2 if half and value.dtype == torch.float32 else 1) for value in found)
