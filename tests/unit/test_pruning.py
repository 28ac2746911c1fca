"""``clusterddp prune`` and a supervisor's ``keep_logs``: what they delete, and what never."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterddp import reporter
from clusterddp.checkpoint.store import Checkpoints, choose
from clusterddp.cli import checkpoints
from clusterddp.cli.command_line import command
from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.deletion import delete_folder, delete_old_logs, old_logs
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.pruning import size_text
from clusterddp.supervisor import lease
from tests.checkpoint_files import save
from tests.wording import raises, says

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """A completed run of three attempts, with the checkpoints 1 to 6, of which 2 was the best, and a leftover."""
    run.job_file.write_text("module: x\ncheckpoint: {keep: {last: 9, every: 3, best: f1 max}}\n")
    everything = Keep(last=9)
    for number, parent in enumerate((None, (0, 2), (1, 4))):
        assert run.create_attempt() == number
        Checkpoints(run, number, everything).record_resume(parent)
        (run.attempt_logs(number) / "rank-0.out").write_text("x" * 1000)
        for step in (2 * number + 1, 2 * number + 2):
            facts = {"best": "f1 max", "metrics": json.dumps({"f1": 0.9 if step == 2 else 0.1})}
            save(run, number, step, {"a": 1}, keep=everything, facts=facts)
    (run.checkpoints / ".step-000000000007.attempt-2.safetensors.00ff.tmp").write_bytes(b"half")
    over(run, "completed")
    return run


def over(run: RunDirectory, state: str) -> None:
    write_json(run.outcome_file, {"state": state, "step": 6, "attempts": 3, "reason": "why"})


def steps(run: RunDirectory) -> list[int]:
    return sorted(int(path.name[5:17]) for path in run.checkpoints.glob("step-*"))


def logs(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.logs.iterdir())


def files(run: RunDirectory) -> set[Path]:
    return set(run.path.rglob("*"))


def test_without_a_yes_it_only_says_what_it_would_delete(run: RunDirectory, capsys: Captured) -> None:
    """Each file with its size, on standard output."""
    before = files(run)
    assert command(["prune", str(run), "--logs"]) == 0
    shown = capsys.readouterr()
    head, *lines = shown.out.splitlines()
    assert head.startswith(f"{run}: ") and head.endswith(" to delete (keeps checkpoints 6, 2)")
    assert [line.split()[2] for line in lines] == [
        *(f"checkpoints/step-{step:012d}.attempt-{(step - 1) // 2}.safetensors" for step in (5, 4, 3, 1)),
        "checkpoints/.step-000000000007.attempt-2.safetensors.00ff.tmp",
        "logs/attempt-1/",
    ]
    assert lines[-1].split()[:2] == ["1000", "B"] and lines[-2].split()[:2] == ["4", "B"]
    assert shown.err.startswith(
        "No file was deleted. To delete 5 checkpoint files and the logs of 1 attempt of 1 run ("
    )
    assert files(run) == before


@pytest.mark.parametrize("keep", ["{best: f1 max}", "{}"], ids=["rule in the job definition", "rule in the script"])
def test_the_newest_and_the_best_checkpoint_stay(run: RunDirectory, capsys: Captured, keep: str) -> None:
    """The run can still be exported and forked from them. Logs stay without --logs."""
    run.job_file.write_text(f"module: x\ncheckpoint: {{keep: {keep}}}\n")
    assert command(["prune", str(run), "--yes"]) == 0
    assert (steps(run), logs(run)) == ([2, 6], ["attempt-0", "attempt-1", "attempt-2"])
    assert (choose(run, None).step, choose(run, 2).step) == (6, 2)
    assert not list(run.checkpoints.glob(".*"))
    assert capsys.readouterr().err.startswith("deleted ")
    assert command(["prune", str(run), "--yes"]) == 0
    assert capsys.readouterr().out == f"{run} has nothing to delete\n"


def test_more_checkpoints_stay_on_request(run: RunDirectory) -> None:
    assert command(["prune", str(run), "--yes", "--keep-checkpoints", "3", "--logs"]) == 0
    assert (steps(run), logs(run)) == ([2, 4, 5, 6], ["attempt-0", "attempt-2"])
    assert run.attempts() == [0, 1, 2]


def test_the_answer_on_the_terminal_counts(run: RunDirectory, typed: list[Any], capsys: Captured) -> None:
    typed += ["n\n", "y\n"]
    assert (command(["prune", str(run)]), steps(run)) == (0, [1, 2, 3, 4, 5, 6])
    says(capsys.readouterr().err)
    assert (command(["prune", str(run)]), steps(run)) == (0, [2, 6])


@pytest.mark.parametrize(
    ("answer", "yes"), [("y\n", True), ("YES\n", True), ("\n", False), ("", False), ("n\n", False)]
)
def test_only_yes_is_yes(answer: str, yes: bool, typed: list[Any], capsys: Captured) -> None:
    """The end of the input is not, and ends the line."""
    typed += [answer]
    assert reporter.agreed("end it?") is yes
    assert capsys.readouterr() == ("", f"end it? [y/N] {'' if answer else chr(10)}")


def test_live_runs_are_refused_and_others_pruned(run: RunDirectory, capsys: Captured) -> None:
    """The exit code tells."""
    live = RunDirectory(run.path.with_name("live"))
    live.create()
    live.job_file.write_text("module: x\n")
    assert command(["prune", str(run.path.parent), "--yes"]) == 1
    says(capsys.readouterr().err)
    assert steps(run) == [2, 6]


def test_a_failed_run_that_is_being_continued_is_refused(run: RunDirectory, capsys: Captured) -> None:
    over(run, "failed")
    lease.take(run, 2, lease.of_this_process())
    assert command(["prune", str(run), "--yes"]) == 1
    says(capsys.readouterr().err)
    lease.let_go(run, 2)
    assert command(["prune", str(run), "--yes"]) == 0
    assert steps(run) == [2, 6]


def test_a_run_that_starts_while_the_question_is_open_is_left_alone(run: RunDirectory, typed: list[Any]) -> None:
    typed += [lambda: run.outcome_file.unlink() or "yes\n"]
    assert (command(["prune", str(run)]), steps(run)) == (1, [1, 2, 3, 4, 5, 6])


def test_a_damaged_newest_checkpoint_keeps_the_older_ones(run: RunDirectory, capsys: Captured) -> None:
    """Restores and exports would take one of them."""
    newest = choose(run, 6).path
    newest.write_bytes(newest.read_bytes()[:-1])
    assert (command(["prune", str(run), "--yes"]), steps(run)) == (1, [1, 2, 3, 4, 5, 6])
    assert "is damaged: " in (said := capsys.readouterr().err) and "Its older checkpoints are kept" in said


def test_links_are_not_followed(run: RunDirectory, tmp_path: Path) -> None:
    """Neither a checkpoint that is one, nor one inside the logs."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_text("x")
    linked = run.checkpoints / "step-000000000005.attempt-2.safetensors"
    linked.rename(outside / "five")
    linked.symlink_to(outside / "five")
    (run.attempt_logs(1) / "link").symlink_to(outside)
    (run.attempt_logs(1) / "file").symlink_to(outside / "data")
    assert command(["prune", str(run), "--logs", "--yes"]) == 0
    assert (steps(run), logs(run)) == ([2, 5, 6], ["attempt-0", "attempt-2"])
    assert sorted(path.name for path in outside.iterdir()) == ["data", "five"]


