"""The memory of nodes in a history: other runs fail on nodes, too, and what new jobs avoid because of it.

``clusterddp/failures/node_memory.py`` runs as it is. What it must do is said here again, from what truly happened.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.failures import node_memory
from clusterddp.rundir.run_directory import RunDirectory
from tests.histories import event_of
from tests.simulation.slurm import Batch
from tests.simulation.world import EPOCH

if TYPE_CHECKING:
    from tests.simulation.history import History

#: By these events a run itself excludes nodes.
OWN = ("excluded", "requested")
HOUR_S, DAY_S = 3600.0, 24 * 3600.0
#: The nodes of a partition of which a tenth is more than none.
NODES = 24
#: Clocks differ by so much at most, and a job is submitted so long after the memory was read.
CLOCKS_S, READ_S = 60.0, 120.0


@dataclass(frozen=True)
class Failed:
    """A run failed on a node at this simulated time, and wrote that down ``written``; None if that is unknown."""

    at: float
    node: str
    run: str
    written: float | None


@dataclass
class Memory:
    """What truly happened on the nodes."""

    history: History
    failed: list[Failed] = field(default_factory=list)

    def begin(self, draw: random.Random) -> None:
        """What other runs have left before: often two runs on a node within a day."""
        for _ in range(draw.choice((2, 6, 12))):
            node, at = self._node(draw), -draw.choice((0.5, 6.0, 30.0, 60.0, 200.0)) * HOUR_S * draw.random()
            self.other_run_fails(node, draw.choice("ab"), at)
            if draw.random() < 0.6:
                self.other_run_fails(node, draw.choice("abc"), at - draw.choice((1.0, 20.0, 40.0)) * HOUR_S)

    def _node(self, draw: random.Random) -> str:
        """Often one that the run would get."""
        return draw.choice(self.history.slurm.node_names[: draw.choice((4, 4, NODES))])

    def strike(self, draw: random.Random) -> None:
        """Another run fails on a node now."""
        self.history.user("other", lambda: self.other_run_fails(self._node(draw), draw.choice("abc")))

    def other_run_fails(self, node: str, name: str, at: float | None = None) -> int:
        """Its supervisor remembers it."""
        world, run = self.history.world, RunDirectory(self._runs / f"other-{name}")
        at = world.now if at is None else at
        event = {"event": "node_lost", "time": EPOCH + at, "suspect": node, "node": node}
        before, index = self._entries(), len(self.failed)
        self.failed.append(Failed(at, node, str(run), None))
        node_memory.remember(run, "7", event_of(event))
        if self._entries() - before:  # the disk took it
            self.failed[index] = replace(self.failed[index], written=world.now)
        return 0

    @property
    def _runs(self) -> Path:
        """The folder of the other runs, whose memory this run shares: that beside its sweep, if it has one."""
        beside = self.history.run.path.parent
        return beside.parent if self.history.plan.sweep else beside

    def _entries(self) -> set[str]:
        folder = self.history.disk.nodes.get(str(self._runs / node_memory.FOLDER))
        return {name for name in folder.names if name.endswith(".json")} if folder else set()

    def submitted(self, job: Batch, events: Iterable[dict[str, Any]]) -> Iterable[str]:
        """What is wrong with the nodes that a new job excludes."""
        now, events = self.history.world.now, list(events)
        own = {node for event in events if event["event"] in OWN for node in event.get("nodes", ())}
        own |= {event["node"] for event in events if event["event"] == "node_lost"}
        avoided = job.exclude - own
        suspects = [event for event in events if event.get("suspect")]
        mine = [Failed(event["time"] - EPOCH, event["suspect"], str(self.history.run), None) for event in suspects]
        failed = [*self.failed, *mine]
        room = int(len(self.history.slurm.node_names) * 0.1)
        # On a full disk the history may lack what the supervisor knows of the run's own failures.
        full = any(fault.kind == "disk errors" for fault in self.history.plan.faults)
        if len(avoided) > room and not full:
            yield f"job {job.id} avoids {len(avoided)} nodes of {len(self.history.slurm.node_names)}"
        for node in sorted(avoided) if not full else ():
            if not self._is_bad(node, failed, now, -0.01):
                yield f"job {job.id} avoids {node}, where no two runs have failed within a day"
        known = [each for each in self.failed if each.written is not None and each.written < now - self._hidden_s]
        usable = {node for node in self.history.slurm.node_names if node not in self.history.slurm.down} - job.exclude
        if len(avoided) < int(len(usable | avoided) * 0.1) and self._can_know(job):
            for node in sorted(usable):
                if self._is_bad(node, known, now, 0.01):
                    yield f"job {job.id} may get {node}, where two runs have failed within a day"

    @property
    def _hidden_s(self) -> float:
        """For how long an entry may not be seen by who submits."""
        return self.history.disk.lag_s + READ_S

    def _can_know(self, job: Batch) -> bool:
        """Whether Slurm and the disk have answered who submits."""
        kinds = {fault.kind for fault in self.history.plan.faults}
        return self.history.invariants.answers and "lose a node" not in kinds

    @staticmethod
    def _is_bad(node: str, failed: Iterable[Failed], now: float, more: float) -> bool:
        """Whether two runs failed there within a day, which weighs at least 1 (and ``more``) with a half per day."""
        own = [each for each in failed if each.node == node]
        slack_s = -CLOCKS_S if more > 0 else CLOCKS_S
        for one, other in combinations(own, 2):
            weight = sum(0.5 ** (max(0.0, now - each.at) / DAY_S) for each in (one, other))
            if one.run != other.run and abs(one.at - other.at) <= DAY_S + slack_s and weight >= 1.0 + more:
                return True
        return False
