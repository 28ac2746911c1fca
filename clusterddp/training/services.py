"""What a run uses of its context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterddp.distributed.process_group import ProcessGroup
    from clusterddp.jobdef.job import Job
    from clusterddp.training.agreement import Agreement
    from clusterddp.training.heartbeat import Heartbeat
    from clusterddp.training.log.tracking import Tracking
    from clusterddp.training.profiling import Profiling
    from clusterddp.training.saving import Saver
    from clusterddp.training.timing import StepTimes
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
