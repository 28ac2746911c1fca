"""Runs that another user may have written: what their files hold must not pass for output of clusterddp, keep a command
from ending, or need the owner's private files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clusterddp.cli.main import main
from clusterddp.cli.report import collected
from clusterddp.errors import WRONG_USAGE, ClusterddpError
from clusterddp.rundir.claims import ProcessClaim
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.recording import copy_checkpoint
from tests.checkpoint_files import save
from tests.other_user import MEMBER, UID, start_as_other
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps
from tests.terminal import Terminal

#: Ends a line for ``print``, ``str.splitlines`` or a terminal.
LINE_ENDS = ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029")


@pytest.fixture(autouse=True)
def _without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def run_command(*words: str) -> object:
    with pytest.raises(SystemExit) as exited:
        main(list(words))
    return exited.value.code


@pytest.mark.parametrize("end", LINE_ENDS)
def test_text_of_a_run_does_not_pass_for_lines_of_clusterddp(
    tmp_path: Path, end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a history, an outcome, metrics and the names of nodes."""
    forged = f"x{end}forged"
    history = [started(nodes=forged), event("rank_failed", rank=0, host=forged, error=forged, suspect=forged, step=1)]
    history += [event("failed", step=3, attempts=1, reason=forged), event("forked", step=1, source=forged)]
    run = recorded_run(
        tmp_path / "net",
        history,
        metrics=[{**line, forged: 1.0, "note": forged} for line in steps(range(3))],
        outcome={"state": "failed", "step": 3, "reason": forged},
    )
    for words in (["status"], ["list"], ["wait"], ["logs"], ["status", "--watch"]):
        run_command(*words, str(run))
        out, err = capfd.readouterr()
        assert "forged" in out + err, words
        assert not [line for line in (out + err).splitlines() if line.lstrip("? ").startswith("forged")], (words, out)


def test_a_checkpoint_that_is_a_pipe_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It waits for a writer, who never comes."""
    run = recorded_run(tmp_path / "net", [started(), event("training", step=0)], holder=of_job())
    checkpoint = save(run, 0, 3, {"model": {"weight": torch.ones(2)}}).path
    checkpoint.unlink()
    os.mkfifo(checkpoint)
    assert run_command("export", str(run), f"{tmp_path}/model.pt") not in (0, None)
    assert "traceback" not in capfd.readouterr().err.lower()
    into = RunDirectory(tmp_path / "fork")
    into.create("private")
    with pytest.raises((ClusterddpError, OSError)):
        copy_checkpoint(str(run), into)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("owner", [0, UID])
def test_a_terminal_gets_no_escapes_from_a_file_of_another_user(
    tmp_path: Path, _another_user: None, owner: int, follow: bool
) -> None:
    """Also if it is in a folder of this user, as a link makes possible. The user's own scripts keep their colours."""
    run = recorded_run(tmp_path / "net", [started()])
    for kind in ("out", "err"):
        log = run.attempt_logs(0) / f"rank-0.{kind}"
        log.write_bytes(b"\x1b[31mred\x1b]0;title\x07\x9b2J end\n")
        os.chown(log, owner, -1)
    if follow:
        run.outcome_file.write_text('{"state": "completed", "step": 3, "attempts": 1, "reason": "done"}')
    words = [sys.executable, "-m", "clusterddp", "logs", *["-f"] * follow, "--rank", "0", str(run)]
    terminal = Terminal(lambda **options: subprocess.Popen(words, **options))
    shown = "".join(terminal.wait_for(" end") for _ in ("out", "err"))
    code = terminal.process.wait(60)
    terminal.end()
    assert (code, "red" in shown, "\x1b" in shown) == (0, True, owner == 0), shown


