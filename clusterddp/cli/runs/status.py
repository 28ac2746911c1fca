"""``clusterddp status``: one run's state and history, from its own files and, if it answers, the Slurm controller."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.cli.runs import live
from clusterddp.cli.runs.report import booked, left_s, moment, report, stalled_s, values
from clusterddp.cli.runs.screen import INDENT, Fact, Size, composed, fact_lines
from clusterddp.cli.runs.sparkline import labelled
from clusterddp.cli.runs.text import clipped, one_line
from clusterddp.errors import UsageError
from clusterddp.failures import exclusion
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.report.advice import advice
from clusterddp.report.booking import Booking
from clusterddp.report.ratios import Spent
from clusterddp.report.stragglers import Scores, scores
from clusterddp.reporter import counted, duration, put, speed
from clusterddp.rundir.curve import curve, main_metric
from clusterddp.rundir.find import NEWEST, ONE_RUN, as_typed, open_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary, best_saved, summarize
from clusterddp.rundir.timing import read_timings
from clusterddp.slurm.run_states import OVER, RunState, run_states
from clusterddp.supervisor.limits import SAVED_ITSELF, attempts_made
from clusterddp.supervisor.messages import how_it_ended, sentence
from clusterddp.trackers.overview import overview

#: Seconds for which a controller that does not answer is asked again.
PATIENCE_S = 20.0
#: The most columns of a metric's curve, and the places of metrics.jsonl that it is read from.
CURVE_COLUMNS = 60
Event = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``status``."""
    parser.add_argument("run", metavar="RUN", nargs="?", default=NEWEST, help=f"{ONE_RUN}; default: {NEWEST}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, without the history (run.schema.json)")
    form.add_argument("--watch", action="store_true", help="refresh it every 5 s until the run is over, or Ctrl-C")
    parser.add_argument("--show", metavar="NAMES", default="", help="metrics that --watch draws; default: the loss")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Carries out ``status``."""
    run = open_run(arguments.run)
    if arguments.watch:
        names = list(dict.fromkeys(name for name in arguments.show.split(",") if name))
        return live.watch(lambda size: _view(run, names, size))
    if arguments.show:
        raise UsageError("--show: only with --watch; without it, status shows all metrics of the last step")
    if arguments.json:
        print(json.dumps(_report(run), indent=1))
    else:
        show(run)
    return 0


def show(run: RunDirectory) -> None:
    """Prints a run's state, its history in sentences, and how to continue it."""
    put(described(run))


def described(run: RunDirectory) -> str:
    """A run's state and its history in sentences, and a text for the administrator about its excluded nodes."""
    events, now = run.events(), time.time()
    summary, state = _looked_at(run)
    lines = fact_lines([fact for facts in _facts(summary, state, events, now).values() for fact in facts])
    lines += _history(events)
    for node in exclusion.excluded(events, now):
        lines.append(f"\nto send to the cluster's administrator:\n\n{exclusion.letter(events, node, now)}")
    return "\n".join(lines)


def _facts(summary: Summary, state: RunState, events: Sequence[dict[str, Any]], now: float) -> dict[str, list[Fact]]:
    """Names and words of all that is known of a run, by subject."""
    job = load_resolved(summary.run.job_file)
    code = _code(summary.run, events)
    facts: dict[str, Sequence[Fact]] = {
        "run": [("run", str(summary.run))],
        "job": [("job", f"{job.name}: {job.shape}")],
        "state": [("state", _sentence(summary, state)), *_waiting(state, now), *_log(state)],
        "code": [("code", code)] if code else [],
        "attempts": [("attempts", str(attempts_made(events)))],
        **_time(job, *booked(summary, state, events, now), events),
        "progress": [*_progress(summary, state, now), *_own_checkpoint(summary, events, now), *_best(events)],
        "slow": _slow(summary.run) if state.word not in OVER else [],
        "nodes": [*_nodes(job, summary, state), *_excluded(events, now)],
        "trackers": overview(summary.run),
    }
    return {subject: list(found) for subject, found in facts.items()}


def _history(events: Sequence[Event]) -> list[str]:
    """A line per event that has a sentence, oldest first."""
    return [f"  {moment(event['time'])}  {words}" for event in events if (words := sentence(event))]


#: What --watch shows, from the top.
_WATCHED = ("run", "state", "progress", "slow", "curves", "time", "nodes", "attempts")


