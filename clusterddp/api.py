"""Launching from Python: ``clusterddp submit`` for a script, a job definition or a function."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from clusterddp.errors import RunDirectoryError, RunFailed, SlurmError, UsageError
from clusterddp.history.beginnings import Started
from clusterddp.history.ends import Completed
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.program import name_of, source_of
from clusterddp.process import module_command
from clusterddp.rundir.files import create_file
from clusterddp.rundir.run_directory import RunDirectory, open_run, runs_folder
from clusterddp.runs import sweep_submission
from clusterddp.runs.configured_folder import use_runs_dir
from clusterddp.runs.progress_display import Progress, Shown, described, find_log, newest_failure
from clusterddp.runs.recording import ONLY_JOB, Content
from clusterddp.runs.request_client import cancel_run
from clusterddp.runs.run_status import state_of
from clusterddp.runs.submission import check, describe, record_local, submit_to_slurm
from clusterddp.runs.sweep_members import default_name, jobs_of, keys_of, named, nodes_of, of_python
from clusterddp.runs.sweep_submission import Plan, Sweep, SweepFolder, planned, tell
from clusterddp.runs.waiting import SHOWN_FILE_CHECK_S, Wait, Waiting
from clusterddp.slurm.commands import scrub_job_variables
from clusterddp.supervisor.lease import local_loop_alive
from clusterddp.supervisor.verdict import failure_box

#: Keys for the program, which cannot be given with a function.
_PROGRAM_KEYS = {"script", "module", "args", "resume"}


def launch(
    target: str | os.PathLike[str] | Callable[..., Any],
    *args: Any,
    fn_kwargs: Mapping[str, Any] | None = None,
    local: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    on: str | None = None,
    **job_definition: Any,
) -> Handle:
    """Start a run, or continue the one in ``run_dir``, and return without waiting for it.

    A function runs once on every rank, where ``clusterddp.init()`` works as in a script. The function, its arguments
    and its return values are pickled. After a preemption it is called again. If it is a submitit callable, the object
    that its ``checkpoint()`` returned is called instead.

    Args:
        target: A script, a job definition (``.yaml`` or ``.yml``), or a function.
        *args: Arguments of the function, or command-line arguments of the script, converted to text.
        fn_kwargs: Keyword arguments of the function, such as ``{"lr": 0.1}``. Default: none.
        local: Start the ranks as processes on this machine instead of in a Slurm job. They outlive this process.
        run_dir: The run directory. Default: a new one, ``$CLUSTERDDP_RUNS/NAME-N`` or ``./runs/NAME-N``.
        on: A target of the configuration files, whose values to use, as with ``submit --on``. Default: none.
        **job_definition: Keys of a job definition, over those of ``target``: ``nodes=2`` (or a range, ``"2-4"``),
            ``gpus_per_node=8`` (one rank each, or ``"TYPE:G"``, or ranks per node with ``device="cpu"``),
            ``device="cuda"`` (NCCL) or ``"cpu"`` (gloo), ``time="8:00:00"``, ``checkpoint={"every": "500 steps"}``.
            Default: one node with one GPU.

    Returns:
        A handle for the run. A run that completed earlier is not started again.

    Raises:
        UsageError: An argument or the job definition is invalid, or the function cannot be pickled.
        RunDirectoryError: ``run_dir`` is in use, was cancelled, or was recorded with other arguments.
        SlurmError: Slurm is unavailable, or refused the job.

    Example:
        handle = clusterddp.launch(train, 0.1, fn_kwargs={"seed": 3}, nodes=2, gpus_per_node=8, time="8:00:00")
        accuracy = handle.result()
    """
    values = {key: value for key, value in job_definition.items() if value is not None}
    folder = None if run_dir is None else os.fspath(run_dir)
    if fn_kwargs and not callable(target):
        raise UsageError(
            f"fn_kwargs requires a function, but the target is {target}. Pass a script's arguments as text, after "
            "its name"
        )
    use_runs_dir()
    with without_job_variables():
        if callable(target):
            job, content = _of_function(target, args, values, fn_kwargs, on)
        else:
            values |= {"args": [str(argument) for argument in args]} if args else {}
            job, content = describe(os.fspath(target), values, {}, on=on), ONLY_JOB
        if check(job, folder, place="--local" if local else None) is None and folder:  # it completed earlier
            return Handle(folder)
        if local:
            return _start_local(job, folder, content)
        run, job_id = submit_to_slurm(job, folder, content)
    handle = Handle(run.path)
    handle.job_id = job_id
    return handle


def sweep(
    target: str | os.PathLike[str] | Callable[..., Any],
    grid: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
    *args: Any,
    local: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    max_running: int | None = None,
    retry: Collection[str] = (),
    on: str | None = None,
    **job_definition: Any,
) -> list[Handle]:
    """Start a run for each combination of values, and return their handles. Call it again to start missing runs.

    The runs are submitted as Slurm job arrays. Each is a separate run, with a run directory named by its values, and
    survives preemptions on its own. A run is never started twice.

    Args:
        target: A script, a job definition (``.yaml`` or ``.yml``), or a function, as for ``launch()``.
        grid: The values of each key, such as ``{"lr": [1e-3, 1e-4], "seed": range(5)}``, for all combinations, or a
            list of mappings, one per run. Keys are a function's keyword arguments (values: numbers, text, lists of
            them), or keys of the job definition and arguments of the script (``lr`` or ``args.lr`` for ``--lr``).
        *args: Arguments that all runs have: those of the function, or command-line arguments of the script.
        local: Run them one at a time on this machine, without Slurm, and return when all are over. Default: False.
        run_dir: The sweep's folder. Default: ``NAME-by-KEYS`` in ``$CLUSTERDDP_RUNS`` or ``./runs``.
        max_running: Maximum number of runs at a time. Default: no limit.
        retry: ``["failed"]``, ``["cancelled"]`` or both: start runs in these states, too. Default: none.
        on: A target of the configuration files, as for ``launch()``. Default: none.
        **job_definition: Keys of a job definition, for all runs, as for ``launch()``.

    Returns:
        A handle for each run, in the order of the grid.

    Raises:
        UsageError: An argument or the job definition is invalid, or the function cannot be pickled.
        RunDirectoryError: ``run_dir`` holds something else, or the sweep was recorded with a different definition.
        SlurmError: Slurm is unavailable, or did not accept all runs. Call again to start the others.

    Example:
        handles = clusterddp.sweep(train, {"lr": [1e-3, 1e-4], "seed": range(5)}, gpus_per_node=8, time="8:00:00")
        accuracies = [handle.result() for handle in handles]
    """
    values = {key: value for key, value in job_definition.items() if value is not None}
    use_runs_dir()
    with without_job_variables():
        asked = replace(_sweep_of(target, grid, args, values, run_dir, on), max_running=max_running, retry=tuple(retry))
        with planned(asked) as plan:
            tell(asked, plan)
            if not local:
                _submit_all(asked, plan)
        for name in plan.submit if local else ():
            _start_local(asked.jobs[name], str(asked.folder.member(name)), asked.content(name)).wait()
    return [Handle(asked.folder.member(name).path) for name in asked.members]


@dataclass(frozen=True)
class Status:
    """The state of a run, as ``Handle.status()`` found it.

    ``str(status)`` is its ``text``.
    """

    state: str
    """As in ``clusterddp list``: ``"completed"``, ``"failed"`` or ``"cancelled"`` for a run that is over. ``"pending"``
    in the queue, ``"held"`` while Slurm or a user keeps its job from starting, ``"running"`` while a job or process
    trains it. ``"stopped"`` if it can be continued. ``"unknown"`` if the controller does not answer, or if only its
    owner, or another machine or cluster, can see it."""
    step: int
    """Number of steps done, according to the metrics."""
    attempts: int
    """Number of attempts started."""
    text: str
    """The state as a sentence, with the job or the reason."""

    def __str__(self) -> str:
        return self.text


class Handle:
    """A run, identified by its directory. Any process can open it, on any machine that sees the directory.

    Args:
        run_dir: The run directory.

    Attributes:
        path: The run directory, as an absolute path.
        job_id: The Slurm job that the call of ``launch()`` has submitted. None for a handle from elsewhere.

    Raises:
        RunDirectoryError: There is no run in ``run_dir``.

    Example:
        print(clusterddp.Handle("runs/train-0").status())
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run = open_run(os.fspath(run_dir))
        self._process: subprocess.Popen[bytes] | None = None  # the loop of a local run that was started here
        self.path = self._run.path
        self.job_id: str | None = None

    def __repr__(self) -> str:
        return f"Handle({str(self.path)!r})"

    def status(self) -> Status:
        """Return the state of the run, from its files and, if a Slurm job holds it, from the controller."""
        state, text = state_of(self._run)
        if state == "stopped" and self._loop_alive():
            state, text = "running", "starting"
        last, outcome = self._run.newest_metrics(), self._run.outcome()
        ended_at = outcome.step if outcome is not None else None
        steps = max(ended_at or 0, last["step"] + 1 if last else 0)
        return Status(state, steps, self._run.history().attempts_made, text)

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the run is over or stopped, through requeues and restarts, and return its state.

        Prints the events of the run to stderr meanwhile. Like ``clusterddp wait --resubmit``, it lifts Slurm's hold
        after a requeue and resubmits a run that lost its job.

        Args:
            timeout: Seconds to wait. Default: no limit.

        Returns:
            ``"completed"``, ``"failed"``, ``"cancelled"``, or ``"stopped"`` if the run has stopped and can be
            continued.

        Raises:
            TimeoutError: ``timeout`` has expired. The run continues.
            RunDirectoryError: The state of the run stays unknown, for example because its records are damaged.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        job = load_resolved(self._run.job_file)
        local = self._process or self._run.has_loop
        one = Wait(self._run, job)
        over = self._local_over if local else partial(Waiting([one]).look, 1)
        with Progress(self._run, job.steps, job.progress_interval, Shown(output=False)) as progress:
            while True:
                progress.update()
                if over():
                    break
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self._run} is not over after {timeout:g} s: {self.status()}")
                time.sleep(SHOWN_FILE_CHECK_S)
        if (outcome := self._run.outcome()) is not None:
            return outcome.state
        if one.end == "unknown":
            raise RunDirectoryError(f"{self._run}: {one.sentence}")
        return one.end or "stopped"

    def logs(self, rank: int = 0, attempt: int | None = None) -> str:
        """Return what a rank has printed so far: its stdout, followed by its stderr.

        Args:
            rank: Global rank. Default: 0.
            attempt: Number of the attempt, from 0. Default: the newest.

        Raises:
            RunDirectoryError: The run has not started yet, or has no such rank or attempt.
        """
        _, path = find_log(self._run, rank, attempt)
        return "".join(file.read_text(errors="replace") for file in (path, path.with_suffix(".err")) if file.exists())

    def cancel(self) -> None:
        """End the run permanently, and return once its job or processes have ended. A run that is over stays as it is.

        Raises:
            RunDirectoryError: The run belongs to another cluster, or its ranks have not ended within 60 seconds.
            SlurmError: Slurm is unavailable.
        """
        if self._run.outcome() is None:
            cancel_run(self._run)

    def result(self, *, all_ranks: bool = False) -> Any:
        """Wait for the run as ``wait()`` does, and return what its function, or a Hydra app's task function, returned.

        For any other script, the value is None.

        Args:
            all_ranks: Return a list with the value of each rank instead of rank 0's value. Default: False.

        Raises:
            RunFailed: The run failed, was cancelled or stopped. The message has the traceback of the first failure.
        """
        if self.wait() != "completed":
            raise RunFailed(self._why_not_done())
        from clusterddp.worker import function

        is_function = load_resolved(self._run.job_file).module == function.MODULE
        attempt, ranks = _last_attempt(self._run)
        files = [self._run.result_file(attempt, rank) for rank in range(ranks if all_ranks else 1)]
        if is_function and (missing := [str(path) for path in files if not path.exists()]):
            raise RunFailed(
                f"{self._run} completed, but its function exited without returning, so {missing[0]} is missing"
            )
        values = [function.load_private(path) if path.exists() else None for path in files]
        return values if all_ranks else values[0]

    def _loop_alive(self) -> bool:
        return self._process.poll() is None if self._process else local_loop_alive(self._run)

    def _local_over(self) -> bool:
        return not self._loop_alive() or self._run.outcome() is not None  # the outcome is written before the loop ends

    def _why_not_done(self) -> str:
        text = f"{self._run}: {self.status()}"
        if self._run.outcome() is None and not self._run.attempts():
            log = self._run.loop_log
            return f"{text}\n{log.read_text(errors='replace')}" if log.exists() else text
        failure = newest_failure(self._run.history())
        outcome = self._run.outcome()
        if failure is None or (outcome is not None and outcome.cancelled):
            return text
        return f"{text}\n{failure_box(described(self._run, failure))}"


