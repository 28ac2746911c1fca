"""A cluster's configuration for jobs: release, clock, partitions, and the accounts of a user.

The parsers are pure functions of what scontrol, sinfo and sacctmgr print.

``Preemption`` is what a cluster does to a job that it preempts: the notice, the requeue and its hold. It is read once,
at submission, from the controller's configuration, which ``scontrol`` shows to everyone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterddp.errors import SlurmError
from clusterddp.jobdef.job import Job
from clusterddp.slurm import commands as slurm

#: The oldest and the newest release that clusterddp is tested with.
TESTED = ((22, 5), (26, 5))
#: Values of AccountingStorageType without a database. From 23.11 on it is empty.
_NO_ACCOUNTING = ("", "(null)", "accounting_storage/none", "accounting_storage/filetxt")
#: Values of JobSubmitPlugins and CliFilterPlugins without a plugin.
_NO_PLUGINS = {"", "(null)", "none"}


@dataclass(frozen=True)
class Configuration:
    """``scontrol show config``. ``values``: by parameter. ``time``: the controller's clock, in unix seconds."""

    text: str
    values: Mapping[str, str]
    time: float | None

    @property
    def release(self) -> str:
        """Such as ``22.05.8``, or empty if unknown."""
        return self.values.get("SLURM_VERSION", "")

    @property
    def tested(self) -> bool | None:
        """Whether the release is in the tested range, or None if it is unknown."""
        match = re.match(r"(\d+)\.(\d+)", self.release)
        return TESTED[0] <= (int(match[1]), int(match[2])) <= TESTED[1] if match else None

    @property
    def reroutes(self) -> bool:
        """Whether plugins of the site may choose the partition of a job, and change its other options."""
        plugins = {self.values.get(name, "unknown") for name in ("JobSubmitPlugins", "CliFilterPlugins")}
        return not plugins <= _NO_PLUGINS

    @property
    def accounting(self) -> bool:
        """Whether the cluster has a database of accounts and past jobs."""
        return self.values.get("AccountingStorageType", "") not in _NO_ACCOUNTING

    @property
    def enforced(self) -> bool:
        """Whether only users with an account may submit."""
        words = self.values.get("AccountingStorageEnforce", "").lower()
        return any(word in words for word in ("associations", "limits", "qos", "safe", "wckeys", "all"))

    @property
    def controllers(self) -> str:
        """The hosts of slurmctld: ``SlurmctldHost[0] = ctl1(10.0.0.1)``."""
        hosts = [value for name, value in self.values.items() if name.startswith("SlurmctldHost")]
        return ", ".join(host.partition("(")[0] for host in hosts)


def parse_configuration(text: str) -> Configuration:
    """``scontrol show config``. Its first line has the controller's time, in this host's time zone."""
    moment = re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE)
    return Configuration(text, fields(text), slurm.unix_time(moment[1]) if moment else None)


@dataclass(frozen=True)
class Partition:
    """A partition. ``line``: as scontrol shows it. Times are in Slurm's words, such as 1-00:00:00 or UNLIMITED."""

    name: str
    default: bool
    state: str
    nodes: int
    most_time: str
    default_time: str
    accounts: tuple[str, ...]
    """The accounts that may use it. Empty: all."""
    line: str
    gpus: int = 0

    def open_to(self, accounts: Sequence[str]) -> bool:
        """Whether one of the accounts may use it."""
        return not self.accounts or bool(set(self.accounts) & set(accounts))


def parse_partitions(text: str) -> list[Partition]:
    """``scontrol show partition -o``: a line for each."""
    found = []
    with slurm.understood("scontrol", text):
        for line in filter(None, map(str.strip, text.splitlines())):
            values = dict(re.findall(r"(\w+)=(\S*)", line))
            allowed = values.get("AllowAccounts", "ALL")
            found.append(
                Partition(
                    name=values["PartitionName"],
                    default=values.get("Default") == "YES",
                    state=values.get("State", "UP"),
                    nodes=int(values.get("TotalNodes", 0)),
                    most_time=values.get("MaxTime", "UNLIMITED"),
                    default_time=values.get("DefaultTime", "NONE"),
                    accounts=() if allowed == "ALL" else tuple(allowed.split(",")),
                    line=line,
                )
            )
    return found


def parse_gpus(text: str) -> dict[str, int]:
    """The GPUs of each partition, from lines ``PARTITION|NODES|GRES``, each for nodes that are alike."""
    found: dict[str, int] = {}
    with slurm.understood("sinfo", text):
        for line in text.splitlines():
            name, nodes, gres = line.split("|")
            found[name] = found.get(name, 0) + int(nodes) * sum(slurm.parse_gres(gres).values())
    return found


@dataclass(frozen=True)
class Association:
    """What a user may submit to: an account, for one partition ('' for all), with these QOS."""

    account: str
    partition: str
    qos: tuple[str, ...]
    default_qos: str


def parse_associations(text: str) -> list[Association]:
    """``sacctmgr -nP show assoc format=Account,Partition,QOS,DefaultQOS``."""
    found = []
    with slurm.understood("sacctmgr", text):
        for line in text.splitlines():
            account, partition, qos, default = line.split("|")
            found.append(Association(account, partition, tuple(filter(None, qos.split(","))), default))
    return found


def read_configuration() -> Configuration:
    """From the controller."""
    return parse_configuration(slurm.run("scontrol", "show", "config"))


def usable_nodes(partition: str | None) -> list[str]:
    """As in commands.py. Without a partition, the controller is asked whether the site chooses it."""
    return slurm.usable_nodes(partition, routed=partition is None and read_configuration().reroutes)


