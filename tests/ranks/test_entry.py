"""Any failure of a command is one sentence and a documented exit code; the traceback is in a file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.entry import exit_with
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.waiting import wait_until

CLI = [sys.executable, "-m", "clusterddp"]
NEW = ["submit", "--local", "--device", "cpu", "-m", "this"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that was stopped before its first attempt."""
    run = RunDirectory(tmp_path / "run")
    run.create(share="private")
    run.job_file.write_text("module: this\ndevice: cpu\n")
    return run


def said(command: list[str], code: int, **options: object) -> str:
    """What a command writes to standard error; it ends with ``code`` and shows no traceback."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]
    assert done.returncode == code, (command, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    return str(done.stderr)


@pytest.mark.parametrize("entry", ["clusterddp", "clusterddp.submit"])
@pytest.mark.parametrize("module", ["clusterddp.cli.command_line", "argparse", "clusterddp.entry", "yaml"])
def test_ctrl_c_while_a_command_imports_ends_it_without_a_traceback(entry: str, module: str, tmp_path: Path) -> None:
    """The signal comes when the first thing of a module is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nclass Interrupt:\n    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    words = ["submit"] if entry == "clusterddp" else []
    command = [sys.executable, "-m", entry, *words, "-m", "this", "--dry-run"]
    assert said(command, 130, env={**os.environ, "PYTHONPATH": str(tmp_path)}) in ("", "clusterddp: interrupted\n")


def test_a_rank_without_the_environment_of_its_launcher_says_what_is_missing(tmp_path: Path) -> None:
    """As in a container that starts with an empty one."""
    words = said([sys.executable, "-m", "clusterddp.worker", "train.py"], 1, env={}, cwd=tmp_path)
    assert "CLUSTERDDP_LAUNCHER" in words and "CLUSTERDDP_SUPERVISOR" in words


