"""``clusterddp drill``: what it finds on a real cluster, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.drill import drill_script, report, verdict
from clusterddp.errors import UsageError
from clusterddp.slurm.configuration import Preemption
from tests.cluster import Cluster

LOW = Preemption(partition="low", mode="REQUEUE", grace_s=20, kill_wait_s=30, hold_s=121)
FIRST = {"ranks": 2, "signalled": 2, "seconds": 0.02, "missing": []}
SECOND = {"time": 105.0}


def test_a_drill_on_the_cluster_reports_working_signals_and_requeue(cluster: Cluster, runs: Path) -> None:
    """It leaves nothing behind: no job, no folder."""
    done = cluster.run([cluster.python, "-m", "clusterddp", "drill", "-p", "low", "-N", "2"], cwd=runs, timeout=90)
    assert "low preempts with 20 s of notice" in done.stdout
    assert "TERM reached 2 of 2 ranks" in done.stdout
    assert "requeue   works. The job started" in done.stdout
    assert done.stdout.endswith("verdict   safe\n")
    assert list(runs.iterdir()) == []


def test_the_notice_is_compared_with_the_last_save() -> None:
    """As printed."""
    assert (
        report(LOW, FIRST, SECOND, 100.0, save_s=1.2)[-1] == "verdict   low gives 20 s. Your last save took 1.2 s: safe"
    )


@pytest.mark.parametrize(
    ("first", "second", "save_s", "words"),
    [
        ({}, {}, None, "the job did not start within an hour, or failed. See its state with sacct"),
        ({**FIRST, "signalled": 1}, SECOND, None, "does not reach every rank"),
        ({**FIRST, "missing": ["scontrol"]}, SECOND, None, "clusterddp wait --resubmit"),
        ({**FIRST, "requeue_error": "Requeue disabled"}, {}, None, "Requeue disabled"),
        (FIRST, SECOND, 30.0, "a save may not finish within the notice"),
    ],
)
def test_what_would_lose_a_run_is_named_with_its_remedy(
    first: dict[str, Any], second: dict[str, Any], save_s: float | None, words: str
) -> None:
    """One sentence each."""
    assert words in (verdict(LOW, first, second, save_s) or "")


@pytest.mark.parametrize("given", [("low\ntouch x", None, "/f"), (None, "a\rb", "/f"), (None, None, "/a\nb")])
def test_line_breaks_in_the_batch_script_are_refused(given: tuple[Any, Any, str]) -> None:
    """The rest of the line would be a command."""
    with pytest.raises(UsageError, match="not allowed in a batch script"):
        drill_script(given[0], given[1], 1, Path(given[2]), "python")
