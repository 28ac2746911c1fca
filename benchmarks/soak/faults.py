"""What a soak does to a run besides preempting it, and what each fault cost: kills, hangs, daemons, cables, power."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from benchmarks.runs import TooLong, power_off, power_on, until
from clusterddp.hostlist import expand
from clusterddp.rundir.records import read_lines
from clusterddp.supervisor.limits import FRUITLESS
from tests.cluster import Cluster
from tests.trainings import Training

#: How often each kind is drawn, in proportion; the rest of a soak's faults are preemptions.
WEIGHTS = {"kill": 16, "segv": 8, "hang": 2, "controller": 7, "slurmd": 7, "cut": 7, "power": 2}
PREEMPTIONS = 30
#: Those after which a new attempt starts.
ENDING = frozenset(("kill", "segv", "hang", "power"))
#: Events that tell of them.
TOLD = frozenset(("rank_failed", "node_lost", "hung"))
WORDS = {
    "preemption": "preemption",
    "kill": "SIGKILL of a rank",
    "segv": "SIGSEGV of a rank",
    "hang": "SIGSTOP of a rank",
    "controller": "slurmctld down and up",
    "slurmd": "slurmd restarted",
    "cut": "cable cut and healed",
    "power": "node powered off and back",
}
#: Attempts in a row without a checkpoint of their own after which one has to save before the next fault that ends it:
#: the run would rightly be ended as going nowhere.
SPARED = FRUITLESS - 1
WAIT_S = 120.0


@dataclass(frozen=True)
class Fault:
    """A planned fault: ``delay`` seconds after an attempt's start, on one of the job's nodes, for so many seconds."""

    kind: str
    delay: float
    node: int = 0
    seconds: float = 0.0


def draw_fault(draw: random.Random, latest_s: float) -> Fault | None:
    """A fault other than a preemption; None for one."""
    kind = draw.choices([None, *WEIGHTS], [PREEMPTIONS, *WEIGHTS.values()])[0]
    delay, node, share = round(draw.uniform(0, latest_s), 3), draw.randint(0, 1), draw.random()
    if kind is None:
        return None
    # A cable's cut is shorter than the silence after which a node counts as lost; a node is off for longer.
    seconds = {"controller": 3 * share, "cut": 1 + 4 * share, "power": 18 + 4 * share}.get(kind, 0.0)
    return Fault(kind, delay, node, round(seconds, 3))


class Maker:
    """Injects faults into one run."""

    def __init__(self, up: Cluster, training: Training) -> None:
        self._up, self._training = up, training

    def make(self, fault: Fault) -> bool:
        """Injects it, and repairs the damage; whether it could be injected: the run may be over, or between jobs."""
        nodes = expand(self._up.job(self._training.job_id).get("NodeList", "").replace("(null)", ""))
        if len(nodes) < 2 or self._training.run.outcome() is not None:
            return False
        made: bool = getattr(self, f"_{fault.kind}")(nodes[fault.node], fault.seconds)
        return made

    def spare(self) -> None:
        """Waits for a checkpoint of the attempt, or the run's end, where one more without would end the run."""
        if fruitless(self._training.run.events()) < SPARED:
            return
        newest = self._training.run.newest_attempt()

        def saved() -> bool:
            events = self._training.run.events()
            over = self._training.run.outcome() is not None or self._training.run.newest_attempt() != newest
            return over or any(e["event"] == "checkpoint" and e["attempt"] == newest for e in events)

        until(saved, "a checkpoint", WAIT_S, look_s=0.1)

    def _signal(self, node: str, signum: signal.Signals) -> bool:
        try:
            victims = until(lambda: self._training.ranks_on(node) or None, f"a rank on {node}", 5)
        except TooLong:
            return False
        victims[0].kill(signum)
        return True

    def _kill(self, node: str, _: float) -> bool:
        return self._signal(node, signal.SIGKILL)

    def _segv(self, node: str, _: float) -> bool:
        return self._signal(node, signal.SIGSEGV)

    def _hang(self, node: str, _: float) -> bool:
        """In its steps: what comes before them may take half an hour, by the watchdog's default."""
        run = self._training.run
        newest = run.newest_attempt()
        stepping = lambda: any(line["attempt"] == newest for line in read_lines(run.metrics_file))  # noqa: E731
        try:
            until(stepping, f"a step of attempt {newest}", 20, look_s=0.1)
        except TooLong:
            return False
        return self._signal(node, signal.SIGSTOP)

    def _controller(self, _: str, seconds: float) -> bool:
        self._up.stop_controller()
        time.sleep(seconds)
        self._up.start_controller()
        return True

    def _slurmd(self, node: str, _: float) -> bool:
        self._up.restart_slurmd(node)
        return True

    def _cut(self, node: str, seconds: float) -> bool:
        self._up.cut(node)
        time.sleep(seconds)
        self._up.heal(node)
        return True

    def _power(self, node: str, seconds: float) -> bool:
        power_off(self._up, node)
        time.sleep(seconds)
        power_on(self._up, node)
        return True


