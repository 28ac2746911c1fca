"""How an attempt ends: the run continues, or is over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.history.event import Event
from clusterddp.history.words import RESTARTING, at_step
from clusterddp.reporter import counted

#: The most characters of a reason that a sentence shows.
LONGEST_REASON = 500
#: How the reason of a completion begins that the key ``done`` has found.
_MARKED = "done: "
#: What to do about a completion that is not confirmed.
CONFIRM = (
    "If the training is complete, name the file that marks it: `clusterddp submit [--local] --run-dir RUN --change "
    "--set done=FILE`. If not, fix the cause and continue with `clusterddp submit [--local] --run-dir RUN`"
)


@dataclass(frozen=True, kw_only=True)
class RequeueRefused(Event):
    """Slurm refused the requeue. The run is resubmitted"""

    error: str

    def sentence(self) -> str:
        return f"Slurm refused the requeue ({self.error}). Resubmitting the run"


@dataclass(frozen=True, kw_only=True)
class ResubmissionRefused(Event):
    """Slurm refused a new job. The run's job is requeued. `forbidden`: nodes may not submit jobs here, so that the run
    does not try it again"""

    error: str
    forbidden: bool | None = None

    def sentence(self) -> str:
        if self.forbidden:
            return (
                f"compute nodes may not submit jobs at this site ({self.error}). Requeueing this one instead. If the "
                "run stops because it needs a new job, use `clusterddp wait --resubmit RUN` on a login node"
            )
        return f"Slurm refused a new job ({self.error}). Requeueing this one"


@dataclass(frozen=True, kw_only=True)
class AttemptEnd(Event, abstract=True):
    """After it, an attempt has no ranks."""


@dataclass(frozen=True, kw_only=True)
class Continues(AttemptEnd, abstract=True):
    """An attempt that ended so that the run continues, now or later."""

    reason: str
    cause: str
    step: int | None
    checkpoint: int | None
    file: str | None = None
    made: int | None = None
    unmarked: bool | None = None

    def ended(self, then: str) -> str:
        """Why it ended, what was saved, what was not, and what happens next."""
        reason, step, checkpoint = self.reason.rstrip("."), self.step, self.checkpoint
        sentences = [reason]
        what, comma, more = reason.partition(", ")
        if step and re.search(r"[.:;]\s", what):  # an exception's text, for example
            sentences.append(f"The attempt ended at step {step}")
        elif step:
            sentences = [f"{what}{at_step(step)}{comma}{more}"]
        if self.file is not None and checkpoint is None:
            sentences.append(f"The newest checkpoint is {self.file}")
        elif step is None:
            if self.made is None:
                sentences.append("No step was recorded")
            else:
                sentences += [
                    f"The attempt completed at least {counted(self.made, 'step')}",
                    "The script restarts from the beginning unless it resumes by itself or `resume.checkpoint` names "
                    "its checkpoints",
                ]
        elif step == 0:
            sentences.append("No step was completed")
        elif checkpoint is None:
            sentences.append("No checkpoint was saved")
        elif step > checkpoint:
            repeated = counted(step - checkpoint, "step")
            sentences.append(f"The newest checkpoint is {checkpoint}, so {repeated} will be repeated")
        else:
            sentences.append(f"Checkpoint {checkpoint} is saved")
        return ". ".join([*sentences, then])


@dataclass(frozen=True, kw_only=True)
class Restarted(Continues):
    """the ranks are restarted in place. `unended`: the nodes on which srun did not report the end of the ranks"""

    unended: Sequence[str] = ()

    def sentence(self) -> str:
        return self.ended(f"{RESTARTING[0].upper()}{RESTARTING[1:]}")


@dataclass(frozen=True, kw_only=True)
class Requeued(Continues):
    """the job is requeued"""

    window_s: float | None

    def sentence(self) -> str:
        return self.ended("The job is requeued")


@dataclass(frozen=True, kw_only=True)
class Resubmitted(Continues):
    """the run continues as job `job`"""

    job: str

    def sentence(self) -> str:
        return self.ended(f"The run continues as job {self.job}")


@dataclass(frozen=True, kw_only=True)
class Stopped(Continues):
    """the run can be continued. `file`: the script's own checkpoint. `made`: the attempt completed at least this
    many steps. `refused`: why Slurm refused the run's next job, which `clusterddp wait --resubmit` submits again"""

    then: str | None = None
    refused: str | None = None

    def sentence(self) -> str:
        if self.refused is not None:
            return self.ended("The run is stopped. To submit it again, use `clusterddp wait --resubmit RUN`")
        return self.ended(f"The run is {self.then or 'stopped'}")


@dataclass(frozen=True, kw_only=True)
class RunEnd(AttemptEnd, abstract=True):
    """The run is over."""

    step: int | None
    attempts: int
    reason: str


def marked(found: str) -> str:
    """The reason of a completion that the key ``done`` has found, and where."""
    return f"{_MARKED}{found}"


@dataclass(frozen=True, kw_only=True)
class Completed(RunEnd):
    """all ranks finished. `confirmed` is false if that is doubtful: a restarted script may have exited with code 0
    without training"""

    confirmed: bool | None = None

    def sentence(self) -> str:
        completed = f"completed{at_step(self.step)} after {counted(self.attempts, 'attempt')}"
        if self.confirmed is False:
            return f"{completed}, {self.reason}. {CONFIRM}"
        return f"{completed} ({self.reason})" if self.reason.startswith(_MARKED) else completed


@dataclass(frozen=True, kw_only=True)
class Failed(RunEnd):
    """the run failed"""

    def sentence(self) -> str:
        reason = self.reason
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."
        return f"failed{at_step(self.step)}: {shown}"


@dataclass(frozen=True, kw_only=True)
class Cancelled(RunEnd):
    """the run was cancelled"""

    def sentence(self) -> str:
        return f"cancelled{at_step(self.step)}. The run will not start again"
