"""Starts the members of a sweep that need it, as Slurm job arrays or one at a time on this machine.

The same command again submits what is missing: members that are new, that never started, or that stopped. Those that
failed or were cancelled are submitted only on request. Members that a job or process holds are never submitted, nor
those that their user has stopped with ``clusterddp stop``. Members that request the same resources share an
array, as far as MaxArraySize and the user's submit limit allow.

A sweep's folder holds its record ``sweep.yaml``, its lock, a run directory per member, and its job arrays. An array is
recorded in three steps, so a crash at any moment leaves no unknown job: its folder, with the batch script and a link to
each member, before sbatch. The members' leases after it. Last, ``submitted.json``.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from clusterddp.errors import (
    FAILED,
    INTERRUPTED,
    UNCONFIRMED,
    RunDirectoryError,
    SlurmError,
    SlurmMissing,
    SlurmUnavailable,
    UsageError,
)
from clusterddp.failures import exclusion, node_memory
from clusterddp.jobdef.code_snapshot import Code
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.process import signals_blocked
from clusterddp.reporter import counted, show
from clusterddp.rundir.deletion import delete_folder
from clusterddp.rundir.files import (
    at,
    create_file,
    create_folder,
    fsync_directory,
    hold,
    make_folder,
    symlink,
    unlink,
    write_atomically,
    write_json,
)
from clusterddp.rundir.ownership import check_owner, check_place, warn_of_replaceable
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.rundir.summary import Summary, summarize
from clusterddp.runs.local import LocalRun
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.runs.recording import ONLY_JOB, Content, claim, has_completed, present_code, recorded, write_code
from clusterddp.runs.submission import check_continues, fit_to_cluster, packed_environment, record_local, warn_of_unseen
from clusterddp.runs.sweep_members import Record, Values, read_record, text_of
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import queue
from clusterddp.slurm.batch import array_script, batch_script
from clusterddp.slurm.configuration import largest_array, usable_nodes
from clusterddp.slurm.run_states import Cause, RunState, run_states
from clusterddp.supervisor import lease
from clusterddp.supervisor.lease import held_by_other

#: The states of members that a command always submits, and those that it submits on request (``--retry``).
MISSING = ("new", "missing", "stopped")
RETRIED = ("failed", "cancelled")
#: The state of a member that its user has stopped. A sweep does not continue it.
STOPPED_BY_USER = Cause.STOP_REQUESTED.value
#: In sbatch's message, if a smaller array may pass: the limits on submitted jobs of a QOS, an account or a user, and
#: max_array_tasks of SchedulerParameters.
_TOO_MANY = re.compile(r"Submit\w*Limit|job submit limit|Invalid job array specification")
#: The maximum number of members in a message.
_NAMED = 10


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
        check_owner(self.path)
        check_owner(self.arrays)

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


@dataclass(frozen=True)
class Sweep:
    """The user's request. ``job``: the definition that the members vary. ``contents``: what else is written into
    the run directory of a member that is submitted. ``retry_option``: the option that requests members in a state."""

    folder: SweepFolder
    job: Job
    members: Mapping[str, Values]
    jobs: Mapping[str, Job]
    retry: Collection[str] = ()
    change: bool = False
    max_running: int | None = None
    contents: Mapping[str, Content] = field(default_factory=dict)
    retry_option: str = "--retry {}"

    def content(self, name: str) -> Content:
        """What else is written into the run directory of a member."""
        return self.contents.get(name, ONLY_JOB)


@dataclass(frozen=True)
class Plan:
    """The members by state, those to submit, and those only of earlier definitions, with their values."""

    states: Mapping[str, str]
    submit: list[str]
    left: Mapping[str, Mapping[str, str]]

    @property
    def is_new(self) -> bool:
        """Whether no member has been submitted before."""
        return set(self.states.values()) == {"new"} and not self.left

    def in_state(self, *states: str) -> list[str]:
        """The members in these states."""
        return [name for name, state in self.states.items() if state in states]


@contextmanager
def planned(sweep: Sweep) -> Iterator[Plan]:
    """Records the sweep and holds its lock, while the body carries out the plan."""
    folder = sweep.folder
    folder.check()
    folder.create(sweep.job.share)
    with folder.locked():
        _settle(folder)
        plan = make_plan(sweep)
        for name in plan.submit:
            check_continues(folder.member(name), sweep.jobs[name], sweep.change)
        members = {name: {key: text_of(node) for key, node in values.items()} for name, values in sweep.members.items()}
        folder.write(Record(sweep.job, members, plan.left))
        yield plan


def make_plan(sweep: Sweep) -> Plan:
    """Reads the folder and plans, without writing. Raises RunDirectoryError if the recorded definition differs."""
    before = read_record(sweep.folder.path)
    states = _states(sweep)
    known = before.known if before else {}
    left = {name: known[name] for name in known if name not in sweep.members and sweep.folder.member(name).exists()}
    plan = Plan(states, [name for name, state in states.items() if state in (*MISSING, *sweep.retry)], left)
    if before and not plan.is_new and not sweep.change:
        _check_same(sweep, before)
    return plan


def _check_same(sweep: Sweep, before: Record) -> None:
    if differences := list_differences(before.job, without_secrets(sweep.job)[0]):
        raise RunDirectoryError(
            f"{sweep.folder} was started with a different definition: {', '.join(differences)}. Use the recorded one, "
            "add --change to submit members with the new one, or choose a different --run-dir"
        )


def _states(sweep: Sweep) -> dict[str, str]:
    """The state of each member, with one query of the controller: ``new``, ``missing`` (it never started), ``stopped``,
    ``held``, ``unknown``, or the state of its outcome."""
    summaries = {name: summarize(run) for name in sweep.members if (run := sweep.folder.member(name)).exists()}
    seen = run_states(list(summaries.values()))
    found = dict(zip(summaries, map(_state, summaries.values(), seen), strict=True))
    for name, state in found.items():
        if state not in (*MISSING, *sweep.retry):
            continue
        run = sweep.folder.member(name)
        if outcome := run.outcome():  # written while the controller was asked
            found[name] = state = outcome.state
        if state in sweep.retry and held_by_other(run):  # its job is just ending
            found[name] = "held"
    return {name: found.get(name, "new") for name in sweep.members}


def _state(summary: Summary, seen: RunState) -> str:
    if seen.word in ("pending", "held", "running"):
        return "held"
    if seen.by_user:
        return STOPPED_BY_USER
    return "missing" if seen.word == "stopped" and not summary.attempts else seen.word


def tell(sweep: Sweep, plan: Plan) -> None:
    """Prints the states of the members, and names those that need the user."""
    count = {state: len(plan.in_state(state)) for state in _TOLD}
    words = ", ".join(f"{number} {_WORDS.get(state, state)}" for state, number in count.items() if number)
    show(f"{sweep.folder}: {counted(len(plan.states), 'member')}: {words}")
    for state in RETRIED:
        if (names := plan.in_state(state)) and state not in sweep.retry:
            show(f"{state}: {listed(names)}. To submit {state} members again, use {sweep.retry_option.format(state)}")
    if names := plan.in_state(STOPPED_BY_USER):
        show(f"stopped by their user (to continue one, use `clusterddp submit --run-dir`): {listed(names)}")
    if names := plan.in_state("unknown"):
        show(f"not submitted, because their state is unknown (see `clusterddp status`): {listed(names)}")
    if plan.left:
        show(f"no longer in the sweep and left unchanged: {listed(plan.left)}")


_TOLD = (*MISSING, "held", "completed", *RETRIED, STOPPED_BY_USER, "unknown")
_WORDS = {"missing": "never started", "held": "queued or running"}


def listed(names: Collection[str]) -> str:
    """Names for a message, the first few of them."""
    first, more = list(names)[:_NAMED], len(names) - _NAMED
    return " ".join(first) + (f" and {more} more" if more > 0 else "")


#: Threads that write members: each of their files is synced, which takes milliseconds on a shared disk.
_WRITERS = 16


@dataclass
class Submitted:
    """What Slurm has accepted: the ids of the arrays, and the members. ``refused``: why it took no more."""

    job_ids: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    refused: SlurmError | None = None


def _settle(folder: SweepFolder) -> None:
    """Completes what a command that was killed left: an array that Slurm has is recorded, any other one is removed.

    Raises SlurmUnavailable while that is unknown, to prevent a second submission.
    """
    left = folder.unfinished_arrays()
    jobs = slurm.patiently(slurm.jobs_by_script) if left else {}
    for array in left:
        if job_id := jobs.get(str(array.script)):
            show(
                f"job {job_id} of {folder} was submitted by an earlier command that did not record it. Recorded it now"
            )
            _record(folder, array, job_id)
        else:
            array.remove()


def groups(sweep: Sweep, names: Sequence[str]) -> Iterator[dict[str, Job]]:
    """The members that can share an array, because their batch scripts differ only in the run directory."""
    found: dict[str, dict[str, Job]] = {}
    for name in names:
        text = array_script(sweep.jobs[name], sweep.folder.arrays / "0", 1, None, Path.cwd())
        found.setdefault(text, {})[name] = sweep.jobs[name]
    yield from found.values()


def fitted(group: Mapping[str, Job], required: bool = True) -> dict[str, Job]:
    """The same members with the CPUs and the memory that they request of the cluster, which is asked once."""
    fit = fit_to_cluster(next(iter(group.values())), required)
    return {name: replace(job, cpus_per_task=fit.cpus_per_task, mem=fit.mem) for name, job in group.items()}


def submit(sweep: Sweep, plan: Plan) -> Submitted:
    """Submits the members that the plan names. Raises SlurmError if Slurm accepts none of them."""
    done = Submitted()
    if not plan.submit:
        return done
    most = largest_array()
    ready = [fitted(group) for group in groups(sweep, plan.submit)]  # all checks before anything is written
    warn_of_unseen(RunDirectory(sweep.folder.path))
    packed_environment(sweep.job, sweep.folder.path.parent)
    source = sweep.content(plan.submit[0]).source  # all members call the same function
    write_code(RunDirectory(sweep.folder.path), present_code(sweep.job, str(sweep.folder), source, batch=True))
    for group in ready:
        _submit_group(sweep, group, most, len(plan.submit), done)
        if done.refused:
            break
    if done.refused and not done.members:
        raise done.refused
    return done


def _submit_group(sweep: Sweep, group: Mapping[str, Job], most: int, total: int, done: Submitted) -> None:
    """Submits members in arrays of equal size. Halves the size when the user's submit limit is reached."""
    left = list(group)
    size = array_size(len(left), most)
    while left:
        # Members that completed while Slurm was asked keep their outcome.
        chunk = {name: group[name] for name in left[:size] if not has_completed(sweep.folder.member(name))}
        if not chunk:
            left = left[size:]
            continue
        running = share(sweep.max_running, len(done.members), len(chunk), total)
        try:
            job_id = _submit_array(sweep, chunk, running)
        except SlurmError as error:
            if size > 1 and smaller_may_pass(error):
                size = min(size, len(left)) // 2
                continue
            done.refused = error
            return
        done.job_ids.append(job_id)
        done.members += chunk
        left = left[size:]


