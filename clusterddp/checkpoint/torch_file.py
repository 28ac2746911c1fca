"""Writes a part of a checkpoint to a file for torch."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.state_copies import copied
from clusterddp.checkpoint.transfer import unpacked


def write_torch_file(checkpoint: Checkpoint, part: str | None, path: Path) -> None:
    """Writes a part of a checkpoint, or all of it, to a new file for ``torch.load(weights_only=True)``, durably.

    Raises CheckpointError for a sharded checkpoint.
    """
    content = unpacked(checkpoint.read())
    value = copied(content if part is None else content[part])  # torch.save writes all memory that a tensor shares
    torch.save(value, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
