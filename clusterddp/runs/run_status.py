"""The state of a run, as words and as JSON: from its files and, if it answers, the Slurm controller.

The JSON is what ``list --json`` and ``status --json`` print. docs/reference/run.schema.json describes it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from clusterddp.failures import exclusion
from clusterddp.history.outcome import how_it_ended
from clusterddp.history.view import RunView
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.load import load_resolved
from clusterddp.report import efficiency
from clusterddp.report.efficiency import advice
from clusterddp.report.stragglers import scores
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary, best_saved, summarize
from clusterddp.rundir.timing import TimedInterval, read_timings
from clusterddp.runs.run_report import booked, report
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.polling import PacedQueue
from clusterddp.slurm.run_states import OVER, RunState, run_states


def state_of(run: RunDirectory) -> tuple[str, str]:
    """The state in a word of ``run_states.WORDS``, and in a sentence."""
    summary, state = looked_at(run)
    return state.word, state_sentence(summary, state)


def looked_at(run: RunDirectory, queue: PacedQueue | None = None) -> tuple[Summary, RunState]:
    """The run, and its state. ``queue``: of a view that is refreshed."""
    summary = summarize(run)
    return summary, run_states([summary], slurm.PATIENCE_S, queue=queue)[0]


def full_report(run: RunDirectory) -> dict[str, Any]:
    """The keys of every run, and those that need the whole history or the job definition."""
    job, history, now = load_resolved(run.job_file), run.history(), time.time()
    summary, state = looked_at(run)
    booking, made = booked(summary, state, history, now)
    best = best_saved(history)
    intervals = intervals_of(run)
    return report(summary, state) | {
        "attempts": history.attempts_made,
        "job_name": job.name,
        "shape": job.shape,
        "code": code_of(run, history),
        "best": best and asdict(best),
        "gpus_per_node": job.gpus_per_node if job.device == "cuda" else 0,
        "gpu_type": job.gpu_type,
        "excluded": exclusion.may_exclude(job, exclusion.left_out(history, now)),
        "time": made and made.as_json(),
        "advice": advice(job, booking, history, intervals),
        "stragglers": (found := scores(intervals)) and found.as_json(),
        "gpus": efficiency.newest_gpu_rows(intervals),
    }


# --- the lines of the text


def code_of(run: RunDirectory, history: RunView) -> str | None:
    return code_snapshot.described(code_snapshot.current(run), history)


def state_sentence(summary: Summary, state: RunState) -> str:
    """The state in a sentence, with the job or process that holds the run, or how to continue it."""
    if summary.outcome is not None:
        return how_it_ended(summary.outcome)
    run = summary.run.quoted
    submit = f"clusterddp submit {'--local ' if summary.local or summary.run.has_loop else ''}--run-dir"
    if state.word == "failed":
        return f"failed: {state.reason}. Fix the cause, then continue with: {submit} {run}"
    if state.word in OVER:
        return state.reason
    if state.word == "unknown":
        return f"unknown: {state.reason}"
    if state.word == "stopped":
        ended = f" ({state.reason})" if state.reason else ""
        return f"stopped{ended}. Continue with: {submit} {run}"
    if state.job is None:
        return f"{state.word} ({state.reason})"
    return f"job {state.job_id} ({state.job.state}{f' on {state.nodes}' if state.nodes else ''})"


def intervals_of(run: RunDirectory) -> tuple[TimedInterval, ...]:
    """The step times of a run."""
    try:
        return read_timings(run).intervals
    except OSError:  # another user's
        return ()
