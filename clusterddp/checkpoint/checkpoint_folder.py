"""Checkpoints without a run directory: for a custom training loop under any launcher, or none."""

from __future__ import annotations

import os
from numbers import Integral

import torch
import torch.distributed as dist

from clusterddp.checkpoint.client import CheckpointClient, NotSaved, Saved
from clusterddp.checkpoint.restore import restore
from clusterddp.checkpoint.state import Stateful, check_parts, load_state, state_of
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import CheckpointError
from clusterddp.jobdef.job import Keep
from clusterddp.process import at_exit, cancel_at_exit
from clusterddp.rundir.run_directory import RunDirectory


class CheckpointFolder:
    """Saves and restores named parts in a folder, without a run: for a custom training loop under any launcher.

    A part is anything with ``state_dict()`` and ``load_state_dict()``. Create one CheckpointFolder on every rank, after
    the process group if there is one. Only rank 0 reads and writes. A process that creates one on the same folder later
    supersedes it, and the older one can no longer save. Use as a context manager, or call ``close()``.

    Args:
        path: the folder. Created if it does not exist.
        keep: the number of newest checkpoints to keep, or a ``Keep``.

    Raises:
        RunDirectoryError: the folder's ``private`` belongs to another user.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int | Keep = 3) -> None:
        directory = RunDirectory(path)
        only_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if only_nccl else torch.device("cpu")
        self._checkpoints: Checkpoints | None = None
        self._restored = False
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        directory.create()
        keep = Keep(keep) if isinstance(keep, int) else keep
        attempt = directory.create_attempt()
        self._checkpoints = Checkpoints(directory, attempt, keep)
        gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._checkpoint_client = CheckpointClient(directory, attempt, keep, gpu)
        at_exit(self.close)

    def restore(self, **parts: Stateful) -> int:
        """Loads the newest undamaged checkpoint into the parts. Collective: call it on all ranks, before ``save``.

        Args:
            parts: what to load, by the names given to ``save``.

        Returns:
            The checkpoint's step, which is the number of completed steps. 0 if there is no checkpoint.

        Raises:
            TypeError: a part has no ``load_state_dict()``.
            CheckpointError: on all ranks, if all checkpoints are damaged or the newest one lacks a part.
        """
        check_parts("restore", parts)
        restored = restore(self._checkpoints, self._device)
        if self._checkpoints is not None and not self._restored:  # a later call may load this process's own checkpoint
            self._restored = True
            self._checkpoints.record_resume(None if restored is None else restored[1])
        if restored is None:
            return 0
        content, (_, step) = restored
        if missing := parts.keys() - content.keys():
            raise CheckpointError(f"checkpoint {step} lacks {', '.join(sorted(missing))}. It has {', '.join(content)}")
        for name, part in parts.items():
            load_state(part, content[name])
        return step

    def save(self, step: int, **parts: Stateful) -> None:
        """Saves the parts: rank 0 copies their state and returns, and the copy is written in the background.

        Waits for the previous save first. Other ranks return at once.

        Args:
            step: the number of completed steps, 0 or more.
            parts: what to save, by name.

        Raises:
            TypeError: a part has no ``state_dict()``.
            ValueError: ``step`` is not an integer of at least 0.
            RuntimeError: ``restore()`` was not called.
            CheckpointError: the previous save failed, or the state cannot be saved.
            Superseded: a newer process uses the folder.
        """
        check_parts("save", parts)
        if not isinstance(step, Integral) or step < 0:
            raise ValueError(f"save({step!r}): expected the number of completed steps, an integer of at least 0")
        if self._checkpoints is not None:
            if not self._restored:
                raise RuntimeError("call restore() before save(), so that existing checkpoints are not ignored")
            self.wait()
            states = {name: state_of(part) for name, part in parts.items()}
            self._checkpoint_client.save(int(step), states, {}, urgent=False)

    def wait(self) -> Saved | None:
        """Waits until the last save is verified and durable.

        Returns:
            The save: its ``step``, the file's size in ``bytes``, when it was committed (``at``, monotonic clock, in
            seconds), and the steps of older checkpoints that a full disk has cost (``deleted``). None if no save was in
            progress.

        Raises:
            CheckpointError: the save failed. Earlier checkpoints are not affected.
            Superseded: a newer process uses the folder.
        """
        if self._checkpoints is None:
            return None
        try:
            return self._checkpoint_client.result(wait=True)
        except NotSaved as error:
            raise CheckpointError(f"step {error.step} was not saved: {error}") from error

    def close(self) -> None:
        """Waits for the last save and ends the writer process. Raises the errors of ``wait()``."""
        cancel_at_exit(self.close)
        if self._checkpoints is not None:
            try:
                self.wait()
            finally:
                self._checkpoint_client.close()
                self._checkpoint_client.free()
                self._checkpoints = None

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
