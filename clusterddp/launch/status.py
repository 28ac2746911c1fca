"""``clusterddp status``, ``logs`` and ``cancel``: from the run's own files, and the controller if it can be asked."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError, SlurmError
from clusterddp.job import load_resolved
from clusterddp.launch import slurm
from clusterddp.launch.cause import Cause
from clusterddp.launch.controller import give_notice
from clusterddp.launch.holder import held_by_other
from clusterddp.launch.narration import sentence
from clusterddp.launch.progress import Tail
from clusterddp.rundir import RunDirectory, append_line, read_json, write_json

CANCEL_TIMEOUT_S = 60.0


def open_run(path: str) -> RunDirectory:
    """The run in a folder; an error when there is none."""
    run = RunDirectory(path)
    if not run.exists():
        raise RunDirectoryError(
            f"{run} holds no run: expected a folder with a job.yaml, as named by `clusterddp submit`"
        )
    return run


def show(path: str) -> int:
    """Prints what a run is doing, its history in sentences, and how to go on."""
    run = open_run(path)
    job = load_resolved(run.job_file)
    metrics = run.metrics()
    print(f"run       {run}")
    print(f"job       {job.name}: {job.shape}")
    print(f"state     {state_words(run)}")
    print(f"attempts  {len(run.attempts())}")
    if metrics:
        last = metrics[-1]
        values = {key: value for key, value in last.items() if key not in ("step", "time", "attempt")}
        print(f"steps     {last['step'] + 1} done; the last: {_values(values)}")
    for event in run.events():
        words = sentence(event)
        if words:
            print(f"  {time.strftime('%m-%d %H:%M:%S', time.localtime(event['time']))}  {words}")
    return 0


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def state_words(run: RunDirectory) -> str:
    """One sentence: over, or held by whom, or waiting for someone to continue it."""
    outcome = run.outcome()
    if outcome is not None:
        return f"{outcome['state']} at step {outcome['step']}: {outcome['reason']}"
    try:
        held = held_by_other(run)
        ended = None if held else _ended_job(run)
    except SlurmError as error:
        return f"unknown, the controller cannot be asked: {error}"
    if held is not None:
        return held.replace("held by", "with")
    return f"not over, and not running{ended or ''}; continue with: clusterddp submit --run-dir {run}"


def _ended_job(run: RunDirectory) -> str | None:
    """How the job that held the run ended, if the controller still knows it."""
    holder = read_json(run.holder_file)
    job = slurm.show_job(holder["job"]) if holder and holder["kind"] == "slurm" else None
    return f" (job {job.job_id} ended: {job.state})" if job else None


def logs(path: str, rank: int, attempt: int | None, follow: bool) -> int:
    """Prints a rank's output to standard output, and its errors to standard error."""
    run = open_run(path)
    number = run.newest_attempt() if attempt is None else attempt
    if number is None and not follow:
        raise RunDirectoryError(f"{run} has no attempt yet: nothing was printed")
    if number is not None and not (run.attempt_logs(number) / f"rank-{rank}.out").exists() and not follow:
        raise RunDirectoryError(
            f"attempt {number} of {run} has no rank {rank}: no {run.attempt_logs(number)}/rank-{rank}.out"
        )
    while True:
        number = _print_attempt(run, rank, number, follow and attempt is None)
        if number is None:
            return 0


def _print_attempt(run: RunDirectory, rank: int, number: int | None, follow: bool) -> int | None:
    """Prints one attempt's output; with ``follow`` until a newer attempt starts, whose number is returned."""
    folder = run.attempt_logs(number) if number is not None else Path("/dev/null")
    tails = [(Tail(folder / f"rank-{rank}.out"), sys.stdout), (Tail(folder / f"rank-{rank}.err"), sys.stderr)]
    while True:
        newest, over = run.newest_attempt(), run.outcome() is not None
        for tail, stream in tails:
            for line in tail.lines():
                print(line, file=stream, flush=True)
        if newest != number:
            return newest if follow else None
        if over or not follow:
            return None
        time.sleep(0.2)


def cancel(path: str) -> int:
    """Ends a run for good: marks it first, so that nothing starts it again, then ends what trains it."""
    run = open_run(path)
    outcome = run.outcome()
    if outcome is not None:
        print(f"{run}: {outcome['state']} at step {outcome['step']} already")
        return 0
    run.mark_cancelled()
    holder = read_json(run.holder_file)
    if holder is not None and held_by_other(run):
        _end_holder(run, holder)
    _conclude_if_nobody_did(run)
    final = run.outcome() or {}
    print(f"{run}: {final['state']} at step {final['step']}; it will not run again")
    return 0


def _end_holder(run: RunDirectory, holder: Mapping[str, Any]) -> None:
    if holder["kind"] == "slurm":
        slurm.cancel(holder["job"])
    else:
        give_notice(run, Cause.CANCELLED)
        os.killpg(holder["pid"], signal.SIGTERM)
    deadline = time.monotonic() + CANCEL_TIMEOUT_S
    while held_by_other(run) and time.monotonic() < deadline:
        time.sleep(0.1)


def _conclude_if_nobody_did(run: RunDirectory) -> None:
    """The outcome of a run that no supervisor was there to write: a pending job's, or one that was killed."""
    if run.outcome() is not None:
        return
    step = max((event.get("step") or 0 for event in run.events()), default=0)
    attempts = run.attempts()
    values = {"step": step, "attempts": len(attempts), "reason": "cancelled"}
    event = {"time": time.time(), "attempt": max(attempts, default=0), "event": "cancelled", **values}
    append_line(run.events_file, event)
    write_json(run.outcome_file, {"state": "cancelled", **values})
