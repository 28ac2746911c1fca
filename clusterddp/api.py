"""Launching from Python: what ``clusterddp submit`` does, for a script, a job definition or a function."""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterddp.cli import status
from clusterddp.cli.options import add_arguments, describe
from clusterddp.cli.progress import Progress
from clusterddp.cli.recording import Plant, record_local
from clusterddp.cli.submit import check, fit, submit_fitted
from clusterddp.cli.watch import LOOK_S, Watcher
from clusterddp.errors import RunFailed, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import revealed, secret_values
from clusterddp.process import module_command
from clusterddp.reporter import show
from clusterddp.rundir.files import create_file
from clusterddp.rundir.records import is_count
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import scrub_own
from clusterddp.supervisor.lease import local_loop_alive
from clusterddp.supervisor.limits import attempts_made
from clusterddp.supervisor.messages import failure_box
from clusterddp.supervisor.verdict import RankEnd

#: Cannot be changed for a function: they name what runs.
_OF_A_FUNCTION = {"script", "module", "args", "args_on_resume"}


def launch(
    target: str | os.PathLike[str] | Callable[..., Any],
    *args: Any,
    nodes: int | str | None = None,
    gpus_per_node: int | str | None = None,
    device: str | None = None,
    local: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    **job_definition: Any,
) -> Handle:
    """Starts a run, or continues the one in ``run_dir``, and returns at once.

    Args:
        target: a script, a job definition (.yaml), or a function, which every rank calls with ``args``. It, its
            arguments and what it returns are pickled. ``clusterddp.init()`` works in it as in a script. Preempted, it
            is called again; with a ``checkpoint()`` (submitit's contract) what that returned is called instead.
        args: of the script, as text, or of the function.
        nodes, gpus_per_node: as ``clusterddp submit`` takes them (1 and 1); there are gpus_per_node ranks per node.
        device: "cuda" or "cpu"; the job definition's, or "cuda", if None.
        local: whether the ranks are processes of this machine instead of a Slurm job. They outlive this process.
        run_dir: the run's folder; a new one under $CLUSTERDDP_RUNS or ./runs if None.
        job_definition: any other key of a job definition: ``time="8:00:00"``, ``checkpoint={"every": "500 steps"}``.

    Raises UsageError and its kind before anything is started, SlurmError when Slurm refuses the job.
    """
    options = {"nodes": nodes, "gpus_per_node": gpus_per_node, "device": device}
    values = {key: value for key, value in {**options, **job_definition}.items() if value is not None}
    arguments = _command_line(local, run_dir)
    with _without_surrounding_job():
        if callable(target):
            if clash := _OF_A_FUNCTION & values.keys():
                raise UsageError(f"{', '.join(sorted(clash))}: the target is a function, which needs none of them")
            values = {"job_name": _name_of(target), **values, "module": "clusterddp.function"}
            job, plant = describe(None, values, {}), _planting(target, args)
        else:
            values |= {"args": [str(argument) for argument in args]} if args else {}
            job, plant = describe(os.fspath(target), values, {}), None
        if check(arguments, job) is not None:  # the run is done already
            return Handle(arguments.run_dir)
        return _start_local(arguments, job, plant) if local else _start_slurm(arguments, job, plant)


@dataclass(frozen=True)
class Status:
    """What a run is doing."""

    state: str
    """completed, failed, cancelled; held (a job or a process trains it, or waits to), stopped, or unknown."""
    step: int
    """Steps done, as far as the metrics tell."""
    attempts: int
    text: str
    """The state in a sentence."""

    def __str__(self) -> str:
        return self.text


