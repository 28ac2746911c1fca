"""A sweep's folder: its record ``sweep.yaml``, its lock, a run directory per member, and its job arrays.

An array is recorded in three steps, so a crash at any moment leaves no unknown job: its folder, with the
batch script and a symbolic link to each member, before sbatch. The members' leases after it. Last, ``submitted.json``.

``compare`` has the members of a sweep at the same step, and the best one.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from clusterddp.errors import RunDirectoryError, UsageError
from clusterddp.jobdef.job import Job, best_metric
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.jobdef.yaml12 import fields_of, file_fields, get
from clusterddp.keys.node import Mistake, Node, raise_mistakes
from clusterddp.reporter import counted, show
from clusterddp.rundir.files import (
    at,
    create_file,
    create_folder,
    fsync_directory,
    hold,
    make_folder,
    symlink,
    write_atomically,
    write_json,
)
from clusterddp.rundir.ownership import check_own, check_place, delete_folder, warn_of_replaceable
from clusterddp.rundir.records import NOT_METRICS
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.rundir.summary import Summary
from clusterddp.runs.sweep_members import keys_of, short_keys, text_of
from clusterddp.slurm.run_states import RunState


@dataclass(frozen=True)
class Record:
    """What ``sweep.yaml`` holds. ``job``: the definition that the members vary, secrets masked. ``members``: the values
    of each, as text. ``left``: the members that an earlier definition had and the present one has not."""

    job: Job
    members: Mapping[str, Mapping[str, str]]
    left: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def to_yaml(self) -> str:
        """As ``read_record`` reads it."""
        job = "".join(f"  {line}\n" for line in without_secrets(self.job)[0].to_yaml().splitlines())
        named = {"members": self.members, **({"left": self.left} if self.left else {})}
        tables = {key: {name: dict(values) for name, values in table.items()} for key, table in named.items()}
        return f"job:\n{job}{yaml.safe_dump(tables, sort_keys=False, allow_unicode=True, width=2**20)}"


def read_record(folder: Path) -> Record | None:
    """The record of the sweep in a folder, or None if there is no sweep."""
    path = folder / SWEEP_FILE
    if not path.exists():
        return None
    mistakes: list[Mistake] = []
    fields = file_fields(path, mistakes)
    members, left = (_table(get(fields, key), mistakes) for key in ("members", "left"))
    raise_mistakes(mistakes)
    return Record(load_resolved(path, section="job"), members, left)


def _table(node: Node | None, mistakes: list[Mistake]) -> dict[str, dict[str, str]]:
    """Members with their values, as written."""
    rows = {str(name): fields_of(values, mistakes) for name, values in fields_of(node, mistakes).items()}
    return {name: {str(key): text_of(value) for key, value in row.items()} for name, row in rows.items()}


class Array:
    """The record of one job array: ``arrays/N`` with ``array.sbatch`` and, for task i, the link ``i`` to its member."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = path / "array.sbatch"
        self.submitted_file = path / "submitted.json"

    def members(self) -> list[str]:
        """The names of its members, by task."""
        tasks = sorted(int(name) for name in os.listdir(self.path) if name.isdecimal())
        return [(self.path / str(task)).readlink().name for task in tasks]

    def submitted(self, job_id: str) -> None:
        """Records that Slurm has it, and that its members' leases are written."""
        write_json(self.submitted_file, {"job": job_id})

    def remove(self) -> None:
        """Removes it, after Slurm has refused it."""
        delete_folder(self.path)


class SweepFolder:
    """The paths of one sweep, whose identity is its folder. Creating this object does not touch the disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.record_file = self.path / SWEEP_FILE
        self.lock_file = self.path / ".lock"
        self.arrays = self.path / "arrays"

    def __str__(self) -> str:
        return str(self.path)

    def member(self, name: str) -> RunDirectory:
        """The run directory of a member."""
        return RunDirectory(self.path / name)

    def check(self) -> None:
        """Raises RunDirectoryError if a sweep cannot be here."""
        check_place(self.path)
        hold(self.path)
        if RunDirectory(self.path).exists():
            raise RunDirectoryError(f"{self} is a run, not a sweep. Choose a different --run-dir")
        if self.path.exists() and not self.record_file.exists() and set(os.listdir(self.path)) - {".lock"}:
            raise RunDirectoryError(
                f"{self} is not empty and holds no sweep (no {SWEEP_FILE}). Choose a different --run-dir"
            )
        check_own(self.path)
        check_own(self.arrays)

    def create(self, share: str) -> None:
        """Creates the folder if it does not exist. ``share``: as in a job definition."""
        try:
            make_folder(self.path, exist_ok=False, mode=0o700)
            hold(self.path)
            warn_of_replaceable(self.path)
        except FileExistsError:
            return
        except OSError as error:
            raise UsageError(f"could not create {self}: {error.strerror}. Choose a different --run-dir") from error
        if share == "group":
            with at(self.path) as (name, above):
                os.chmod(name, 0o2750, dir_fd=above)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the folder: one command at a time plans and submits. It ends with the process."""
        with open(self.lock_file, "ab", opener=create_file) as file:
            try:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    show(f"Waiting for another command that submits {self}")
                    fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:  # a file system without locks, such as Lustre's by default
                show(
                    f"could not lock {self}: {error.strerror}. Do not start another command for this sweep until this "
                    "one has ended"
                )
            yield

    def write(self, record: Record) -> None:
        """Replaces the record."""
        write_atomically(self.record_file, record.to_yaml())

    # --- arrays

    def all_arrays(self) -> list[Array]:
        """All arrays so far, in their order."""
        names = os.listdir(self.arrays) if self.arrays.exists() else []
        return [Array(self.arrays / name) for name in sorted(filter(str.isdecimal, names), key=int)]

    def unfinished_arrays(self) -> list[Array]:
        """Those that were not recorded as submitted, because their command was killed."""
        return [array for array in self.all_arrays() if not array.submitted_file.exists()]

    def next_array(self) -> Array:
        """The path of the next one."""
        newest = max((int(array.path.name) for array in self.all_arrays()), default=-1)
        return Array(self.arrays / str(newest + 1))

    def prepare(self, array: Array, members: Sequence[str], script: str) -> None:
        """Writes the files of an array before it is submitted."""
        if not self.arrays.exists():
            create_folder(self.arrays)
        create_folder(array.path)
        for task, name in enumerate(members):
            symlink(array.path / str(task), Path("..", "..", name))
        write_atomically(array.script, script)
        fsync_directory(self.arrays)


