"""The validation scores of every round, from the server's events, and each site's best round by them."""

from collections.abc import Iterable

from feddp import protocol
from feddp.files import Event
from feddp.methods.base import TRAIN
from feddp.protocol import Kind, rounded

DICE, IOU = "dice", "iou"


def curves(events: Iterable[Event], score: str = IOU) -> dict[str, dict[int, float]]:
    """Returns {site: {round: score}} on the split that selects; a run without a federation has one site, the pool.

    A round's first score counts: a later one is of the network that a site adopts, perhaps of another round.
    """
    found: dict[str, dict[int, float]] = {}
    for event in _answers(events):
        if score in event["scalars"]:
            # the mean of a round is scored when it comes back, at the start of the next round
            scored = event["round"] - (event["task"] == protocol.TRAIN)
            found.setdefault(event["site"], {}).setdefault(scored, event["scalars"][score])
    return found


def best_rounds(events: Iterable[Event]) -> dict[str, int]:
    """Returns each site's own best round, as `train.own_best` finds it there; without sites that withhold a score."""
    answers = list(_answers(events))
    withheld = {e["site"] for e in answers if e["round"] > 1 and not e.get("phase") and IOU not in e["scalars"]}
    best = {}
    for site, curve in curves(answers).items():
        if site not in withheld:
            best[site] = max(sorted(curve), key=lambda round: rounded(IOU, curve[round]))
    return best


def _answers(events: Iterable[Event]) -> Iterable[Event]:
    """Those that may hold a score."""
    for event in events:
        if event["event"] == "answer":
            spec = protocol.spec_of(event["task"])
            if spec.stage == TRAIN and spec.kind is not Kind.START:
                yield event
