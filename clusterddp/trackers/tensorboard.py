"""TensorBoard: an event file per attempt, whose first event has TensorBoard discard the steps that it repeats."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from clusterddp.rundir.files import create_file, fsync_directory, names_in
from clusterddp.trackers.sent import Sent


class TensorBoard:
    """Writes without TensorFlow, and without tensorboard's own file writer, whose files cannot be synced or named."""

    #: Takes the lines of all steps at once, because TensorBoard discards those that a later attempt repeats.
    live = True

    def __init__(self, folder: Path, sent: Sent, first: int, attempt: int) -> None:
        #: The first step that this writer takes.
        self.first = first
        self._sent = sent
        self._file = open(_new_file(folder, attempt), "wb", opener=create_file)
        fsync_directory(folder)
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), step=first, file_version="brain.Event:2"))
        self._add(Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Writes the values of a step."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._add(Event(wall_time=at, step=step, summary=summary))

    def flush(self, step: int | None) -> Sent:
        """Shows TensorBoard the written values, durably if all below ``step`` were written. Returns what TensorBoard
        has for certain."""
        self._file.flush()
        if step is not None:
            os.fsync(self._file.fileno())
            self._sent = replace(self._sent, step=step)
        return self._sent

    def close(self, step: int, clean: bool) -> Sent:  # noqa: ARG002
        """Ends the file."""
        sent = self.flush(step)
        self._file.close()
        return sent

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def _new_file(folder: Path, attempt: int) -> Path:
    """A name that sorts after all others, so that TensorBoard reads it last. The clocks of two nodes may differ."""
    numbers = [
        int(match[1]) for name in names_in(folder) if (match := re.match(r"events\.out\.tfevents\.(\d+)\.", name))
    ]
    number = max([int(time.time()), *(number + 1 for number in numbers)])
    return folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.attempt-{attempt}"
