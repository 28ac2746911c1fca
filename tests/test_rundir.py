"""The run directory: attempts, histories, and files that are whole or absent."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clusterddp.checkpoints import lineage
from clusterddp.errors import RunDirectoryError
from clusterddp.launch.progress import Progress
from clusterddp.launch.status import end_for_good
from clusterddp.launch.verdict import RankEnd
from clusterddp.rundir import (
    RunDirectory,
    append_line,
    drop_torn_line,
    last_line,
    make_folder,
    read_json,
    read_lines,
    write_atomically,
    write_json,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def test_attempts_are_numbered_from_zero_without_gaps_or_doubles(run: RunDirectory) -> None:
    """Many processes that claim at once get different numbers: the exclusive mkdir decides."""
    claimed: list[int] = []
    threads = [threading.Thread(target=lambda: claimed.append(run.create_attempt())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(8))
    assert run.newest_attempt() == 7


def test_no_attempt_before_the_first(tmp_path: Path) -> None:
    """A run that does not exist has no attempts, events, metrics or outcome."""
    run = RunDirectory(tmp_path / "none")
    assert (run.exists(), run.attempts(), run.events(), run.metrics(), run.outcome()) == (False, [], [], [], None)


def test_private_is_closed_to_others(run: RunDirectory) -> None:
    """Tokens and records are the owner's."""
    assert run.private.stat().st_mode & 0o777 == 0o700


def test_metrics_redone_by_a_later_attempt_do_not_count(run: RunDirectory) -> None:
    """Attempt 1 resumed at 3: attempt 0's steps 3 and 4 are history that was thrown away."""
    for attempt, steps in ((0, range(5)), (1, range(3, 7))):
        for step in steps:
            append_line(run.metrics_file, {"step": step, "attempt": attempt})
    append_line(run.events_file, {"time": 1.0, "event": "resumed", "attempt": 1, "step": 3})
    counted = [(line["step"], line["attempt"]) for line in run.metrics()]
    assert counted == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)]


def test_a_torn_last_line_is_dropped_and_cut_off_before_the_next(tmp_path: Path) -> None:
    """The writer was killed in the middle of a line; its successor's line stays whole."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_lines(path)) == [{"a": 1}]
    drop_torn_line(path)
    append_line(path, {"a": 3})
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]


def test_a_line_that_the_disk_did_not_take_whole_is_not_there_at_all(tmp_path: Path) -> None:
    """Half a line in the middle of a history would make it unreadable for ever."""
    code = f"""
