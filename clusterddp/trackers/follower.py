"""The process that sends a run's metrics to one tracker, beside the training.

``python -m clusterddp.trackers.follower ARGUMENTS``, a JSON object. Rank 0 starts it, and sends the step of each
committed checkpoint on standard input, one per line, and at last ``end``. A problem is one line on standard output. The
output of the tracker's package goes to standard error. The metrics come from ``metrics.jsonl``, the truth about what
counts, so that values survive if this process is killed: the next attempt begins with those that the tracker lacks.

TensorBoard gets an event file per attempt, whose first event has it discard the steps that the attempt repeats. W&B and
MLflow have one run for all attempts, which gets each step once, when it is below a checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import select
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TextIO

import wandb
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from clusterddp.errors import RunDirectoryError, Superseded
from clusterddp.process import die_with_parent
from clusterddp.reporter import in_words
from clusterddp.rundir.files import create_file, create_folder, fsync_directory, fsync_file_system
from clusterddp.rundir.records import NOT_METRICS, counts
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.sent import Line, Lines, Sent, read_sent, write_sent

#: The most values, and the most parameters, that MLflow's server takes at once.
MOST_METRICS, MOST_PARAMS = 1000, 100
#: The tag that identifies a run whose name was not recorded, and the prefix of its value in ``Sent.id``.
TAG, CREATING = "clusterddp", "creating "
#: Characters that MLflow does not take in the name of a metric or a parameter.
_ODD = re.compile(r"[^\w\-. :/]")


class MLflow:
    """The server has the last step of each metric, so that values which were sent just before this process was killed
    are not sent twice."""

    #: Takes only steps that no later attempt repeats, because MLflow cannot replace the values of a step.
    live = False

    def __init__(self, folder: Path, sent: Sent, attempt: int, options: Mapping[str, Any]) -> None:
        self._folder, self._client = folder, MlflowClient(options.get("tracking_uri"))
        self._sent = replace(sent, attempt=attempt)
        run = self._own_run(options)
        self._id = run.info.run_id
        #: The first step that MLflow may lack.
        self.first = sent.step
        self._last = {metric.key: metric.step for metric in run.data._metric_objs}
        self._metrics: list[Metric] = []
        missing = {_ODD.sub("_", name): value for name, value in options["config"].items()}
        params = [Param(name, str(value)) for name, value in missing.items() if name not in run.data.params]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])
        self._client.update_run(self._id, "RUNNING")

    def _own_run(self, options: Mapping[str, Any]) -> Run:
        """The run in MLflow: that of earlier attempts, or a new one."""
        if self._sent.id is not None and not self._sent.id.startswith(CREATING):
            return self._client.get_run(self._sent.id)
        token = secrets.token_hex(16) if self._sent.id is None else self._sent.id.removeprefix(CREATING)
        experiment = self._experiment(options["experiment"])
        found = self._client.search_runs([experiment], f"tags.{TAG} = '{token}'")
        if not found:
            write_sent(self._folder, replace(self._sent, id=CREATING + token))  # before the server has the run
            found = [self._client.create_run(experiment, tags={TAG: token}, run_name=options["name"])]
        self._sent = replace(self._sent, id=found[0].info.run_id)
        write_sent(self._folder, self._sent)
        return self._client.get_run(found[0].info.run_id)

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run may have just created it
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Sends the values of a step. ``at``: when they were logged."""
        for name, value in values.items():
            key = _ODD.sub("_", name)
            if step > self._last.get(key, -1):
                self._metrics.append(Metric(key, float(value), round(at * 1000), step))
        if len(self._metrics) >= MOST_METRICS:
            self._send()

    def _send(self) -> None:
        for begin in range(0, len(self._metrics), MOST_METRICS):
            self._client.log_batch(self._id, self._metrics[begin : begin + MOST_METRICS])
        self._metrics.clear()

    def flush(self, step: int | None) -> Sent:
        """Sends the added values. Returns what MLflow has for certain."""
        self._send()
        if step is not None:
            self._sent = replace(self._sent, step=step)
        return self._sent

    def close(self, step: int, clean: bool) -> Sent:
        """Ends the run in MLflow, which a later attempt continues."""
        sent = self.flush(step)
        self._client.set_terminated(self._id, "FINISHED" if clean else "FAILED")
        return sent


