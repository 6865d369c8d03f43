"""Where the time of a run went, by round, stage and site, from the server's events.

time.json holds seconds, in the lists one number per round; null if it is not known, for instance of a site that was absent:

{"rounds": {"wall",         the whole round
            "combining",    the mean of the contributions
            "saving"},      the server's files
 "sites": {site: {"agreeing",   until all sites have signed what they will be sent (`feddp.stages.agreement`)
                  "computing", "loading", "evaluating", "storing",   as the site measured: training with the making of its
                                  batches, opening, scores, its state; a process opens its folder, network and images when
                                  it first needs them
                  "receiving",    of an answer what is neither the site's own seconds nor sending: the request on its way, its
                                  tensors, and all checks and filters of the site, those of its answer too; of a site that
                                  was given the task again also its earlier attempts
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
SITE = ("agreeing", "computing", "loading", "evaluating", "storing", "receiving", "sending", "idle")
_OWN = {"loading": protocol.LOADING, "evaluating": protocol.EVALUATING, "storing": protocol.STORING}

Parts = dict[str, float | None]


def accounted(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the content of time.json for a run's events."""
    rounds: dict[int, Parts] = {}
    sites: dict[str, dict[int, Parts]] = {}
    begins = 0
    for place, event in enumerate(events):
        if event["event"] != "round":
            continue
        number, requests = event["round"], requests_of(events[begins:place])
        begins = place
        rounds[number] = {"wall": event["seconds"], "combining": event.get("combining"), "saving": event.get("saving")}
        phases, agreed = (
            [each for each in requests if each.task == task and each.asked.get("round") == number]
            for task in (protocol.TRAIN, protocol.AGREE)
        )
        notes = {each.asked["phase"]: each.asked["time"] for each in agreed if "phase" in each.asked}
        if 0 in notes:  # before it asks, the server computes what the sites shall sign
            notes[0] = event["time"] - event["seconds"]
        found = _of_round(phases, notes, event["time"])
        for site in sites.keys() | found.keys():
            sites.setdefault(site, {})[number] = found.get(site, {})
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
    computed: dict[str, float] = field(default_factory=dict)  # {site: when it first asked whether its answer is wanted}
    moving: dict[str, Event] = field(default_factory=dict)  # {site: the last report of a slow transfer that moved}
    answers: dict[str, Event] = field(default_factory=dict)  # by site

    @property
    def task(self) -> str:
        return str(self.asked["task"])

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that the server sent and received."""
        return int(sum(self.asked["bytes"].values()) + sum(answer["bytes"] for answer in self.answers.values()))

    def ways(self, site: str) -> tuple[float, float | None]:
        """Returns the seconds of `receiving` and of `sending` of a site that answered, and said its own seconds."""
        answer, computed = self.answers[site], self.computed.get(site)
        sending = None if computed is None else answer["time"] - computed
        # a site's guard rounds its seconds
        return max(0.0, answer["time"] - self.asked["time"] - answer["scalars"]["seconds"] - (sending or 0.0)), sending


def requests_of(events: Sequence[Event]) -> list[TaskRequest]:
    """Returns a run's requests by time; one made again, because the server was killed, is as it ended the last time."""
    requests: dict[tuple[Any, ...], TaskRequest] = {}
    present: TaskRequest | None = None  # the request that is answered now
    for event in events:
        kind, key = event["event"], tuple(event.get(name) for name in ("task", "brought_by", "round", "phase", "epoch"))
        if kind == "ask":
            requests.pop(key, None)
            present = requests[key] = TaskRequest(event, set(event["sites"]), event["time"])
        elif present is None or (site := event.get("site")) not in present.waiting:
            continue
        elif kind == "computed":
            present.computed.setdefault(site, event["time"])  # FLARE's client asks again after a failure
        elif kind == "again":
            present.computed.pop(site, None)  # it computes anew
        elif kind == "transfer":
            present.moving.pop(site, None)
            if event["rate"] and event["moved"] < event["size"]:
                present.moving[site] = event
        elif kind in ("answer", "refused") and requests.get(key) is present:
            present.waiting.remove(site)
            present.ended = event["time"]
            if kind == "answer":
                present.answers[site] = event
    return list(requests.values())


def _of_round(phases: Sequence[TaskRequest], notes: Mapping[int, float], ended: float) -> dict[str, Parts]:
    """Returns the parts of every site that answered in one of a round's phases; `notes` are the times at which the phases'
    notes were asked for."""
    found: dict[str, Parts] = {}
    begins = [notes.get(phase.asked.get("phase", 0), phase.asked["time"]) for phase in phases]
    for phase, until in zip(phases, [*begins[1:], ended][: len(phases)], strict=True):
        asked = notes.get(phase.asked.get("phase", 0))
        agreeing = None if asked is None else phase.asked["time"] - asked
        for site in phase.answers:
            parts = {"agreeing": agreeing} | _parts(phase, site, until)
            found[site] = _sum(found[site], parts) if site in found else parts
    return found


def _by_stage(events: Sequence[Event], rounds: float) -> dict[str, Any]:
    """Returns the seconds of every stage in the order of the run; `rounds` are those of all rounds together."""
    stages: dict[str, tuple[float, dict[str, float]]] = {}
    stage = ""
    for request in reversed(requests_of(events)):
        spec, asked = protocol.spec_of(request.task), request.asked["time"]
        if spec.kind is not Kind.HANDSHAKE or not stage:
            stage = spec.stage
        wall, sites = stages.setdefault(stage, (rounds if stage == TRAIN_STAGE else 0.0, {}))
        if not _within_a_round(request):
            wall += request.ended - asked
        for site, answer in request.answers.items():
            sites[site] = sites.get(site, 0.0) + answer["time"] - asked
        stages[stage] = wall, sites
    return {
        name: {"wall": _shown(wall), "sites": {site: _shown(sites[site]) for site in sorted(sites)}}
        for name, (wall, sites) in reversed(stages.items())
        if name
    }


def _within_a_round(request: TaskRequest) -> bool:
    return request.task == protocol.TRAIN or (request.task == protocol.AGREE and "phase" in request.asked)


def _parts(request: TaskRequest, site: str, until: float) -> Parts:
    """Returns the parts of a site's answer, and of its wait `until` the next phase or the round's end."""
    scalars = request.answers[site]["scalars"]
    own: Parts = {name: scalars.get(scalar) for name, scalar in _OWN.items()}
    receiving, sending = request.ways(site)
    return {
        "computing": None if own["loading"] is None else max(0.0, scalars["seconds"] - sum(v or 0.0 for v in own.values())),
        **own,
        "receiving": receiving,
        "sending": sending,
        "idle": until - request.answers[site]["time"],
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