def _view(run: RunDirectory, metrics: list[str], size: Size | None) -> live.View:
    """What --watch shows on a terminal of this size."""
    events, now = run.events(), time.time()
    summary, state = _looked_at(run, metrics, live.EVERY_S)
    facts = _facts(summary, state, events, now) | {"curves": _curves(summary, metrics, events, size)}
    if size:  # one line for the path, whose end tells runs apart
        facts["run"] = [("run", clipped(one_line(as_typed(run.path)), size.columns - INDENT, keep_end=True))]
    above = fact_lines([fact for subject in _WATCHED for fact in facts[subject]], size.columns if size else None)
    over = state.word in OVER
    end = "the run is over" if over else f"{time.strftime('%H:%M:%S')}, every {live.EVERY_S:.0f} s until Ctrl-C"
    history = [" ".join(line.split()) for line in _history(events)]
    return live.View(composed([*above, ""], history, end, size), over)


def _curves(summary: Summary, metrics: list[str], events: Sequence[Event], size: Size | None) -> list[Fact]:
    """A sparkline per metric."""
    room = (size.columns if size else CURVE_COLUMNS + INDENT) - INDENT
    facts = []
    main = main_metric(values(summary))
    for name in metrics or ([main] if main else []):
        points = curve(summary.run.metrics_file, name, CURVE_COLUMNS, events)
        words = labelled(points, min(room, CURVE_COLUMNS), live.encoding()) or "no value logged"
        facts.append((name, words))
    return facts


def state_of(run: RunDirectory) -> tuple[str, str]:
    """The state in a word of ``run_states.WORDS``, and in a sentence."""
    summary, state = _looked_at(run)
    return state.word, _sentence(summary, state)


def _looked_at(
    run: RunDirectory, metrics: Sequence[str] = (), patience_s: float = PATIENCE_S
) -> tuple[Summary, RunState]:
    summary = summarize(run, metrics)
    return summary, run_states([summary], patience_s)[0]


def _report(run: RunDirectory) -> dict[str, Any]:
    """The keys of every run, and those that need the whole history or the job definition."""
    job, events, now = load_resolved(run.job_file), run.events(), time.time()
    summary, state = _looked_at(run)
    booking, made = booked(summary, state, events, now)
    return report(summary, state) | {
        "attempts": attempts_made(events),
        "job_name": job.name,
        "shape": job.shape,
        "code": _code(run, events),
        "best": best_saved(events),
        "gpus_per_node": job.gpus_per_node if job.device == "cuda" else 0,
        "gpu_type": job.gpu_type,
        "excluded": exclusion.left_out(events, now),
        "cost": _cost(booking, made, events),
        "time": made
        and {
            "total_s": made.total_s,
            "seconds": made.seconds,
            "ettr": made.ettr,
            "goodput": made.goodput,
            "repeated_steps": made.repeated,
            "provisional": made.provisional,
        },
        "advice": advice(job, booking, events),
        "stragglers": (found := _scores(run)) and found.as_json(),
    }


def _cost(booking: Booking, made: Spent | None, events: Sequence[Event]) -> dict[str, Any] | None:
    """What version 1 of the schema has besides ``time``."""
    if made is None or not attempts_made(events):
        return None
    first = next((one.begin for one in booking.intervals if one.attempt is not None), booking.intervals[-1].end)
    in_loop = ("training", "evaluating", "saving", "repeating", "straggler")
    return {
        "repeated_steps": made.repeated,
        "training_s": sum(made.seconds[name] for name in in_loop),
        "total_s": booking.intervals[-1].end - first,
    }


# --- the lines of the text


def _code(run: RunDirectory, events: Sequence[dict[str, Any]]) -> str | None:
    return code_snapshot.described(code_snapshot.current(run), events)


def _sentence(summary: Summary, state: RunState) -> str:
    """The state in a sentence, with the job or process that holds the run, or how to continue it."""
    if summary.outcome is not None:
        return how_it_ended(summary.outcome)
    if state.word == "failed":
        return f"failed: {state.reason}; fix it, then continue with: clusterddp submit --run-dir {summary.run.quoted}"
    if state.word in OVER:
        return state.reason
    if state.word == "unknown":
        return f"unknown: {state.reason}"
    if state.word == "stopped":
        how = "--local --run-dir" if summary.run.loop_file.exists() else "--run-dir"
        ended = f" ({state.reason})" if state.reason else ""
        return f"stopped{ended}; continue with: clusterddp submit {how} {summary.run.quoted}"
    if state.job is None:
        return state.reason
    return f"job {state.job_id} ({state.job.state}{f' on {state.nodes}' if state.nodes else ''})"


