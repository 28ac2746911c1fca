"""``clusterddp status``, ``logs`` and ``cancel``: from the run's own files, and the controller if it can be asked."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.cli.accounting import cost
from clusterddp.cli.progress import Tail
from clusterddp.errors import RunDirectoryError, SlurmError
from clusterddp.failures import exclusion
from clusterddp.jobdef.load import load_resolved
from clusterddp.process import process_start, signal_ranks
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.cause import Cause
from clusterddp.supervisor.controller import give_notice
from clusterddp.supervisor.history import History
from clusterddp.supervisor.lease import held_by_other, holders, local_loop_alive, reachable
from clusterddp.supervisor.limits import attempts_made
from clusterddp.supervisor.messages import at_step, over_already, readable, sentence

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
    last = run.newest_metrics()
    print(f"run       {run}")
    print(f"job       {job.name}: {job.shape}")
    print(f"state     {readable(state_of(run)[1])}")
    events = run.events()
    print(f"attempts  {attempts_made(events)}")
    recorded = any(event.get("step") is not None for event in events)
    if recorded and (spent := cost(events, time.time())) is not None:
        print(f"cost      {spent.sentence()}")
    if last is not None:
        values = {key: value for key, value in last.items() if key not in ("step", "time", "attempt")}
        logged = readable(_values(values))
        print(f"steps     {last['step'] + 1} done{f'; the last: {logged}' if logged else ''}")
    elif not recorded:
        print("steps     no steps recorded")
    for event in events:
        words = sentence(event)
        if words:
            print(f"  {time.strftime('%m-%d %H:%M:%S', time.localtime(event['time']))}  {words}")
    for node in exclusion.excluded(events, time.time()):
        print(f"\nto send to the cluster's administrator:\n\n{exclusion.letter(events, node, time.time())}")
    return 0


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def state_of(run: RunDirectory) -> tuple[str, str]:
    """A word (completed, failed, cancelled, held, stopped, unknown) and a sentence.

    Held: by whom. Stopped: it waits for someone to continue it.
    """
    outcome = run.outcome()
    if outcome is not None:
        return outcome["state"], f"{outcome['state']}{at_step(outcome['step'])}: {outcome['reason']}"
    try:
        held = slurm.patiently(lambda: held_by_other(run))
        ended = None if held else _ended_job(run)
    except SlurmError as error:
        return "unknown", f"unknown, the controller cannot be asked: {error}"
    except PermissionError:
        return "unknown", "not over; who trains it, only its owner can see"
    if held is not None:
        return "held", held.replace("held by", "with")
    if local_loop_alive(run):
        return "held", "between two attempts of its local loop"
    how = "--local --run-dir" if run.loop_file.exists() else "--run-dir"
    return "stopped", f"not over, and not running{ended or ''}; continue with: clusterddp submit {how} {run}"


def _ended_job(run: RunDirectory) -> str | None:
    """How the job that held the run ended, if the controller still knows it."""
    claims = [entry for entry in holders(run) if entry["kind"] == "slurm" and reachable(entry)]
    job = slurm.show_job(claims[0]["job"]) if claims else None
    return f" (job {job.job_id} ended: {job.state})" if job else None


def logs(path: str, rank: int, attempt: int | None, follow: bool) -> int:
    """Prints a rank's output to standard output, and its errors to standard error."""
    run = open_run(path)
    if attempt is not None and attempt not in (made := run.attempts()):
        raise RunDirectoryError(f"{run} has no attempt {attempt}; it has {', '.join(map(str, made)) or 'none yet'}")
    if follow and run.outcome() is None:
        number = run.newest_attempt() if attempt is None else attempt
    else:
        number, _ = find_log(run, rank, attempt)
    while True:
        number = _print_attempt(run, rank, number, follow and attempt is None)
        if number is None:
            return 0


def find_log(run: RunDirectory, rank: int, attempt: int | None) -> tuple[int, Path]:
    """The attempt (None: the newest) and the file of a rank's output; its errors are next to it, in ``.err``."""
    number = run.newest_attempt() if attempt is None else attempt
    if number is None:
        raise RunDirectoryError(f"{run} has no attempt yet: nothing was printed")
    path = run.attempt_logs(number) / f"rank-{rank}.out"
    if not path.exists():
        raise RunDirectoryError(f"attempt {number} of {run} has no rank {rank}: no {path}")
    return number, path


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
    """Ends a run for good."""
    run = open_run(path)
    outcome = run.outcome()
    if outcome is not None:
        print(over_already(run, outcome))
        return 0
    final = end_for_good(run)
    print(f"{run}: {final['state']}{at_step(final['step'])}; it will not run again")
    return 0


def end_for_good(run: RunDirectory) -> dict[str, Any]:
    """Marks a run first, so that nothing starts it again, then ends what trains it and waits; returns the outcome."""
    for entry in holders(run):
        if entry["kind"] == "slurm" and not reachable(entry):
            raise RunDirectoryError(f"{run} is {held_by_other(run)}: cancel it on that cluster")
    run.mark_cancelled()
    for entry in holders(run):
        _end_holder(entry, run)
    held = _await_end(run)
    if held:
        words = f"{run} is cancelled and will not run again, but is still {held}"
        raise RunDirectoryError(words if "cannot be reached" in held else f"{words}: it is being ended")
    if run.outcome() is None:  # no supervisor was there to write it: the run was waiting, or was killed
        History(run, max(run.attempts(), default=0)).conclude("cancelled", "cancelled")
    return run.outcome() or {"state": "cancelled", "step": None}  # on a disk that is full the mark has to do


def _end_holder(entry: Mapping[str, Any], run: RunDirectory) -> None:
    """Ends a job, or signals a local run; one that is over already is left alone."""
    if entry["kind"] == "slurm":
        job = slurm.show_job(entry["job"])
        if job is not None and job.live:
            slurm.cancel(entry["job"])
    elif reachable(entry) and process_start(entry["pid"]) == entry["process_start"]:
        give_notice(run, Cause.CANCELLED)
        signal_ranks(entry["pid"], signal.SIGTERM)


def _await_end(run: RunDirectory) -> str | None:
    """Waits for the holders to end; who still holds the run after a minute."""
    deadline = time.monotonic() + CANCEL_TIMEOUT_S
    while (held := held_by_other(run)) and time.monotonic() < deadline and any(map(reachable, holders(run))):
        time.sleep(0.1)
    return held
