"""A crash at any moment of a sharded model's save loses no checkpoint that was promised."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.sharded.folder import ShardedCheckpoint, rank_file
from clusterddp.checkpoint.store import Checkpoints, incomplete
from clusterddp.checkpoint.transfer import unpacked
from clusterddp.errors import CheckpointError
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory
from tests.crash.recovery import Promised
from tests.crash.sharded_subject import RANKS, clients_of, save, shard
from tests.crash.subject import STEPS_PER_SAVE
from tests.crash.test_crash import ERRORS, Replay, Stories, place, some, stopped_training
from tests.crash.tracing import Subject, available

__all__ = ["place"]
pytestmark = [pytest.mark.timeout(1800), pytest.mark.product]


@pytest.fixture(scope="module")
def stories(place: Path) -> Iterator[Stories]:
    """Runs the scenario, with or without a fault."""
    if (reason := available()) is not None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(reason)
    subject = Subject("tests.crash.sharded_subject")
    yield Stories(subject, place / "story")
    subject.close()


def problem(path: Path, promised: Promised) -> str | None:
    """What is wrong with the run directory. None if a new attempt finds what was promised, and saves the next step."""
    try:
        _check(RunDirectory(path), promised)
    except (AssertionError, CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check(run: RunDirectory, promised: Promised) -> None:
    if "created" not in promised:
        run.create()
    number = run.create_attempt()
    assert number > promised.get("attempt", -1), f"attempt number {number} was used before"
    found = next(iter(Checkpoints(run, number, Keep(2)).candidates()), None)
    step = found.step if found else 0
    assert step >= promised.saved, f"the newest checkpoint is {step}, saved was {promised.saved}"
    if found is not None:
        _check_content(found)
    Checkpoints(run, number, Keep(2)).record_resume((found.attempt, found.step) if found else None)
    clients = clients_of(run, number, 2)
    save(clients, step + STEPS_PER_SAVE)
    for one in clients:
        one.close()
        one.free()
    newest = Checkpoints(run, run.create_attempt(), Keep(2)).candidates()[0]
    assert newest.step == step + STEPS_PER_SAVE
    _check_content(newest)
    left = [str(one.path) for one in incomplete(run)]
    assert not left, f"left over: {left}"


def _check_content(found: object) -> None:
    assert isinstance(found, ShardedCheckpoint)
    found.verify()
    for rank in range(RANKS):
        content = unpacked(file_format.read(found.path / rank_file(rank)))
        assert content["weight"].equal(shard(found.step, rank)), f"step {found.step} of rank {rank}"


def test_a_machine_crash_at_any_call_loses_no_checkpoint(stories: Stories, place: Path) -> None:
    replay = Replay(place / "story", place / "scratch", problem)
    assert list(itertools.islice(replay.problems(stories.recording), 20)) == []
    print(f"{replay.points} moments, {replay.states} states")


def test_a_kill_of_a_writer_or_of_the_ranks_at_any_call_loses_no_checkpoint(stories: Stories) -> None:
    wrong = []
    for moment in stories.moments:
        played = stories.kill(moment)
        if "killed by SIGKILL" not in played.trace:
            wrong.append(f"{moment}: never reached")
        elif found := problem(played.run, Promised.all(played.promises)):
            wrong.append(f"{moment}: {found}")
    print(f"{len(stories.moments)} moments")
    assert wrong == []


def test_an_error_of_any_call_stops_no_training_and_loses_no_checkpoint(stories: Stories) -> None:
    wrong = []
    cases = some([*itertools.product(stories.moments, ERRORS)], 1)
    for moment, error in cases:
        played = stories.fail(moment, error)
        failed = [what["not_saved"] for what in played.promises if "not_saved" in what]
        if len(failed) > 1:
            wrong.append(f"{error} at {moment}: several saves failed: {failed}")
        if found := stopped_training(played) or problem(played.run, Promised.all(played.promises)):
            wrong.append(f"{error} at {moment}: {found}")
    print(f"{len(cases)} cases")
    assert wrong == []
