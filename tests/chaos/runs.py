"""One run of a behaviour, as local processes or on the test cluster: started, disturbed, and waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from clusterddp.rundir.run_directory import RunDirectory
from tests.chaos.behaviours import SECRET
from tests.chaos.judging import EVERY
from tests.chaos.plan import RANKS, Kill, Plan
from tests.cluster import Cluster
from tests.cluster.system import Process
from tests.interruptions import HighJob, TooLong, until
from tests.preempting import preempting
from tests.ranks.test_local import commands_of
from tests.ranks.test_local import ranks_of as local_ranks
from tests.trainings import Training, ranks_of

SCRIPT = Path(__file__).with_name("training.py")
REPOSITORY = SCRIPT.parents[2]
#: Seconds that a run may take.
LIMIT_S = 200.0
#: Seconds for which processes may outlive their run.
LEFT_S = 20.0
#: Seconds to wait for the rank that is to be killed.
START_S = 10.0


def definition(name: str, script: Path, nodes: int) -> dict[str, Any]:
    """The job definition: a short watchdog, so that what hangs is found within the bound."""
    return {
        "script": str(script),
        "args": [name],
        "nodes": nodes,
        "gpus_per_node": RANKS // nodes,
        "device": "cpu",
        "env": {"CHAOS_PASSWORD": SECRET},
        "timeouts": {"start_s": 60, "step_s": 60, "notice_s": 15},
        "watchdog": {"step_s": 12, "start_s": 60},
        "checkpoint": {"every": f"{EVERY} steps"},
    }


@dataclass
class Made:
    """A finished or ended run: its directory, what its command wrote, and what is wrong already."""

    run: RunDirectory
    problems: list[str] = field(default_factory=list)
    killed: bool = False


# ---- local


def run_locally(name: str, plan: Plan, folder: Path) -> Made:
    """``submit --local``, in FOLDER/run; remaining processes are named and killed."""
    made = Made(RunDirectory(folder / "run"))
    (folder / "job.yaml").write_text(yaml.safe_dump(definition(name, SCRIPT, 1)))
    command = [sys.executable, "-m", "clusterddp.submit", "--local", "--run-dir", str(made.run)]
    moments = [] if plan.preempt_at is None else [plan.preempt_at]
    with open(folder / "submit.log", "w") as log, preempting(*moments):
        process = subprocess.Popen([*command, str(folder / "job.yaml")], cwd=REPOSITORY, stdout=log, stderr=log)
    over = threading.Event()
    killer = threading.Thread(target=_kill_locally, args=(made, plan.kill, over))
    killer.start()
    try:
        process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        made.problems.append(f"not over after {LIMIT_S:g} s")
        process.kill()
    finally:
        over.set()
        killer.join()
    made.problems += _left_locally(made.run)
    return made


def _kill_locally(made: Made, kill: Kill | None, over: threading.Event) -> None:
    if kill is None or not _await_moment(made.run, kill, over.is_set):
        return

    def ranks() -> list[Process]:
        return [process for pid in local_ranks(made.run) if (process := Process.of(pid))]

    made.killed = _kill_one(ranks, f"RANK={kill.rank}", kill)


def what_another_start_does(run: RunDirectory) -> list[str]:
    """I10: a completed run does not train again, and its history can be shown."""
    attempts = run.attempts()
    found = []
    for words in (["submit", "--local", "--run-dir", str(run)], ["status", str(run)]):
        command = [sys.executable, "-m", "clusterddp", *words]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        if done.returncode != 0 or "Traceback" in done.stderr:
            found.append(f"`{words[0]}` of the completed run: {done.returncode}, {done.stderr.strip()[-300:]}")
    return [*found, *(["I10: the completed run was started again"] if run.attempts() != attempts else [])]


def _left_locally(run: RunDirectory) -> list[str]:
    try:
        until(lambda: not commands_of(run), "no process to be left", LEFT_S, look_s=0.2)
        return []
    except TooLong:
        left = commands_of(run)
    for pid in left:
        if process := Process.of(pid):
            process.kill()
    return [f"I7: left behind: {', '.join(sorted({_shown(command) for command in left.values()}))}"]


def _shown(command: bytes) -> str:
    return " ".join(Path(word).name for word in command.decode(errors="replace").split("\0"))[:80]


# ---- on the cluster


def run_on_slurm(name: str, plan: Plan, training: Training) -> Made:
    """The same on two nodes; the training's folder is on the cluster. Remaining jobs and processes are named."""
    up, folder = training.cluster, training.folder
    made = Made(training.run)
    script = up.source / SCRIPT.relative_to(REPOSITORY)
    job = {**definition(name, script, 2), "partition": "low"}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [up.python, "-m", "clusterddp.submit", folder / "job.yaml", "--run-dir", training.run.path]
    training.job_id = up.run(command, cwd=up.source).stdout.strip()
    deadline = time.monotonic() + LIMIT_S
    try:
        for disturb in _in_order(training, made, plan, deadline):
            disturb()
        training.wait(training.run.outcome, "the run to be over", max(1.0, deadline - time.monotonic()))
    except (AssertionError, TooLong) as error:
        made.problems.append(f"not over after {LIMIT_S:g} s: {str(error).splitlines()[0]}")
    made.problems += _left_on(up)
    return made


