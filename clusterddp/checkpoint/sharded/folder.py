"""The folder of a sharded checkpoint: a file per rank, and the manifest that makes it a checkpoint. Without torch.

``checkpoints/step-<12 digits>.attempt-<n>/`` has ``rank-<5 digits>.safetensors`` of each rank (format:
``file_format.py``), and ``manifest.json``. Each rank's writer commits its own file. Rank 0's writer commits the
manifest, which names all files with their sizes and checksums, once all of them are durable. A folder without a
manifest is incomplete and never read. Deleting begins with the manifest.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.errors import CheckpointError
from clusterddp.rundir.files import (
    at,
    copy_file,
    create_folder,
    exists,
    fsync_directory,
    names_in,
    read_bytes,
    read_text,
    status,
    unlink,
    write_atomically,
)

FORMAT = "clusterddp sharded 1"
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{12})\.attempt-(\d{1,18})", re.ASCII)


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


class Chunk(NamedTuple):  # a load makes one for each tensor and rank
    """The part of a tensor that a rank's file has: where it begins in the tensor, and its shape."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of a sharded checkpoint: its dtype as safetensors names it, its whole shape, and its chunks.

    ``dim``: the dimension in which it is sharded. -1 for a DTensor that is replicated, None for an ordinary tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class RankFile:
    """A rank's file: its size, and a CRC-32 of its checksums (``file_format.Head.checksum``)."""

    bytes: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``. ``facts``: the metadata, as in the file of a run that is not sharded."""

    step: int
    attempt: int
    facts: Mapping[str, str]
    files: tuple[RankFile, ...]
    tensors: Mapping[str, ShardedTensor]

    def encoded(self) -> bytes:
        """The file's bytes."""
        return encoded(self.step, self.attempt, self.facts, self.files, encoded_tensors(self.tensors))

    @classmethod
    def decoded(cls, data: bytes) -> Manifest:
        """The inverse of ``encoded``. Raises Damaged."""
        try:
            content = json.loads(data)
            if content["format"] != FORMAT:
                raise file_format.Damaged(f"expected format {FORMAT!r}, got {content['format']!r}")
            beginning = _beginning(content["checksum"])
            if not data.startswith(beginning) or content["checksum"] != _checksum(data[len(beginning) :]):
                raise file_format.Damaged("checksum mismatch")
            tensors = {
                name: ShardedTensor(
                    one["dtype"],
                    tuple(one["shape"]),
                    one["dim"],
                    tuple(Chunk(rank, tuple(offsets), tuple(sizes)) for rank, offsets, sizes in one["chunks"]),
                )
                for name, one in content["tensors"].items()
            }
            files = tuple(RankFile(size, found) for _, size, found in content["files"])
            return cls(content["step"], content["attempt"], content["facts"], files, tensors)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise file_format.Damaged("it is not valid") from error


def encoded(step: int, attempt: int, facts: Mapping[str, str], files: Sequence[RankFile], tensors: str) -> bytes:
    """The bytes of ``manifest.json``. ``tensors``: from ``encoded_tensors``."""
    named = [[rank_file(rank), one.bytes, one.checksum] for rank, one in enumerate(files)]
    content = {"format": FORMAT, "step": step, "attempt": attempt, "facts": dict(facts), "files": named}
    rest = f'{json.dumps(content)[1:-1]}, "tensors": {tensors}}}\n'.encode()
    return _beginning(_checksum(rest)) + rest


def _beginning(checksum: int) -> bytes:
    """Of a manifest, before what the checksum is of."""
    return b'{"checksum": %d, ' % checksum


def _checksum(rest: bytes) -> int:
    """Of a manifest: of its JSON without the checksum."""
    return zlib.crc32(rest.rstrip(b"\n"), zlib.crc32(b"{"))


def encoded_tensors(tensors: Mapping[str, ShardedTensor]) -> str:
    """The manifest's JSON about tensors, which takes long with many, and stays the same from save to save."""
    return json.dumps(
        {
            name: {
                "dtype": one.dtype,
                "shape": one.shape,
                "dim": one.dim,
                "chunks": [[chunk.rank, chunk.offsets, chunk.sizes] for chunk in one.chunks],
            }
            for name, one in tensors.items()
        }
    )


