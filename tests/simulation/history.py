"""One history: a cluster, a run, what goes wrong with them, and what its users do, all of it drawn from a seed."""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clusterddp.cli import steering
from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.failures import exclusion, node_memory
from clusterddp.failures.placement import Placement
from clusterddp.jobdef.job import Done, Job, Limits, Resume, Timeouts, Watchdog
from clusterddp.messages import requests
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import pruning, request_client, waiting
from clusterddp.slurm import commands, queue
from clusterddp.slurm.configuration import usable_nodes
from clusterddp.supervisor import lease
from clusterddp.supervisor import main as supervisor
from clusterddp.supervisor.controller import SlurmController
from tests.runs_on_disk import outcome_of
from tests.simulation import product, sweeps
from tests.simulation.disk import Disk
from tests.simulation.invariants import Invariants
from tests.simulation.memory import NODES, Memory
from tests.simulation.ranks import MARK, OWN, Cluster, Launcher, Rank, Script
from tests.simulation.slurm import HAS_NODES, Batch, Settings, Slurm
from tests.simulation.world import Process, World

RUN = Path("/shared/runs/sim")
#: How long after the last fault a run may take until it is over.
BOUND_S = 6 * 3600.0
#: The watchdog's, of histories that have one.
HUNG_S = 60.0


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time: ``kind`` is a function below; ``draw`` decides its details.

    ``moment``: the time's beginning. It is the first use of this command by a supervisor, the third start of one
    ("start 3"), or the first save.
    """

    at: float
    kind: str
    draw: int
    moment: str = ""

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.1f} s{f' after {self.moment}' if self.moment else ''}"


@dataclass(frozen=True)
class Plan:
    """What a seed stands for."""

    seed: int
    settings: Settings
    script: Script
    job_nodes: int
    per_node: int
    time_limit_s: int
    notice_s: float = 120.0
    lag_s: float = 0.0
    slow: float = 0.0
    resubmitters: int = 0
    policy: str | None = None
    #: Whether the first job is a task of a sweep's array.
    array: bool = False
    #: How many nodes are spare, the fewest that the run can train on, None without a range.
    spare_nodes: int = 0
    min_nodes: int | None = None
    #: Whether the job has a hook, and a watchdog; whether somebody waits for the run; which clock is wrong, and by how
    #: much.
    hook: bool = False
    watchdog: bool = False
    waits: bool = False
    skew: tuple[str, float] | None = None
    #: Whether other runs have failed on nodes.
    memory: bool = False
    #: Whether the run is the only member of a sweep.
    sweep: bool = False
    limits: Limits = Limits()  # noqa: RUF009
    #: The command whose first answer is lost, in replays.
    loses: str = ""
    faults: tuple[Fault, ...] = ()


#: Which of the histories may have a fault of this kind, where that is not 0.4: a watchdog's heartbeats are many events.
SHARE = {"hang": 0.07, "stop": 0.2, "scancel": 0.25, "cancel": 0.25}


#: How many of the runs have a sharded model, of those whose scripts may.
SHARDED = 0.15
#: Commands by which a supervisor continues a run.
SAVE = "a save"
MOMENTS = ("scontrol requeue", "scontrol update", "sbatch --parsable")
#: What may happen in such a moment, and what may be wrong with the controller then.
STRIKING = (
    *("scancel", "cancel", "stop", "submit again"),
    *("lose a node", "preempt", "kill the supervisor", "requeue"),
)
TROUBLE = ("answers lost", "answers lost", "controller slow", "controller away", "requests limited")


def drawn(seed: int) -> Plan:
    """The plan of a seed. Swarm testing: which kinds of faults may come is drawn first."""
    draw = random.Random(seed)
    kinds = [kind for kind in FAULTS if kind not in APART and draw.random() < SHARE.get(kind, 0.4)] or ["preempt"]
    script = Script(
        steps=draw.choice((4, 6, 10)),
        step_s=draw.choice((1.0, 3.0, 7.0)),
        save_every=draw.choice((3, 5, 1000)),
        save_s=draw.choice((0.2, 2.0, 6.0)),
        import_s=draw.choice((2.0, 8.0)),
        alone=seed % 8 == 5,
    )
    settings = Settings(
        release=draw.choice(("22.05", "24.11", "26.05")),
        mode=draw.choice(("REQUEUE", "REQUEUE", "CANCEL")),
        grace_s=draw.choice((0, 20, 60)),
        kill_wait_s=draw.choice((10, 30)),
        hold_s=draw.choice((7, 121)),
        slurmd_timeout_s=draw.choice((60, 300)),
        max_requeues=draw.choice((1, 5)),
    )
    length = script.steps * script.step_s * 1.5
    count = min(12, 1 + int(draw.expovariate(0.3)))
    faults = sorted(
        (Fault(length * 1.5 * draw.random(), draw.choice(kinds), draw.getrandbits(32)) for _ in range(count)),
        key=lambda fault: fault.at,
    )
    if seed % 4 == 3:
        faults = in_bursts(faults, random.Random(-seed))
    outlives = seed % 8 == 4
    if outlives:
        faults = with_lost_nodes(faults, length, random.Random(-seed))
    plan = Plan(
        seed,
        settings,
        script,
        job_nodes=draw.choice((1, 2)),
        per_node=draw.choice((1, 2)),
        time_limit_s=draw.choice((3600, 3600, max(240, int(length / 2)))),
        lag_s=draw.choice((0.0, 0.0, 3.0, 30.0)),
        slow=draw.choice((0.0, 0.0, 0.02, 0.1)),
        resubmitters=draw.choice((0, 0, 1, 1, 1, 2)),
        policy=draw.choice((None, None, "resubmit")),
        array=seed % 8 == 2,
        spare_nodes=int(outlives and seed % 3 != 0),
        min_nodes=1 if outlives and seed % 3 != 1 else None,
        hook=draw.random() < 0.2,
        watchdog="hang" in kinds,
        waits=draw.random() < 0.12,
        skew=draw.choice((None, None, ("n1", 3.0), ("login", -20.0), ("n2", 40.0))),
        faults=tuple(faults),
    )
    return with_more(plan, length, random.Random(f"more {seed}"))


def with_more(plan: Plan, length: float, draw: random.Random) -> Plan:
    """What is drawn apart, so that it leaves the other histories as they are."""
    more: list[str] = []
    settings = replace(plan.settings, min_age_s=draw.choice((math.inf, math.inf, 300.0)))
    more += ["fork"] * draw.choice((0, 0, 0, 0, 0, 0, 0, 1))
    if draw.random() < 0.1:
        settings = replace(settings, by_qos=True)
        more += ["accounting away"] * draw.choice((0, 1, 1, 2))
    memory = draw.random() < 0.08
    if memory:
        settings = replace(settings, nodes=NODES)
        more += ["another run fails"] * draw.choice((0, 1, 3))
    script = replace(plan.script, **_of_script(plan.script, draw))
    faults = [*plan.faults, *(Fault(length * 1.5 * draw.random(), kind, draw.getrandbits(32)) for kind in more)]
    odd = random.Random(f"odd {plan.seed}")
    for kind, share in {"odd failure": 0.15, "refused": 0.12, "connection breaks": 0.08}.items():
        if odd.random() < share:
            faults.append(Fault(length * 1.2 * odd.random(), kind, odd.getrandbits(32)))
    limits = odd.choice((Limits(attempts=3), Limits(gpu_hours=0.02))) if odd.random() < 0.04 else Limits()
    if odd.random() < 0.03:
        script = replace(script, bug_at=odd.choice((0, 2, 3)))
    sweep = plan.array and draw.random() < 0.3
    if sweep and odd.random() < 0.4:
        faults.append(Fault(0.0, odd.choice(("refused", "answers lost", "kill a command")), odd.getrandbits(32)))
    if odd.random() < 0.02:  # a start that stands still
        faults.append(Fault(0.28 + 0.2 * odd.random(), "freeze the host", odd.getrandbits(32), "start 1"))
    save = random.Random(f"save {plan.seed}")
    if save.random() < 0.01:
        faults.append(Fault(0.0, "freeze the host", save.getrandbits(32), SAVE))
    shards = random.Random(f"shards {plan.seed}")
    if shards.random() < SHARDED and not script.own and not script.alone:
        script = replace(script, sharded=True)
        plan = replace(plan, job_nodes=2)
        if shards.random() < 0.1:
            faults.append(Fault(0.0, "freeze the host", shards.getrandbits(32), SAVE))
    chained = odd.random()
    if chained < 0.02 and not plan.array:
        plan = replace(plan, job_nodes=2, resubmitters=max(1, plan.resubmitters), policy=None)
        chain = ("preempt", "lose a node", "preempt") if chained < 0.01 else ("lose a node",)
        for number, kind in enumerate(chain, 1):
            faults.append(Fault(8 + 15 * odd.random(), kind, odd.getrandbits(32), f"start {number}"))
        if chained >= 0.01:
            faults.append(Fault(12 * odd.random(), "scancel", odd.getrandbits(32), MOMENTS[2]))
            faults.append(Fault(0.0, odd.choice(TROUBLE), odd.getrandbits(32), MOMENTS[2]))
    spare = random.Random(f"spare {plan.seed}")
    if plan.spare_nodes and spare.random() < 0.3:
        faults.append(Fault(length * 0.5 * spare.random(), "lose a spare", spare.getrandbits(32)))
    shut = random.Random(f"shut off {plan.seed}")
    if plan.job_nodes > 1 and shut.random() < 0.08:
        faults.append(Fault(length * 1.2 * shut.random(), "shut down a node", shut.getrandbits(32)))
    stepd = random.Random(f"stepd {plan.seed}")
    if plan.job_nodes > 1 and stepd.random() < 0.06:
        faults.append(Fault(length * 1.2 * stepd.random(), "kill a stepd", stepd.getrandbits(32)))
    unanswered = random.Random(f"unanswered {plan.seed}")
    if unanswered.random() < 0.004:  # a scancel between a requeue without an answer and the next one
        requeue = MOMENTS[0]
        faults.append(Fault(8 + 15 * unanswered.random(), "requeue", unanswered.getrandbits(32), "start 1"))
        faults.append(Fault(0.0, "answers lost", unanswered.getrandbits(32), requeue))
        faults.append(Fault(12 * unanswered.random(), "scancel", unanswered.getrandbits(32), requeue))
    return replace(
        plan,
        settings=settings,
        memory=memory,
        sweep=sweep,
        script=script,
        limits=limits,
        # To a clock that is ahead by more than the run has lasted, the script's files are older than the run.
        skew=None if script.marks or script.own else plan.skew,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def _of_script(script: Script, draw: random.Random) -> dict[str, Any]:
    """One script in twenty has a mark, and most of these end early. One in twelve saves in its own format."""
    marks, own = draw.random() < 0.05, draw.random() < 0.08 and not script.alone
    return {"marks": marks, "stint": draw.choice((0, 3, 4)) if marks else 0, "own": own}


def in_bursts(faults: Iterable[Fault], draw: random.Random) -> list[Fault]:
    """Most of them come within seconds of the one before, and another one while a supervisor recovers."""
    found: list[Fault] = []
    for fault in faults:
        after = draw.expovariate(0.1)
        found.append(replace(fault, at=found[-1].at + after) if found and draw.random() < 0.7 else fault)
    moment = draw.choice(MOMENTS)
    found.append(Fault(12 * draw.random(), draw.choice(STRIKING), draw.getrandbits(32), moment))
    if draw.random() < 0.5:
        found.append(Fault(0.0, draw.choice(TROUBLE), draw.getrandbits(32), moment))
    return sorted(found, key=lambda fault: fault.at)


def with_lost_nodes(faults: Iterable[Fault], length: float, draw: random.Random) -> list[Fault]:
    """One to three nodes are lost, or drained by the user, too."""
    kinds = [draw.choice(("lose a node", "drain")) for _ in range(draw.choice((1, 1, 2, 3)))]
    more = [Fault(length * 1.5 * draw.random(), kind, draw.getrandbits(32)) for kind in kinds]
    return sorted([*faults, *more], key=lambda fault: fault.at)


@dataclass
class Result:
    """What became of a history."""

    plan: Plan
    violations: list[str]
    events: int
    commands: int
    attempts: int
    ended: str
    seconds: float
    story: list[str] = field(default_factory=list)


_DISK = Disk()


class History:
    """Plays a plan. One plays at a time."""

    def __init__(self, plan: Plan, traced: bool = False) -> None:
        self.plan = plan
        self.world = World(plan.seed, traced)
        self.disk = _DISK
        self.disk.begin(self.world, plan.lag_s, plan.slow)
        self.slurm = Slurm(self.world, plan.settings, self._launch)
        self.slurm.nodes_needed, self.slurm.time_limit_s = plan.job_nodes, plan.time_limit_s
        self.slurm.array = plan.array and not plan.sweep
        self.slurm.nodes_needed += plan.spare_nodes
        self.slurm.nodes_least = plan.min_nodes or self.slurm.nodes_needed
        self.slurm.no_kill = bool(plan.spare_nodes or plan.min_nodes)
        self.cluster = Cluster(self.world, self.slurm, self.disk, plan.script)
        self.cluster.beats = plan.watchdog
        self.world.skew = dict([plan.skew] if plan.skew else [])
        self.job = Job(
            name="sim",
            module="train",
            device="cpu",
            nodes=plan.job_nodes,
            min_nodes=plan.min_nodes,
            spare_nodes=plan.spare_nodes,
            gpus_per_node=plan.per_node,
            time_s=plan.time_limit_s,
            partition="low",
            watchdog=Watchdog(step_s=HUNG_S, start_s=4 * HUNG_S) if plan.watchdog else None,
            hook=("tell-me",) if plan.hook else (),
            policy=plan.policy,  # type: ignore[arg-type]
            done=Done(f"{{run_dir}}/{MARK}") if plan.script.marks else None,
            limits=plan.limits,
            timeouts=Timeouts(notice_s=plan.notice_s),
            resume=Resume((f"{{run_dir}}/{OWN}/*.pt",)) if plan.script.own else None,
        )
        self.run = RunDirectory(RUN)
        self.memory = Memory(self)
        self.invariants = Invariants(self)
        self.world.on_crash = self._on_crash
        self._users = 0
        #: Whether the first submission has succeeded, and what waits for the run has been started.
        self._attended = False
        #: How many supervisors have been started.
        self._starts = 0
        self._struck: set[Fault] = set()
        self.over_at: float | None = None
        self._last_fault_at = max((fault.at for fault in plan.faults), default=0.0)
        #: Processes of ``wait --resubmit``.
        self.resubmitting: list[Process] = []

    def play(self) -> Result:
        """Plays until the run is over and quiet, or the bound has passed."""
        world, plan = self.world, self.plan
        product.use(world, self.slurm, self.cluster, self.disk)
        for folder in (
            RUN,
            RUN / "checkpoints",
            RUN / "logs",
            RUN / "private",
            *([RUN / OWN] if plan.script.own else []),
        ):
            self.disk.make_folder(folder)
        for name in ("job.yaml", "job.sbatch"):
            self.disk.write_atomically(RUN / name, "x")
        if plan.memory:
            self.memory.begin(random.Random(-plan.seed))
        for node in self.disk.nodes.values():
            node.created = -1e9
        self.user("submit", self._begin)
        for fault in plan.faults:
            if not fault.moment:
                world.after(fault.at, self._strike, fault)
        self.slurm.on_command = lambda who, command: self._at(command) if who.startswith("job ") else None
        self.cluster.on_save = lambda: self._at(SAVE)
        for number in range(1, 4):  # the user looks at the queue now and then
            world.after(1200.0 * number, self.slurm.release)
        try:
            world.run(self._last_fault_at + BOUND_S, self._is_over)
            if not world.violations:
                self.invariants.at_end()
        finally:
            world.close()
        outcome = self.invariants.outcome()
        return Result(
            plan,
            world.violations,
            world.events,
            self.slurm.commands,
            len(self.invariants.attempts),
            outcome["state"] if outcome else "no outcome",
            world.now,
            [str(line) for line in world.story],
        )

    def take_apart(self) -> None:
        """Breaks the cycles of a history that was played: finding them would take longer."""
        world, cluster = self.world, self.cluster
        attempts = [getattr(server._handlers.failed, "__self__", self) for server in cluster.servers]
        parts = (
            *attempts,
            *world.threads,
            *world.processes,
            *cluster.ranks,
            *cluster.servers,
            *self.slurm.jobs.values(),
        )
        for part in (*parts, cluster, self.slurm, self.invariants, world, self):
            vars(part).clear()

    def _is_over(self) -> bool:
        """A while after the outcome."""
        if self.world.now >= self.invariants.look_at:
            self.invariants.check()
            self.world.look_at = self.invariants.look_at if self.invariants.is_live else 0.0
        if not self.invariants.settled():  # also if ``wait --resubmit`` continues it after all
            self.over_at = None
            return False
        if self.over_at is None:
            self.over_at = self.world.now
        return self.world.now > max(self.over_at, self._last_fault_at) + 400.0

    # --- actors

    def user(self, name: str, work: Callable[[], Any]) -> Process:
        """A command of a user on the login node."""
        self._users += 1
        process = Process(self.world, f"{name} {self._users}", "login", {"SLURM_CLUSTER_NAME": product.CLUSTER})

        def main() -> int:
            try:
                return int(work() or 0)
            except (ClusterddpError, OSError) as error:
                self.world.tell(process.name, str(error))
                return 1

        process.start(main)
        return process

    def _begin(self) -> int:
        """Submits the run, again if Slurm does not answer, and runs `wait --resubmit` for it."""
        while not self._is_submitted():
            self.world.sleep(30.0)
        attended, self._attended = self._attended, True
        for number in range(0 if attended else self.plan.resubmitters):
            self.world.after(1.0 + number, self.user, "resubmit", self._resubmit)
        if self.plan.waits and not attended:
            self.world.after(2.0, self.user, "wait", self._wait)
        return 0

    def _is_submitted(self) -> bool:
        try:
            if self.plan.sweep:
                return sweeps.submit(self) == 0
            self._submit()
        except (ClusterddpError, OSError) as error:
            self.world.tell(self.world.process.name, str(error))
            if self.plan.sweep:  # the same command settles what became of the array
                return False
        return bool(self.slurm.jobs)  # none if another command was just submitting it, in vain

    def _submit(self) -> int:
        """As ``clusterddp submit`` does, from the claim on."""
        with lease.submitting(self.run) as other:
            if other:
                self.world.tell(self.world.process.name, other)
                return 1
            if held := lease.held_by_other(self.run):
                self.world.tell(self.world.process.name, f"{self.run} is {held}")
                return 1
            if self.run.cancelled or (outcome_of(self.run) or {}).get("state") == "completed":
                self.world.tell(self.world.process.name, "the run is over")
                return 1
            with sweeps.without_outcome(self.disk, self.run):
                self.invariants.submitted()
                usable = partial(usable_nodes, self.job.partition)
                nodes = node_memory.left_out(self.run, self.job, usable, waiting.time.time())
                job_id = self._sbatch(*exclusion.option(None, nodes))
                lease.submitted(self.run, job_id if job_id in self.slurm.jobs else f"{job_id}_0")
                self.invariants.submitted()  # also after a scancel while Slurm answered slowly
        return 0

    def _sbatch(self, *options: str) -> str:
        script = self.run.batch_script
        if self.slurm.array:  # Slurm shows the script of the array, in which this finds no job
            return commands.submit(script, *options, timeout_s=None)
        return queue.submit(script, *options, is_new=lambda job_id: not lease.started(self.run, job_id))

    def _resubmit(self) -> int:
        """As ``clusterddp wait --resubmit``, without what it shows of the training."""
        self.resubmitting.append(self.world.process)
        waited = waiting.Waiting([waiting.Wait(self.run, self.job)])
        while not waited.look(1):  # it looks at the run's files more often, which nothing depends on
            due_s = waited.pace._at - waiting.time.monotonic()
            self.world.sleep(min(5.0, max(waiting.SHOWN_FILE_CHECK_S, due_s)))
        return waited.exit_code

    def _wait(self) -> int:
        """As ``clusterddp wait``."""
        code = waiting.wait([self.run], 60.0 if self.plan.seed % 3 == 0 else None)
        self.invariants.waited(code)
        return code

    def _launch(self, batch: Batch) -> Process:
        environ = {
            "SLURM_JOB_ID": batch.id.replace("_", "9"),
            **(
                {"SLURM_ARRAY_JOB_ID": batch.id.partition("_")[0], "SLURM_ARRAY_TASK_ID": "0"}
                if "_" in batch.id
                else {}
            ),
            "SLURM_JOB_NODELIST": ",".join(batch.nodes),
            "SLURM_JOB_PARTITION": "low",
            "SLURM_JOB_NUM_NODES": str(len(batch.nodes)),
            "SLURMD_NODENAME": batch.nodes[0],
            "SLURM_CLUSTER_NAME": product.CLUSTER,
            **({"SLURM_RESTART_COUNT": str(batch.restarts)} if batch.restarts else {}),
        }
        process = Process(self.world, f"job {batch.id}.{batch.restarts}", batch.nodes[0], environ)
        self._starts += 1
        self._at(f"start {self._starts}")

        def main() -> int:
            self.world.sleep(0.3)
            job = supervisor.as_started(self.job, environ)
            controller = SlurmController(environ, self.run, job)

            def launcher(job: Job, placement: Placement) -> Any:
                return Launcher(self.cluster, self.run, job, batch, placement.nodes or batch.nodes)

            try:
                return supervisor.supervise(self.run, job, launcher, controller)
            except (ClusterddpError, OSError) as error:
                self.world.tell(process.name, f"error: {error}")
                return 1

        process.start(main)
        return process

    def _on_crash(self, process: Process, error: BaseException) -> None:
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        self.world.violations.append(f"crash: {process.name}: {type(error).__name__}: {error} ({at})")

    # --- faults

    def _at(self, moment: str) -> None:
        """What waits for the moment strikes."""
        for fault in self.plan.faults:
            if fault.moment == moment and fault not in self._struck:
                self._struck.add(fault)
                self.world.after(fault.at, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        if self.over_at is None:
            self.world.tell("FAULT", fault.kind)
            FAULTS[fault.kind](self, random.Random(fault.draw))

    @property
    def batches(self) -> list[Batch]:
        """The jobs that have nodes."""
        return [job for job in self.slurm.jobs.values() if job.state == "RUNNING"]

    @property
    def training(self) -> list[Rank]:
        """The ranks of jobs that run."""
        return [rank for rank in self.cluster.ranks if rank.process.alive]


def _preempt(history: History, draw: random.Random) -> None:
    for batch in history.batches:
        history.slurm.preempt(batch, draw.choice((1.0, 60.0, 400.0)))


def _suspend(history: History, draw: random.Random) -> None:
    for batch in history.batches:
        history.slurm.suspend(batch, draw.choice((2.0, 40.0, 300.0)))


def _scancel(history: History, draw: random.Random) -> None:
    def work() -> None:
        live = [job.id for job in history.slurm.jobs.values() if job.state in ("PENDING", *HAS_NODES)]
        if live:
            commands.run("scancel", *live)

    history.user("scancel", work)


def _cancel(history: History, draw: random.Random) -> None:
    history.user("cancel", lambda: request_client.cancel_run(history.run) and 0)


def _submit_again(history: History, draw: random.Random) -> None:
    if history.plan.sweep:
        retry = draw.choice(((), ("failed",), ("failed", "cancelled")))
        history.user("submit", lambda: sweeps.submit(history, retry))
    else:
        history.user("submit", history._submit)


def _lose_node(history: History, draw: random.Random) -> None:
    node = draw.choice(sorted({rank.process.node for rank in history.training}) or history.slurm.node_names)
    dead = draw.random() < 0.5
    lost_s = draw.choice((40.0 if dead else 5.0, 40.0, 500.0, 4000.0))
    how = "loses its power" if dead else draw.choice(("is cut off", "is cut off", "stands still"))
    history.slurm.lose_node(node, lost_s, how, history.cluster.on_node)


def _shut_down_node(history: History, draw: random.Random) -> None:
    """The system of a node with ranks, but without a batch step, is shut down: its connections are closed."""
    hosts = {batch.host for batch in history.slurm.jobs.values()}
    nodes = sorted({rank.process.node for rank in history.training} - hosts)
    if nodes:
        lost_s = draw.choice((40.0, 200.0, 4000.0))
        history.slurm.lose_node(draw.choice(nodes), lost_s, "is shut down", history.cluster.on_node)


def _freeze_host(history: History, draw: random.Random) -> None:
    """The node of a supervisor stands still until its job has been restarted, perhaps for some time."""
    slurm = history.slurm
    still_s = 1.1 * slurm.settings.slurmd_timeout_s + draw.choice((15.0, 40.0, 160.0, 320.0))
    for batch in history.batches[:1]:
        slurm.lose_node(batch.host, still_s, "stands still", history.cluster.on_node)


def _lose_spare(history: History, draw: random.Random) -> None:
    """A node of the job that has no ranks loses its power, mostly for longer than the run lasts."""
    used = {rank.process.node for rank in history.training}
    for node in [node for job in history.batches for node in job.nodes if used and node not in used][:1]:
        history.slurm.lose_node(node, draw.choice((40.0, 4000.0, 4000.0)), "loses its power", history.cluster.on_node)


def _controller_away(history: History, draw: random.Random) -> None:
    history.slurm.away_until = history.world.now + draw.choice((5.0, 60.0, 600.0))


def _lossy(history: History, draw: random.Random) -> None:
    until = history.world.now + draw.choice((20.0, 200.0))
    history.slurm.lossy = (until, draw.choice((0, 30, 70)), draw.choice((0, 30, 70)))


def _slow_controller(history: History, draw: random.Random) -> None:
    history.slurm.latency_s = draw.choice((0.02, 1.0, 5.0))


def _kill_stepd(history: History, draw: random.Random) -> None:
    """The slurmstepd and the ranks of a node are killed, whose slurmd answers, once they have joined."""
    hosts = {batch.host for batch in history.slurm.jobs.values()}
    ranks = [rank for rank in history.training if rank.server and rank.process.node not in hosts | history.slurm.cut]
    for node in sorted({rank.process.node for rank in ranks})[:1]:
        for rank in ranks:
            if rank.process.node == node:
                rank.step._batch.busy.add(node)
                history.invariants.failed(rank)
                rank.process.kill()


def _kill_rank(history: History, draw: random.Random) -> None:
    if history.training:
        rank = draw.choice(history.training)
        history.invariants.failed(rank)
        rank.process.kill()


def _exception(history: History, draw: random.Random) -> None:
    if history.training:
        draw.choice(history.training).accident = "exception"


def _kill_supervisor(history: History, draw: random.Random) -> None:
    for batch in history.batches:
        if batch.batch is not None:
            history.world.tell(batch.batch.name, "the supervisor is killed")
            batch.batch.kill()


def _requeue(history: History, draw: random.Random) -> None:
    def work() -> None:
        for job in list(history.slurm.jobs.values()):
            if job.state in ("RUNNING", "COMPLETING", "COMPLETED"):
                try:
                    commands.requeue(job.id)
                except SlurmError as error:
                    history.world.tell("admin", str(error))

    history.user("admin", work)


def _stop(history: History, draw: random.Random) -> None:
    history.user("stop", lambda: steering.stop(history.run))


def _drain(history: History, draw: random.Random) -> None:
    nodes = sorted({rank.process.node for rank in history.training})
    if nodes:
        for node in [draw.choice(nodes), *draw.choice(((), (), ("n4",), nodes))]:
            history.user("drain", lambda node=node: steering.drain(history.run, node))  # type: ignore[misc]


def _save(history: History, draw: random.Random) -> None:
    def work() -> int:
        before = history.world.now
        code = steering.save(history.run)
        history.invariants.asked_to_save(before, code)
        return code

    history.user("save", work)


def _requeue_command(history: History, draw: random.Random) -> None:
    def work() -> int:
        if history.run.outcome() is None and request_client.waiting_job(history.run):
            return 0
        attempt, _ = request_client.request(history.run, requests.Requeue())
        return int(request_client.await_end(history.run, attempt).name == "stopped")

    history.user("requeue", work)


def _prune(history: History, draw: random.Random) -> None:
    def work() -> int:
        return pruning.delete_all([pruning.plan_for(history.run, 1, logs=False)])

    history.user("prune", work)


def _hang(history: History, draw: random.Random) -> None:
    if history.training:
        draw.choice(history.training).accident = "hang"


def _kill_command(history: History, draw: random.Random) -> None:
    """A terminal is closed: a command of the user's ends at once, ``submit`` apart, and is given again."""
    names: tuple[str, ...] = ("cancel", "resubmit", "wait", "stop", "save", "drain", "requeue")
    names += ("submit",) if history.plan.sweep else ()
    there = [each for each in history.world.processes if each.alive and each.name.startswith(names)]
    if there:
        process = draw.choice(there)
        history.world.tell(process.name, "is killed")
        process.kill()
        if process.name.startswith("submit"):
            history.world.after(5.0, history.user, "submit", history._begin)
        if process.name.startswith("resubmit"):
            history.world.after(draw.choice((1.0, 30.0)), history.user, "resubmit", history._resubmit)


