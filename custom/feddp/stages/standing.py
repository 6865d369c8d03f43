"""How a run stands, from the server's events: what is asked, what each site does, how long it will take.

A pure function of the plan, the events and the time, so that a command beside the run and a server that is asked tell the same.
No number here comes from a site but what its answers hold.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from feddp import protocol
from feddp.files import Event
from feddp.methods.base import CALIBRATE, HEADS, TRAIN, TUNE
from feddp.plan.schema import Plan
from feddp.protocol import ADAPT_STAGE, AGREE, Kind
from feddp.reading import lasting, transferred
from feddp.stages.events import BACK

LAST = 5  # rounds over which the pace is measured
NOTES = 6  # messages that are kept
SLOW = 2  # a site is late after so many times its longest round
# a site that is asked works, if a slow line does not have it receive first; it says that its answer is ready, and sends; the
# answer came, and it waits for the others
WAITS, RECEIVES, WORKS, SENDS, LATE, LOST, REFUSED = "waits", "receives", "works", "sends", "late", "lost", "refused"


@dataclass
class SiteNow:
    """A site: what it does, since when, why it was refused; its last numbers; bytes of tensors to it and from it."""

    state: str = WAITS
    since: float = 0.0
    why: str = ""
    loss: float | None = None
    dice: float | None = None
    received: int = 0
    sent: int = 0
    usual: float = 0.0  # the most seconds between a round's request and its answer


@dataclass
class Standing:
    """Takes the events of a run in their order (`add`), and tells how it stands (`summary`)."""

    plan: Plan
    round: int = 0  # completed
    task: str = ""
    of: str = ""  # the round or epoch of the task
    stage: str = ""
    sites: dict[str, SiteNow] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    opening: bool = True  # whether the next round is the first one of an attempt: a site opens its images, and scores nothing
    first: float = 0.0  # seconds of the last such round
    paces: list[float] = field(default_factory=list)  # seconds of the other ones
    asked: float = 0.0  # when the task was sent
    began: float = 0.0  # when the present round, or stage after the rounds, began
    epoch: int = 0  # of an exchange of heads
    epochs: list[float] = field(default_factory=list)  # when each of these was asked for

    def add(self, event: Event) -> None:
        """Takes the next event."""
        kind, time = event["event"], float(event["time"])
        if kind == "ask":
            self._asked(event, time)
        elif kind == "computed":
            self._site(event["site"], SENDS, time)
        elif kind == "transfer":
            self._transfer(event, time)
        elif kind == "answer":
            site, scalars = self._site(event["site"], WAITS, time), event["scalars"]
            if protocol.spec_of(event["task"]).kind is Kind.ROUND:
                site.usual = max(site.usual, time - self.asked)
            site.sent += event["bytes"]
            site.loss, site.dice = scalars.get("loss", site.loss), scalars.get("dice", site.dice)
        elif kind == "refused":
            # FLARE's or the server's own words for a site that did not answer in time
            state = LATE if event.get("late") else REFUSED
            self._site(event["site"], state, time, event["reason"])
            self._note(event["reason"] if event["site"] in event["reason"] else f"site {event['site']}: {event['reason']}")
        elif kind == "round":
            self.round, self.began = event["round"], time
            if self.opening:
                self.first, self.opening = float(event["seconds"]), False
            else:
                self.paces.append(float(event["seconds"]))
        elif kind == "resumed":
            self.round, self.stage, self.opening, self.began = event["round"], "", True, 0.0
            self._note(f"continued after round {event['round']}")
        elif kind in ("returned", "again"):
            what = "is back" if kind == "returned" else f"was given {event['task']} again"
            self._site(event["site"], WAITS if kind == "returned" else WORKS, time)
            self._note(f"site {event['site']} {what}")
        elif "message" in event:  # damaged, empty, error
            self._note(event["message"])

    def _transfer(self, event: Event, time: float) -> None:
        left = event["size"] - event["moved"]
        state = SENDS if event["way"] == BACK else RECEIVES if left else WORKS
        site = self.sites.setdefault(event["site"], SiteNow())
        if state != site.state:
            site.state, site.since = state, time if state == WORKS else self.asked
        wait = f", about {lasting(event['seconds_left'])} left" if event["seconds_left"] else ""
        site.why = f"{transferred(event['moved'], event['size'], event['rate'])}{wait}" if left else ""

    def _asked(self, event: Event, time: float) -> None:
        task, asked = event["task"], event["sites"]
        spec = protocol.spec_of(task)
        if spec.stage != self.stage or (spec.kind is Kind.ROUND and not self.began):
            self.stage, self.began, self.epochs = spec.stage, time, []
        unsigned = [name for name, site in self.sites.items() if site.state in (LATE, REFUSED)] if self.task == AGREE else []
        self.task, self.of = task, next((f"{name} {event[name]}" for name in ("epoch", "round") if name in event), "")
        self.asked = time
        if "epoch" in event and spec.kind is Kind.COLLECTION:
            self.epoch, self.epochs = event["epoch"], [*self.epochs, time]
        for name in asked:
            self._site(name, WORKS, time).received += event.get("bytes", {}).get(name, 0)
        for name in self.sites.keys() - {*asked, *unsigned}:
            # of an adaptation, sites are asked in turn; elsewhere all are that are not lost
            self.sites[name].state = WAITS if spec.stage == ADAPT_STAGE else LOST

    def _site(self, name: str, state: str, since: float, why: str = "") -> SiteNow:
        site = self.sites.setdefault(name, SiteNow())
        site.state, site.since, site.why = state, since, why
        return site

    def _note(self, text: str) -> None:
        self.notes = [*self.notes, text][-NOTES:]

    def seconds_left(self, now: float) -> float | None:
        """Returns the seconds until the last stage ends, without the evaluation after it; None while nothing is measured.

        A round lasts as long as the mean of the last LAST ones. An epoch after the rounds counts as an epoch of a round: it too
        trains on all images and scores the validation images once.
        """
        walls = self.paces[-LAST:] or ([self.first] if self.first else [])
        home = [stage for stage in self.plan.home if stage in (TUNE, CALIBRATE, HEADS)]
        if not walls or self.stage not in ("", TRAIN, *home):
            return None
        pace = sum(walls) / len(walls)
        spent = max(0.0, now - self.began) if self.began else 0.0
        left, here = 0.0, self.stage
        if here in ("", TRAIN):
            remaining = self.plan.rounds - self.round
            left = pace * (remaining - 1) + max(0.0, pace - spent) if remaining else 0.0
        else:
            home = home[home.index(here) :]
        epoch = pace / (self.plan.training.local_epochs * self.plan.phases)
        for stage in home:
            epochs = _epochs(self.plan, stage)
            if stage != here:
                left += epochs * epoch
            elif stage == HEADS and len(self.epochs) > 1:  # its epochs are seen one by one
                each = (self.epochs[-1] - self.epochs[0]) / (len(self.epochs) - 1)
                left += max(0.0, each * (epochs - self.epoch + 1) - (now - self.epochs[-1]))
            else:
                left += max(0.0, epochs * epoch - spent)
        return left

    def summary(self, now: float) -> dict[str, Any]:
        """Returns how the run stands, as JSON: what `feddp watch` shows."""
        left = self.seconds_left(now)
        return {
            "method": self.plan.method,
            "network": self.plan.network,
            "round": self.round,
            "rounds": self.plan.rounds,
            "task": self.task,
            "of": self.of,
            "seconds_left": None if left is None else round(left, 1),
            "rough": self.rough,
            "sites": {name: self._row(self.sites[name], now) for name in sorted(self.sites)},
            "notes": list(self.notes),
        }

    @property
    def rough(self) -> bool:
        """Whether only a first round was measured, in which the sites also start and open their images."""
        return not self.paces

    def _row(self, site: SiteNow, now: float) -> dict[str, Any]:
        row = asdict(site) | {"since": round(max(0.0, now - site.since), 1)}
        usual = row.pop("usual")
        waited = now - self.asked
        if site.state in (WORKS, SENDS) and protocol.spec_of(self.task).kind is Kind.ROUND and 0 < usual < waited / SLOW:
            row |= {"state": LATE, "why": f"no answer for {waited:.0f} s; until now it came within {usual:.0f} s"}
        return row


def _epochs(plan: Plan, stage: str) -> int:
    return {
        TUNE: plan.tuning.tune_epochs,
        CALIBRATE: plan.calibration.calibration_epochs,
        HEADS: plan.heads.heads_epochs,
    }[stage]
