"""TensorBoard's event files of a run, written with the formats of the package `tensorboard`, without a thread of its own."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from feddp.tracking.curves import Scalar


class Board:
    """Writes scalars to an event file, complete after each call.

    Args:
        folder: the folder of the file; an earlier attempt's is removed, because all events of the run are given again.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path):
        if folder.exists():
            shutil.rmtree(folder)
        self._folder = folder
        self._file: IO[bytes] | None = None

    def write(self, scalars: Sequence[Scalar]) -> None:
        # imported here: a command that runs nothing, and a site, do not load it
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        file = self._file
        if file is None:
            self._folder.mkdir(parents=True)
            # the form of the name by which TensorBoard finds the file, without the server's host name
            path = self._folder / f"events.out.tfevents.{int(scalars[0].time):010d}.feddp"
            self._file = file = open(path, "wb")  # noqa: SIM115
            RecordWriter(file).write(Record(wall_time=scalars[0].time, file_version="brain.Event:2").SerializeToString())
        records = RecordWriter(file)
        for scalar in scalars:
            summary = Summary(value=[Summary.Value(tag=scalar.tag, simple_value=scalar.value)])
            records.write(Record(wall_time=scalar.time, step=scalar.step, summary=summary).SerializeToString())
        file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
