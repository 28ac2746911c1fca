"""What a script's own loop reports when it stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterddp.errors import Stopped
from clusterddp.training.script_loop import ScriptLoop


def test_only_a_file_that_is_there_has_been_saved_and_it_is_told_once(tmp_path: Path) -> None:
    """A script may catch what ``requeue`` raises, and call it again at its next step."""
    told: list[str] = []
    agreement = cast(Any, SimpleNamespace(reason="preempted"))
    store = cast(Any, SimpleNamespace(rank=0, store=None))
    loop = ScriptLoop(store, agreement, cast(Any, None), lambda name, **values: told.append(f"{name} {values['file']}"))
    file = tmp_path / "last.pt"
    for _ in range(2):
        with pytest.raises(Stopped):
            loop.requeue(file)
    assert told == [f"no_save {file}"]
    file.touch()
    for _ in range(3):
        with pytest.raises(Stopped):
            loop.requeue(file)
    assert told == [f"no_save {file}", f"saved {file}"]
