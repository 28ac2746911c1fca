"""Checkpoint files for tests: written in this process as the writer does it, and read as a restore does."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.packing import pack, tensor_facts
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


def file_bytes(content: Mapping[str, Any], facts: Mapping[str, str] | None = None) -> bytes:
    """A whole file."""
    state, tensors = pack(content)
    layout = tensor_facts(tensors)
    places, size = file_format.offsets(layout)
    data = bytearray(size)
    for start, tensor in zip(places, tensors.values(), strict=True):
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        data[start : start + len(raw)] = raw
    beginning = file_format.head(file_format.described(layout), state, facts or {})
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in file_format.write(file.fileno(), beginning, memoryview(data)):
            pass
        file.seek(0)
        return file.read()
