"""Warns of networks that find no structure: at a site in rounds in a row, and at a run's end, by class too, on test images.

Of an empty mask, Dice and IoU are 1 if the prediction is empty too, else 0; of every other mask in which nothing is found, both
are 0. So where a network finds no structure, both means are equal, whatever the share of empty masks, and whatever it draws
elsewhere. Where it finds a structure in part, IoU is lower; only one that is found to the pixel leaves them equal, and so do
masks that are all empty, which a site may have of a class. The server has both means anyway: no number is sent for this.
"""

from collections.abc import Mapping
from typing import Any

from feddp.files import RECORD, read_events
from feddp.methods import METHODS
from feddp.methods.base import Method
from feddp.plan.schema import Plan
from feddp.protocol import WHEN, rounded
from feddp.reading import is_count
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import Site
from feddp.training.columns import class_names, of_class
from feddp.training.settings import DICE, DICE_CE

EMPTY = "empty"  # the event, of the server's progress and of the site's log
ROUNDS = 5  # in a row, after which a warning is due
_NUMBERS = ("dice", "iou")
_MOST = 0.99  # above, where nearly all masks are empty, three decimals do not tell two means apart


def finds_nothing(means: Mapping[str, float]) -> bool:
    """Whether mean Dice and IoU, as they leave a site, are those of a network that finds nothing; False if one is withheld."""
    found = [rounded(name, means[name]) for name in _NUMBERS if name in means]
    return len(found) == len(_NUMBERS) and bool(found[0] == found[1] < _MOST)


def remedy(method: str, loss: str) -> str:
    """Returns what to change in a job of `method` with the setting `loss`.

    From random weights, cross-entropy rewards empty masks where structures are thin or rare, and soft Dice alone stayed at
    empty masks at sites that trained alone, so each loss is the other's remedy.
    """
    if not METHODS.get(method, Method).uses_loss:
        change = "more --rounds"
    elif loss == DICE:
        change = f"--set loss={DICE_CE} or more --rounds"
    else:
        change = f"--set loss={DICE}"
    return f"submit the job with {change} and, if structures are a few pixels thin, with a larger --size"


def warn(server: Server, answers: Mapping[str, Message]) -> None:
    """Counts the rounds of each site; warns once for each site. A site that withholds its Dice is not counted."""
    counts = server.memory.empty
    for site, answer in answers.items():
        if not answer.scalars.keys() >= set(_NUMBERS) or counts.get(site, 0) >= ROUNDS:
            continue
        counts[site] = counts.get(site, 0) + 1 if finds_nothing(answer.scalars) else 0
        if counts[site] == ROUNDS:
            message = _warning(server.plan, site, answer.scalars["dice"])
            server.progress(EMPTY, site=site, message=message)
            server.warn(message)


def note(site: Site, round: int, scores: Mapping[str, float]) -> None:
    """Writes the warning to the site's own log, once, when nothing was found in the latest rounds up to `round`.

    Args:
        scores: those of `round`; the log, which has those before it, is read only where nothing is found in this one.
    """
    if not finds_nothing(scores):
        return
    events = read_events(site.store.folder / RECORD)
    found = {event["round"]: finds_nothing(event) for event in events if event["event"] == "train" and "dice" in event}
    if all(found.get(round - back, False) for back in range(ROUNDS)) and not any(event["event"] == EMPTY for event in events):
        site.store.record(EMPTY, round=round, message=_warning(site.plan, site.name, scores["dice"]))


def at_the_end(results: Mapping[str, Any], when: str = WHEN[-1]) -> str:
    """Returns a warning of the sites whose network finds no structure on their test images, or none of a class; "" if there
    are none.

    Args:
        results: the content of results.json.
        when: which of a site's networks.
    """
    missed: dict[str, dict[str, float]] = {}  # {class, or "" for all: {site: mean Dice}}
    for site, entry in sorted(results["sites"].items()):
        summary = entry.get(when, {})
        for name in ("", *class_names(summary)):
            if finds_nothing(means := _means(summary, name)):
                missed.setdefault(name, {})[site] = means["dice"]
                if not name:
                    break  # the classes are among them
    if not missed:
        return ""
    texts = []
    for name, found in sorted(missed.items()):
        dice = ", ".join(f"{site} {value:.3f}" for site, value in found.items())
        if name:
            what, whose = f"{name} on the test images, or draw it where no image shows it", "mean Dice of it"
        else:
            what, whose = "structure on the test images", "mean Dice"
        texts.append(f"these networks find no {what}: their {whose} ({dice}) equals IoU")
    nothing, change = missed.get("", {}), remedy(results["method"], results.get("settings", {}).get("loss", DICE_CE))
    text = "; ".join((*texts, change if nothing else f"if images show it, {change}"))
    selected = [results["sites"][site].get("round", results.get("start_round")) for site in nothing]
    if any(is_count(round) and round < results["rounds"] for round in selected):
        text += (
            ". An earlier round than the last was selected: if the validation curves show that later rounds find structures,"
            " --set start=last takes the last"
        )
    return f"{text}."


def _warning(plan: Plan, site: str, dice: float) -> str:
    seen = f"validation Dice {dice:.3f} equals IoU in {ROUNDS} rounds in a row"
    return f"site {site}: its network finds no structure: {seen}; {remedy(plan.method, plan.training.loss)}"


def _means(summary: Mapping[str, Mapping[str, float]], class_name: str) -> dict[str, float]:
    found = {name: summary.get(of_class(name, class_name)) for name in _NUMBERS}
    return {name: value["mean"] for name, value in found.items() if value}
