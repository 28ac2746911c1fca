"""``clusterddp export``: writes a part of a checkpoint to files for other programs, without starting ranks.

safetensors files are copied piece by piece from the files of the checkpoint, so that a model of any size needs little
memory, and no torch. Only a ``.pt`` file needs torch, and the memory for the whole checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import RESERVED, Checkpoint
from clusterddp.checkpoint.file_format import Tensor
from clusterddp.checkpoint.sharded.folder import Chunk, ShardedCheckpoint, ShardedTensor, rank_file
from clusterddp.checkpoint.store import choose
from clusterddp.checkpoint.verified_file import VerifiedFile
from clusterddp.errors import CheckpointError, UsageError
from clusterddp.jobdef.job import Keep
from clusterddp.reporter import counted
from clusterddp.rundir.files import fsync_directory
from clusterddp.rundir.run_directory import RunDirectory

#: The most bytes of tensors in each file of a folder, unless one tensor is larger.
LARGEST_FILE = 5_000_000_000
#: The only file in a folder, or the one that names the file of each tensor, as on the Hugging Face Hub.
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TORCH = (".pt", ".pth")


def export(
    run: RunDirectory,
    target: Path,
    part: str | None = None,
    step: int | Literal["best"] | None = None,
    *,
    everything: bool = False,
    keep: Keep = Keep(),  # noqa: B008 (frozen)
    largest_file: int = LARGEST_FILE,
) -> str:
    """Writes a part of a checkpoint, or all of it, to the new file or folder ``target``. Returns the result in words.

    ``part``: None is ``model``, or the only module. ``step``: the checkpoint's. None is the newest. ``keep``: of the
    job definition, for the best. A ``.pt`` or ``.pth`` file is for ``torch.load(weights_only=True)``. A
    ``.safetensors`` file, or a folder with such files and an index, is for a part whose values are all tensors. Raises
    UsageError if the target exists or cannot be written, CheckpointError if the run has no such checkpoint or part.
    """
    if target.suffix not in (*_TORCH, ".safetensors", ""):
        raise UsageError(
            f"{target}: expected a file name that ends in .pt, .pth or .safetensors, or the name of a folder"
        )
    if target.exists():
        raise UsageError(f"{target} already exists. Remove it, or choose a different name")
    checkpoint = choose(run, step, keep)
    state = checkpoint.read_head().state
    if not everything:
        part = _chosen(state, part, checkpoint.path.name)
    beside = target.absolute().parent
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=beside, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder, target.name)
            if target.suffix in _TORCH:
                from clusterddp.checkpoint.torch_file import write_torch_file

                write_torch_file(checkpoint, part, temporary)
            else:
                names = _names_of_tensors(state if part is None else state[part], checkpoint, target)
                _write_safetensors(checkpoint, names, temporary, largest_file)
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


def _chosen(state: Mapping[str, Any], part: str | None, file: str) -> str:
    parts = [name for name, form in state.items() if _entries(form) is not None and name not in RESERVED]
    if part is not None and part not in state:
        raise CheckpointError(f"{file} has no part {part!r}, only {', '.join(parts)}")
    if part is not None or "model" in parts:
        return part or "model"
    modules = [name for name in parts if "$module" in state[name]]
    if len(modules) != 1:
        raise CheckpointError(f"{file} has no part 'model'. Choose one with --part: {', '.join(parts)}")
    return modules[0]


# --- the state as JSON, of which packing.py describes the forms


def _entries(form: Any) -> dict[Any, Any] | None:
    """The forms of a dict's values by their keys. None for a value that is not a dict."""
    if not isinstance(form, dict):
        return None
    kind: str
    value: Any
    kind, value = next(iter(form.items())) if len(form) == 1 else ("", None)
    if kind == "$module":
        return _entries(value[0])
    if kind in ("$dict", "$ordered"):
        return dict(value) if all(isinstance(key, str) for key, _ in value) else None
    return None if kind.startswith("$") else form


def _names_of_tensors(form: Any, checkpoint: Checkpoint, target: Path) -> dict[str, str]:
    """For each key of a part, the name of its tensor in the checkpoint."""
    entries = _entries(form)
    found = {key: one["$tensor"] for key, one in (entries or {}).items() if isinstance(one, dict) and "$tensor" in one}
    if entries is None or len(found) < len(entries):
        other = "Load the checkpoint with torch.distributed.checkpoint.HuggingFaceStorageReader"
        use = other if isinstance(checkpoint, ShardedCheckpoint) else "Use .pt"
        raise UsageError(f"{target}: safetensors supports only parts whose values are all tensors. {use}")
    # A tensor that was in a different order in memory, or on a GPU, has more than its name.
    return {key: one if isinstance(one, str) else one[0] for key, one in found.items()}


# --- the tensors in the checkpoint


def _tensors_of(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor]:
    """All tensors. In a checkpoint that is not sharded, each is one chunk in the file of rank 0."""
    if isinstance(checkpoint, ShardedCheckpoint):
        return checkpoint.manifest().tensors
    found = {}
    for name, entry in checkpoint.read_head().entries.items():
        shape = tuple(entry["shape"])
        found[name] = ShardedTensor(entry["dtype"], shape, None, (Chunk(0, (0,) * len(shape), shape),))
    return found