def _disk_errors(history: History, draw: random.Random) -> None:
    code = draw.choice((errno.EIO, errno.ESTALE, errno.ENOSPC))
    history.disk.broken = (history.world.now + draw.choice((1.0, 20.0)), code, draw.choice((20, 100)))


def _time_limit(history: History, draw: random.Random) -> None:
    for batch in history.batches:
        left = draw.choice((30.0, 200.0))
        batch.end_time = min(batch.end_time or 1e9, history.world.now + left)
        batch.time_limit_s = int(batch.end_time - (batch.began or 0.0))
        history.world.after(left, history.slurm._time_limit, batch, batch.era)


def _more_time(history: History, draw: random.Random) -> None:
    """An administrator extends the time limit."""
    more_s = draw.choice((60, 1800))
    for batch in history.batches:
        batch.end_time, batch.time_limit_s = (batch.end_time or 0.0) + more_s, batch.time_limit_s + more_s


def _limited(history: History, draw: random.Random) -> None:
    history.slurm.limited_until = history.world.now + draw.choice((20.0, 300.0))


def _another_run_fails(history: History, draw: random.Random) -> None:
    history.memory.strike(draw)


def _odd_failure(history: History, draw: random.Random) -> None:
    """A rank ends in another way than by an exception or a signal, or reports nonsense."""
    if history.training:
        accidents = ("exits", "exits", "leaves", "out of memory", "device", "device", "bad report")
        draw.choice(history.training).accident = draw.choice(accidents)


