"""pytest options of this project: ``--seed``, ``--costs`` and ``--share``.

CPU seconds include those of every process that the test started and waited for, and of ranks that ``tests.ddp`` forked.
Slurm's daemons and their jobs are not included.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ddp


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("clusterddp")
    default = time.time_ns() % 1_000_000
    group.addoption("--seed", type=int, default=default, help="of the tests' random moments; default: by the clock")
    group.addoption("--costs", type=Path, metavar="FILE", help="append each test's wall-clock and CPU seconds to FILE")
    group.addoption("--share", metavar="I/N", help="run the I-th of N shares of the test files")
    group.addoption("--before", type=Path, metavar="FILE", help="the costs of an earlier run, to make shares equal")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (--seed)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    random.seed(f"{item.config.getoption('--seed')}/{item.nodeid}")


@pytest.hookimpl(trylast=True)  # after the selection by marks and names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        number, shares = map(int, share.split("/"))
        before = config.getoption("--before")
        seconds = {line["test"]: line["seconds"] for line in costs(before)} if before else {}
        files = file_shares([item.nodeid for item in items], seconds, shares)[number - 1]
        dropped = [item for item in items if _file(item.nodeid) not in files]
        items[:] = [item for item in items if _file(item.nodeid) in files]
        config.hook.pytest_deselected(items=dropped)


def file_shares(tests: list[str], seconds: dict[str, float], shares: int) -> list[set[str]]:
    """The files of ``tests`` in shares that take about as long: the longest file first, to the share with the least.

    A test that ``seconds`` does not know counts as 10 s, a unit test as 0.1 s.
    """
    lengths: dict[str, float] = defaultdict(float)
    for test in tests:
        lengths[_file(test)] += seconds.get(test, 0.1 if "/unit/" in test else 10)
    totals, files = [0.0] * shares, [set[str]() for _ in range(shares)]
    for file in sorted(lengths, key=lambda name: (-lengths[name], name)):
        least = totals.index(min(totals))
        totals[least] += lengths[file]
        files[least].add(file)
    return files


def costs(file: Path) -> list[dict[str, Any]]:
    """The lines of a file that ``--costs`` wrote; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _file(test: str) -> str:
    return test.partition("::")[0]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures from setup to teardown, with the shared fixtures that are made meanwhile."""
    seconds, cpu_seconds = time.monotonic(), _cpu_seconds()
    result = yield
    cost = {"seconds": time.monotonic() - seconds, "cpu_seconds": _cpu_seconds() - cpu_seconds}
    if file := item.config.getoption("--costs"):
        with file.open("a") as lines:
            lines.write(json.dumps({"test": item.nodeid, **{name: round(cost[name], 2) for name in cost}}) + "\n")
    return result


def _cpu_seconds() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in times) + ddp.cpu_seconds
