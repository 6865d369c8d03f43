"""The round that stage 1 selects: the highest mean validation IoU over the sites; of equal rounds, the first."""

from types import SimpleNamespace

import pytest

from feddp.stages.message import Message
from feddp.stages.train import Best


@pytest.mark.parametrize(
    ("scores", "best", "kept"),
    [
        ([(0.4, 0.6), (0.7, 0.7), (0.8, 0.6), (0.5, 0.7)], 2, [1, 2]),
        ([(0.5, 0.5), (0.4, 0.6), (0.6, 0.4)], 1, [1]),
        ([(0.0, 0.0), (0.0, 0.0)], 1, [1]),
        ([(0.2, 0.4), (0.1, 0.9), (0.6, 0.6)], 3, [1, 2, 3]),
    ],
)
def test_of_equal_rounds_the_first_is_the_best(scores, best, kept):
    """Means 0.5, 0.7, 0.7, 0.6: round 2, though round 3 is equal. 0.5 three times: round 1. 0 is better than none.
    0.3, 0.5, 0.6: the last."""
    marked = []
    memory = SimpleNamespace(best_iou=None, best_round=None, keep_best=lambda: marked.append(memory.best_round))
    tracker = Best(SimpleNamespace(memory=memory, plan=SimpleNamespace(start="best")))
    for round, ious in enumerate(scores, 1):
        tracker.note(round, {site: Message(scalars={"iou": iou}) for site, iou in zip("AB", ious, strict=True)})
    assert memory.best_round == best
    assert marked == kept
