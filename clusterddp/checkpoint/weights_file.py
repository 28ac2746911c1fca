"""Weights in a file: read from files of many programs, and exported from a checkpoint.

Reads ``.pt``, ``.pth`` or ``.bin`` files of torch, and ``.safetensors`` files. ``clusterddp export`` writes a part of a
checkpoint to a file for use without clusterddp.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.packing import TORCH_DTYPES
from clusterddp.checkpoint.parts import RESERVED
from clusterddp.checkpoint.state_copies import copied
from clusterddp.checkpoint.store import choose
from clusterddp.checkpoint.transfer import unpacked
from clusterddp.errors import CheckpointError, UsageError
from clusterddp.jobdef.job import Keep
from clusterddp.reporter import counted
from clusterddp.rundir.files import fsync_directory
from clusterddp.rundir.run_directory import RunDirectory

#: The usual keys of the model's state in files with several, after the part's own name.
_USUAL = "state_dict"


def read_weights(file: Path, part: str) -> Mapping[str, Any]:
    """The state in a file, or, in one with several states, the one called ``part`` or ``state_dict``.

    Executes no code from the file. Raises CheckpointError if it cannot be read, or has no such state.
    """
    if file.suffix not in (".pt", ".pth", ".bin", ".safetensors"):
        raise CheckpointError(f"init_from: {file}: expected a file that ends in .pt, .pth, .bin or .safetensors")
    try:
        content = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    except OSError as error:
        raise CheckpointError(f"init_from: could not read {file}: {error.strerror or error}") from error
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
        f"init_from: {file} has no state for {part}. It contains {found}. Expected a state_dict, or "
        f"a dict with one under {part!r} or {_USUAL!r}"
    )


def _pickled(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
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
            raise CheckpointError(
                f"init_from: {file} is a checkpoint of a run. Write its model to a file with `clusterddp export`"
            )
        data = file_format.memory(size - 8 - length)
        opened.readinto(memoryview(data)[: size - 8 - length])
    try:
        return {name: _tensor(entry, data) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"init_from: {file} is damaged, or has a dtype that torch lacks: {error!r}") from error


def _tensor(entry: Mapping[str, Any], data: mmap.mmap) -> torch.Tensor:
    """A copy, because tensors of other programs' files need not be aligned to their elements."""
    start, stop = entry["data_offsets"]
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(entry["shape"], dtype=dtype)
    found = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
    return found.clone().view(dtype).reshape(entry["shape"])


def export(
    run: RunDirectory,
    target: Path,
    part: str | None = None,
    step: int | Literal["best"] | None = None,
    *,
    everything: bool = False,
    keep: Keep = Keep(),  # noqa: B008 (frozen)
) -> str:
    """Writes a part of a checkpoint, or all of it, to the file ``target``. Returns the result in words.

    ``part``: None is ``model``, or the only module. ``step``: the checkpoint's. None is the newest. ``keep``: of the
    job definition, for the best. A ``.pt`` or ``.pth`` file is for ``torch.load(weights_only=True)``, a
    ``.safetensors`` file for a part whose values are all tensors. Raises UsageError if the file exists or cannot be
    written, CheckpointError if the run has no such checkpoint or part.
    """
    if target.suffix not in (".pt", ".pth", ".safetensors"):
        raise UsageError(f"{target}: expected a file name that ends in .pt, .pth or .safetensors")
    if target.exists():
        raise UsageError(f"{target} already exists. Remove it, or choose a different file")
    checkpoint = choose(run, step, keep)
    content = unpacked(checkpoint.read())
    if not everything:
        part = _chosen(content, part, checkpoint.path.name)
    value = copied(content if part is None else content[part])  # torch.save writes all memory that a tensor shares
    beside = target.absolute().parent
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=beside, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder, target.name)
            if target.suffix == ".safetensors":
                _write_safetensors(temporary, value, target)
            else:
                torch.save(value, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            temporary.rename(target)
        fsync_directory(beside)
    except (OSError, RuntimeError) as error:  # torch turns system errors into RuntimeError
        raise UsageError(f"could not write {target}: {getattr(error, 'strerror', None) or error}") from error
    best = f" (the best: {_value(checkpoint)})" if step == "best" else ""
    return f"wrote {part or 'everything'} of checkpoint {checkpoint.step}{best} to {target}"


def _value(checkpoint: Checkpoint) -> str:
    metric = (checkpoint.best_rule() or "").rpartition(" ")[0]
    value = checkpoint.metric(metric)
    return f"after {counted(checkpoint.step, 'step')}" if value is None else f"{metric} {value:.6g}"


def _chosen(content: dict[str, Any], part: str | None, file: str) -> str:
    parts = [name for name, value in content.items() if isinstance(value, dict) and name not in RESERVED]
    if part is not None and part not in content:
        raise CheckpointError(f"{file} has no part {part!r}, only {', '.join(parts)}")
    if part is not None or "model" in parts:
        return part or "model"
    modules = [name for name in parts if hasattr(content[name], "_metadata")]
    if len(modules) != 1:
        raise CheckpointError(f"{file} has no part 'model'. Choose one with --part: {', '.join(parts)}")
    return modules[0]


def _write_safetensors(path: Path, value: Any, target: Path) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, torch.Tensor) for item in value.values()):
        raise UsageError(f"{target}: safetensors supports only parts whose values are all tensors. Use .pt")
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError(
            f"{target}: safetensors is not installed. Run `pip install safetensors`, or use .pt"
        ) from error
    # Cloned, because the format does not support tied tensors.
    save_file({name: tensor.clone() for name, tensor in value.items()}, path, metadata={"format": "pt"})