def test_ctrl_c_ends_logs_that_follow(run: RunDirectory) -> None:
    log = run.attempt_logs(run.create_attempt()) / "rank-0.out"
    log.write_text("a line\n")
    process = subprocess.Popen([*CLI, "logs", "-f", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"a line\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b"clusterddp: interrupted\n"
    assert process.returncode == 130


def test_logs_of_missing_attempts_and_ranks_are_refused(run: RunDirectory) -> None:
    """Also with ``-f``: the command does not wait for an attempt that cannot start, or a rank of a finished run."""
    run.create_attempt()
    for follow in ([], ["-f"]):
        assert "has no attempt 7. Available: 0\n" in said([*CLI, "logs", str(run), "--attempt", "7", *follow], 1)
    write_json(run.outcome_file, {"state": "failed", "step": None, "attempts": 1, "reason": "x"})
    assert "attempt 0" in said([*CLI, "logs", str(run), "--rank", "9", "-f"], 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
@pytest.mark.parametrize(
    ("mount", "command", "file", "words"),
    [
        ("mount --bind {0} {0} && mount -o remount,bind,ro {0}", ["cancel"], "/cancelled", "Read-only file system"),
        ("mount --bind {0} {0} && mount -o remount,bind,ro {0}", ["submit", "--local", "--run-dir"],
         "/private/submitting-0.json", "Read-only file system"),
        ("mount -t tmpfs -o size=4k none {0} && echo x > {0}/x", [*NEW, "--run-dir"], "/private/submitting-0.json",
         "No space left on device"),
    ],
)  # fmt: skip
def test_a_full_disk_is_one_sentence_that_names_the_file(
    run: RunDirectory, mount: str, command: list[str], file: str, words: str
) -> None:
    """Nothing half-written is left that would disturb a later submission."""
    folder = run.path
    if "tmpfs" in mount:
        shutil.rmtree(folder)
        folder, run = run.path.parent, RunDirectory(run.path.parent / "small" / "run")
        folder = run.path.parent
        folder.mkdir()
    text = f'{mount.format(folder)} || exit 99; shift 0; "$@"; code=$?; ls {folder} >&2; exit $code'
    lines = said(["unshare", "--mount", "bash", "-c", text, "bash", *CLI, *command, str(run)], 1).splitlines()
    (line,) = [line for line in lines if line.startswith("clusterddp:")]
    told = re.fullmatch(rf"clusterddp: {run}{file}: {words} \(traceback: (\S+)\)", line)
    assert told, lines
    assert "Traceback (most recent call last)" in Path(told[1]).read_text()
    Path(told[1]).unlink()
    assert ("run" in lines[lines.index(line) + 1 :]) is False


def test_a_deleted_working_directory_is_reported(tmp_path: Path) -> None:
    """By every command that needs it."""
    for words in ("status run", "submit -m this --local", "cancel run", "export run x.pt"):
        gone = tmp_path / "gone"
        gone.mkdir()
        command = ["bash", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "bash", *CLI, *words.split()]
        assert said(command, 1) == "clusterddp: the working directory was deleted. Change to one that exists\n"


def test_characters_that_the_output_cannot_encode_are_escaped(run: RunDirectory) -> None:
    """A path with umlauts, on a terminal that encodes only ASCII."""
    path = run.path.rename(run.path.with_name("l\u00e4ufe"))
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    assert said([*CLI, "status", str(path)], 0, env=environ) == ""
    environ.pop("PYTHONIOENCODING")
    assert said([*CLI, "cancel", str(path)], 0, env=environ) == ""


def test_a_command_keeps_its_exit_code_where_python_would_become_interactive() -> None:
    """The job's state follows from the supervisor's exit code, which takes the same way."""
    environ, stdin = {**os.environ, "PYTHONINSPECT": "1"}, subprocess.DEVNULL
    done = subprocess.run([*CLI, "status", "/nothing/there"], env=environ, stdin=stdin, capture_output=True, timeout=60)
    assert done.returncode == 1 and b"SystemExit" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["list", "RUN"], ["status", "RUN", "--json"]])
def test_output_that_cannot_be_written_is_reported(
    run: RunDirectory, tmp_path: Path, words: list[str], unbuffered: str
) -> None:
    """Without a traceback: the full disk is the reader's."""
    kept = tmp_path / "kept"
    kept.mkdir()
    command = [*CLI, *(str(run) if word == "RUN" else word for word in words)]
    environ = {**os.environ, "TMPDIR": str(kept), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.endswith("could not write the output: No space left on device\n")
    assert list(kept.iterdir()) == []


def test_a_pipe_whose_reader_has_ended_is_no_error() -> None:
    closed = subprocess.run(["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "bash", *CLI, "--help"], timeout=60)
    assert closed.returncode in (0, 141)


@pytest.mark.parametrize("words", [["list"], ["logs", "RUN"], ["status", "RUN"]])
def test_a_closed_stream_is_no_error(run: RunDirectory, words: list[str]) -> None:
    """``>&-``, as of a daemon."""
    (run.attempt_logs(run.create_attempt()) / "rank-0.out").write_text("printed\n")
    command = [*CLI, *(str(run) if word == "RUN" else word for word in words)]
    for redirected in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(["bash", "-c", f'"$@" {redirected}', "bash", *command], capture_output=True, timeout=60)
        assert done.returncode == 0 and b"Traceback" not in done.stderr, (redirected, done)


def test_an_internal_error_leaves_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder that the entry point names; on the terminal with CLUSTERDDP_DEBUG=1."""

    def fails() -> int:
        raise ValueError("not\nforeseen")

    def end() -> str:
        with pytest.raises(SystemExit) as left:
            exit_with(fails, tmp_path)
        assert left.value.code == 70
        return capsys.readouterr().err

    told = re.fullmatch(r"clusterddp: internal error: ValueError: not foreseen \(traceback: (\S+)\)\n", end())
    assert told and Path(told[1]).parent == tmp_path
    assert "in fails" in Path(told[1]).read_text() and Path(told[1]).stat().st_mode & 0o077 == 0
    monkeypatch.setenv("CLUSTERDDP_DEBUG", "1")
    assert "in fails" in end()
    assert len(list(tmp_path.iterdir())) == 1


def test_an_internal_error_of_the_supervisor_is_a_sentence_too(run: RunDirectory) -> None:
    """Its traceback is in the run's own folder."""
    write_json(run.loop_file, {})
    run.logs.rmdir()
    run.logs.write_text("not a folder")
    run.logs.chmod(0o600)
    command = [sys.executable, "-m", "clusterddp.supervisor", "--local", str(run)]
    told = re.search(r"clusterddp: \S+: Not a directory \(traceback: (\S+)\)\n", said(command, 1))
    assert told and Path(told[1]).parent == run.private


def test_ctrl_c_ends_a_watch_and_leaves_the_run_alone(run: RunDirectory) -> None:
    """The message says so."""
    write_json(run.submitted_file, {"kind": "slurm", "job": "41"}, mode=0o600)
    process = subprocess.Popen(
        [*CLI, "wait", "--resubmit", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": "/nowhere"},
    )  # fmt: skip
    seen: list[str] = []
    assert process.stderr is not None
    wait_until(lambda: seen.append(process.stderr.readline()) or "retrying" in seen[-1], "its first question")  # type: ignore[union-attr]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and "no longer waiting" in err
