"""What is wrong with a run that was interrupted, from its files alone: every step, sample and bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.data.sample_order import Binding, Shuffled
from clusterddp.history.words import RUN_ENDS
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.runs_on_disk import outcome_of
from tests.waiting import differing, final_state

STEPS = 300
SAMPLES, BATCH, SEED = 200, 4, 0
"""The dataset's length and the batch per rank in tests/scripts/train.py, and the seed of a job that names none."""
EVERY = 20
"""Steps from one checkpoint to the next in ``submit_training``."""
SAVING = 10
"""Steps that may be made while a checkpoint is being written."""


@dataclass(frozen=True)
class Injected:
    """A fault that was made, and when."""

    kind: str
    time: float


def judge(run: RunDirectory, reference: RunDirectory, ranks: int, injected: Sequence[Injected] = ()) -> list[str]:
    """What is wrong with a run that is over; nothing, if it equals the uninterrupted ``reference``."""
    events, lines, counted = run.events(), list(read_lines(run.metrics_file)), run.metrics()
    outcome = outcome_of(run)
    completed = outcome is not None and outcome["state"] == "completed"
    problems = [] if completed else [f"the outcome is {outcome}"]
    problems += terminal_events(events)
    problems += _repeated_steps(events, lines, injected)
    problems += steps_that_count(counted, STEPS)
    if wrong := samples_wrong([line["step"] for line in counted], STEPS, ranks):
        problems.append(f"{wrong} samples not consumed exactly once")
    if [line["loss"] for line in counted] != [line["loss"] for line in reference.metrics()]:
        problems.append("the losses are not the uninterrupted run's")
    if completed and (different := differing(final_state(run), final_state(reference))):
        problems.append(f"not the uninterrupted run's: {', '.join(different)}")
    return problems


def terminal_events(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong unless the history ends with its only terminal event."""
    ends = [number for number, event in enumerate(events) if event["event"] in RUN_ENDS]
    if ends == [len(events) - 1]:
        return []
    after = events[ends[0] + 1 :] if ends else []
    return [f"{len(ends)} terminal events; after the first one: {[event['event'] for event in after]}"]


def steps_that_count(counted: Sequence[Mapping[str, Any]], total: int) -> list[str]:
    """What is wrong unless the metrics that count are those of ``total`` steps, each once and in order."""
    if [line["step"] for line in counted] == list(range(total)):
        return []
    repeated = [step for step, count in Counter(line["step"] for line in counted).items() if count > 1]
    return [f"the steps that count are not 0 to {total - 1}; twice: {repeated}"]


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


def _repeated_steps(
    events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], injected: Sequence[Injected]
) -> list[str]:
    announced, most = unannounced_redone(injected, events, lines)
    problems = []
    if announced:
        problems.append(f"{announced} steps redone after preemptions that were announced")
    if most > EVERY + SAVING:
        problems.append(f"{most} steps redone at once, and a checkpoint is taken every {EVERY}")
    if not announced and not most and [line["step"] for line in lines] != list(range(STEPS)):
        problems.append("the metrics have not every step exactly once, in order")
    return problems


def unannounced_redone(
    injected: Sequence[Injected], events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> tuple[int, int]:
    """Steps redone by attempts before which nothing but preemptions was made, and the most of any other attempt.

    Before: since the start of the newest attempt that had made a step. One that has not redoes nothing, and leaves what
    is to be redone to the next.
    """
    starts = {event["attempt"]: event["time"] for event in events if event["event"] == "started"}
    stepped = {line["attempt"] for line in lines}
    announced = most = 0
    for event in events:
        if event["event"] != "resumed" or not event.get("redone"):
            continue
        earlier = [attempt for attempt in stepped if attempt < event["attempt"]]
        before = starts[max(earlier)] if earlier else 0.0
        kinds = {fault.kind for fault in injected if before <= fault.time <= event["time"]}
        if kinds <= {"preemption"}:
            announced += event["redone"]
        else:
            most = max(most, event["redone"])
    return announced, most
