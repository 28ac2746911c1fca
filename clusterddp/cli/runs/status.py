"""``clusterddp status``: a run's state and history, from its own files and, if it answers, the Slurm controller."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from clusterddp.cli.runs.accounting import cost
from clusterddp.errors import RunDirectoryError, SlurmError
from clusterddp.failures import exclusion
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.load import load_resolved
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.supervisor.lease import held_by_other, holders, local_loop_alive, reachable
from clusterddp.supervisor.limits import attempts_made
from clusterddp.supervisor.messages import at_step, readable, sentence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``status`` and ``cancel``."""
    parser.add_argument("run", metavar="RUN", help="a run directory")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Carries out ``status``."""
    show(open_run(arguments.run))
    return 0


def open_run(path: str) -> RunDirectory:
    """The run in a folder; RunDirectoryError if there is none."""
    run = RunDirectory(path)
    if not run.exists():
        raise RunDirectoryError(
            f"{run} is not a run directory (no job.yaml): expected the path that `clusterddp submit` printed"
        )
    return run


def show(run: RunDirectory) -> None:
    """Prints a run's state, its history in sentences, and how to continue it."""
    job = load_resolved(run.job_file)
    last = run.newest_metrics()
    print(f"run       {run}")
    print(f"job       {job.name}: {job.shape}")
    print(f"state     {readable(state_of(run)[1])}")
    events = run.events()
    if code := code_snapshot.described(code_snapshot.current(run), events):
        print(f"code      {readable(code)}")
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


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def state_of(run: RunDirectory) -> tuple[str, str]:
    """The state in a word (completed, failed, cancelled, held, stopped or unknown) and in a sentence.

    Held: a job or process trains the run, or is queued to. Stopped: nothing does, until someone continues it.
    """
    outcome = run.outcome()
    if outcome is not None:
        return outcome["state"], f"{outcome['state']}{at_step(outcome['step'])}: {outcome['reason']}"
    try:
        held = slurm.patiently(lambda: held_by_other(run))
        ended = None if held else _ended_job(run)
    except SlurmError as error:
        return "unknown", f"unknown, Slurm controller unreachable: {error}"
    except PermissionError:
        return "unknown", "not over; only its owner can see which job or process trains it"
    if held is not None:
        return "held", held.removeprefix("held by ")
    if local_loop_alive(run):
        return "held", "local run, between two attempts"
    how = "--local --run-dir" if run.loop_file.exists() else "--run-dir"
    return "stopped", f"stopped{ended or ''}; continue with: clusterddp submit {how} {run}"


def _ended_job(run: RunDirectory) -> str | None:
    """The final state of the job that trained the run last, if the controller still knows it."""
    claims = [entry for entry in holders(run) if entry["kind"] == "slurm" and reachable(entry)]
    job = slurm.show_job(claims[0]["job"]) if claims else None
    return f" (job {job.job_id} ended: {job.state})" if job else None
