"""Which files belong to a script's checkpoint of several files, as the checkpoint itself names them. Without torch.

The ``.metadata`` of torch.distributed.checkpoint names all files of a checkpoint, with the place of each tensor in
them. It is written last. Its pickle is read without executing code. The index of a sharded safetensors model on the
Hugging Face Hub names its files.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clusterddp.rundir.files import open_binary

METADATA = ".metadata"
#: By how many seconds a file may be younger than the metadata that names it, on the clocks of different nodes.
_SKEW_S = 1.0


def why_not_all(files: Iterable[Path]) -> str | None:
    """Why the files of a folder are not all that its own records name. None if they are, or if it has no records."""
    files = list(files)
    for folder in {file.parent for file in files if file.suffix == ".distcp"}:
        if not (folder / METADATA).exists():
            return f"{METADATA}, which is written last, is missing"
    for file in files:
        if file.name == METADATA:
            why = _why_distributed(file)
        elif file.name.endswith(".index.json"):
            why = _why_index(file)
        else:
            continue
        if why is not None:
            return why
    return None


def _why_distributed(metadata: Path) -> str | None:
    try:
        with open_binary(metadata) as opened:
            named = _sizes(_Records(opened).load())
    except Exception as error:  # a damaged pickle raises errors of any type
        return f"{metadata.name} is damaged ({type(error).__name__})"
    written = metadata.stat().st_mtime
    for name, size in sorted(named.items()):
        try:
            found = (metadata.parent / name).stat()
        except FileNotFoundError:
            return f"{name} is missing, but {metadata.name} names it"
        if found.st_size < size:
            return f"{name} has {found.st_size} bytes, but {metadata.name} names {size}"
        if found.st_mtime > written + _SKEW_S:
            return f"{name} was written again after {metadata.name}"
    return None


def _sizes(metadata: Any) -> dict[str, int]:
    """The least size of each file that the metadata names."""
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


class _Record:
    """Stands for an object of any class: its fields."""

    def __new__(cls, *_: Any, **__: Any) -> _Record:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        """For a dict of another class."""

    def append(self, value: Any) -> None:
        """For a list of another class."""


class _Records(pickle.Unpickler):
    """Makes each object a ``_Record``, and calls nothing else."""

    def find_class(self, _module: str, name: str) -> Any:
        return type(name, (_Record,), {})


def _why_index(index: Path) -> str | None:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        missing = _missing(index.parent, sorted(names))
    except (ValueError, KeyError, TypeError, AttributeError):  # the index of another program
        return None
    return next((f"{name} is missing, but {index.name} names it" for name in missing), None)


def _missing(folder: Path, names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if not (folder / name).exists())