class Handle:
    """A run, by its folder: of this process or any other, on Slurm or local, over or not."""

    def __init__(self, run_dir: str | os.PathLike[str], process: subprocess.Popen[bytes] | None = None) -> None:
        self._run = status.open_run(os.fspath(run_dir))
        self._process = process  # the loop of a local run, if it was started here
        self.path = self._run.path

    def __repr__(self) -> str:
        return f"Handle({str(self.path)!r})"

    def status(self) -> Status:
        """What the run is doing now."""
        state, text = status.state_of(self._run)
        if state == "stopped" and self._loop_alive():
            state, text = "held", "starting"
        last, outcome = self._run.newest_metrics(), self._run.outcome() or {}
        steps = max(outcome.get("step") or 0, last["step"] + 1 if last else 0)
        return Status(state, steps, attempts_made(self._run.events()), text)

    def wait(self, timeout: float | None = None) -> str:
        """Waits until the run is over, whatever its jobs do; returns its state. Its history is shown meanwhile.

        It helps the run as ``clusterddp watch`` does. ``stopped`` means that nothing trains the run any more, and that
        it can be continued. Raises TimeoutError after ``timeout`` seconds; the run goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        job = load_resolved(self._run.job_file)
        over = self._local_over if self._process or self._run.loop_file.exists() else self._watched_over(job)
        with Progress(self._run, job.steps, output=False) as progress:
            while not over():
                progress.update()
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self._run} is not over after {timeout:g} s: {self.status()}")
                time.sleep(LOOK_S)
        return str((self._run.outcome() or {"state": "stopped"})["state"])

    def logs(self, rank: int = 0, attempt: int | None = None) -> str:
        """What a rank has printed so far, and after that its errors; of the newest attempt if None."""
        _, path = status.find_log(self._run, rank, attempt)
        return path.read_text(errors="replace") + path.with_suffix(".err").read_text(errors="replace")

    def cancel(self) -> None:
        """Ends the run for good; returns when nothing trains it any more. Without effect on one that is over."""
        if self._run.outcome() is None:
            status.end_for_good(self._run)

    def result(self, *, all_ranks: bool = False) -> Any:
        """Waits, and returns what the function returned on rank 0, or on all ranks, in a list; None for a script.

        Raises RunFailed, with the first failure's text, when the run is over or stopped without being done.
        """
        if self.wait() != "completed":
            raise RunFailed(self._why_not_done())
        from clusterddp.worker import function

        if load_resolved(self._run.job_file).module != function.MODULE:
            return None
        attempt, ranks = _last_attempt(self._run)
        files = [function.result_file(self._run, attempt, rank) for rank in range(ranks if all_ranks else 1)]
        if missing := [str(path) for path in files if not path.exists()]:
            raise RunFailed(f"{self._run} is done, but its function has left without returning: no {missing[0]}")
        values = [function.load_result(path) for path in files]
        return values if all_ranks else values[0]

    def _loop_alive(self) -> bool:
        return self._process.poll() is None if self._process else local_loop_alive(self._run)

    def _local_over(self) -> bool:
        alive = self._loop_alive()  # asked first: the outcome is written before the loop ends
        return self._run.outcome() is not None or not alive

    def _watched_over(self, job: Job) -> Callable[[], bool]:
        watcher = Watcher(self._run, job)

        def over() -> bool:
            watcher.look()
            return watcher.result is not None

        return over

    def _why_not_done(self) -> str:
        words = f"{self._run}: {self.status()}"
        failures = [event for event in self._run.events() if event["event"] == "rank_failed"]
        if self._run.outcome() is None and not self._run.attempts():
            log = _loop_log(self._run)
            return f"{words}\n{log.read_text(errors='replace')}" if log.exists() else words
        if not failures or (self._run.outcome() or {}).get("state") == "cancelled":
            return words
        event = failures[-1]
        attempt, rank, when = event["attempt"], event["rank"], event["time"]
        path = self._run.rank_record(attempt, rank)
        end = RankEnd.read(rank, event["host"], when, path)
        if end.end == "died":  # the supervisor knew more of how it was killed
            end = replace(end, error=event["error"])
        secrets = secret_values(revealed(load_resolved(self._run.job_file), self._run.job_file), os.environ)
        return f"{words}\n{failure_box(self._run, attempt, end.without(secrets), (), event.get('step'), when, secrets)}"


# --- starting


def _command_line(local: bool, run_dir: str | os.PathLike[str] | None) -> argparse.Namespace:
    """The options of ``clusterddp submit`` that the rest of a submission reads."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = [*(["--local"] if local else []), *(["--run-dir", os.fspath(run_dir)] if run_dir is not None else [])]
    return parser.parse_args(options)


@contextmanager
def _without_surrounding_job() -> Iterator[None]:
    """What a surrounding job set does not belong to the new one, and is this process's again afterwards."""
    removed = scrub_own()
    try:
        yield
    finally:
        os.environ.update(removed)


def _name_of(function: Callable[..., Any]) -> str:
    """A job's name for a function, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"[^\w.+=@-]+", "", name).lstrip(".-") or "function"


def _planting(function: Callable[..., Any], args: tuple[Any, ...]) -> Plant:
    """Writes the function into a run directory. It is pickled now, before anything is made."""
    from submitit.core.utils import DelayedSubmission

    from clusterddp.worker.function import function_file, pickled, save_function

    try:
        content = pickled(DelayedSubmission(function, *args))
    except Exception as error:
        raise UsageError(f"{function!r} and its arguments cannot be pickled: {error}") from error
    return lambda run: save_function(function_file(run), content)


def _start_local(arguments: argparse.Namespace, job: Job, plant: Plant | None) -> Handle:
    """Records the run, and leaves it to a process of its own, which continues it as anyone might."""
    run = record_local(arguments.run_dir, job, plant)
    show(f"run directory: {run}")
    command = [*module_command("clusterddp.submit"), "--local", "--run-dir", str(run)]
    with open(_loop_log(run), "ab", opener=create_file) as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )  # Ctrl-C here is not meant for it
    return Handle(run.path, process)


def _start_slurm(arguments: argparse.Namespace, job: Job, plant: Plant | None) -> Handle:
    run, job_id = submit_fitted(arguments.run_dir, fit(job, required=True), job, plant)
    show(f"submitted as job {job_id}; run directory: {run}")
    return Handle(run.path)


def _loop_log(run: RunDirectory) -> Path:
    return run.logs / "loop.log"


def _last_attempt(run: RunDirectory) -> tuple[int, int]:
    """The number of the attempt that completed the run, and of its ranks; as the newest and the job's, if not said."""
    events = run.events()
    completed = [event["attempt"] for event in events if event["event"] == "completed"]
    attempt = completed[-1] if completed else run.newest_attempt() or 0
    started = [event for event in events if event["event"] == "started" and event["attempt"] == attempt]
    ranks: list[int] = [event["ranks"] for event in started if is_count(event.get("ranks"))]
    return attempt, ranks[0] if ranks else load_resolved(run.job_file).world_size
