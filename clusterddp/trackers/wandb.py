"""W&B: one W&B run for all attempts, which gets each step once, when it is below a checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import wandb

from clusterddp.rundir.files import create_folder, exists, fsync_directory, fsync_file_system, rename
from clusterddp.rundir.ownership import delete_folder
from clusterddp.trackers.sent import Sent, write_sent


class WeightsAndBiases:
    """Online, W&B's server has the steps that it got. Offline, each attempt writes files into a folder below ``open``,
    which are complete once they are closed. Until then, W&B keeps up to 32 kB in memory. The folder is then moved out.
    One that was not closed is deleted, and its steps are written again."""

    #: Takes only steps that no later attempt repeats, because W&B cannot replace the values of a step.
    live = False

    def __init__(self, folder: Path, sent: Sent, attempt: int, options: Mapping[str, Any]) -> None:
        self._folder, self._open = folder, folder / "open"
        if sent.closing is not None:
            self._move_out(sent.closing)
        if exists(self._open):
            delete_folder(self._open)
        create_folder(self._open)
        sent = replace(sent, id=sent.id or secrets.token_hex(4), attempt=attempt, closing=None)
        write_sent(folder, sent)  # the id, before W&B's server has it
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(**options, id=sent.id, resume="allow", dir=self._open, settings=settings)
        self._offline = self._run.offline
        #: The first step that W&B lacks.
        self.first = sent.step if self._offline else self._run.starting_step
        self._sent = replace(sent, mode="offline" if self._offline else "online")
        write_sent(folder, self._sent)

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Sends the values of a step. ``at``: when they were logged."""
        self._run.log({**values, "_timestamp": at}, step=step)

    def flush(self, step: int | None) -> Sent:
        """Returns what W&B has for certain, which offline is only the content of closed files."""
        if step is not None and not self._offline:
            self._sent = replace(self._sent, step=step)
        return self._sent

    def close(self, step: int, clean: bool) -> Sent:
        """Waits until W&B has all values."""
        written = Path(self._run.dir).parent
        self._run.finish(exit_code=0 if clean else 1)
        self._sent = replace(self._sent, step=step)
        if self._offline:
            fsync_file_system(written)
            write_sent(self._folder, replace(self._sent, closing=written.name))
            self._move_out(written.name)
        return self._sent

    def _move_out(self, name: str) -> None:
        """Moves a complete folder to those that ``status`` lists for upload, unless that was done."""
        written = self._open / "wandb" / name
        if exists(written):
            rename(written, self._folder / name)
            fsync_directory(self._folder)
