"""A sweep whose only member is the run, and a copy of its checkpoint for a new run, as of ``submit --fork``.

``clusterddp/runs/sweep_submission.py``, and ``copy_checkpoint`` of ``recording.py``, run as they are. Replaced are the
files of a sweep's folder, and what a submission writes into a run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from clusterddp.checkpoint.sharded import folder as shard_folder
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import RunDirectoryError, SlurmError
from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import recording, sweep_submission
from clusterddp.runs.sweep_members import Record
from clusterddp.runs.sweep_submission import Array, SweepFolder
from tests.simulation.disk import Disk
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.history import History

#: For how long a copy of a checkpoint takes.
COPY_S = 2.0


class Folder(SweepFolder):
    """The folder of the sweep, on the simulated disk."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path)
        self._disk = disk

    def check(self) -> None:
        """The folder is ours."""

    def create(self, share: str) -> None:
        """As in sweep_submission.py."""
        self._disk.make_folder(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """flock, which ends with the process."""
        world, locks = self._disk.world, self._disk.locks
        while (holder := locks.get(str(self.lock_file))) is not None and holder.alive:
            world.sleep(0.5)
        locks[str(self.lock_file)] = world.process
        try:
            yield
        finally:
            locks[str(self.lock_file)] = None

    def write(self, record: Record) -> None:
        """Replaces the record."""
        self._disk.write_atomically(self.record_file, "\n".join(record.members))

    def all_arrays(self) -> list[Array]:
        """As in sweep_submission.py."""
        names = self._disk.names_in(self.arrays) if self._disk.exists(self.arrays) else []
        return [_Array(self.arrays / name, self._disk) for name in sorted(names, key=int)]

    def unfinished_arrays(self) -> list[Array]:
        """As in sweep_submission.py."""
        return [array for array in self.all_arrays() if not self._disk.exists(array.submitted_file)]

    def next_array(self) -> Array:
        """As in sweep_submission.py."""
        return _Array(super().next_array().path, self._disk)

    def prepare(self, array: Array, members: Sequence[str], script: str) -> None:
        """As in sweep_submission.py."""
        self._disk.make_folder(self.arrays)
        self._disk.create_folder(array.path)
        for task, name in enumerate(members):
            self._disk.write_atomically(array.path / str(task), name)
        self._disk.write_atomically(array.script, script)


class _Array(Array):
    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path)
        self._disk = disk

    def members(self) -> list[str]:
        tasks = sorted(filter(str.isdecimal, self._disk.names_in(self.path)), key=int)
        return [self._disk.read_bytes(self.path / task).decode() for task in tasks]

    def remove(self) -> None:
        for name in self._disk.names_in(self.path):
            self._disk.unlink(self.path / name)
        self._disk.unlink(self.path)


class _Serially:
    """``ThreadPoolExecutor``, one task after the other."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> _Serially:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @staticmethod
    def map(work: Callable[..., Any], *values: Iterable[Any]) -> Iterator[Any]:
        """As ``map``."""
        return map(work, *values)


class _Copied(PosixPath):
    """A path of the simulated disk."""

    def chmod(self, mode: int, *, follow_symlinks: bool = True) -> None:
        """Files have no mode here."""


class _Stored(Checkpoints):
    def temporary(self, step: int) -> Path:
        return _Copied(super().temporary(step))


@contextmanager
def without_outcome(disk: Disk, run: RunDirectory) -> Iterator[None]:
    """Removes the outcome of a run that continues, and restores it if Slurm refuses the job. RunDirectoryError if the
    run has completed meanwhile."""
    before = disk.read_bytes(run.outcome_file) if disk.exists(run.outcome_file) else None
    if before is not None and recording.has_completed(run):  # a shared disk may have hidden it before
        raise RunDirectoryError(f"{run} has completed since this command began")
    if before is not None:
        disk.remove(run.outcome_file)
    try:
        yield
    except SlurmError:
        if before is not None:
            disk.write_atomically(run.outcome_file, before)
        raise


def patches(now: SimpleNamespace) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: (module, name, by what). ``now``: with the disk of the history that plays."""

    def recorded(run: RunDirectory, *_: object) -> AbstractContextManager[None]:
        return without_outcome(now.disk, run)

    def read_record(folder: Path) -> Record | None:
        path = folder / "sweep.yaml"
        if not now.disk.exists(path):
            return None
        return Record(Job(name="sim", module="train"), {"sim": {}})

    def copy_file(source: Path, target: Path) -> None:
        content = now.disk.read_bytes(source)
        now.disk.write_in_place(target, content, COPY_S)

    for name, by in {
        "recorded": recorded,
        "read_record": read_record,
        "list_differences": lambda *_: [],
        "check_continues": lambda *_: [],
        "claim": lambda path, _: (RunDirectory(path), False),
        "fit_to_cluster": lambda job, _: job,
        "array_script": lambda *_: "x",
        "batch_script": lambda *_: "x",
        "warn_of_unseen": lambda _: None,
        "present_code": lambda *_, **__: None,
        "write_code": lambda *_: None,
        "signals_blocked": lambda *_: nullcontext(),
        "ThreadPoolExecutor": _Serially,
    }.items():
        yield sweep_submission, name, by
    yield recording, "parse", lambda text: (RunDirectory(text), None)
    yield recording, "copy_file", copy_file
    yield shard_folder, "copy_file", copy_file
    yield recording, "Checkpoints", _Stored


def submit(history: History, retry: Sequence[str] = ()) -> int:
    """``clusterddp submit --sweep``: submits the run if it is missing, or as ``--retry`` says."""
    run = history.run
    folder = Folder(run.path.parent, history.disk)
    sweep = sweep_submission.Sweep(folder, history.job, {run.path.name: {}}, {run.path.name: history.job}, retry)
    with sweep_submission.planned(sweep) as plan:
        sweep_submission.tell(sweep, plan)
        if plan.submit:
            history.invariants.submitted()
        sweep_submission.submit(sweep, plan)
    return 0


def fork_run(history: History, number: int) -> int:
    """``clusterddp submit --fork``, up to the job of the new run."""
    world: World = history.world
    into = RunDirectory(history.run.path.parent / f"fork-{number}")
    for folder in (into.path, into.checkpoints, into.logs, into.private):
        history.disk.make_folder(folder)
    begun = world.now
    world.tell(world.process.name, recording.copy_checkpoint(str(history.run.path), into))
    history.invariants.forked(into, begun)
    return 0
