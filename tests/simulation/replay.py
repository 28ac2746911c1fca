"""``python -m tests.simulation.replay``: drawn histories on a real Slurm, compared with what the model makes of them.

A history is played in the model first. Each of its faults struck at a moment of the protocol: after so many steps of an
attempt, or while the requeued job was held. Then the test cluster trains `tests/scripts/train.py`, and the same faults
strike at the same moments. Compared are the outcome, and of each attempt how it began and ended, and why; not times,
steps and what depends on speed. Not played: faults of disks, clocks and answers, which a real Slurm has no switch for.

``--lasting`` also draws what lasts for a while: a suspended job, a controller that is down, a node that is cut off and
comes back. ``--cancel`` sets PreemptMode=CANCEL, ``--release`` takes another Slurm. ``--unanswered``: the answer of the
first requeue is lost. ``--spare``: a spare node, and a node that is lost or drained. ``--limit``: the job's time limit
is shorter than the training.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterddp.cli import steering
from clusterddp.history.words import ATTEMPT_ENDS
from clusterddp.rundir.json_lines import read_lines
from clusterddp.slurm.run_states import Cause
from tests.cluster import Cluster, ClusterConfig
from tests.cluster.errors import ClusterError
from tests.cluster.system import Process
from tests.runs_on_disk import outcome_of
from tests.simulation import product
from tests.simulation.history import Fault, History, Plan
from tests.simulation.ranks import Script
from tests.simulation.slurm import LOST, Settings
from tests.trainings import Training
from tests.waiting import wait_until

#: The cluster, for the model and for the real one. Its SlurmdTimeout is longer than the supervisor's patience.
SETTINGS = Settings("22.05", "REQUEUE", grace_s=20, kill_wait_s=10, hold_s=7, slurmd_timeout_s=120, nodes=4)
CONFIG = ClusterConfig(nodes=4, cpus=2, slurmdbd=False, grace=20, slurmd_timeout=120, kill_wait=10, cred_expire=6)
#: The training: two nodes with a rank each. The model's faults strike by time, the real ones by step.
SCRIPT = Script(steps=40, step_s=0.5, save_every=5, save_s=0.1, import_s=2.0)
PAUSE_S = 0.6
#: The same, of a training that needs two jobs, with a notice of a quarter of their time. Ranks may take 18 s to start.
#: The fault strikes where one job more is enough.
LONG, LONG_PAUSE_S, LIMIT_S, NOTICE_S = replace(SCRIPT, step_s=2.4), 2.4, 120, 30.0
LONG_STEPS = range(15, 26)
#: A fault after this step might find the run over.
LAST_STEP = 30
#: What a real Slurm can be given in seconds.
KINDS = (
    *("preempt", "scancel", "cancel", "submit again", "kill a rank", "kill the supervisor", "requeue by admin"),
    *("stop", "save", "requeue", "lose a node"),
)
#: What lasts, and for how many seconds it may.
LASTING: Mapping[str, tuple[float, ...]] = {
    "suspend": (2.0, 20.0),
    "controller away": (5.0, 40.0),
    "cut off": (5.0, 60.0, 4000.0),
}
#: What can be done while the controller is down.
WITHOUT_SLURM = ("kill a rank", "kill the supervisor", "lose a node", "cut off")
#: The kinds of faults in each variant.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "plain": KINDS,
    "lasting": (*KINDS, *2 * tuple(LASTING)),
    "unanswered": ("preempt", "preempt", "requeue", "kill a rank", "save", "scancel"),
    "spare": ("lose a node", "lose a node", "drain", "kill a rank", "preempt", "save"),
    "limit": ("kill a rank", "save", "preempt", "requeue"),
}
#: Of a release: where its Slurm comes from.
RELEASES = {"22.05": None, "24.11": "trixie", "26.05": "sid"}
#: Events that tell how an attempt began and ended. `requested` is of a rank's answer, too: its request counts.
TOLD = {"started", "resumed", "moved", "rank_failed", "node_lost", *ATTEMPT_ENDS}


@dataclass(frozen=True)
class Struck:
    """A fault with its moment: after ``step`` of this attempt, None while the job is held after it."""

    kind: str
    attempt: int
    step: int | None
    rank: int = 0
    lasts_s: float = 0.0

    def __str__(self) -> str:
        what = f"{self.kind} for {self.lasts_s:.0f} s" if self.lasts_s else self.kind
        return f"{what} {f'at step {self.step} of' if self.step is not None else 'in the hold after'} {self.attempt}"


@dataclass(frozen=True)
class Drawn:
    """A history of the model: its faults with their moments, its outcome, and what its attempts did."""

    seed: int
    struck: tuple[Struck, ...]
    outcome: str
    told: tuple[str, ...]
    plan: Plan


def plan_of(seed: int, settings: Settings, variant: str) -> Plan:
    """Of this cluster and training, with one to three faults of these kinds."""
    kinds = VARIANTS[variant]
    draw = random.Random(seed)
    at = sorted(5.0 + 45.0 * draw.random() for _ in range(draw.choice((2, 2, 3)) if seed % 4 else 1))
    if variant in ("limit", "spare"):
        at = at[: 1 + (variant == "spare" and seed % 2)]
    faults = [Fault(time, draw.choice(kinds), draw.getrandbits(32)) for time in at]
    return Plan(
        seed,
        settings,
        LONG if variant == "limit" else SCRIPT,
        job_nodes=2,
        per_node=1,
        time_limit_s=LIMIT_S if variant == "limit" else 1800,
        notice_s=NOTICE_S,
        resubmitters=1 if variant == "limit" else draw.choice((0, 1)),
        spare_nodes=int(variant == "spare"),
        loses="scontrol requeue" if variant == "unanswered" else "",
        faults=tuple(faults),
    )


class Playable(History):
    """A history whose faults wait for a moment that the real cluster can wait for, too."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.slurm.loses = plan.loses
        self.struck: list[Struck] = []

    def _strike(self, fault: Fault) -> None:
        if self.over_at is not None:
            return
        struck = _moment(self, fault)
        if struck is None or any((struck.attempt, struck.step) == (each.attempt, each.step) for each in self.struck):
            self.world.after(1.0, self._strike, fault)
            return
        self.struck.append(struck)
        if struck.kind == "drain":
            node = next(rank.process.node for rank in self.training if rank.number == struck.rank)
            self.user("drain", lambda: steering.drain(self.run, node))
        elif not struck.lasts_s:
            super()._strike(fault)
        elif struck.kind == "suspend":
            self.slurm.suspend(self.batches[-1], struck.lasts_s)
        elif struck.kind == "controller away":
            self.slurm.away_until = self.world.now + struck.lasts_s
        else:
            ranks = [rank for rank in self.training if rank.attempt == struck.attempt]
            self.slurm.lose_node(ranks[struck.rank].process.node, struck.lasts_s, "is cut off", self.cluster.on_node)