def smaller_may_pass(error: SlurmError) -> bool:
    """Whether sbatch refused an array for the number of its tasks."""
    return _TOO_MANY.search(str(error)) is not None


def array_size(members: int, most: int) -> int:
    """How many members each array gets: as few arrays as possible, of equal size."""
    return math.ceil(members / math.ceil(members / most))


def share(most: int | None, before: int, size: int, total: int) -> int | None:
    """How many of ``size`` members, of ``total`` in all arrays, may run at a time so that ``most`` do in all."""
    if most is None:
        return None
    return max(1, most * (before + size) // total - most * before // total)


def _submit_array(sweep: Sweep, jobs: Mapping[str, Job], running: int | None) -> str:
    """Records the members and submits them as one array. Restores everything if Slurm refuses it."""
    folder, names = sweep.folder, list(jobs)
    job = jobs[names[0]]
    usable = partial(usable_nodes, job.partition)
    avoided = node_memory.avoided(folder.member(names[0]), job, (), usable, time.time())
    with ExitStack() as stack:
        with ThreadPoolExecutor(_WRITERS) as pool:
            for member in pool.map(partial(_member, sweep), jobs.items()):
                stack.push(member)
        array = folder.next_array()
        script = array_script(job, array.path, len(names), running, Path.cwd())
        # On Ctrl-C between sbatch's answer and our record of it, the next command would have to ask for the job id.
        stack.enter_context(signals_blocked(signal.SIGINT, signal.SIGHUP))
        folder.prepare(array, names, script)
        job_id = _sbatch(array, exclusion.option(job.exclude, avoided))
        _record(folder, array, job_id)
    return job_id


def _member(sweep: Sweep, named: tuple[str, Job]) -> AbstractContextManager[None]:
    """Records a member. The context, which is entered, restores its run directory if Slurm refuses the array."""
    name, job = named
    run, created = claim(str(sweep.folder.member(name)), sweep.jobs[name])
    code = Code(None, owner=RunDirectory(sweep.folder.path))
    environment = packed_environment(job, sweep.folder.path.parent)
    context = recorded(run, sweep.jobs[name], created, replace(sweep.content(name), code=code, environment=environment))
    context.__enter__()
    run.unmark_cancelled()
    write_atomically(run.batch_script, batch_script(job, run, Path.cwd()))
    return context


def _sbatch(array: Array, options: Sequence[str]) -> str:
    try:
        return queue.submit(array.script, *options)
    except SlurmMissing:
        array.remove()
        raise
    except SlurmUnavailable as error:  # it may have the job, and what the job needs must stay
        again = "Run the same command again. It asks Slurm first"
        unknown = RunDirectoryError(f"Slurm may or may not have accepted {array.script}: {error}. {again}")
        unknown.exit_code = error.exit_code
        raise unknown from error
    except SlurmError:
        array.remove()
        raise


def _record(folder: SweepFolder, array: Array, job_id: str) -> None:
    """Records who holds each member, and that the array is submitted."""
    names = array.members()
    with ThreadPoolExecutor(_WRITERS) as pool:
        tasks = (f"{job_id}_{task}" for task in range(len(names)))
        list(pool.map(_hold, map(folder.member, names), tasks))
    array.submitted(job_id)


def _hold(run: RunDirectory, task_id: str) -> None:
    if not lease.started(run, task_id):  # otherwise it may already have handed the run over to the next job
        lease.submitted(run, task_id)
    unlink(run.loop_file)


def scripts(sweep: Sweep, plan: Plan) -> Iterator[str]:
    """The batch scripts that would be submitted. They are not checked if Slurm does not answer."""
    most = len(plan.submit)
    with suppress(SlurmUnavailable):
        most = largest_array()
    done, number = 0, int(sweep.folder.next_array().path.name)
    for group in groups(sweep, plan.submit):
        ready = fitted(group, required=False)
        names, size = list(ready), array_size(len(ready), most)
        for first in range(0, len(names), size):
            chunk = names[first : first + size]
            running = share(sweep.max_running, done, len(chunk), len(plan.submit))
            path = sweep.folder.arrays / str(number)
            yield array_script(ready[chunk[0]], path, len(chunk), running, Path.cwd())
            done, number = done + len(chunk), number + 1


def run_all(sweep: Sweep, plan: Plan) -> int:
    """Runs the members that the plan names. Returns the exit code. The one that Ctrl-C stops is continued first."""
    failed, cancelled, unconfirmed = [], [], []
    order = sorted(plan.submit, key=lambda name: plan.states[name] != "stopped")
    for number, name in enumerate(order, start=1):
        show(f"member {number} of {len(order)}: {name}")
        code = _run(sweep, name)
        if code == INTERRUPTED or code < 0:
            show("Stopped. Run the same command again to continue")
            return INTERRUPTED
        outcome = sweep.folder.member(name).outcome()
        if outcome is not None and outcome.unconfirmed:  # not by the code, which may be the script's
            unconfirmed.append(name)
        elif outcome is not None and outcome.cancelled:
            cancelled.append(name)
        elif code:
            failed.append(name)
    if unconfirmed:
        show(f"completed, but not confirmed: {listed(unconfirmed)}. For the reason, see `clusterddp status`")
    for state, names in (("failed", failed), ("cancelled", cancelled)):
        if names:
            show(f"{state}: {listed(names)}. To run {state} members again, use {sweep.retry_option.format(state)}")
    failed_before = set(plan.in_state("failed")) - set(plan.submit)
    if failed or cancelled or failed_before:
        return FAILED
    return UNCONFIRMED if unconfirmed else 0


def _run(sweep: Sweep, name: str) -> int:
    """Runs one member to its end."""
    job, folder = sweep.jobs[name], sweep.folder
    run = record_local(job, str(folder.member(name)), sweep.content(name))
    run.unmark_cancelled()
    try:
        with Progress(run, job.steps, job.progress_interval, Shown(failures=False)) as progress:
            return LocalRun(run, job).loop(progress)
    finally:
        _loop_ended(run)


def _loop_ended(run: RunDirectory) -> None:
    with suppress(OSError):  # the disk may be full, and the entry then names a process that no longer runs
        lease.loop_ended(run)


def check_marks(jobs: Iterable[Job]) -> None:
    """Refuses a file that is the mark of several members: the first to finish would complete the others."""
    marks = Counter(job.done.file for job in jobs if job.done and job.done.file and "{" not in job.done.file)
    for file, members in marks.items():
        if members > 1:
            raise UsageError(
                f"done: {file} would mark {members} members of the sweep as completed, so the first to finish would "
                "complete the others. Name a different file for each member, such as {run_dir}/out/done"
            )
