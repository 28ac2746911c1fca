"""accelerate: saves into a folder that appears only when it is complete, and finds the newest one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from clusterddp import protocol

_STATE = re.compile(r"step-(\d+)")


def save_state(accelerator: Any, folder: str | os.PathLike[str], step: int) -> None:
    """Saves the state into ``folder/step-N``, which appears when all ranks have written. Collective.

    Args:
        accelerator: the script's ``Accelerator``.
        folder: the folder of the checkpoints.
        step: N, the number of optimizer steps so far.

    Example: ``save_state(accelerator, "out/net", step)``
    """
    attempt = os.environ.get(protocol.ATTEMPT, "0")
    temporary = Path(folder) / f".step-{step}.attempt-{attempt}"
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        temporary.rename(temporary.with_name(f"step-{step}"))
    accelerator.wait_for_everyone()


def newest_state(folder: str | os.PathLike[str]) -> tuple[str | None, int]:
    """The newest checkpoint in ``folder``, for ``accelerator.load_state``, and its step, or None and 0.

    Example: ``folder, step = newest_state("out/net")``
    """
    found = {int(match[1]): path for path in Path(folder).glob("*") if (match := _STATE.fullmatch(path.name))}
    step = max(found, default=0)
    return (str(found[step]) if found else None), step
