"""How the ranks of a sharded model save and restore: a file per rank, and a manifest that rank 0 commits.

``ShardClient``, ``RankFiles`` and ``ShardedCheckpoint`` run as they are. The process group's store, a rank's writer,
and what a file contains are models. Each file has a part of the weights.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.client import NotSaved, Saved
from clusterddp.checkpoint.sharded.client import ShardClient
from clusterddp.checkpoint.sharded.folder import MANIFEST, Manifest, ShardedCheckpoint, rank_file
from clusterddp.checkpoint.sharded.rank_files import RankFiles
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.distributed.process_group import NO_TIMEOUT
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.files import HIDDEN_S
from clusterddp.rundir.run_directory import RunDirectory
from tests.simulation.disk import Disk
from tests.simulation.world import Process, Thread, World

if TYPE_CHECKING:
    from tests.simulation.ranks import Rank

#: How often a thread that waits for the store looks again.
_LOOK_S = 1.0


class LostStore(Exception):
    """Rank 0, whose process has the store, is gone."""


class Store:
    """The process group's store, in the process of rank 0. As torch's, which answers whoever can reach it."""

    def __init__(self, world: World, cut: Callable[[], set[str]]) -> None:
        self._world, self._cut = world, cut
        #: Rank 0's process, once it is there.
        self.host: Process | None = None
        self._values: dict[str, Any] = {}

    def _reach(self) -> None:
        while True:
            if self.host is None or not self.host.alive:
                raise LostStore
            here, there = self._world.process.node, self.host.node
            if here == there or not {here, there} & self._cut():
                return
            self._world.sleep(_LOOK_S)

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self._reach()
        self._values[key] = value

    def add(self, key: str, amount: int) -> int:
        """As torch's."""
        self._reach()
        found: int = self._values.get(key, 0) + amount
        if amount:
            self._values[key] = found
        return found

    def get(self, key: str) -> str:
        """Of a key that is there."""
        self._reach()
        found: str = self._values[key]
        return found

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """Of keys that are there."""
        self._reach()
        return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        self._reach()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> None:
        """As torch's."""
        self._values.pop(key, None)

    def wait(self, keys: Sequence[str], timeout: timedelta = NO_TIMEOUT) -> None:
        """Until all are there. RuntimeError after the timeout, as torch raises."""
        until = self._world.now + timeout.total_seconds()
        while not self.check(keys):
            if self._world.now >= until:
                raise RuntimeError("wait timeout")
            self._world.sleep(min(0.1, until - self._world.now))


class Packed:
    """``PackedShard``: all ranks have parts of the same tensor."""

    def __init__(self, state: Mapping[str, Any], rank: int, plan: Any) -> None:
        self.state = state
        table = {"weights": ["F32", [64], 0, [rank], [1]]}
        self.plan = plan or SimpleNamespace(digest="the same", common=["weights"], table=table)