_SAFE = re.compile(r"[^\w.+=@-]+")


def default_name(job: Job, keys: Sequence[str]) -> str:
    """The name of the folder of a sweep without a file: ``train-by-lr-seed``, the same for the same keys."""
    return _SAFE.sub("-", f"{job.name}-by-{'-'.join(keys)}")[:120]


Found: TypeAlias = "tuple[Summary, RunState]"
#: States of members that train, or continue once they can.
_UNDER_WAY = ("running", "held", "pending")


@dataclass(frozen=True)
class Comparison:
    """``values``: those of the members, by key (``lr=``, unlike a metric) and run directory. ``steps``: after how many
    steps the metrics are compared. None: each member's newest, because none is under way."""

    values: Mapping[str, Mapping[Path, str]]
    steps: int | None
    members: Sequence[Found]

    @property
    def sentence(self) -> str:
        """Which metrics are compared, for the user."""
        if self.steps is None:
            return "Metrics: the newest values of each member"
        return f"Metrics after {counted(self.steps, 'step')}, which all members in progress have reached"


def compare(members: Sequence[Found], metrics: Collection[str]) -> Comparison | None:
    """The members with their metrics at equal steps, or None unless all are members of one sweep."""
    folders = {summary.run.path.parent for summary, _ in members if summary.sweep is not None}
    if len(folders) != 1 or any(summary.sweep is None for summary, _ in members):
        return None
    record = read_record(*folders)
    if record is None:
        return None
    steps = common_steps(members)
    if steps is not None:
        members = [
            (replace(summary, metrics=metrics_after(summary.run, steps, metrics)) if metrics else summary, state)
            for summary, state in members
        ]
    return Comparison(_by_key(record, [summary.run for summary, _ in members]), steps, members)


def common_steps(members: Sequence[Found]) -> int | None:
    """The most steps that all members under way have done. None if none is. A member that waits for its first attempt
    does not count."""
    done = [summary.step for summary, state in members if state.word in _UNDER_WAY and summary.step is not None]
    return min(done, default=None)


def metrics_after(run: RunDirectory, steps: int, names: Collection[str]) -> dict[str, Any]:
    """The newest values of these metrics after this many steps, as a metrics line."""
    found: dict[str, Any] = {}
    for line in reversed(run.logged()):
        if line["step"] < steps:
            found = {**{name: value for name, value in line.items() if not found or name in names}, **found}
            if all(name in found for name in names):
                break
    return found


def _by_key(record: Record, runs: Sequence[RunDirectory]) -> dict[str, dict[Path, str]]:
    known = {**record.left, **record.members}
    return {
        f"{name}=": {run.path: known[run.path.name][key] for run in runs if key in known.get(run.path.name, {})}
        for key, name in short_keys(keys_of(known.values())).items()
    }


# --- the best


@dataclass(frozen=True)
class Best:
    """The member with the best value of a metric."""

    run: RunDirectory
    metric: str
    value: float
    smallest: bool

    @property
    def sentence(self) -> str:
        """Its name, and the command that exports its newest model."""
        order = "smallest" if self.smallest else "largest"
        return f"{order} {self.metric}: {self.value:.6g}, {self.run.path.name}"


def metric_of(text: str) -> tuple[str, bool]:
    """The metric in ``accuracy``, ``accuracy max`` or ``loss min``, and whether its smallest value is best."""
    if (found := best_metric(text)) is None:
        raise UsageError(f"--best {text}: expected the name of a metric, optionally with max or min, such as 'f1 max'")
    return found


def best(members: Sequence[Found], text: str) -> Best:
    """The best member, among those that completed or are under way. Raises UsageError if none has logged the metric."""
    metric, smallest = metric_of(text)
    ranked: list[tuple[float, RunDirectory]] = []
    for summary, state in members:
        value = summary.metrics.get(metric)
        if state.word in ("completed", *_UNDER_WAY) and _is_number(value):
            ranked.append((float(value or 0), summary.run))
    if not ranked:
        names = sorted({name for summary, _ in members for name in summary.metrics} - NOT_METRICS)
        raise UsageError(f"--best {text}: no member has logged {metric}. Logged: {', '.join(names) or 'nothing'}")
    value, run = min(ranked, key=lambda pair: (pair[0] if smallest else -pair[0], pair[1].path.name))
    return Best(run, metric, value, smallest)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)
