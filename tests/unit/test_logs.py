"""``clusterddp logs``: which output of which ranks it prints, and how."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable

import pytest

from clusterddp.cli import logs as logs_command
from clusterddp.cli.command_line import command
from clusterddp.errors import RunDirectoryError, UsageError
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor import lease
from tests.histories import happened
from tests.wording import raises, says

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    run.job_file.write_text("job_name: x\nmodule: x\ngpus_per_node: 16\n")
    return run


def attempt(run: RunDirectory, **ranks: str) -> int:
    """A new attempt; ``r3="text"`` is what rank 3 wrote to stdout, ``e3`` to stderr."""
    number = run.create_attempt()
    for name, text in ranks.items():
        kind = "out" if name[0] == "r" else "err"
        (run.attempt_logs(number) / f"rank-{name[1:]}.{kind}").write_text(text)
    return number


def over(run: RunDirectory, state: str, reason: str = "why") -> None:
    write_json(run.outcome_file, {"state": state, "step": None, "attempts": 1, "reason": reason})


def failed(run: RunDirectory, number: int, rank: int, error: str = "raised ValueError: bad batch") -> None:
    """The history and the record of a rank that failed first, as its supervisor and the rank leave them."""
    event = {"event": "rank_failed", "attempt": number, "time": 1.0, "rank": rank, "host": "n1", "error": error}
    happened(run, event)
    record = {"host": "n1", "end": "exception", "error": "ValueError: bad batch", "traceback": "in train.py, line 7"}
    write_json(run.rank_record(number, rank), {**record, "used_clusterddp": True})


def logs(run: RunDirectory, *words: str) -> int:
    return command(["logs", str(run), *words])


def test_one_rank_is_printed_as_it_was_written(run: RunDirectory, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Its stdout to stdout and its stderr to stderr, without a header; also bytes that are not text, and a last line
    without an end."""
    number = attempt(run, r0="zero\n", e3="warning\n")
    (run.attempt_logs(number) / "rank-3.out").write_bytes(b"\xff\x00 50%\r100%\nlast")
    assert logs(run, "--rank", "3") == 0
    assert capfdbinary.readouterr() == (b"\xff\x00 50%\r100%\nlast", b"warning\n")


def test_several_ranks_and_attempts_are_grouped_by_rank(run: RunDirectory, capsys: Captured) -> None:
    """All to stdout, so that a pipe gets them; files without output have no header."""
    attempt(run, r0="a0\n", r1="a1", e1="oops\n", r2="", r10="a10\n")
    attempt(run, r0="b0\n", r1="b1\n")
    assert logs(run, "--rank", "1-10", "--attempt", "all") == 0
    assert capsys.readouterr().out == (
        "==> rank 1, attempt 0: stdout <==\na1\n\n==> rank 1, attempt 0: stderr <==\noops\n\n"
        "==> rank 1, attempt 1: stdout <==\nb1\n\n==> rank 10, attempt 0: stdout <==\na10\n"
    )
    assert logs(run, "--rank", "all") == 0
    assert capsys.readouterr().out == (
        "==> rank 0, attempt 1: stdout <==\nb0\n\n==> rank 1, attempt 1: stdout <==\nb1\n"
    )


def test_grep_prints_the_lines_that_match_and_tells_if_none_did(run: RunDirectory, capsys: Captured) -> None:
    attempt(run, r0="loss 1\nloss nan\n", e1="Error: x\nloss nan", r2="fine\n")
    assert logs(run, "--rank", "all", "--grep", "n[ae]n$") == 0
    shown = "==> rank 0, attempt 0: stdout <==\nloss nan\n\n==> rank 1, attempt 0: stderr <==\nloss nan\n"
    assert capsys.readouterr().out == shown
    assert logs(run, "--grep", "nothing") == 1
    assert capsys.readouterr() == ("", "clusterddp: no line matches 'nothing'\n")


