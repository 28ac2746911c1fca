"""Restores a checkpoint on all ranks: rank 0 reads the file once and broadcasts its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.content import unpacked
from clusterddp.checkpoint.file_format import Content
from clusterddp.checkpoint.store import Checkpoint, Checkpoints
from clusterddp.distributed.collectives import broadcast_bytes, broadcast_json
from clusterddp.errors import CheckpointError
from clusterddp.reporter import say

#: A checkpoint: the attempt that wrote it, and its step.
Place = tuple[int, int]


def restore(
    checkpoints: Checkpoints | None,
    device: torch.device,
    on_damaged: Callable[[Checkpoint, str], None] = lambda *_: None,
) -> tuple[Any, Place] | None:
    """The state of the newest undamaged checkpoint, with tensors on the CPU, and its place; None if there is none.

    Collective if there is a process group: only rank 0 has ``checkpoints``; it reads the file and broadcasts the
    content through ``device``. Raises CheckpointError on all ranks if there are checkpoints but all are damaged.
    """
    found, failure = None, None
    try:
        found = _newest_whole(checkpoints, on_damaged) if checkpoints is not None else None
    except CheckpointError as error:
        failure = error
    content, place = found or (None, None)
    described = content and [content.entries, content.facts, content.state, len(content.data)]
    reason, place, described = broadcast_json([failure and str(failure), place, described], device)
    if reason is not None:
        raise failure or CheckpointError(reason)
    if described is None:
        return None
    entries, facts, state, size = described
    content = content or Content(entries, facts, state, file_format.memory(size))
    broadcast_bytes(content.data, size, device)
    return unpacked(content), (place[0], place[1])


def _newest_whole(
    checkpoints: Checkpoints, on_damaged: Callable[[Checkpoint, str], None]
) -> tuple[Content, Place] | None:
    """The newest candidate that is not damaged; newer ones are reported."""
    reasons = []
    for checkpoint in checkpoints.candidates():
        try:
            return checkpoint.read(), (checkpoint.attempt, checkpoint.step)
        except CheckpointError as error:
            say(f"{error}; trying the previous checkpoint")
            on_damaged(checkpoint, str(error))
            reasons.append(str(error))
    if not reasons:
        checkpoints.check_present()
        return None
    raise CheckpointError(
        "no checkpoint of this run can be read, and it never restarts from step 0 on its own:\n  "
        + "\n  ".join(reasons)
        + f"\ncopy an intact one into {checkpoints.folder}, or start a new run in another run directory"
    )