class WeightsAndBiases:
    """Online, W&B's server has the steps that it got. Offline, each attempt writes files into a folder below ``open``,
    which are complete once they are closed. Until then, W&B keeps up to 32 kB in memory. The folder is then moved out.
    One that was not closed is deleted, and its steps are written again."""

    #: Takes only steps that no later attempt repeats, because W&B cannot replace the values of a step.
    live = False

    def __init__(self, folder: Path, sent: Sent, attempt: int, options: Mapping[str, Any]) -> None:
        self._folder, self._open = folder, folder / "open"
        if sent.closing is not None:
            self._move_out(sent.closing)
        if self._open.exists():
            shutil.rmtree(self._open)
        create_folder(self._open)
        sent = replace(sent, id=sent.id or secrets.token_hex(4), attempt=attempt, closing=None)
        write_sent(folder, sent)  # the id, before W&B's server has it
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(**options, id=sent.id, resume="allow", dir=self._open, settings=settings)
        self._offline = self._run.offline
        #: The first step that W&B lacks.
        self.first = sent.step if self._offline else self._run.starting_step
        self._sent = replace(sent, mode="offline" if self._offline else "online")
        write_sent(folder, self._sent)

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Sends the values of a step. ``at``: when they were logged."""
        self._run.log({**values, "_timestamp": at}, step=step)

    def flush(self, step: int | None) -> Sent:
        """Returns what W&B has for certain, which offline is only the content of closed files."""
        if step is not None and not self._offline:
            self._sent = replace(self._sent, step=step)
        return self._sent

    def close(self, step: int, clean: bool) -> Sent:
        """Waits until W&B has all values."""
        written = Path(self._run.dir).parent
        self._run.finish(exit_code=0 if clean else 1)
        self._sent = replace(self._sent, step=step)
        if self._offline:
            fsync_file_system(written)
            write_sent(self._folder, replace(self._sent, closing=written.name))
            self._move_out(written.name)
        return self._sent

    def _move_out(self, name: str) -> None:
        """Moves a complete folder to those that ``status`` lists for upload, unless that was done."""
        written = self._open / "wandb" / name
        if written.exists():
            written.rename(self._folder / name)
            fsync_directory(self._folder)


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
        int(match[1]) for name in os.listdir(folder) if (match := re.match(r"events\.out\.tfevents\.(\d+)\.", name))
    ]
    number = max([int(time.time()), *(number + 1 for number in numbers)])
    return folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.attempt-{attempt}"


#: Seconds between two looks for new lines, for a tracker that takes them at once.
PERIOD_S = 1.0


class Tracker(Protocol):
    """The interface to TensorBoard, W&B and MLflow."""

    live: bool
    first: int

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Takes the values of a step that were logged ``at`` that time."""
        ...

    def flush(self, step: int | None) -> Sent:
        """Shows them. ``step``: all below it were added. Returns what the tracker has for certain."""
        ...

    def close(self, step: int, clean: bool) -> Sent:
        """Ends it, once everything below ``step`` is safe."""
        ...


