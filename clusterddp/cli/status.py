"""``clusterddp status``: one run's state and history, from its own files and, if it answers, the Slurm controller."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.cli.live import View, watch
from clusterddp.failures import exclusion
from clusterddp.history.beginnings import Started
from clusterddp.history.checkpoints import SavedItself
from clusterddp.history.codec import sentence
from clusterddp.history.steps import StepsSeen
from clusterddp.history.view import RunView
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.report import efficiency
from clusterddp.report.booking import Booking
from clusterddp.report.efficiency import Spent, advice
from clusterddp.report.stragglers import scores
from clusterddp.reporter import counted, duration, one_line, put, speed, value_text
from clusterddp.rundir.run_directory import NEWEST, ONE_RUN, RunDirectory, open_run
from clusterddp.rundir.summary import Summary, best_saved
from clusterddp.rundir.timing import TimedInterval
from clusterddp.runs.run_report import booked, left_s, moment, stalled_s, values
from clusterddp.runs.run_status import code_of, full_report, intervals_of, looked_at, state_sentence
from clusterddp.slurm.polling import PacedQueue
from clusterddp.slurm.run_states import OVER, RunState
from clusterddp.trackers.registry import overview

#: A fact about a run, with its name.
Fact = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``status``."""
    parser.add_argument("run", metavar="RUN", nargs="?", default=NEWEST, help=f"{ONE_RUN} (default: {NEWEST})")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, without the history (run.schema.json)")
    form.add_argument(
        "--watch", action="store_true", help="refresh the output every 5 s until the run is over or you press Ctrl-C"
    )