class Writer:
    """``CheckpointClient``, with the writer process: a thread here, which ends with the rank.

    ``device``: the rank.
    """

    copied_s = 0.0

    def __init__(
        self, directory: RunDirectory, attempt: int, keep: Keep, device: Rank, rank: int, pack: Callable[..., Packed]
    ) -> None:
        self._rank, self._world, self._pack = device, device.world, pack
        self._checkpoints = Checkpoints(directory, attempt, keep)
        self._files = RankFiles(self._checkpoints, rank)
        self._step: int | None = None
        self._state: Mapping[str, Any] = {}
        self._thread: Thread | None = None
        self._answer: Saved | NotSaved | Superseded | None = None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Plans."""
        self._pack(state)

    def save(self, step: int, state: Mapping[str, Any], *_: object) -> None:
        """The writer begins this rank's file."""
        self._state = self._pack(state).state
        self._begin(step, self._write)

    def commit_manifest(self, step: int, manifest: bytes) -> None:
        """The writer commits the manifest."""
        self._begin(step, lambda step: self._commit_manifest(step, manifest))

    def result(self, wait: bool) -> Saved | None:
        """As of ``CheckpointClient``."""
        if self._thread is None or not (wait or self._thread.done):
            return None
        self._thread.join()
        self._thread, answer = None, self._answer
        if isinstance(answer, Saved):
            return answer
        assert answer is not None
        raise answer

    def _begin(self, step: int, work: Callable[[int], Saved]) -> None:
        def main() -> None:
            try:
                self._answer = work(step)
            except Superseded as error:
                self._answer = error
            except OSError as error:
                self._answer = NotSaved(step, str(error.strerror), disk=True)
            finally:
                self._rank.saving = False

        self._answer, self._rank.saving = None, True
        self._thread = Thread(self._rank.process, main, "writer")
        self._thread.start()

    def _write(self, step: int) -> Saved:
        rank, cluster = self._rank, self._rank.cluster
        try:
            temporary = self._files.temporary(step)
            content = json.dumps(part_of(self._state, rank.number, rank.step.group.size))
            cluster.disk.create_exclusively(temporary, content, 0o600)
            cluster.on_save()
            self._world.sleep(cluster.script.save_s * (0.2 + self._world.random.random()))
            replaced = _replaced(cluster.disk, temporary.with_name(rank_file(rank.number)), rank.attempt)
            found = self._files.commit(temporary)
        except file_format.Damaged as error:
            raise OSError(errno.EIO, str(error)) from error
        cluster.listener("saved", rank, {"step": step})
        if replaced:
            cluster.listener("replaced", rank, {"file": replaced})
        return Saved(step, found.bytes, self._world.now, (), found.checksum)

    def _commit_manifest(self, step: int, manifest: bytes) -> Saved:
        self._files.commit_manifest(step, manifest)
        self._rank.committed(step, self._state)
        try:
            self._checkpoints.delete_old()
        except (OSError, Superseded):
            pass  # the next save reports it
        return Saved(step, len(manifest), self._world.now)

    def close(self) -> None:
        """The process ends."""


def _replaced(disk: Disk, file: Path, attempt: int) -> str | None:
    """What of another attempt, or of a whole checkpoint, a rank is about to replace."""
    if str(file.with_name(MANIFEST)) in disk.nodes:
        return f"{file.parent.name}/{file.name}"
    before = disk.nodes.get(str(file))
    of_another = before is not None and before.data and json.loads(before.data)["attempt"] != attempt
    return f"{file.parent.name}/{file.name}" if of_another else None


