"""What trackers have of a run: by TensorBoard's own reader, W&B's protocol buffers, and MLflow's client."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clusterddp.rundir.run_directory import RunDirectory

#: A value of a step.
Point = tuple[int, Any]


def counted(run: RunDirectory) -> list[dict[str, Any]]:
    """The metrics lines of steps that count, by the rule, in the order of steps."""
    lines = [json.loads(text) for text in run.metrics_file.read_text().splitlines()]
    events = [json.loads(text) for text in run.events_file.read_text().splitlines()]
    begun = {event["attempt"]: event["step"] for event in events if event["event"] == "resumed"}
    kept = [
        line
        for line in lines
        if "event" not in line
        and not any(later > line["attempt"] and step <= line["step"] for later, step in begun.items())
    ]
    return sorted(kept, key=lambda line: int(line["step"]))


def in_tensorboard(run: RunDirectory) -> Any:
    """TensorBoard's view of the run, with all points: it discards what a later attempt has repeated."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def scalars(run: RunDirectory, name: str) -> list[Point]:
    """A metric in TensorBoard."""
    return [(event.step, event.value) for event in in_tensorboard(run).Scalars(name)]


def in_wandb(run: RunDirectory) -> list[tuple[str, list[dict[str, Any]]]]:
    """The id of the W&B run and the history of each offline file, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb")):
        records = [Record.FromString(record) for record in _records(path)]
        (name,) = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        found.append((name, rows))
    return found


def in_mlflow(run: RunDirectory) -> tuple[Any, Callable[[str], list[Any]]]:
    """The run in MLflow's database beside the run directory, which is the only one there, and a metric's values."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.path.parent}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    return found, lambda name: list(client.get_metric_history(found.info.run_id, name))


def _records(path: Path) -> Iterator[bytes]:
    """LevelDB's log format behind a header of 7 bytes: a record may be cut into pieces at the ends of blocks."""
    content, position, pieces = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while position + 7 <= len(content):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        pieces += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""
