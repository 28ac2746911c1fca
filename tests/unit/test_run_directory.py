"""The run directory: attempts, histories, files that are whole or absent, and which runs words name."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from clusterddp.api import Handle
from clusterddp.checkpoint.store import lineage
from clusterddp.cli.status import show
from clusterddp.errors import ClusterddpError, RunDirectoryError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.messages.reports import End
from clusterddp.rundir import files, run_directory
from clusterddp.rundir.files import append_line, make_folder, write_atomically, write_json
from clusterddp.rundir.json_lines import drop_torn_line, read_backwards, read_lines
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory, find_runs, names_exactly, open_run, runs_folder
from clusterddp.rundir.timing import read_timings
from clusterddp.runs.progress_display import Progress
from clusterddp.runs.recording import claim, recorded
from clusterddp.runs.request_client import cancel_run
from clusterddp.supervisor.attempt import last_line
from clusterddp.supervisor.history import History
from clusterddp.supervisor.verdict import RankEnd
from clusterddp.training.metrics import Metrics
from tests.histories import happened
from tests.other_user import UID
from tests.runs_on_disk import outcome_of
from tests.wording import raises, says


@pytest.mark.parametrize(("steps", "refused"), [(10, True), (20, False)])
def test_a_submission_keeps_the_outcome_of_a_run_that_has_completed_meanwhile(
    run: RunDirectory, steps: int, refused: bool
) -> None:
    """Between the command's checks and its record. A run that is to train for longer continues."""
    write_atomically(run.job_file, Job(name="x", module="x", steps=10).to_yaml())
    write_json(run.outcome_file, {"state": "completed", "step": 10, "attempts": 1, "reason": "all ranks finished"})
    said = raises(RunDirectoryError)
    with said if refused else nullcontext(), recorded(run, Job(name="x", module="x", steps=steps), created=False):
        pass
    assert run.outcome_file.exists() is refused


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


def test_an_attempt_that_cannot_be_seen_yet_is_skipped(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared disk may not show another node's new folder for a minute, and refuses to make it again."""
    run.create_attempt()
    names = run_directory.names_in(run.logs)
    run.create_attempt()
    monkeypatch.setattr(run_directory, "names_in", lambda _: names)
    assert run.create_attempt() == 2


def test_no_attempt_before_the_first(tmp_path: Path) -> None:
    """A run that does not exist has no attempts, events, metrics or outcome."""
    run = RunDirectory(tmp_path / "none")
    assert (run.exists(), run.attempts(), run.events(), run.metrics(), outcome_of(run)) == (False, [], [], [], None)


def test_private_is_closed_to_others(run: RunDirectory) -> None:
    """Tokens and records are the owner's."""
    assert run.private.stat().st_mode & 0o777 == 0o700


def test_metrics_repeated_by_a_later_attempt_do_not_count(run: RunDirectory) -> None:
    """Attempt 1 resumed at 3: attempt 0's steps 3 and 4 are history that was thrown away."""
    for attempt, steps in ((0, range(5)), (1, range(3, 7))):
        for step in steps:
            append_line(run.metrics_file, {"step": step, "attempt": attempt})
    happened(run, {"time": 1.0, "event": "resumed", "attempt": 1, "step": 3})
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


def test_a_partially_written_line_is_removed(tmp_path: Path) -> None:
    """Half a line in the middle of a history would make it permanently unreadable."""
    code = f"""
import resource, signal, pathlib
from clusterddp.rundir.files import append_line
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


def test_lines_lost_in_a_machine_crash_are_dropped(tmp_path: Path) -> None:
    """They read as NUL, in the middle, too, when lines after them were written; the rest of a lost line is no line."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"a": 1}\n' + b"\0" * 7 + b"\n" + b"\0" * 9 + b'3}\n{"a": 4}\n{"a"' + b"\0" * 5 + b'{"a": 5}\n\0\0'
    )
    assert list(read_lines(path)) == [{"a": 1}, {"a": 4}, {"a": 5}]
    drop_torn_line(path)
    append_line(path, {"a": 6})
    assert list(read_lines(path))[-1] == next(read_backwards(path)) == {"a": 6}
    path.write_bytes(b'{"a": 1}\n\0\0\0\n')
    assert next(read_backwards(path)) == {"a": 1}