def part_of(state: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """What a rank's file has: a part of the weights, and on rank 0 all else."""
    part = {"weights": state["weights"][rank::ranks], "attempt": state["attempt"]}
    return {**state, **part} if rank == 0 else part


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state, from the content of all files."""
    weights = [""] * sum(len(part["weights"]) for part in parts)
    for rank, part in enumerate(parts):
        weights[rank :: len(parts)] = part["weights"]
    return {**parts[0], "weights": "".join(weights)}


def head_of(data: bytes) -> SimpleNamespace:
    """``file_format.read_head``. Raises Damaged."""
    try:
        return SimpleNamespace(checksum=zlib.crc32(data), state=json.loads(data))
    except ValueError as error:
        raise file_format.Damaged("truncated") from error


def whole(disk: Disk, folder: str) -> dict[str, Any] | None:
    """The state in a folder. None if it is not a whole checkpoint."""
    if (manifest := disk.nodes.get(f"{folder}/{MANIFEST}")) is None:
        return None
    files = Manifest.decoded(manifest.data).files
    found = [disk.nodes.get(f"{folder}/{rank_file(number)}") for number in range(len(files))]
    heads = [head_of(file.data) for file in found if file is not None]
    if [head.checksum for head in heads] != [file.checksum for file in files]:
        return None
    return joined([head.state for head in heads])


def restored(rank: Rank, store: Checkpoints) -> dict[str, Any]:
    """The state of the newest intact checkpoint, which rank 0 chooses and all ranks read. Collective."""
    world, group = rank.world, rank.step.group
    candidates = iter(store.candidates() if rank.number == 0 else ())
    while True:
        found = group.meet(rank, _next(candidates))[0]
        if found is None:
            if rank.number == 0:
                store.record_resume(None)
            return {"step": 0, "weights": "0", "samples": (), "parent": None}
        checkpoint, manifest = found
        parts: list[Mapping[str, Any]] = []
        try:
            for number, expected in enumerate(manifest.files):
                _await_visible(rank, checkpoint.path / rank_file(number))
                parts.append(checkpoint.rank_head(number, expected).state)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            world.tell(rank.process.name, str(error))
        if all(group.meet(rank, len(parts) == len(manifest.files)).values()):
            if rank.number == 0:
                store.record_resume((checkpoint.attempt, checkpoint.step))
            return {**joined(parts), "parent": {"attempt": checkpoint.attempt, "step": checkpoint.step}}


def _next(candidates: Any) -> tuple[ShardedCheckpoint, Manifest] | None:
    for checkpoint in candidates:
        try:
            return checkpoint, checkpoint.manifest()
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
    return None


def _await_visible(rank: Rank, file: Path) -> None:
    until = rank.world.now + HIDDEN_S
    while not rank.cluster.disk.exists(file) and rank.world.now < until:
        rank.world.sleep(0.5)


class Saves:
    """The saves of one rank of a sharded model, as ``Saver`` makes them."""

    def __init__(self, rank: Rank, keep: Keep, first: int) -> None:
        group = rank.step.group
        self._rank, self._store = rank, group.store
        of = SimpleNamespace(store=group.store, rank=rank.number, world_size=group.size, device=rank)
        self._client = ShardClient(rank.run, rank.attempt, keep, of, self._why_lost)  # type: ignore[arg-type]
        #: The step of the newest checkpoint, on rank 0, and of the newest save that has begun.
        self.committed = self.begun = first

    def prepare(self) -> None:
        """Collective."""
        self._client.prepare({})

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """At a boundary at which a checkpoint is due, on all ranks."""
        self.look(wait=True)
        self.begun = step
        self._client.save(step, state, {}, False)

    def look(self, wait: bool = False) -> None:
        """Takes the result of the save under way. Raises Superseded."""
        try:
            saved = self._client.result(wait)
        except NotSaved as error:
            if self._rank.number == 0:
                self._rank.report("checkpoint_failed", step=error.step, reason=str(error))
            return
        if saved is not None:
            self.committed = saved.step
            save_s = self._rank.cluster.script.save_s
            self._rank.report("checkpoint", step=saved.step, blocked_s=0.0, durable_s=save_s, bytes=saved.bytes)

    def commit(self, step: int, state: Mapping[str, Any]) -> bool:
        """After the last step, on all ranks. Returns whether that step is saved."""
        saved = self._lead(step, state) if self._rank.number == 0 else self._follow(state)
        self._rank.step.group.meet(self._rank, None)  # rank 0 keeps the store until all have the answer
        return saved

    def _lead(self, step: int, state: Mapping[str, Any]) -> bool:
        try:
            self.look(wait=True)
            if self.committed != step:
                self._store.set("commit/save", "")
                self.save(step, state)
                self.look(wait=True)
        finally:
            self._store.set("commit", json.dumps(self.committed == step))
        return self.committed == step

    def _follow(self, state: Mapping[str, Any]) -> bool:
        self.look(wait=True)
        saved = False
        while not self._store.check(["commit"]):
            if not saved and self._store.check(["commit/save"]):
                saved = True
                self.save(state["step"], state)
                self.look(wait=True)
            self._rank.world.sleep(0.1)
        return bool(json.loads(self._store.get("commit")))

    def _why_lost(self, step: int, is_certain: Callable[[], bool]) -> str | None:
        return self._rank.why_not_commit(step, is_certain)
