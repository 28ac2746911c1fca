"""A rank's heartbeat continues through any other failure: a missing one would count as a hang."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.jobdef.job import Watchdog
from clusterddp.reporter import say
from clusterddp.training import heartbeat as heartbeat_module
from clusterddp.training.heartbeat import Heartbeat, WatchedSteps
from tests.waiting import wait_until

#: A separate process: poll(2) fails in all threads of a process that may have no open files.
WITHOUT_FILES = """
import os, resource, threading
from pathlib import Path
from clusterddp.jobdef.job import Watchdog
from clusterddp.messages.reports import Alive
from clusterddp.process import RunningClock
from clusterddp.training.heartbeat import Heartbeat, WatchedSteps

beats, enough = [], threading.Event()

def send(report):
    beats.extend([report] if isinstance(report, Alive) else [])
    if len(beats) == 3:
        enough.set()

RunningClock.look = lambda self: setattr(self, "now", self.now + 1.0) or 5.0
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
heartbeat = Heartbeat(Watchdog(step_s=0.1), WatchedSteps(lambda: 3, lambda: 2), send, Path("unused"))
os._exit(0 if enough.wait(30) else 1)
"""


def test_the_stacks_of_a_rank_that_timed_out_are_explained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be working: nobody has ended it."""
    explained = threading.Event()
    monkeypatch.setattr(heartbeat_module, "say", lambda words: (say(words), explained.set()))
    watchdog = Watchdog(step_s=2, start_s=0.1)  # the stacks are written long before the next heartbeat
    heartbeat = Heartbeat(
        watchdog, WatchedSteps(lambda: 3, lambda: 2), lambda *_, **__: None, tmp_path / "collectives.json"
    )
    heartbeat.begin()
    try:
        assert explained.wait(60)
    finally:
        heartbeat.close()
    said = capfd.readouterr().err  # once: what is written while pytest reads is lost
    assert said.index("Timeout (") < said.index("most recent call first") < said.index("clusterddp: the stacks above")


@pytest.mark.parametrize("then", [lambda heartbeat: heartbeat._set_timer(600), lambda heartbeat: heartbeat.close()])
def test_stacks_written_just_before_a_step_is_completed_or_the_training_ends_are_explained(
    then: Callable[[Heartbeat], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between two looks of the heartbeat."""
    heartbeat = Heartbeat(
        None, WatchedSteps(lambda: 3, lambda: 2), lambda *_, **__: None, tmp_path / "collectives.json"
    )
    heartbeat._set_timer(0.01)
    wait_until(lambda: time.monotonic() > heartbeat._stacks_at, "the timeout")
    then(heartbeat)
    heartbeat.close()
    assert capfd.readouterr().err.count("clusterddp: the stacks above were written") == 1


def test_neither_a_full_disk_nor_too_many_open_files_stop_it(tmp_path: Path) -> None:
    """It has something to report at each heartbeat, and looks up where the main thread is."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", WITHOUT_FILES], cwd=tmp_path, stderr=full, timeout=60)
    assert done.returncode == 0
