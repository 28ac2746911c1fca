"""``python -m tests.record``: records what Slurm's commands print about jobs of every kind, for tests of the parsers.

It starts a test cluster (``--release``: of another Debian release), submits ``JOBS``, waits until each is in its state,
calls every function of clusterddp that reads a command's output (``ask``), and writes the commands with their output to
``tests/unit/recorded/VERSION``. The names of hosts, users and folders are replaced. It takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from clusterddp.errors import SlurmError
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import configuration
from clusterddp.slurm.configuration import largest_array, preemption, qos_preemption
from clusterddp.slurm.queue import queued_jobs
from tests.cluster import Cluster, ClusterConfig
from tests.cluster.config import RELEASES
from tests.cluster.system import wait_until
from tests.transcript import Transcript

RECORDED = Path(__file__).parent / "unit" / "recorded"
#: Jobs end their grace period, hold and KillWait long after the recording.
CONFIG = {"nodes": 5, "grace": 600, "kill_wait": 600, "cred_expire": 600, "reserved_cores": 1, "reserved_mib": 1000}
SLEEP = "sleep 3600"
FORGOTTEN = "999999"


@dataclass(frozen=True)
class Job:
    """A job to record.

    ``expect``: state and reason, as squeue prints them, of each of its parts: ``""`` for a plain job, ``_3`` for a task
    of an array, ``+1`` for a component of a heterogeneous job. An empty reason: any. ``then``: a command of Slurm's
    administrator, followed by the job's id, once it is in state ``when``.
    """

    expect: Mapping[str, tuple[str, str]]
    options: Sequence[str] = ()
    script: str = SLEEP
    then: Sequence[str] = ()
    when: str = "RUNNING"
    name: str = ""


def one(state: str, reason: str, *options: str, **more: str | Sequence[str]) -> Job:
    """A plain job."""
    return Job({"": (state, reason)}, options, **more)  # type: ignore[arg-type]


def odd(name: str) -> Job:
    """A held job with a name that may confuse a parser."""
    return one("PENDING", "JobHeldUser", "--hold", name=name)


#: They get their nodes first.
VICTIMS = {
    "preempted": one("PREEMPTED", "", "--partition=cancel", "--nodelist=n1"),
    "in grace": one("RUNNING", "None", "--partition=low", "--nodelist=n2"),
    "lost node": one("NODE_FAIL", "NodeDown", "--nodelist=n5", "--no-requeue"),
    "timed out": one("TIMEOUT", "TimeLimit", "--nodelist=n3", "--time=1"),
}
PREEMPTORS = {
    "preemptor": one("COMPLETED", "None", "--partition=high", "--nodelist=n1", "--exclusive", script="sleep 1"),
    "waiting preemptor": one("PENDING", "Resources", "--partition=high", "--nodelist=n2", "--exclusive"),
}
PENDING = {
    "held": one("PENDING", "JobHeldUser", "--hold"),
    "held by admin": one("PENDING", "JobHeldAdmin", "--begin=now+1hour", then=("scontrol", "hold"), when="PENDING"),
    "begin time": one("PENDING", "BeginTime", "--begin=now+1hour"),
    "dependency": one("PENDING", "Dependency", "--dependency=afterany:{running}"),
    "impossible dependency": one("PENDING", "DependencyNeverSatisfied", "--dependency=afterok:{failed}"),
    "unavailable node": one("PENDING", "", "--nodelist=n4"),
    "partition down": one("PENDING", "PartitionDown", "--partition=cancel"),
    "resources": one("PENDING", "", "--partition=off", "--nodes=3", "--exclusive"),
    "held array": Job({f"_{task}": ("PENDING", "JobHeldUser") for task in (1, 3, 6)}, ["--array=1,3,5-7", "--hold"]),
    "het": Job({f"+{part}": ("PENDING", "JobHeldUser") for part in (0, 1)}, ["--hold", ":", "--hold", "--ntasks=2"]),
}
STARTED = {
    "running": one("RUNNING", "None", "--nodes=2", "--exclude=n2"),
    "running het": Job(
        {f"+{part}": ("RUNNING", "None") for part in (0, 1)}, ["--exclude=n2", ":", "--ntasks=2", "--exclude=n2"]
    ),
    "array": Job(
        {f"_{task}": ("RUNNING", "None") if task < 2 else ("PENDING", "JobArrayTaskLimit") for task in range(5)},
        ["--array=0-4%2", "--exclude=n2"],
    ),
    "suspended": one("SUSPENDED", "None", then=("scontrol", "suspend")),
    "requeued": one("PENDING", "BeginTime", then=("scontrol", "requeue")),
    "requeue hold": one("PENDING", "", then=("scontrol", "requeuehold")),
    "completing": one("COMPLETING", "", script=f"trap '' TERM\n{SLEEP}", then=("scancel",)),
    "completed": one("COMPLETED", "None", script="true"),
    "failed": one("FAILED", "NonZeroExitCode", script="exit 3"),
    "cancelled": one("CANCELLED", "", then=("scancel",)),
    "cancelled while held": one("CANCELLED", "", "--hold", then=("scancel",), when="PENDING"),
}
ODD = {
    "words": odd("two  words, 'quoted' \"twice\""),
    "bars": odd("a|b|RUNNING|None|n1"),
    "fields": odd("x JobState=RUNNING Reason=None UserId=root(0) Restarts=7 Command=y"),
    "shell": odd("lr=1e-3,seed=[0-4]%2 $HOME `id`;* \\n \\"),
    "unicode": odd("größe-模型-🚀"),
    "latin 1": odd("gr\udcfc\udcdfe"),
    "newline": odd("one\nJobId=1 JobName=two UserId=root(0) JobState=RUNNING"),
    "long": odd("long" * 100),
    "commented": one("PENDING", "JobHeldUser", "--hold", "--comment=JobState=RUNNING Command=x|y"),
}
#: The folder and the arguments of a running job's script, like a run directory that a user named.
ODD_FOLDER = "my runs/größe UserId=root(0) JobState=COMPLETED Restarts=7 Command="
ODD_ARGUMENTS = ["UserId=root(0)", "JobState=FAILED", "Restarts=7", "Command=x y|z"]

#: In the order of submission: jobs that cannot start keep later ones from starting.
JOBS = {**VICTIMS, **PREEMPTORS, **STARTED, "script": one("RUNNING", "None"), **ODD, **PENDING}


def parts(ids: Mapping[str, str]) -> dict[str, str]:
    """The job ids of all parts of all jobs, by the job's key and the part's suffix."""
    return {name + suffix: ids[name] + suffix for name, job in JOBS.items() for suffix in job.expect}


def expected() -> dict[str, tuple[str, str]]:
    """State and reason of all parts of all jobs."""
    return {name + suffix: state for name, job in JOBS.items() for suffix, state in job.expect.items()}


# ---- what is asked


def ask(ids: Mapping[str, str]) -> None:
    """Calls every function of clusterddp that reads what a command of Slurm's prints."""
    for job_id in (*parts(ids).values(), FORGOTTEN):
        with suppress(SlurmError):  # what cannot be read must be recorded
            slurm.show_job(job_id)
    queued_jobs([*parts(ids).values(), FORGOTTEN])
    queued_jobs([FORGOTTEN])
    slurm.jobs_by_script()
    largest_array()
    slurm.node_address("n1")
    configuration.read_configuration()
    configuration.read_partitions()
    configuration.read_associations(os.environ["USER"])
    configuration.read_default_account(os.environ["USER"])
    slurm.default_partition()
    for partition in (None, "low", "high", "cancel", "off"):
        slurm.read_cluster()
        slurm.usable_nodes(partition)
        preemption(partition, None)
    for qos in ("normal", "limited"):
        qos_preemption(qos, "REQUEUE")


