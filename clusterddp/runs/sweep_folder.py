"""A sweep's folder: its record ``sweep.yaml``, its lock, a run directory per member, and its job arrays.

An array is recorded in three steps, so a crash at any moment leaves no unknown job: its folder, with the
batch script and a symbolic link to each member, before sbatch. The members' leases after it. Last, ``submitted.json``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from clusterddp.errors import RunDirectoryError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.schema import fields_of, file_fields, get
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.jobdef.yaml12 import Mistake, Node, raise_mistakes
from clusterddp.reporter import show
from clusterddp.rundir.files import create_folder, fsync_directory, make_folder, write_atomically, write_json
from clusterddp.rundir.ownership import check_own, check_place
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.runs.sweep_members import text_of


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
        shutil.rmtree(self.path)


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
        except FileExistsError:
            return
        except OSError as error:
            raise UsageError(f"could not create {self}: {error.strerror}. Choose a different --run-dir") from error
        if share == "group":
            self.path.chmod(0o2750)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the folder: one command at a time plans and submits. It ends with the process."""
        with open(self.lock_file, "ab") as file:
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
            (array.path / str(task)).symlink_to(Path("..", "..", name))
        write_atomically(array.script, script)
        fsync_directory(self.arrays)


_SAFE = re.compile(r"[^\w.+=@-]+")


def default_name(job: Job, keys: Sequence[str]) -> str:
    """The name of the folder of a sweep without a file: ``train-by-lr-seed``, the same for the same keys."""
    return _SAFE.sub("-", f"{job.name}-by-{'-'.join(keys)}")[:120]
