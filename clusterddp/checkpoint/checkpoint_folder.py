"""Checkpoints without a run, for a training loop of the user's own: under any launcher, or under none."""

from __future__ import annotations

import os
from numbers import Integral
from types import TracebackType

import torch
import torch.distributed as dist

from clusterddp.checkpoint.client import CheckpointClient, NotSaved, Saved
from clusterddp.checkpoint.restore import restore
from clusterddp.checkpoint.state import Stateful, check_parts, load_state, state_of
from clusterddp.checkpoint.store import Checkpoint, Checkpoints
from clusterddp.errors import CheckpointError
from clusterddp.jobdef.job import Keep
from clusterddp.process import at_exit, cancel_at_exit
from clusterddp.reporter import say
from clusterddp.rundir.run_directory import RunDirectory


class CheckpointFolder:
    """Saves and restores named parts (modules, optimizers, whatever has a state_dict) in a folder.

    One per process, on every rank of the process group if there is one: rank 0 alone reads and writes. A process that
    makes one later, on the same folder, supersedes it, as an attempt of a run does.

    Args:
        path: the folder; made if it is not there.
        keep: how many of the newest checkpoints stay, or a ``Keep``.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int | Keep = 3) -> None:
        directory = RunDirectory(path)
        self._device = torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")
        self._checkpoints: Checkpoints | None = None
        self._restored = False
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        directory.create()
        keep = Keep(keep) if isinstance(keep, int) else keep
        attempt = directory.create_attempt()
        self._checkpoints = Checkpoints(directory, attempt, keep)
        gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._checkpoint_client = CheckpointClient(directory, attempt, keep, gpu)
        at_exit(self.close)

    def restore(self, **parts: Stateful) -> int:
        """Loads the newest whole checkpoint into the parts, and returns its step; 0 when there is none. Collective.

        Raises CheckpointError, on all ranks, when no checkpoint is whole, or when it lacks a part.
        """
        check_parts("restore", parts)
        restored = restore(self._checkpoints, self._device, _say_damaged)
        if self._checkpoints is not None and not self._restored:  # else the state is perhaps this process's own
            self._restored = True
            self._checkpoints.record_resume(None if restored is None else restored[1])
        if restored is None:
            return 0
        content, (_, step) = restored
        if missing := parts.keys() - content.keys():
            raise CheckpointError(f"checkpoint {step} has no {', '.join(sorted(missing))}; it has {', '.join(content)}")
        for name, part in parts.items():
            load_state(part, content[name])
        return step

    def save(self, step: int, **parts: Stateful) -> None:
        """Rank 0 copies the parts' state and goes on; the copy becomes durable in the background.

        Waits for the save before, if that is still under way. Raises CheckpointError when that one failed.
        """
        check_parts("save", parts)
        if not isinstance(step, Integral) or step < 0:
            raise ValueError(f"save({step!r}): expected the number of the step, an integer from 0 on")
        if self._checkpoints is not None:
            if not self._restored:
                raise RuntimeError("call restore() before save(): what is there already must not be passed by")
            self.wait()
            states = {name: state_of(part) for name, part in parts.items()}
            self._checkpoint_client.save(int(step), states, {}, urgent=False)

    def wait(self) -> Saved | None:
        """Returns once the last save is durable and verified. Raises CheckpointError when it failed."""
        if self._checkpoints is None or not self._checkpoint_client.busy:
            return None
        self._checkpoint_client.hurry()
        try:
            return self._checkpoint_client.result(wait=True)
        except NotSaved as error:
            raise CheckpointError(f"step {error.step} is not saved: {error}") from error

    def close(self) -> None:
        """Waits for the last save, and ends the writer."""
        cancel_at_exit(self.close)
        if self._checkpoints is not None:
            try:
                self.wait()
            finally:
                self._checkpoint_client.close()
                self._checkpoints = None

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _say_damaged(_: Checkpoint, reason: str) -> None:
    say(f"{reason}; trying the one before")
