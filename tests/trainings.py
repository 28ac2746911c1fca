"""Runs of tests/scripts/train.py on the test cluster, and what they are compared with."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.cluster.system import Process
from tests.runs_on_disk import outcome_of
from tests.waiting import differing, final_state, story, wait_for_outcome, wait_until

STEPS = 40
#: What the ranks can be doing; see tests/scripts/train.py.
MOMENTS = ["import", "rendezvous", "first step", "evaluation", "restore", "save", "last step", "after the end"]


def ranks_of(cluster: Cluster, node: str) -> list[Process]:
    """The ranks on a node; not srun, which has their command line behind its own, nor children that they forked."""
    shims = [process for process in cluster.processes(node) if "clusterddp.worker" in process.command()]
    shims = [process for process in shims if Path(process.command().partition(" ")[0]).name != "srun"]
    pids = {process.pid for process in shims}
    return [process for process in shims if process.parent() not in pids]


def lift_hold(up: Cluster, job_id: str) -> None:
    """Lets a requeued job start in the next second, and in no earlier one.

    A node refuses a job's credential that is not of a later second than the end of the job's last start there: Slurm
    22.05.8 then logs `Killing non-startable batch JobId=2: Job credential revoked`, and the job is FAILED.
    """
    job = up.job(job_id)
    if job.get("JobState") != "PENDING" or job.get("Reason") != "BeginTime":
        return
    # Set once: moved on again and again, the start would never come. It is Unknown when it has come.
    start = job.get("StartTime", "Unknown")
    if start != "Unknown" and time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) > time.time() + 2:
        up.root(["scontrol", "update", f"JobId={job_id}", "StartTime=now+1"], check=False)


@dataclass
class Training:
    """tests/scripts/train.py as a run on the cluster, two nodes with a rank each."""

    cluster: Cluster
    folder: Path
    run: RunDirectory
    job_id: str = ""
    _looked: float = -math.inf

    @classmethod
    def submit(
        cls,
        cluster: Cluster,
        folder: Path,
        *script: str,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> Training:
        """Submits it; ``script`` are its arguments."""
        training = cls(cluster, folder, RunDirectory(folder / "run"))
        training.marks.mkdir(exist_ok=True)
        os.chown(training.marks, cluster.uid, -1)
        shape = "--nodes 2 --gpus 1 --device cpu --partition low --set timeouts.notice_s=15".split()
        command = [cluster.python, "-m", "clusterddp.submit", "tests/scripts/train.py", "--run-dir", training.run.path]
        own = ["--steps", str(STEPS), "--marks", training.marks, *script]
        checkpoint = ["--set", "checkpoint.every=20 steps"]
        done = cluster.run([*command, *shape, *checkpoint, *options, "--", *own], cwd=cluster.source, env=env)
        training.job_id = done.stdout.strip()
        return training

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    def wait_at_moment(self, attempt: int) -> None:
        """Until the attempt's rank 0 waits at its moment (rank 1 waits there, too, or for rank 0)."""
        ready = (self.marks / f"{attempt}-0").exists
        self.wait(ready, f"attempt {attempt} at its moment")

    def comes_to_its_moment(self, attempt: int) -> bool:
        """As ``wait_at_moment``; False if Slurm does not start the attempt's ranks."""
        mark = self.marks / f"{attempt}-0"
        not_started: Callable[[], bool] = lambda: any(  # noqa: E731
            event["attempt"] == attempt and "was not started" in event["error"]
            for event in events_of(self.run, "rank_failed")
        )
        self.wait(lambda: mark.exists() or not_started(), f"attempt {attempt} at its moment")
        return mark.exists()

    def go(self, attempt: int) -> None:
        (self.marks / f"{attempt}-go").touch()

    def hurry(self) -> None:
        """Ends the pauses of its steps."""
        (self.marks / "fast").touch()

    def lift_hold(self) -> None:
        """As ``lift_hold``, twice a second at most."""
        if time.monotonic() - self._looked >= 0.5:
            self._looked = time.monotonic()
            lift_hold(self.cluster, self.job_id)

    def preempt(self) -> str:
        """A job in ``high`` takes the nodes; returns once Slurm has begun to preempt."""
        high = self.cluster.preempt(seconds=0.1)
        begun: Callable[[dict[str, str]], bool] = lambda job: (  # noqa: E731
            job.get("PreemptTime") not in ("None", None) or job.get("JobState") != "RUNNING"
        )
        self.cluster.wait_for(self.job_id, begun, "to be preempted")
        return high

    def finish(self) -> str:
        """Until the run is over, lifting holds."""
        self.wait(lambda: outcome_of(self.run), "the run to be over", 90)
        return wait_for_outcome(self.run)

    def ranks_on(self, node: str) -> list[Process]:
        return ranks_of(self.cluster, node)

    def wait_for_a_step_of(self, attempt: int) -> None:
        """Until this attempt, or a later one, has completed a step."""
        lines = lambda: read_lines(self.run.metrics_file)  # noqa: E731
        self.wait(lambda: any(line["attempt"] >= attempt for line in lines()), f"a step of attempt {attempt}")

    def wait_for_attempt(self, number: int) -> None:
        """Until the attempt has started."""
        self.wait(lambda: number in self.run.attempts(), f"attempt {number}")

    def wait(self, condition: Callable[[], object], what: str, timeout: float = 60) -> None:
        """Until the condition is true, lifting holds; a failure shows all that is known of the run and its job."""
        try:
            wait_until(lambda: self.lift_hold() or condition(), what, timeout)
        except AssertionError as error:
            known = [self.cluster.root(command, check=False).stdout for command in (
                ["scontrol", "show", "job", self.job_id], ["squeue", "--all"], ["sinfo", "-N", "-l"],
            )]  # fmt: skip
            raise AssertionError(
                "\n".join([str(error), *known, self.cluster.log("slurmctld"), story(self.run)])
            ) from None


def preempt_at_each(training: Training, moments: Sequence[str]) -> None:
    """Preempts attempt 0 at the first moment, attempt 1 at the second, and so on.

    In its last step a run may be done before the signal reaches its ranks: it is over then. An attempt whose ranks
    Slurm did not start (fault 41) is restarted in place, and its moment left out.
    """
    for attempt, moment in enumerate(moments):
        if not training.comes_to_its_moment(attempt):
            continue
        training.preempt()
        training.go(attempt)
        if moment == "last step":
            next_or_over = lambda number=attempt + 1: outcome_of(training.run) or number in training.run.attempts()  # noqa: E731
            training.wait(next_or_over, "the run to be over, or another attempt")
            if outcome_of(training.run):
                return
        elif moment != "after the end":
            training.wait_for_attempt(attempt + 1)


def check_same_run(run: RunDirectory, reference: RunDirectory, redone: bool = False) -> None:
    """The same losses and the same bits; each step once, in the history that counts if steps were ``redone``."""
    lines = run.metrics() if redone else read_lines(run.metrics_file)
    assert [line["step"] for line in lines] == list(range(STEPS)), story(run)
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in reference.metrics()]
    assert differing(final_state(run), final_state(reference)) == []


def events_of(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    """The run's events of one kind."""
    return [event for event in run.events() if event["event"] == name]
