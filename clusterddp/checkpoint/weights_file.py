"""Reads weights that another program saved: a ``.pt`` or ``.pth`` file of torch, or a ``.safetensors`` file."""

from __future__ import annotations

import json
import mmap
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.state import TORCH_DTYPES
from clusterddp.errors import CheckpointError

#: Where files of several states usually have the model's, after the part's own name.
_USUAL = "state_dict"


def read_weights(file: Path, part: str) -> Mapping[str, Any]:
    """The state in a file; in one of several states, the one called ``part`` or ``state_dict``.

    Nothing in the file is executed. Raises CheckpointError if it cannot be read, or has no such state.
    """
    if file.suffix not in (".pt", ".pth", ".bin", ".safetensors"):
        raise CheckpointError(f"init_from: {file}: expected a file that ends in .pt, .pth, .bin or .safetensors")
    try:
        content = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    except OSError as error:
        raise CheckpointError(f"init_from: cannot read {file}: {error.strerror or error}") from error
    if isinstance(content, Mapping):
        for name in (part, _USUAL):
            if isinstance(inner := content.get(name), Mapping):
                return inner
        if any(isinstance(value, torch.Tensor) for value in content.values()):
            return content
    found = f"{', '.join(map(str, list(content)[:10]))}" if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"init_from: {file} has no state for {part}, but {found or 'nothing'}: expected a state_dict, or a dict with "
        f"one under {part!r} or {_USUAL!r}"
    )


def _pickled(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"init_from: {file} is damaged, or has more than tensors, numbers and text, which would execute code; save "
            f"the model's state_dict() alone ({_refused(str(error))})"
        ) from error


def _refused(message: str) -> str:
    """What torch found, without its advice on loading such a file after all."""
    if named := re.search(r"Unsupported global: GLOBAL (\S+)", message):
        return f"it contains {named[1]}"
    return message.splitlines()[0][:200] if message else "truncated"


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of any program, but a checkpoint of clusterddp."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise CheckpointError(f"init_from: {file} is truncated, or no safetensors file")
        try:
            header = json.loads(opened.read(length))
            facts = header.pop("__metadata__", None) or {}
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"init_from: {file} is no safetensors file: its header is invalid") from error
        if str(facts.get("format", "")).startswith("clusterddp"):
            raise CheckpointError(
                f"init_from: {file} is a checkpoint of a run: write its model to a file with `clusterddp export`"
            )
        data = file_format.memory(size - 8 - length)
        opened.readinto(memoryview(data)[: size - 8 - length])
    try:
        return {name: _tensor(entry, data) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"init_from: {file} is damaged, or has a dtype that torch lacks: {error!r}") from error


def _tensor(entry: Mapping[str, Any], data: mmap.mmap) -> torch.Tensor:
    """A copy: tensors of other programs' files need not be aligned to their elements."""
    start, stop = entry["data_offsets"]
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(entry["shape"], dtype=dtype)
    found = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
    return found.clone().view(dtype).reshape(entry["shape"])
