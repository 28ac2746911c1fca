"""What must be true in every history: I1 to I10 of the faults' table, in the model's terms.

Checked where it could be violated: at each start of training, each step, each checkpoint, each thing that the
controller does, and otherwise every few simulated seconds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from clusterddp.errors import TIMED_OUT, WAITED
from clusterddp.history.words import ATTEMPT_ENDS, RUN_ENDS
from clusterddp.rundir import json_lines, schemas
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.verdict import JITTER_S
from tests.simulation import shards
from tests.simulation.ranks import MARK, Launcher, Rank, sample_of, trained
from tests.simulation.slurm import HAS_NODES, REGISTERS_S, Batch
from tests.simulation.world import EPOCH, Process

if TYPE_CHECKING:
    from tests.simulation.history import History

#: Events of attempts that never started their ranks.
_WITHOUT_RANKS = ("submitted", "forked", *RUN_ENDS)
#: Between two checks of what lasts, in simulated seconds.
INVARIANTS_S = 5.0
#: How long two attempts may train at a time where all of it can be seen, and a job may hold nodes without ranks.
TOGETHER_S, IDLE_S = 60.0, 120.0
#: How long a job may wait for a node that is lost, while its supervisor can ask the controller.
LOST_S = 90.0
#: The same for a job of which a rank has failed: the others may use a notice to save.
INCOMPLETE_S = 200.0
#: Of ranks that fail so closely together, the first message to arrive decides which was the first, unless one of them
#: says why it failed.
TOLD_S = 0.1 + JITTER_S
#: Between a look at the disk, or a question to Slurm, and what follows from it.
SLOW_S = 5.0
#: Two attempts of which one ends and one begins within this may not see each other.
SAME_S = 1.0
#: A history has an end.
MOST_EVENTS = 30_000
#: Faults after which a run that `wait --resubmit` waits for must complete.
HARMLESS = frozenset(
    (
        *("preempt", "suspend", "lose a node", "controller away", "answers lost", "controller slow", "submit again"),
        *(
            "time limit lowered",
            "time limit raised",
            "requests limited",
            "save",
            "requeue",
            "prune",
            "hang",
            "kill a command",
            "lose a spare",
            "another run fails",
            "accounting away",
            "fork",
            "refused",
            "connection breaks",
            "shut down a node",
        ),
    )
)
#: Faults that may keep an attempt from saving though it had notice.
HINDERING = frozenset(
    (
        *("suspend", "lose a node", "disk errors", "time limit lowered", "kill a rank", "exception", "hang"),
        *("odd failure", "shut down a node", "kill a stepd"),
    )
)
#: Faults that may keep Slurm or the disk from answering.
SILENT = frozenset(("controller away", "answers lost", "requests limited", "controller slow", "disk errors"))
#: Faults after which it is unclear which rank failed first.
UNCLEAR = frozenset(("lose a node", "lose a spare", "suspend", "connection breaks", "shut down a node"))
#: After such an end nothing is lost: the attempt had notice.
IN_TIME = frozenset(cause.value for cause in (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.REQUEUE_REQUESTED))
#: How often a supervisor may ask Slurm: so many times, for each attempt that trains, and once in so many seconds.
ASKED, ASKED_AGAIN, ASKED_EVERY_S = 40, 5, 10.0


@lru_cache(4096)
def _loaded(text: bytes) -> Any:
    """What is read here is not changed."""
    return json.loads(text)


@cache
def weights_after(steps: int) -> str:
    """Of an uninterrupted run."""
    return "0" if steps == 0 else trained(weights_after(steps - 1), sample_of(steps - 1))


@dataclass
class Trained:
    """An attempt that has trained."""

    number: int
    supervisor: Process
    batch: str
    since: float
    resumed: int
    reached: int


def server_of(rank: Rank) -> Process:
    """The supervisor that a rank has joined."""
    assert rank.server is not None
    return rank.server.process


class Invariants:
    """Of one history."""

    def __init__(self, history: History) -> None:
        self._history, self._world = history, history.world
        self.attempts: dict[int, Trained] = {}
        #: When `check` is due.
        self.look_at = 0.0
        self._together_since: float | None = None
        #: Since when, and in which srun: one may take IDLE_S to learn of a slurmstepd's end, and the next one wait.
        self._idle_since: dict[str, tuple[float, int | None]] = {}
        self._incomplete_since: dict[str, float] = {}
        self._waits_since: dict[str, float] = {}
        self._most_events = MOST_EVENTS
        self._dead_since: float | None = None
        #: When a user last wanted the run to end, or to go on.
        self._cancelled_at: float | None = None
        #: When each job was ended by scancel.
        self._scancelled: dict[str, float] = {}
        #: The newest attempt when a user last submitted the run.
        self._submitted_after = -1
        #: By attempt, the ranks that truly failed by themselves, and when.
        self._failed: dict[int, dict[int, float]] = {}
        #: The attempt and rank of those that failed before they had joined, so that no supervisor knows when.
        self._unjoined: set[tuple[int, int]] = set()
        #: Requeues that hit a job which was cancelled after its supervisor had last asked: the known window.
        self.windows = 0
        #: Of each start of a job, the attempts with the nodes of their ranks.
        self._placed: dict[str, list[tuple[int, set[str]]]] = {}
        history.cluster.listener = self._on_rank
        history.slurm.listener = self._on_job

    def _violated(self, which: str, what: str) -> None:
        self._world.violations.append(f"{which}: {what}")
        self._world.tell("INVARIANT", f"{which}: {what}")

    # --- what is on the disk

    def _json(self, name: str) -> dict[str, Any] | None:
        node = self._history.disk.nodes.get(f"{self._history.run.path}/{name}")
        return None if node is None else _loaded(node.data)

    def outcome(self) -> dict[str, Any] | None:
        """How the run ended."""
        return self._json("outcome.json")

    def events(self) -> list[dict[str, Any]]:
        """The history on the disk, whole lines."""
        node = self._history.disk.nodes.get(f"{self._history.run.path}/events.jsonl")
        found = []
        for line in (node.data if node else b"").split(b"\n")[:-1]:
            if (event := json_lines.parse(line, schemas.EVENT)[0]) is not None:  # else torn
                found.append(event)
        return found

    @property
    def _marked(self) -> bool:
        return f"{self._history.run.path}/cancelled" in self._history.disk.nodes

    # --- where it could be violated

    def submitted(self) -> None:
        """A user submits the run, which may be continued by that."""
        self._cancelled_at = None
        self._submitted_after = max((event["attempt"] for event in self.events()), default=-1)

    def _is_held(self, number: int, supervisor: Process) -> bool:
        """Whether a user has stopped the run by ``stop`` in an earlier attempt, and not submitted it since.

        A second job that the user had submitted before is not stopped with the first, nor one that is recorded nowhere,
        because its submission got no answer. ``wait --resubmit``, while it waits for Slurm, does not see a request that
        a supervisor records once its frozen node is back.
        """
        job = self._history.slurm.jobs.get(supervisor.name.removeprefix("job ").partition(".")[0])
        if (
            job is not None
            and job.by.startswith("submit")
            and not job.restarts
            and job.id != min(self._history.slurm.jobs)
        ):
            return False
        if job is not None and job.id in self._history.slurm.unanswered:
            return False
        if job is not None and job.by.startswith("resubmit"):
            back = [process.stopped_until for process, _, _ in self._history.slurm.started if process.stopped_until]
            if any(0.0 < job.made - at < TOGETHER_S for at in back):
                return False
        asked = (event for event in self.events() if event["event"] == "requested" and event["request"] == "stop")
        return any(self._submitted_after < event["attempt"] < number for event in asked)

    def forked(self, into: RunDirectory, begun: float) -> None:
        """``submit --fork``, begun at this time, has copied a checkpoint into a new run."""
        nodes, cluster = self._history.disk.nodes, self._history.cluster
        names = list(nodes[str(into.checkpoints)].names)
        copy = f"{into.checkpoints}/{names[0]}"
        state = shards.whole(self._history.disk, copy) if nodes[copy].folder else _loaded(nodes[copy].data)
        if len(names) != 1 or state is None or state["weights"] != weights_after(state["step"]):
            self._violated("I5", f"{into.path.name} begins with {names}")
            return
        saved = [each for each in cluster.committed if each.at < begun - self._lag_s - SLOW_S]
        if saved and saved[0].attempt == cluster.committed[-1].attempt and state["step"] < saved[-1].step:
            self._violated("I4", f"{into.path.name} begins at step {state['step']}, and {saved[-1].step} was committed")

    def asked_to_save(self, at: float, code: int) -> None:
        """``save``, begun at this time, has ended with this exit code."""
        committed = self._history.cluster.committed
        reached = max((attempt.reached for attempt in self.attempts.values()), default=0)
        is_saved = any(saved.at > at - TOGETHER_S or saved.step >= reached for saved in committed)
        if code == 0 and not is_saved:
            self._violated("save", "it says that a checkpoint is committed, and none is")

    def waited(self, code: int) -> None:
        """``wait`` has ended with this exit code."""
        state, now = (self.outcome() or {}).get("state"), self._world.now
        self._world.tell("wait", f"exit code {code}")
        if code == TIMED_OUT:
            return
        node = self._history.disk.nodes.get(f"{self._history.run.path}/outcome.json")
        hidden = code == WAITED["unknown"] and node is not None and now - node.created < self._lag_s + SLOW_S
        hidden = hidden or (code == WAITED["stopped"] and (self._is_history_hidden() or self._is_late_outcome(node)))
        if (code == 0) != (state == "completed") and not hidden:
            self._violated("wait", f"exit code {code}, and the run's outcome is {state}")
        if code == WAITED["unknown"] or self._history.disk.broken[0] > now or state is not None:
            return
        for job in self._history.slurm.jobs.values():
            asked_s = 15.0 + 4 * self._history.slurm.latency_s  # for how long its last questions may have lasted
            if job.state in ("PENDING", *HAS_NODES) and job.submitted < now - asked_s and self._named(job):
                self._violated("wait", f"exit code {code}, and job {job.id} continues the run")

    def _is_late_outcome(self, node: Any) -> bool:
        """Whether the outcome was written just now, by a supervisor that stood still beyond the end of its job."""
        if node is None or self._world.now - node.created >= self._lag_s + SLOW_S:
            return False
        started = self._history.slurm.started
        back = [(process.stopped_until, job) for process, job, _ in started if process.node == node.node]
        return any(0 < at <= node.created and job.ended is not None and job.ended < at for at, job in back)

    def _is_history_hidden(self) -> bool:
        """Whether a user's node may not see yet that the run has a history: it began seconds ago."""
        node = self._history.disk.nodes.get(f"{self._history.run.path}/events.jsonl")
        return node is not None and self._world.now - node.created < self._history.disk.lag_s

    def _named(self, job: Batch) -> bool:
        """Whether a file of the run names the job as who holds it."""
        claim = self._json("private/submitted.json")
        return claim is not None and claim.get("job") == job.id and not claim.get("let_go")

    def failed(self, rank: Rank) -> None:
        """A rank fails by itself."""
        if rank.server is None:
            self._unjoined.add((rank.attempt, rank.number))
        self._failed.setdefault(rank.attempt, {}).setdefault(rank.number, self._world.now)

    def _on_rank(self, what: str, rank: Rank, values: Mapping[str, Any]) -> None:
        if what == "trains" and rank.number == 0:
            self._on_training(rank, int(values["step"]), str(values["weights"]))
        elif what == "step":
            self.attempts[rank.attempt].reached = int(values["step"])
        elif what == "failed":
            self.failed(rank)
        elif what == "placed":
            self._check_shut(rank.step)
            if rank.step._batch.no_kill:
                self._on_placed(rank.step)
        elif what == "replaced":
            self._violated("I5", f"{rank.process.name} replaces {values['file']}")
        elif what == "saved" and self._saves_late(rank):
            self._violated("I1", f"attempt {rank.attempt} commits a checkpoint, and has long been superseded")

    def _check_shut(self, step: Launcher) -> None:
        """No attempt uses a node that was shut down during the previous one, which lost its ranks there."""
        slurm, here = self._history.slurm, step.server.process.node
        if here in slurm.cut or slurm.back_at.get(here, -math.inf) > self._world.now - LOST_S:
            return  # the supervisor could not ask for the node's address
        ranks = [rank for rank in self._history.cluster.ranks if rank.step.server.process is step.server.process]
        before = [rank for rank in ranks if rank.attempt == step.attempt - 1]
        for node, ended in self._history.slurm.shut.items():
            there = [rank for rank in before if rank.process.node == node]
            unheard = there and all(rank.process in ended and not rank.ended for rank in there)
            if unheard and self.answers and any(rank.process.node == node for rank in step.ranks):
                self._violated("shut down", f"attempt {step.attempt} uses {node}, which was shut down")

    def _on_placed(self, step: Launcher) -> None:
        """An attempt of a job that outlives its nodes starts its ranks on some of them."""
        slurm, now = self._history.slurm, self._world.now
        used = {rank.process.node for rank in step.ranks}
        earlier = self._placed.setdefault(step.server.process.name, [])
        own = {attempt for attempt, _ in earlier}
        left = {node for event in self.events() if event["attempt"] in own for node in event.get("aside") or ()}
        if again := sorted(used & left):
            self._violated("spares", f"attempt {step.attempt} uses {again[0]}, which an earlier one has left")
        before = earlier[-1][1] if earlier else used
        dead = [node for node in used - before if node in slurm.down and slurm.down_since[node] < now - 2 * SLOW_S]
        stood = now - step.server.process.stopped_until < SLOW_S  # since it chose them
        if dead and self.answers and not stood:
            self._violated("spares", f"attempt {step.attempt} uses {dead[0]}, which is down")
        earlier.append((step.attempt, used))

    @property
    def answers(self) -> bool:
        """Whether nothing keeps Slurm and the disk from answering, in the whole history."""
        return SILENT.isdisjoint(fault.kind for fault in self._history.plan.faults)

    def _leaves_its_nodes(self, new: Batch) -> bool:
        """Whether a supervisor submits a job for a lost node, though those that its own job has left would do."""
        slurm, plan = self._history.slurm, self._history.plan
        job = slurm.jobs.get(new.by.removeprefix("job ").partition(".")[0])
        # The next job of one that ends for another reason starts after it.
        if job is None or not job.no_kill or job.state != "RUNNING" or job.preempt_time is not None or new.after:
            return False
        events = self.events()
        newest = max((event["attempt"] for event in events), default=-1)
        own = [event for event in events if event["attempt"] == newest]
        kinds = {event["event"] for event in own}
        if "node_lost" not in kinds or kinds & {"requested", "notice"} or not self.answers:
            return False
        bad = {event.get("suspect") for event in events} | slurm.cut | slurm.down
        bad |= {node for event in events for node in event.get("aside") or ()}
        left = [node for node in job.nodes if node not in bad]
        return len(left) >= (plan.min_nodes or plan.job_nodes)

    def _stood_still(self, process: Process) -> bool:
        """Whether a process may have stood still between its look for a newer attempt and what it then wrote."""
        return process.stopped_until > 0.0 and self._history.disk.slow > 0.0

    def _saves_late(self, rank: Rank) -> bool:
        """A save looks for a newer attempt right before it commits."""
        quick = SLOW_S if self._history.disk.slow == 0.0 else TOGETHER_S
        return self._is_late(rank.attempt, self._world.now, quick) and not self._stood_still(rank.process)

    def _is_late(self, attempt: int, now: float, after_s: float = TOGETHER_S) -> bool:
        """Whether a newer attempt had begun that long before, and longer ago than a shared disk may hide it."""
        before = now - after_s - self._history.disk.lag_s
        return any(other.number > attempt and other.since < before for other in self.attempts.values())

    def _on_training(self, rank: Rank, step: int, weights: str) -> None:
        number = rank.attempt
        if number in self.attempts:
            self._violated("I1", f"attempt {number} trains twice")
        if weights != weights_after(step):
            self._violated("I2", f"attempt {number} resumes at step {step} with other weights")
        over = self._history.disk.nodes.get(f"{self._history.run.path}/outcome.json")
        # Which of two attempts is the newest one a shared disk may hide from the one that ends.
        since = self._claimed_at(number)
        hidden = over is not None and abs(since - over.created) < self._lag_s + SLOW_S
        # Or it stood still, once it had looked for a newer attempt and restored.
        restored = self._history.disk.nodes.get(str(self._history.run.resume_record(number)))
        hidden = hidden or (over is not None and restored is not None and restored.created < over.created)
        stood_until = rank.process.stopped_until
        hidden = hidden or (over is not None and over.created < stood_until and self._world.now < stood_until + SLOW_S)
        if (outcome := self.outcome()) is not None and outcome["state"] == "completed" and not hidden:
            self._violated("I10", f"attempt {number} trains, and the run has completed")
        if self._is_done_before(number, server_of(rank)):
            self._violated("I10", f"attempt {number} trains, and the mark of `done` is there")
        if self._is_held(number, server_of(rank)):
            self._violated("I9", f"attempt {number} trains, and the run was stopped by `clusterddp stop`")
        if self._marked:
            marked = self._history.disk.nodes[f"{self._history.run.path}/cancelled"].created
            if self._world.now - max(marked, rank.process.stopped_until, server_of(rank).stopped_until) > 60:
                self._violated("I9", f"attempt {number} trains, and the run was cancelled by `clusterddp cancel`")
        begun = self._world.now - self._history.disk.lag_s - 2 * self._history.plan.script.import_s - 10
        for saved in self._history.cluster.committed:
            if (
                saved.attempt < number
                and saved.at < begun
                and saved.step > step
                and self._counts(saved.attempt, saved.at)
            ):
                self._violated("I4", f"attempt {number} resumes at step {step}, and {saved.step} was committed before")
        self.attempts[number] = Trained(number, server_of(rank), rank.step._batch.id, self._world.now, step, step)

    def _is_done_before(self, number: int, supervisor: Process) -> bool:
        """Whether the script had written its mark long before this attempt was begun, by a supervisor that never
        stood still."""
        mark = self._history.disk.nodes.get(f"{self._history.run.path}/{MARK}")
        seen = {fault.kind for fault in self._history.plan.faults}.isdisjoint(("disk errors",))
        if mark is None or not seen or supervisor.stopped_until:
            return False
        return self._claimed_at(number) > mark.created + self._lag_s + 2 * SLOW_S

    @property
    def _lag_s(self) -> float:
        return self._history.disk.lag_s

    def _claimed_at(self, attempt: int) -> float:
        """When an attempt's number was taken."""
        folder = self._history.disk.nodes.get(f"{self._history.run.path}/logs/attempt-{attempt}")
        return math.inf if folder is None else folder.created

    def _counts(self, attempt: int, at: float) -> bool:
        """Whether no later attempt had begun when this one saved."""
        return not any(other.number > attempt and other.since < at for other in self.attempts.values())

    def _on_job(self, what: str, job: Batch, who: str) -> None:
        now = self._world.now
        if what == "cancel":
            self._scancelled[job.id] = now
        if what == "suspend":
            for since in (self._idle_since, self._incomplete_since, self._waits_since):
                since.pop(job.id, None)
        elif what == "cancel" and job.id not in self._history.slurm.unanswered:
            if self._cancelled_at is None or not who.startswith("job "):  # a supervisor passes on its user's scancel
                self._cancelled_at = now
        elif what == "requeue":
            if who.startswith("admin"):
                self._cancelled_at = None
            elif self._cancelled_at is not None and self._could_not_know(who):
                self.windows += 1
                self._cancelled_at = None  # the known window: nobody can tell any more
        elif what == "submit":
            if self._leaves_its_nodes(job):
                self._violated("spares", f"job {job.id} is submitted, and the nodes of {job.by} suffice")
            if self._history.plan.memory:
                for wrong in self._history.memory.submitted(job, self.events()):
                    self._violated("nodes", wrong)
        elif what == "released early":
            self._violated("hold", f"job {job.id} was released within a second of its requeue, and failed")
        elif what == "start" and self._is_unneeded(job):
            self._violated("I10", f"job {job.id} starts, and the run has completed")
        elif what == "start" and self._is_cancelled(job):
            self._violated("I9", f"job {job.id} starts, and the run was ended by scancel")

    def _could_not_know(self, who: str) -> bool:
        """Whether a supervisor has asked for its job before the last scancel, and sent one request since."""
        slurm = self._history.slurm
        return slurm.shown_at.get(who, 0.0) <= (self._cancelled_at or 0.0) and slurm.requests.get(who, 0) <= 1

    def _is_cancelled(self, job: Batch) -> bool:
        """Whether a user has ended the run by scancel since the job was queued. `clusterddp cancel` leaves a mark, and
        a job that starts nevertheless ends at once."""
        since = self._cancelled_at
        if since is None or self._marked or self._world.now - since <= 1.0:
            return False
        if job.by.startswith("job ") and (not job.restarts or job.made > since or job.id not in self._scancelled):
            return self._survives(job)
        # A second job that the user had submitted meanwhile is not ended with the first.
        if job.by.startswith("submit") and not job.restarts and self._scancelled and job.id not in self._scancelled:
            return False
        return job.submitted < since or job.restarts > 0

    def _survives(self, job: Batch) -> bool:
        """Whether a supervisor submitted the job, and lived on for long after the scancel of its own one."""
        slurm, disk = self._history.slurm, self._history.disk
        number, _, restarts = job.by.removeprefix("job ").partition(".")
        own = slurm.jobs.get(number)
        if own is None or own.batch is None or own.batch.code is None or own.state != "CANCELLED" or slurm.unanswered:
            return False
        # An answer that was on its way is the known window; of a job that is being requeued Slurm does not show it.
        window_s = 1.0 + 1.5 * slurm.latency_s + (5.0 if disk.slow or disk.broken[0] else 0.0)
        if (
            own.preempt_time is not None
        ):  # a job that is ended after its grace has been preempted, as far as one can see
            clock_s = max(0.0, self._world.skew.get(own.batch.node, 0.0))
            if own.batch.ended + clock_s >= own.preempt_time + slurm.settings.grace_s:
                return False
        return own.restarts == int(restarts) and own.batch.ended > (self._cancelled_at or 0.0) + window_s

    def _is_unneeded(self, job: Batch) -> bool:
        """Whether a supervisor or `wait --resubmit` has submitted it, knowing of all other jobs, for a completed run.

        Who submits may not see the outcome yet.
        """
        complete = (self.outcome() or {}).get("state") == "completed"
        ours = not job.restarts and not job.by.startswith("submit")
        disk, slurm = self._history.disk, self._history.slurm
        if not complete or not ours or slurm.unanswered:
            return False
        users = [other.made for other in slurm.jobs.values() if other.by.startswith("submit")]
        # While a job submits the next one after a lost node, the run is free, also for a user. sbatch may take long.
        if any(job.asked < made or 0.0 <= job.made - made < SLOW_S + 3 * slurm.latency_s for made in users):
            return False
        by = [process for process in self._world.processes if process.name == job.by]
        if any(process.stopped_until > job.asked for process in by):  # between look and request
            return False
        if any(not process.alive and process.code is None for process in by):  # killed before it could record the job
            return False
        # One that was requested before the run completed ends as it starts. Slurm may limit requests.
        late_s = disk.lag_s + SLOW_S + 3 * slurm.latency_s
        return job.sent - disk.nodes[f"{self._history.run.path}/outcome.json"].created >= late_s

    # --- what lasts

    def check(self) -> None:
        """What lasts, at ``look_at``."""
        self.look_at = self._world.now + INVARIANTS_S
        if self._world.events > self._most_events:
            if not self._lacks_nodes():
                self._violated("progress", f"{len(self.attempts)} attempts, and no end")
            self._most_events += MOST_EVENTS
        self._look()

    def _lacks_nodes(self) -> bool:
        """Whether a job waits for nodes that are lost."""
        slurm = self._history.slurm
        usable = set(slurm.node_names) - slurm.down - slurm.cut
        return any(job.state == "PENDING" and job.nodes_least > len(usable) for job in slurm.jobs.values())

    def _look(self) -> None:
        history, now = self._history, self._world.now
        live = [job for job in history.slurm.jobs.values() if job.state in ("PENDING", *HAS_NODES)]
        over = self.outcome() is not None or not live
        self._dead_since = (now if self._dead_since is None else self._dead_since) if over and not live else None
        cut = history.slurm.cut
        visible = {rank.attempt for rank in history.cluster.ranks if rank.training and self._seen(rank, cut)}
        self._together_since = (self._together_since or now) if len(visible) > 1 else None
        if self._together_since is not None and now - self._together_since > TOGETHER_S + history.disk.lag_s:
            self._violated("I1", f"attempts {sorted(visible)} train at the same time")
        for job in live:
            self._check_idle(job, now)

    @staticmethod
    def _seen(rank: Rank, cut: set[str]) -> bool:
        process = rank.process
        return process.alive and process.node not in cut and process.stopped_until <= process.world.now

    def _check_idle(self, job: Batch, now: float) -> None:
        """A node that is held for nothing."""
        slurm = self._history.slurm
        if not self._waits_for_a_node(job, now):
            self._waits_since.pop(job.id, None)
        elif now - self._waits_since.setdefault(job.id, now) > LOST_S:
            self._violated("I7", f"job {job.id} waits for a node that is lost")
        troubled = (
            now < slurm.away_until
            or slurm.has_forgotten_steps
            or now < slurm.limited_until + SLOW_S
            or now < slurm.lossy[0]
            or slurm.cut
            or slurm.latency_s > 0.5
        )
        busy = any(process.alive for process in job.processes if process is not job.batch)
        if job.state != "RUNNING" or troubled or self._history.disk.broken[0] > now:
            self._idle_since.pop(job.id, None)
            self._incomplete_since.pop(job.id, None)
            return
        if busy:
            self._idle_since.pop(job.id, None)
        elif (idle := self._idle_since.setdefault(job.id, (now, job.srun)))[1] != job.srun:
            self._idle_since[job.id] = (now, job.srun)
        elif now - idle[0] > IDLE_S:
            self._violated("I7", f"job {job.id} holds its nodes, and no rank runs")
        if not (busy and self._lacks_ranks(job)):
            self._incomplete_since.pop(job.id, None)
        elif now - self._incomplete_since.setdefault(job.id, now) > INCOMPLETE_S:
            self._violated("I7", f"job {job.id} holds its nodes, and some of its ranks are gone")

    def _waits_for_a_node(self, job: Batch, now: float) -> bool:
        """Whether a node of connected ranks is lost, and nothing keeps the supervisor from seeing that."""
        slurm, batch = self._history.slurm, job.batch
        away = now < max(slurm.away_until, slurm.lossy[0], slurm.limited_until + SLOW_S) or slurm.latency_s > 0.5
        if job.state != "RUNNING" or away or batch is None or not batch.alive or batch.stopped_until > now:
            return False
        if batch.node in slurm.cut or self._history.disk.broken[0] > now:
            return False
        own = [rank for rank in self._newest() if rank.step._batch is job and rank.server]
        own = [rank for rank in own if rank.server and rank.server._ranks.get(rank.number) is rank]
        # One that has reported its end may still run its script's exit handlers.
        return any(rank.process.node in slurm.cut and not rank.ended for rank in own)

    def _newest(self) -> list[Rank]:
        """The ranks of the newest attempt."""
        ranks = self._history.cluster.ranks
        return ranks[-ranks[-1].step.job.world_size :] if ranks else []

    def _lacks_ranks(self, job: Batch) -> bool:
        """Whether a rank of the job's newest attempt has failed."""
        newest = self._newest()
        return any(rank.step._batch is job and not rank.process.alive and rank.process.code != 0 for rank in newest)

    @property
    def is_live(self) -> bool:
        """Whether a job of the run was queued or running at the last look."""
        return self._dead_since is None

    def settled(self) -> bool:
        """Whether nothing has happened for a while, and nothing will."""
        if self._dead_since is None:
            return False
        return self.outcome() is not None or self._world.now - self._dead_since > 400.0

    # --- at the end

    def at_end(self) -> None:
        """What must be true once nothing happens any more."""
        history, outcome, events = self._history, self.outcome(), self.events()
        faults = {fault.kind for fault in history.plan.faults}
        ends = [event for event in events if event["event"] in RUN_ENDS]
        # On a full disk the outcome is not written, and the product says that the run may start again. So may one whose
        # supervisor was killed, or stood still, before it could write it: that start has no step left to do.
        completed = [event for event in ends if event["event"] == "completed" and not self._was_kept(event)]
        if len(completed) > 1 and "disk errors" not in faults and not self._is_one_hidden(completed):
            self._violated("I7", f"{len(ends)} outcomes in the history")
        # Whether such an attempt used clusterddp may be unknown, and exit code 0 completes one that does not.
        unheard = {event["attempt"] for event in completed} & history.cluster.left_unheard
        if outcome is not None and outcome["state"] == "completed" and not unheard:
            self._check_complete(outcome)
        if history.over_at is not None and (alive := [rank for rank in history.cluster.ranks if rank.process.alive]):
            since = self._world.now - REGISTERS_S
            lost = {*history.slurm.cut, *(node for node, at in history.slurm.back_at.items() if at > since)}
            stuck = [rank for rank in alive if rank.process.node not in lost and rank.process.stopped_until < since]
            if stuck:
                self._violated("I7", f"{stuck[0].process.name} is left")
        if "disk errors" not in faults:
            self._check_starts(events)
            self._check_causes(events)
        self._check_events(events, faults)
        self._check_refused(events)
        self._check_hand_overs(events)
        started = [event for event in events if event["event"] == "started"]
        limit = history.plan.limits.attempts
        if limit is not None and "disk errors" not in faults and len({event["attempt"] for event in started}) > limit:
            self._violated("limits", f"more than {limit} attempts")
        for name, (first, last, count) in history.slurm.asked.items():
            begun = sum(f"job {event.get('job')}.{event.get('restarts')}" == name for event in started)
            most = ASKED + begun * ASKED_AGAIN + (last - first) / ASKED_EVERY_S
            if name.startswith("job ") and count > most:
                self._violated("budget", f"{name} asked Slurm {count} times in {last - first:.0f} s")
        if outcome is None and faults <= HARMLESS and history.plan.resubmitters:
            self._violated("progress", "the run has not completed, and nothing continues it")
        expected = ("consecutive attempts", "limits.")
        if outcome is None or outcome["state"] == "completed" or any(word in outcome["reason"] for word in expected):
            return
        if faults <= HARMLESS and history.plan.script.bug_at < 0:
            self._violated("progress", f"the run {outcome['state']}: {outcome['reason']}")

    def _was_kept(self, event: Mapping[str, Any]) -> bool:
        """Whether the supervisor that recorded this end was killed, or stood still afterwards."""
        trained = self.attempts.get(event["attempt"])
        if trained is None:
            return False
        supervisor = trained.supervisor
        stood = supervisor.stopped_until > event["time"] - EPOCH
        return stood or (supervisor.code is None and not supervisor.alive)

    def _is_one_hidden(self, completed: list[dict[str, Any]]) -> bool:
        """Whether all but the last attempt completed, on nodes that were cut off, while a newer one was hidden; or the
        last one began while the outcome was hidden, or was being written."""
        cut = any(fault.kind == "lose a node" for fault in self._history.plan.faults)
        waited_s = self._claimed_at(completed[-1]["attempt"]) - (completed[-2]["time"] - EPOCH)
        if -SAME_S < waited_s <= 0.0:
            return True
        if not self._lag_s or not (cut or waited_s < self._lag_s + SLOW_S):
            return False
        ahead_s = max(0.0, *self._world.skew.values()) if self._world.skew else 0.0
        return not any(
            event["time"] - EPOCH - ahead_s > other.since + self._history.disk.lag_s
            for event in completed[:-1]
            for other in self.attempts.values()
            if other.number > event["attempt"]
        )

    def _check_complete(self, outcome: Mapping[str, Any]) -> None:
        steps = self._history.plan.script.steps
        saved = [each for each in self._history.cluster.committed if each.step == steps]
        if not saved:
            self._violated("I5", "the run completed without its last checkpoint")
        elif saved[-1].weights != weights_after(steps) or saved[-1].samples != tuple(map(sample_of, range(steps))):
            self._violated("I3", "the final weights are not those of an uninterrupted run")
        if (
            script := self._history.plan.script
        ).marks and f"{self._history.run.path}/{MARK}" not in self._history.disk.nodes:
            self._violated("done", "the run completed, and the mark of `done` is missing")
        if script.own:
            return
        folder = self._history.disk.nodes[f"{self._history.run.path}/checkpoints"]
        last = [f"{self._history.run.path}/checkpoints/{name}" for name in folder.names if f"step-{steps:012}" in name]
        if script.sharded:
            last = [name for name in last if shards.whole(self._history.disk, name) is not None]
        if not last:
            self._violated("I5", "the last checkpoint was deleted, or is not whole")
        if outcome["step"] != steps:
            self._violated("I7", f"the outcome names step {outcome['step']} of {steps}")

    def _check_events(self, events: list[dict[str, Any]], faults: set[str]) -> None:
        """What the history says of failures and of ends with notice; what hooks were told."""
        hooks = self._history.cluster.hooks
        if twice := [call for call in hooks if hooks.count(call) > 1]:
            self._violated("hook", f"the hook was told {twice[0][1]!r} twice in attempt {twice[0][0]}")
        trained_in = sorted(self.attempts)
        script, grace_s = self._history.plan.script, self._history.plan.settings.grace_s
        told_late = script.alone and faults & {"kill a rank", "kill a stepd"}  # by HELD_S
        for event in events:
            number, name = event["attempt"], event["event"]
            if name == "rank_failed" and number in self._failed and "fault" not in event:  # a GPU's comes first
                rank, at = next(iter(self._failed[number].items()))
                late = self._failed[number].get(event["rank"], math.inf) > at + TOLD_S
                unclear = told_late or faults & UNCLEAR or (number, event["rank"]) in self._unjoined
                if late and at + EPOCH < event["time"] - 1.0 and not unclear:
                    self._violated(
                        "I8", f"rank {rank} failed first in attempt {number}, and rank {event['rank']} is shown"
                    )
            moves = name == "restarted" and event.get("cause") == Cause.DRAIN_REQUESTED.value
            told = moves or (name in ("requeued", "resubmitted") and event.get("cause") in IN_TIME)
            after = [other for other in trained_in if other > number]
            if not told or faults & HINDERING or script.bug_at >= 0 or not after or number not in self.attempts:
                continue
            reached, resumed = self.attempts[number].reached, self.attempts[after[0]].resumed
            if resumed < reached and (moves or ((grace_s > 20 or script.step_s < 5) and "preempt" in faults)):
                self._violated(
                    "I4", f"attempt {number} had notice and reached {reached}, {after[0]} begins at {resumed}"
                )

    def _check_refused(self, events: list[dict[str, Any]]) -> None:
        """A supervisor to which Slurm refuses a new job asks for a requeue while that is possible, and no answer of a
        controller that forgets no job leaves it without the cause of a stop."""
        slurm = self._history.slurm
        started = {event["attempt"]: event for event in events if event["event"] == "started"}
        for event in (each for each in events if each["event"] == "stopped" and each["attempt"] in started):
            number, begun = event["attempt"], started[event["attempt"]]
            if event["cause"] == Cause.UNKNOWN.value and slurm.settings.min_age_s == math.inf:
                self._violated("I6", f"attempt {number} ended without its cause, which Slurm knows")
            own = [other for other in events if other["attempt"] == number and other["event"] == "requested"]
            may = event["cause"] in IN_TIME and not any(other.get("nodes") for other in own)
            if "refused" in event and may and f"job {begun['job']}.{begun['restarts']}" not in slurm.requeuers:
                self._violated("I6", f"attempt {number} ended without a requeue, as Slurm refused a new job")

    def _check_hand_overs(self, events: list[dict[str, Any]]) -> None:
        """A supervisor that has submitted a job asks Slurm, and hands the run over only if no scancel ended its own."""
        slurm = self._history.slurm
        started = {event["attempt"]: event for event in events if event["event"] == "started"}
        for event in events:
            begun = started.get(event["attempt"])
            if event["event"] != "resubmitted" or begun is None:
                continue
            job, shown = slurm.jobs[begun["job"]], slurm.shown_at.get(f"job {begun['job']}.{begun['restarts']}", 0.0)
            if job.state != "CANCELLED" or job.restarts != begun["restarts"] or job.preempt_time is not None:
                continue  # of a preempted job Slurm does not show the scancel
            new = slurm.jobs.get(event["job"])
            knew = self._scancelled[job.id] < shown < (job.end_time or math.inf)
            if knew or (new is not None and shown < new.made):
                self._violated("I9", f"job {job.id} was ended by scancel, and hands the run over to job {event['job']}")

    def _stood_before(self, number: int) -> bool:
        """Whether a process that stood still has taken this attempt's number as soon as it went on: it had looked
        before."""
        folder = self._history.disk.nodes.get(f"{self._history.run.path}/logs/attempt-{number}")
        if folder is None:
            return False
        there = [process for process in self._world.processes if process.node == folder.node and process.stopped_until]
        return any(0 <= folder.created - process.stopped_until < SLOW_S for process in there)

    def _check_starts(self, events: list[dict[str, Any]]) -> None:
        """A start of a job that stood still begins no attempt once the job's restart has, as far as it could see."""
        started = [event for event in events if event["event"] == "started"]
        for event, later in itertools.combinations(started, 2):
            seen_s = self._claimed_at(later["attempt"]) - self._claimed_at(event["attempt"])
            is_restarted = event.get("job") == later.get("job") and event.get("restarts", 0) > later.get("restarts", 0)
            if is_restarted and seen_s > self._lag_s + SLOW_S and self._history.disk.slow == 0.0:
                self._violated("I1", f"attempt {later['attempt']} begins, and Slurm had restarted its job before")

    def _check_causes(self, events: list[dict[str, Any]]) -> None:
        """Every attempt has its cause, unless its supervisor was killed, or superseded."""
        for event in events:
            at, attempt = event["time"] - EPOCH, self.attempts.get(event["attempt"])
            stood = attempt and self._stood_still(attempt.supervisor) and at < attempt.supervisor.stopped_until + 1
            if event["event"] in RUN_ENDS and self._is_late(event["attempt"], at) and not stood:
                self._violated("I7", f"attempt {event['attempt']} ends the run, and has long been superseded")
        started = {event["attempt"] for event in events if event["event"] not in _WITHOUT_RANKS}
        ended = {event["attempt"] for event in events if event["event"] in ATTEMPT_ENDS}
        newest = max(started | {event["attempt"] for event in events if event["event"] in RUN_ENDS}, default=-1)
        for attempt in self.attempts.values():
            if attempt.supervisor.code is None or attempt.number in ended:
                continue
            # A job that finds the run cancelled takes a number, and starts nothing. A node that stood still may have
            # overwritten the lines of the next attempt.
            is_taken = self._marked or attempt.supervisor.stopped_until > 0.0
            is_taken = is_taken and self._claimed_at(newest + 1) < math.inf
            if attempt.number == newest and not self._stood_before(newest + 1) and not is_taken:
                self._violated("I6", f"attempt {attempt.number} ended without a cause in the history")
