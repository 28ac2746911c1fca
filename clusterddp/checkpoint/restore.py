"""Restores a checkpoint on all ranks: rank 0 reads the file once and broadcasts its content."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.file_format import Content
from clusterddp.checkpoint.state import TORCH_DTYPES, unpack
from clusterddp.checkpoint.store import Checkpoint, Checkpoints
from clusterddp.distributed.collectives import broadcast_json
from clusterddp.errors import CheckpointError
from clusterddp.reporter import say

#: Bytes per broadcast: 2000 tensors of 20 KB one by one take 3.6 times as long.
_PORTION = 1 << 25
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
    if size and dist.is_initialized() and dist.get_world_size() > 1:
        for portion in torch.split(torch.frombuffer(content.data, dtype=torch.uint8), _PORTION):
            moved = portion.to(device)
            dist.broadcast(moved, src=0)
            if moved is not portion and dist.get_rank() != 0:
                portion.copy_(moved)
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


def unpacked(content: Content) -> Any:
    """The nested state in a checkpoint's content. Its tensors share the content's memory; ``load_state`` copies.

    Raises CheckpointError if state and tensors do not match: the file is intact, but clusterddp did not write it.
    """
    try:
        tensors = {name: _tensor(entry, content.data) for name, entry in content.entries.items()}
        return unpack(content.state, tensors)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"the state in the checkpoint of step {content.facts.get('step')} does not match its tensors "
            f"({error!r:.200}): another program wrote the file"
        ) from error


def _tensor(entry: dict[str, Any], data: mmap.mmap) -> torch.Tensor:
    start, stop = entry["data_offsets"]
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(0, dtype=dtype).reshape(entry["shape"])
    view = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
    return view.view(dtype).reshape(entry["shape"])
