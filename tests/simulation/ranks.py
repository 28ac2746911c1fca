"""The ranks of an attempt as a model, with their launcher and their connections to the supervisor.

A rank trains by a script of steps; rank 0 saves, with the product's own rules of what may be committed and what an
attempt resumes from (``checkpoint/store.py``). If the model is sharded, all ranks save (``shards.py``). The weights are
a hash over the samples that they have seen.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from queue import Empty
from typing import Any

from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.codec import Misfit
from clusterddp.errors import SlurmUnavailable, Superseded
from clusterddp.failures.exit_status import ExitStatus, LaunchFailure
from clusterddp.history.event import Event
from clusterddp.jobdef.job import Job, Keep
from clusterddp.messages.orders import Commit, CountSteps, Leave, Order, Save, Stop
from clusterddp.messages.requests import LastAnswer, News, UserRequest
from clusterddp.protocol import CHECKPOINT, COMMITTED
from clusterddp.rundir.control_address import Address
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.slurmd import CONNECT_S
from clusterddp.supervisor.control_server import Handlers
from clusterddp.worker.control_channel import SILENCE_S
from clusterddp.worker.rank import FENCE_S, JOIN_TIMEOUT_S
from tests.reports import reported
from tests.simulation import shards
from tests.simulation.disk import Disk
from tests.simulation.slurm import Batch, Slurm
from tests.simulation.world import EPOCH, Process, SimpleQueue, Thread, World

#: What gloo says of a rank that is gone.
PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:1234"
#: How long a message between nodes takes, at most.
LATENCY_S = 0.02
#: How long rank 0 waits for an answer before it asks again whether it may commit.
ASK_AGAIN_S = 1.0
#: How much longer a killed process holds its connection to the supervisor than those to its peers, in scripts whose
#: rank 0 would notice nothing else: a GPU's driver takes a while to close, or a process that it has forked lives on.
HELD_S = 10.0
#: How often slurmd tries again to say that a rank has ended.
HEARS_S = 10.0
#: srun learns so late that a slurmstepd was killed, when slurmd registers again (seen on 22.05.8: after 60 to 100 s).
MISSING_S = 60.0
#: The mark of a script that is done, and where it saves in its own format, in the run's folder.
MARK, OWN = "done", "own"
#: What a rank's exception says; sys.exit() has no text.
EXITS = "sys.exit"
ERRORS = {
    "exception": "ValueError: of the script",
    "exits": EXITS,
    "out of memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "device": "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
}
#: Where a rank waits for others.
MEETS = "all_reduce"


@dataclass(frozen=True)
class Script:
    """What the ranks do."""

    steps: int = 40
    step_s: float = 2.0
    save_every: int = 10
    save_s: float = 1.0
    import_s: float = 5.0
    keep: int = 3
    #: Whether rank 0 catches the error of a collective that has lost a peer, and trains on alone.
    alone: bool = False
    #: After so many steps of an attempt it ends with exit code 0, as at a limit of its own; 0 without one.
    stint: int = 0
    #: Whether it writes a mark once it is done, and whether it saves in its own format.
    marks: bool = False
    #: The step at which it fails each time; -1 without one.
    bug_at: int = -1
    own: bool = False
    #: Whether its model is sharded, so that each rank saves a part.
    sharded: bool = False


def sample_of(step: int) -> int:
    """The sample that a step takes, in the order that the run must keep."""
    return (step * 7919 + 13) % 104729


@lru_cache(4096)
def trained(weights: str, sample: int) -> str:
    """The weights after one more step."""
    return hashlib.md5(f"{weights} {sample}".encode()).hexdigest()[:12]


class LostPeer(Exception):
    """A collective failed, as another rank is gone."""


@dataclass
class Committed:
    """A checkpoint, as the model of the ranks knows it."""

    attempt: int
    step: int
    weights: str
    samples: tuple[int, ...]
    at: float


class Cluster:
    """What all attempts share: the network, the disk, what was committed. ``saved``: told of each checkpoint."""

    def __init__(self, world: World, slurm: Slurm, disk: Disk, script: Script) -> None:
        self.world, self.slurm, self.disk, self.script = world, slurm, disk, script
        #: Whether ranks send heartbeats, for the watchdog.
        self.beats = False
        self.servers: list[Server] = []
        #: What hooks were told: (attempt, word).
        self.hooks: list[tuple[str, str]] = []
        self._clients = itertools.count(1)
        self.ranks: list[Rank] = []
        self.committed: list[Committed] = []
        #: The attempts of which a rank has left by os._exit(0) while its connection was broken.
        self.left_unheard: set[int] = set()
        #: Told of what ranks do: (what, rank, values).
        self.listener: Callable[[str, Rank, Mapping[str, Any]], Any] = lambda *_: None
        self.on_save: Callable[[], Any] = lambda: None

    def reaches(self, one: str, other: str) -> bool:
        """Whether a message between two nodes arrives."""
        return one == other or not {one, other} & self.slurm.cut

    def unanswering(self, nodes: Sequence[str]) -> list[str]:
        """The nodes whose slurmd does not answer the calling process. Asks the controller for their addresses."""
        world, slurm, here = self.world, self.slurm, self.world.process.node
        if here in slurm.cut or world.now < max(slurm.away_until, slurm.limited_until, slurm.lossy[0]):
            world.sleep(12.0)
            raise SlurmUnavailable("Unable to contact slurm controller (connect failure)")
        silent = [node for node in nodes if not self.reaches(here, node)]
        if silent:
            world.sleep(CONNECT_S)
        return silent

    def ask(self, address: Address, host: str, asked: UserRequest) -> Iterator[News | LastAnswer]:
        """A user's request to a supervisor, as ``runs/request_client.py`` sends it."""
        world = self.world
        if not self.reaches(world.process.node, host):
            world.sleep(3.0)
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        world.sleep(LATENCY_S * world.random.random())
        there = [server for server in self.servers if server.process.node == host and server.open]
        server = next((server for server in there if server.token == address.token), None)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        answers = SimpleQueue(world)
        server.request(next(self._clients), asked, answers.put)
        while True:
            try:
                answer: News | LastAnswer = answers.get(timeout=1.0)
            except Empty:
                if server.open and self.reaches(world.process.node, host):
                    continue
                return
            yield answer
            if not isinstance(answer, News):
                return

    def on_node(self, node: str, lost: bool) -> None:
        """A node is lost, or back: connections break after a silence, and messages that waited are delivered."""
        for rank in self.ranks:
            if rank.server is not None:
                rank.server.on_node(rank, node, lost)


