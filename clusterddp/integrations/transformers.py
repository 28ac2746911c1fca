"""Hugging Face's Trainer: a callback that stops all ranks after the same step, lets the Trainer save, and requeues."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import clusterddp

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class SaveAndRequeue(TrainerCallback):
    """On a stop request, all ranks agree on a step. The Trainer saves after it, and ``train()`` raises Stopped.

    An evaluation is not interrupted.

    Call ``clusterddp.init()`` before the Trainer is made, which then uses its process group.

    Example: ``Trainer(model, arguments, train_dataset=dataset, callbacks=[SaveAndRequeue()])``
    """

    def __init__(self) -> None:
        self._stopping = False

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> Any:
        """All ranks get the same answer."""
        if clusterddp.stop_requested():
            self._stopping = control.should_save = True
        return control

    def on_save(self, *_: Any, **__: Any) -> None:
        """The checkpoint of this step has been written."""
        if self._stopping:
            clusterddp.requeue()


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in ``output_dir``, for ``train(resume_from_checkpoint=...)``, or None.

    The Trainer writes into the final folder, ``trainer_state.json`` last. A folder without that file is a save that was
    interrupted.

    Example: ``trainer.train(resume_from_checkpoint=newest_checkpoint("out/llama"))``
    """
    found = [(path, _CHECKPOINT.fullmatch(path.parent.name)) for path in Path(output_dir).glob("*/trainer_state.json")]
    steps = {int(match[1]): path.parent for path, match in found if match}
    return str(steps[max(steps)]) if steps else None