def ask_and_write(folder: Path) -> None:
    """``ask``, in a process of the cluster's user."""
    transcript = Transcript()
    with mock.patch.object(subprocess, "run", transcript.record(subprocess.run)):
        ask(json.loads((folder / "jobs.json").read_text()))
    transcript.write(folder, lambda text: text)


# ---- the cluster


def record(release: str | None) -> Path:
    """Records on a cluster of this release (None: the machine's own Slurm); returns the folder."""
    with Cluster.up(ClusterConfig(**CONFIG, release=release)) as cluster:  # type: ignore[arg-type]
        ids = submit_all(cluster)
        folder = Path(cluster.run(["mktemp", "-d", "-p", cluster.scratch]).stdout.strip())
        cluster.run(["tee", folder / "jobs.json"], input=json.dumps(ids, indent=1) + "\n")
        try:
            await_states(cluster, ids)
            cluster.run([cluster.python, "-m", "tests.record", "--ask", folder], cwd=cluster.source, timeout=300)
        finally:
            cluster.root(["scontrol", "resume", ids["suspended"]], check=False)  # SIGKILL does not end frozen processes
        target = RECORDED / ".".join(cluster.version.split(".")[:2])
        target.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            (target / file.name).write_bytes(neutral(file.read_bytes(), cluster))
    return target