def _files_of(checkpoint: Checkpoint) -> Iterator[tuple[int, Path, file_format.Head]]:
    """The files with tensors, one after the other, because there may be more than a process may open."""
    if not isinstance(checkpoint, ShardedCheckpoint):
        yield 0, checkpoint.path, checkpoint.read_head()
        return
    for rank, expected in enumerate(checkpoint.manifest().files):
        yield rank, checkpoint.path / rank_file(rank), checkpoint.rank_head(rank, expected)


# --- safetensors


class _Place(NamedTuple):
    """Where a tensor begins in an exported file."""

    file: int
    start: int


def _write_safetensors(checkpoint: Checkpoint, names: Mapping[str, str], target: Path, largest_file: int) -> None:
    """Writes the tensors with these names, durably. A tied tensor is written under each of its names."""
    stored = _tensors_of(checkpoint)
    tensors = [
        Tensor(key, stored[name].dtype, stored[name].shape, _item_bytes(stored[name].dtype))
        for key, name in names.items()
    ]
    files: dict[Path, Sequence[Tensor]] = {target: tensors}
    if target.suffix == "":
        target.mkdir()
        files = _files_in(target, tensors, largest_file)
    places: dict[str, list[_Place]] = {}
    with ExitStack() as opened:
        for path, group in files.items():
            file = opened.enter_context(open(path, "xb", buffering=0)).fileno()
            opened.callback(os.fsync, file)
            for key, place in _begun(file, group).items():
                places.setdefault(names[key], []).append(place)
        _copy(checkpoint, stored, places)
    if target.suffix == "":
        fsync_directory(target)


def _files_in(folder: Path, tensors: Sequence[Tensor], largest_file: int) -> dict[Path, Sequence[Tensor]]:
    """The tensors of each file in a folder. With several files, writes their index."""
    groups: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(one.nbytes for one in groups[-1]) + tensor.nbytes > largest_file:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {folder / ONE_FILE: tensors}
    paths = [folder / f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {one.name: path.name for path, group in zip(paths, groups, strict=True) for one in group},
    }
    with open(folder / INDEX, "x") as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    return dict(zip(paths, groups, strict=True))


def _begun(file: int, tensors: Sequence[Tensor]) -> dict[str, _Place]:
    """Writes the header of a file, and gives the file its size. Returns the tensors' places."""
    starts, size = file_format.offsets(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, start in zip(tensors, starts, strict=True):
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, start + tensor.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beginning = struct.pack("<Q", len(text)) + text
    file_format.write_at(file, memoryview(beginning), 0)
    os.ftruncate(file, len(beginning) + size)
    return {tensor.name: _Place(file, len(beginning) + start) for tensor, start in zip(tensors, starts, strict=True)}


def _copy(checkpoint: Checkpoint, stored: Mapping[str, ShardedTensor], places: Mapping[str, Sequence[_Place]]) -> None:
    """Copies the tensors from each file of the checkpoint, from its beginning to its end. Verifies what it reads."""
    buffer = memoryview(bytearray(file_format.CHUNK))
    by_rank: dict[int, list[tuple[str, Chunk]]] = {}
    for name in places:
        for chunk in stored[name].chunks:
            by_rank.setdefault(chunk.rank, []).append((name, chunk))
    for rank, path, head in _files_of(checkpoint):
        spans = {name: head.entries[name]["data_offsets"] for name, _ in by_rank.get(rank, [])}
        with VerifiedFile(path, head, checkpoint.errors) as file:
            for name, chunk in sorted(by_rank.get(rank, []), key=lambda one: spans[one[0]][0]):
                start, stop = spans[name]
                run, stride, first = _layout(stored[name], chunk)
                for done in range(0, stop - start, len(buffer)):
                    piece = buffer[: min(len(buffer), stop - start - done)]
                    file.read_into(piece, start + done)
                    for place in places[name]:
                        _write_runs(place.file, piece, done, run, stride, place.start + first)


def _layout(tensor: ShardedTensor, chunk: Chunk) -> tuple[int, int, int]:
    """The place of a chunk in its tensor, in bytes: the size of a piece that is contiguous in both, the distance
    between the beginnings of two such pieces, and where the first begins."""
    dim = 0 if chunk.sizes == tensor.shape else max(tensor.dim or 0, 0)
    inner = _item_bytes(tensor.dtype) * math.prod(tensor.shape[dim + 1 :])
    whole, part, offset = (one[dim] if one else 1 for one in (tensor.shape, chunk.sizes, chunk.offsets or (0,)))
    return part * inner, whole * inner, offset * inner


def _write_runs(file: int, piece: memoryview, done: int, run: int, stride: int, first: int) -> None:
    """Writes the bytes of a chunk from ``done`` on to their places. ``run``, ``stride``: as ``_layout``."""
    while piece:
        row, within = divmod(done, run)
        part = piece[: run - within]
        file_format.write_at(file, part, first + row * stride + within)
        piece, done = piece[len(part) :], done + len(part)


def _item_bytes(dtype: str) -> int:
    """The bytes per element of a dtype with a name such as ``BF16``, ``F8_E4M3`` or ``BOOL``."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
