"""Several attempts on one folder at once: no state that the run continues from is ever lost, overwritten or skipped."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.store import Checkpoints, visible
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.ddp import REPOSITORY
from tests.scripts import racer

# ---- every order of single actions

#: How many attempts there are at most.
MOST = 5
EXAMPLES = 400 if "CLUSTERDDP_TEST_PRODUCT" in os.environ else 30


class Abandoned(BaseException):
    """Ends the thread of an attempt that is not moved any more."""


class Stepwise(Checkpoints):
    """Stands still each time the fence was found open, and after a checkpoint got its name: there, others may act."""

    def __init__(self, directory: RunDirectory, attempt: int, keep: Keep, stand: Callable[[], None]) -> None:
        super().__init__(directory, attempt, keep)
        self.stand, self.named = stand, 0

    def check_newest(self) -> None:
        super().check_newest()
        self.stand()

    def delete_old(self) -> None:
        self.named += 1
        self.stand()
        super().delete_old()


class Attempt:
    """An attempt that restores, records what it resumes from and then saves all the time, one action at a ``move``.

    One that is not moved for a while is late; one that is never moved again was killed. Its thread runs only within
    ``move``, so that a sequence of moves has one outcome.
    """

    def __init__(self, directory: RunDirectory, keep: Keep) -> None:
        self.number = directory.create_attempt()
        self.recorded = self.over = False
        self.parent: tuple[int, int] | None = None
        self.failure: BaseException | None = None
        self._directory = directory
        self._checkpoints = Stepwise(directory, self.number, keep, self._stand)
        self._keep = keep
        self._every = 10 - self.number  # what is left behind has the higher steps
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def state(self) -> tuple[int, int] | None:
        """The checkpoint (attempt, step) that its training is at, or would be at again after a crash."""
        if not self._checkpoints.named:
            return self.parent
        return self.number, self._checkpoints.named * self._every + (self.parent[1] if self.parent else 0)

    def move(self) -> None:
        """One action."""
        self._go.release()
        self._stands.acquire()
        if self.failure is not None:
            raise self.failure

    def abandon(self) -> None:
        """Ends the thread; its further actions in the folder do not matter."""
        self._abandoned = True
        self._go.release()
        self._thread.join()

    def _stand(self) -> None:
        self._stands.release()
        self._go.acquire()
        if self._abandoned:
            raise Abandoned

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                self._live()
        except (Superseded, Abandoned):
            pass
        except BaseException as error:
            self.failure = error
        self.over = True
        self._stands.release()

    def _live(self) -> None:
        found = self._checkpoints.candidates()
        self._stand()
        self.parent = self._restored(found)
        self._stand()
        self._checkpoints.record_resume(self.parent)
        self.recorded = True
        step = self.parent[1] if self.parent else 0
        while True:
            step += self._every
            self._stand()
            self._save(step)

    def _restored(self, found: list[Checkpoint]) -> tuple[int, int] | None:
        """The newest one, which must still exist, unless a newer attempt has continued from another."""
        if not found:
            return None
        try:
            racer.check(found[0])
        except CheckpointError:
            Checkpoints(self._directory, self.number, self._keep).check_newest()
            raise
        return found[0].attempt, found[0].step

    def _save(self, step: int) -> None:
        temporary, whole = self._checkpoints.temporary(step), racer.content(self.number, step)
        temporary.write_bytes(whole[:100])
        self._stand()
        if temporary.exists():
            temporary.write_bytes(whole)
        self._stand()
        try:
            self._checkpoints.commit(temporary, step)
            self._checkpoints.delete_old()
        except FileNotFoundError:
            self._checkpoints.check_newest()  # a newer attempt may clear away what this one was writing
            raise
        assert len(self._checkpoints.candidates()) <= self._keep.last


class Race(RuleBasedStateMachine):
    """What happens to the folder is all that any attempt does; what must hold is known without looking into it."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: list[Attempt] = []

    @initialize(last=st.sampled_from([1, 2]))
    def begin(self, last: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.directory = RunDirectory(self.folder.name)
        self.directory.create()
        self.keep = Keep(last)

    @precondition(lambda self: len(self.attempts) < MOST)
    @rule(before=st.integers(0, 15), after=st.integers(0, 10))
    def claim(self, before: int, after: int) -> None:
        """The next attempt starts and makes some actions; the previous one was at any point."""
        self.move(0, before)
        self.attempts.append(Attempt(self.directory, self.keep))
        self.move(0, after)

    @rule(back=st.integers(0, MOST), moves=st.integers(1, 3))
    def move(self, back: int, moves: int) -> None:
        """The attempt ``back`` before the newest one continues."""
        for attempt in self.attempts[::-1][back : back + 1]:
            for _ in range(moves):
                if not attempt.over:
                    attempt.move()
                    self.check()

    @invariant()
    def check(self) -> None:
        """An attempt that started now would resume where the run is: its newest attempt that took a step says where.

        So nothing of that attempt is lost, and nothing that a superseded one wrote counts.
        """
        if not self.attempts:
            return
        newest = Checkpoints(self.directory, len(self.attempts), self.keep)
        found = newest.candidates()
        expected = next((attempt.state for attempt in reversed(self.attempts) if attempt.recorded), None)
        assert [(one.attempt, one.step) for one in found[:1]] == ([expected] if expected else [])
        for checkpoint in visible(self.directory):
            racer.check(checkpoint)

    def teardown(self) -> None:
        for attempt in self.attempts:
            attempt.abandon()
        if self.attempts:
            self.folder.cleanup()


def test_concurrent_attempts_never_lose_the_runs_position() -> None:
    """Claims, restores, half-written files, fence checks, renames and deletions of up to five attempts in any order."""
    run_state_machine_as_test(Race, settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None))


