"""``clusterddp tell RUN profile=20``: which orders and ranks are accepted, and what is printed of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.hostlist import ranks_in
from clusterddp.jobdef.job import MOST_PROFILED_RANKS
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.trace_file import table_file

HOW_TO_OPEN = "open a trace at https://ui.perfetto.dev, or its folder with TensorBoard (pip install torch-tb-profiler)"


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
