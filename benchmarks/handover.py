"""How fast nodes are handed over, and taken up again: ``python -m benchmarks.handover``.

On the test cluster, two nodes with a rank each, every figure beside a control started the same way, alternating:

(a) Handover: from the TERM that a preemption sends to the ranks (by slurmd's own log) to the first command of the job
    that takes the nodes. Control: a batch job whose ranks end at once on TERM and which then calls ``scontrol requeue``
    and ends. The bar: ours <= control + one step + one save + 0.5 s.
(b) Resume: from the first line of the requeued job's batch script to the end of its first step. Control: a DDP script
    under plain ``srun python``, from the first line of its requeued batch script to the end of its only step. The bar:
    ours <= control + 1 s.
(c) With the hold that Slurm puts on requeued jobs by default (cred_expire=120, so 121 s): from the end of the job that
    took the nodes to the first new step, once with ``clusterddp wait --resubmit`` running and once with
    ``policy: resubmit``.
    The bar: 5 s more than the control, the empty DDP script from its start to its step.

All repetitions take about 10 minutes. Medians are compared; worst cases stand beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.runs import cluster, empty_ddp_start, in_folders, srun_script, submit_empty_ddp
from benchmarks.sides import in_turns
from clusterddp.rundir.json_lines import read_lines
from tests.cluster import Cluster, ClusterConfig
from tests.interruptions import HighJob, lifting, stamps, submit_training, term_sent, until
from tests.trainings import Training

WAIT_S = 90.0
HANDOVER_BAR_S, RESUME_BAR_S, HOLD_BAR_S = 0.5, 1.0, 5.0
#: The job that takes the nodes under (c) keeps them until the preempted one has been requeued and waits.
HIGH_SECONDS = 5.0
STEPS_BEFORE, PAUSE = 20, "0.05"
TEXT = """# Hand-over and resume

A run of two nodes is preempted and resumed, in turns with a control that is started the same way.
`benchmarks/handover.py` says what each row measures."""


@dataclass(frozen=True)
class Cycle:
    """One preemption and what came after it, in seconds; step and save of ours only."""

    handover: float
    resume: float
    step: float = 0.0
    save: float = 0.0


# ---- (a) and (b)


def our_cycle(up: Cluster, folder: Path) -> Cycle:
    """A clusterddp run, preempted in the middle of its steps."""
    with training_run(up, folder) as training:
        high, sent = preempt(up, training.job_id, folder)
        resumed = until(
            lifting(up, training.job_id, lambda: first_step_of(training, 1)), "the resumed run's step", WAIT_S
        )
        step, save = step_and_save(training)
        return Cycle(high - sent, resumed - stamps(folder / "starts")[-1], step, save)


def control_cycle(up: Cluster, folder: Path) -> Cycle:
    """The control: ranks that end at once, a batch script that requeues; then the empty DDP script."""
    job_id = submit_control(up, folder)
    until(lambda: len(list(folder.glob("ready-*"))) == 2, "the control's ranks", WAIT_S)
    high, sent = preempt(up, job_id, folder)
    step = lifting(up, job_id, lambda: next(iter(stamps(folder / "stepped")), None))
    stepped = until(step, "the control's step", WAIT_S)
    return Cycle(high - sent, stepped - stamps(folder / "starts")[-1])


@contextmanager
def training_run(up: Cluster, folder: Path, policy: str | None = None) -> Iterator[Training]:
    """A run that has made some steps and would make many more; it is cancelled afterwards."""
    training = submit_training(up, folder, "--steps", "100000", "--pause", PAUSE, policy=policy)
    try:
        until(lambda: len(steps_of(training, 0)) > STEPS_BEFORE or None, f"{training.run} to train", WAIT_S)
        yield training
    finally:
        up.run([up.python, "-m", "clusterddp", "cancel", training.run.path], check=False)
        up.drain_jobs()


def submit_control(up: Cluster, folder: Path) -> str:
    """Two nodes, a task on each with all its CPUs, as for ours; the empty DDP script runs after the requeue."""
    wait = f"""if [ -z "$SLURM_RESTART_COUNT" ]; then
    {srun_script(up, "wait_for_term.py", folder)}
    scontrol requeue $SLURM_JOB_ID
    exit
