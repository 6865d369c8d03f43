"""What the server's progress.jsonl says of a finished run: validation curves, seconds, bytes."""

import numpy as np

from feddp import protocol
from feddp.files import Event
from feddp.methods.base import SPECTRA, TRAIN


def curves(events: list[Event]) -> dict[str, dict[int, float]]:
    """{site: {round: IoU}} on the split that selects; a run without a federation has one site, the pool."""
    found: dict[str, dict[int, float]] = {}
    for event in events:
        if event["event"] == "answer" and _is_joint(event) and "iou" in event.get("scalars", {}):
            # a round's network is scored when it comes back as the mean, at the start of the next
            scored = event["round"] - (event["task"] == protocol.TRAIN)
            found.setdefault(event["site"], {})[scored] = event["scalars"]["iou"]
    return found


def mean_curve(sites: dict[str, dict[int, float]]) -> dict[int, float]:
    """{round: mean IoU over the sites}, of the rounds that every site has."""
    common = set.intersection(*(set(curve) for curve in sites.values())) if sites else set()
    return {round: float(np.mean([curve[round] for curve in sites.values()])) for round in sorted(common)}


def train_seconds(events: list[Event]) -> float:
    """The rounds' wall-clock seconds."""
    return sum(event["seconds"] for event in events if event["event"] == "round")


def home_seconds(events: list[Event]) -> float:
    """Wall-clock seconds from the first question of the stages at home to their last answer; 0 without such a stage."""
    asked = [event["time"] for event in events if event["event"] == "ask" and _is_home(event)]
    answered = [event["time"] for event in events if event["event"] == "answer" and _is_home(event)]
    return max(answered) - min(asked) if asked and answered else 0.0


def traffic(events: list[Event]) -> tuple[int, int] | None:
    """Bytes of tensors that the server sent and received (in stage 1, in the stages at home); None without a federation."""
    counted = [event for event in events if event["event"] in ("ask", "answer") and "bytes" in event]
    if not counted:
        return None
    joint = sum(_bytes(event) for event in counted if _is_joint(event))
    return joint, sum(_bytes(event) for event in counted if _is_home(event))


def _is_joint(event: Event) -> bool:
    """Of stage 1, or before it."""
    return protocol.spec_of(event["task"]).stage in (SPECTRA, TRAIN)


def _is_home(event: Event) -> bool:
    return not _is_joint(event) and event["task"] != protocol.EVALUATE


def _bytes(event: Event) -> int:
    """An answer's own; a question's to all sites."""
    return event["bytes"] if event["event"] == "answer" else sum(event["bytes"].values())
