"""Live progress of a run, from the server's progress.jsonl and, on request, from the logs."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console  # noqa: TID251 (the type)
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn  # noqa: TID251 (the type)

from feddp.files import events_after
from feddp.plan.schema import Plan
from feddp.protocol import ADOPT, WITHHELD, Kind, spec_of
from feddp.reading import plain_line, transferred
from feddp.reporting.standing import time_left
from feddp.stages.events import BACK
from feddp.stages.standing import Standing
from feddp.terminal import progress

Logs = Callable[[], Mapping[str, Path]]  # the logs that there are now, by the names that begin their lines


class Follower:
    """Shows the server's progress: a bar for the rounds with the time left, and lines per round with the sites' loss and Dice.

    Args:
        logs: the logs whose lines are shown too.
    """

    def __init__(self, plan: Plan, sites: Sequence[str], path: Path, logs: Logs = dict):
        self.plan, self.sites, self.path, self.logs = plan, sites, path, logs
        self._standing = Standing(plan)
        self._read, self._shown = 0, dict[Path, int]()
        self._answers: dict[str, dict[str, Any]] = {}
        self._asked: list[str] = []

    def until(self, finished: Callable[[], bool], poll: float = 0.2) -> None:
        """Follows until `finished()`, then shows the remaining events."""
        columns = SpinnerColumn(), "{task.description}", BarColumn(), "{task.completed}/{task.total}", TimeElapsedColumn()
        with progress(*columns, "{task.fields[left]}") as bar:
            task = bar.add_task(f"{self.plan.method}: starting {len(self.sites)} sites", total=self.plan.rounds, left="")
            while True:
                last = finished()
                events, self._read = events_after(self.path, self._read)
                for event in events:
                    self._standing.add(event)
                    self._show(event, bar, task)
                bar.update(task, left="" if last else self._left(time.time()))
                self._show_logs(bar.console)
                if last:
                    return
                time.sleep(poll)

    def _left(self, now: float) -> str:
        return time_left(self._standing.seconds_left(now), self._standing.rough)

    def _show_logs(self, console: Console) -> None:
        for name, path in self.logs().items():
            if path.exists():
                with open(path, "rb") as log:
                    log.seek(self._shown.get(path, 0))
                    content = log.read()
                end = content.rfind(b"\n") + 1
                self._shown[path] = self._shown.get(path, 0) + end
                for line in content[:end].decode(errors="replace").splitlines():
                    console.print(plain_line(f"{name}: {line}"), style="dim", soft_wrap=True)

    def _show(self, event: dict[str, Any], bar: Progress, task: Any) -> None:
        kind = event["event"]
        if kind == "ask":
            self._answers, self._asked = {}, event["sites"]
            where = f" round {event['round']}" if "round" in event else ""
            bar.update(task, description=f"{event['task']}{where}: waiting for {len(event['sites'])} sites")
        elif kind == "answer":
            self._answers[event["site"]], spec = event, spec_of(event["task"])
            if "dice" in spec.scalars and self._complete() and self._values("dice"):
                # the sites score the mean of a round at the start of the next round
                which = f"round {event['round'] - (spec.kind is Kind.ROUND)}"
                if event["task"] == ADOPT and self.plan.best_per_site:
                    which = "each site's own best round"
                _line(bar, f"{which} validation Dice: {self._values('dice')}")
            bar.update(task, description=f"{event['task']}: {', '.join(self._answers)} answered")
            if "iou_before" in spec.scalars and "epoch" not in event:  # skips the epochs of an exchange of heads
                scalars = event["scalars"]
                ious = [f"{scalars[name]:.3f}" if name in scalars else WITHHELD for name in ("iou_before", "iou")]
                gain = f"validation IoU {' -> '.join(ious)}, best epoch {scalars['epoch']}"
                _line(bar, f"{event['task']} {event['site']}: {gain}")
        elif kind == "round":
            bar.update(task, completed=event["round"])
            losses = self._values("loss") or WITHHELD
            left = self._left(event["time"]) if event["round"] < event["of"] else ""
            # a terminal has it beside the bar, where it runs
            left = f"  {left}" if left and not bar.console.is_terminal else ""
            _line(bar, f"round {event['round']}/{event['of']} ({event['seconds']:.1f} s)  loss: {losses}{left}")
        elif kind == "resumed":
            bar.update(task, completed=event["round"])
            _line(bar, f"continuing after round {event['round']} of {event['of']}")
        elif kind == "again":
            _line(bar, f"site {event['site']} was started again, or lost the connection: it was given {event['task']} again")
        elif kind == "transfer":
            way = "from" if event["way"] == BACK else "to"
            far = transferred(event["moved"], event["size"], event["rate"])
            _line(bar, f"slow line {way} {event['site']}: {event['task']}, {far}")
        elif kind == "returned":
            _line(bar, f"site {event['site']} is back")
        elif kind == "damaged":
            _line(bar, f"damaged: {event['message']}")
        elif kind in ("empty", "versions"):
            _line(bar, f"warning: {event['message']}")
        elif kind == "certificate":
            _line(bar, event["message"])
        elif kind == "refused":
            _line(bar, f"refused: {event['reason']}")
        elif kind == "error":
            _line(bar, f"error: {event['message']}")

    def _values(self, name: str) -> str:
        """Returns a scalar of every site that sent it, in one text; empty if none did."""
        values = {site: a["scalars"][name] for site, a in sorted(self._answers.items()) if name in a["scalars"]}
        return "  ".join(f"{site} {value:.3f}" for site, value in values.items())

    def _complete(self) -> bool:
        return self._answers.keys() == set(self._asked)


def _line(bar: Progress, text: str) -> None:
    bar.console.print(plain_line(text), soft_wrap=True)  # a file's lines are not cut at 80 characters
