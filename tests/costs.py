"""What each test costs: ``pytest --costs FILE`` writes its wall-clock and CPU seconds, a JSON object per line.

CPU seconds include those of every process that the test started and waited for, and of ranks that ``tests.ddp`` forked;
Slurm's daemons and their jobs are not among them.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ddp


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="append each test's wall-clock and CPU seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--costs"):
        config.pluginmanager.register(Costs(Path(file)))


class Costs:
    """Measures from a test's setup to its teardown, shared fixtures included where they are made."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        seconds, cpu_seconds = time.monotonic(), _cpu_seconds()
        result = yield
        cost = {"seconds": time.monotonic() - seconds, "cpu_seconds": _cpu_seconds() - cpu_seconds}
        with self._file.open("a") as file:
            file.write(json.dumps({"test": item.nodeid, **{name: round(cost[name], 2) for name in cost}}) + "\n")
        return result


def _cpu_seconds() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in times) + ddp.cpu_seconds
