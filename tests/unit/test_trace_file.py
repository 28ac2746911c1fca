"""What is stored of a profile: the trace as torch exported it, compressed."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.trace_file import BLOCK, store

EVENT = {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 150, "dur": 300, "tid": 1, "args": {}}
TRACE = json.dumps({"schemaVersion": 1, "traceEvents": [EVENT, EVENT], "traceName": "x"}, indent=1)


@pytest.mark.parametrize("cut", [0, 10, 200, -3])
def test_a_trace_that_is_cut_off_is_not_stored(cut: int, tmp_path: Path) -> None:
    """As by a full disk: torch does not say so."""
    target = RunDirectory(tmp_path).profile_file(0, 3, 7)
    with pytest.raises(RunDirectoryError, match="the trace is incomplete"):
        store(io.BytesIO(TRACE.encode()[:cut]), target)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("behind", ["", "\n", " " * (BLOCK - len(TRACE) - 1) + "\n\n"])
def test_the_trace_is_stored_unchanged(behind: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    target = RunDirectory(tmp_path).profile_file(0, 3, 7)
    text = TRACE + behind if len(behind) < 2 else TRACE[:-1] + behind[:-2] + "}" + behind[-1]
    store(io.BytesIO(text.encode()), target)
    assert gzip.decompress(target.read_bytes()).decode() == text
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert [path.stat().st_mode & 0o777 for path in (target.parent, target)] == [0o750, 0o640]
