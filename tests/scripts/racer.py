"""Saves in a tight loop as one attempt after the other: ``python -m tests.scripts.racer RUN_DIRECTORY``.

Each line on standard input is the number of an attempt, which ends when it is superseded. Each line on standard output
is a checkpoint that is committed, and when it was (CLOCK_MONOTONIC).
"""

import json
import os
import sys
import tempfile
import time

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory


def content(attempt: int, step: int) -> bytes:
    """A checkpoint file that says who wrote it."""
    with tempfile.TemporaryFile(buffering=0) as file:
        state = {"attempt": attempt, "step": step}
        for _ in file_format.write(
            file.fileno(), file_format.head(file_format.described([]), state, {}), memoryview(b"")
        ):
            pass
        file.seek(0)
        return file.read()


def check(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless the file is whole; an AssertionError unless it is what its name says."""
    assert checkpoint.read().state == {"attempt": checkpoint.attempt, "step": checkpoint.step}


def run(directory: RunDirectory, attempt: int) -> None:
    """One attempt, until it is superseded."""
    checkpoints = Checkpoints(directory, attempt, Keep(1))
    parent = None
    for checkpoint in checkpoints.candidates()[:1]:
        try:
            check(checkpoint)
        except CheckpointError:
            checkpoints.check_newest()
            raise
        parent = (checkpoint.attempt, checkpoint.step)
    checkpoints.record_resume(parent)
    step = parent[1] if parent else 0
    while True:
        step += 1
        save(checkpoints, attempt, step)
        print(json.dumps({"attempt": attempt, "step": step, "at": time.monotonic()}), flush=True)


def save(checkpoints: Checkpoints, attempt: int, step: int) -> None:
    temporary = checkpoints.temporary(step)
    try:
        with open(temporary, "xb", buffering=0) as file:
            file.write(content(attempt, step))
            os.fsync(file.fileno())
        file_format.verify(temporary)
        checkpoints.commit(temporary, step)
        checkpoints.delete_old()
    except FileNotFoundError:
        checkpoints.check_newest()  # a newer attempt may clear away what this one was writing
        raise


def main() -> None:
    directory = RunDirectory(sys.argv[1])
    for line in sys.stdin:
        try:
            run(directory, int(line))
        except Superseded:
            pass


if __name__ == "__main__":
    main()