def in_the_model(plan: Plan) -> Drawn | None:
    """Plays the plan in the model; None if not all faults strike."""
    history, seed = Playable(plan), plan.seed
    result = history.play()
    if result.violations or len(history.struck) < len(history.plan.faults):
        return None
    events = history.invariants.events()
    return Drawn(seed, tuple(history.struck), result.ended, tuple(told(events)), plan)


def _moment(history: History, fault: Fault) -> Struck | None:
    """When a fault strikes, if it can do so on the real cluster, too."""
    jobs = list(history.slurm.jobs.values())
    newest = max(history.invariants.attempts, default=None)
    if newest is None or (len(jobs) > 1 + (jobs[0].state == "CANCELLED") and history.plan.settings.mode != "CANCEL"):
        return None
    if history.world.now < history.slurm.away_until and fault.kind not in WITHOUT_SLURM:
        return None
    attempt, job = history.invariants.attempts[newest], jobs[-1]
    if job.state == "PENDING" and job.reason == "BeginTime":
        return Struck(fault.kind, newest, None) if fault.kind in ("scancel", "cancel", "submit again") else None
    ranks = [rank for rank in history.training if rank.attempt == newest and rank.training]
    stopping = job.preempt_time is not None or any(rank.stop for rank in ranks)
    if fault.kind == "preempt" and history.slurm.cut:
        return None  # Slurm shows the requeued job as COMPLETING until it gives up the lost node. The model does not.
    if job.state != "RUNNING" or len(ranks) < 2 or stopping or attempt.reached <= attempt.resumed:
        return None
    limited = history.plan.time_limit_s == LIMIT_S
    if limited and attempt.reached not in LONG_STEPS:
        return None
    if attempt.reached > LAST_STEP or attempt.reached % SCRIPT.save_every in (0, SCRIPT.save_every - 1):
        return None
    chosen = 0
    draw = random.Random(fault.draw)
    if fault.kind == "kill a rank":
        chosen = draw.choice(history.training).number
    if fault.kind == "lose a node":
        chosen = int(draw.choice(sorted({rank.process.node for rank in history.training})) == ranks[1].process.node)
        if draw.random() >= 0.5 or draw.choice((40.0, 40.0, 500.0, 4000.0)) < 500:  # as in history.py: for good
            return None
        if history.plan.spare_nodes and not chosen:  # the guard that requeues such a job is no part of the model
            return None
    if fault.kind == "drain":
        return Struck(fault.kind, newest, attempt.reached, 1) if history.plan.spare_nodes else None
    if fault.kind == "cut off":
        chosen = draw.choice((0, 1))
    lasts_s = draw.choice(LASTING[fault.kind]) if fault.kind in LASTING else 0.0
    return Struck(fault.kind, newest, attempt.reached, chosen, lasts_s)


