"""Live progress of a run, from the server's progress.jsonl."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from feddp.files import events_after
from feddp.plan.schema import Plan
from feddp.protocol import WITHHELD, Kind, spec_of


class Follower:
    """Shows the server's progress: a bar for the rounds, and lines per round with the sites' loss and Dice."""

    def __init__(self, plan: Plan, sites: Sequence[str], path: Path):
        self.plan, self.sites, self.path = plan, sites, path
        self._read = 0
        self._answers: dict[str, dict[str, Any]] = {}
        self._asked: list[str] = []

    def until(self, finished: Callable[[], bool], poll: float = 0.2) -> None:
        """Follows until `finished()`, then shows the remaining events."""
        console = Console(file=sys.stderr)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
        )
        with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
            task = bar.add_task(f"{self.plan.method}: starting {len(self.sites)} sites", total=self.plan.rounds)
            while True:
                last = finished()
                events, self._read = events_after(self.path, self._read)
                for event in events:
                    self._show(event, bar, task)
                if last:
                    return
                time.sleep(poll)

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
                scored = event["round"] - (spec.kind is Kind.ROUND)
                bar.console.print(f"round {scored} validation Dice: {self._values('dice')}")
            bar.update(task, description=f"{event['task']}: {', '.join(self._answers)} answered")
            if "iou_before" in spec.scalars and "epoch" not in event:  # skips the epochs of an exchange of heads
                scalars = event["scalars"]
                ious = [f"{scalars[name]:.3f}" if name in scalars else WITHHELD for name in ("iou_before", "iou")]
                gain = f"validation IoU {' -> '.join(ious)}, best epoch {scalars['epoch']}"
                bar.console.print(f"{event['task']} {event['site']}: {gain}")
        elif kind == "round":
            bar.update(task, completed=event["round"])
            losses = self._values("loss") or WITHHELD
            bar.console.print(f"round {event['round']}/{event['of']} ({event['seconds']:.1f} s)  loss: {losses}")
        elif kind == "resumed":
            bar.update(task, completed=event["round"])
            bar.console.print(f"continuing after round {event['round']} of {event['of']}")
        elif kind == "again":
            bar.console.print(
                f"site {event['site']} was started again, or lost the connection: it was given {event['task']} again"
            )
        elif kind == "returned":
            bar.console.print(f"site {event['site']} is back")
        elif kind == "damaged":
            bar.console.print(f"damaged: {event['message']}")
        elif kind == "empty":
            bar.console.print(f"warning: {event['message']}")
        elif kind == "refused":
            bar.console.print(f"refused: {event['reason']}")
        elif kind == "error":
            bar.console.print(f"error: {event['message']}")

    def _values(self, name: str) -> str:
        """Returns a scalar of every site that sent it, in one text; empty if none did."""
        values = {site: a["scalars"][name] for site, a in sorted(self._answers.items()) if name in a["scalars"]}
        return "  ".join(f"{site} {value:.3f}" for site, value in values.items())

    def _complete(self) -> bool:
        return self._answers.keys() == set(self._asked)
