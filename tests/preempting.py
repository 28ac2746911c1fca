"""Preempts the runs of ``submit --local`` that a test starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from clusterddp.protocol import PREEMPT


@contextmanager
def preempting(*moments: int | float | str) -> Iterator[None]:
    """Preempts attempt 0 of runs that are started in the block at the first moment, attempt 1 at the second, and so on:
    after a step (120), after seconds (2.5), or once a rank prints a line that matches."""
    os.environ[PREEMPT] = json.dumps(moments)
    try:
        yield
    finally:
        del os.environ[PREEMPT]
