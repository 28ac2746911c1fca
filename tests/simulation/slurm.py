"""A model of slurmctld and its slurmds, after what was seen on 22.05.8, 24.11.5 and 26.05.5.

``run`` answers the product's commands in the text that its parsers read; recorded answers of these releases are in
tests/unit/recorded. What is left out: het jobs, priorities other than the order of submission.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.world import EPOCH, Process, World

#: Since 26.05 at the end of a job's record; it may imitate fields.
SUBMIT_LINE = " SubmitLine=sbatch --parsable --comment=JobState=FAILED /shared/runs/sim/job.sbatch"
#: States in which a job has its nodes.
HAS_NODES = ("RUNNING", "SUSPENDED", "COMPLETING")
#: That of a sweep's array.
ARRAY_SCRIPT = "/shared/sweep/arrays/0/array.sbatch"
#: What commands say that get no answer from a controller, in turn.
SILENT = (
    *("Unable to contact slurm controller (connect failure)", "Zero Bytes were transmitted or received"),
    *("Protocol authentication error", "Message receive failure", "Slurm backup controller in standby mode"),
    *("Resource temporarily unavailable", "Unexpected message received", "Insane message length"),
)
#: The same where an answer is lost.
LOST = ("Socket timed out on send/recv operation", "Zero Bytes were transmitted or received", "Message receive failure")
#: Why a job is held that was requeued too often.
HELD = "JobHoldMaxRequeue"
#: At most so long after the loss of a batch host is a job requeued that outlives its nodes.
GUARD_S = 60.0
#: A slurmd that stood still takes at most so long until it is told what it has to kill.
REGISTERS_S = 10.0


@dataclass
class Settings:
    """How the cluster is set up."""

    release: str = "22.05"
    mode: str = "REQUEUE"
    grace_s: int = 20
    kill_wait_s: int = 30
    hold_s: int = 121
    slurmd_timeout_s: int = 300
    nodes: int = 4
    #: MaxBatchRequeue: how often a job may end by itself within a grace, from 24.05 on; then it is held.
    max_requeues: int = 5
    #: MinJobAge: for how long the controller knows a job that has ended.
    min_age_s: float = math.inf
    #: Whether preemption goes by QOS, which only the accounting knows.
    by_qos: bool = False


@dataclass
class Batch:
    """A job."""

    id: str
    nodes_needed: int
    #: With how many it starts if more are not free.
    nodes_least: int
    time_limit_s: int
    submitted: float
    by: str = ""
    #: For how long it was suspended, which is no part of its run time.
    stood_s: float = 0.0
    #: Since when it is suspended, if it is.
    suspended: float = 0.0
    #: When it was submitted first: a requeue counts as a submission.
    made: float = 0.0
    script: str = ""
    #: When whoever submitted it had last been told of its own job.
    asked: float = 0.0
    #: When the request to submit it was made.
    sent: float = 0.0
    exclude: frozenset[str] = frozenset()
    after: str | None = None
    state: str = "PENDING"
    reason: str = "None"
    restarts: int = 0
    requeue_allowed: bool = True
    preempt_time: float | None = None
    began: float | None = None
    ended: float | None = None
    #: When it ended for good: some time later the controller forgets it.
    over: float = math.inf
    begin: float = 0.0
    nodes: list[str] = field(default_factory=list)
    #: Where its batch step runs.
    host: str = ""
    #: What the job becomes once its processes have ended.
    becomes: str = ""
    #: The processes of the batch step, and of the ranks' step.
    processes: list[Process] = field(default_factory=list)
    batch: Process | None = None
    #: Whether it outlives its nodes (``--no-kill``), what is told that one is down, and which are.
    no_kill: bool = False
    node_down: Callable[[str], Any] = lambda _: None
    lost: set[str] = field(default_factory=set)
    #: The nodes whose slurmstepd was killed: their step does not end before the job (seen on 22.05.8). The pid of the
    #: job's srun, and whether it waits for such nodes.
    busy: set[str] = field(default_factory=set)
    srun: int | None = None
    waits: bool = False
    #: Signals that a step gets.
    signal: Callable[[str], Any] = lambda _: None
    #: Counts starts and ends, so that an event that was planned for an earlier one has no effect.
    era: int = 0
    #: 24.11: the next end of a job that was requeued within a grace counts as preempted, too.
    again: bool = False
    #: How often it has ended by itself within a grace.
    left_in_grace: int = 0
    end_time: float | None = None
    #: What `scontrol show job` showed last: what it depends on, the line before the run time, and after it.
    record: tuple[tuple[Any, ...], str, str] | None = None


class Slurm:
    """The controller. ``launch(job)``: starts the batch step, a process on the job's first node."""

    def __init__(self, world: World, settings: Settings, launch: Callable[[Batch], Process]) -> None:
        self.world, self.settings, self._launch = world, settings, launch
        self.jobs: dict[str, Batch] = {}
        self.node_names = [f"n{number}" for number in range(1, settings.nodes + 1)]
        #: Why a node gets no job, until when: by a preempting job, or as it is down.
        self.taken: dict[str, float] = {}
        self.down: set[str] = set()
        #: Since when, of those that are or were.
        self.down_since: dict[str, float] = {}
        #: When each node that was lost came back.
        self.back_at: dict[str, float] = {}
        self.cut: set[str] = set()
        #: Those that closed all connections as they went down, because they were shut down: the processes that ended.
        self.shut: dict[str, list[Process]] = {}
        self.away_until = 0.0
        #: Until when sbatch is refused, as by a limit.
        self.refused_until = 0.0
        #: Until when the accounting is away.
        self.unaccounted_until = 0.0
        #: Until when answers are lost, and how many of a hundred before and after they took effect.
        self.lossy: tuple[float, int, int] = (0.0, 0, 0)
        #: The command whose next answer is lost after it took effect, such as ``scontrol requeue``.
        self.loses = ""
        self.latency_s = 0.02
        #: Until when requests are refused for their rate; Slurm's commands then try again later.
        self.limited_until = 0.0
        #: When each process was last told of its job's state.
        self.shown_at: dict[str, float] = {}
        #: How many requests for a requeue each process has sent since.
        self.requests: dict[str, int] = {}
        #: The processes that have sent one.
        self.requeuers: set[str] = set()
        #: Told of what the controller did: (what, job, by whom).
        self.listener: Callable[[str, Batch, str], Any] = lambda *_: None
        #: All processes of jobs so far, each with its job and the job's era: those on a lost node outlive their job.
        self.started: list[tuple[Process, Batch, int]] = []
        #: Jobs of which whoever submitted them has not heard: the answer was lost, or came too late.
        self.unanswered: set[str] = set()
        self._next_id = 100
        self._scheduled = False
        self.commands = 0
        #: Of each process that gave commands: when the first and the last one came, and how many.
        self.asked: dict[str, tuple[float, float, int]] = {}

    #: Told of each command, and of who gives it, before it is carried out.
    on_command: Callable[[str, str], Any] = staticmethod(lambda *_: None)

    def _tell(self, what: str) -> None:
        self.world.tell("slurmctld", what)

    # --- commands

    def run(self, command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Carries out a command of the calling process, as ``subprocess.run``."""
        world, draw = self.world, self.world.random
        self.commands += 1
        process = world.process
        if command[0] != "sacctmgr":  # which asks another daemon
            first, _, count = self.asked.get(process.name) or (world.now, 0.0, 0)
            self.asked[process.name] = (first, world.now, count + 1)
        if command[1] != "show":
            self.on_command(process.name, f"{command[0]} {command[1]}")
            if command[:2] == ("scontrol", "requeue"):
                self.requests[process.name] = self.requests.get(process.name, 0) + 1
                self.requeuers.add(process.name)
        world.sleep(self.latency_s * (0.5 + draw.random()))
        if process.node in self.cut or world.now < self.away_until:
            world.sleep(9.0 + 9.0 * draw.random())
            if process.node in self.cut or world.now < self.away_until:
                return _failed(command, SILENT[self.commands % len(SILENT)])
        if world.now < self.limited_until:
            patience_s, late_s = more.get("timeout") or 3600.0, 80.0 * draw.random()
            world.sleep(min(late_s, patience_s))
            if late_s > patience_s:
                raise subprocess.TimeoutExpired(list(command), patience_s)
        until, before, after = self.lossy
        lossy = until > world.now
        if lossy and draw.random() * 100 < before:
            world.sleep(10.0)
            return _failed(command, LOST[self.commands % len(LOST)])
        answer = self._answer(command)
        if world.traced and command[1] not in ("show", "-h") and command[0] != "squeue":
            said = answer.stdout.strip() if answer.returncode == 0 else answer.stderr.strip()
            world.tell(process.name, f"$ {' '.join(map(str, command))}{f': {said}' if said else ''}")
        if self.loses == f"{command[0]} {command[1]}":
            self.loses = ""
            return _failed(command, LOST[self.commands % len(LOST)])
        if lossy and draw.random() * 100 < after:
            world.sleep(10.0)
            return _failed(command, LOST[self.commands % len(LOST)])
        world.sleep(self.latency_s * (0.5 + draw.random()))
        if command[0] == "sbatch":
            self.unanswered -= {answer.stdout, f"{answer.stdout}_0"}
        return answer

    @property
    def has_forgotten_steps(self) -> bool:
        """Whether it was restarted, and no srun has asked again for the step that it waits for."""
        return 0 < self.away_until <= self.world.now < self.away_until + 60.0

    def _known(self, job_id: str) -> Batch | None:
        """The job, until the controller forgets it."""
        job = self.jobs.get(job_id)
        # One that is down forgets no job, and neither does one that does not answer, so that somebody can still ask.
        silent_until = max(self.away_until, self.limited_until, self.lossy[0])
        is_forgotten = job is not None and max(job.over, silent_until) + self.settings.min_age_s < self.world.now
        return None if is_forgotten else job

    def _named(self, job_id: str) -> Batch | None:
        """The job of this id. That of an array stands for all of its tasks, of which only one is the run's."""
        if job_id not in self.jobs and f"{job_id}_0" in self.jobs:
            self.world.violations.append(f"array: {self.world.process.name} names all tasks of array {job_id}")
            return self.jobs[f"{job_id}_0"]
        return self._known(job_id)

    def _answer(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        match [str(word) for word in command]:
            case ["scontrol", "show", "job", "-o", job_id]:
                job = self._known(job_id)
                self.shown_at[self.world.process.name] = self.world.now
                self.requests[self.world.process.name] = 0
                return _done(command, self.shown(job)) if job else _failed(command, "Invalid job id specified")
            case ["squeue", "--noheader", "--me", *states, "--format=%F|%o"]:
                jobs = [job for job in self.jobs.values() if self._known(job.id) and (states or is_live(job))]
                return _done(command, "".join(f"{job.id.partition('_')[0]}|{job.script}\n" for job in jobs))
            case ["squeue", *options]:
                ids = options[options.index("-j") + 1].split(",")
                if len(ids) == 1 and self._known(ids[0]) is None:
                    return _failed(command, "Invalid job id specified")
                return _done(command, self._queue(ids))
            case ["scontrol", "show", "config"]:
                return _done(command, self._configuration())
            case ["scontrol", "show", "partition", "-o"]:
                grace_s, mode = (0, "OFF") if self.settings.by_qos else (self.settings.grace_s, self.settings.mode)
                return _done(command, f"PartitionName=low GraceTime={grace_s} PreemptMode={mode}")
            case ["scontrol", "show", "node", "-o", node]:
                return _done(command, f"NodeName={node} NodeAddr={node} NodeHostName={node}\n")
            case ["scontrol", "show", "step", "-o", job_id]:
                named = (job for job in self.jobs.values() if job.id.replace("_", "9") == job_id)
                return _done(command, "".join(_steps(job, self.has_forgotten_steps) for job in named))
            case ["scontrol", "requeue", job_id]:
                job = self._named(job_id)
                return self._requeue(command, job) if job else _failed(command, "Invalid job id specified")
            case ["scontrol", "update", what, change]:
                job = self._named(what.removeprefix("JobId="))
                return self._update(command, job, change) if job else _failed(command, "Invalid job id specified")
            case ["scancel", *ids]:
                for job in filter(None, map(self._named, ids)):
                    self.cancel(job)
                return _done(command, "")
            case ["sacctmgr", "-nP", "show", "qos", *_]:
                if self.world.now < self.unaccounted_until:
                    return _failed(command, "Problem talking to the database: Connection refused")
                minutes, seconds = divmod(self.settings.grace_s, 60)
                return _done(command, f"{self.settings.mode.lower()}|00:{minutes:02}:{seconds:02}\n")
            case ["sbatch", *_] if self.world.now < self.refused_until:
                return _failed(command, "Batch job submission failed: Job violates accounting/QOS policy")
            case ["sbatch", "--parsable", *options, script]:
                return _done(command, self.submit(options, script))
            case ["sinfo", "-h", "-N", "-o", "%R|%P|%N|%T"]:
                lines = [f"low|low*|{node}|{'down*' if node in self.down else 'idle'}" for node in self.node_names]
                return _done(command, "\n".join(lines) + "\n")
            case ["sinfo", "-h", "-o", "%P"]:
                return _done(command, "low*\n")
        raise AssertionError(f"the model knows no {command}")

    def shown(self, job: Batch) -> str:
        """A line of ``scontrol show job -o``. Only the run time changes all the time."""
        until = self.world.now if job.ended is None else job.ended
        ran = 0 if job.began is None else int(until - job.began - job.stood_s)
        key = (
            *(job.state, job.reason, job.requeue_allowed, job.restarts, job.time_limit_s, job.submitted, job.begin),
            *(job.began, job.end_time, job.ended, job.preempt_time, len(job.nodes)),
        )
        if job.record is None or job.record[0] != key:
            job.record = (key, *self._record(job))
        return f"{job.record[1]}{_duration(ran)}{job.record[2]}"

    def _record(self, job: Batch) -> tuple[str, str]:
        """The line before the run time, and after it."""
        end = job.ended if job.ended is not None else job.end_time
        return (
            f"{_ids(job.id)} JobName=sim UserId=ddp(1000) GroupId=ddp(992) MCS_label=N/A JobState={job.state} "
            f"Reason={job.reason} Dependency=(null) Requeue={job.requeue_allowed:d} Restarts={job.restarts} RunTime=",
            f" TimeLimit={_duration(job.time_limit_s)} SubmitTime={_time(job.submitted)} "
            f"EligibleTime={_time(max(job.submitted, job.begin))} StartTime={_time(job.began)} EndTime={_time(end)} "
            f"PreemptTime={_time(job.preempt_time)} Partition=low NodeList={','.join(job.nodes) or '(null)'} "
            f"Command=(null){SUBMIT_LINE if self.settings.release == '26.05' else ''} WorkDir=/shared\n",
        )

    def _queue(self, ids: Sequence[str]) -> str:
        known = filter(None, map(self._known, ids))
        return "".join(
            f"{job.id}|{job.state}|{','.join(job.nodes)}|{_time(job.began)}|1:00:00|low|{job.reason}\n" for job in known
        )

    def _configuration(self) -> str:
        settings = self.settings
        expires = f"AuthInfo = cred_expire={settings.hold_s - 1}"
        if settings.release == "26.05":
            expires = f"AuthInfo = cred_expire=119\nSchedulerParameters = requeue_delay={settings.hold_s - 1}"
        return (
            f"{expires}\nMaxArraySize = 1001\nKillWait = {settings.kill_wait_s} sec\n"
            f"PreemptType = preempt/{'qos' if settings.by_qos else 'partition_prio'}\nPreemptMode = {settings.mode}\n"
        )

    def _update(self, command: Sequence[str], job: Batch, change: str) -> subprocess.CompletedProcess[str]:
        if change == "StartTime=now":
            if job.state == "PENDING":  # of a job that is completing it is overwritten
                if self.world.now - job.begin + self.settings.hold_s < 1.0:
                    job.reason = "revoked"  # as seen: a job released within a second of its requeue fails
                    if self.shown_at.get(self.world.process.name, 0.0) > job.begin - self.settings.hold_s:
                        self.listener("released early", job, "")  # by who has been shown that it was requeued
                job.begin = self.world.now
                self._wake()
            return _done(command, "")
        if job.state not in ("PENDING", *HAS_NODES) or (job.state == "COMPLETING" and job.becomes != "PENDING"):
            return _failed(command, "Job/step already completing or completed")
        job.requeue_allowed = change == "Requeue=1"
        return _done(command, "")

    # --- jobs

    def submit(self, options: Sequence[str], script: str) -> str:
        """A new job."""
        self._next_id += 1
        words = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        job_id = str(self._next_id)
        is_task = self.array and not self.jobs
        of_sweep = script.endswith("array.sbatch")
        job = Batch(
            f"{job_id}_0" if is_task or of_sweep else job_id,
            self.nodes_needed,
            self.nodes_least,
            self.time_limit_s,
            self.world.now,
            self.world.process.name,
        )
        job.no_kill, job.asked, job.sent = self.no_kill, self.shown_at.get(job.by, 0.0), self.asked[job.by][1]
        job.script, job.made = ARRAY_SCRIPT if is_task else script, self.world.now
        if "dependency" in words:
            job.after = words["dependency"].removeprefix("afterany:")
            job.reason = "Dependency"
        job.exclude = frozenset(words.get("exclude", "").split(",")) - {""}
        self.jobs[job.id] = job
        self.listener("submit", job, job.by)
        self.unanswered.add(job.id)
        self._tell(f"job {job.id} submitted{f', after {job.after}' if job.after else ''}")
        self._wake()
        return job_id

    #: What jobs ask for, and whether the first one is a task of an array.
    nodes_needed = nodes_least = 1
    array = False
    #: Whether they outlive their nodes.
    no_kill = False
    time_limit_s = 3600

    def _wake(self) -> None:
        """Has the scheduler look, within a second or so."""
        if not self._scheduled:
            self._scheduled = True
            self.world.after(0.2 + self.world.random.random(), self._schedule)

    def _schedule(self) -> None:
        self._scheduled = False
        world = self.world
        if world.now < self.away_until:
            self.world.after(self.away_until - world.now, self._wake)
            return
        waiting = [job for job in self.jobs.values() if job.state == "PENDING"]
        busy = {node for job in self.jobs.values() if job.state in HAS_NODES for node in job.nodes}
        later = False
        for job in waiting:
            if job.reason == HELD:
                continue
            if job.begin > world.now:
                job.reason, later = "BeginTime", True
                continue
            if job.after is not None and self.jobs[job.after].state in ("PENDING", *HAS_NODES):
                job.reason, later = "Dependency", True
                continue
            free = [node for node in self.node_names if self._free(node, busy) and node not in job.exclude]
            if len(free) < job.nodes_least:
                job.reason, later = "Resources", True
                continue
            nodes = free[: job.nodes_needed]
            busy.update(nodes)
            self._start(job, nodes)
        if later:
            self._scheduled = True
            self.world.after(1.0, self._schedule)

    def _free(self, node: str, busy: set[str]) -> bool:
        return node not in busy and node not in self.down and self.taken.get(node, 0.0) <= self.world.now

    def _start(self, job: Batch, nodes: list[str]) -> None:
        world = self.world
        revoked = job.reason == "revoked"
        job.state, job.reason, job.nodes, job.began, job.ended = "RUNNING", "None", nodes, world.now, None
        job.preempt_time, job.becomes, job.end_time, job.stood_s = None, "", world.now + job.time_limit_s, 0.0
        job.era += 1
        job.host, job.nodes_needed, job.nodes_least = nodes[0], len(nodes), len(nodes)  # also of a restart
        job.processes, job.lost, job.signal, job.node_down = [], set(), lambda _: None, lambda _: None
        job.busy, job.srun, job.waits = set(), None, False
        self._tell(f"job {job.id} starts on {','.join(nodes)}{f' (restart {job.restarts})' if job.restarts else ''}")
        self.listener("start", job, "")
        if revoked:
            self._tell(f"job {job.id}: credential revoked")
            self._end(job, "FAILED")
            return
        world.after(0.1 + world.random.random(), self._launch_batch, job, job.era)
        world.after(job.time_limit_s, self._time_limit, job, job.era)

    def _launch_batch(self, job: Batch, era: int) -> None:
        if job.era != era or job.state not in ("RUNNING", "SUSPENDED"):
            return
        if job.host in self.cut or job.state == "SUSPENDED":  # the request is sent again
            self.world.after(5.0, self._launch_batch, job, era)
            return
        process = job.batch = self._launch(job)
        self.add_process(job, process)
        process.on_exit = lambda code: self._batch_ended(job, era, code)

    def _batch_ended(self, job: Batch, era: int, code: int | None) -> None:
        """The job ends with its batch step; the ranks' step is killed."""
        if job.era != era:
            return
        for process in job.processes:
            process.kill()
        if job.state in ("RUNNING", "SUSPENDED"):
            self._tell(f"job {job.id}: batch step ended {f'with {code}' if code is not None else 'by a signal'}")
            in_grace = job.preempt_time is not None and job.state == "RUNNING"
            ended = "COMPLETED" if code == 0 else "FAILED"
            if (in_grace or job.again) and self.settings.release != "22.05":
                # From 24.05 on, a job that ends within a grace counts as preempted.
                job.left_in_grace += in_grace
                job.again = False
                self._finish(job, "PENDING" if self._requeues(job) else "PREEMPTED")
            else:
                self._finish(job, ended)
        self._settle(job)

    def release(self) -> None:
        """``scontrol release`` of all held jobs, by their owner."""
        for job in self.jobs.values():
            if job.state == "PENDING" and job.reason == HELD:
                self._tell(f"job {job.id} is released")
                job.reason, job.left_in_grace = "None", 0
                self._wake()

    def _requeues(self, job: Batch) -> bool:
        return self.settings.mode == "REQUEUE" and job.requeue_allowed

    def _finish(self, job: Batch, becomes: str, signal: str = "", reason: str = "None") -> None:
        """The job is being ended: its steps get a signal, and KILL after KillWait."""
        # A job that ends while it is suspended has ended with its suspension.
        job.ended = job.suspended if job.state == "SUSPENDED" else self.world.now
        job.becomes, job.state, job.reason = becomes, "COMPLETING", reason
        if becomes == "PENDING":
            job.restarts += 1
        if signal:
            job.signal(signal)
            self.world.after(self.settings.kill_wait_s, self._kill, job, job.era)
        self._settle(job)

    def _kill(self, job: Batch, era: int) -> None:
        if job.era != era or job.state != "COMPLETING":
            return
        alive = [process for process in job.processes if process.alive and process.node not in self.cut]
        if alive:
            self._tell(f"job {job.id}: KILL")
        for process in alive:
            process.kill()
        self._settle(job)

    def _settle(self, job: Batch) -> None:
        """The job's end, once it has no processes."""
        if job.state != "COMPLETING":
            return
        left = [process for process in job.processes if process.alive and process.node not in self.cut | self.down]
        # A node that does not respond keeps the job completing until Slurm gives it up (seen on 22.05.8).
        silent = self.cut.difference(self.down).intersection(job.nodes)
        if not left and not silent:
            self.world.after(0.2 + self.world.random.random(), self._end_if_empty, job, job.era)

    def _end_if_empty(self, job: Batch, era: int) -> None:
        if job.era == era and job.state == "COMPLETING":
            self._end(job, job.becomes)

    def _end(self, job: Batch, state: str) -> None:
        job.era += 1
        job.over = math.inf
        if state == "PENDING":
            held = job.left_in_grace >= self.settings.max_requeues
            job.state, job.reason, job.nodes = "PENDING", HELD if held else "BeginTime", []
            job.begin = self.world.now + self.settings.hold_s
            job.submitted, job.preempt_time, job.began, job.ended = self.world.now, None, None, None
            why = "by MaxBatchRequeue" if held else f"for {self.settings.hold_s} s"
            self._tell(f"job {job.id}: PENDING, held {why}")
        else:
            job.state = state
            if job.ended is None:  # else it has been since it began to complete
                job.ended = self.world.now
            job.over = self.world.now
            self._tell(f"job {job.id}: {state}")
            self.listener("end", job, state)
        self._wake()

    def add_process(self, job: Batch, process: Process) -> None:
        """A process of a job has started."""
        job.processes.append(process)
        self.started.append((process, job, job.era))

    def step_ended(self, job: Batch) -> None:
        """A process of the ranks' step has ended."""
        self._settle(job)

    # --- what happens to jobs

    def _requeue(self, command: Sequence[str], job: Batch) -> subprocess.CompletedProcess[str]:
        """``scontrol requeue``, which is not refused for a job that is being cancelled or has ended."""
        if not job.requeue_allowed:
            return _failed(command, "Requested operation is presently disabled")
        if job.state == "PENDING" or (job.state == "COMPLETING" and job.becomes == "PENDING"):
            return _failed(command, "Job is pending execution")
        self.listener("requeue", job, self.world.process.name)
        if job.state in ("RUNNING", "SUSPENDED"):
            job.again = job.preempt_time is not None and self.settings.release == "24.11"  # not 26.05 (seed 8009)
            self._finish(job, "PENDING", "TERM")
        elif job.state == "COMPLETING":
            job.becomes = "PENDING"
            job.restarts += 1
        else:
            job.restarts += 1
            self._end(job, "PENDING")
        return _done(command, "")

    def cancel(self, job: Batch) -> None:
        """``scancel``."""
        if job.state in ("PENDING", "RUNNING", "SUSPENDED") or (job.state, job.becomes) == ("COMPLETING", "PENDING"):
            self.listener("cancel", job, "" if self.world.thread is None else self.world.process.name)
        if job.state == "PENDING":
            self._end(job, "CANCELLED")
        elif job.state in ("RUNNING", "SUSPENDED"):
            self._finish(job, "CANCELLED", "TERM")
        elif job.state == "COMPLETING" and job.becomes == "PENDING":
            job.becomes = "CANCELLED"

    def _time_limit(self, job: Batch, era: int) -> None:
        if job.era != era or job.state != "RUNNING" or job.end_time is None:
            return
        if job.end_time > self.world.now + 0.5:
            self.world.after(job.end_time - self.world.now, self._time_limit, job, era)
            return
        self._tell(f"job {job.id}: time limit")
        if job.preempt_time is not None:  # its grace ends then, by slurmctld's source (_preempt_signal)
            self._grace_over(job, era)
            return
        self._finish(job, "TIMEOUT", "TERM", reason="TimeLimit")

    def preempt(self, job: Batch, for_s: float) -> None:
        """A job of higher priority needs the nodes, for some time."""
        if job.state != "RUNNING" or job.preempt_time is not None:
            return
        settings = self.settings
        self._tell(f"job {job.id} is preempted{f', grace {settings.grace_s} s' if settings.grace_s else ''}")
        for node in job.nodes:
            self.taken[node] = self.world.now + for_s
        job.preempt_time = self.world.now
        self.listener("preempt", job, "")
        if settings.grace_s:
            job.signal("TERM")
            late = settings.grace_s + 10 * self.world.random.random()
            self.world.after(late, self._grace_over, job, job.era)
        else:
            self._finish(job, self._after_preemption(job), "TERM")

    def _after_preemption(self, job: Batch) -> str:
        return "PENDING" if self._requeues(job) else "PREEMPTED"

    def _grace_over(self, job: Batch, era: int) -> None:
        if job.era == era and job.state == "RUNNING":
            self._tell(f"job {job.id}: the grace is over")
            self._finish(job, self._after_preemption(job))
            self._kill(job, era)

    def suspend(self, job: Batch, for_s: float) -> None:
        """``scontrol suspend`` and ``resume``: all processes of the job stand still."""
        if job.state != "RUNNING":
            return
        self._tell(f"job {job.id} is suspended for {for_s:.0f} s")
        job.state, job.suspended = "SUSPENDED", self.world.now
        for process in job.processes:
            process.stopped_until = max(process.stopped_until, self.world.now + for_s)
        self.listener("suspend", job, "")
        self.world.after(for_s, self._resume, job, job.era, for_s)

    def _resume(self, job: Batch, era: int, for_s: float) -> None:
        if job.era == era and job.state == "SUSPENDED" and job.end_time is not None:
            self._tell(f"job {job.id} goes on")
            job.state, job.end_time, job.stood_s = "RUNNING", job.end_time + for_s, job.stood_s + for_s
            self.world.after(job.end_time - self.world.now, self._time_limit, job, era)

    def lose_node(self, node: str, for_s: float, how: str, lost: Callable[[str, bool], Any]) -> None:
        """A node ``loses its power``, ``is shut down``, ``is cut off`` or ``stands still`` with all of its processes,
        which go on afterwards. ``lost``: told when it is lost, and (False) when it is back."""
        if node in self.cut | self.down:
            return
        self._tell(f"({node} {how})")
        if how == "is shut down":
            ended = self.shut[node] = [each for each, _, _ in self.started if each.node == node and each.alive]
            for process in ended:
                process.kill()
        self.cut.add(node)
        lost(node, True)
        for process, _, _ in self.started:
            if process.node == node and how == "loses its power":
                process.alive = False
            elif process.node == node and how == "stands still":
                process.stopped_until = max(process.stopped_until, self.world.now + for_s)
        self.world.after(self.settings.slurmd_timeout_s * (0.9 + 0.2 * self.world.random.random()), self._give_up, node)
        self.world.after(for_s, self._node_back, node, lost, how)

    def _give_up(self, node: str) -> None:
        if node not in self.cut:
            return
        self._tell(f"node {node} is down")
        self.down.add(node)
        self.down_since[node] = self.world.now
        for job in self.jobs.values():
            if node in job.nodes and job.state in HAS_NODES:
                if job.state == "COMPLETING":
                    self._settle(job)
                elif not job.no_kill:
                    self._lost(job, node)
                elif node == job.host:  # the guard requeues it
                    self.world.after(GUARD_S * self.world.random.random(), self._requeued_by_guard, job, job.era)
                else:
                    self._leave_node(job, node)

    def _leave_node(self, job: Batch, node: str) -> None:
        self._tell(f"job {job.id} goes on without {node}")
        job.nodes = [each for each in job.nodes if each != node]
        job.lost.add(node)
        job.node_down(node)

    def _requeued_by_guard(self, job: Batch, era: int) -> None:
        if job.era == era and job.state in ("RUNNING", "SUSPENDED"):
            self.listener("node_fail", job, "")
            self._finish(job, "PENDING", reason="NodeDown")
            self._kill(job, era)

    def _lost(self, job: Batch, node: str) -> None:
        self.listener("node_fail", job, node)
        self._finish(job, "PENDING" if job.requeue_allowed else "NODE_FAIL", reason="NodeDown")
        self._kill(job, job.era)

    def _node_back(self, node: str, lost: Callable[[str, bool], Any], how: str) -> None:
        """slurmd registers, and kills what does not belong to a job of the node."""
        self._tell(f"(node {node} is back)")
        self.cut.discard(node)
        self.down.discard(node)
        self.shut.pop(node, None)
        self.back_at[node] = self.world.now
        lost(node, False)
        late_s = REGISTERS_S * self.world.random.random() if how == "stands still" else 0.0
        self.world.after(late_s, self._clean, node)
        for job in self.jobs.values():
            runs_there = job.state in ("RUNNING", "SUSPENDED") and node in job.nodes
            if runs_there and how in (
                "loses its power",
                "is shut down",
            ):  # it was restarted: a lost node, by slurmctld's source
                if job.no_kill and node != job.host:
                    self._leave_node(job, node)
                else:
                    self._lost(job, node)
            self._settle(job)
        self._wake()

    def _clean(self, node: str) -> None:
        for process, job, era in self.started:
            over = job.era != era or job.state not in ("RUNNING", "SUSPENDED") or node in job.lost
            if process.node == node and process.alive and over:
                process.kill()


def _steps(job: Batch, forgotten: bool) -> str:
    """The lines of ``scontrol show step -o``. ``forgotten``: by a slurmctld that was restarted since srun asked it."""
    states = {4: "RUNNING"}
    if job.srun is not None and not (job.waits and forgotten):
        states[job.srun] = "PENDING" if job.waits else "RUNNING"
    return "".join(f"StepId={job.id}.0 State={state} SrunHost:Pid=n1:{pid}\n" for pid, state in states.items())


def is_live(job: Batch) -> bool:
    """Whether it runs or may yet run."""
    return job.state == "PENDING" or job.state in HAS_NODES


def _done(command: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 0, text, "")


def _failed(command: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", f"{command[0]}: error: {text}\n")


def _ids(job_id: str) -> str:
    """As ``scontrol show job`` names a job; the last task of an array has the array's own id."""
    array, _, task = job_id.partition("_")
    return f"JobId={array} ArrayJobId={array} ArrayTaskId={task}" if task else f"JobId={job_id}"


def _time(at: float | None) -> str:
    return "None" if at is None else str(int(EPOCH + at))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}"
