"""Warns of sites whose network finds nothing, in rounds in a row: their validation Dice stays that of empty masks.

The server sees the Dice alone, so it warns where that is 0.000. An empty mask of an image without structures has Dice 1: only
the site knows how many such images it has, so it also recognises empty masks where the mean is above 0. Neither sends anything.
"""

from collections.abc import Mapping

from feddp.files import RECORD, read_events
from feddp.protocol import rounded
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import Site

EMPTY = "empty"  # the event, of the server's progress and of the site's log
ROUNDS = 5  # in a row, after which a warning is due
REMEDY = "submit the job with --set loss=dice and, if structures are a few pixels thin, with a larger --size"


def _warning(site: str, dice: float) -> str:
    return f"site {site}: its masks stay empty: validation Dice {dice:.3f} in {ROUNDS} rounds in a row; {REMEDY}"


def warn(server: Server, answers: Mapping[str, Message]) -> None:
    """Counts the rounds of each site; warns once for each site. A site that withholds its Dice is not counted."""
    counts = server.memory.empty
    for site, answer in answers.items():
        if "dice" not in answer.scalars or counts.get(site, 0) >= ROUNDS:
            continue
        counts[site] = 0 if rounded("dice", answer.scalars["dice"]) else counts.get(site, 0) + 1
        if counts[site] == ROUNDS:
            server.progress(EMPTY, site=site, message=_warning(site, 0.0))
            server.warn(_warning(site, 0.0))


def note(site: Site, round: int, latest: float) -> None:
    """Writes the warning to the site's own log, once, when the latest rounds up to `round` are as empty masks would be.

    Args:
        latest: the Dice of `round`; the log, which has those before it, is read only where this one is as low.
    """
    if not latest <= site.empty_dice < 1:
        return
    events = read_events(site.store.folder / RECORD)
    dice = {event["round"]: event["dice"] for event in events if event["event"] == "train" and "dice" in event}
    highest = max(dice.get(round - back, 1.0) for back in range(ROUNDS))
    if highest <= site.empty_dice and not any(event["event"] == EMPTY for event in events):
        site.store.record(EMPTY, round=round, message=_warning(site.name, highest))