fi"""
    return submit_empty_ddp(up, folder, wait)


def preempt(up: Cluster, job_id: str, folder: Path) -> tuple[float, float]:
    """When the job that takes the nodes ran its first command, and when TERM was sent to the ranks."""
    high = HighJob.submit(up, folder / "high")
    started = until(high.started, "the nodes to be free", WAIT_S)
    sent = until(lambda: term_sent(up, job_id), f"slurmd's word on a TERM to job {job_id}", 5)
    return started, sent


def steps_of(training: Training, attempt: int) -> list[dict[str, Any]]:
    """The metrics lines of one attempt."""
    return [line for line in read_lines(training.run.metrics_file) if line["attempt"] == attempt]


def first_step_of(training: Training, attempt: int) -> float | None:
    return min((line["time"] for line in steps_of(training, attempt)), default=None)


def step_and_save(training: Training) -> tuple[float, float]:
    """The first attempt's median step, and the save that its stop took."""
    times = [line["time"] for line in steps_of(training, 0)]
    steps = [after - before for before, after in itertools.pairwise(times)]
    saves = [event for event in training.run.events() if event["event"] == "checkpoint" and event["attempt"] == 0]
    return common.median(steps), float(saves[-1]["durable_s"])


# ---- (c)


def watched_resume(up: Cluster, folder: Path) -> float:
    """Seconds from the end of the job that took the nodes to the first new step, while ``wait --resubmit`` lifts it."""
    with training_run(up, folder) as training:
        with open(folder / "watch.log", "w") as log:
            watcher = up.popen([up.python, "-m", "clusterddp", "wait", "--resubmit", training.run.path], stderr=log)
        try:
            return resume_after_hold(up, training, folder)
        finally:
            watcher.kill()
            watcher.wait()


def resubmitted_resume(up: Cluster, folder: Path) -> float:
    """The same for a run that continues in a new job."""
    with training_run(up, folder, policy="resubmit") as training:
        return resume_after_hold(up, training, folder)


def resume_after_hold(up: Cluster, training: Training, folder: Path) -> float:
    high = HighJob.submit(up, folder / "high", HIGH_SECONDS)
    ended = until(high.ended, "the job that took the nodes to end", WAIT_S)
    resumed = until(lambda: first_step_of(training, 1), f"{training.run} to resume", 180)
    return resumed - ended


# ---- all of it


def measure(quick: bool, proctrack: str | None) -> common.Found:
    repetitions = 3 if quick else 12
    with measured_on(proctrack) as up:
        where = f"Slurm {up.version}, 2 nodes, proctrack/{up.proctrack}"
        cycles = in_turns(in_folders(up, {"control": control_cycle, "ours": our_cycle}), repetitions, warm_up=0)
    holds: dict[str, list[float]] = {}
    if not quick:
        with measured_on(proctrack, cred_expire=120) as up:
            kinds = {"empty": empty_ddp_start, "watch": watched_resume, "resubmit": resubmitted_resume}
            holds = in_turns(in_folders(up, kinds), 5, warm_up=0)
    figures = {kind: [asdict(cycle) for cycle in found] for kind, found in cycles.items()}
    return common.Found({**figures, "holds": holds}, table_rows(cycles["ours"], cycles["control"], holds), where)


def measured_on(proctrack: str | None, **more: Any) -> AbstractContextManager[Cluster]:
    return cluster(ClusterConfig(nodes=2, cpus=2, grace=20, proctrack=proctrack, **more))


def table_rows(ours: list[Cycle], control: list[Cycle], holds: dict[str, list[float]]) -> list[common.Row]:
    """For the common table."""
    step, save = (common.median([getattr(cycle, what) for cycle in ours]) for what in ("step", "save"))
    handover, resume = (
        ([getattr(cycle, what) for cycle in ours], [getattr(cycle, what) for cycle in control])
        for what in ("handover", "resume")
    )
    bar, empty = step + save + HANDOVER_BAR_S, "an empty DDP script"
    found = [
        common.paired("hand-over: TERM to free nodes", "s", *handover, "ranks that end at once", more=bar),
        common.paired("resume: batch script to first step", "s", *resume, empty, more=RESUME_BAR_S),
    ]
    for kind, words in (("watch", "a hold of 121 s, `clusterddp wait --resubmit`"), ("resubmit", "`policy: resubmit`")):
        if holds:
            found.append(common.paired(f"resume: {words}", "s", holds[kind], holds["empty"], empty, more=HOLD_BAR_S))
    return found


if __name__ == "__main__":
    kinds = {"choices": ["cgroup", "linuxproc"]}
    common.main("handover", __doc__, TEXT, measure, "3 repetitions of (a) and (b), none of (c)", proctrack=kinds)