def _waiting(state: RunState, now: float) -> Sequence[Fact]:
    """Why a job waits, what can be done about it, and when Slurm expects it to start."""
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
    """What a job printed that ended before its supervisor started."""
    return [("" if index else "its log", line) for index, line in enumerate(state.log)]


def _time(job: Job, booking: Booking, made: Spent | None, events: Sequence[Event]) -> dict[str, Sequence[Fact]]:
    """ETTR and where the time went, and what could be better."""
    if made is None or all(event.get("step") is None and event["event"] != "steps_seen" for event in events):
        return {"time": []}
    facts = [("time", made.sentence()), ("", made.breakdown())]
    return {"time": facts, "advice": [("advice", words) for words in advice(job, booking, events)]}


def _progress(summary: Summary, state: RunState, now: float) -> Sequence[Fact]:
    """Steps, their speed, and the last checkpoint."""
    if summary.step is None:
        return _made(summary, state)
    of = f" of {summary.steps}" if summary.steps is not None else ""
    logged = _values(values(summary))
    lines = [("steps", f"{summary.step}{of} done{f'; the last: {logged}' if logged else ''}")]
    if summary.seconds_per_step and state.word not in OVER:
        left, stalled = left_s(summary, state), stalled_s(summary, state)
        about = "" if left is None else f", about {duration(left)} left"
        about = about if stalled is None else f" until {duration(stalled)} ago; no step since then"
        lines.append(("speed", f"{speed(summary.seconds_per_step)}{about}"))
    if summary.saved is not None:
        lines.append(
            ("saved", f"step {summary.saved.get('step')}, {duration(max(0.0, now - summary.saved['time']))} ago")
        )
    return lines


def _made(summary: Summary, state: RunState) -> Sequence[Fact]:
    """Of a script whose steps have no known numbers: how many the newest attempt has made, and their speed."""
    if summary.made is None:
        return [("steps", "no steps recorded")]
    over = state.word in OVER
    lines = [("steps", f"{'at least ' if over else ''}{summary.made} in {'the last' if over else 'this'} attempt")]
    return lines if over else [*lines, ("speed", speed(summary.seconds_per_step))]


def _own_checkpoint(summary: Summary, events: Sequence[Event], now: float) -> Sequence[Fact]:
    """The newest checkpoint of a script that saves by itself."""
    own = [event for event in events if event["event"] in SAVED_ITSELF]
    if not own or summary.saved is not None:
        return []
    written = own[-1].get("written", own[-1]["time"])
    return [("saved", f"{own[-1]['file']}, {duration(max(0.0, now - written))} ago")]


def _best(events: Sequence[Event]) -> Sequence[Fact]:
    """The best checkpoint, under the number by which ``export`` knows it."""
    best = best_saved(events)
    return [] if best is None else [("best", f"{_values({best['metric']: best['value']})}, checkpoint {best['step']}")]


def _slow(run: RunDirectory) -> Sequence[Fact]:
    """Ranks or nodes that are slow in the newest steps."""
    found = _scores(run)
    return [("slow", words)] if found is not None and (words := found.sentence()) else []


def _scores(run: RunDirectory) -> Scores | None:
    try:
        return scores(read_timings(run).intervals)
    except OSError:  # another user's
        return None


def _nodes(job: Job, summary: Summary, state: RunState) -> Sequence[Fact]:
    """The nodes of the running attempt, or of the last, with their GPUs."""
    lines = []
    if nodes := state.nodes or summary.nodes:
        kind = f"{job.gpu_type} GPU" if job.gpu_type else "GPU"
        each = (
            counted(job.gpus_per_node, kind)
            if job.device == "cuda"
            else counted(job.ranks_per_node, "process", "processes")
        )
        lines.append(("nodes", f"{nodes}, {each} each"))
    return lines


def _excluded(events: Sequence[Event], now: float) -> Sequence[Fact]:
    """The nodes that the next jobs exclude."""
    failed = exclusion.excluded(events, now)
    wanted = [node for node in exclusion.left_out(events, now) if node not in failed]
    reasons = ((failed, "failed this run repeatedly"), (wanted, "by `clusterddp requeue --exclude`"))
    return [("excluded", f"{', '.join(nodes)}: {reason}") for nodes, reason in reasons if nodes]


def _values(logged: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in logged.items()
    )
