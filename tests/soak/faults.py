"""What a soak does to a run besides preempting it: kills, hangs, daemons, cables, power."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.hostlist import expand
from clusterddp.rundir.json_lines import read_lines
from clusterddp.supervisor.retry_limits import FRUITLESS
from tests.cluster import Cluster
from tests.interruptions import TooLong, power_off, power_on, until
from tests.trainings import Training

#: How often each kind is drawn, in proportion; the rest of a soak's faults are preemptions.
WEIGHTS = {"kill": 16, "segv": 8, "hang": 2, "controller": 7, "slurmd": 7, "cut": 7, "power": 2}
PREEMPTIONS = 30
#: Those after which a new attempt starts.
ENDING = frozenset(("kill", "segv", "hang", "power"))
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
