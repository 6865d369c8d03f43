"""Warns of networks that find no structure: at a site in rounds in a row, and at a run's end, by class too, on test images.

Of an empty mask, Dice and IoU are 1 if the prediction is empty too, else 0; of every other mask in which nothing is found, both
are 0. So where a network finds no structure, both means are equal, whatever the share of empty masks, and whatever it draws
elsewhere. Where it finds a structure in part, IoU is lower; only one that is found to the pixel leaves them equal.

Means say nothing of the cause. So a site also tells, with every score, whether all its masks are empty or full, and once, when
its warning is due, whether its network marks nothing or everything. At the end, distances tell this: where exactly one of
prediction and mask is empty, it is the image's diagonal, and elsewhere it is shorter.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from feddp.files import RECORD, read_events
from feddp.methods import METHODS
from feddp.methods.base import Method
from feddp.plan.schema import Plan
from feddp.protocol import FLAGS, MARKS_ALL, MARKS_NOTHING, MASKS_EMPTY, MASKS_FULL, TESTS_EMPTY, TESTS_FULL, WHEN, rounded
from feddp.reading import is_count
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import Site
from feddp.training.columns import class_names, of_class
from feddp.training.loop import predict
from feddp.training.metrics import THRESHOLD
from feddp.training.settings import DICE, DICE_CE

ELSEWHERE = "?"  # no class has this name
EMPTY = "empty"  # the event, of the server's progress and of the site's log
ROUNDS = 5  # in a row, after which a warning is due
_NUMBERS = ("dice", "iou")
_FILES = "check the folder there with `feddp data check`"
_DISTANCE = "hd"
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


def of_masks(samples: Iterable[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Returns whether all masks are empty, and whether all are full, without a pixel of the background."""
    samples = list(samples)
    empty = not any(bool((sample["mask"] > THRESHOLD).any()) for sample in samples)
    full = all(bool((sample["mask"] > THRESHOLD).any(dim=0).all()) for sample in samples)
    return empty, full


def warn(server: Server, answers: Mapping[str, Message]) -> None:
    """Counts the rounds of each site; warns once for each site. A site that withholds its Dice is not counted."""
    counts = server.memory.empty
    for site, answer in answers.items():
        told = answer.scalars
        if not told.keys() >= set(_NUMBERS) or counts.get(site, 0) >= ROUNDS:
            continue
        if told.get(MASKS_EMPTY) or told.get(MASKS_FULL):
            counts[site] = ROUNDS
        else:
            counts[site] = counts.get(site, 0) + 1 if finds_nothing(told) else 0
        if counts[site] == ROUNDS:
            message = _warning(server.plan, site, told)
            server.progress(EMPTY, site=site, message=message)
            server.warn(message)


def note(site: Site, round: int, scores: Mapping[str, float]) -> dict[str, bool]:
    """Returns what the site tells beside the scores of `round`, before it trains the network that was scored.

    Writes the warning to the site's own log, once: if its masks are all empty or full, or when nothing was found in the latest
    rounds up to `round`. The log, which has the rounds before, is read only then.
    """
    parts = [of_masks(samples) for samples in (site.samples, site.validation)]
    told = {
        name: True for name, true in zip((MASKS_EMPTY, MASKS_FULL), map(any, zip(*parts, strict=True)), strict=True) if true
    }
    if not told and not finds_nothing(scores):
        return {}
    events = read_events(site.store.folder / RECORD)
    if said := [event for event in events if event["event"] == EMPTY]:
        again = said[-1]["round"] == round  # the answer may have been lost
        return told or {name: said[-1][name] for name in FLAGS if again and name in said[-1]}
    if not told:
        found = {event["round"]: finds_nothing(event) for event in events if event["event"] == "train" and "dice" in event}
        if not all(found.get(round - back, False) for back in range(1, ROUNDS)):
            return {}
        told = _marks(site)
    site.store.record(EMPTY, round=round, message=_warning(site.plan, site.name, {**scores, **told}), **told)
    return told


def _marks(site: Site) -> dict[str, bool]:
    """Returns whether the network marks no pixel of the validation images, and whether it marks all."""
    maps = [maps > THRESHOLD for maps, _ in predict(site.network, site.validation)]
    nothing, everything = not any(bool(each.any()) for each in maps), all(bool(each.any(dim=1).all()) for each in maps)
    return {MARKS_NOTHING: nothing, MARKS_ALL: everything}


