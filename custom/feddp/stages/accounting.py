"""Where the time of a run went, by round, stage and site, from the server's events.

time.json holds seconds, in the lists one number per round; null if it is not known, for instance of a site that was absent:

{"rounds": {"wall",         the whole round
            "combining",    the mean of the contributions
            "saving"},      the server's files
 "sites": {site: {"computing", "loading", "evaluating", "storing",   as the site measured: training, images, scores, its state
                  "receiving",    of an answer what is neither the site's own seconds nor sending: the request on its way, its
                                  tensors, and all checks and filters of the site, those of its answer too
                  "sending",      from the site's question whether its answer is still wanted until the server has checked it
                  "idle"}},       from there until the next phase, or until the round ends
 "stages": {stage: {"wall",       from each of its requests until the last answer to it; stage 1: the rounds and other requests
                    "sites": {site: from each of the stage's requests until the site's answer}}}}

A site that scores nothing (in the first round), or withholds it, has no `evaluating`; the latter's is within `computing`.
Without FLARE nobody asks that question, so `sending` is unknown, and `receiving` includes the sites that train before; so do
the seconds of a site in a stage. A round or another request that was made again, because the server was killed, counts as it
ended the last time; of a round that was saved, but not noted, nothing is known. A handshake belongs to the stage that it
prepares.

Serialising has no part of its own. A message of FLARE carries references, and the receiver asks for the tensors in pieces: only
then does FLARE's TensorDecomposer write them as bytes, in the sender's transport threads, and the server those of γ once
for all sites; the receiver reads them as they come. At a site this happens after the answer with its seconds has left. So
serialising is within `receiving` (the server writes, the site reads) and `sending` (the site writes, the server reads, checks
the tensors and puts them on its disk). Half precision is a filter: within `sending` for an answer that reaches the server,
within `receiving` everywhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddp import protocol
from feddp.files import Event
from feddp.methods.base import TRAIN as TRAIN_STAGE
from feddp.protocol import Kind

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
        "stages": _by_stage(events, sum(parts["wall"] or 0.0 for parts in rounds.values())),
    }


@dataclass
class TaskRequest:
    """One request to some sites, and what came of it; times are seconds on the server's clock."""

    asked: Event
    waiting: set[str]  # the sites that have neither answered nor been refused or given up; what they do later counts nowhere
    ended: float  # the last answer or refusal, or the end of the wait for a site
    answers: dict[str, Event] = field(default_factory=dict)  # by site

    @property
    def task(self) -> str:
        return str(self.asked["task"])

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that the server sent and received."""
        return int(sum(self.asked["bytes"].values()) + sum(answer["bytes"] for answer in self.answers.values()))


def requests_of(events: Sequence[Event]) -> list[TaskRequest]:
    """Returns a run's requests by time; one made again, because the server was killed, is as it ended the last time."""
    requests: dict[tuple[Any, ...], TaskRequest] = {}
    present: tuple[Any, ...] = ()  # the request that is answered now
    for event in events:
        kind, key = event["event"], tuple(event.get(name) for name in ("task", "round", "phase", "epoch"))
        if kind == "ask":
            requests.pop(key, None)
            requests[key], present = TaskRequest(event, set(event["sites"]), event["time"]), key
        elif kind in ("answer", "refused") and key == present and event["site"] in requests[key].waiting:
            requests[key].waiting.remove(event["site"])
            requests[key].ended = event["time"]
            if kind == "answer":
                requests[key].answers[event["site"]] = event
    return list(requests.values())


def _by_stage(events: Sequence[Event], rounds: float) -> dict[str, Any]:
    """Returns the seconds of every stage in the order of the run; `rounds` are those of all rounds together."""
    stages: dict[str, tuple[float, dict[str, float]]] = {}
    stage = ""
    for request in reversed(requests_of(events)):
        spec, asked = protocol.spec_of(request.task), request.asked["time"]
        if spec.kind is not Kind.HANDSHAKE or not stage:
            stage = spec.stage
        wall, sites = stages.setdefault(stage, (rounds if stage == TRAIN_STAGE else 0.0, {}))
        if request.task != protocol.TRAIN:
            wall += request.ended - asked
        for site, answer in request.answers.items():
            sites[site] = sites.get(site, 0.0) + answer["time"] - asked
        stages[stage] = wall, sites
    return {
        name: {"wall": _shown(wall), "sites": {site: _shown(sites[site]) for site in sorted(sites)}}
        for name, (wall, sites) in reversed(stages.items())
        if name
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
    """Returns the sum of two phases of a round. Not every phase scores: `evaluating` is the sum of those that do."""
    total: Parts = {}
    for name in one:
        known = [seconds for seconds in (one[name], other[name]) if seconds is not None]
        total[name] = sum(known) if len(known) == 2 or (known and name == "evaluating") else None
    return total


def _columns(rounds: Mapping[int, Parts], last: int, names: Sequence[str]) -> dict[str, list[float | None]]:
    return {name: [_shown(rounds.get(number, {}).get(name)) for number in range(1, last + 1)] for name in names}


def _shown(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
