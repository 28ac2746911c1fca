"""A save of a sharded model: each rank writes its own file, and rank 0 commits the manifest once all are durable.

No collective is needed. Each rank sends rank 0 the size and the checksum of its durable file through the store, and
the table of its tensors with the first file and whenever its plan has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from enum import Enum, auto
from typing import Any

from clusterddp.checkpoint.client import CheckpointClient, NotSaved, Saved
from clusterddp.checkpoint.sharded.folder import Chunk, RankFile, ShardedTensor, encoded, encoded_tensors
from clusterddp.checkpoint.sharded.plan import PackedShard, Plan
from clusterddp.distributed.process_group import NO_TIMEOUT, ProcessGroup
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory

#: How long rank 0 waits for the other ranks' files before it asks whether a rank is lost.
LOOK_S = timedelta(seconds=1)
#: The most names of tensors in a message.
_NAMED = 3


class _Phase(Enum):
    WRITING = auto()
    """This rank's file is being written."""
    GATHERING = auto()
    """On rank 0: files of other ranks are being written."""
    COMMITTING = auto()
    """On rank 0: the manifest is being written."""


class ShardClient:
    """``CheckpointClient`` of one rank of a sharded model. All ranks save the same steps.

    ``result`` is that of the whole checkpoint on rank 0, and None on other ranks, once their own file is durable.
    """

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        keep: Keep,
        group: ProcessGroup,
        why_lost: Callable[[int, Callable[[], bool]], str | None],
    ) -> None:
        """``why_lost``: ``RankProcess.why_not_commit``."""
        self._why_lost = why_lost
        self._store, self._rank, self._world_size = group.store, group.rank, group.world_size
        self._plan: Plan | None = None
        self._attempt = attempt
        self._own = CheckpointClient(directory, attempt, keep, group.device, group.rank, self._pack)
        self._phase: _Phase | None = None
        self._step = 0
        self._facts: Mapping[str, str] = {}
        #: Counts the saves of this attempt, on all ranks alike.
        self._saves = 0
        #: The plan whose table rank 0 has.
        self._sent: Plan | None = None
        #: On rank 0, of each rank: the digest of what is common, and the table of what it writes.
        self._tables: dict[int, tuple[str, dict[str, list[Any]]]] = {}
        #: Of all tables, as the manifest has them. Empty if they have changed since.
        self._tensors = ""
        #: The files of the newest save, on rank 0.
        self._files: list[RankFile] = []

    def _pack(self, state: Mapping[str, Any]) -> PackedShard:
        packed = PackedShard(state, self._rank, self._plan)
        self._plan = packed.plan
        return packed

    @property
    def busy(self) -> bool:
        """Whether a save is in progress, or its result was not taken yet."""
        return self._phase is not None

    @property
    def copied_s(self) -> float:
        """The seconds that the copies of the newest save took on the GPUs, once its result is known."""
        return self._own.copied_s

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Plans the saves, allocates memory and starts the writer. Collective.

        Raises CheckpointError, on all ranks, if the ranks' states have different tensors, or if there is not enough
        memory on this one.
        """
        self._own.prepare(state)
        assert self._plan is not None
        own = json.dumps([self._plan.digest, sorted(self._plan.common)])
        self._store.set(f"shards/plan/{self._rank}", own)
        if self._rank == 0:
            keys = [f"shards/plan/{rank}" for rank in range(self._world_size)]
            self._store.wait(keys, NO_TIMEOUT)
            found = [json.loads(text) for text in self._store.multi_get(keys)]
            self._store.set("shards/plan", json.dumps(_difference(found)))
        self._store.wait(["shards/plan"], NO_TIMEOUT)
        if (difference := json.loads(self._store.get("shards/plan"))) is not None:
            raise CheckpointError(difference)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        facts: Mapping[str, str],
        urgent: bool,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Copies this rank's part of the state, after which training may continue. As ``CheckpointClient.save``."""
        self._step, self._facts, self._phase = step, facts, _Phase.WRITING
        self._saves += 1
        self._own.save(step, state, facts, urgent, before)

    def result(self, wait: bool) -> Saved | None:
        """The result of the save. None while it is in progress, if there is none, and on ranks other than 0.

        Raises NotSaved if it failed, on this rank or, for rank 0, on any. Superseded if a newer attempt exists.
        """
        if self._phase is _Phase.WRITING:
            self._write(wait)
        if self._phase is _Phase.GATHERING:
            self._gather(wait)
        if self._phase is _Phase.COMMITTING:
            return self._commit(wait)
        return None

    def _write(self, wait: bool) -> None:
        failure: NotSaved | Superseded | None = None
        message: dict[str, Any] = {}
        try:
            saved = self._own.result(wait)
            if saved is None:
                return
            message = {"bytes": saved.bytes, "checksum": saved.checksum}
        except NotSaved as error:
            failure = error
            message = {"failed": str(error), "metrics": error.metrics, "disk": error.disk, "full": error.full}
        except Superseded as error:
            failure, message = error, {"superseded": str(error)}
        assert self._plan is not None
        if self._sent is not self._plan:
            self._sent = self._plan
            message["table"] = [self._plan.digest, self._plan.table]
        self._store.set(self._key(self._rank), json.dumps(message))
        self._store.add(self._key("count"), 1)
        self._phase = _Phase.GATHERING if self._rank == 0 else None
        if failure is not None and self._rank != 0:
            raise failure

    def _gather(self, wait: bool) -> None:
        """Once all ranks have written their files, has the manifest committed."""
        keys = [self._key(rank) for rank in range(self._world_size)]
        if wait:
            self._await_all(keys)
        elif self._store.add(self._key("count"), 0) < self._world_size:
            return
        self._phase = None
        messages = [json.loads(text) for text in self._store.multi_get(keys)]
        for key in (*keys, self._key("count")):
            self._store.delete_key(key)
        if tables := {rank: message["table"] for rank, message in enumerate(messages) if "table" in message}:
            self._tables |= tables
            self._tensors = ""
        for rank, message in enumerate(messages):
            if "superseded" in message:
                raise Superseded(message["superseded"])
            if "failed" in message:
                where = "" if rank == 0 else f"rank {rank}: "
                raise NotSaved(
                    self._step,
                    f"{where}{message['failed']}",
                    message["metrics"],
                    disk=message["disk"],
                    full=message["full"],
                )
        if (difference := self._unlike_rank_0()) is not None:
            raise NotSaved(self._step, difference)
        self._files = [RankFile(message["bytes"], message["checksum"]) for message in messages]
        self._tensors = self._tensors or encoded_tensors(self._all_tensors())
        self._send_manifest()

    def replace_facts(self, facts: Mapping[str, str]) -> None:
        """Writes the manifest of the newest save again with these facts, on rank 0. Take its result before and after.

        No effect if this attempt has not saved.
        """
        if self._files:
            self._facts = facts
            self._send_manifest()

    def _send_manifest(self) -> None:
        manifest = encoded(self._step, self._attempt, self._facts, self._files, self._tensors)
        self._own.commit_manifest(self._step, manifest)
        self._phase = _Phase.COMMITTING

    def _await_all(self, keys: list[str]) -> None:
        """Waits for the other ranks' files. Raises NotSaved if the supervisor says that one of these ranks is lost."""
        with suppress(RuntimeError):  # the timeout
            self._store.wait(keys, LOOK_S)
            return
        # No rank makes the next step before this save is over. So the answer comes only for a lost rank.
        if lost := self._why_lost(self._step + 1, lambda: self._store.check(keys)):
            self._phase = None
            raise NotSaved(self._step, f"{lost}, and its part may be missing")
        self._store.wait(keys, NO_TIMEOUT)

    def _commit(self, wait: bool) -> Saved | None:
        try:
            saved = self._own.result(wait)
        except (NotSaved, Superseded):
            self._phase = None
            raise
        if saved is not None:
            self._phase = None
        return saved

    def _unlike_rank_0(self) -> str | None:
        tables = self._tables
        other = next((rank for rank, table in tables.items() if table[0] != tables[0][0]), None)
        return None if other is None else f"the state of rank {other} has other tensors than rank 0's"

    def _all_tensors(self) -> dict[str, ShardedTensor]:
        """All tensors, with the chunks of all ranks."""
        chunks: dict[str, list[Chunk]] = {}
        facts: dict[str, tuple[str, tuple[int, ...], int | None]] = {}
        for rank in range(self._world_size):
            for name, (dtype, shape, dim, offsets, sizes) in self._tables[rank][1].items():
                facts[name] = dtype, tuple(shape), dim
                chunks.setdefault(name, []).append(Chunk(rank, tuple(offsets), tuple(sizes)))
        return {name: ShardedTensor(*facts[name], tuple(found)) for name, found in chunks.items()}

    def _key(self, of: int | str) -> str:
        return f"shards/{self._saves}/{of}"

    def close(self) -> None:
        """Lets the writer finish this rank's file and exit."""
        self._own.close()

    def free(self) -> None:
        """Frees the snapshot's memory after ``close()``."""
        self._own.free()


def _difference(found: list[list[Any]]) -> str | None:
    """How the states of the ranks differ, by digests and names of tensors. None if they do not."""
    (digest, names), *others = found
    for rank, (other, own) in enumerate(others, start=1):
        if other == digest:
            continue
        extra, missing = sorted(set(own) - set(names)), sorted(set(names) - set(own))
        sentences = [
            *([f"rank {rank} alone has {_some(extra)}"] if extra else []),
            *([f"rank 0 alone has {_some(missing)}"] if missing else []),
        ]
        said = ", and ".join(sentences) or "the same names have other shapes or dtypes"
        return (
            f"the states of rank 0 and rank {rank} differ ({said}). All ranks save parts of the same tensors. Build "
            "the same model and the same optimizer on every rank"
        )
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
