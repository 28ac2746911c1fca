"""The state in a checkpoint's content: its tensors are views of the content's memory."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from clusterddp.checkpoint.file_format import Content, Pieces
from clusterddp.checkpoint.memory.blocks import Blocks, offer
from clusterddp.checkpoint.state import TORCH_DTYPES, unpack
from clusterddp.errors import CheckpointError


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


def _tensor(entry: dict[str, Any], data: mmap.mmap | Pieces) -> torch.Tensor:
    start, stop = entry["data_offsets"]
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(0, dtype=dtype).reshape(entry["shape"])
    alone = False
    if isinstance(data, Blocks):
        view, alone = data.bytes_of(start, stop)
    else:
        view = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
    found = view.view(dtype).reshape(entry["shape"])
    if alone:
        offer(found)
    return found
