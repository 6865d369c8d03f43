"""The sites agree on shared tensors before each task that brings them: each signs their fingerprint (`feddp.sealing.note`).

Without certificates, in FLARE's simulator or one process, there is nobody to sign: the task is not asked. Nor is it where
nothing is shared.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from feddp import protocol
from feddp.errors import ContributionError
from feddp.networks.weights import fingerprint
from feddp.partition import Tensors
from feddp.sealing.note import LIMIT, NOTE, Statement, Told, statement_in
from feddp.sealing.session import as_bytes
from feddp.stages.message import Message
from feddp.stages.precision import halved
from feddp.stages.server import Server


def agreed(
    server: Server,
    task: str,
    shared: Tensors,
    metadata: Mapping[str, Any],
    round: int,
    phase: int = 0,
    among: Collection[str] | None = None,
) -> tuple[dict[str, Any], Collection[str] | None]:
    """Asks the sites for their notes of the tensors that `task` will bring.

    Args:
        metadata: entries of the task's progress lines.
        among: asks these sites at most; default: all.

    Returns:
        What the task's message must hold for the sites to accept its tensors; and which sites have signed: the task is for
        them alone, and a site that does not answer is waited for once. Where nobody signs, `among`.

    Raises:
        ContributionError: fewer than `min_sites` signed what they were told.
    """
    if not server.sealed or not shared:
        return {}, among
    if server.plan.federation.half:  # the sites see what comes out of the wire
        shared = halved(shared)
    asked = tuple(site for site in server.sites() if among is None or site in among)
    told, plan = Told(task, round, phase, fingerprint(shared), asked), server.plan.digest()

    def check(site: str, answer: Message) -> None:
        found = statement_in(site, _text(site, answer), server.accept)
        require_samples(server, site, found.samples)
        if found != Statement(site, server.job, plan, found.samples, found.steps, told):
            raise ContributionError(f"site {site}: its note states something else than it was told; ask its administrator why")

    answers = server.ask(protocol.AGREE, Message(scalars=asdict(told)), (), check, among=among, brought_by=task, **metadata)
    notes = {site: _text(site, answer) for site, answer in answers.items()}
    earlier = {site: note for site, note in server.memory.notes.items() if site not in notes}
    server.memory.notes |= notes
    return {"sites": list(told.sites), "notes": notes, "earlier": earlier}, notes.keys()


def require_samples(server: Server, site: str, samples: float) -> None:
    """Raises ContributionError if a site has another number of training images than it stated when the job began."""
    if (stated := server.memory.samples.get(site, samples)) != samples:
        what = f"it trains on {samples:g} images, and stated {stated} when the job began"
        raise ContributionError(f"site {site}: {what}; restore its images, or continue the run in a new job")


def _text(site: str, answer: Message) -> str:
    return as_bytes(site, NOTE, answer.tensors, LIMIT).decode(errors="replace")
