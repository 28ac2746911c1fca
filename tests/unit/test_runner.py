"""``python -m tests``: what it runs, shows and keeps; a few tests that fail run once more, and are named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.cluster import unavailable

REPOSITORY = Path(__file__).resolve().parents[2]
INI = "[pytest]\nmarkers = slurm\naddopts = -p no:hypothesispytest -p no:anyio -p no:hydra_pytest\n"
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
        (1, "True", 0, ["passed only at the second try: test_some.py::test_other[0]"]),
        (
            2,
            "number",
            1,
            [
                "passed only at the second try: test_some.py::test_other[1]",
                "failed again: test_some.py::test_other[0]",
            ],
        ),
        (5, "True", 1, []),
    ],
    ids=["passed", "one failed again", "too many"],
)
def test_a_few_tests_that_fail_have_a_second_try_and_are_named(
    tmp_path: Path, failing: int, right_then: str, code: int, said: list[str]
) -> None:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_some.py").write_text(TESTS.format(failing=failing, right_then=right_then))
    done = run_tests(tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{failing} failed" in done.stdout, done.stdout
    assert ("once more, with nothing beside" in done.stdout) == bool(said), done.stdout
    assert all(words in done.stdout for words in said), done.stdout
    results = ElementTree.parse(tmp_path / "build" / "tests" / "junit.xml").getroot()
    assert len(list(results.iter("testcase"))) == 1 + failing + (failing if said else 0)


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


SHARED = """
import os
import time
import pytest

@pytest.fixture(scope="module")
def shared():
    print(f"{__name__} begins in {os.getpid()}")
    yield
    print(f"{__name__} ends")

@pytest.mark.parametrize("number", range(3))
def test_some(shared, number):
    print(__name__, number)
"""


def test_processes_with_one_queue_run_each_file_once_the_longest_first(tmp_path: Path) -> None:
    """A file's tests stay together, with the fixtures that they share."""
    names = [f"test_{letter}" for letter in "abcdef"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(SHARED)
    (tmp_path / "queue").mkdir()
    (tmp_path / "costs").write_text('{"test": "test_e.py::test_some[2]", "seconds": 99}\n')
    command = [sys.executable, "-m", "pytest", "-p", "tests.plugin", "-s", "-q", "--queue=queue", "--before=costs"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    running = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    ran = [re.findall(r"(test_\w)(?: (\d|begins|ends))", text) for text in said]
    assert sorted(ran[0] + ran[1]) == sorted(
        (name, what) for name in names for what in ("begins", "0", "1", "2", "ends")
    )
    assert any(one[:1] == [("test_e", "begins")] for one in ran)
    for one in ran:
        assert [name for name, _ in one] == [name for name, what in one if what == "begins" for _ in range(5)]
