"""``clusterddp tell RUN profile=20``: which orders and ranks are accepted, and what is printed of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.hostlist import ranks_in
from clusterddp.jobdef.job import MOST_PROFILED_RANKS, MOST_PROFILED_STEPS, ProfiledSteps
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.trace_file import table_file

HOW_TO_OPEN = "open a trace at https://ui.perfetto.dev, or its folder with TensorBoard (pip install torch-tb-profiler)"


def steps_in(order: str) -> int:
    """The steps of the order ``profile=20``, or ``profile``. UsageError if it is not of this form."""
    _, equals, text = order.partition("=")
    steps = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not equals:
        return ProfiledSteps.steps
    if not 1 <= steps <= MOST_PROFILED_STEPS:
        raise UsageError(f"{order}: expected a number of steps from 1 to {MOST_PROFILED_STEPS}, such as profile=20")
    return steps


def check_ranks(text: str) -> None:
    """UsageError unless the text names ranks, and not too many."""
    try:
        count = len(ranks_in(text))
    except ValueError as error:
        raise UsageError(f"--rank {text}: {error}") from error
    if count > MOST_PROFILED_RANKS:
        raise UsageError(f"--rank {text}: {count} ranks; expected at most {MOST_PROFILED_RANKS} at a time")


def line(run: RunDirectory, rank: int, values: Mapping[str, Any]) -> str:
    """Where the profile of a rank is, or why there is none; ``values``: of its event."""
    if "file" not in values:
        return f"rank {rank}: no profile: {values.get('reason', 'it has exited without one')}"
    first, last = values["step"], values["step"] + values["steps"] - 1
    trace = run.path / values["file"]
    return f"rank {rank}, steps {first} to {last}: {trace}\n  top operators: {table_file(trace).name}, beside it"