# --- starting


def _submit_all(wanted: Sweep, plan: Plan) -> None:
    """Raises SlurmError if Slurm took only some of the members."""
    done = sweep_submission.submit(wanted, plan)
    if done.refused:
        raise SlurmError(
            f"submitted {len(done.members)} of {len(plan.submit)} runs before this error: {done.refused}"
        ) from done.refused


def _sweep_of(
    target: Any,
    grid: Any,
    args: tuple[Any, ...],
    values: dict[str, Any],
    run_dir: str | os.PathLike[str] | None,
    on: str | None,
) -> Sweep:
    """The sweep of a script, a job definition or a function."""
    chosen = of_python(grid)
    members = named(nodes_of(chosen))
    if len(members) < len(chosen):
        raise UsageError("the grid has the same values twice. Give each combination once")
    contents: dict[str, Content] = {}
    if callable(target):
        made = [_of_function(target, args, dict(values), keywords, on) for keywords in chosen]
        job = made[0][0]
        jobs, contents = dict.fromkeys(members, job), dict(zip(members, (content for _, content in made), strict=True))
    else:
        values |= {"args": [str(argument) for argument in args]} if args else {}
        job = describe(os.fspath(target), values, {}, on=on)
        jobs = dict(zip(members, jobs_of(job, list(members.values())), strict=True))
    folder = run_dir or runs_folder(os.environ) / default_name(job, keys_of(members.values()))
    return Sweep(SweepFolder(folder), job, members, jobs, contents=contents)


