"""What the writer process of one rank commits: its own file, and on rank 0 the manifest. Without torch."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.sharded.folder import RankFile, ShardedCheckpoint, rank_file
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.rundir.files import create_folder, fsync_directory, status, write_atomically


class RankFiles:
    """The files of one rank in the folders of sharded checkpoints. ``checkpoints``: of the rank's attempt."""

    def __init__(self, checkpoints: Checkpoints, rank: int) -> None:
        self._checkpoints, self.rank = checkpoints, rank

    def temporary(self, step: int) -> Path:
        """The file to write this rank's part to. Rank 0 first deletes what killed attempts have left.

        Raises FileExistsError for a step that is already saved, because its files would be replaced one by one.
        """
        checkpoint = self._checkpoints.sharded(step)
        if checkpoint.is_complete:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(checkpoint.path))
        if self.rank == 0:
            self._checkpoints.delete_incomplete(before=step)
        create_folder(checkpoint.path, exist_ok=True)
        fsync_directory(checkpoint.path.parent)
        return checkpoint.path / f".{rank_file(self.rank)}.{secrets.token_hex(4)}.tmp"

    def commit(self, temporary: Path) -> RankFile:
        """Gives a complete, synced file its final name, durably. Raises Superseded, and deletes the file."""
        path = temporary.with_name(rank_file(self.rank))
        self._checkpoints.rename(temporary, path)
        return RankFile(status(path).st_size, file_format.read_head(path).checksum)

    def commit_manifest(self, step: int, manifest: bytes) -> ShardedCheckpoint:
        """Makes the folder a checkpoint, durably. Raises Superseded, OSError."""
        checkpoint = self._checkpoints.sharded(step)
        self._checkpoints.check_newest()
        write_atomically(checkpoint.manifest_file, manifest)
        fsync_directory(checkpoint.path.parent)
        return checkpoint
