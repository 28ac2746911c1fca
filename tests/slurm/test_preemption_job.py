"""``clusterddp rehearse -p``: what its job finds on a real cluster, and what is concluded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import UsageError
from clusterddp.rehearsal.preemption_job import Observed, batch_script
from clusterddp.slurm.configuration import Preemption
from tests.cluster import Cluster

LOW = Preemption(partition="low", mode="REQUEUE", grace_s=20, kill_wait_s=30, hold_s=121)
FIRST = {"ranks": 2, "signalled": 2, "seconds": 0.02, "missing": []}
SECOND = {"time": 105.0}


def test_a_job_on_the_cluster_shows_working_signals_and_requeue(cluster: Cluster, runs: Path) -> None:
    """It leaves nothing behind: no job, no folder."""
    command = [cluster.python, "-m", "clusterddp", "rehearse", "-p", "low", "-N", "2"]
    done = cluster.run(command, cwd=runs, timeout=90)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert "low preempts with 20 s of notice" in done.stdout
    assert "TERM reached 2 of 2 ranks" in done.stdout
    assert [row[-1] for row in rows if "ok" in row] and not any("fails" in row for row in rows)
    assert "after the hold was lifted" in done.stdout
    assert list(runs.iterdir()) == []


def test_a_job_that_shows_no_problem_has_a_row_for_each_test() -> None:
    observed = Observed(LOW, FIRST, SECOND, 100.0, save_s=1.2)
    assert observed.problem is None
    assert [outcome for _, outcome, _ in observed.rows()] == ["known", "ok", "ok", "ok"]
    assert observed.rows()[-1][2] == "the job started 5.0 s after the hold was lifted"


@pytest.mark.parametrize(
    ("first", "second", "save_s", "words"),
    [
        ({}, {}, None, "the job did not start within an hour, or failed. See its state with sacct"),
        ({**FIRST, "signalled": 1}, SECOND, None, "does not reach every rank"),
        ({**FIRST, "missing": ["scontrol"]}, SECOND, None, "clusterddp wait --resubmit"),
        ({**FIRST, "requeue_error": "Requeue disabled"}, {}, None, "Requeue disabled"),
        (FIRST, SECOND, 30.0, "may not finish within the notice"),
    ],
)
def test_what_would_lose_a_run_is_named_with_its_remedy(
    first: dict[str, Any], second: dict[str, Any], save_s: float | None, words: str
) -> None:
    """One sentence each."""
    assert words in (Observed(LOW, first, second, save_s=save_s).problem or "")


@pytest.mark.parametrize("given", [("low\ntouch x", None, "/f"), (None, "a\rb", "/f"), (None, None, "/a\nb")])
def test_line_breaks_in_the_batch_script_are_refused(given: tuple[Any, Any, str]) -> None:
    """The rest of the line would be a command."""
    with pytest.raises(UsageError, match="not allowed in a batch script"):
        batch_script(given[0], given[1], 1, Path(given[2]), "python")