def at_the_end(results: Mapping[str, Any], when: str = WHEN[-1]) -> str:
    """Returns a warning of the sites whose network finds no structure on their test images, or none of a class, or whose test
    masks are all empty or full; "" if there are none.

    Args:
        results: the content of results.json.
        when: which of a site's networks.
    """
    blank: dict[str, list[str]] = {"empty": [], "full": []}
    missed: dict[str, dict[str, float]] = {}  # {class, "" for all, or ELSEWHERE: {site: mean Dice}}
    for site, entry in sorted(results["sites"].items()):
        if flagged := [word for word, flag in (("empty", TESTS_EMPTY), ("full", TESTS_FULL)) if entry.get(flag)]:
            blank[flagged[0]].append(site)
            continue
        summary = entry.get(when, {})
        for name in ("", *class_names(summary)):
            if finds_nothing(means := _means(summary, name)):
                kind = ELSEWHERE if not name and _draws(summary, results.get("size", 0)) else name
                missed.setdefault(kind, {})[site] = means["dice"]
                if not name:
                    break  # the classes are among them
    texts = [
        f"all test masks of {', '.join(sites)} are {word}, so their scores say nothing: {_FILES}"
        for word, sites in blank.items()
        if sites
    ]
    if not missed:
        return f"{'; '.join(texts)}." if texts else ""
    for name, found in sorted(missed.items()):
        dice = ", ".join(f"{site} {value:.3f}" for site, value in found.items())
        if name == ELSEWHERE:
            texts.append(f"these networks mark pixels of the test images, and hardly one of a structure: mean Dice {dice}")
            continue
        if name:
            what, whose = f"{name} on the test images, or draw it where no image shows it", "mean Dice of it"
        else:
            what, whose = "structure on the test images", "mean Dice"
        texts.append(f"these networks find no {what}: their {whose} ({dice}) equals IoU")
    nothing, change = missed.get("", {}), remedy(results["method"], results.get("settings", {}).get("loss", DICE_CE))
    whole_networks = bool(nothing) or ELSEWHERE in missed
    text = "; ".join((*texts, change if whole_networks else f"if images show it, {change}"))
    selected = [results["sites"][site].get("round", results.get("start_round")) for site in nothing]
    if any(is_count(round) and round < results["rounds"] for round in selected):
        text += (
            ". An earlier round than the last was selected: if the validation curves show that later rounds find structures,"
            " --set start=last takes the last"
        )
    return f"{text}."


def _warning(plan: Plan, site: str, told: Mapping[str, float]) -> str:
    """Returns the warning of a site, by its scores and by what it tells beside them."""
    for flag, word in ((MASKS_EMPTY, "empty"), (MASKS_FULL, "full")):
        if told.get(flag):
            what = (
                f"all its training masks, or all by which rounds are selected, are {word}: nothing is learnt or measured there"
            )
            small = f", and if its structures are small, raise --size (now {plan.size})" if word == "empty" else ""
            return f"site {site}: {what}; {_FILES}{small}"
    seen = f"validation Dice {told['dice']:.3f} equals IoU in {ROUNDS} rounds in a row"
    if told.get(MARKS_ALL):
        return f"site {site}: its network marks every pixel: {seen}; {_FILES}, and then submit the job with more --rounds"
    if told.get(MARKS_NOTHING) is False:
        what = "its network marks pixels, and hardly one of a structure"
        return f"site {site}: {what}: {seen}; {_FILES}, and then {remedy(plan.method, plan.training.loss)}"
    return f"site {site}: its network finds no structure: {seen}; {remedy(plan.method, plan.training.loss)}"


def _draws(summary: Mapping[str, Mapping[str, float]], size: int) -> bool:
    """Whether a network that finds nothing marks pixels all the same, in images of `size` x `size` pixels with a structure."""
    if not size or not (distance := summary.get(_DISTANCE)):
        return False
    missed = 1 - summary["dice"]["mean"] - 0.001  # the mean is rounded
    return distance["mean"] < _MOST * missed * size * math.sqrt(2)


def _means(summary: Mapping[str, Mapping[str, float]], class_name: str) -> dict[str, float]:
    found = {name: summary.get(of_class(name, class_name)) for name in _NUMBERS}
    return {name: value["mean"] for name, value in found.items() if value}