class Follower:
    """Sends one tracker each line that counts, once."""

    def __init__(self, run: RunDirectory, attempt: int, folder: Path, tracker: Tracker) -> None:
        self._run, self._attempt, self._folder, self._tracker = run, attempt, folder, tracker
        self._lines = Lines(run.metrics_file, counts(run.first_steps()), tracker.first)
        self._committed = -1

    def send(self, committed: int) -> None:
        """Sends new lines: the steps below a checkpoint, or all if the tracker is live. Raises Superseded."""
        more = committed > self._committed
        if more:
            self._check_newest()
        self._committed = committed
        for line in self._lines.below(math.inf if self._tracker.live else committed):
            self._add(line)
        sent = self._tracker.flush(committed if more else None)
        if more:
            write_sent(self._folder, sent)

    def close(self, clean: bool) -> None:
        """Ends the tracker. Raises Superseded."""
        self._check_newest()
        write_sent(self._folder, self._tracker.close(self._committed, clean))

    def _add(self, line: Line) -> None:
        values = {
            name: value for name, value in line.items() if name not in NOT_METRICS and isinstance(value, (int, float))
        }
        if values:
            self._tracker.add(line["step"], float(line.get("time", 0.0)), values)

    def _check_newest(self) -> None:
        if self._run.superseded(self._attempt):
            raise Superseded(f"attempt {self._attempt} was superseded")


class Orders:
    """The orders of rank 0. They end when it exits."""

    def __init__(self, committed: int) -> None:
        self.committed = committed
        self.ended = self.clean = False
        self._rest = b""

    def wait(self, seconds: float | None) -> None:
        """Waits for an order, at most this many seconds."""
        if not select.select([0], [], [], seconds)[0]:
            return
        said = os.read(0, 1 << 16)
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            if line.isdigit():
                self.committed = int(line)
            else:
                self.ended, self.clean = True, line == b"end"
        self.ended |= not said


def main() -> int:
    """Serves rank 0 until the attempt ends."""
    die_with_parent()
    given = json.loads(sys.argv[1])
    out, sys.stdout = sys.stdout, sys.stderr  # a package may print
    orders = Orders(given["committed"])
    try:
        follow(given["tracker"], RunDirectory(given["run"]), given["attempt"], given["options"], orders, out)
    except Superseded:
        return 0
    except Exception as error:
        traceback.print_exc()
        print(f"gets no more values in this attempt: {in_words(error)}", file=out, flush=True)
        return 1
    return 0


def follow(name: str, run: RunDirectory, attempt: int, options: Mapping[str, Any], orders: Orders, out: TextIO) -> None:
    """Sends until the orders end. Writes messages for the user to ``out``. Raises the tracker's errors, which it also
    records for ``status``, and Superseded."""
    folder = folder_of(name, run)
    try:
        create_folder(folder, exist_ok=True)
        with open(folder / "lock", "ab") as lock:
            _lock(lock.fileno())
            tracker = _tracker(name, run, folder, attempt, options, out)
            follower = Follower(run, attempt, folder, tracker)
            follower.send(orders.committed)
            while not orders.ended:
                orders.wait(PERIOD_S if tracker.live else None)
                follower.send(orders.committed)
            follower.close(orders.clean)
    except Superseded:
        raise
    except Exception as error:
        _record_problem(folder, in_words(error))
        raise


def folder_of(name: str, run: RunDirectory) -> Path:
    """Where a tracker's files are."""
    return {"tensorboard": run.tensorboard, "wandb": run.wandb, "mlflow": run.mlflow}[name]


def _tracker(
    name: str, run: RunDirectory, folder: Path, attempt: int, options: Mapping[str, Any], out: TextIO
) -> Tracker:
    sent = replace(read_sent(folder) or Sent(), problem=None)
    first = sent.lacks_from(run.first_steps())
    if name == "tensorboard":
        return TensorBoard(folder, replace(sent, step=first, attempt=attempt), first, attempt)
    if first < sent.step:
        steps = f"{first} to {sent.step - 1}"
        print(f"keeps the values that an earlier attempt logged in steps {steps}, now repeated", file=out, flush=True)
    if name == "wandb":
        return WeightsAndBiases(folder, sent, attempt, options)

    return MLflow(folder, sent, attempt, options)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryError("another process of this run is already sending to this tracker") from None


def _record_problem(folder: Path, words: str) -> None:
    """For ``status``."""
    try:
        write_sent(folder, replace(read_sent(folder) or Sent(), problem=words))
    except (OSError, RunDirectoryError):
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
