"""Weights in files of many programs: ``.pt``, ``.pth`` or ``.bin`` files of torch, ``.safetensors`` files, and folders
of these with an index, as on the Hugging Face Hub."""

from __future__ import annotations

import json
import mmap
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clusterddp.checkpoint.export import INDEX, ONE_FILE
from clusterddp.checkpoint.packing import TORCH_DTYPES
from clusterddp.checkpoint.sharded.folder import MANIFEST
from clusterddp.errors import CheckpointError

#: The usual keys of the model's state in files with several, after the part's own name.
_USUAL = "state_dict"
_OF_A_RUN = "init_from: {} is a checkpoint of a run. Write its model to a file with `clusterddp export`"


def read_weights(path: Path, part: str) -> Mapping[str, Any]:
    """The state in a file or folder, or, in a file with several states, the one called ``part`` or ``state_dict``.

    Its tensors are parts of the mapped file where its format allows that, so copy them. Executes no code from the file.
    Raises CheckpointError if it cannot be read, or has no such state.
    """
    try:
        content = _content(path)
    except OSError as error:
        raise CheckpointError(f"init_from: could not read {path}: {error.strerror or error}") from error
    if isinstance(content, Mapping):
        for name in (part, _USUAL):
            if isinstance(inner := content.get(name), Mapping):
                return inner
        if any(isinstance(value, torch.Tensor) for value in content.values()):
            return content
        found = ", ".join(map(str, list(content)[:10])) or "no keys"
    else:
        found = f"an object of type {type(content).__name__}"
    raise CheckpointError(
        f"init_from: {path} has no state for {part}. It contains {found}. Expected a state_dict, or "
        f"a dict with one under {part!r} or {_USUAL!r}"
    )


def _content(path: Path) -> Any:
    if (path / MANIFEST).exists():
        raise CheckpointError(_OF_A_RUN.format(path))
    if path.is_dir():
        return _in_folder(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _pickled(path)
    raise CheckpointError(
        f"init_from: {path}: expected a file that ends in .pt, .pth, .bin or .safetensors, or a folder with "
        f"{ONE_FILE} or {INDEX}"
    )


def _in_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files that the index names."""
    if not (folder / INDEX).exists():
        return _safetensors(folder / ONE_FILE)
    try:
        files = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        return {name: tensor for file in sorted(files) for name, tensor in _safetensors(folder / file).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"init_from: {folder / INDEX} is not valid") from error


def _pickled(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"init_from: {file} is damaged, or contains objects that would execute code when loaded "
            f"({_refused(str(error))}). Save only the model's state_dict()"
        ) from error


def _refused(message: str) -> str:
    """Torch's finding, without its advice on loading such a file after all."""
    if named := re.search(r"Unsupported global: GLOBAL (\S+)", message):
        return f"it contains {named[1]}"
    return message.splitlines()[0][:200] if message else "truncated"


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of any program's file, except a checkpoint of clusterddp."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise CheckpointError(f"init_from: {file} is truncated, or not a safetensors file")
        try:
            header = json.loads(opened.read(length))
            facts = header.pop("__metadata__", None) or {}
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"init_from: {file} is not a safetensors file: its header is invalid") from error
        if str(facts.get("format", "")).startswith("clusterddp"):
            raise CheckpointError(_OF_A_RUN.format(file))
        data = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        return {name: _tensor(entry, data, 8 + length) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"init_from: {file} is damaged, or has a dtype that torch lacks: {error!r}") from error


def _tensor(entry: Mapping[str, Any], data: mmap.mmap, first: int) -> torch.Tensor:
    """A part of the mapped file, or a copy of one that other programs have not aligned to its elements."""
    start, stop = (first + offset for offset in entry["data_offsets"])
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(entry["shape"], dtype=dtype)
    found = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
    return (found.clone() if start % dtype.itemsize else found).view(dtype).reshape(entry["shape"])
