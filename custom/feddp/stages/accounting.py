"""Where the time of a run's rounds went, by round and site, from the server's events.

time.json holds seconds, one number per round in every list; null if it is not known, for instance of a site that was absent:

{"rounds": {"wall",         the whole round
            "combining",    the mean of the contributions
            "saving"},      the server's files
 "sites": {site: {"computing", "loading", "evaluating", "storing",   as the site measured: training, images, scores, its state
                  "receiving",    from the server's request until the site begins, and the site's checks
                  "sending",      from the site's question whether its answer is still wanted until the server has the answer
                  "idle"}}}       from there until the next phase, or until the round ends

A site that scores nothing (in the first round), or withholds it, has no `evaluating`; the latter's is within `computing`.
Without FLARE nobody asks that question, so `sending` is unknown, and `receiving` includes the sites that train before. A round
that was asked for again, because the server was killed in it, counts as it ended the last time; of a round that was saved, but
not noted, nothing is known.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from feddp import protocol
from feddp.files import Event

ROUND = ("wall", "combining", "saving")
SITE = ("computing", "loading", "evaluating", "storing", "receiving", "sending", "idle")
_OWN = {"loading": protocol.LOADING, "evaluating": protocol.EVALUATING, "storing": protocol.STORING}

Parts = dict[str, float | None]


def accounted(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the content of time.json for a run's events."""
    rounds: dict[int, Parts] = {}
    sites: dict[str, dict[int, Parts]] = {}
    open_: dict[str, Parts] = {}  # of the present round
    idle: dict[str, float] = {}  # of the present round
    asked, computed, answered = 0.0, dict[str, float](), dict[str, float]()  # of the present phase

    def waited(until: float) -> None:
        for site, time in answered.items():
            idle[site] = idle.get(site, 0.0) + until - time

    for event in events:
        kind = event["event"]
        if kind == "ask" and event["task"] == protocol.TRAIN:
            if event.get("phase"):
                waited(event["time"])
            else:
                open_, idle = {}, {}
            asked, computed, answered = event["time"], {}, {}
        elif kind == "computed":
            computed.setdefault(event["site"], event["time"])
        elif kind == "answer" and event["task"] == protocol.TRAIN:
            site, time = event["site"], event["time"]
            parts, answered[site] = _answer(event["scalars"], time - asked, computed.get(site), time), time
            open_[site] = _sum(open_[site], parts) if site in open_ else parts
        elif kind == "round":
            number = event["round"]
            rounds[number] = {"wall": event["seconds"], "combining": event.get("combining"), "saving": event.get("saving")}
            waited(event["time"])
            for site in sites.keys() | open_.keys():
                sites.setdefault(site, {})[number] = open_[site] | {"idle": idle[site]} if site in open_ else {}
    last = max(rounds, default=0)
    return {
        "rounds": _columns(rounds, last, ROUND),
        "sites": {site: _columns(sites[site], last, SITE) for site in sorted(sites)},
    }


def _answer(scalars: Mapping[str, Any], seconds: float, computed: float | None, now: float) -> Parts:
    """Returns the parts of one answer, `seconds` after its request."""
    own: Parts = {name: scalars.get(scalar) for name, scalar in _OWN.items()}
    sending = None if computed is None else now - computed
    return {
        "computing": None if own["loading"] is None else max(0.0, scalars["seconds"] - sum(v or 0.0 for v in own.values())),
        **own,
        "receiving": max(0.0, seconds - scalars["seconds"] - (sending or 0.0)),
        "sending": sending,
    }


def _sum(one: Parts, other: Parts) -> Parts:
    """Returns the sum of two phases of a round."""
    pairs = {name: (one[name], other[name]) for name in one}
    return {name: None if a is None or b is None else a + b for name, (a, b) in pairs.items()}


def _columns(rounds: Mapping[int, Parts], last: int, names: Sequence[str]) -> dict[str, list[float | None]]:
    return {name: [_shown(rounds.get(number, {}).get(name)) for number in range(1, last + 1)] for name in names}


def _shown(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
