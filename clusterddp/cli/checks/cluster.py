"""What a login node can ask Slurm: the controller, its clock, the user's accounts, partitions and their preemption."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Sequence

from clusterddp.checks import clock
from clusterddp.checks.check import Check, failed, ok, warning
from clusterddp.errors import SlurmError, SlurmMissing
from clusterddp.jobdef.job import Job
from clusterddp.reporter import counted
from clusterddp.slurm import configuration
from clusterddp.slurm.configuration import Association, Configuration, Partition
from clusterddp.slurm.preemption_policy import Preemption, policy

#: scontrol tells the controller's time in whole seconds.
RESOLUTION_S = 1.0
_UNKNOWN = "unknown, as Slurm did not answer"


def slurm_checks(partition: str | None, qos: str | None) -> tuple[list[Check], str]:
    """A check for each thing that Slurm says, and what a preemption in the partition (None: the default one) does."""
    started = time.time()
    try:
        config = configuration.read_configuration()
    except SlurmError as error:
        missing = isinstance(error, SlurmMissing)
        remedy = "load the site's Slurm module" if missing else "ask the administrator whether slurmctld runs"
        found = "scontrol is not on PATH" if missing else str(error)
        return [failed("slurm", found, f"{remedy}; without Slurm, `submit --local` runs on this machine")], _UNKNOWN
    checks = [judge_release(config), judge_clock(config.time, started, time.time())]
    associations: list[Association] | None = None
    try:
        associations, default = read_accounts(config)
        checks.append(judge_accounts(config, associations, default))
    except SlurmError as error:
        advice = "submit with -A ACCOUNT if the cluster needs an account"
        checks.append(warning("accounts", f"unknown: {error}", advice))
    try:
        partitions = configuration.read_partitions()
        of_qos = policy(config.text, "", "", qos) if config.values.get("PreemptType") == "preempt/qos" else None
        checks += [judge_partition(one, config, of_qos, associations) for one in partitions]
        return checks, sentence(partition, of_qos, partitions, config)
    except SlurmError as error:
        return [*checks, failed("partitions", str(error), "choose a partition with -p")], f"unknown: {error}"


def judge_release(config: Configuration) -> Check:
    """The release of Slurm, and whether it is one of those that are tested."""
    oldest, newest = (f"{year}.{month:02}" for year, month in configuration.TESTED)
    where = f" on {config.controllers}" if config.controllers else ""
    cluster = config.values.get("ClusterName", "")
    values = {"release": config.release, "cluster": cluster}
    found = f"{config.release or 'unknown release'}{where}, cluster {cluster or 'without a name'}"
    if not config.tested:
        return warning("slurm", found, f"tested are {oldest} to {newest}: try `clusterddp drill` first", **values)
    return ok("slurm", f"{found} (tested: {oldest} to {newest})", **values)


def judge_clock(theirs: float | None, before: float, after: float) -> Check:
    """The controller's clock, which was read between two moments of this host's."""
    if theirs is None:
        return warning("clock", "scontrol does not tell the controller's time", "compare the clocks by hand")
    ahead = max(0.0, theirs - after) + min(0.0, theirs + RESOLUTION_S - before)
    if abs(ahead) > clock.MOST_S:
        found = f"the controller's clock differs from this host's by {ahead:+.0f} s"
        return warning("clock", found, "report it to the administrator: chrony or NTP must run on both", ahead_s=ahead)
    return ok("clock", "this host and the controller agree to the second", ahead_s=ahead)


def read_accounts(config: Configuration) -> tuple[list[Association], str]:
    """The user's associations and default account; none without accounting."""
    if not config.accounting:
        return [], ""
    try:
        user = getpass.getuser()
    except (KeyError, OSError) as error:  # KeyError before Python 3.13
        raise SlurmError(f"user {os.getuid()} has no name on this host") from error
    return configuration.read_associations(user), configuration.read_default_account(user)


def judge_accounts(config: Configuration, associations: Sequence[Association], default: str) -> Check:
    """Which accounts and QOS the user may submit with."""
    if not config.accounting:
        return ok("accounts", "no accounting on this cluster: jobs need no account, and sacct knows no past jobs")
    if not associations:
        found = "this user has no account"
        if config.enforced:
            return failed("accounts", found, "ask the administrator for one: Slurm refuses jobs without it")
        return ok("accounts", f"{found}, and the cluster requires none")
    accounts = list(dict.fromkeys(one.account for one in associations))
    qos = list(dict.fromkeys(name for one in associations for name in one.qos))
    found = f"{_listed(accounts)}; QOS {_listed(qos) or 'none'}"
    values = {"accounts": accounts, "qos": qos, "default": default}
    if default:
        return ok("accounts", f"{found}; default account {default}", **values)
    return warning("accounts", f"{found}; no default account", "name one with -A, or in your defaults", **values)


def judge_partition(
    one: Partition, config: Configuration, of_qos: Preemption | None, associations: Sequence[Association] | None
) -> Check:
    """A partition: its size, limits, and what it does to jobs that it preempts."""
    known = of_qos or policy(config.text, one.line, one.name, None)
    name = f"partition {one.name}{' (default)' if one.default else ''}"
    size = counted(one.nodes, "node") + (f", {counted(one.gpus, 'GPU')}" if one.gpus else "")
    limit = f"limit {one.most_time}" + ("" if one.default_time == "NONE" else f", default {one.default_time}")
    found = f"{size}; {limit}; {_preempts(known)}"
    values = {
        "partition": one.name, "default": one.default, "state": one.state, "nodes": one.nodes, "gpus": one.gpus,
        "max_time": one.most_time, "default_time": one.default_time, "preempt_mode": known.mode,
        "grace_s": known.grace_s, "kill_wait_s": known.kill_wait_s, "hold_s": known.hold_s,
    }  # fmt: skip
    if one.state != "UP":
        return warning(name, f"{one.state}; {found}", "choose another partition with -p", **values)
    if associations and not one.open_to([association.account for association in associations]):
        return warning(name, f"not open to your accounts; {found}", "choose another partition with -p", **values)
    return ok(name, found, **values)


def _preempts(known: Preemption) -> str:
    if known.mode == "OFF":
        return "no preemption"
    grace = f"{known.grace_s} s of grace" if known.grace_s else f"no grace, KillWait {known.kill_wait_s} s"
    held = f", held {known.hold_s} s" if known.mode == "REQUEUE" else ""
    return f"preempts ({known.mode}, {grace}{held})"


def sentence(
    partition: str | None, of_qos: Preemption | None, partitions: Sequence[Partition], config: Configuration
) -> str:
    """What a preemption in the partition, or else the default one, does to a run."""
    chosen = next((one for one in partitions if (one.name == partition if partition else one.default)), None)
    if partition and chosen is None:
        names = _listed([one.name for one in partitions]) or "none"
        raise SlurmError(f"no partition {partition!r} on this cluster; available: {names}")
    if chosen is None and of_qos is None:
        return "this cluster has no default partition: choose one with -p"
    known = of_qos or policy(config.text, chosen.line, chosen.name, None)  # type: ignore[union-attr]
    return known.sentence(Job(name="doctor", device="cpu"))


def _listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