def fruitless(events: Sequence[dict[str, Any]]) -> int:
    """How many attempts in a row before the newest one committed nothing."""
    attempts = sorted({event["attempt"] for event in events if event["event"] == "started"})[:-1]
    saved = {event["attempt"] for event in events if event["event"] == "checkpoint"}
    count = 0
    for attempt in reversed(attempts):
        if attempt in saved:
            break
        count += 1
    return count


# ---- what each cost


def costs(
    made: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Of each fault that was made: its kind, the seconds until the history tells of it, those to the next step that was
    not done before, and the steps repeated.

    A repeated step belongs to the newest fault before the attempt that repeats it, and to each of several if an attempt
    between them made no step.
    """
    figures = []
    for number, fault in enumerate(made):
        asked = fault["asked"]
        end = made[number + 1]["asked"] if number + 1 < len(made) else float("inf")
        new = _next_new(fault["kind"], asked, events, lines)
        redone = sum(e.get("redone") or 0 for e in events if e["event"] == "resumed" and asked <= e["time"] < end)
        told = min((e["time"] for e in events if e["event"] in TOLD and asked <= e["time"] < end), default=None)
        # What the next fault delayed is not this one's.
        seconds = round(new - asked, 3) if new is not None and new <= end else None
        said = round(told - asked, 3) if told is not None and fault["kind"] in ENDING else None
        figures.append({"kind": fault["kind"], "said": said, "seconds": seconds, "redone": redone})
    return figures


def _next_new(
    kind: str, asked: float, events: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]
) -> float | None:
    """When the first step was done that was not done before the fault; of a later attempt, if it ends its own."""
    newest = max((e["attempt"] for e in events if e["event"] == "started" and e["time"] <= asked), default=-1)
    if kind in ENDING or kind == "preemption":
        done = max((line["step"] for line in lines if line["attempt"] <= newest), default=-1)
        later = [line for line in lines if line["attempt"] > newest and line["step"] > done]
    else:
        done = max((line["step"] for line in lines if line["time"] <= asked), default=-1)
        later = [line for line in lines if line["time"] > asked and line["step"] > done]
    return min((line["time"] for line in later), default=None)


def unannounced_redone(
    made: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]
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
        kinds = {fault["kind"] for fault in made if before <= fault["asked"] <= event["time"]}
        if kinds <= {"preemption"}:
            announced += event["redone"]
        else:
            most = max(most, event["redone"])
    return announced, most


def table(results: Sequence[Any]) -> str:
    """A line per kind of fault, over all runs."""
    figures = [(figure, result) for result in results for figure in result.faults]
    lines = []
    for kind, words in {**WORDS, "all": "all"}.items():
        own = [(figure, result) for figure, result in figures if kind in ("all", figure["kind"])]
        redone = [figure["redone"] for figure, _ in own]
        lost = len({result.case for _, result in own if result.lost})
        times = ([figure[what] for figure, _ in own if figure[what] is not None] for what in ("said", "seconds"))
        spreads = [common.spread(values, 1) for values in times]
        lines.append([words, len(own), lost, sum(redone), max(redone, default=0), *spreads])
    head = ["fault", "injected", "runs lost", "steps repeated", "most at once"]
    times_of = ["seconds until reported: median / worst", "to the next new step: median / worst"]
    return common.table([*head, *times_of], lines)
