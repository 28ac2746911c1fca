"""``submit --fork``: a new run that starts from a checkpoint of another run."""

from __future__ import annotations

import os
import shutil
import time
from typing import Literal

from clusterddp.checkpoint.store import Checkpoint, Checkpoints, choose
from clusterddp.errors import CheckpointError, RunDirectoryError
from clusterddp.events import sentence
from clusterddp.jobdef.job import Keep
from clusterddp.jobdef.load import load_resolved
from clusterddp.rundir.files import append_line, file_mode
from clusterddp.rundir.find import open_run
from clusterddp.rundir.run_directory import RunDirectory


def parse(text: str) -> tuple[RunDirectory, int | Literal["best"] | None]:
    """The run and the step (None: its newest checkpoint) of ``RUN``, ``RUN@STEP`` or ``RUN@best``.

    Raises RunDirectoryError if there is no such run.
    """
    path, at, step = text.rpartition("@")
    if not at or not (step.isdecimal() or step == "best") or RunDirectory(text).exists():
        path, step = text, ""
    try:
        run = open_run(path)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"--fork {text}: {error} (expected RUN, RUN@STEP or RUN@best)") from error
    return run, "best" if step == "best" else int(step) if step else None


def copy_checkpoint(text: str, into: RunDirectory) -> str:
    """Copies the checkpoint into a new run, as the checkpoint of an attempt 0 that never trained. Returns a message."""
    run, step = parse(text)
    source = choose(run, step, load_resolved(run.job_file).checkpoint.keep if step == "best" else Keep())
    number = into.create_attempt()
    checkpoints = Checkpoints(into, number, Keep())
    checkpoints.record_resume(None)
    temporary = checkpoints.temporary(source.step)
    try:
        shutil.copyfile(source.path, temporary)
        temporary.chmod(file_mode(temporary.parent))
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        Checkpoint(temporary, source.step, number).verify()
    except OSError as error:
        raise CheckpointError(f"cannot copy {source.path} into {into}: {error.strerror}") from error
    checkpoints.commit(temporary, source.step)
    event = {"attempt": number, "event": "forked", "step": source.step, "source": str(run)}
    append_line(into.events_file, {"time": time.time(), **event})
    return sentence(event) or ""