def test_nothing_behind_a_folder_that_is_a_link_is_deleted(run: RunDirectory, tmp_path: Path, capsys: Captured) -> None:
    """And it says so."""
    for folder in (run.checkpoints, run.logs):
        folder.rename(tmp_path / folder.name)
        folder.symlink_to(tmp_path / folder.name)
    before = set(tmp_path.rglob("*"))
    assert command(["prune", str(run), "--logs", "--yes"]) == 0
    said = capsys.readouterr().err
    assert said.count("is a symbolic link. The files that it points to are not deleted") == 2
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_belongs_to_another_user_stays(run: RunDirectory, capsys: Captured) -> None:
    """Files, and whole runs."""
    foreign = run.checkpoints / "step-000000000004.attempt-1.safetensors"
    os.chown(foreign, 12345, -1)
    os.chown(run.attempt_logs(1) / "rank-0.out", 12345, -1)
    assert command(["prune", str(run), "--logs", "--yes"]) == 1
    says(capsys.readouterr().err)
    assert (steps(run), logs(run)) == ([2, 4, 6], ["attempt-0", "attempt-1", "attempt-2"])
    os.chown(run.path, 12345, -1)
    assert command(["prune", str(run), "--yes"]) == 1
    says(capsys.readouterr().err)


def test_a_run_whose_records_are_lost_keeps_what_it_resumes_from(run: RunDirectory) -> None:
    """Without the private folder the newest attempt in the names of the files counts."""
    for number in range(3):
        delete_folder(run.attempt_private(number))
    assert command(["prune", str(run), "--yes"]) == 0
    assert 6 in steps(run) and choose(run, None).step == 6


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (1 << 52, "4096.0 TiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


# --- keep_logs


@pytest.fixture
def many(tmp_path: Path) -> Callable[[int], RunDirectory]:
    """A run of so many attempts."""

    def make(attempts: int) -> RunDirectory:
        run = RunDirectory(tmp_path / "many")
        run.create()
        for _ in range(attempts):
            (run.attempt_logs(run.create_attempt()) / "rank-0.out").write_text("x")
        return run

    return make


def test_the_first_and_the_newest_attempts_keep_their_logs(many: Callable[[int], RunDirectory]) -> None:
    """And all keep their numbers: the next attempt is none that was there before."""
    run = many(7)
    assert old_logs(run, 3) == [1, 2, 3]
    delete_old_logs(run, 3)
    assert logs(run) == ["attempt-0", "attempt-4", "attempt-5", "attempt-6"]
    assert (run.attempts(), old_logs(run, 3)) == (list(range(7)), [])
    assert run.create_attempt() == 7
    delete_old_logs(run, 1)
    assert logs(run) == ["attempt-0", "attempt-7"]


@pytest.mark.parametrize("attempts", [0, 1, 2, 3])
def test_few_attempts_keep_all(many: Callable[[int], RunDirectory], attempts: int) -> None:
    assert old_logs(many(attempts), 2) == []


def test_what_cannot_be_deleted_does_not_stop_the_attempt(
    many: Callable[[int], RunDirectory], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = many(4)

    def fail(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("clusterddp.rundir.deletion.delete_folder", fail)
    delete_old_logs(run, 1)
    says(capsys.readouterr().err)


def test_a_link_in_place_of_an_attempt_stays(many: Callable[[int], RunDirectory], tmp_path: Path) -> None:
    run = many(1)
    (run.logs / "attempt-5").symlink_to(run.attempt_logs(0))
    delete_folder(run.logs / "attempt-5")
    assert logs(run) == ["attempt-0", "attempt-5"] and (run.attempt_logs(0) / "rank-0.out").exists()


def test_two_that_delete_at_once_do_not_disturb_each_other(
    many: Callable[[int], RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A superseded supervisor, and the newer one."""
    run, unlink = many(3), os.unlink

    def unlink_after_the_other(name: str, *, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_after_the_other)
    delete_old_logs(run, 1)
    assert logs(run) == ["attempt-0", "attempt-2"]


def test_a_run_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)  # the message suggests no folder of another test, which may be around this one
    with raises(RunDirectoryError):
        command(["prune", str(tmp_path / "folder" / "none")])


def test_a_run_that_is_deleted_in_the_meantime_does_not_keep_the_others_from_being_pruned(
    run: RunDirectory, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = RunDirectory(run.path.with_name("deleted"))
    monkeypatch.setattr(checkpoints, "find_runs", lambda _: [deleted, run])
    assert command(["prune", str(run), "--yes"]) == 1
    assert steps(run) == [2, 6]
    says(capsys.readouterr().err)