import resource, signal, pathlib
from clusterddp.rundir import append_line
path = pathlib.Path({str(tmp_path / "events.jsonl")!r})
append_line(path, {{"a": 1}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
try:
    append_line(path, {{"long": "x" * 100}})
except OSError as error:
    print(error.strerror)
append_line(path, {{"b": 2}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("File too large", "No space left on device")
    assert list(read_lines(tmp_path / "events.jsonl")) == [{"a": 1}, {"b": 2}]


def test_lines_that_a_machine_died_before_writing_are_dropped(tmp_path: Path) -> None:
    """They read as NUL, in the middle, too, when lines after them were written; the rest of a lost line is no line."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"a": 1}\n' + b"\0" * 7 + b"\n" + b"\0" * 9 + b'3}\n{"a": 4}\n{"a"' + b"\0" * 5 + b'{"a": 5}\n\0\0'
    )
    assert list(read_lines(path)) == [{"a": 1}, {"a": 4}, {"a": 5}]
    drop_torn_line(path)
    append_line(path, {"a": 6})
    assert list(read_lines(path))[-1] == last_line(path) == {"a": 6}
    path.write_bytes(b'{"a": 1}\n\0\0\0\n')
    assert last_line(path) == {"a": 1}


def test_metrics_count_by_the_record_when_the_event_was_never_written(run: RunDirectory) -> None:
    """The supervisor was killed before it heard that attempt 1 had resumed at 2; the attempt's own record is there."""
    for attempt, steps in ((0, range(4)), (1, range(2, 5))):
        assert run.create_attempt() == attempt
        for step in steps:
            append_line(run.metrics_file, {"step": step, "attempt": attempt})
    write_json(run.resume_record(1), {"attempt": 1, "step": 2, "parent": {"attempt": 0, "step": 2}})
    assert [(line["step"], line["attempt"]) for line in run.metrics()] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]


def test_a_folder_is_made_with_those_above_it_and_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    """As mkdir -p does."""
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a" / "b", exist_ok=False)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "b", exist_ok=False)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    """Something else wrote there; the error says where."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(RunDirectoryError, match="events.jsonl:2 is not JSON"):
        list(read_lines(path))


def test_an_unseen_logs_folder_supersedes_nobody(run: RunDirectory) -> None:
    """A disk that is away for a moment is no newer attempt."""
    assert run.create_attempt() == 0
    assert not run.superseded(0)
    run.logs.rename(run.path / "away")
    assert not run.superseded(0)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at the worst moment: the file is the old one, and nothing else stands beside it."""
    path = tmp_path / "job.yaml"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_changed_json_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    """It was written whole, so somebody edited it."""
    path = tmp_path / "outcome.json"
    path.write_text("{")
    with pytest.raises(RunDirectoryError, match="outcome.json is not JSON"):
        read_json(path)


@pytest.mark.parametrize(
    "line",
    ["1", "[]", "null", '{"attempt": 0}', '{"step": "1", "attempt": 0}', '{"step": -1, "attempt": 0}', "[" * 9999],
)
def test_a_line_of_another_form_is_named_with_its_place(run: RunDirectory, line: str) -> None:
    """JSON, but nothing that we wrote; deep brackets, too, are an error and no crash."""
    run.metrics_file.write_text(f'{{"step": 0, "attempt": 0}}\n{line}\n')
    with pytest.raises(RunDirectoryError, match="metrics.jsonl:2"):
        run.metrics()
    with pytest.raises(RunDirectoryError, match="metrics.jsonl"):
        run.last_metrics()


def test_a_resume_record_that_points_to_itself_is_an_error_and_no_loop(run: RunDirectory) -> None:
    """The walk along an attempt's parents must end."""
    assert run.create_attempt() == 0
    write_json(run.resume_record(0), {"attempt": 0, "step": 0, "parent": {"attempt": 0, "step": 3}})
    with pytest.raises(RunDirectoryError, match="a later one"):
        list(lineage(run, 0))


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "local", "host": "x", "pid": 0, "process_start": "1"},
        {"kind": "local", "host": "x", "pid": -1, "process_start": "1"},
        {"kind": "slurm", "job": "--user=all"},
        {"kind": "slurm", "job": 3},
        {"kind": "other"},
    ],
)
def test_a_holder_that_is_neither_a_job_nor_a_process_is_never_ended(run: RunDirectory, entry: dict[str, Any]) -> None:
    """``cancel`` would end every process of the user, or hand scancel an option."""
    write_json(run.submitted_file, entry)
    with pytest.raises(RunDirectoryError, match="submitted.json"):
        end_for_good(run)


def test_a_ranks_record_that_cannot_be_read_is_a_rank_that_died(run: RunDirectory) -> None:
    """The supervisor must not end of it: the run would not be requeued."""
    run.create_attempt()
    run.rank_record(0, 1).write_text('{"end": 5}')
    end = RankEnd.read(1, "n1", 1.0, run.rank_record(0, 1))
    assert (end.end, end.failed, "rank-1.json" in end.sentence()) == ("died", True, True)


def test_who_only_looks_on_passes_over_a_line_that_is_none(run: RunDirectory, capsys: pytest.CaptureFixture) -> None:
    """The loop of a local run must not end for it."""
    progress = Progress(run, None)
    run.events_file.write_text('nonsense\n[]\n{"time": 1.0, "attempt": 0, "event": "submitted", "job": "7"}\n')
    run.metrics_file.write_text('{"step": []}\n{"step": 4, "attempt": 0}\n')
    progress.update()
    assert (progress.steps_done, capsys.readouterr().err) == (5, "attempt 0: submitted as job 7\n")
