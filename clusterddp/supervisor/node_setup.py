"""The setup of a job's nodes before its ranks start.

srun starts ``node_task`` once per node, gives each task the same plan on its standard input, and brings back one line
of JSON from each. The supervisor waits for that as it waits for ranks: a stop that comes meanwhile ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from clusterddp.codec import Misfit, read
from clusterddp.errors import ClusterddpError
from clusterddp.failures.exit_status import LaunchFailure, launch_failure
from clusterddp.failures.placement import Placement
from clusterddp.history.beginnings import Staged, Unstaged
from clusterddp.history.event import Event
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.program import expand_variables
from clusterddp.process import module_command
from clusterddp.reporter import counted, duration
from clusterddp.rundir.files import create_file
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.staging import Packed, changed, copy_of
from clusterddp.supervisor.batch_host_guard import guard_environment
from clusterddp.supervisor.node_task import NodeReport, Plan

#: Seconds for Python to start on the nodes, and for a node to report its own timeout.
MARGIN_S = 20.0
#: Seconds that srun may take to end its tasks.
END_S = 15.0


class NodeSetup:
    """The setup of the nodes of this start of the job: each has it once."""

    def __init__(self, run: RunDirectory, job: Job, environ: Mapping[str, str]) -> None:
        self._job = job
        self._asked: tuple[str, ...] = ()
        self._reports: dict[str, NodeReport] = {}
        #: Where the nodes get which environment, or why they do not.
        self._stage, self._packed, self._not_staged = _to_stage(run, job, environ)
        self._began = time.monotonic()
        self._stage_recorded = job.stage is None

    def pending(self, placement: Placement) -> tuple[str, ...]:
        """The nodes that still need it, spares included."""
        if not self._job.node_setup and self._packed is None:
            return ()
        nodes = placement.allocated or expand(os.environ["SLURM_JOB_NODELIST"])
        done = [node for node, report in self._reports.items() if report.failed is None]
        return tuple(node for node in nodes if node not in (*done, *placement.aside))

    def start(self, nodes: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts srun on these nodes. What it and the setup print goes to ``log``."""
        self._asked, self._log = tuple(nodes), log
        command = ["/usr/bin/env", *srun_command(nodes), *module_command("clusterddp.supervisor.node_task")]
        with open(log, "ab", opener=create_file) as messages:
            pipe = subprocess.PIPE
            return subprocess.Popen(command, env=guard_environment(), stdin=pipe, stdout=pipe, stderr=messages)

    def finish(self, srun: subprocess.Popen[bytes]) -> LaunchFailure | None:
        """Waits for the nodes, and ends srun if they take too long. None once all of them are ready."""
        plan = Plan(self._job.node_setup, self._job.timeouts.nodes_s, self._stage, self._packed)
        late = False
        try:
            output, _ = srun.communicate(json.dumps(asdict(plan)).encode(), timeout=plan.seconds + MARGIN_S)
        except subprocess.TimeoutExpired:
            late = True
            srun.send_signal(signal.SIGQUIT)
            try:
                output, _ = srun.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                srun.kill()
                output, _ = srun.communicate()
        reports = [report for line in output.decode(errors="replace").splitlines() if (report := _report(line))]
        self._reports |= {report.node: report for report in reports}
        failed = [report for report in reports if report.failed is not None]
        if failed:
            return self._failure(failed)
        missing = [node for node in self._asked if node not in self._reports]
        if not missing:
            return None
        if late:
            what = " and ".join(key for key in ("node_setup", "stage") if getattr(self._job, key))
            error = f"{_named(missing)} did not finish {what} within {duration(plan.seconds)} (timeouts.nodes_s)"
            return LaunchFailure(error, (), True, missing[0] if len(missing) < len(self._asked) else "")
        return launch_failure(self._log.read_text(errors="replace"), "the setup of the nodes")

    def command(self, ranks: list[str]) -> list[str]:
        """The ranks' command with the interpreter that they use: that of the copy, if every node has one."""
        if self._packed is None or self._without_copy():
            return ranks
        return [str(copy_of(self._packed, Path(self._stage)) / self._packed.python), *ranks[1:]]

    def record_stage(self, record: Callable[[Event], object]) -> None:
        """Records whether the ranks use a copy of their environment, once."""
        if self._stage_recorded:
            return
        self._stage_recorded = True
        if self._packed is None:
            record(Unstaged(why=self._not_staged))
        elif without := self._without_copy():
            others = f" (and {counted(len(without) - 1, 'other node')})" if without[1:] else ""
            record(Unstaged(why=f"{without[0].not_staged}{others}", node=without[0].node))
        else:
            unpacked = [report.node for report in self._reports.values() if report.unpacked]
            folder, seconds = str(copy_of(self._packed, Path(self._stage))), time.monotonic() - self._began
            record(Staged(prefix=self._packed.prefix, folder=folder, unpacked=unpacked, seconds=seconds))

    def _without_copy(self) -> list[NodeReport]:
        return [report for report in self._reports.values() if report.not_staged is not None]

    def _failure(self, failed: Sequence[NodeReport]) -> LaunchFailure:
        """The first one, as long as others passed a failure of its node."""
        first, others = failed[0], [report.node for report in failed[1:]]
        said = f". Its last line: {first.output}" if first.output else " and printed nothing"
        more = f". It failed on {_named(others)}, too" if others else ""
        suspect = first.node if len(failed) < len(self._asked) else ""
        tail = self._log.read_text(errors="replace").splitlines()
        lines = [line for line in tail if line.startswith(f"{first.node}: ")][-20:]
        error = f"node {first.node}: node_setup {first.failed}{said}{more}"
        return LaunchFailure(error, tuple(lines), True, suspect)


def _to_stage(run: RunDirectory, job: Job, environ: Mapping[str, str]) -> tuple[str, Packed | None, str]:
    """The folder on the nodes and the environment to copy there, or without one, why not."""
    stage, unknown = expand_variables(job.stage or "", environ)
    if job.stage is None or unknown:
        return stage, None, f"stage: {job.stage} is no folder of this job, because ${' and $'.join(unknown)} is not set"
    if not stage.startswith("/"):
        return stage, None, f"stage: {job.stage} is {stage}, which is not an absolute path"
    try:
        record = read_json(run.environment_file)
        packed = None if record is None else read(Packed, record)
    except (ClusterddpError, OSError, Misfit) as error:
        return stage, None, f"could not read {run.environment_file}: {error}"
    if packed is None:
        return stage, None, "the run was submitted without its environment. Submit it again"
    why = changed(packed)
    return stage, None if why else packed, why or ""


def _report(line: str) -> NodeReport | None:
    """What a line says. None for anything else that was printed."""
    with suppress(ValueError, Misfit):
        return read(NodeReport, json.loads(line))
    return None


def _named(nodes: Sequence[str]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    return f"{counted(len(nodes), 'node')} ({' '.join(nodes[:8])}{' ...' if len(nodes) > 8 else ''})"


def srun_command(nodes: Sequence[str]) -> list[str]:
    """srun's part of the command line: a task per node, with all CPUs of the job there.

    --overlap: the ranks' step then does not wait until Slurm has noticed the end of this one.
    """
    return [
        "srun",
        "--export=ALL",
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        "--cpu-bind=none",
        "--gres=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
    ]
