"""A cluster's configuration for jobs: release, clock, partitions, and the accounts of a user.

The parsers are pure functions of what scontrol, sinfo and sacctmgr print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterddp.errors import SlurmError
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.preemption_policy import fields

#: The oldest and the newest release that clusterddp is tested with.
TESTED = ((22, 5), (26, 5))
#: Values of AccountingStorageType without a database. From 23.11 on it is empty.
_NO_ACCOUNTING = ("", "(null)", "accounting_storage/none", "accounting_storage/filetxt")


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