class ShardedCheckpoint(Checkpoint):
    """A folder, which is a checkpoint once it has a manifest."""

    @property
    def manifest_file(self) -> Path:
        """The manifest's path."""
        return self.path / MANIFEST

    def manifest(self) -> Manifest:
        """The manifest, if all files are there with their sizes. Raises CheckpointError."""
        with self.errors():
            manifest = self._checked(lambda path: _read_manifest(path / MANIFEST))
            if (manifest.step, manifest.attempt) != (self.step, self.attempt):
                raise file_format.Damaged(f"its manifest is that of step {manifest.step}, attempt {manifest.attempt}")
            for rank, expected in enumerate(manifest.files):
                self._check_size(rank, expected)
        return manifest

    def _check_size(self, rank: int, expected: RankFile) -> None:
        try:
            size = status(self.path / rank_file(rank)).st_size
        except FileNotFoundError:
            raise file_format.Damaged(f"{rank_file(rank)} is missing") from None
        if size != expected.bytes:
            raise file_format.Damaged(f"{rank_file(rank)} has {size} bytes, expected {expected.bytes}")

    def rank_head(self, rank: int, expected: RankFile) -> file_format.Head:
        """All of a rank's file except its data, verified. Raises CheckpointError."""
        with self.errors():
            head = file_format.read_head(self.path / rank_file(rank))
            if head.checksum != expected.checksum:
                raise file_format.Damaged(f"{rank_file(rank)} is not the file that the manifest names")
        return head

    def read_head(self) -> file_format.Head:
        """Rank 0's head, which has the state without its tensors."""
        return self.rank_head(0, self.manifest().files[0])

    def read_state(self) -> tuple[Manifest, str, Any]:
        """The manifest, also as text, and the state without its tensors. Raises CheckpointError."""
        manifest = self.manifest()
        with self.errors():
            text = read_text(self.manifest_file)
        return manifest, text, self.rank_head(0, manifest.files[0]).state

    def verify(self) -> None:
        """Reads all files."""
        for rank, expected in enumerate(self.manifest().files):
            self.rank_head(rank, expected)
            with self.errors():
                try:
                    file_format.verify(self.path / rank_file(rank))
                except file_format.Damaged as error:
                    raise file_format.Damaged(f"{rank_file(rank)}: {error}") from error

    def check_header(self) -> None:
        """Reads the manifest, and compares the sizes of all files."""
        self.manifest()

    def read(self) -> NoReturn:
        """Not supported: no process holds all of a sharded checkpoint."""
        raise CheckpointError(
            f"{self.path.name} is the checkpoint of a sharded model, which may be too large for a .pt file. Export it "
            "to a .safetensors file, or to a folder"
        )

    def copy_to(self, target: ShardedCheckpoint) -> None:
        """Copies all files, durably. Raises CheckpointError, OSError."""
        manifest = self.manifest()
        create_folder(target.path)
        for rank in range(len(manifest.files)):
            copy_file(self.path / rank_file(rank), target.path / rank_file(rank))
        copied = replace(manifest, step=target.step, attempt=target.attempt)
        write_atomically(target.manifest_file, copied.encoded())
        fsync_directory(target.path.parent)

    def facts(self) -> Mapping[str, str]:
        """The metadata in the manifest."""
        return _read_manifest(self.manifest_file).facts

    @property
    def files(self) -> list[Path]:
        """All files, in the order in which they must be deleted. Empty if there is no such folder."""
        try:
            names = sorted(names_in(self.path), key=lambda name: (name != MANIFEST, name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [self.path / name for name in names]

    @property
    def is_complete(self) -> bool:
        """Whether it has a manifest. Raises OSError."""
        return exists(self.manifest_file)

    @property
    def size(self) -> int:
        return sum(status(file).st_size for file in self.files)

    def delete(self) -> None:
        """Deletes the manifest durably, and then all else."""
        if self.is_complete:
            unlink(self.manifest_file)
            fsync_directory(self.path)
        for file in self.files:
            unlink(file)
        remove_empty(self.path)


def _read_manifest(path: Path) -> Manifest:
    return Manifest.decoded(read_bytes(path))


def remove_empty(folder: Path) -> None:
    """Removes a folder, unless it has files."""
    with suppress(OSError), at(folder) as (name, above):
        os.rmdir(name, dir_fd=above)