def run(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``status`` and returns the exit code."""
    run = open_run(arguments.run)
    if arguments.watch:
        queue = PacedQueue()
        return watch(lambda: _view(run, queue))
    if arguments.json:
        print(json.dumps(full_report(run), indent=1))
    else:
        show(run)
    return 0


def show(run: RunDirectory) -> None:
    """Prints a run's state, its history in sentences, and how to continue it."""
    put(described(run))


def described(run: RunDirectory) -> str:
    """A run's state and its history in sentences, and a text for the administrator about its excluded nodes."""
    history, now = run.history(), time.time()
    summary, state = looked_at(run)
    lines = [*_facts(summary, state, history, now), *_history(history)]
    for node in exclusion.excluded(history, now):
        lines.append(f"\nMessage to send to the cluster's administrator:\n\n{exclusion.letter(history, node, now)}")
    return "\n".join(lines)


def _facts(summary: Summary, state: RunState, history: RunView, now: float) -> list[str]:
    """The facts about a run, a line each."""
    job = load_resolved(summary.run.job_file)
    code = code_of(summary.run, history)
    intervals = intervals_of(summary.run)
    facts = [
        ("run", str(summary.run)),
        ("job", f"{job.name}: {job.shape}"),
        *[("state", state_sentence(summary, state)), *_waiting(state, now), *_log(state)],
        *([("code", code)] if code else []),
        ("attempts", str(history.attempts_made)),
        *_time(job, *booked(summary, state, history, now), history, intervals),
        *[*_progress(summary, state, now), *_own_checkpoint(summary, history, now), *_best(history)],
        *(_slow(intervals) if state.word not in OVER else []),
        *(_gpus(intervals) if state.word == "running" else []),
        *[*_nodes(job, summary, state, history), *excluded_nodes(job, history, now)],
        *overview(summary.run),
    ]
    return [one_line(f"{name:9} {words}") for name, words in facts]


def _history(history: RunView) -> list[str]:
    """A line per event that has a sentence, oldest first."""
    return [f"  {moment(event.time)}  {words}" for event in history if (words := sentence(event))]


def _view(run: RunDirectory, queue: PacedQueue) -> View:
    """What --watch shows: the facts, and the history with the newest event first."""
    history = run.history()
    summary, state = looked_at(run, queue)
    newest_first = [one_line(line) for line in reversed(_history(history))]
    return View([*_facts(summary, state, history, time.time()), *newest_first], state.word in OVER)


def _waiting(state: RunState, now: float) -> Sequence[Fact]:
    """Why a job waits, what to do about it, and when Slurm expects it to start."""
    if state.word not in ("pending", "held") or state.job is None:
        return []
    lines = [("waits", state.reason)]
    if state.remedy:
        lines.append(("to do", state.remedy))
    start = state.job.start
    if start is not None:
        when = time.strftime("%m-%d %H:%M", time.localtime(start))
        lines.append(("starts", f"{when} at the earliest{f', in {duration(start - now)}' if start > now else ''}"))
    return lines


def _log(state: RunState) -> Sequence[Fact]:
    """The end of the log of a job that did not record why it ended. The reason has the last line."""
    if len(state.log) < 2:
        return []
    first, *more = state.log
    return [("its log", first), *(("", line) for line in more)]


def _time(
    job: Job, booking: Booking, made: Spent | None, history: RunView, intervals: Sequence[TimedInterval]
) -> Sequence[Fact]:
    """ETTR, where the time went, and advice."""
    if made is None or all(event.at_step is None and not isinstance(event, StepsSeen) for event in history):
        return []
    words = (made.sentence(), made.breakdown(), made.idle())
    facts = [("time" if line is words[0] else "", line) for line in words if line]
    return [*facts, *(("advice", words) for words in advice(job, booking, history, intervals))]


def _progress(summary: Summary, state: RunState, now: float) -> Sequence[Fact]:
    """Steps, their speed, and the last checkpoint."""
    if summary.step is None:
        return _made(summary, state)
    of = f" of {summary.steps}" if summary.steps is not None else ""
    logged = _values(values(summary))
    lines = [("steps", f"{summary.step}{of} done{_repeated(summary)}{f', last values: {logged}' if logged else ''}")]
    if summary.seconds_per_step and state.word not in OVER:
        left, stalled = left_s(summary, state), stalled_s(summary, state)
        about = "" if left is None else f", about {duration(left)} left"
        about = about if stalled is None else f" until {duration(stalled)} ago, no step since then"
        lines.append(("speed", f"{speed(summary.seconds_per_step)}{about}"))
    if summary.saved is not None:
        lines.append(("saved", f"step {summary.saved.step}, {duration(max(0.0, now - summary.saved.time))} ago"))
    return lines


def _made(summary: Summary, state: RunState) -> Sequence[Fact]:
    """The steps of the newest attempt and their speed, for a script whose step numbers are unknown."""
    if summary.made is None:
        return [("steps", "none recorded")]
    over = state.word in OVER
    made = f"{'at least ' if over else ''}{summary.made} in {'the last' if over else 'this'} attempt"
    lines = [("steps", f"{made}{_repeated(summary)}")]
    return lines if over else [*lines, ("speed", speed(summary.seconds_per_step))]


def _repeated(summary: Summary) -> str:
    return "" if summary.redone is None else f", at least {summary.redone} repeated"


def _own_checkpoint(summary: Summary, history: RunView, now: float) -> Sequence[Fact]:
    """The newest checkpoint of a script that saves by itself."""
    own = history.last(SavedItself)
    if own is None or summary.saved is not None:
        return []
    written = own.time if own.written is None else own.written
    return [("saved", f"{own.file}, {duration(max(0.0, now - written))} ago")]


def _best(history: RunView) -> Sequence[Fact]:
    """The best checkpoint, with its number for ``export``."""
    best = best_saved(history)
    return [] if best is None else [("best", f"{_values({best.metric: best.value})}, checkpoint {best.step}")]


def _gpus(intervals: Sequence[TimedInterval]) -> Sequence[Fact]:
    """What the GPUs did in the newest steps."""
    words = efficiency.gpu_sentence(efficiency.newest_gpu_rows(intervals))
    return [("gpus", words)] if words else []


def _slow(intervals: Sequence[TimedInterval]) -> Sequence[Fact]:
    """Ranks or nodes that are slow in the newest steps."""
    found = scores(intervals)
    return [("slow", words)] if found is not None and (words := found.sentence()) else []


def _nodes(job: Job, summary: Summary, state: RunState, history: RunView) -> Sequence[Fact]:
    """The nodes of the running or the last attempt, with their GPUs, and those of its job that have no ranks."""
    started = history.last(Started)
    groups = () if started is None else ((started.aside, "no longer used"), (started.spares, "spare"))
    idle = [f"{', '.join(nodes)} ({words})" for nodes, words in groups if nodes]
    kind = f"{job.gpu_type} GPU" if job.gpu_type else "GPU"
    on_gpus, ranks = job.device == "cuda", job.ranks_per_node
    each = counted(job.gpus_per_node, kind) if on_gpus else counted(ranks, "process", "processes")
    nodes = summary.nodes if idle else state.nodes or summary.nodes
    lines = [("nodes", f"{nodes}, {each} each")] if nodes else []
    return [*lines, ("idle", ", ".join(idle))] if idle else lines


def excluded_nodes(job: Job, history: RunView, now: float) -> Sequence[Fact]:
    """The nodes that the next jobs exclude."""
    failed = exclusion.excluded(history, now)
    wanted = [node for node in exclusion.left_out(history, now) if node not in failed]
    reasons = (
        (failed, "failed repeatedly in this run"),
        (wanted, "by `clusterddp requeue --exclude` or `clusterddp drain`"),
    )
    found = [(exclusion.may_exclude(job, nodes), reason) for nodes, reason in reasons]
    return [("excluded", f"{', '.join(nodes)}: {reason}") for nodes, reason in found if nodes]


def _values(logged: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value_text(value)}" for key, value in logged.items())
