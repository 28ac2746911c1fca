"""A folder for the run of a test, and ranks that start quickly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory

QUICK_START = Path(__file__).parents[1] / "quick_start"


@pytest.fixture(autouse=True, scope="module")
def _quick_start() -> Iterator[None]:
    """What the tests start does not import torch._dynamo before something needs it."""
    with pytest.MonkeyPatch.context() as patch:
        if "CLUSTERDDP_TEST_PRODUCT" not in os.environ:
            patch.setenv("PYTHONPATH", str(QUICK_START), prepend=os.pathsep)
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has not been submitted yet."""
    return RunDirectory(tmp_path / "run")