def _in_order(training: Training, made: Made, plan: Plan, deadline: float) -> list[Callable[[], None]]:
    def wait(condition: Callable[[], object], what: str) -> None:
        training.wait(condition, what, max(1.0, deadline - time.monotonic()))

    def preempt() -> None:
        at = plan.preempt_at or 0
        if made.killed:  # another attempt than the one that is ending
            wait(lambda: _over(training.run) or len(training.run.attempts()) > 1, "a restart")
            at = max(at, _steps_done(training.run) + 1)
        wait(lambda: _over(training.run) or _steps_done(training.run) >= at, f"step {at}")
        if not _over(training.run):
            wait(HighJob.submit(training.cluster, training.folder / "high").started, "the nodes for the job in `high`")

    def kill() -> None:
        assert plan.kill is not None
        over = lambda: training.lift_hold() or _over(training.run) or time.monotonic() > deadline  # noqa: E731
        if _await_moment(training.run, plan.kill, over):
            made.killed = _kill_on(training.cluster, plan.kill)

    if plan.preempt_at is None or plan.kill is None:
        return []
    return [preempt, kill] if plan.kill.attempt else [kill, preempt]


def _kill_on(up: Cluster, kill: Kill) -> bool:
    def ranks() -> list[Process]:
        return [process for node in up.nodes for process in ranks_of(up, node)]

    return _kill_one(ranks, f"SLURM_PROCID={kill.rank}", kill)


def _left_on(up: Cluster) -> list[str]:
    """The user's processes on the nodes, once the job has ended."""

    def left() -> list[Process]:
        return [p for node in up.nodes for p in up.processes(node) if p.uid() == up.uid]

    try:
        until(lambda: not left() and not up.run(["squeue", "-h"]).stdout.strip(), "", LEFT_S, look_s=0.2)
        return []
    except TooLong:
        jobs = up.run(["squeue", "-h"]).stdout.strip()
        return [f"I7: left behind: {', '.join(sorted({p.command()[:80] for p in left()}))} {jobs}".rstrip()]


# ---- both


def _await_moment(run: RunDirectory, kill: Kill, over: Callable[[], object]) -> bool:
    """Waits for it; False if the run is over before."""
    started: float | None = None
    while not over():
        if started is None and kill.attempt in run.attempts():
            started = time.monotonic()
        if started is not None and (
            time.monotonic() - started >= kill.seconds if kill.step is None else _steps_done(run) >= kill.step
        ):
            return True
        time.sleep(0.02)
    return False


def _kill_one(ranks: Callable[[], list[Process]], number: str, kill: Kill) -> bool:
    """Whether a rank was killed: the attempt may have no ranks yet, or be over."""
    wanted = {number.encode(), f"CLUSTERDDP_ATTEMPT={kill.attempt}".encode()}
    try:
        until(lambda: next((r for r in ranks() if wanted <= set(r.environment())), None), number, START_S).kill()
    except TooLong:
        return False
    return True


def _over(run: RunDirectory) -> bool:
    return run.outcome_file.exists()


def _steps_done(run: RunDirectory) -> int:
    """By the lines of the metrics, whatever is in them."""
    return run.metrics_file.read_bytes().count(b"\n") if run.metrics_file.exists() else 0