@contextmanager
def without_job_variables() -> Iterator[None]:
    """Hides the variables of a surrounding job, which the new one must not inherit."""
    removed = scrub_job_variables()
    try:
        yield
    finally:
        os.environ.update(removed)


def _of_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    values: dict[str, Any],
    keywords: Mapping[str, Any] | None,
    on: str | None,
) -> tuple[Job, Content]:
    """The job that calls a function, and the function, pickled before anything is created."""
    from submitit.helpers import DelayedSubmission

    from clusterddp.worker.function import MODULE, pickled

    if clash := _PROGRAM_KEYS & values.keys():
        raise UsageError(f"{', '.join(sorted(clash))} cannot be given when the target is a function")
    job = describe(None, {"job_name": name_of(function), **values, "module": MODULE}, {}, on=on)
    try:
        content = pickled(DelayedSubmission(function, *args, **(keywords or {})))
    except Exception as error:
        raise UsageError(f"could not pickle {function!r} and its arguments: {error}") from error
    return job, Content(function=content, source=source_of(function))


def _start_local(job: Job, run_dir: str | None, content: Content) -> Handle:
    """Records the run and starts a process that trains it, as the command line would continue it."""
    run = record_local(job, run_dir, content, loop=False)
    command = [*module_command("clusterddp.submit"), "--local", "--run-dir", str(run)]
    with open(run.loop_log, "ab", opener=create_file) as log:
        # In its own session, to keep Ctrl-C from it.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    handle = Handle(run.path)
    handle._process = process
    return handle


def _last_attempt(run: RunDirectory) -> tuple[int, int]:
    """The attempt that completed the run, and its number of ranks, else the newest attempt, and the job's ranks."""
    history = run.history()
    completed = history.last(Completed)
    attempt = run.newest_attempt() or 0 if completed is None else completed.attempt
    started = history.attempt(attempt).first(Started)
    return attempt, load_resolved(run.job_file).world_size if started is None else started.ranks
