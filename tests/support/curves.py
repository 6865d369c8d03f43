"""TensorBoard's event files as TensorBoard reads them."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def curves_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """{tag: [(step, value)]} of the files in a folder."""
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return {tag: [(point.step, point.value) for point in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