def test_metrics_count_by_the_record_when_the_event_was_never_written(run: RunDirectory) -> None:
    """The supervisor was killed before it read that attempt 1 resumed at 2; the attempt's own record is there."""
    for attempt, steps in ((0, range(4)), (1, range(2, 5))):
        assert run.create_attempt() == attempt
        for step in steps:
            append_line(run.metrics_file, {"step": step, "attempt": attempt})
    write_json(run.resume_record(1), {"attempt": 1, "step": 2, "parent": {"attempt": 0, "step": 2}})
    assert [(line["step"], line["attempt"]) for line in run.metrics()] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]


def test_a_folder_is_created_with_its_parents_and_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    """As mkdir -p does."""
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a" / "b", exist_ok=False)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "b", exist_ok=False)


@pytest.mark.parametrize(
    "line",
    ["nonsense", "1", "[]", "null", '{"attempt": 0}', '{"step": "1", "attempt": 0}', '{"step": -1, "attempt": 0}',
     "[" * 9999, '{"step": 1, "att{"step": 1, "attempt": 0}'],
)  # fmt: skip
def test_a_line_that_another_program_wrote_is_skipped_with_one_warning(
    run: RunDirectory, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two writers on NFS garble a line: the lines around it count, and the warning names the place and the remedy."""
    run.metrics_file.write_text(f'{{"step": 0, "attempt": 0}}\n{line}\n{{"step": 2, "attempt": 0}}\n{line}\n')
    assert [line["step"] for line in run.metrics()] == [0, 2]
    assert (run.last_metrics() or {})["step"] == (run.newest_metrics() or {})["step"] == 2
    assert len(run.metrics()) == 2
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"skipped {run.metrics_file}:2, and 1 other line, " in warning
    assert "another program wrote them" in warning and "To fix this, delete the lines" in warning


def test_reading_backwards_sees_what_reading_forwards_does(run: RunDirectory) -> None:
    """Lines that end at a block's border, are longer than blocks, empty, torn or lost; each end of the file."""
    lines = [b'{"a": 1}', b"", b'{"b": "%s"}' % (b"x" * 50), b"nonsense", b"\0\0", b"\0\0{}", b'{"c": 3}']
    content = b"\n".join(lines * 2) + b"\ntorn"
    for block in (1, 5, 8, 1 << 16):
        for size in range(len(content) + 1):
            run.metrics_file.write_bytes(content[:size])
            assert list(read_backwards(run.metrics_file, block=block)) == list(read_lines(run.metrics_file))[::-1], (
                block,
                size,
            )
    drop_torn_line(run.metrics_file)
    assert run.metrics_file.read_bytes() == content.removesuffix(b"torn")


@pytest.mark.parametrize("torn", ["", '{"step": 8'])
def test_a_metrics_line_of_any_length_is_read(run: RunDirectory, torn: str) -> None:
    """A thousand values a step, or a file of an earlier version, which had no limit."""
    long = {"step": 7, "attempt": 0, "note": "x" * 3_000_000}
    run.metrics_file.write_text(f'{{"step": 6, "attempt": 0}}\n{json.dumps(long)}\n{torn}')
    assert run.last_metrics() == run.newest_metrics() == long
    drop_torn_line(run.metrics_file)
    append_line(run.metrics_file, {"step": 8, "attempt": 0})
    assert [line["step"] for line in run.metrics()] == [6, 7, 8]


def test_the_newest_metrics_are_the_last_that_count(run: RunDirectory) -> None:
    """Not those of steps that are being repeated, nor what a superseded attempt wrote later."""
    lines = [(0, 0), (1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (4, 1), (4, 0)]
    happened(run, {"time": 1.0, "event": "training", "attempt": 0, "step": 0})
    for number, (step, attempt) in enumerate(lines):
        if number == 4:
            happened(run, {"time": 1.0, "event": "resumed", "attempt": 1, "step": 2})
            assert run.newest_metrics() == run.metrics()[-1] == {"step": 1, "attempt": 0}
        append_line(run.metrics_file, {"step": step, "attempt": attempt})
        if number != 3:
            assert run.newest_metrics() == run.metrics()[-1]
    assert [(line["step"], line["attempt"]) for line in run.metrics()] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]
    run.events_file.write_text('{"attempt": 1, "event": "resu{"attempt": 1, "event"\n')
    assert run.metrics()[-1] == {"step": 4, "attempt": 1} and len(run.metrics()) == 5


def test_a_long_history_costs_no_more_to_look_at_or_resume_than_a_short_one(run: RunDirectory) -> None:
    """Counted in bytes read, of a metrics file of 8 MB: its end is enough."""
    run.create_attempt()
    run.job_file.write_text(Job(name="x", module="m", device="cpu").to_yaml())
    happened(run, {"time": 1.0, "event": "started", "attempt": 0, "ranks": 1})
    run.metrics_file.write_text("".join(f'{{"step": {s}, "attempt": 0, "x": "{"y" * 50}"}}\n' for s in range(100_000)))

    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read_bytes()
    show(run)
    assert Handle(run.path).status().step == 100_000
    assert History(run, 0).reached() == 100_000
    assert last_line(run)["step"] == 99_999
    Metrics(run.metrics_file, 0, lambda *_, **__: None).close()
    assert read_bytes() - before < 1_500_000


def test_a_read_error_that_passes_is_retried(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that restarts; an error that stays is raised."""
    happened(run, {"time": 1.0, "event": "started", "attempt": 0})
    errors = [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")]
    real = files.open_binary

    def opened(path: Path, *options: bool) -> BinaryIO:
        if errors:
            raise errors.pop()
        return real(path, *options)

    monkeypatch.setattr("clusterddp.rundir.json_lines.open_binary", opened)
    assert len(run.events()) == 1 and not errors
    monkeypatch.setattr("clusterddp.rundir.records._PAUSES_S", (0.0,))
    errors += [OSError(errno.EIO, "Input/output error")] * 2
    with raises(OSError):
        run.events()


def test_an_unreadable_logs_folder_supersedes_no_attempt(run: RunDirectory) -> None:
    """A temporarily unreachable disk is not a newer attempt."""
    assert run.create_attempt() == 0
    assert not run.superseded(0)
    run.logs.rename(run.path / "away")
    assert not run.superseded(0)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the worst moment: the file is the old one, and no temporary file is left."""
    path = tmp_path / "job.yaml"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with raises(OSError):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_changed_json_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    """It was written atomically, so another program changed it."""
    path = tmp_path / "outcome.json"
    path.write_text("{")
    with raises(RunDirectoryError):
        read_json(path)


@pytest.mark.parametrize(("name", "read"), [
    ("job.yaml", lambda run: load_resolved(run.job_file)),
    ("outcome.json", RunDirectory.outcome),
    ("events.jsonl", RunDirectory.events),
    ("metrics.jsonl", RunDirectory.metrics),
    ("timing.jsonl", read_timings),
])  # fmt: skip
def test_a_sparse_file_that_another_user_may_have_made_is_refused_before_it_is_read(
    run: RunDirectory, name: str, read: Callable[[RunDirectory], object]
) -> None:
    """It takes no space on the disk, but all of the reader's memory. Each second block of it has data."""
    with open(run.path / name, "wb") as file:
        for place in range(4):
            file.seek(place << 25)
            file.write(b"{}")
        file.truncate(1 << 27)
    with raises((ClusterddpError, OSError)):
        read(run)


def test_a_large_file_is_read_if_its_file_system_cannot_tell_where_its_holes_are(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some of FUSE."""
    append_line(run.metrics_file, {"step": 0, "attempt": 0, "loss": 1.0})
    seek = os.lseek

    def told(descriptor: int, position: int, how: int) -> int:
        if how == os.SEEK_HOLE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return seek(descriptor, position, how)

    monkeypatch.setattr("clusterddp.rundir.json_lines.LARGEST", 1)
    monkeypatch.setattr("os.lseek", told)
    assert len(run.metrics()) == 1


@pytest.mark.usefixtures("no_held_folders")
def test_the_job_definition_is_read_in_the_folder_that_was_checked(tmp_path: Path) -> None:
    """Another user, who put a folder in its place after the check, would choose what the supervisor executes."""
    run, other = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "other")
    for directory, module in ((run, "mine"), (other, "foreign")):
        directory.create()
        directory.job_file.write_text(Job(name="x", module=module, steps=10).to_yaml())
        directory.job_file.chmod(0o600)
    check_run(run)
    run.path.rename(tmp_path / "moved")
    other.path.rename(run.path)
    assert load_resolved(run.job_file).module == "mine"


def test_a_resume_record_that_points_to_itself_is_an_error_and_no_loop(run: RunDirectory) -> None:
    """The walk along an attempt's parents must end."""
    assert run.create_attempt() == 0
    write_json(run.resume_record(0), {"attempt": 0, "step": 0, "parent": {"attempt": 0, "step": 3}})
    with raises(RunDirectoryError):
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
    with raises(RunDirectoryError):
        cancel_run(run)


def test_a_ranks_record_that_cannot_be_read_is_a_rank_that_died(run: RunDirectory) -> None:
    """It must not end the supervisor: the run would not be requeued."""
    run.create_attempt()
    run.rank_record(0, 1).write_text('{"end": 5}')
    end = RankEnd.read(1, "n1", 1.0, run.rank_record(0, 1))
    assert (end.end, end.failed, "rank-1.json" in end.sentence()) == (End.DIED, True, True)


def test_a_reader_skips_a_line_that_is_not_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """It must not end the local command."""
    progress = Progress(run, None)
    submitted = '{"time": 1.0, "attempt": 0, "event": "submitted", "job": "7", "submitted": 1.0}'
    run.events_file.write_text(f"nonsense\n[]\n{submitted}\n")
    run.metrics_file.write_text('{"step": []}\n{"step": 4, "attempt": 0}\n')
    progress.update()
    assert (progress.steps_done, capsys.readouterr().err) == (5, "attempt 0: submitted as job 7\n")


def test_a_dangling_link_with_the_name_of_a_new_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run that was moved to another file system and deleted there."""
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path))
    (tmp_path / "x-0").symlink_to(tmp_path / "nowhere")
    assert claim(None, Job(name="x", module="x"))[0].path == tmp_path / "x-1"


def test_an_attempt_can_be_claimed_in_a_run_whose_private_folder_was_deleted(run: RunDirectory) -> None:
    """With its logs, too: the numbers go on after those in the history."""
    run.create_attempt()
    happened(run, {"time": 1.0, "event": "started", "attempt": 0})
    shutil.rmtree(run.private)
    shutil.rmtree(run.logs)
    assert run.create_attempt() == 1
    assert run.private.stat().st_mode & 0o777 == 0o700


def test_the_logs_of_a_rank_are_its_stdout_before_slurm_has_created_its_stderr(run: RunDirectory) -> None:
    run.job_file.write_text("module: x\n")
    (run.attempt_logs(run.create_attempt()) / "rank-0.out").write_text("printed\n")
    assert Handle(run.path).logs() == "printed\n"


# --- Which runs words name, and which run is proposed for a wrong path


def make_run(folder: Path) -> None:
    (folder / "private").mkdir(parents=True)
    (folder / "job.yaml").touch()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with two runs, a sweep of two, and a folder that is no run."""
    for name in ("runs/train-0", "runs/train-1", "runs/lr/lr=0.1", "runs/lr/lr=0.2", "runs/logs/deep/er"):
        (tmp_path / name).mkdir(parents=True)
        if "logs" not in name:
            make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    return tmp_path


def names(*words: str) -> list[str]:
    return [run.path.name for run in find_runs(words)]


def test_without_words_all_runs_of_the_runs_folder_are_found_with_those_of_sweeps(here: Path) -> None:
    """One level down, and no deeper."""
    make_run(here / "runs/logs/deep/er")
    assert names() == ["lr=0.1", "lr=0.2", "train-0", "train-1"]


def test_a_link_whose_end_cannot_be_seen_hides_no_run(here: Path) -> None:
    """One in a circle; one into a folder of another user gives the same kind of error."""
    (here / "runs/circle").symlink_to("circle")
    (here / "runs/lr/circle").symlink_to("circle")
    assert names() == ["lr=0.1", "lr=0.2", "train-0", "train-1"]


@pytest.mark.parametrize("words", [(), ("runs",), ("runs/*",)])
def test_a_folder_with_nothing_but_a_job_definition_is_no_run_unless_it_is_named(
    here: Path, words: tuple[str, ...]
) -> None:
    """It may be the user's own."""
    (here / "runs/mine").mkdir()
    (here / "runs/mine/job.yaml").touch()
    assert names(*words) == ["lr=0.1", "lr=0.2", "train-0", "train-1"]
    assert names("runs/mine") == ["mine"]


def test_the_runs_folder_is_the_one_of_new_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as unset; a folder that does not exist yet has no runs."""
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(here / "runs/lr"))
    assert names() == ["lr=0.1", "lr=0.2"]
    assert runs_folder({"CLUSTERDDP_RUNS": ""}) == Path("runs")
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(here / "later"))
    assert names() == []


def test_words_are_runs_folders_and_patterns_and_each_run_is_found_once(here: Path) -> None:
    """A pattern may also match what is no run."""
    assert names("runs/train-1", "runs/lr", "runs/train-*") == ["train-1", "lr=0.1", "lr=0.2", "train-0"]
    assert names(f"{here}/runs/*") == ["lr=0.1", "lr=0.2", "train-0", "train-1"]


def test_a_folder_that_looks_like_a_pattern_is_itself(here: Path) -> None:
    """Shells leave such names alone, too."""
    (here / "runs/lr[1] ä").mkdir()
    (here / "runs/lr[1] ä/job.yaml").touch()
    assert names("runs/lr[1] ä") == ["lr[1] ä"]


def test_a_pattern_that_is_none_is_reported_as_such(here: Path) -> None:
    """Before Python 3.13 two stars are a folder's whole name; later they find nothing."""
    with raises(RunDirectoryError):
        names("runs/x**")


def test_a_sweep_is_no_run_and_its_links_to_members_are_no_other_runs(here: Path) -> None:
    """Also for a pattern, which matches the folder of its arrays."""
    (here / "runs/lr/sweep.yaml").touch()
    (here / "runs/lr/arrays/0").mkdir(parents=True)
    (here / "runs/lr/arrays/0/0").symlink_to("../../lr=0.1")
    assert names("runs/lr", "runs/lr/*") == ["lr=0.1", "lr=0.2"]
    with raises(RunDirectoryError):
        open_run("runs/lr")


def test_a_run_has_a_short_name_wherever_the_runs_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to $CLUSTERDDP_RUNS or ./runs, unless there is such a run here; members of sweeps and patterns, too."""
    assert open_run("train-0").path == here / "runs/train-0"
    make_run(here / "elsewhere/train-0")
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(here / "elsewhere"))
    assert open_run("train-0").path == here / "elsewhere/train-0"
    assert [run.path for run in find_runs(["train-*"])] == [here / "elsewhere/train-0"]
    monkeypatch.setenv("CLUSTERDDP_RUNS", "runs")
    assert open_run("lr/lr=0.1").path == here / "runs/lr/lr=0.1"
    assert names("lr", "train-1") == ["lr=0.1", "lr=0.2", "train-1"]
    make_run(here / "train-0")
    (here / "train-1").mkdir()
    assert (open_run("train-0").path, open_run("train-1").path) == (here / "train-0", here / "runs/train-1")
    assert names_exactly("train-1", open_run("train-1")) and not names_exactly("newest", open_run("newest"))


def test_the_newest_run_is_the_one_that_its_user_submitted_last(here: Path) -> None:
    """A folder of that name is what it is; another user's run is not meant."""
    os.utime(here / "runs/train-0/job.yaml", (2e9, 2e9))
    assert open_run("newest").path.name == "train-0" and names("newest") == ["train-0"]
    os.utime(here / "runs/lr/lr=0.2/job.yaml", (3e9, 3e9))
    assert open_run("newest").path.name == "lr=0.2"
    if os.geteuid() == 0:
        os.chown(here / "runs/lr/lr=0.2/job.yaml", UID, UID)
        assert open_run("newest").path.name == "train-0"
    make_run(here / "newest")
    assert open_run("newest").path == here / "newest"
    shutil.rmtree(here / "newest")
    shutil.rmtree(here / "runs")
    with raises(RunDirectoryError):
        open_run("newest")


@pytest.mark.parametrize(
    ("path", "proposal"),
    [
        ("train-11", ". Did you mean runs/train-1?"),
        ("runs/trian-0", ". Did you mean runs/train-0?"),
        ("lr=0.3", ". Did you mean runs/lr/lr=0."),
        ("runs/train-1/checkpoints", ". Did you mean runs/train-1?"),
    ],
)
def test_the_nearest_run_is_proposed_for_a_wrong_path(here: Path, path: str, proposal: str) -> None:
    """By its name, or because it contains the path."""
    with pytest.raises(RunDirectoryError) as error:
        open_run(path)
    assert proposal in str(error.value)
    says(str(error.value))
    with pytest.raises(RunDirectoryError) as error:
        find_runs([path])
    assert proposal in str(error.value)


def test_the_current_folder_is_not_proposed_for_a_job_definition_of_the_user(here: Path) -> None:
    """A project may keep its job.yaml beside its runs."""
    (here / "job.yaml").touch()
    with raises(RunDirectoryError):
        open_run("runs/trian-0")
    with raises(RunDirectoryError):
        find_runs(["zzz"])


def test_without_a_similar_run_the_message_says_what_is_expected(here: Path) -> None:
    """Nothing is proposed at random."""
    with raises(RunDirectoryError):
        open_run("zzz")
    with raises(RunDirectoryError):
        find_runs(["zzz"])
