"""Hugging Face's Trainer: a callback that stops all ranks together after a step, lets it save, and requeues."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from clusterddp.training.context import Context

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class SaveAndRequeue(TrainerCallback):
    """On a stop signal: the Trainer saves after the step that all ranks have agreed on, and ``train()`` raises Stopped.

    ``ctx`` is made before the Trainer, which then uses its process group. An evaluation is not interrupted.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._stopping = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """A boundary: all ranks get the same answer."""
        del args, state
        if self._ctx.stop_requested():
            self._stopping = control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The checkpoint of this step is written."""
        del args, state, control
        if self._stopping:
            self._ctx.requeue()


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """For ``train(resume_from_checkpoint=...)``: the newest checkpoint that was written to its end, None without one.

    The Trainer writes into the final folder, its ``trainer_state.json`` last; a folder without that is a save that was
    interrupted.
    """
    found = [(path, _CHECKPOINT.fullmatch(path.parent.name)) for path in Path(output_dir).glob("*/trainer_state.json")]
    steps = {int(match[1]): path.parent for path, match in found if match}
    return str(steps[max(steps)]) if steps else None