@pytest.mark.parametrize("end", [None, pytest.param("failed", marks=pytest.mark.product)])
def test_a_member_of_the_group_sees_a_shared_local_run(open_folder: Path, end: str | None) -> None:
    """All that does not need `private`. Control is its owner's."""
    run = recorded_run(
        open_folder / "run",
        [event("started", process=7, nodes="vm", ranks=1, code={}, changed=[]), event("training", step=0)]
        + ([event(end, step=3, attempts=1, reason="why")] if end else []),
        metrics=steps(range(3), loss=0.5),
        loop=ProcessClaim("vm", 7, let_go=True),
        **({"outcome": {"state": "failed", "step": 3, "reason": "why"}} if end == "failed" else {}),
    )
    (run.attempt_logs(0) / "rank-0.out").write_text("trained\n")
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, UID, UID)
        if run.private not in (path, *path.parents):
            path.chmod(0o2750 if path.is_dir() else 0o640)
    run.private.chmod(0o700)
    seen = [("status",), ("status", "--json"), ("list",), ("logs", "--rank", "0"), ("report", "-o", "/dev/null")]
    controls = [("stop",), ("save",), ("requeue",), ("stacks",)]
    for words in (*seen, *controls):
        member = start_as_other(sys.executable, "-m", "clusterddp", *words, run, user=MEMBER)
        out, err = member.communicate(timeout=60)
        assert "ermission denied" not in out + err and "Traceback" not in err, (words, out, err)
        assert (member.returncode == 0) == (words in seen), (words, out, err)


def test_a_list_does_not_repeat_a_long_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A pipe gets it whole, once, although both attempts ended in the same way."""
    error = "rank 0 (n1) exited with code 1: " + "why " * 40
    history = [started(), event("restarted", reason=error), started(1), event("failed", 1, step=3, reason=f"{error}.")]
    outcome = {"state": "failed", "step": 3, "reason": f"{error}. Not restarted"}
    run_command("list", str(recorded_run(tmp_path / "net", history, outcome=outcome)))
    assert capfd.readouterr().out.count("exited with code 1") == 1


# --- Pipes and devices in place of a run's files: they must not keep a command from ending, nor hide other runs


FILES = [
    "job.yaml", "events.jsonl", "metrics.jsonl", "outcome.json", "timing.jsonl", "private/submitted.json",
    "private/attempt-0/holder.json", "logs/attempt-0/rank-0.out",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two runs, neither of which has a job that Slurm would be asked about."""
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("net-0", "net-1"):
        history = [started(), event("training", step=0), event("completed", step=9, attempts=1, reason="done")]
        recorded_run(tmp_path / name, history, metrics=steps(range(9), loss=0.5), holder=of_job())
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits for a writer, who never comes. Lists have the other run, and one run's commands say what is wrong."""
    pipe = folder / "net-1" / name
    pipe.unlink(missing_ok=True)
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    assert run_command("list", str(folder)) == 0
    assert "net-0" in capfd.readouterr().out
    for words in (["status"], ["status", "--json"], ["logs"]):
        run_command(*words, str(folder / "net-1"))
    collected([RunDirectory(folder / "net-1")], BEGAN + 60)
    assert "Traceback" not in capfd.readouterr().err
    pipe.unlink()


@pytest.mark.parametrize(
    "name", ["events.jsonl", "metrics.jsonl", "outcome.json", "private/submitted.json", "job.yaml"]
)
def test_a_file_that_seems_to_have_terabytes_does_not_hide_other_runs(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a sparse file does, which takes no room."""
    (folder / "net-1" / name).touch()
    os.truncate(folder / "net-1" / name, 1 << 42)
    assert run_command("list", str(folder)) == 0
    assert "net-0" in capfd.readouterr().out
    run_command("status", str(folder / "net-1"))
    assert ("Traceback" in (said := capfd.readouterr().err), "traceback" in said) == (False, False)
    os.truncate(folder / "net-1" / name, 0)


def test_a_sweeps_file_that_seems_to_have_terabytes_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A list of its members names it, and one of the folder above has the other runs."""
    swept = folder / "swept"
    recorded_run(swept / "net-2", [started()], holder=of_job())
    (swept / "sweep.yaml").touch()
    os.truncate(swept / "sweep.yaml", 1 << 42)
    assert run_command("list", str(swept)) == WRONG_USAGE
    said = capfd.readouterr().err
    assert ("sweep.yaml" in said, "traceback" in said) == (True, False)
    assert run_command("list", str(folder)) == 0
    assert "net-0" in capfd.readouterr().out
