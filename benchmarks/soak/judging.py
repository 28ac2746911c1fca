"""The result of one run of the soak, from its files, compared with an uninterrupted run: every step, sample and bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.runs import event_times, first_step_done
from benchmarks.soak import faults
from clusterddp.data.sample_order import Binding, Shuffled
from clusterddp.events import RUN_ENDS
from clusterddp.rundir.records import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.waiting import differing, final_state

STEPS = 300
SAMPLES, BATCH, SEED = 200, 4, 0
"""The dataset's length and the batch per rank in tests/scripts/train.py, and the seed of a job that names none."""
EVERY = 20
"""Steps from one checkpoint to the next in ``submit_training``."""
SAVING = 10
"""Steps that may be made while a checkpoint is being written."""


@dataclass
class Result:
    """The result of one run; ``problems`` is empty if it equals the uninterrupted one."""

    case: str
    grace: int
    proctrack: str
    ranks: int
    slurm: str
    watched: bool
    preemptions: int = 0
    """Those that took effect: attempts after the first."""
    before_first_step: int = 0
    """Attempts, but for the last, that ended before they had made a step."""
    lost: bool = False
    doubled: bool = False
    steps_redone: int = 0
    samples_wrong: int = 0
    weights_differ: bool = False
    problems: list[str] = field(default_factory=list)
    handovers: list[float] = field(default_factory=list)
    takings: list[float] = field(default_factory=list)
    """As handovers, but from the submission of the job that takes the nodes: also where there was nobody to signal."""
    resumes: list[float] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Of every fault that was made: its kind, the seconds to the next new step, the steps redone."""
    seconds: float = 0.0


def samples_wrong(steps: Iterable[int], total: int, ranks: int) -> int:
    """How many samples the counted ``steps`` consumed other than once per epoch, of those that ``total`` steps need.

    The last epoch may be incomplete; none of its samples may come twice.
    """
    share = BATCH * ranks
    order = Shuffled().bind(Binding(SAMPLES, SEED, share))
    consumed = Counter(sample for step in steps for sample in order.samples(step * share, (step + 1) * share))
    epochs, rest = divmod(total * share, SAMPLES)
    wrong = sum(abs(consumed.pop((epoch, index), 0) - 1) for epoch in range(epochs) for index in range(SAMPLES))
    partial = [consumed.pop((epochs, index), 0) for index in range(SAMPLES)]
    wrong += abs(sum(partial) - rest) + sum(count - 1 for count in partial if count > 1)
    return wrong + sum(consumed.values())


def judge(result: Result, run: RunDirectory, reference: RunDirectory, made: Sequence[dict[str, Any]] = ()) -> None:
    """Fills in what a finished run's own files say. ``made``: the faults, each with its kind and time."""
    events, lines, counted = run.events(), list(read_lines(run.metrics_file)), run.metrics()
    attempts = run.attempts()
    trained = {line["attempt"] for line in lines}
    result.preemptions = len(attempts) - 1
    result.before_first_step = len(set(attempts[:-1]) - trained)
    _judge_end(result, run.outcome(), events)
    _judge_steps(result, events, lines, counted, made)
    result.faults = faults.costs(made, events, lines)
    result.samples_wrong = samples_wrong([line["step"] for line in counted], STEPS, result.ranks)
    if result.samples_wrong:
        result.problems.append(f"{result.samples_wrong} samples not consumed exactly once")
    if [line["loss"] for line in counted] != [line["loss"] for line in reference.metrics()]:
        result.problems.append("the losses are not the uninterrupted run's")
    different = differing(final_state(run), final_state(reference)) if not result.lost else []
    result.weights_differ = bool(different)
    if different:
        result.problems.append(f"not the uninterrupted run's: {', '.join(different)}")


def after_the_end(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What the history holds behind its first terminal event."""
    ends = (number for number, event in enumerate(events) if event["event"] in RUN_ENDS)
    return list(events[next(ends, len(events)) + 1 :])


def terminal_events(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong unless the history ends with its only terminal event."""
    count, after = sum(event["event"] in RUN_ENDS for event in events), after_the_end(events)
    if count == 1 and not after:
        return []
    return [f"{count} terminal events; after the first one: {[event['event'] for event in after]}"]


def steps_that_count(counted: Sequence[Mapping[str, Any]], total: int) -> list[str]:
    """What is wrong unless the metrics that count are those of ``total`` steps, each once and in order."""
    if [line["step"] for line in counted] == list(range(total)):
        return []
    repeated = [step for step, count in Counter(line["step"] for line in counted).items() if count > 1]
    return [f"the steps that count are not 0 to {total - 1}; twice: {repeated}"]


def _judge_end(result: Result, outcome: dict[str, Any] | None, events: Sequence[dict[str, Any]]) -> None:
    result.lost = (outcome or {}).get("state") != "completed"
    if result.lost:
        result.problems.append(f"the outcome is {outcome}")
    result.problems += terminal_events(events)
    result.doubled = any(event["event"] in ("started", *RUN_ENDS) for event in after_the_end(events))


def _judge_steps(
    result: Result,
    events: Sequence[dict[str, Any]],
    lines: Sequence[dict[str, Any]],
    counted: Sequence[dict[str, Any]],
    made: Sequence[dict[str, Any]],
) -> None:
    result.steps_redone = sum(event.get("redone", 0) for event in events if event["event"] == "resumed")
    announced, most = faults.unannounced_redone(made, events, lines)
    if announced:
        result.problems.append(f"{announced} steps redone after preemptions that were announced")
    if most > EVERY + SAVING:
        result.problems.append(f"{most} steps redone at once, and a checkpoint is taken every {EVERY}")
    if [line["step"] for line in lines] != list(range(STEPS)) and not result.steps_redone:
        result.problems.append("the metrics have not every step exactly once, in order")
    result.doubled = result.doubled or len({line["step"] for line in counted}) < len(counted)
    result.problems += steps_that_count(counted, STEPS)


def resume_times(starts: Sequence[float], events: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> Any:
    """Seconds from the batch script's first line to the first step, of every attempt that resumed and made one."""
    times = []
    for attempt in sorted({event["attempt"] for event in events if event["event"] == "resumed"}):
        started, stepped = event_times(events, "started", attempt), first_step_done(lines, attempt)
        before = [start for start in starts if started and start <= started[0]]
        if before and stepped is not None:
            times.append(stepped - max(before))
    return times
