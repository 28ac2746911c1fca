"""Checkpoint files for tests: written in this process as the writer does it, and read as a restore does."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.packing import DTYPES, pack, tensor_facts
from clusterddp.checkpoint.sharded.folder import Chunk, Manifest, RankFile, ShardedCheckpoint, ShardedTensor
from clusterddp.checkpoint.sharded.rank_files import RankFiles
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.checkpoint.transfer import unpacked
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory


def content_of(path: Path) -> Any:
    """The nested state in a file, verified."""
    return unpacked(file_format.read(path))


def save(
    directory: RunDirectory,
    attempt: int,
    step: int,
    content: Mapping[str, Any],
    *,
    keep: Keep = Keep(),  # noqa: B008 (frozen)
    facts: Mapping[str, str] | None = None,
    fenced: bool = True,
) -> Checkpoint:
    """Commits a checkpoint; ``fenced=False`` is a writer that looked at the fence just before it moved."""
    checkpoints = Checkpoints(directory, attempt, keep)
    if not fenced:
        checkpoints.check_newest = lambda: None  # type: ignore[method-assign]
    temporary = checkpoints.temporary(step)
    temporary.write_bytes(file_bytes(content, {"step": str(step), "attempt": str(attempt), **(facts or {})}))
    committed = checkpoints.commit(temporary, step)
    checkpoints.delete_old()
    return committed


def save_sharded(
    directory: RunDirectory, attempt: int, step: int, content: Mapping[str, Any], dims: Mapping[str, int], ranks: int
) -> ShardedCheckpoint:
    """Commits the folder that so many ranks write. ``dims``: by the tensor's name, the dimension that is sharded."""
    checkpoints = Checkpoints(directory, attempt, Keep())
    state, tensors = pack(content)
    table: dict[str, list[Chunk]] = {name: [] for name in tensors}
    files: list[RankFile] = []
    for rank in range(ranks):
        chunks = {}
        for name, whole in tensors.items():
            dim, offsets, chunk = dims.get(name), [0] * whole.dim(), whole
            if dim is not None:
                size = -(-whole.shape[dim] // ranks)
                offsets[dim] = min(rank * size, whole.shape[dim])
                chunk = whole.narrow(dim, offsets[dim], min(size, whole.shape[dim] - offsets[dim]))
            if chunk.numel() and (dim is not None or rank == 0):
                chunks[name] = chunk
                table[name].append(Chunk(rank, tuple(offsets), tuple(chunk.shape)))
        writer = RankFiles(checkpoints, rank)
        temporary = writer.temporary(step)
        temporary.write_bytes(_file_bytes(state if rank == 0 else None, chunks, {"step": str(step)}))
        files.append(writer.commit(temporary))
    manifest = Manifest(
        step,
        attempt,
        {},
        tuple(files),
        {
            name: ShardedTensor(DTYPES[whole.dtype], tuple(whole.shape), dims.get(name), tuple(table[name]))
            for name, whole in tensors.items()
        },
    )
    return RankFiles(checkpoints, 0).commit_manifest(step, manifest.encoded())


def file_bytes(content: Mapping[str, Any], facts: Mapping[str, str] | None = None) -> bytes:
    """A whole file."""
    return _file_bytes(*pack(content), facts)


def _file_bytes(state: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str] | None) -> bytes:
    layout = tensor_facts(tensors)
    places, size = file_format.offsets(layout)
    data = bytearray(size)
    for start, tensor in zip(places, tensors.values(), strict=True):
        contiguous = tensor.contiguous()
        data[start : start + tensor.nbytes] = ctypes.string_at(contiguous.data_ptr(), tensor.nbytes)
    beginning = file_format.head(file_format.described(layout), state, facts or {})
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in file_format.write(file.fileno(), beginning, memoryview(data)):
            pass
        file.seek(0)
        return file.read()
