"""The first task of every job: which versions run at a site, whether its validation scores may leave, and how many images it
trains on, which says how far a round can move the shared tensors (`feddp.stages.movement`).

A job whose sites differ from the server in a version that matters (`feddp.versions`), or of which no site can score the rounds
where the best one is selected, ends here, and not hours later. A site that comes later is asked when it comes.
"""

from functools import partial

from feddp import protocol
from feddp.errors import ContributionError
from feddp.methods.base import TRAIN
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.versions import SERVER, as_numbers, as_texts, differences, installed, refusal

NUMBERS = ("versions", "scoring", "samples")
VERSIONS = "versions"  # the event of the server's progress
NO_SCORE = (
    "no site sends its validation IoU: every site has fewer images to select by than min_images in its policy."
    " The best round is therefore unknown; submit the job with --set start=last"
)

# --- at the server -------------------------------------------------------------------------------------------------------


def serve(server: Server) -> None:
    """Asks all sites. From here on, only sites that have answered are asked for anything else.

    Raises:
        ContributionError: versions differ that must not, or no site can score and the plan needs it; names the sites.
    """
    plan, memory = server.plan, server.memory
    memory.versions = {SERVER: installed()}
    answers = server.ask(protocol.READY, Message(), NUMBERS)
    for site, answer in answers.items():
        _note(server, site, answer)
    if reason := refusal(memory.versions):
        raise ContributionError(reason)
    _show(server, list(answers))
    needed = plan.needs_scores and memory.request is None and TRAIN not in memory.done
    if needed and not any(answer.scalars["scoring"] for answer in answers.values()):
        raise ContributionError(NO_SCORE)


def meet(server: Server) -> None:
    """Asks the sites that have come since; one that is lost meanwhile is asked when it is back.

    A site takes no part in the job if its versions differ that must not, or if it lives but does not tell them: the others wait
    for each question.
    """
    memory = server.memory
    if not memory.versions:  # `serve` has asked nobody
        return
    if new := [site for site in server.present() if site not in memory.versions and site not in memory.unfit]:
        answers = server.ask(protocol.READY, dict.fromkeys(new, Message()), NUMBERS, partial(_check, server), least=0)
        for site, answer in answers.items():
            _note(server, site, answer)
        for site in new:
            if site not in answers and site not in memory.lost:
                memory.unfit.setdefault(site, f"site {site} did not tell its versions")
        _show(server, list(answers))


def _note(server: Server, site: str, answer: Message) -> None:
    server.memory.versions[site] = as_texts(answer.scalars["versions"])
    server.memory.samples[site] = answer.scalars["samples"]


def _check(server: Server, site: str, answer: Message) -> None:
    here = server.memory.versions[SERVER]
    if reason := refusal({SERVER: here, site: as_texts(answer.scalars["versions"])}):
        server.memory.unfit[site] = reason
        raise ContributionError(reason)


def _show(server: Server, sites: list[str]) -> None:
    """Shows the lead the differences with which the job runs."""
    versions = {who: server.memory.versions[who] for who in (SERVER, *sites)}
    if found := differences(versions, refused=False):
        message = f"versions differ: {'; '.join(found.values())}. The job runs: none of this is known to change results"
        server.progress(VERSIONS, message=message)
        server.warn(message)


# --- at a site -----------------------------------------------------------------------------------------------------------


def answer(task: str, message: Message, host: Host) -> Message:
    return Message(scalars={"versions": as_numbers(installed()), "scoring": host.scoring, "samples": host.samples})
