"""The schedules of faults: what happens how many seconds after a run's first step, the same for all."""

from __future__ import annotations

from dataclasses import dataclass

#: No cell takes longer, from its submission.
CELL_S = 345.0
#: Each is 23 steps.
EPOCHS, QUICK_EPOCHS, PER_EPOCH, SAVE_EPOCHS = 54, 6, 23, 6
#: How many seconds the job that preempts holds the nodes.
HIGH_S = 1.0


@dataclass(frozen=True)
class Schedule:
    """One column of the matrix."""

    name: str
    words: str
    kind: str = ""
    """preempt, kill, dead or hang; empty for none that the benchmark injects."""
    moments: tuple[float, ...] = ()
    """Seconds after the run's first step."""
    grace: int = 0
    """GraceTime of the partition; 0 is Slurm's default."""
    time: str = "30"
    """The time limit of each job, as sbatch takes it."""
    announced: bool = True
    """Whether a run can save before it ends: if not, the bound has half an interval of repeated steps."""

    def due(self, made: int, since_first: float) -> bool:
        """Whether the next fault is due, after so many have been made."""
        return made < len(self.moments) and since_first >= self.moments[made]


def every(seconds: float) -> tuple[float, ...]:
    """Moments at a fixed distance, as many as a cell has room for."""
    return tuple(seconds * number for number in range(1, int(CELL_S // seconds) + 1))


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("none", "no fault"),
        Schedule("preempt", "one preemption, GraceTime=0", "preempt", (45.0,)),
        Schedule("preempt-60", "a preemption every 60 s, GraceTime=0", "preempt", every(60.0)),
        Schedule("kill-90", "a rank killed (SIGKILL) every 90 s", "kill", every(90.0), announced=False),
        Schedule("dead", "a node loses power and stays off", "dead", (60.0,), announced=False),
        Schedule("time-limit", "a time limit of 2 minutes per job", time="2"),
        Schedule("hang", "a rank stops (SIGSTOP)", "hang", (60.0,), announced=False),
        Schedule("preempt-grace", "one preemption, GraceTime=20", "preempt", (45.0,), grace=20),
    )
}
#: What the limit runs: the rest of its bound follows from these.
OF_THE_LIMIT = ("none", "preempt", "preempt-60")
