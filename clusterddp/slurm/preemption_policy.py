"""What a cluster does to a job that it preempts: the notice, the requeue and its hold, and a sentence about them.

Read once, at submission, from the controller's configuration, which ``scontrol`` shows to everyone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from clusterddp.jobdef.job import Job
from clusterddp.slurm import commands as slurm


@dataclass(frozen=True)
class Preemption:
    """The preemption policy for a job of one partition (and QOS).

    ``mode``: REQUEUE, CANCEL, SUSPEND or OFF. ``grace_s``: seconds between TERM and KILL while the job counts as
    running. 0: Slurm ends it at once, with ``kill_wait_s`` between the two. ``hold_s``: how long a requeued job is held
    (AuthInfo's cred_expire + 1 s, 121 s by default. From 25.11 on SchedulerParameters' requeue_delay goes before).
    """

    partition: str
    mode: str
    grace_s: int
    kill_wait_s: int
    hold_s: int
    #: Whether the site allows ``sbatch --requeue=expedite``, which starts a requeued job again without a hold.
    expedites: bool = False

    @property
    def notice_s(self) -> int:
        """Seconds between the signal and KILL: the time to save."""
        return self.grace_s or self.kill_wait_s

    @property
    def announced_s(self) -> float:
        """Seconds for which a preempted job counts as running. Infinity where none is preempted."""
        return math.inf if self.mode == "OFF" else self.grace_s

    @property
    def must_resubmit(self) -> bool:
        """Whether a preempted run needs a new job, because Slurm cancels it unless it is requeued within its grace."""
        return self.mode == "CANCEL"

    def sentence(self, job: Job) -> str:
        """The policy in a sentence for the user."""
        if self.mode == "OFF":
            return f"{self.partition} does not preempt"
        if self.mode.startswith("SUSPEND") or self.mode == "GANG":
            return f"{self.partition} suspends preempted jobs, which keep their memory and resume later"
        notice = f"with {self.grace_s} s of notice"
        if not self.grace_s:
            notice = f"without a grace period. A run has {self.kill_wait_s} s (KillWait) to save"
        return f"{self.partition} preempts {notice}. {self._continuation(job)}"

    def _continuation(self, job: Job) -> str:
        if self.must_resubmit and not (job.policy == "requeue" and self.grace_s):
            return "Slurm cancels preempted jobs, so the run continues in a new job"
        if job.policy == "resubmit" and self.grace_s:
            return "The run continues in a new job (policy: resubmit)"
        if job.policy is None and job.min_nodes is not None and self.grace_s:
            return "The run continues in a new job, because a requeued job would wait for as many nodes as before"
        if job.expedite_requeue:
            return "The run is requeued and starts again without a hold (expedite_requeue)"
        lifted = (
            "`submit --wait` and `clusterddp resubmit` lift the hold"
            if job.lift_hold
            else "With lift_hold: false, the hold stays"
        )
        return f"The run is requeued and then held for {self.hold_s} s. {lifted}"


def preemption(partition: str | None, qos: str | None) -> Preemption:
    """The policy of a partition (None: the default one). With preempt/qos, of the QOS."""
    configuration = slurm.run("scontrol", "show", "config")
    partition = partition or slurm.default_partition()
    return policy(configuration, slurm.run("scontrol", "show", "partition", "-o", partition), partition, qos)


def policy(configuration: str, shown: str, partition: str, qos: str | None) -> Preemption:
    """The same, from what ``scontrol show config`` and ``scontrol show partition -o`` print."""
    config = fields(configuration)
    with slurm.understood("scontrol", shown):
        values = fields(shown.replace(" ", "\n"))
        name, mode, grace_s = partition, values.get("PreemptMode", "OFF"), int(values.get("GraceTime", 0))
    if config.get("PreemptType") == "preempt/qos":
        name = qos or "normal"
        mode, grace_s = qos_preemption(name, config.get("PreemptMode", "OFF").split(",")[-1])
    delay = re.search(r"\brequeue_delay=(\d+)", config.get("SchedulerParameters", ""))  # from 25.11 on
    expires = delay or re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    with slurm.understood("scontrol", configuration):
        return Preemption(
            partition=name,
            mode=mode,
            grace_s=grace_s,
            kill_wait_s=int(config.get("KillWait", "30").split()[0]),
            hold_s=int(expires[1] if expires else 120) + 1,
            expedites="enable_expedited_requeue" in config.get("SlurmctldParameters", ""),
        )


def qos_preemption(name: str, default_mode: str) -> tuple[str, int]:
    """Mode and grace period of a QOS. ``cluster`` stands for the configuration's mode."""
    line = slurm.run("sacctmgr", "-nP", "show", "qos", f"name={name}", "format=PreemptMode,GraceTime").strip()
    mode, _, grace = line.partition("|")
    units = zip(reversed(grace.split(":")), (1, 60, 3600), strict=False)
    with slurm.understood("sacctmgr", line):
        return (default_mode if mode in ("", "cluster") else mode.upper()), sum(int(n) * unit for n, unit in units if n)


def fields(text: str) -> dict[str, str]:
    """``Key = value`` and ``Key=value`` lines as a mapping."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}
