"""What a script's own loop reports when it stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterddp.errors import Stopped
from clusterddp.history.checkpoints import NoSave, Saved
from clusterddp.history.event import Reported
from clusterddp.training.script_loop import ScriptLoop
from clusterddp.worker.rank_process import RankProcess
from clusterddp.worker.resume_watch import ResumeWatch


def test_only_a_file_that_is_there_has_been_saved_and_it_is_told_once(tmp_path: Path) -> None:
    """A script may catch what ``requeue`` raises, and call it again at its next step."""
    told: list[Reported] = []
    agreement = cast(Any, SimpleNamespace(reason="preempted"))
    store = cast(Any, SimpleNamespace(rank=0, store=None))
    loop = ScriptLoop(RankProcess(), store, agreement, cast(Any, None), told.append)
    file = tmp_path / "last.pt"
    for _ in range(2):
        with pytest.raises(Stopped):
            loop.requeue(file)
    assert told == [NoSave(file=str(file))]
    file.touch()
    for _ in range(3):
        with pytest.raises(Stopped):
            loop.requeue(file)
    assert told == [NoSave(file=str(file)), Saved(file=str(file))]


@pytest.mark.parametrize(("opened", "items"), [(True, 7), (False, 0)])
def test_whether_the_save_was_read_still_counts_once_its_watch_has_ended(
    opened: bool, items: int, tmp_path: Path
) -> None:
    """A script may make steps before the loop of `continue_epoch`."""
    file, kept = tmp_path / "last.pt", dict[str, bytes]()
    file.touch()
    store = SimpleNamespace(set=lambda name, text: kept.update({name: text.encode()}), get=kept.__getitem__)
    agreement, heartbeat = SimpleNamespace(boundary=lambda: False), SimpleNamespace(begin=lambda: None)
    group = SimpleNamespace(rank=0, store=store)
    process = RankProcess()
    loop = ScriptLoop(process, cast(Any, group), cast(Any, agreement), cast(Any, heartbeat), process.report)
    process.resume_watch = ResumeWatch(str(file), process.report)
    if opened:
        file.read_bytes()
    for _ in range(2):
        loop.stop_requested()
    assert loop.items_done(7) == items