def test_lines_longer_than_a_block_are_whole(
    run: RunDirectory, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read in pieces; of one that matches in a piece, that piece is printed."""
    monkeypatch.setattr(logs_command, "BLOCK", 8)
    attempt(run, r0="0123456789abcdef\nx\n")
    assert logs(run, "--rank", "0") == 0
    assert capsys.readouterr().out == "0123456789abcdef\nx\n"
    assert logs(run, "--rank", "0", "--grep", "9") == 0
    assert capsys.readouterr().out == "89abcdef"


def test_more_ranks_than_a_process_may_open_files(run: RunDirectory, capsys: Captured) -> None:
    """One file is open at a time."""
    attempt(run, **{f"r{rank}": f"{rank}\n" for rank in range(200)})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    try:
        assert logs(run, "--rank", "all", "--grep", "9") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert capsys.readouterr().out.count("==> rank") == 38


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "5-3"], "expected ranks such as 3 or 0,4-7, all, or failed, got '5-3'"),
        (["--rank", "some"], "got 'some'"),
        (["--attempt", "-1"], "expected the number of an attempt, or all, got '-1'"),
        (["--grep", "("], "'(' is not a regular expression: missing )"),
    ],
)
def test_wrong_values_are_refused(run: RunDirectory, words: list[str], message: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as exited:
        logs(run, *[f"{words[0]}={words[1]}"])
    assert exited.value.code == 2 and message in capsys.readouterr().err


def test_ranks_and_attempts_that_do_not_exist_are_refused(run: RunDirectory) -> None:
    with raises(RunDirectoryError):
        logs(run)
    attempt(run, r0="x\n")
    for words in (("--attempt", "1"), ("--rank", "9"), ("--rank", "7-9"), ("--rank", "failed")):
        with raises(RunDirectoryError):
            logs(run, *words)


def test_a_rank_that_the_run_has_not_is_not_waited_for(run: RunDirectory) -> None:
    """The job definition says how many it has."""
    attempt(run, r0="zero\n")
    with raises(UsageError):
        logs(run, "-f", "--rank", "0,16")


def test_ranks_without_output_are_named(run: RunDirectory, capsys: Captured) -> None:
    """Rather than nothing; earlier attempts may have some."""
    attempt(run, r0="", r1="")
    assert logs(run, "--rank", "0-1") == 0
    attempt(run, r0="")
    over(run, "completed")
    assert logs(run) == 0
    assert logs(run, "--rank", "all", "--attempt", "all") == 0
    assert capsys.readouterr().err.splitlines() == [
        "no output from ranks 0-1 in attempt 0 so far",
        "no output from rank 0 in attempt 1. To print earlier attempts, use --attempt all",
        "no output from any rank in any attempt",
    ]


def test_deleted_logs_are_told_from_missing_ones(run: RunDirectory) -> None:
    """An old attempt keeps its number."""
    first, _ = attempt(run, r0="x\n"), attempt(run, r0="y\n")
    (run.attempt_logs(first) / "rank-0.out").unlink()
    run.attempt_logs(first).rmdir()
    for words in (["--attempt", "0"], ["--attempt", "0", "--rank", "all"]):
        with raises(RunDirectoryError):
            logs(run, *words)


# --- a failed run


def test_a_failed_run_shows_its_first_failure(run: RunDirectory, capsys: Captured) -> None:
    """The box goes to stdout; what to do next, and why the run failed, to stderr. With -f, too."""
    attempt(run, r0="x\n", r3="y\n", e3="at rank 3\n")
    failed(run, 0, 3)
    over(run, "failed", "rank 3 (n1) raised ValueError: bad batch")
    for words in ([], ["-f"]):
        assert logs(run, *words) == 0
        shown = capsys.readouterr()
        says(shown.out)
        assert shown.err.splitlines() == [
            f"{run} failed: rank 3 (n1) raised ValueError: bad batch",
            f"See the whole output of rank 3 with: clusterddp logs {run} --rank 3 --attempt 0",
            "For other ranks, use --rank failed, --rank 0,4-7 or --rank all. For all attempts, use --attempt all",
        ]
    assert logs(run, "--rank", "0") == 0
    assert capsys.readouterr().out == "x\n"


def test_a_job_without_a_supervisor_shows_its_own_log(run: RunDirectory, capsys: Captured) -> None:
    """The reason is there and nowhere else; after earlier attempts it is named."""
    lease.submitted(run, "41")
    with raises(RunDirectoryError):
        logs(run)
    (run.logs / "job-41.log").write_text("python: not found\n")
    assert logs(run) == 0
    captured = capsys.readouterr()
    assert captured.out == "python: not found\n"
    assert "job 41 has not started its supervisor yet, or ended before it could" in captured.err
    attempt(run, r0="zero\n")
    assert logs(run) == 0
    captured = capsys.readouterr()
    assert captured.out == "zero\n" and str(run.logs / "job-41.log") in captured.err


def test_a_run_that_failed_without_a_rank_that_did_shows_rank_0(run: RunDirectory, capsys: Captured) -> None:
    """As at the limit of its attempts."""
    attempt(run, r0="x\n")
    over(run, "failed", "limits.attempts (1) reached")
    assert logs(run) == 0
    assert capsys.readouterr() == ("x\n", f"{run} failed: limits.attempts (1) reached\n")


def test_a_hang_is_shown_as_the_first_failure(run: RunDirectory, capsys: Captured) -> None:
    """With the stack that its rank's log ends with."""
    stack = 'Timeout (0:00:09)!\nThread 0x1 (most recent call first):\n  File "train.py", line 9 in main\n'
    attempt(run, r0="x\n", e0=stack)
    event = {
        "event": "hung",
        "attempt": 0,
        "time": 1.0,
        "rank": 0,
        "late": [0],
        "host": "n1",
        "step": 4,
        "seconds": 9.0,
    }
    happened(run, {**event, "what": "rank 0 (n1) has been stuck at step 4 for 9 s"})
    over(run, "failed")
    assert logs(run) == 0
    shown = capsys.readouterr().out
    says(shown)


def test_the_ranks_that_failed_by_themselves(run: RunDirectory, capsys: Captured) -> None:
    """Those that the supervisor named, and those whose own records tell of an exception of the script; no lost peers.
    Without --attempt: in the newest attempt with a failure."""
    for number in range(2):
        attempt(run, **{f"r{rank}": f"{number}-{rank}\n" for rank in range(4)})
        failed(run, number, 1 + number)
    peer = {"host": "n1", "end": "exception", "error": "DistBackendError: NCCL error", "traceback": ""}
    write_json(run.rank_record(1, 0), peer)
    write_json(run.rank_record(1, 3), {**peer, "error": "KeyError: 'x'"})
    attempt(run, r0="restarted\n")

    def shown(*words: str) -> list[str]:
        assert logs(run, "--rank", "failed", *words) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "-" in line[:2]]

    assert shown() == ["1-2", "1-3"]
    assert shown("--attempt", "0") == ["0-1"]
    assert shown("--attempt", "all") == ["0-1", "1-2", "1-3"]
    with raises(RunDirectoryError):
        shown("--attempt", "2")


