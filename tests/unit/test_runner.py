"""``python -m tests``: what it runs, shows and keeps; a few tests that fail run once more, and are named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.cluster import unavailable
from tests.plugin import file_shares

REPOSITORY = Path(__file__).resolve().parents[2]
INI = "[pytest]\nmarkers = slurm\naddopts = -p no:hypothesispytest -p no:anyio\n"
TESTS = """
import pathlib
import pytest

@pytest.mark.slurm
def test_on_a_cluster():
    pass

@pytest.mark.parametrize("number", range({failing}))
def test_other(number):
    tried = pathlib.Path(f"tried-{{number}}")
    again = tried.exists()
    tried.touch()
    assert again and {right_then}
"""


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``python -m tests`` on the tests in a folder."""
    with start_tests(folder, *options) as runner:
        out, err = runner.communicate()
    return subprocess.CompletedProcess(runner.args, runner.returncode, out, err)


def start_tests(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests", *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("failing", "right_then", "code", "said"),
    [
        (1, True, 0, "passed only at the second try: test_some.py::test_other[0]"),
        (2, False, 1, "failed again: test_some.py::test_other[0], test_some.py::test_other[1]"),
        (5, True, 1, None),
    ],
)
def test_a_few_tests_that_fail_have_a_second_try_and_are_named(
    tmp_path: Path, failing: int, right_then: bool, code: int, said: str | None
) -> None:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_some.py").write_text(TESTS.format(failing=failing, right_then=right_then))
    done = run_tests(tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{failing} failed" in done.stdout, done.stdout
    assert ("once more, with nothing beside" in done.stdout) == (said is not None), done.stdout
    assert said is None or said in done.stdout, done.stdout


def test_arguments_reach_every_part_and_results_are_kept(tmp_path: Path) -> None:
    """What the tests took is what the next run expects; one JUnit file has all parts."""
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_some.py").write_text(TESTS.format(failing=1, right_then=True))
    done = run_tests(tmp_path, "-k", "test_on_a_cluster", "--seed", "7", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^expected from earlier runs: .*others 1 \d+ min", done.stdout)
    assert re.search(r"^slurm.* \| .*::test_on_a_cluster PASSED", done.stdout, re.MULTILINE)
    assert re.search(r"^others 1 \| seed: 7 ", done.stdout, re.MULTILINE)
    results = tmp_path / "build" / "tests"
    cases = ElementTree.parse(results / "junit.xml").getroot().iter("testcase")
    assert [case.get("name") for case in cases] == ["test_on_a_cluster"]
    (cost,) = map(json.loads, (results / "costs.jsonl").read_text().splitlines())
    assert cost["test"] == "test_some.py::test_on_a_cluster" and cost["part"].startswith("slurm")


DAEMON = """
import subprocess
import threading
import pytest

@pytest.mark.slurm
def test_on_a_cluster():
    with open("pipe", "w") as pipe:
        subprocess.Popen(["sleep", "600"], stdout=pipe, start_new_session=True)
    threading.Event().wait()
"""


@pytest.mark.skipif(unavailable() is not None, reason="needs the test cluster")
def test_no_daemon_outlives_a_runner_that_is_killed(tmp_path: Path) -> None:
    """Nor one in a session of its own, as those of the test clusters are."""
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_some.py").write_text(DAEMON)
    os.mkfifo(tmp_path / "pipe")
    with start_tests(tmp_path) as runner, (tmp_path / "pipe").open() as pipe:  # opened once the test opens it
        runner.kill()
        assert pipe.read() == ""  # at its end: no process has it open


def test_the_files_are_distributed_by_their_duration() -> None:
    """The longest first; a file stays whole, as its tests share fixtures."""
    tests = ["a::1", "a::2", "b::1", "c::1", "d::1"]
    assert file_shares(tests, {"a::1": 5, "a::2": 60, "b::1": 40, "c::1": 20}, 2) == [{"a"}, {"b", "c", "d"}]
