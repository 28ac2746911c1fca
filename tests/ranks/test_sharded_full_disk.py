"""A disk that is full for a rank of a sharded model other than 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ddp
from tests.ranks.test_sharded_resume import SHARDED, events, state, train

pytestmark = pytest.mark.product

#: The writer of rank 1 finds a full disk if FULL is true of the step that it saves and the steps that are saved.
SITE = """
import errno, os
from pathlib import Path

def step_of(name):
    return int(name.removeprefix("step-")[:12])

def fsync(file, real=os.fsync):
    path = Path(os.readlink(f"/proc/self/fd/{file}"))
    if path.name.startswith(".rank-00001"):
        saved = [step_of(manifest.parent.name) for manifest in path.parents[1].glob("*/manifest.json")]
        if eval(os.environ["FULL"], {"step": step_of(path.parent.name), "saved": saved, "len": len}):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real(file)

os.fsync = fsync
"""


def train_on_full_disk(run_dir: Path, *options: object, full: str) -> ddp.Ranks:
    site = run_dir.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    path = f"{site}:{ddp.REPOSITORY}"
    out = run_dir.parent / "out"
    return ddp.run(SHARDED, run_dir, *options, ranks=2, folder=out, PYTHONPATH=path, FULL=full)


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:17]) for path in (run_dir / "checkpoints").iterdir())


def test_older_checkpoints_make_room_for_another_ranks_file(tmp_path: Path) -> None:
    """Rank 0 deletes one, and the next save succeeds."""
    trained = train_on_full_disk(tmp_path / "run", 10, "--every", 2, full="len(saved) > 2")
    assert events(tmp_path / "run", "room_made")[0]["deleted"] == [2]
    assert {event["reason"].partition(":")[0] for event in events(tmp_path / "run", "checkpoint_failed")} == {"rank 1"}
    assert saved_steps(tmp_path / "run")[-1] == 10
    assert state(trained, "end") == state(train(tmp_path / "whole", 10), "end")


def test_a_step_for_which_there_is_no_room_is_not_saved_and_training_continues(tmp_path: Path) -> None:
    trained = train_on_full_disk(tmp_path / "run", 6, "--every", 2, full="step == 4")
    assert events(tmp_path / "run", "room_made") == []
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint_failed")] == [4]
    assert saved_steps(tmp_path / "run") == [2, 6]
    assert state(trained, "end") == state(train(tmp_path / "whole", 6), "end")
