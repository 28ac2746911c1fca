"""TensorBoard: an event file per attempt, whose first event has TensorBoard discard the steps that it repeats."""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterddp.keys.kinds import TRUTH
from clusterddp.rundir.files import create_file, fsync_directory, names_in
from clusterddp.trackers.delivery import Sent
from clusterddp.trackers.tracker import Tracker


class TensorBoard(Tracker):
    """TensorBoard."""

    key, name = "tensorboard", "TensorBoard"
    kind = replace(TRUTH, writer=bool)
    meaning = "Whether to also write the run's metrics for TensorBoard, into its folder `tensorboard`."
    files = "TensorBoard's event files, one per attempt, with ``tensorboard: true``."
    live = True

    def open(self, folder: Path, sent: Sent, options: Mapping[str, Any]) -> EventFile:  # noqa: ARG002
        """As every tracker."""
        return EventFile(folder, sent)

    def described(self, folder: Path, sent: Sent) -> str:  # noqa: ARG002
        """As every tracker."""
        return f"view it with: tensorboard --logdir {shlex.quote(str(folder))}"


TRACKER = TensorBoard()


class EventFile:
    """Written without TensorFlow, and without tensorboard's own file writer, whose files cannot be synced or named."""

    def __init__(self, folder: Path, sent: Sent) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        #: The first step that this file has.
        self.first = sent.step
        self._sent = sent
        self._file = open(_new_file(folder, sent.attempt), "wb", opener=create_file)
        fsync_directory(folder)
        self._records = RecordWriter(self._file)
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(self._event(wall_time=time.time(), step=self.first, file_version="brain.Event:2"))
        self._add(self._event(wall_time=time.time(), step=self.first, session_log=session))

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Writes the values of a step."""
        made = self._summary.Value
        summary = self._summary(value=[made(tag=name, simple_value=value) for name, value in values.items()])
        self._add(self._event(wall_time=at, step=step, summary=summary))

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

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _new_file(folder: Path, attempt: int) -> Path:
    """A name that sorts after all others, so that TensorBoard reads it last. The clocks of two nodes may differ."""
    numbers = [
        int(match[1]) for name in names_in(folder) if (match := re.match(r"events\.out\.tfevents\.(\d+)\.", name))
    ]
    number = max([int(time.time()), *(number + 1 for number in numbers)])
    return folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.attempt-{attempt}"