# ---- two processes

#: How many attempts are claimed while two processes save.
CLAIMS = 40


class Racer:
    """A process that saves as the attempts that it is given, one after the other, as fast as it can."""

    def __init__(self, directory: RunDirectory) -> None:
        command = [sys.executable, "-m", "tests.scripts.racer", str(directory)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=REPOSITORY, **pipes)
        self.commits: list[dict[str, Any]] = []

    def begin(self, attempt: int) -> None:
        print(attempt, file=self.process.stdin, flush=True)

    def wait_for_commits(self, attempt: int, number: int) -> None:
        """Until the attempt has committed ``number`` checkpoints."""
        while sum(commit["attempt"] == attempt for commit in self.commits) < number:
            assert self._read(), f"the racer ended with {self.process.wait()} before attempt {attempt} had committed"

    def finish(self) -> int:
        """Tells it that there are no more attempts, and waits for it to exit; returns the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            self.commits.append(json.loads(line))
        return bool(line)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.fixture
def racers(directory: RunDirectory) -> Iterator[list[Racer]]:
    started = [Racer(directory) for _ in range(2)]
    yield started
    for one in started:
        one.process.kill()
        one.process.wait()


def gone_on_from(directory: RunDirectory, attempt: int) -> dict[int, int]:
    """The attempts that an attempt's state comes from, each with the step that was gone on from."""
    steps = {}
    while (parent := (read_json(directory.resume_record(attempt)) or {}).get("parent")) is not None:
        attempt = parent["attempt"]
        steps[attempt] = parent["step"]
    return steps


def test_two_processes_that_save_in_one_folder_lose_nothing_that_was_committed(
    directory: RunDirectory, racers: Any
) -> None:
    """Attempts are claimed while the previous one saves: each resumes from all that was committed before its claim."""
    pick = random.Random(0)
    claimed_at = []
    for number in range(CLAIMS):
        claimed_at.append(time.monotonic())
        assert directory.create_attempt() == number
        racers[number % 2].begin(number)
        racers[number % 2].wait_for_commits(number, pick.choice([0, 1, 2, 3]))
    claimed_at.append(time.monotonic())
    directory.create_attempt()
    assert [one.finish() for one in racers] == [0, 0]

    newest = Checkpoints(directory, CLAIMS, Keep(1))
    newest.record_resume(next((found.attempt, found.step) for found in newest.candidates()))
    recorded = [number for number in range(CLAIMS + 1) if directory.resume_record(number).exists()]
    commits = [commit for one in racers for commit in one.commits]
    safe = [commit for commit in commits if commit["at"] < claimed_at[commit["attempt"] + 1]]
    assert len({commit["attempt"] for commit in safe}) > CLAIMS / 2
    for number in recorded:
        steps = gone_on_from(directory, number)
        lost = [one for one in safe if one["attempt"] < number and steps.get(one["attempt"], 0) < one["step"]]
        assert not lost, f"attempt {number} resumes from {steps}"
    for checkpoint in visible(directory):
        racer.check(checkpoint)