def _connection_breaks(history: History, draw: random.Random) -> None:
    joined = [(rank, rank.server) for rank in history.training if rank.server is not None]
    if joined:
        rank, server = draw.choice(joined)
        server.break_connection(rank, draw.random() < 0.6, draw.choice((0.1, 2.0)))


def _refused(history: History, draw: random.Random) -> None:
    """No job can be submitted for a while, or jobs cannot be requeued any more."""
    if draw.random() < 0.6:
        history.slurm.refused_until = history.world.now + draw.choice((60.0, 300.0))
        return
    for batch in history.batches:
        batch.requeue_allowed = False


def _fork(history: History, draw: random.Random) -> None:
    history.user("fork", lambda: sweeps.fork_run(history, draw.getrandbits(16)))


def _accounting_away(history: History, draw: random.Random) -> None:
    history.slurm.unaccounted_until = history.world.now + draw.choice((20.0, 600.0))


#: What can happen, by name.
FAULTS: dict[str, Callable[[History, random.Random], Any]] = {
    "preempt": _preempt,
    "suspend": _suspend,
    "scancel": _scancel,
    "cancel": _cancel,
    "submit again": _submit_again,
    "lose a node": _lose_node,
    "controller away": _controller_away,
    "answers lost": _lossy,
    "controller slow": _slow_controller,
    "kill a rank": _kill_rank,
    "exception": _exception,
    "kill the supervisor": _kill_supervisor,
    "requeue by admin": _requeue,
    "disk errors": _disk_errors,
    "time limit lowered": _time_limit,
    "time limit raised": _more_time,
    "requests limited": _limited,
    "stop": _stop,
    "save": _save,
    "requeue": _requeue_command,
    "prune": _prune,
    "hang": _hang,
    "kill a command": _kill_command,
    "drain": _drain,
    "lose a spare": _lose_spare,
    "freeze the host": _freeze_host,
    "another run fails": _another_run_fails,
    "accounting away": _accounting_away,
    "fork": _fork,
    "odd failure": _odd_failure,
    "refused": _refused,
    "connection breaks": _connection_breaks,
    "shut down a node": _shut_down_node,
    "kill a stepd": _kill_stepd,
}
#: What is drawn in certain histories only, each by its own rule.
APART = {
    *("drain", "lose a spare", "another run fails", "accounting away", "fork", "odd failure", "refused"),
    *("connection breaks", "freeze the host", "shut down a node", "kill a stepd"),
}


def play(seed_or_plan: int | Plan, traced: bool = False) -> Result:
    """Plays a history; ``product.installed()`` must be in effect."""
    plan = drawn(seed_or_plan) if isinstance(seed_or_plan, int) else seed_or_plan
    history = History(plan, traced)
    try:
        return history.play()
    finally:
        history.take_apart()


def shrunk(plan: Plan) -> Plan:
    """The same with the fewest faults that still violate the same invariant, one after the other left out."""
    wanted = _which(play(plan))
    left_out = wanted is not None
    while left_out:
        left_out = False
        for fault in plan.faults:
            less = replace(plan, faults=tuple(other for other in plan.faults if other is not fault))
            if _which(play(less)) == wanted:
                plan, left_out = less, True
                break
    for change in ({"resubmitters": 0}, {"lag_s": 0.0}, {"slow": 0.0}):
        less = replace(plan, **change)
        if _which(play(less)) == wanted:
            plan = less
    return plan


def _which(result: Result) -> str | None:
    return result.violations[0].partition(":")[0] if result.violations else None
