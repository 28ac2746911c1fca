"""What is stored of a profile: the trace as torch exported it, compressed, and the table of its operators."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import trace_file
from clusterddp.worker.trace_file import Operators, events, store, table_file


def span(
    name: str, begin: float, lasted: float, kind: str = "cpu_op", thread: int = 1, external: int = 0
) -> dict[str, Any]:
    args = {"External id": external} if external else {}
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": lasted, "tid": thread, "args": args}


#: Two steps. In microseconds, mm is for 300 + 200 in linear, and sum runs in another thread at the same time.
TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1},
    span("ProfilerStep#7", 0, 1000, "user_annotation"),
    span("linear", 100, 500, external=1),
    span("mm", 150, 300, external=2),
    span("cudaLaunchKernel", 200, 10, "cuda_runtime", external=2),
    span("ProfilerStep#8", 1000, 500, "user_annotation"),
    span("linear", 1000, 400, external=3),
    span("mm", 1100, 200, external=4),
    span("sum", 100, 600, thread=2, external=5),
]
GPU = [span("gemm", 300, 2000, "kernel", 7, external=2), span("gemm", 2400, 500, "kernel", 7, external=4)]


def text_of(recorded: list[dict[str, Any]]) -> str:
    return json.dumps({"schemaVersion": 1, "traceEvents": recorded, "traceName": "x"}, indent=1)


def table_of(recorded: list[dict[str, Any]]) -> list[str]:
    operators = Operators()
    for event in recorded:
        operators.add(event)
    return operators.text().splitlines()


def test_the_table_has_each_operators_own_time_without_that_of_the_operators_inside_it() -> None:
    """Threads run at the same time."""
    assert table_of(TRACE) == [
        "operators by self CPU time",
        "  share           ms    ms/step     calls  name",
        "  28.6%        0.600      0.300         2  ProfilerStep*",
        "  28.6%        0.600      0.300         1  sum",
        "  23.3%        0.490      0.245         2  mm",
        "  19.0%        0.400      0.200         2  linear",
        "   0.5%        0.010      0.005         1  cudaLaunchKernel",
    ]


def test_work_of_the_gpu_counts_for_the_operator_that_launched_it() -> None:
    lines = table_of([*TRACE, *GPU])
    assert lines[8:] == [
        "operators by self CUDA time",
        "  share           ms    ms/step     calls  name",
        " 100.0%        2.500      1.250         2  mm",
        "",
        "kernels by CUDA time",
        "  share           ms    ms/step     calls  name",
        " 100.0%        2.500      1.250         2  gemm",
    ]


def test_a_table_has_a_bounded_number_of_short_rows() -> None:
    """Names of C++ templates are long."""
    lines = table_of([span(f"op{number:02}" + "<T>" * 40, 100 * number, 1 + number) for number in range(30)])
    assert len(lines) == 2 + trace_file.ROWS + 1 and lines[-1].split() == ["0.055", "others"]
    assert max(map(len, lines)) < 120


@pytest.mark.parametrize("block", [1, 7, 100_000])
def test_events_are_found_wherever_the_blocks_end(block: int) -> None:
    text = text_of(TRACE)
    assert list(events(text[at : at + block] for at in range(0, len(text), block))) == TRACE


@pytest.mark.parametrize("cut", [10, 300, -3])
def test_a_trace_that_is_cut_off_is_not_stored(cut: int, tmp_path: Path) -> None:
    """As by a full disk: torch does not say so."""
    run = RunDirectory(tmp_path)
    target = run.profile_file(0, 3, 7)
    with pytest.raises(RunDirectoryError, match="the trace is not complete"):
        store(io.BytesIO(text_of(TRACE).encode()[:cut]), target)
    assert list(target.parent.iterdir()) == []


def test_the_trace_is_stored_unchanged_and_has_a_table_beside_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    target = RunDirectory(tmp_path).profile_file(0, 3, 7)
    store(io.BytesIO(text_of(TRACE).encode()), target)
    assert gzip.decompress(target.read_bytes()).decode() == text_of(TRACE)
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name, "rank-3-step-7.txt"]
    assert " linear" in table_file(target).read_text()
    assert [path.stat().st_mode & 0o777 for path in (target.parent, target)] == [0o750, 0o640]
