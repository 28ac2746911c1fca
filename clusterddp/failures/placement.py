"""On which nodes of its job a run trains, and where it continues once a node has to be left. Pure functions.

With ``spare_nodes``, or a range of nodes, Slurm leaves a job its other nodes when one is lost (``sbatch --no-kill``).
The ranks then restart in the same job, on a spare node or on fewer nodes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterddp.failures import exclusion
from clusterddp.history.beginnings import Started
from clusterddp.history.failures import Moved
from clusterddp.history.view import Events
from clusterddp.jobdef.job import Job
from clusterddp.reporter import counted


@dataclass(frozen=True)
class JobStart:
    """One start of a job, or the process of a local run, and its nodes as Slurm writes them."""

    nodes: str
    job: str | None = None
    restarts: int | None = None
    pid: int | None = None


@dataclass(frozen=True)
class Placement:
    """The nodes of a job: ``nodes`` have ranks, ``aside`` were left by an attempt of this job, the others are spare.

    All are in Slurm's order, by which ranks on nodes of one switch stay together. No nodes: they are unknown.
    """

    allocated: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()

    @property
    def spares(self) -> tuple[str, ...]:
        """The nodes that may take ranks."""
        return tuple(node for node in self.allocated if node not in self.nodes and node not in self.aside)

    def is_short(self, job: Job) -> bool:
        """Whether Slurm had taken so many nodes out of the job before the attempt began that its ranks cannot start."""
        return job.outlives_nodes and 0 < len(self.nodes) < (job.min_nodes or job.nodes)

    def moved(self, nodes: Collection[str], aside: Collection[str]) -> Placement:
        """With ranks on these nodes, and these left, too."""
        left = (*self.aside, *aside)
        return Placement(
            self.allocated,
            tuple(node for node in self.allocated if node in nodes),
            tuple(node for node in self.allocated if node in left),
        )


class Course(enum.Enum):
    """How the run continues after an attempt whose ranks are to restart."""

    SAME = "on the same nodes"
    SPARE = "on spare nodes"
    SHRINK = "on fewer nodes"
    NEW_JOB = "in a new job"


@dataclass(frozen=True)
class Choice:
    """A course, its reason as a sentence, and for SPARE and SHRINK the next attempt's placement. ``lack``: for NEW_JOB,
    which nodes the job lacks."""

    course: Course
    why: str = ""
    placement: Placement = Placement()
    lack: str = ""


def place(job: Job, allocated: Sequence[str], history: Events, start: JobStart, now: float) -> Placement:
    """The placement of the next attempt in a job with the nodes ``allocated``.

    What an attempt of this start of the job has moved to stays. At first, nodes that failed this run in the last day
    become spares if there are others. Those that the run's jobs exclude, as a drained one, are left then: Slurm gives a
    requeued job its nodes again.
    """
    every = Placement(tuple(allocated), tuple(allocated))
    if not job.outlives_nodes:
        return every
    this = (start.job, start.restarts)
    own = {event.attempt for event in history.all(Started) if (event.job, event.restarts) == this}
    moves = [event for event in history.all(Moved) if event.attempt in own]
    excluded = exclusion.left_out(Events(event for event in history if event.attempt not in own), now)
    left: list[str] = []
    if moves:
        chosen, left = list(moves[-1].nodes), [node for event in moves for node in event.aside]
    else:
        failed = exclusion.failed(history, now)
        # Others keep their order. An excluded node comes last, so that no later attempt returns to it.
        chosen = sorted(allocated, key=lambda node: (node in excluded, node in failed))[: job.nodes]
    return every.moved(chosen, [*left, *(node for node in excluded if node not in chosen)])


def as_placed(job: Job, placement: Placement) -> Job:
    """The job with the number of nodes that an attempt has, after it lost some for which there was no spare one."""
    if job.min_nodes is None or not placement.nodes:
        return job
    return replace(job, nodes=len(placement.nodes))


def choose(job: Job, placement: Placement, leave: Mapping[str, str], answering: Collection[str] | None) -> Choice:
    """How the run continues without the nodes ``leave``, each of which has its reason, such as "is lost".

    ``job``: as the attempt ran it. ``answering``: the nodes that can be given work now. None if that is unknown. The
    run moves to spares first, then shrinks as far as ``nodes: 6-8`` allows, and leaves the job only if too few nodes
    remain. A spare that cannot be used is left aside, too.
    """
    bad = {node: why for node, why in leave.items() if node in placement.nodes}
    if placement.is_short(job) and not bad:
        has = _counted(len(placement.nodes))
        lack = f"the job has {has} left, but the run needs {job.min_nodes or job.nodes}"
        return Choice(Course.NEW_JOB, lack, lack=lack)
    if not bad:
        return Choice(Course.SAME)
    what = " and ".join(f"node {node} {why}" for node, why in bad.items())
    if not job.outlives_nodes:
        lack = "the job has no spare nodes"
        return Choice(Course.NEW_JOB, f"{what}, and {lack}", lack=lack)
    unusable = [node for node in placement.spares if node in leave or not (answering is None or node in answering)]
    kept = [node for node in placement.nodes if node not in bad]
    before, free = len(placement.nodes), [node for node in placement.spares if node not in unusable]
    taken = free[: before - len(kept)]
    count, following = len(kept) + len(taken), placement.moved([*kept, *taken], [*bad, *unusable])
    what += f" and the spare {_named(unusable)} cannot be used" if unusable else ""
    if count == before:
        return Choice(Course.SPARE, f"{what}, so the ranks continue on the spare {_named(taken)}", following)
    if count in job.node_counts:
        return Choice(Course.SHRINK, f"{what}, so the run continues on {_counted(count)}", following)
    lack = f"the job has {_counted(count)} left, but the run needs {job.node_counts[0]}"
    return Choice(Course.NEW_JOB, f"{what}, and {lack}", lack=lack)


def _counted(nodes: int) -> str:
    return counted(nodes, "node")


def _named(nodes: Sequence[str]) -> str:
    return f"{'node' if len(nodes) == 1 else 'nodes'} {' and '.join(nodes)}"
