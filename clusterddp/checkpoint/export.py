"""``clusterddp export``: a part of a checkpoint in a file of its own, for scripts that know nothing of clusterddp."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from clusterddp.checkpoint.restore import unpacked
from clusterddp.checkpoint.state import copied
from clusterddp.checkpoint.store import choose
from clusterddp.errors import CheckpointError, UsageError
from clusterddp.rundir.files import fsync_directory
from clusterddp.rundir.run_directory import RunDirectory


def export(run: RunDirectory, step: int | None, target: Path, part: str, everything: bool) -> str:
    """Writes a part of the newest checkpoint, or of that of ``step``; returns what was written, in words.

    ``.pt`` and ``.pth`` are for ``torch.load(weights_only=True)``, ``.safetensors`` for a part that is tensors by name.
    Raises UsageError when the file is there already or cannot be written, CheckpointError when the run has no such
    checkpoint or part.
    """
    if target.suffix not in (".pt", ".pth", ".safetensors"):
        raise UsageError(f"{target}: expected a name that ends in .pt, .pth or .safetensors")
    if target.exists():
        raise UsageError(f"{target} exists already: remove it, or name another file")
    checkpoint = choose(run, step)
    content = unpacked(checkpoint.read())
    if not everything and part not in content:
        parts = ", ".join(name for name, value in content.items() if isinstance(value, dict) and name != "progress")
        raise CheckpointError(f"{checkpoint.path.name} has no part {part!r}; it has {parts}")
    value = copied(content if everything else content[part])  # else torch would write the whole file's memory
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))  # where nobody else is
        temporary = folder / target.name
        if target.suffix == ".safetensors":
            _write_safetensors(temporary, value, target)
        else:
            torch.save(value, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.rename(target)
        fsync_directory(target.absolute().parent)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of the system's errors
        raise UsageError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return f"{target}: {'everything' if everything else part} of step {checkpoint.step}"


def _write_safetensors(path: Path, value: Any, target: Path) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, torch.Tensor) for item in value.values()):
        raise UsageError(f"{target}: only a part that is tensors by name fits safetensors; name a .pt file")
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError(f"{target}: `pip install safetensors` is needed to write it; or name a .pt file") from error
    # Tied tensors apart: that format has no sharing.
    save_file({name: tensor.clone() for name, tensor in value.items()}, path, metadata={"format": "pt"})
