"""The mark that shows that a run is done: which files and lines count."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Done, Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.submission import check_done
from clusterddp.supervisor import completion_marker
from tests.histories import view
from tests.wording import raises

BEGAN = 1_000_000.0
EVENTS = [{"time": BEGAN, "attempt": 0, "event": "started"}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose folder has a name that is a pattern, too."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "run[1]")
    run.create()
    return run


def looked(run: RunDirectory, mark: Done, *more: dict[str, Any], exited: bool = True) -> tuple[bool, str]:
    job = Job(name="x", module="x", device="cpu", gpus_per_node=2, done=mark)
    return completion_marker.look(run, job, view([*EVENTS, *more]), exited)


def test_a_file_counts_if_it_is_whole_and_not_older_than_the_run(run: RunDirectory, tmp_path: Path) -> None:
    """A path is relative to the ranks' folder; a pattern may match several."""
    mark = Done(file="out/epoch_*.pt")
    assert looked(run, mark) == (False, f"there is no file {tmp_path}/out/epoch_*.pt")
    first, second = tmp_path / "out" / "epoch_1.pt", tmp_path / "out" / "epoch_2.pt"
    first.parent.mkdir()
    first.write_bytes(b"PK\3\4 and no directory")
    assert looked(run, mark)[1].startswith(f"{first} does not count (truncated")
    first.write_bytes(b"")
    assert looked(run, mark) == (False, f"{first} does not count (empty)")
    with zipfile.ZipFile(second, "w") as file:
        file.writestr("a/data.pkl", "x")
    assert looked(run, mark) == (True, f"{second} exists")
    os.utime(second, (BEGAN - 1, BEGAN - 1))
    assert looked(run, mark) == (False, f"{second} does not count (it is older than this run)")


def test_a_mark_in_the_run_directory_may_be_empty(run: RunDirectory) -> None:
    """As of `touch`, or a folder."""
    (run.path / "training.done").touch()
    assert looked(run, Done(file="{run_dir}/*.done")) == (True, "training.done exists")


def test_a_folder_that_exists_before_the_run_is_no_mark(run: RunDirectory, tmp_path: Path) -> None:
    """It is as new as the newest file in it."""
    (tmp_path / "out-1").mkdir()
    (tmp_path / "out-1" / "last.pt").write_bytes(b"x")
    job = Job(name="x", module="x", done=Done(file="out-*"))
    with raises(UsageError):
        check_done(job)
    check_done(replace(job, done=Done(file="out-*/last.pt")))
    check_done(replace(job, done=Done(file="{run_dir}")))
    check_done(replace(job, done=Done(log="out-*")))
    check_done(replace(job, done=None))


def test_a_line_counts_in_the_newest_attempt_that_started_its_ranks(run: RunDirectory) -> None:
    """Of any rank, also one that a progress bar has ended."""
    mark = Done(log=r"^100%.* \d+ epochs completed")
    for attempt, text in ((0, "100% 3 epochs completed\n"), (1, "0%\n"), (2, None)):
        run.attempt_logs(attempt).mkdir(parents=True)
        if text is not None:
            (run.attempt_logs(attempt) / "rank-0.out").write_text(text)
    assert looked(run, mark) == (False, f"no line of the ranks' output matches '{mark.log}'")
    (run.attempt_logs(1) / "rank-1.err").write_bytes(b"50%\r\xff\r100% 3 epochs completed\r")
    assert looked(run, mark) == (True, "rank 1 printed '100% 3 epochs completed'")
    (run.attempt_logs(1) / "rank-0.out").write_text("  starting in 3 epochs completed" + "." * 200)
    assert looked(run, Done(log="3 epochs"))[1].endswith(f"printed 'starting in 3 epochs completed{'.' * 90}...'")


def test_a_line_before_the_first_step_does_not_count(run: RunDirectory) -> None:
    """The expression matches from the start, on both ranks."""
    logs, mark = run.attempt_logs(0), Done(log="epochs")
    logs.mkdir(parents=True)
    for rank in (0, 1):
        (logs / f"rank-{rank}.out").write_text("training for 90 epochs\n")
        (logs / f"rank-{rank}.err").write_text("")
    early = "rank 0 printed 'training for 90 epochs' before its first step, so this line does not count"
    assert looked(run, mark, exited=False) == (False, early)
    assert looked(run, mark)[0]  # all ranks have exited with code 0, which is not confirmed by this line
    first = {"time": BEGAN, "attempt": 0, "event": "steps_seen", "out": (logs / "rank-0.out").stat().st_size, "err": 0}
    assert looked(run, mark, first) == looked(run, mark, first, exited=False) == (False, early)
    read = [
        {"time": BEGAN, "attempt": 0, "event": name, "file": "a.pt"} for name in ("own_resume", "own_checkpoint_read")
    ]
    job = Job(name="x", module="x", done=mark)
    assert [
        completion_marker.confirms(job, view(events).attempt(0)) for events in (EVENTS, [read[1]], read, [first])
    ] == [
        False,
        False,
        True,
        True,
    ]
    assert completion_marker.confirms(replace(job, see_steps=False), view(EVENTS).attempt(0))
    with open(logs / "rank-0.err", "a") as file:
        file.write("90 epochs completed\n")
    assert looked(run, mark, first, exited=False) == (True, "rank 0 printed '90 epochs completed'")