def told(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Of each attempt, how it began and ended, and why."""
    for event in sorted(events, key=lambda event: event["attempt"]):
        if event["event"] in TOLD:
            more = [str(event[name]) for name in ("cause", "rank") if event.get(name) not in (None, Cause.NONE.value)]
            yield " ".join([str(event["attempt"]), event["event"], *more])


# --- on the real cluster


def on_the_cluster(cluster: Cluster, history: Drawn, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Plays the faults at their moments; the outcome, and what the attempts did."""
    plan = history.plan
    limited = plan.time_limit_s == LIMIT_S
    options = ["--set", f"checkpoint.every={SCRIPT.save_every} steps"]
    options += ["--time", str(LIMIT_S // 60)] if limited else []
    options += ["--spare-nodes", str(plan.spare_nodes)] if plan.spare_nodes else []
    env = {"PATH": _unanswering(cluster, plan.loses, folder)} if plan.loses else None
    pause = str(LONG_PAUSE_S if limited else PAUSE_S)
    training = Training.submit(cluster, folder, "--pause", pause, options=options, env=env)
    commands: list[subprocess.Popen[str]] = []

    def user(*words: object) -> None:
        command = [cluster.python, "-m", "clusterddp", *words]
        quiet = subprocess.DEVNULL
        commands.append(cluster.popen(command, cwd=cluster.source, stdin=quiet, stdout=quiet, stderr=quiet))

    if plan.resubmitters:
        user("wait", "--resubmit", training.run.path)
    ends: list[threading.Timer] = []
    try:
        for struck in history.struck:
            wait_until(lambda struck=struck: _is_now(training, cluster, struck), str(struck), 240)  # type: ignore[misc]
            with contextlib.suppress(ClusterError, IndexError):  # while the controller is down it is the same job
                training.job_id = _live(cluster)[-1]
            ended = STRIKE[struck.kind](cluster, training, struck, user)
            if struck.lasts_s and struck.lasts_s < 1000:
                ends.append(threading.Timer(struck.lasts_s, ended))
                ends[-1].start()
        wait_until(lambda: _is_over(training, cluster), "the end", 300)
    finally:
        for timer in ends:
            timer.join()
        for command in commands:
            command.kill()
            command.wait()
    outcome = outcome_of(training.run)
    return outcome["state"] if outcome else "no outcome", tuple(told(training.run.events()))


def _unanswering(cluster: Cluster, command: str, folder: Path) -> str:
    """A search path on which the first of these commands is carried out, and says that it got no answer."""
    name, _, word = command.partition(" ")
    path = cluster.environment["PATH"]
    real = shutil.which(name, path=path)
    programs = folder / "programs"
    programs.mkdir()
    wrapper = programs / name
    once = f'if [ "$1" = {word} ] && mkdir {folder}/lost 2>/dev/null; then'
    told = f'{real} "$@"; echo "{name}: error: {LOST}" >&2; exit 1'
    wrapper.write_text(f'#!/bin/sh\n{once} {told}; fi\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    return f"{programs}:{path}"


def _is_now(training: Training, cluster: Cluster, struck: Struck) -> bool:
    lines = read_lines(training.run.metrics_file)
    if struck.step is not None:
        return any(line["attempt"] == struck.attempt and line["step"] + 1 >= struck.step for line in lines)
    try:
        job = cluster.job(training.job_id)
    except ClusterError:
        return False
    return (job.get("JobState"), job.get("Reason")) == ("PENDING", "BeginTime")


def _is_over(training: Training, cluster: Cluster) -> bool:
    """Whether no job of the run is left, for longer than ``wait --resubmit`` needs for a new one."""
    for _ in range(20):
        jobs = cluster.root(["squeue", "--noheader"], check=False)
        if jobs.returncode != 0 or jobs.stdout.strip():
            return False
        if training.run.outcome() is not None:
            return True
        time.sleep(0.5)
    return True


def _processes(cluster: Cluster, words: str) -> list[Process]:
    """The processes of the run on its nodes with this in their command line, in the order of the nodes."""
    found = [process for node in cluster.nodes for process in cluster.processes(node)]
    return [process for process in found if words in process.command() and "srun" not in process.command()]


def _kill(cluster: Cluster, words: str, number: int) -> None:
    os.kill(_processes(cluster, words)[number].pid, signal.SIGKILL)


def _node_of(cluster: Cluster, training: Training, rank: int) -> str:
    ranks = _processes(cluster, "clusterddp.worker")
    return next(node for node in cluster.nodes if ranks[rank].pid in {each.pid for each in cluster.processes(node)})


def _live(cluster: Cluster) -> list[str]:
    return sorted(cluster.root(["squeue", "--noheader", "--partition=low", "--format=%A"]).stdout.split(), key=int)


def _suspend(cluster: Cluster, training: Training, *_: object) -> Callable[[], Any]:
    cluster.root(["scontrol", "suspend", training.job_id])
    return lambda: cluster.root(["scontrol", "resume", training.job_id], check=False)


def _stop_controller(cluster: Cluster, *_: object) -> Callable[[], Any]:
    cluster.stop_controller()
    return cluster.start_controller


def _cut(cluster: Cluster, training: Training, struck: Struck, _: object) -> Callable[[], Any]:
    node = _node_of(cluster, training, struck.rank)
    cluster.cut(node)
    return lambda: cluster.heal(node)


def _lose_node(cluster: Cluster, training: Training, struck: Struck, _: object) -> None:
    """Its power fails: no connection is closed."""
    node = _node_of(cluster, training, struck.rank)
    cluster.cut(node)
    cluster.kill_node(node)


Strike = Callable[[Cluster, Training, Struck, Callable[..., None]], Any]
#: How each fault is given to the real cluster; of one that lasts, what ends it.
STRIKE: Mapping[str, Strike] = {
    "preempt": lambda cluster, training, *_: training.preempt(),
    "scancel": lambda cluster, *_: cluster.root(["scancel", *_live(cluster)]),
    "cancel": lambda _, training, __, user: user("cancel", "--yes", training.run.path),
    "submit again": lambda _, training, __, user: user("submit", "--run-dir", training.run.path),
    "kill a rank": lambda cluster, _, struck, __: _kill(cluster, "clusterddp.worker", struck.rank),
    "kill the supervisor": lambda cluster, *_: _kill(cluster, "clusterddp.supervisor", 0),
    "requeue by admin": lambda cluster, training, *_: cluster.root(["scontrol", "requeue", training.job_id]),
    "stop": lambda _, training, __, user: user("stop", training.run.path),
    "save": lambda _, training, __, user: user("save", training.run.path),
    "requeue": lambda _, training, __, user: user("requeue", training.run.path),
    "lose a node": _lose_node,
    "drain": lambda cluster, training, struck, user: user(
        "drain", training.run.path, _node_of(cluster, training, struck.rank)
    ),
    "suspend": _suspend,
    "controller away": _stop_controller,
    "cut off": _cut,
}


def main() -> int:
    """The command line; 1 if a history differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.replay", description=__doc__)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no more histories begin after this time")
    parser.add_argument("--draw", action="store_true", help="only show the histories")
    for variant in list(VARIANTS)[1:]:
        parser.add_argument(f"--{variant}", dest="variant", action="store_const", const=variant, default="plain")
    parser.add_argument("--cancel", action="store_true", help="PreemptMode=CANCEL")
    parser.add_argument("--release", choices=RELEASES, default="22.05")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    settings = replace(SETTINGS, release=arguments.release, mode="CANCEL" if arguments.cancel else "REQUEUE")
    with product.installed():
        histories: list[Drawn] = []
        seed = arguments.seed
        while len(histories) < arguments.histories:
            if (history := in_the_model(plan_of(seed, settings, arguments.variant))) is not None:
                histories.append(history)
            seed += 1
    if arguments.draw:
        for each in histories:
            print(f"{each.seed}: {', '.join(map(str, each.struck))}: {each.outcome}; {'; '.join(each.told)}")
        return 0
    played = agreed = 0
    with Cluster.up(replace(CONFIG, release=RELEASES[arguments.release])) as cluster:
        if arguments.cancel:
            cluster.root(["scontrol", "update", "partitionname=low", "preemptmode=cancel"])
        for history in histories:
            if time.monotonic() > until:
                break
            agreed += _compare(cluster, history)
            played += 1
            cluster.drain_jobs()
    print(f"{agreed} of {played} histories agree")
    return int(agreed < played)


def _compare(cluster: Cluster, history: Drawn) -> bool:
    folder = Path(tempfile.mkdtemp(prefix=f"replay-{history.seed}-", dir=cluster.scratch))
    folder.chmod(0o755)
    os.chown(folder, cluster.uid, -1)
    began = time.monotonic()
    try:
        found = on_the_cluster(cluster, history, folder)
    except (AssertionError, ClusterError, OSError, IndexError, StopIteration) as error:
        found = (f"error: {error}", ())
    agrees = found == (history.outcome, history.told)
    faults = ", ".join(map(str, history.struck))
    took = f"({time.monotonic() - began:.0f} s)"
    print(f"{history.seed}: {faults}: {'agrees' if agrees else 'DIFFERS'} {took}", flush=True)
    if not agrees:
        print(f"  model: {history.outcome}; {'; '.join(history.told)}")
        print(f"  Slurm: {found[0]}; {'; '.join(found[1])}", flush=True)
    return agrees


if __name__ == "__main__":
    sys.exit(main())
