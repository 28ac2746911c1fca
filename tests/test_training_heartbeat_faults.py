"""A rank's sign of life goes on whatever fails besides: one that ceased would be taken for a hang."""

from __future__ import annotations

import errno
import io
import os
import resource
import sys
import threading
from pathlib import Path

import pytest

from clusterddp.job import Watchdog
from clusterddp.process import RunningClock
from clusterddp.training.heartbeat import Heartbeat
from tests.waiting import wait_until


class Full(io.StringIO):
    """Standard error on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_stacks_of_a_rank_whose_time_is_over_are_explained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be working: nobody has ended it."""
    watchdog = Watchdog(step_s=0.1, start_s=0.1)
    heartbeat = Heartbeat(watchdog, lambda: 3, lambda: 2, lambda *_, **__: None, tmp_path / "collectives.json")
    heartbeat.begin()
    said = ""

    def explained() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "clusterddp: the stacks above are what this rank was at" in said

    try:
        wait_until(explained, "the explanation", timeout=20)
    finally:
        heartbeat.close()
    assert said.index("Timeout (") < said.index("most recent call first") < said.index("clusterddp: the stacks above")


def test_neither_a_full_disk_nor_too_many_open_files_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has something to say at each beat, and looks up what the main thread is at."""
    beats: list[dict[str, object]] = []
    enough = threading.Event()

    def send(event: str, **beat: object) -> None:
        beats.append(beat)
        if len([beat for beat in beats if "place" in beat]) == 3:
            enough.set()

    monkeypatch.setattr(RunningClock, "look", lambda self: setattr(self, "now", self.now + 1.0) or 5.0)
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(sys, "stderr", Full())
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    heartbeat = Heartbeat(Watchdog(step_s=0.1), lambda: 3, lambda: 2, send, Path("unused"))
    try:
        assert enough.wait(10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        heartbeat.close()
