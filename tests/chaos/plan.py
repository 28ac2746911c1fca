"""When a run is disturbed: functions of the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.chaos.behaviours import ONCE, PAUSE_S, STEPS

RANKS = 2
#: A preemption that is asked for at a step takes effect some steps later, before what a habit does once.
LATEST = ONCE - 12
#: The longest wait of a kill after its attempt's start: beyond the first steps on an idle machine.
LATEST_S = 4.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a rank in an attempt: once so many steps are done, or so many seconds after the attempt's start."""

    rank: int
    attempt: int
    step: int | None
    seconds: float

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step is not None else f"{self.seconds:.1f} s"
        return f"rank {self.rank} killed at {when} of attempt {self.attempt}"


@dataclass(frozen=True)
class Plan:
    """What a run goes through; nothing, if left alone."""

    preempt_at: int | None = None
    kill: Kill | None = None

    def __str__(self) -> str:
        parts = [f"preempted at step {self.preempt_at}"] if self.preempt_at is not None else []
        return "; ".join([*parts, *([str(self.kill)] if self.kill else [])]) or "left alone"


def draw_plan(seed: int, name: str) -> Plan:
    """One preemption at a random step and one kill at a random moment, in random order."""
    draw = random.Random(f"{seed}/{name}")
    early, late = sorted(draw.sample(range(1, LATEST), 2))
    rank, seconds = draw.randrange(RANKS), round(draw.uniform(0, LATEST_S), 2)
    if draw.random() < 0.5:
        return Plan(preempt_at=early, kill=Kill(rank, 1, late if draw.random() < 0.5 else None, seconds))
    return Plan(preempt_at=late, kill=Kill(rank, 0, early, seconds))


assert LATEST > 2 and STEPS * PAUSE_S < LATEST_S