class Server:
    """The supervisor's end of the control channel: ``ControlServer`` for the product."""

    port = 12345

    def __init__(self, cluster: Cluster, token: str, handlers: Handlers, host: str, ranks: int) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._handlers = handlers
        self.process = self._world.process
        self.process.server = self  # type: ignore[attr-defined]
        self.token = token
        cluster.servers.append(self)
        self._ranks: dict[int, Rank] = {}
        self._closed = False
        #: When the last message of a connection arrives: they keep their order.
        self._last: dict[int, float] = {}
        #: Messages that wait for a cable, by rank.
        self._waiting: dict[int, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {}
        self._clients: dict[int, Callable[[News | LastAnswer], Any]] = {}
        #: What ranks have said since their connection broke, which they repeat once they have joined again.
        self._repeated: dict[int, list[tuple[str, Mapping[str, Any]]]] = {}

    # --- the product's side

    def tell(self, **values: Any) -> None:
        """Nothing that the model's ranks use."""

    def broadcast(self, order: Order, ranks: Collection[int] | None = None) -> None:
        """An order to these ranks."""
        for number, rank in list(self._ranks.items()):
            if ranks is None or number in ranks:
                self._deliver(number, rank.obey, order)

    def answer(self, client: int, answer: News | LastAnswer) -> None:
        """An answer to a request of the user."""
        if client in self._clients:
            self._clients[client](answer)
            if not isinstance(answer, News):
                del self._clients[client]

    def close(self) -> None:
        """What has arrived within a second is read."""
        if not self._closed:
            late = max([self._world.now, *self._last.values()]) - self._world.now
            self._world.sleep(min(1.0, late + 0.01))
            self._closed = True
            for rank in list(self._ranks.values()):
                rank.unreachable()

    # --- the ranks' side

    @property
    def open(self) -> bool:
        """Whether the supervisor listens."""
        return self.process.alive and not self._closed

    def request(self, client: int, asked: UserRequest, answer: Callable[..., Any]) -> None:
        """A request of the user."""
        self._clients[client] = answer
        self._handlers.on_request(client, asked)

    def join(self, rank: Rank) -> bool:
        """A rank's first message."""
        if not self.open or not self._cluster.reaches(rank.process.node, self.process.node):
            return False
        self._ranks[rank.number] = rank
        self.report(rank.number, "joined", host=rank.process.node, pid=rank.process.pid, address=rank.process.node)
        return True

    def report(self, number: int, event: str, **values: Any) -> None:
        """A rank's event."""
        if number in self._repeated:
            self._repeated[number].append((event, values))
        self._deliver(number, self._hear, number, event, values)

    def _hear(self, number: int, event: str, values: Mapping[str, Any]) -> None:
        if self.open:
            self._world.acting = self.process.node
            with suppress(Misfit):  # the server skips a malformed report
                self._handlers.on_report(number, reported(number, event, values).report)

    def _deliver(self, number: int, act: Callable[..., Any], *args: Any) -> None:
        rank = self._ranks.get(number)
        if rank is None:
            return
        if not self._cluster.reaches(rank.process.node, self.process.node):
            self._waiting.setdefault(number, []).append((act, args))
            return
        at = max(self._last.get(number, 0.0), self._world.now + LATENCY_S * self._world.random.random())
        self._last[number] = at
        self._world.after(at - self._world.now, act, *args)

    def break_connection(self, rank: Rank, noticed: bool, after_s: float) -> None:
        """A firewall forgets a connection, and the rank makes another one. ``noticed``: by the supervisor, before."""
        if self._ranks.get(rank.number) is not rank or not self._reaches(rank):
            return
        if noticed:
            self._deliver(rank.number, self._break, rank, after_s)
        else:
            self._world.after(after_s, self._rejoin, rank)

    def _break(self, rank: Rank, after_s: float) -> None:
        if self._ranks.get(rank.number) is rank:
            self._lose(rank, False)
            self._repeated[rank.number] = []
            self._world.after(after_s, self._rejoin, rank)

    def _reaches(self, rank: Rank) -> bool:
        return self.open and self._cluster.reaches(rank.process.node, self.process.node)

    def _rejoin(self, rank: Rank) -> None:
        said = self._repeated.pop(rank.number, [])
        if not rank.process.alive or not self._reaches(rank) or self._ranks.get(rank.number) not in (None, rank):
            return
        self._ranks[rank.number] = rank
        self.report(rank.number, "rejoined", host=rank.process.node, pid=rank.process.pid, address=rank.process.node)
        for event, values in said:
            self.report(rank.number, event, **values)

    def repeats(self, rank: Rank) -> bool:
        """Whether the rank has lost its connection, and repeats its reports once it has another one."""
        return rank.number in self._repeated

    def left(self, rank: Rank, held_s: float) -> None:
        """A rank's process has ended: its connection breaks, after what it has said, and ``held_s`` later."""
        if self._ranks.get(rank.number) is rank:
            self._world.after(held_s, self._deliver, rank.number, self._lose, rank, False)

    def _lose(self, rank: Rank, silent: bool) -> None:
        if self._ranks.get(rank.number) is rank:
            del self._ranks[rank.number]
            self._waiting.pop(rank.number, None)
            if self.open:
                self._world.acting = self.process.node
                self._handlers.on_lost(rank.number, silent)
            if silent:
                rank.unreachable()

    def on_node(self, rank: Rank, node: str, lost: bool) -> None:
        """A node was cut off, or is back."""
        if self._ranks.get(rank.number) is not rank or node not in (rank.process.node, self.process.node):
            return
        if rank.process.node == self.process.node:
            return
        if lost:
            self._world.after(SILENCE_S + self._world.random.random(), self._silent, rank)
        elif self._cluster.reaches(rank.process.node, self.process.node):
            for act, args in self._waiting.pop(rank.number, []):
                self._deliver(rank.number, act, *args)

    def _silent(self, rank: Rank) -> None:
        if not self._cluster.reaches(rank.process.node, self.process.node):
            self._lose(rank, True)


@dataclass
class Group:
    """The process group of an attempt: ranks meet in each collective."""

    world: World
    size: int
    arrived: dict[int, Any] = field(default_factory=dict)
    waiting: list[tuple[Thread, int]] = field(default_factory=list)
    met: dict[int, Any] = field(default_factory=dict)
    broken: bool = False
    joined: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    store: shards.Store = field(init=False)

    def meet(self, rank: Rank, value: Any) -> dict[int, Any]:
        """A collective: every rank's value, once all have come. LostPeer once a rank is gone."""
        if self.broken:
            self.world.sleep(0.01 + self.world.random.random() * 0.2)
            raise LostPeer
        self.arrived[rank.number] = value
        self.nodes.add(rank.process.node)
        if len(self.arrived) == self.size:
            self.world.after(0.0, self._meet, rank.cluster.slurm.cut)
        self.waiting.append(self.world.waiter())
        self.world.park()
        if self.broken:
            raise LostPeer
        return self.met

    def _meet(self, cut: set[str]) -> None:
        """All have come: they go on, once their nodes reach each other."""
        if self.broken:
            return
        if len(self.nodes) > 1 and self.nodes & cut:
            self.world.after(1.0, self._meet, cut)
            return
        self.met, self.arrived = self.arrived, {}
        for thread, wait in self.waiting:
            self.world.wake(thread, wait)
        self.waiting = []

    def lose(self, node: str, cut: set[str]) -> None:
        """A rank of that node is gone, and closed its connections. Nobody sees that if the node is cut off, too."""
        if node in cut:
            return
        self.broken = True
        for thread, wait in self.waiting:
            if thread.process.node not in cut:
                self.world.after(0.01 + self.world.random.random() * 0.3, self.world.wake, thread, wait)
        self.waiting = []


class Rank:
    """A rank's process."""

    def __init__(self, step: Launcher, number: int, node: str) -> None:
        self.step, self.number, self.cluster = step, number, step.cluster
        self.world, self.run, self.attempt = step.world, step.run, step.attempt
        self.process = Process(self.world, f"rank {number}.{step.attempt}", node)
        self.process.on_exit = self._exited
        self.server: Server | None = None
        self.stop = ""
        #: What the script does wrong at its next step: an exception, an exit, a hang.
        self.accident = ""
        self.training = False
        #: The steps done, and whether the user wants a checkpoint at the next boundary.
        self.at, self.save_asked = 0, False
        #: Whether it trains on without its peers, and the supervisor's answers to its questions before a commit.
        self.alone = False
        self._questions, self._answers = 0, SimpleQueue(self.world)
        #: Where its main thread stands, and since when.
        self.place, self.moved = "", 0.0
        self._fencing = False
        #: Whether a checkpoint is being written.
        self.saving = False
        self.ended = False

    def begin(self) -> None:
        """Starts the process."""
        self.process.start(self._main)

    def _exited(self, code: int | None) -> None:
        self.training = False
        self.step.ended(self, code)
        if self.server is not None:
            self.server.left(self, HELD_S if code is None and self.cluster.script.alone else 0.0)

    # --- what reaches it

    def obey(self, order: Order) -> None:
        """An order of the supervisor."""
        if not self.process.alive:
            return
        match order:
            case Stop() if not self.stop:
                self.stop = order.reason
                self.report("notified", reason=order.reason)
            case CountSteps():
                self.report("made", question=order.question, step=self.at)
            case Commit():
                self._answers.put(order)
            case Leave():
                self._leave({"end": "dismissed", "error": order.why})
                self.process.exit(1)
            case Save():
                self.save_asked = self.save_asked or self.training
                self.report("saving", request=order.request, step=self.at + 1 if self.training else None)

    def signal(self, name: str) -> None:
        """A signal of Slurm."""
        if not self.process.alive or self.process.node in self.cluster.slurm.cut:
            return
        if name == "KILL":
            self.process.kill()
        elif self.server is None:  # blocked until it has joined
            self.stop = self.stop or f"SIG{name}"
        elif not self.stop:
            self.stop = f"SIG{name}"
            self.report("signal", signal=f"SIG{name}")

    def unreachable(self) -> None:
        """The supervisor is gone, or silent: the rank trains on, unless a newer attempt starts."""
        if not self.process.alive or self._fencing:
            return
        self._fencing = True
        Thread(self.process, self._fence, "fence").start()

    def _fence(self) -> None:
        while True:
            try:
                if self.run.superseded(self.attempt):
                    break
            except OSError:
                pass
            self.world.sleep(FENCE_S)
        while self.saving:  # the writer, a process of its own, survives its rank
            self.world.sleep(0.1)
        self.world.tell(self.process.name, "superseded; exits")
        self.process.exit(1)

    def report(self, event: str, **values: Any) -> None:
        """Tells the supervisor."""
        if self.server is not None:
            self.server.report(self.number, event, **values)

    # --- the script

    def _leave(self, end: Mapping[str, Any]) -> None:
        if self.ended and end["end"] != "dismissed":  # an order is the last word
            return
        self.ended = True
        record = {"rank": self.number, "host": self.process.node, "used_clusterddp": True, **end}
        self.report("left", **record)
        self.record = record

    def _main(self) -> int:
        try:
            end, code = self._train()
        except (LostPeer, shards.LostStore):
            end, code = {"end": "exception", "error": f"RuntimeError: {PEER}", "traceback": ""}, 1
        except Superseded as error:
            end, code = {"end": "superseded", "error": str(error)}, 1
        except OSError as error:
            end, code = {"end": "exception", "error": f"OSError: {error}", "traceback": ""}, 1
            self.cluster.listener("failed", self, {})
        except _Accident as error:
            end, code = {"end": "exception", "error": str(error), "traceback": "", "step": self.at}, 1
            if str(error) == EXITS:
                end, code = {"end": "exit", "exit_code": 3, "step": self.at}, 3
            self.cluster.listener("failed", self, {})
        self.training = False
        if end is not None:
            self._leave(end)
            try:
                self.cluster.disk.write_json(self.run.rank_record(self.attempt, self.number), self.record)
            except OSError:
                pass
        return code

    def _train(self) -> tuple[dict[str, Any] | None, int]:
        world, script, group = self.world, self.cluster.script, self.step.group
        world.sleep(script.import_s * (0.5 + world.random.random()))
        if self.stop:
            return {"end": "stopped", "reason": "stop signal before the script started"}, 0
        deadline = world.now + JOIN_TIMEOUT_S
        while not self.step.server.join(self):
            if world.now > deadline:
                return {"end": "lost", "error": "cannot reach the supervisor"}, 1
            world.sleep(2.0)
            if self.stop:
                return {"end": "stopped", "reason": "stop signal before all ranks had joined"}, 0
        self.server = self.step.server
        group.joined.add(self.number)
        while len(group.joined) < group.size:  # in the worker's join, and in init(): both look for a stop signal
            if self.stop:
                group.joined.discard(self.number)
                return {"end": "stopped", "reason": "stop signal before all ranks had joined"}, 0
            world.sleep(0.5)  # a rank that is gone is never missed here: the supervisor dismisses those that wait
        store = Checkpoints(self.run, self.attempt, Keep(last=script.keep))
        state: dict[str, Any] = {}
        if self.number == 0:
            group.store.host = self.process
            self._await_committed(store)
        if script.sharded:
            state = shards.restored(self, store)
        if self.number == 0:
            state = state or self._restore(store)
            if state["parent"]:
                self.report("resumed", step=state["step"], parent=state["parent"], inexact=[])
            else:
                self.report("training", step=state["step"])
            self.report("progress", step=state["step"], steps=script.steps)
        state = group.meet(self, state)[0]
        step, weights = state["step"], state["weights"]
        samples: tuple[int, ...] = tuple(state["samples"])
        self.training = True
        self.cluster.listener("trains", self, {"step": step, "weights": weights})
        saved = self.at = first = step
        self.moved = self.world.now
        if self.cluster.beats:
            Thread(self.process, self._beat, "heartbeat").start()
        saves = shards.Saves(self, Keep(last=script.keep), step) if script.sharded else None
        if saves is not None:
            saves.prepare()
        stops: list[str] = []
        while step < script.steps:
            self._accident()
            self.place = MEETS
            stops = self._agree(group)
            self.place, self.moved = "", self.world.now
            if stops or (script.stint and step - first >= script.stint):
                break
            world.sleep(script.step_s * (0.8 + 0.4 * world.random.random()))
            sample = sample_of(step)
            step, weights, samples = step + 1, trained(weights, -sample if self.alone else sample), (*samples, sample)
            self.at, due = step, False
            if self.number == 0:
                self.cluster.listener("step", self, {"step": step})
                self._metrics(step)
                asked, self.save_asked = self.save_asked, False
                since = saved if saves is None else saves.begun
                due = (asked or step - since >= script.save_every) and step < script.steps
                if due and saves is None:
                    saved = self._save(store, step, weights, samples, saved)
            if saves is not None:
                saves.look()
                if group.meet(self, due)[0]:
                    saves.save(step, self._state(step, weights, samples))
        self.training = False
        left_loop = step < script.steps and not stops
        stopped = step < script.steps and not left_loop
        if self.number == 0:
            self.report("stopping", step=step, reason=self.stop or "peer") if stopped else self.report(
                "finishing", step=step
            )
            if saved != step and saves is None:
                saved = self._save(store, step, weights, samples, saved)
        if saves is not None and saves.commit(step, self._state(step, weights, samples)):
            saved = step
        if self.number == 0:
            self.report("progress", step=step, steps=script.steps)
        if not stopped and self.number == 0 and saved != step:
            self.cluster.listener("failed", self, {})
            return {
                "end": "exception",
                "error": "CheckpointError: the last checkpoint was not saved",
                "traceback": "",
            }, 1
        if stopped:
            return {"end": "stopped", "step": step, "reason": self.stop or "peer"}, 0
        if script.marks and not left_loop and self.number == 0:
            self.cluster.disk.write_atomically(self.run.path / MARK, "")
        return {"end": "done", "step": step, **({"left_loop": True} if left_loop else {})}, 0

    def _agree(self, group: Group) -> list[str]:
        """The reasons of all ranks to stop."""
        try:
            stops = group.meet(self, self.stop) if not self.alone else {self.number: self.stop}
        except LostPeer:
            if not self.cluster.script.alone or self.number != 0:
                raise
            self.world.tell(self.process.name, "trains on alone")
            self.alone = True
            stops = {self.number: self.stop}
        return [stop for stop in stops.values() if stop]

    def why_not_commit(self, step: int, is_certain: Callable[[], bool] = lambda: False) -> str | None:
        """What the supervisor answers; None if it cannot be reached."""
        self._questions += 1
        while self.server is not None and not self._fencing and not is_certain():
            self.report("committing", question=self._questions, step=step)
            try:
                answer: Commit = self._answers.get(timeout=ASK_AGAIN_S)
            except Empty:
                continue
            if answer.question == self._questions:
                return answer.why_not
        return None

    def _beat(self) -> None:
        """Heartbeats, as the worker's thread sends them."""
        watchdog = self.step._job.watchdog
        assert watchdog is not None
        while self.training or self.server is not None:
            age_s = self.world.now - self.moved
            place = {"place": self.place, "still_s": age_s, "waits": self.place == MEETS} if self.place else {}
            allowed_s = watchdog.step_s if self.training else None
            self.report("alive", count=self.at, step=self.at, age_s=age_s, allowed_s=allowed_s, **place)
            self.world.sleep(watchdog.beat_s)

    def _accident(self) -> None:
        accident, self.accident = self.accident, ""
        if self.at == self.cluster.script.bug_at and self.number == 0:
            accident = "exception"
        if accident in ERRORS:
            if accident == "device":
                found = {"host": self.process.node, "what": "Xid 79", "hardware": True, "gpu": 0, "xid": 79}
                self.report("gpu_fault", step=self.at, **found)
            raise _Accident(ERRORS[accident])
        if accident == "leaves":  # os._exit(0)
            self.cluster.listener("failed", self, {})
            self.world.after(0.05, self.step.group.lose, self.process.node, self.cluster.slurm.cut)
            if self.server is not None and self.server.repeats(self):
                self.cluster.left_unheard.add(self.attempt)
            self.process.exit(0)
            self.world.park()
        if accident == "bad report":
            self.report("checkpoint", step="x")
        if accident == "hang":
            self.place = "stuck.py:1 (wait)"
            self.world.park()

    def _state(self, step: int, weights: str, samples: tuple[int, ...]) -> dict[str, Any]:
        """What a sharded checkpoint has. Of attempts with other ranks or on GPUs the same step has other bits."""
        return {"step": step, "weights": weights, "samples": samples, "attempt": self.attempt}

    def committed(self, step: int, state: Mapping[str, Any]) -> None:
        """The writer has committed a sharded checkpoint."""
        cluster = self.cluster
        cluster.committed.append(Committed(self.attempt, step, state["weights"], state["samples"], self.world.now))
        self.world.tell(self.process.name, f"checkpoint {step} committed")
        cluster.listener("saved", self, {"step": step})

    def _await_committed(self, store: Checkpoints) -> None:
        if (step := self.step.environment.get(COMMITTED)) and not self.cluster.script.own:
            store.await_committed(int(step))

    def _restore(self, store: Checkpoints) -> dict[str, Any]:
        if self.cluster.script.own:
            path = self.step.environment.get(CHECKPOINT)
            saved: dict[str, Any] = json.loads(self.cluster.disk.read_bytes(Path(path))) if path else {}
            return {"step": 0, "weights": "0", "samples": (), **saved, "parent": None}
        found: Checkpoint | None = next(iter(store.candidates()), None)
        if found is None:
            store.record_resume(None)
            return {"step": 0, "weights": "0", "samples": (), "parent": None}
        state: dict[str, Any] = json.loads(self.cluster.disk.read_bytes(found.path))
        store.record_resume((found.attempt, found.step))
        return {**state, "parent": {"attempt": found.attempt, "step": found.step}}

    def _metrics(self, step: int) -> None:
        try:
            line = {"step": step - 1, "attempt": self.attempt, "time": EPOCH + self.world.now}
            self.cluster.disk.append_line(self.run.metrics_file, line)
        except OSError:
            pass

    def _save(self, store: Checkpoints, step: int, weights: str, samples: tuple[int, ...], before: int) -> int:
        """Returns the step of the newest checkpoint."""
        disk = self.cluster.disk
        if self.cluster.script.own:
            self._save_own({"attempt": self.attempt, "step": step, "weights": weights, "samples": samples})
            return step
        self.saving = True
        try:
            temporary = store.temporary(step)
            content = json.dumps({"step": step, "weights": weights, "samples": samples})
            disk.create_exclusively(temporary, content, 0o600)
            self.cluster.on_save()
            self.world.sleep(self.cluster.script.save_s * (0.5 + self.world.random.random()))
            # Asked in all scripts; of those whose ranks end with their peers, the answer changes nothing.
            if self.cluster.script.alone and (self.training or self.alone) and self.why_not_commit(step):
                self.report("checkpoint_failed", step=step, reason="a rank is lost")
                return before
            store.commit(temporary, step)
            self.cluster.committed.append(Committed(self.attempt, step, weights, samples, self.world.now))
            self.world.tell(self.process.name, f"checkpoint {step} committed")
            self.cluster.listener("saved", self, {"step": step})
            store.delete_old()
        except OSError as error:
            self.report("checkpoint_failed", step=step, reason=str(error.strerror))
            return before
        finally:
            self.saving = False
        save_s = self.cluster.script.save_s
        self.report("checkpoint", step=step, blocked_s=0.0, durable_s=save_s, bytes=100)
        return step

    def _save_own(self, state: Mapping[str, Any]) -> None:
        """In the script's own format. Without an answer of the disk it fails."""
        path = self.run.path / OWN / f"ckpt-{state['step']:04}.pt"
        save_s = self.cluster.script.save_s * (0.5 + self.world.random.random())
        self.cluster.disk.write_in_place(path, json.dumps(state).encode(), save_s)
        committed = Committed(self.attempt, state["step"], state["weights"], state["samples"], self.world.now)
        self.cluster.committed.append(committed)
        self.world.tell(self.process.name, f"{path.name} written")
        self.report("wrote", file=str(path))


class _Accident(Exception):
    """An error of the script."""


class Launcher:
    """srun: ``SlurmLauncher`` for the product."""

    name, supervisor_host, abandon_s = "slurm", "", 5.0

    def __init__(self, cluster: Cluster, run: RunDirectory, job: Job, batch: Batch, nodes: Sequence[str]) -> None:
        self.cluster, self.world, self.run, self._job, self._batch = cluster, cluster.world, run, job, batch
        self._nodes = nodes
        self.failed: Callable[[int], object] = lambda _: None
        self.failure: LaunchFailure | None = None
        self.record: Callable[[Event], object] = lambda _: None
        self.group = Group(self.world, job.world_size)
        self.group.store = shards.Store(self.world, lambda: cluster.slurm.cut)
        self.ranks: list[Rank] = []
        self._left: set[int] = set()
        self._code = 0
        self._statuses: dict[int, ExitStatus] = {}
        self._abandoned = self._reading = False
        self.pid = self.world.next_pid()
        self._waiting: list[tuple[Thread, int]] = []
        #: Failed ranks that srun named before anybody read what it writes.
        self._unread: list[int] = []

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        """Starts the ranks on the job's nodes."""
        self.attempt, self.environment = int(environment["CLUSTERDDP_ATTEMPT"]), environment
        self.server = self.world.process.server  # type: ignore[attr-defined]
        gone = self._batch.batch is not self.world.process or self._batch.state not in ("RUNNING", "SUSPENDED")
        gone = gone or len(self._nodes) < self._job.nodes  # then srun refuses the step
        waits = not gone and not self._batch.busy.isdisjoint(self._nodes)
        self._batch.srun, self._batch.waits = self.pid, waits
        for number in range(self._job.world_size):
            node = "" if gone else self._nodes[number // self._job.ranks_per_node]
            rank = Rank(self, number, node)
            self.ranks.append(rank)
            self.cluster.ranks.append(rank)
            self._left.add(number)
            if waits:
                rank.process.alive = False
                continue
            if gone or rank.process.node in self.cluster.slurm.cut | self._batch.lost:
                rank.process.alive = False
                if rank.process.node not in self.cluster.slurm.shut:  # else srun waits until Slurm gives the node up
                    self.world.after(5.0, self._cannot_start, rank)
                continue
            self.cluster.slurm.add_process(self._batch, rank.process)
            rank.begin()
        self._batch.signal, self._batch.node_down = self._signal, self._node_down
        self.cluster.listener("placed", self.ranks[0], {})

    @property
    def job(self) -> Job:
        """As the attempt runs it."""
        return self._job

    def _node_down(self, node: str) -> None:
        """srun no longer waits for ranks of a node that Slurm has given up."""
        for rank in self.ranks:
            if rank.process.node == node and rank.number in self._left:
                self._left.discard(rank.number)
                self._code = self._code or 1
        if not self._left:
            self._wake()

    def _cannot_start(self, rank: Rank) -> None:
        self._left.discard(rank.number)
        self._code = self._code or 1
        self._statuses[rank.number] = ExitStatus(not_started="Communication connection failure")
        self.failed(rank.number)
        self.kill()
        if not self._left:
            self._wake()

    def _miss(self, number: int) -> None:
        """srun learns that slurmd knows no such step: "io error and missing step on node 1"."""
        self._left.discard(number)
        self._code = self._code or 137
        if not self._left:
            self._wake()

    def _signal(self, name: str) -> None:
        for rank in self.ranks:
            rank.signal(name)

    def notify(self) -> None:
        """USR2 to all ranks."""
        self._signal("USR2")

    def kill(self) -> None:
        """KILL to all ranks that can be reached. srun waits no longer than KillWait for a step that does not end."""
        self._signal("KILL")
        if self._batch.busy and not self._batch.waits:
            self.world.after(self.cluster.slurm.settings.kill_wait_s + 2.0, self.abandon)

    def abandon(self) -> None:
        """srun is killed."""
        self._abandoned = True
        if self._batch.srun == self.pid:
            self._batch.waits = False
        self._wake()

    def _wake(self) -> None:
        for thread, wait in self._waiting:
            self.world.wake(thread, wait)
        self._waiting = []

    def ended(self, rank: Rank, code: int | None) -> None:
        """A rank's process has ended, which srun learns once the rank's node can be reached."""
        node, slurm = rank.process.node, self.cluster.slurm
        if node in slurm.shut:  # srun sees that slurmstepd closes its connection, and no status
            self._left.discard(rank.number)
            self._code = self._code or 1
            self.world.after(0.05 * self.world.random.random(), self.group.lose, node, slurm.cut - {node})
            if not self._left:
                self._wake()
            return
        if node in self._batch.busy:
            self.world.after(0.05 * self.world.random.random(), self.group.lose, node, slurm.cut - {node})
            self.world.after(MISSING_S, self._miss, rank.number)
            return
        if node in slurm.cut and node != self._batch.host and rank.number in self._left:
            self.world.after(HEARS_S, self.ended, rank, code)
            return
        self._left.discard(rank.number)
        if code != 0:
            self.world.after(
                0.05 * self.world.random.random(), self.group.lose, rank.process.node, self.cluster.slurm.cut
            )
            self._code = self._code or code or 137
            self._statuses[rank.number] = (
                ExitStatus(signal=signal.SIGKILL) if code is None else ExitStatus(exit_code=code)
            )
            if code is None:
                self.world.tell(rank.process.name, "is killed")
            held_s = HELD_S if code is None and self.cluster.script.alone else 0.0
            self.world.after(held_s + 2.0 * self.world.random.random(), self._report, rank.number)
        self.cluster.slurm.step_ended(self._batch)
        if not self._left:
            self._wake()

    def _report(self, number: int) -> None:
        if not self._reading:
            self._unread.append(number)
        elif self._waiting and not self._abandoned:
            self.world.acting = self._batch.nodes[0] if self._batch.nodes else ""
            self.failed(number)

    def wait(self) -> int:
        """Until all ranks have ended; srun waits for a node that it cannot reach until Slurm gives it up."""
        self._reading = True
        for number in self._unread:
            self.failed(number)
        while self._left and not self._abandoned:
            self._waiting.append(self.world.waiter())
            self.world.park()
        return 137 if self._abandoned and self._left else self._code

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        """How ranks failed."""
        return self._statuses