# --- following


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What happens between the looks of a command that follows, in this order; then nothing may be waited for."""

    def script(*steps: Callable[[], object]) -> None:
        left = list(steps)
        monkeypatch.setattr(logs_command.time, "sleep", lambda _: left.pop(0)())

    return script


def add(run: RunDirectory, number: int, name: str, text: str) -> None:
    with open(run.attempt_logs(number) / name, "a") as file:
        file.write(text)


def test_lines_of_several_ranks_are_labelled_as_they_arrive_across_attempts(
    run: RunDirectory, capsys: Captured, meanwhile: Callable[..., None]
) -> None:
    """Also of ranks whose files appear later; a line comes whole, and in the end without its end."""
    attempt(run, r0="early\n")
    meanwhile(
        lambda: (add(run, 0, "rank-0.out", "one\nhal"), add(run, 0, "rank-2.err", "warned\n")),
        lambda: add(run, 0, "rank-0.out", "f\n"),
        lambda: (add(run, 0, "rank-1.out", "killed he"), attempt(run, r1="again\n", r5="not wanted\n")),
        lambda: over(run, "completed"),
    )
    assert logs(run, "-f", "--rank", "0-2") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "[rank 0] early",
        "[rank 0] one",
        "[rank 2] warned",
        "[rank 0] half",
        "[rank 1] killed he",
        "[rank 1] again",
    ]
    assert shown.err == "==> attempt 1 <==\n"


def test_following_one_rank_prints_its_streams_apart_and_filtered(
    run: RunDirectory, capsys: Captured, meanwhile: Callable[..., None]
) -> None:
    attempt(run, r0="loss 1\n")
    meanwhile(
        lambda: (add(run, 0, "rank-0.out", "lr 2\nloss 3\n"), add(run, 0, "rank-0.err", "loss!\n")),
        lambda: over(run, "completed"),
    )
    assert logs(run, "-f", "--grep", "loss") == 0
    assert capsys.readouterr() == ("loss 1\nloss 3\n", "loss!\n")


def test_a_line_longer_than_a_block_is_followed_before_its_end(
    run: RunDirectory, capsys: Captured, meanwhile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a progress bar, which a rank never ends."""
    monkeypatch.setattr(logs_command, "BLOCK", 8)
    attempt(run, r0="")
    shown: list[str] = []
    meanwhile(
        lambda: add(run, 0, "rank-0.out", "0123456789abcdef"),
        lambda: (shown.append(capsys.readouterr().out), over(run, "completed")),
    )
    assert logs(run, "-f") == 0
    assert shown == ["0123456789abcdef"]


def test_a_followed_run_that_fails_shows_its_first_failure(
    run: RunDirectory, capsys: Captured, meanwhile: Callable[..., None]
) -> None:
    """It may start, and fail, while it is followed."""
    meanwhile(
        lambda: attempt(run, r0="x\n"),
        lambda: (failed(run, 0, 2), over(run, "failed")),
    )
    assert logs(run, "-f") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("x\n+---") and "clusterddp logs" in shown.err


def test_following_one_attempt_ends_with_it(
    run: RunDirectory, capsys: Captured, meanwhile: Callable[..., None]
) -> None:
    attempt(run, r0="a\n")
    meanwhile(lambda: attempt(run, r0="b\n"))
    assert logs(run, "-f", "--attempt", "0") == 0
    assert capsys.readouterr().out == "a\n"
    meanwhile(lambda: over(run, "completed"))
    assert logs(run, "-f", "--attempt", "all") == 0
    assert capsys.readouterr().out == "a\nb\n"


@pytest.mark.parametrize("begun", [True, False])
def test_following_a_run_ends_when_its_directory_is_deleted(
    run: RunDirectory, begun: bool, meanwhile: Callable[..., None]
) -> None:
    if begun:
        attempt(run, r0="a\n")
    meanwhile(lambda: shutil.rmtree(run.path))
    with raises(RunDirectoryError):
        logs(run, "-f")


def test_the_failed_ranks_of_a_live_run_cannot_be_followed(run: RunDirectory) -> None:
    attempt(run, r0="a\n")
    with raises(UsageError):
        logs(run, "-f", "--rank", "failed")
