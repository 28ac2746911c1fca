"""A folder for the run of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has not been submitted yet."""
    return RunDirectory(tmp_path / "run")
