"""``clusterddp cancel`` of many runs; of one with processes: tests/ranks/test_lease.py, with jobs: tests/slurm."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.command_line import command
from clusterddp.errors import FAILED, SlurmError, UsageError
from clusterddp.rundir import claims
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import JobInfo
from clusterddp.supervisor import lease
from tests.fake_slurm import FakeSlurm
from tests.runs_on_disk import outcome_of
from tests.wording import raises, says

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDirectory]:
    """Three runs, a, b and c, of which b has completed."""
    monkeypatch.chdir(tmp_path)
    made = [RunDirectory(tmp_path / name) for name in "abc"]
    for run in made:
        run.create()
        run.job_file.write_text("module: x\n")
    write_json(made[1].outcome_file, {"state": "completed", "step": 7, "attempts": 1, "reason": "why"})
    return made


def states(runs: list[RunDirectory]) -> list[str | None]:
    return [(outcome_of(run) or {"state": None})["state"] for run in runs]


def test_one_run_is_cancelled_without_a_question(three: list[RunDirectory], capsys: Captured) -> None:
    assert command(["cancel", "a"]) == 0
    assert states(three) == ["cancelled", "completed", None]
    assert capsys.readouterr().out.endswith(f"{three[0]}: cancelled. The run will not start again\n")


def test_several_need_a_yes_where_nobody_can_be_asked(three: list[RunDirectory]) -> None:
    with raises(UsageError):
        command(["cancel", "."])
    assert states(three) == [None, "completed", None]


def test_with_yes_each_tells_its_end_and_one_that_is_over_is_no_error(
    three: list[RunDirectory], capsys: Captured
) -> None:
    assert command(["cancel", "?", "--yes"]) == 0
    assert states(three) == ["cancelled", "completed", "cancelled"]
    shown = capsys.readouterr().out
    says(shown)
    assert command(["cancel", "?"]) == 0, "there is nothing to ask"


@pytest.mark.parametrize("word", ["only", "onl*"])
def test_the_one_run_of_a_folder_or_pattern_needs_a_yes_as_nobody_has_named_it(
    three: list[RunDirectory], word: str
) -> None:
    run = RunDirectory(three[0].path.parent / "only" / "only-0")
    run.create()
    run.job_file.write_text("module: x\n")
    with raises(UsageError):
        command(["cancel", word])
    assert command(["cancel", word, "--yes"]) == 0
    assert states([run]) == ["cancelled"]


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_the_runs_are_listed_and_the_answer_counts(
    three: list[RunDirectory], answer: bool, typed: list[Any], capsys: Captured
) -> None:
    typed += ["yes\n" if answer else "no\n"]
    assert command(["cancel", "a", "b", "c"]) == (0 if answer else 1)
    assert states(three) == (["cancelled", "completed", "cancelled"] if answer else [None, "completed", None])
    said = capsys.readouterr().err
    assert said.startswith(f"{three[0]}\n{three[2]}\ncancel 2 runs permanently? [y/N] ")
    assert ("no run was cancelled" in said) is not answer


def test_all_jobs_are_cancelled_before_any_is_waited_for(
    three: list[RunDirectory], fake_slurm: FakeSlurm, capsys: Captured
) -> None:
    """Many runs end in the time of one. One that cannot be cancelled does not keep the others."""
    jobs = {name: JobInfo(name, "RUNNING", "None", "n1", 0, None, None) for name in ("41", "42", "43")}

    def scancel(_: str, job: str) -> str | Exception:
        if job == "42":
            return SlurmError("job 42: scancel: error: Access/permission denied")
        jobs[job] = dataclasses.replace(jobs[job], state="CANCELLED")
        return ""

    fake_slurm |= {"scancel": scancel, "scontrol show job": lambda *words: jobs[words[-1]]}
    three[1].outcome_file.unlink()
    for run, job in zip(three, jobs, strict=True):
        lease.take(run, run.create_attempt(), lease.of_job(job))
    assert command(["cancel", "?", "--yes"]) == 1
    assert states(three) == ["cancelled", None, "cancelled"]
    said = f"{three[1]} will not start again, but has not ended: job 42: scancel: error: Access/per"
    assert said in capsys.readouterr().err
    assert [line for line in fake_slurm.asked if "show" not in line] == ["scancel 41", "scancel 42", "scancel 43"]
    assert [line.split()[-1] for line in fake_slurm.asked[-2:]] == ["41", "43"]


@pytest.mark.parametrize("fault", ["damaged outcome", "no mark can be written"])
def test_a_run_that_cannot_be_cancelled_does_not_keep_the_others_from_it(
    three: list[RunDirectory], fault: str, capsys: Captured
) -> None:
    if fault == "damaged outcome":
        three[0].outcome_file.write_text("garbage")
    else:
        (three[0].path / "cancelled").mkdir()
    assert command(["cancel", "a", "b", "c", "--yes"]) == FAILED
    assert states(three[2:]) == ["cancelled"]
    says(capsys.readouterr().err)


def test_another_users_run_is_not_marked_as_cancelled(
    three: list[RunDirectory], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(claims, "read_claim", closed)
    assert command(["cancel", "a"]) == FAILED
    assert re.search(r"a belongs to \w+, and only its owner can control it\n$", capsys.readouterr().err)
    assert not three[0].cancelled
