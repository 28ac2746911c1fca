"""Whole scripts as runs, undisturbed and preempted at given steps, and what both must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.trainings import events_of
from tests.waiting import differing, final_state, story

#: Makes a script's run stop at given steps.
HARNESS = Path(__file__).parent / "scripts" / "recipe.py"


def attempt(
    run: RunDirectory,
    script: Sequence[object],
    stops: Sequence[int] = (),
    *,
    ranks: int = 2,
    devices: int = 0,
    **environment: str,
) -> ddp.Ranks:
    """Starts the script, with its arguments, as the run's next attempt; attempt k stops in step ``stops[k]``."""
    steps = ",".join(map(str, stops))
    folder = run.path.parent / "out"
    return ddp.start(HARNESS, run.path, steps, *script, ranks=ranks, folder=folder, devices=devices, **environment)


def train_twice(
    folder: Path,
    script: Sequence[object],
    stops: Sequence[int],
    *,
    ranks: int = 2,
    devices: int = 0,
    **environment: str,
) -> tuple[RunDirectory, RunDirectory, str]:
    """The run preempted in each of these steps, the undisturbed one, and what rank 0 of that printed."""
    preempted, whole = RunDirectory(folder / "preempted"), RunDirectory(folder / "whole")
    said = attempt(whole, script, (), ranks=ranks, devices=devices, **environment).expect(0).output(0)
    for _ in stops:
        attempt(preempted, script, stops, ranks=ranks, devices=devices, **environment).expect(75)
    attempt(preempted, script, stops, ranks=ranks, devices=devices, **environment).expect(0)
    return preempted, whole, said


def check_same(preempted: RunDirectory, whole: RunDirectory, attempts: int = 2, doubt: str = "") -> None:
    """Its resumes are said to be exact, and are: logged values, and the final state of all parts, to the last bit.

    ``doubt``: what clusterddp cannot know of the script's loader, and says instead.
    """
    said = [[doubt]] if doubt else [[]]
    assert [event["inexact"] for event in events_of(preempted, "resumed")] == said * (attempts - 1), story(preempted)
    assert logged(preempted) == logged(whole)
    assert differing(final_state(preempted), final_state(whole)) == []
    assert not events_of(whole, "diverged"), story(whole)


def logged(run: RunDirectory) -> list[dict[str, Any]]:
    """The run's metrics, without what differs between attempts."""
    return [{name: value for name, value in line.items() if name not in ("time", "attempt")} for line in run.metrics()]