def largest_array() -> int:
    """The number of tasks that an array may have. Raises SlurmError if this cluster has no arrays."""
    text = slurm.run("scontrol", "show", "config")
    with slurm.understood("scontrol", text):
        most = int(fields(text)["MaxArraySize"])
    if most < 2:
        raise SlurmError(f"this cluster has no job arrays (MaxArraySize is {most}). Submit the runs one by one")
    return most


def read_partitions() -> list[Partition]:
    """All that this user can see, with the GPUs of their nodes."""
    partitions = parse_partitions(slurm.run("scontrol", "show", "partition", "-o"))
    gpus = parse_gpus(slurm.run("sinfo", "-h", "-o", "%R|%D|%G"))
    return [replace(one, gpus=gpus.get(one.name, 0)) for one in partitions]


def read_associations(user: str) -> list[Association]:
    """Those of a user."""
    columns = "format=Account,Partition,QOS,DefaultQOS"
    return parse_associations(slurm.run("sacctmgr", "-nP", "show", "assoc", f"user={user}", columns))


def read_default_account(user: str) -> str:
    """The account of jobs that name none, or '' if the user has none."""
    return slurm.run("sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount").strip().partition("\n")[0]


@dataclass(frozen=True)
class Preemption:
    """The preemption policy for a job of one partition, or of the most demanding of several (and QOS).

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
    #: The hosts that may submit jobs.
    submit_hosts: str = "ALL"
    #: Whether the grace period is known. If not, ``grace_s`` is 0, the shortest.
    known: bool = True

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
        if not self.known:
            notice = f"with an unknown grace period. A run has {self.kill_wait_s} s (KillWait) or more to save"
        elif not self.grace_s:
            notice = f"without a grace period. A run has {self.kill_wait_s} s (KillWait) to save"
        return f"{self.partition} preempts {notice}. {self._continuation(job)}"

    def _continuation(self, job: Job) -> str:
        if not job.continues:
            return "The run then waits until you submit it again (continue: false)"
        if self.must_resubmit and not (job.policy == "requeue" and self.grace_s):
            return "Slurm cancels preempted jobs, so the run continues in a new job"
        if job.policy == "resubmit" and self.grace_s:
            return "The run continues in a new job (policy: resubmit)"
        if job.policy is None and job.min_nodes is not None and self.grace_s:
            return "The run continues in a new job, because a requeued job would wait for as many nodes as before"
        if job.expedite_requeue:
            return "The run is requeued and starts again without a hold (expedite_requeue)"
        lifted = (
            "`submit --wait` and `clusterddp wait --resubmit` lift the hold"
            if job.lift_hold
            else "With lift_hold: false, clusterddp does not lift the hold"
        )
        return f"The run is requeued and then held for {self.hold_s} s. {lifted}"


def preemption(partition: str | None, qos: str | None) -> Preemption:
    """The policy of a partition (None: the default one, or any if none is), or the one with the shortest notice of
    several, such as ``a,b``. With preempt/qos, of the QOS. A plugin may know a partition that Slurm does not."""
    configuration = slurm.run("scontrol", "show", "config")
    lines = {one.name: one.line for one in parse_partitions(slurm.run("scontrol", "show", "partition", "-o"))}
    if partition is None:
        partition = slurm.default_partition() or ",".join(lines)
    names = [name for name in partition.split(",") if name in lines]
    found = [policy(configuration, lines[name], name, qos) for name in names]
    found = found or [policy(configuration, None, partition, qos)]
    preempting = [one for one in found if one.mode != "OFF"]
    shortest = min(preempting or found, key=lambda one: one.notice_s)
    return replace(shortest, partition=" or ".join(dict.fromkeys(one.partition for one in preempting or found)))


def policy(configuration: str, shown: str | None, partition: str, qos: str | None) -> Preemption:
    """The same, from what ``scontrol show config`` and ``scontrol show partition -o`` print (None: nothing)."""
    config = fields(configuration)
    default_mode = config.get("PreemptMode", "OFF").split(",")[-1]
    with slurm.understood("scontrol", shown or ""):
        values = {"PreemptMode": default_mode} if shown is None else fields(shown.replace(" ", "\n"))
        name, mode, grace_s = partition, values.get("PreemptMode", "OFF"), int(values.get("GraceTime", 0))
    known = shown is not None
    if config.get("PreemptType") == "preempt/qos":
        name, mode = qos or "normal", default_mode
        of_qos = qos_preemption(name, mode)
        known = of_qos is not None
        mode, grace_s = of_qos or (mode, 0)
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
            submit_hosts=values.get("AllocNodes", "ALL"),
            known=known,
        )


def qos_preemption(name: str, default_mode: str) -> tuple[str, int] | None:
    """Mode and grace period of a QOS, or None if sacctmgr does not know it: a site's plugin may replace it by another.

    ``cluster`` stands for the configuration's mode.
    """
    line = slurm.run("sacctmgr", "-nP", "show", "qos", f"name={name}", "format=PreemptMode,GraceTime").strip()
    if not line:
        return None
    mode, _, grace = line.partition("|")
    units = zip(reversed(grace.split(":")), (1, 60, 3600), strict=False)
    with slurm.understood("sacctmgr", line):
        return (default_mode if mode in ("", "cluster") else mode.upper()), sum(int(n) * unit for n, unit in units if n)


def fields(text: str) -> dict[str, str]:
    """``Key = value`` and ``Key=value`` lines as a mapping."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}
