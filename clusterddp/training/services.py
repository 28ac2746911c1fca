"""What a run uses of its context, and how its parts are connected: who saves, measures, profiles and tracks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterddp.checkpoint.best import with_best
from clusterddp.training.log.tracking import Tracking
from clusterddp.training.profiling import Profiling
from clusterddp.training.saving import Saver
from clusterddp.training.timing import StepTimes, step_times

if TYPE_CHECKING:
    from clusterddp.checkpoint.state import Stateful
    from clusterddp.distributed.process_group import ProcessGroup
    from clusterddp.jobdef.job import Job
    from clusterddp.training.agreement import Agreement
    from clusterddp.training.heartbeat import Heartbeat
    from clusterddp.training.settings import Settings
    from clusterddp.training.stopping import Stopping
    from clusterddp.worker.deadline import Deadline


@dataclass(frozen=True)
class Services:
    """One per run. ``report`` adds an event to the history, on any rank."""

    job: Job
    group: ProcessGroup
    agreement: Agreement
    saver: Saver
    deadline: Deadline
    heartbeat: Heartbeat
    times: StepTimes
    profiling: Profiling
    tracking: Tracking
    report: Callable[..., None]


def start_services(
    read: Settings,
    attempt: int,
    group: ProcessGroup,
    stopping: Stopping,
    heartbeat: Heartbeat,
    report: Callable[..., None],
    parts: Iterable[Stateful],
    best: str | None,
) -> Services:
    """Raises ValueError for a ``best`` that names no metric or contradicts the job."""
    keep = with_best(read.job.checkpoint.keep, best, told=group.rank == 0)
    saver = Saver(read.run_dir, attempt, group, report, replace(read.job.checkpoint, keep=keep))
    times = step_times(parts, group.device, group.world_size)
    profiling = Profiling(read, attempt, group.device, report, heartbeat.pause)
    tracking = Tracking(read.run_dir if group.rank == 0 else None, read.job, attempt, report)
    stopping.saver, saver.on_commit = saver, tracking.committed
    heartbeat.timing, heartbeat.on_device = times.told, times.on_device
    return Services(
        read.job, group, stopping.agreement, saver, stopping.deadline, heartbeat, times, profiling, tracking, report
    )
