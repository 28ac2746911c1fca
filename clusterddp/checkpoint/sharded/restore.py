"""Restores a sharded checkpoint on any number of ranks: each rank reads only its part of each tensor.

torch.distributed.checkpoint plans which parts of which files a rank needs (``ManifestReader``). All bytes that a rank
reads are verified. Ranks load only once all have read and verified their parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from clusterddp.checkpoint.packing import TORCH_DTYPES, unpack
from clusterddp.checkpoint.restore import OnDamaged, Place, Search
from clusterddp.checkpoint.sharded.folder import Manifest, ShardedCheckpoint, rank_file
from clusterddp.checkpoint.sharded.sharding import Sharding, local
from clusterddp.checkpoint.state_copies import offer
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.checkpoint.verified_file import VerifiedFile
from clusterddp.distributed.collectives import all_gather_numbers, broadcast_json
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.rundir.files import HIDDEN_S, exists


def restore_sharded(
    checkpoints: Checkpoints | None, sharding: Sharding, group: ProcessGroup, on_damaged: OnDamaged
) -> tuple[Any, Place] | None:
    """The state of the newest undamaged checkpoint, with this rank's shards as DTensors, and its place. None if there
    is none. Collective.

    Only rank 0 has ``checkpoints``. Raises CheckpointError on all ranks if there are checkpoints but all are damaged,
    or if the newest is that of a model that is not sharded.
    """
    search, device = Search(checkpoints, on_damaged), group.control_device
    tries = 0
    while True:
        found = search.next(ShardedCheckpoint, ShardedCheckpoint.read_state)
        told = None
        if found is not None:
            checkpoint, (manifest, state) = found
            told = [str(checkpoint.path), checkpoint.step, checkpoint.attempt, manifest.encoded().decode(), state]
        failure, told = broadcast_json([search.failure, told], device)
        if failure is not None:
            raise CheckpointError(failure)
        if told is None:
            return None
        path, step, attempt, text, state = told
        checkpoint = ShardedCheckpoint(Path(path), step, attempt)
        content, damage = _read(checkpoint, Manifest.decoded(text.encode()), state, sharding)
        damaged = any_failure(group, f"restore/{tries}", damage)
        tries += 1
        if damaged is None:
            return content, (attempt, step)
        search.report(damaged)


def any_failure(group: ProcessGroup, key: str, own: str | None) -> str | None:
    """Why a rank has failed, if any has. ``own``: this rank's reason. Collective."""
    if own is not None:
        group.store.set(f"{key}/{group.rank}", own)
    found = all_gather_numbers([int(own is not None)], group.control_device)
    rank = next((rank for rank, (damaged,) in enumerate(found) if damaged), None)
    return None if rank is None else group.store.get(f"{key}/{rank}").decode()


def _read(checkpoint: ShardedCheckpoint, manifest: Manifest, state: Any, sharding: Sharding) -> tuple[Any, str | None]:
    """The state with this rank's part of all tensors, or how the checkpoint is damaged."""
    tensors = {
        name: torch.empty(one.shape, dtype=TORCH_DTYPES[one.dtype])
        if one.dim is None
        else sharding.empty(TORCH_DTYPES[one.dtype], one.shape, one.dim)
        for name, one in manifest.tensors.items()
    }
    reader, planner = ManifestReader(checkpoint, manifest), DefaultLoadPlanner(False, False)
    planner.set_up_planner(tensors, reader.read_metadata())
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except CheckpointError as error:
        return None, str(error)
    for tensor in tensors.values():
        offer(local(tensor))
    return unpack(state, tensors), None


class ManifestReader(StorageReader):
    """Reads a folder's tensors for torch.distributed.checkpoint. Raises CheckpointError for a damaged file."""

    def __init__(self, checkpoint: ShardedCheckpoint, manifest: Manifest) -> None:
        self._checkpoint, self._manifest = checkpoint, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 (of torch)
        """False: the checkpoint is given to the constructor."""
        return False

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The manifest, as torch has it."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(TORCH_DTYPES[one.dtype]),
                    torch.Size(one.shape),
                    [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in one.chunks],
                )
                for name, one in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The same plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads file by file, each from its beginning to its end."""
        by_rank: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            by_rank.setdefault(self._rank_of(item), []).append(item)
        for rank, items in by_rank.items():
            _await_visible(self._checkpoint.path / rank_file(rank))
            head = self._checkpoint.rank_head(rank, self._manifest.files[rank])
            with VerifiedFile(self._checkpoint.path / rank_file(rank), head, self._checkpoint.errors) as file:
                starts = {id(item): head.entries[item.storage_index.fqn]["data_offsets"][0] for item in items}
                for item in sorted(items, key=lambda item: starts[id(item)]):
                    _read_item(file, head.entries[item.storage_index.fqn], item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _rank_of(self, item: ReadItem) -> int:
        """The rank whose file has the item's chunk."""
        index = item.storage_index.index
        assert index is not None
        return self._manifest.tensors[item.storage_index.fqn].chunks[index].rank


def _await_visible(file: Path) -> None:
    """Waits until a shared disk also shows this node a file that rank 0 has seen."""
    deadline = time.monotonic() + HIDDEN_S
    while not exists(file) and time.monotonic() < deadline:
        time.sleep(0.5)


#: The most bytes that are read at a time of a chunk of which only a part is needed, unless a row is larger.
_BLOCK = 1 << 22


def _read_item(file: VerifiedFile, entry: Mapping[str, Any], item: ReadItem, planner: LoadPlanner) -> None:
    """Reads a part of a chunk into a part of a tensor: rows of the first dimension."""
    target = planner.resolve_tensor(item).detach()
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"]) or (1,)
    row = (stop - start) // shape[0]
    first, *offsets = tuple(item.storage_offsets) or (0,)
    count, *lengths = tuple(item.lengths) or (1,)
    rows = target.view(count, *lengths)
    start += first * row
    if tuple(lengths) == shape[1:] and rows.device.type == "cpu" and rows.is_contiguous():
        file.read_into(_bytes_of(rows), start)
    else:
        most = max(1, _BLOCK // row)
        for begin in range(0, count, most):
            end = min(begin + most, count)
            block = torch.empty((end - begin, *shape[1:]), dtype=rows.dtype)
            file.read_into(_bytes_of(block), start + begin * row)
            for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True), start=1):
                block = block.narrow(dim, offset, length)
            rows[begin:end].copy_(block)
    planner.commit_tensor(item, target)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
