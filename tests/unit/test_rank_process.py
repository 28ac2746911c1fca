"""The state of a rank's process: what a forked child keeps of it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterddp.errors import Stopped
from clusterddp.messages.reports import Serving
from clusterddp.worker.rank_exit import Loop
from clusterddp.worker.rank_process import RankProcess


def test_a_forked_child_is_no_rank_and_its_parent_stays_one(
    process: RankProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports nothing, has no loop and no context, and a stop in it is its own."""
    calls: list[object] = []
    monkeypatch.setattr(Stopped, "on_raised", None)
    process.channel = cast(Any, SimpleNamespace(close=lambda: calls.append("closed"), send=calls.append))
    process.context = cast(Any, SimpleNamespace(in_forked_child=lambda: calls.append("forked")))
    process.steps = process.loop = object()
    process.training.loop = Loop(lambda: 1, 2)
    process.note_stops(calls.append)
    if (child := os.fork()) == 0:
        process.report(Serving())
        Stopped(1, "preempted")
        left = [process.channel, process.steps, process.loop, process.training.loop, process.stopped]
        os._exit(0 if calls == ["closed", "forked"] and not any(left) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert calls == [] and process.supervised and process.loop is process.steps is not None
    stopped = Stopped(1, "preempted")
    assert process.stopped is stopped and calls == [stopped]