def submit_all(cluster: Cluster) -> dict[str, str]:
    """The job ids by key."""
    cluster.root(
        ["sacctmgr", "-iQ", "add", "qos", "limited", "maxjobsperuser=0", "preemptmode=requeue", "gracetime=90"]
    )
    cluster.root(["sacctmgr", "-iQ", "modify", "user", cluster.user, "set", "qos+=limited"])
    cluster.root(["scontrol", "update", "partitionname=cancel", "gracetime=0"])
    ids: dict[str, str] = {}
    for name, job in VICTIMS.items():
        ids[name] = submit(cluster, name, job, ids)
    for name in VICTIMS:
        cluster.wait_job(ids[name], {"RUNNING"})
    cluster.kill_node("n5")
    for name, job in PREEMPTORS.items():
        ids[name] = submit(cluster, name, job, ids)
    cluster.wait_job(ids["preemptor"], {"COMPLETED"})
    cluster.wait_job(ids["lost node"], {"NODE_FAIL"})  # until then its node would get other jobs
    cluster.root(["scontrol", "update", "nodename=n4", "state=drain", "reason=bad fan | größe"])
    cluster.root(["scontrol", "update", "partitionname=cancel", "state=down"])
    for name, job in JOBS.items():
        if name not in ids:
            ids[name] = submit_file(cluster) if name == "script" else submit(cluster, name, job, ids)
    return ids


def submit(cluster: Cluster, name: str, job: Job, ids: Mapping[str, str]) -> str:
    own = [option.format(**ids) for option in job.options]
    command = ["sbatch", "--parsable", f"--job-name={job.name or name}", "--output=/dev/null", *own]
    return cluster.run(command, input=f"#!/bin/bash\n{job.script}\n").stdout.strip()


def submit_file(cluster: Cluster) -> str:
    folder = cluster.scratch / ODD_FOLDER
    cluster.run(["mkdir", "-p", folder])
    cluster.run(["tee", folder / "job.sbatch"], input=f"#!/bin/bash\n{SLEEP}\n")
    command = ["sbatch", "--parsable", "--output=/dev/null", "--exclude=n2", folder / "job.sbatch"]
    return cluster.run([*command, *ODD_ARGUMENTS]).stdout.strip()


def await_states(cluster: Cluster, ids: Mapping[str, str]) -> None:
    """Until each job is as expected, doing with each what it asks for."""
    to_do = {name: job for name, job in JOBS.items() if job.then}
    every, wanted = parts(ids), expected()
    missing: list[str] = []

    def as_expected() -> bool:
        states = squeue(cluster)
        for name, job in list(to_do.items()):
            if states.get(ids[name], ("", ""))[0] == job.when:
                cluster.root([*job.then, ids[name]])
                del to_do[name]
        missing[:] = [
            f"{name} ({every[name]}): {states.get(every[name])}, expected {state} {reason}"
            for name, (state, reason) in wanted.items()
            if (found := states.get(every[name], ("", "")))[0] != state or reason not in ("", found[1])
        ]
        return not missing and not to_do

    if not wait_until(as_expected, 120, interval=0.5):
        raise SystemExit("these jobs are not in their state:\n" + "\n".join(missing))


def squeue(cluster: Cluster) -> dict[str, tuple[str, str]]:
    """State and reason of all jobs, tasks and components."""
    command = ["squeue", "--all", "--array", "--noheader", "--states=all", "--format=%i|%T|%r"]
    lines = [line.split("|") for line in cluster.root(command).stdout.splitlines()]
    return {job_id: (state, reason) for job_id, state, reason in lines}


def neutral(text: bytes, cluster: Cluster) -> bytes:
    """The text without the names of this machine, its user and its folders."""
    host = cluster.root(["hostname", "-s"]).stdout.strip()
    for folder, name in ((cluster.scratch, b"/shared"), (cluster.conf.parent.parent, b"/cluster")):
        text = text.replace(str(folder).encode(), name)
    text = re.sub(rb"\b%s\(%d\)" % (cluster.user.encode(), cluster.uid), b"ddp(1000)", text)
    return re.sub(
        rb"\b%s\b" % re.escape(host.encode()), b"login", re.sub(rb"\b%s\b" % cluster.user.encode(), b"ddp", text)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.record", description="Record the output of Slurm's commands."
    )
    parser.add_argument("--release", choices=RELEASES, help="this Debian release's Slurm; default: the machine's")
    parser.add_argument("--ask", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ask:
        ask_and_write(options.ask)
    else:
        print(f"recorded in {record(options.release)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
