"""pytest options of this project: ``--seed``, ``--costs``, ``--apart`` and ``--queue``.

CPU seconds include those of every process that the test started and waited for, and of ranks that ``tests.ddp`` forked;
with ``--apart`` those of all processes of the process namespace: of Slurm's daemons and of their jobs, too.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import WITH_CLUSTER, ddp

#: pytest's exit code.
_EXIT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("clusterddp")
    default = time.time_ns() % 1_000_000
    group.addoption("--seed", type=int, default=default, help="of the tests' random moments; default: by the clock")
    group.addoption("--costs", type=Path, metavar="FILE", help="append each test's wall-clock and CPU seconds to FILE")
    group.addoption(
        "--apart",
        action="store_true",
        help="of the tests that use the cluster; CPU seconds are those of the whole process namespace",
    )
    group.addoption(
        "--queue",
        type=Path,
        metavar="FOLDER",
        help="share the tests, file by file, with all processes given this folder",
    )
    group.addoption(
        "--before", type=Path, metavar="FILE", help="the costs of an earlier run: the longest file is first"
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (--seed)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing all tests takes 7 s of CPU."""
    if not config.getoption("--apart") or config.args_source is pytest.Config.ArgsSource.ARGS:
        return None
    folders = collection_path.relative_to(config.rootpath).parts
    return True if folders[0] == "tests" and not {*folders[1:2]} <= WITH_CLUSTER else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    random.seed(f"{item.config.getoption('--seed')}/{item.nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT] = int(exitstatus)


@pytest.hookimpl(tryfirst=True)  # while pytest's faulthandler still prints the stacks of a crash
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process at once, as the ranks do: what libraries tidy up at its end may crash (kineto in torch 2.13).

    Such a crash says nothing about the tests. So their exit code is written beside their costs before.
    """
    if _EXIT in config.stash:
        if costs := config.getoption("--costs"):
            costs.with_name("exit-code").write_text(str(config.stash[_EXIT]))
        if workers := sys.modules.get("clusterddp.data.workers"):  # Python would wait for them, as they ignore its TERM
            workers.close_workers()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_EXIT])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Lets one process of a queue collect after the other: the first compiles the test files for all.

    The tests and the modules that they import are of no interest to the collections of garbage that follow.
    """
    queue: Path | None = session.config.getoption("--queue")
    with queue.joinpath("collecting").open("w") if queue else nullcontext() as lock:
        if lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        gc.disable()
        result = yield
        gc.enable()
        gc.freeze()
        return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests of one file after another that no other process has taken from the queue; all without a queue."""
    queue: Path | None = session.config.getoption("--queue")
    if queue is None or session.config.option.collectonly or session.testsfailed:
        return None
    before = session.config.getoption("--before")
    seconds = {line["test"]: line["seconds"] for line in costs(before)} if before else {}
    tests = taken(queue, longest_first(session.items, seconds))
    item = next(tests, None)
    while item is not None:
        following = next(tests, None)  # whose fixtures are kept
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            raise session.Failed(session.shouldfail) if session.shouldfail else session.Interrupted(session.shouldstop)
        item = following
    return True


def taken(queue: Path, files: Sequence[Sequence[pytest.Item]]) -> Iterator[pytest.Item]:
    """The tests of the files that this process takes first, by creating an entry in ``queue``."""
    for number, tests in enumerate(files):
        try:
            (queue / str(number)).mkdir()
        except FileExistsError:
            continue
        yield from tests


def longest_first(items: Sequence[pytest.Item], seconds: dict[str, float]) -> list[list[pytest.Item]]:
    """The tests file by file, as those of a file share fixtures; the file that takes longest comes first.

    A test that ``seconds`` does not know counts as 1 s, a unit test as 0.1 s: ``tests/costs.jsonl`` has the long ones.
    """
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    lengths: dict[str, float] = defaultdict(float)
    for item in items:
        file = item.nodeid.partition("::")[0]
        files[file].append(item)
        lengths[file] += seconds.get(item.nodeid, 0.1 if "/unit/" in item.nodeid else 1)
    return [files[file] for file in sorted(files, key=lambda name: (-lengths[name], name))]


def costs(file: Path) -> list[dict[str, Any]]:
    """The lines of a file that ``--costs`` wrote; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures from setup to teardown, with the shared fixtures that are made meanwhile."""
    cpu_seconds = of_namespace if item.config.getoption("--apart") else of_children
    began, used = time.monotonic(), cpu_seconds()
    result = yield
    cost = {"seconds": time.monotonic() - began, "cpu_seconds": cpu_seconds() - used}
    if file := item.config.getoption("--costs"):
        with file.open("a") as lines:
            lines.write(json.dumps({"test": item.nodeid, **{name: round(cost[name], 2) for name in cost}}) + "\n")
    return result


def of_children() -> float:
    """CPU seconds of this process, of those that it waited for, and of forked ranks."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in times) + ddp.cpu_seconds


def of_namespace() -> float:
    """CPU seconds of all processes that /proc shows, and of those that they waited for."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
