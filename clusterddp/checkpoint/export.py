"""``clusterddp export``: writes a part of a checkpoint to a file for use without clusterddp."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from clusterddp.checkpoint.content import unpacked
from clusterddp.checkpoint.state import RESERVED, copied
from clusterddp.checkpoint.store import Checkpoint, choose
from clusterddp.errors import CheckpointError, UsageError
from clusterddp.jobdef.job import Keep
from clusterddp.reporter import counted
from clusterddp.rundir.files import fsync_directory
from clusterddp.rundir.run_directory import RunDirectory


def export(
    run: RunDirectory,
    target: Path,
    part: str | None = None,
    step: int | Literal["best"] | None = None,
    *,
    everything: bool = False,
    keep: Keep = Keep(),  # noqa: B008 (frozen)
) -> str:
    """Writes a part of a checkpoint, or all of it, to the file ``target``; returns what was written, in words.

    ``part``: None is ``model``, or the only module. ``step``: the checkpoint's; None is the newest. ``keep``: of the
    job definition, for the best. A ``.pt`` or ``.pth`` file is for ``torch.load(weights_only=True)``, a
    ``.safetensors`` file for a part whose values are all tensors. Raises UsageError if the file exists or cannot be
    written, CheckpointError if the run has no such checkpoint or part.
    """
    if target.suffix not in (".pt", ".pth", ".safetensors"):
        raise UsageError(f"{target}: expected a file name that ends in .pt, .pth or .safetensors")
    if target.exists():
        raise UsageError(f"{target} already exists: remove it, or choose another file")
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
        raise UsageError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
    words = f"{target}: {part or 'everything'} of checkpoint {checkpoint.step}"
    return f"{words}, the best: {_value(checkpoint)}" if step == "best" else words


def _value(checkpoint: Checkpoint) -> str:
    metric = (checkpoint.best_rule() or "").rpartition(" ")[0]
    value = checkpoint.metric(metric)
    return f"after {counted(checkpoint.step, 'step')}" if value is None else f"{metric} {value:.6g}"


def _chosen(content: dict[str, Any], part: str | None, file: str) -> str:
    parts = [name for name, value in content.items() if isinstance(value, dict) and name not in RESERVED]
    if part is not None and part not in content:
        raise CheckpointError(f"{file} has no part {part!r}; it has {', '.join(parts)}")
    if part is not None or "model" in parts:
        return part or "model"
    modules = [name for name in parts if hasattr(content[name], "_metadata")]
    if len(modules) != 1:
        raise CheckpointError(f"{file} has no part 'model': choose one by --part; it has {', '.join(parts)}")
    return modules[0]


def _write_safetensors(path: Path, value: Any, target: Path) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, torch.Tensor) for item in value.values()):
        raise UsageError(f"{target}: safetensors holds parts whose values are all tensors; choose a .pt file")
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError(f"{target}: safetensors is not installed: `pip install safetensors`, or use .pt") from error
    # Cloned, because the format does not support tied tensors.
    save_file({name: tensor.clone() for name, tensor in value.items()}, path, metadata={"format": "pt"})
