"""The story of a sharded model's saves: two ranks, each with a client and a writer of its own, in one process.

The ranks' store is a dict, and each rank has half of a tensor. All else is the product's. Served like ``subject.py``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from clusterddp.checkpoint.client import CheckpointClient, NotSaved
from clusterddp.checkpoint.packing import Packed
from clusterddp.checkpoint.sharded import client
from clusterddp.checkpoint.sharded.client import ShardClient
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory
from tests.crash.subject import ATTEMPTS, STEPS_PER_SAVE, Story, serve

RANKS = 2
ROWS = 30


def shard(step: int, rank: int) -> torch.Tensor:
    """What a rank has after ``step`` steps: its rows of a tensor."""
    return torch.full((ROWS, 60), float(step) + rank / 2)


class Part(Packed):
    """``PackedShard`` of a rank, without a process group."""

    def __init__(self, content: Mapping[str, Any], rank: int, plan: Any) -> None:
        super().__init__(content)
        table = {name: ["F32", [RANKS * ROWS, 60], 0, [rank * ROWS, 0], [ROWS, 60]] for name in self.tensors}
        self.plan = plan or SimpleNamespace(digest="the same", common=[], table=table)


class Store:
    """That of the process group. No rank waits, because all take turns."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {"shards/plan": "null"}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> str:
        return str(self._values[key])

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        self._values[key] = found = self._values.get(key, 0) + amount
        return int(found)

    def delete_key(self, key: str) -> None:
        self._values.pop(key, None)

    def wait(self, *_: object) -> None:
        pass


def clients_of(run: RunDirectory, attempt: int, keep: int) -> list[ShardClient]:
    """All ranks' clients, rank 0's last."""
    client.PackedShard = Part  # type: ignore[assignment, misc]
    store, device = Store(), torch.device("cpu")
    groups: list[Any] = [
        SimpleNamespace(store=store, rank=rank, world_size=RANKS, device=device) for rank in reversed(range(RANKS))
    ]
    clients = [ShardClient(run, attempt, Keep(keep), group, lambda *_: None) for group in groups]
    for one, group in zip(clients, groups, strict=True):
        one.prepare({"weight": shard(0, group.rank)})
    return clients


def save(clients: list[ShardClient], step: int) -> None:
    """Saves a step. Raises NotSaved, as rank 0's client does."""
    for rank, one in zip(reversed(range(RANKS)), clients, strict=True):
        one.save(step, {"weight": shard(step, rank)}, {}, False)
    deadline, saved = time.monotonic() + 30, None
    while saved is None:
        assert time.monotonic() < deadline, f"no word of the save of step {step}"
        time.sleep(0.001)
        for one in clients[:-1]:
            try:
                one.result(False)
            except NotSaved:
                pass  # rank 0 is told
        saved = clients[-1].result(False)


class ShardedStory(Story):
    """Saves in two attempts."""

    _shards: Sequence[ShardClient] = ()

    def play(self) -> None:
        self._count()
        self._run.create()
        self.promise(created=True)
        for number, (saves, keep) in ATTEMPTS.items():
            assert self._run.create_attempt() == number
            self.promise(attempt=number)
            checkpoints = Checkpoints(self._run, number, Keep(keep))
            found = next(iter(checkpoints.candidates()), None)
            checkpoints.record_resume((found.attempt, found.step) if found else None)
            self.promise(resumed=number)
            first = found.step if found else 0
            self._shards = clients_of(self._run, number, keep)
            for step in range(first + STEPS_PER_SAVE, first + STEPS_PER_SAVE * (saves + 1), STEPS_PER_SAVE):
                self._save(step, keep)
            for one in self._shards:
                one.close()
            self._shards = ()
            self.promise(trained=number)

    def _save(self, step: int, keep: int) -> None:
        try:
            save([*self._shards], step)
        except NotSaved as error:
            self.promise(not_saved=step, reason=str(error))
            if self._once:
                self._once = False
                self._stop("let go")
        else:
            # The writer has answered, and deletes old checkpoints now: as far as no error keeps it from that.
            until = time.monotonic() + 0.5
            while len([*self._run.checkpoints.iterdir()]) > keep and time.monotonic() < until:
                time.sleep(0.001)
            self.promise(saved=step)

    def _clients(self) -> list[CheckpointClient]:
        return [one._own for one in self._shards]


if __name__ == "__main__":
    serve(ShardedStory)
