"""W&B: one W&B run for all attempts, which gets each step once, when it is below a checkpoint."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import wandb

from clusterddp.trackers.sent import Sent, write_sent


class WeightsAndBiases:
    """Online, W&B's server knows which steps it has. Offline, each attempt writes a folder of files, which are complete
    once they are closed; a folder that was not is deleted, and its steps are written again."""

    #: Takes only steps that no later attempt repeats: W&B cannot replace the values of a step.
    live = False

    def __init__(self, folder: Path, sent: Sent, attempt: int, options: Mapping[str, Any]) -> None:
        if sent.unfinished is not None:
            shutil.rmtree(folder / Path(sent.unfinished).name, ignore_errors=True)
        sent = replace(sent, id=sent.id or secrets.token_hex(4), attempt=attempt, unfinished=None)
        write_sent(folder, sent)  # the id, before W&B's server has it
        self._run = wandb.init(
            **options,
            id=sent.id,
            resume="allow",
            dir=folder.parent,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._offline = self._run.offline
        #: The first step that W&B lacks.
        self.first = sent.step if self._offline else self._run.starting_step
        unfinished = Path(self._run.dir).parent.name if self._offline else None
        self._sent = replace(sent, mode="offline" if self._offline else "online", unfinished=unfinished)
        write_sent(folder, self._sent)

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Passes the values of a step on; ``at``: when they were logged."""
        self._run.log({**values, "_timestamp": at}, step=step)

    def flush(self, step: int | None) -> Sent:
        """Returns what W&B has for certain: offline, only what is in closed files."""
        if step is not None and not self._offline:
            self._sent = replace(self._sent, step=step)
        return self._sent

    def close(self, step: int, clean: bool) -> Sent:
        """Waits until W&B has everything."""
        self._run.finish(exit_code=0 if clean else 1)
        return replace(self._sent, step=step, unfinished=None)
