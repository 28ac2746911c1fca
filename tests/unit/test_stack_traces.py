"""What is shown of a rank's log: the stack of what crashed, from the script's own frames on."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.failures.exit_status import ExitStatus
from clusterddp.failures.stack_traces import MOST_FRAMES, different_calls, end_of_log, users_line
from clusterddp.history.codec import sentence
from clusterddp.messages.reports import End
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.verdict import FirstFailure, RankEnd, failure_text
from tests.histories import event_of

BELOW = """  File "<frozen runpy>", line 291 in run_path
  File "/x/clusterddp/rank.py", line 153 in run_script
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
THREAD = """Thread 0x1 (most recent call first):
  File "/x/clusterddp/link.py", line 137 in _listen

"""
USER = '  File "train.py", line 7 in <module>\n'


def test_the_thread_that_crashed_is_shown_and_no_other() -> None:
    """Before it come those of clusterddp, as many as there are."""
    current = f"Current thread 0x2 (most recent call first):\n{USER}{BELOW}"
    log = f"noise\nFatal Python error: Segmentation fault\n\n{THREAD * 9}{current}"
    shown = end_of_log(f"{log}\nExtension modules: a, b (total: 2)\n")
    head = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x2 (most recent call first):"
    assert shown == f"{head}\n{USER.rstrip()}"


def test_a_crash_in_a_thread_without_python_shows_its_message_and_the_main_threads_stack() -> None:
    """Such as gloo's, which aborts the process."""
    said = "terminate called after throwing an instance of 'X'\n  what():  12 vs 8\n"
    log = (
        f"{said}Fatal Python error: Aborted\n\n{THREAD}Thread 0x3 (most recent call first):\n{USER}{BELOW}\nExtension m"
    )
    shown = end_of_log(log)
    assert shown == f"{said}Fatal Python error: Aborted\n\nThread 0x3 (most recent call first):\n{USER.rstrip()}"


def test_a_deep_stack_is_cut_and_a_log_without_one_shows_its_end() -> None:
    deep = "".join(f'  File "a.py", line {number} in f\n' for number in range(50))
    shown = end_of_log(f"Fatal Python error: Aborted\n\nCurrent thread 0x2 (most recent call first):\n{deep}")
    assert shown.endswith(f"line {MOST_FRAMES - 1} in f\n  ... {50 - MOST_FRAMES} more")
    assert end_of_log("\n".join(map(str, range(20)))) == "\n".join(map(str, range(8, 20)))


def test_ranks_that_were_ended_for_a_peer_are_not_reported_as_out_of_memory(tmp_path: object) -> None:
    """Killed by the launcher, or told to exit; a rank whose node ran out of memory still is."""
    others = [
        RankEnd(0, "n1", End.DIED, 2.0, death=ExitStatus(signal=9)),
        RankEnd(2, "n2", End.DISMISSED, 2.0, error="rank 1 (n1) failed"),
        RankEnd(3, "n2", End.DIED, 2.0, error="killed: out of memory", death=ExitStatus(out_of_memory=True)),
    ]
    first = RankEnd(1, "n1", End.EXCEPTION, 1.0, error="ValueError: x")
    lines = failure_text(RunDirectory(str(tmp_path)), 0, FirstFailure(first, others), 3.0).split("\n")
    assert "as a result: rank 0 (n1) was killed by clusterddp after rank 1 failed" in lines
    assert "as a result: rank 2 (n2) was killed by clusterddp after rank 1 failed" in lines
    assert "also failed: rank 3 (n2) killed: out of memory" in lines


def test_the_last_line_of_a_failed_run_has_the_reason() -> None:
    """Cut, where it is endless."""
    event = {
        "time": 7.5,
        "event": "failed",
        "attempt": 2,
        "attempts": 3,
        "step": 5,
        "reason": "3 consecutive attempts failed; last attempt: rank 1 ...",
    }
    assert sentence(event_of(event)) == f"attempt 2: failed at step 5: {event['reason']}"
    assert len(sentence(event_of({**event, "reason": "x" * 10_000})) or "") < 600


RAISED = """Traceback (most recent call last):
  File "/home/me/train.py", line 99, in <module>
    step()
  File "/home/me/train.py", line 40, in step
    dist.barrier()
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356, in barrier
    work.wait()
RuntimeError: Timed out waiting 20000ms for recv operation to complete
"""
CRASHED = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/home/me/train.py", line 52 in train
  File "/home/me/train.py", line 99 in <module>
"""
GLOO = "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 8 vs 4. Is there a distributed collective mismatch"


def test_ranks_in_different_collectives_are_named_with_their_lines() -> None:
    """Of a crash in gloo, and of torch's timeout, which may also mean that one of them was late."""
    assert (users_line(RAISED), users_line(CRASHED)) == ("train.py:40 (step)", "train.py:52 (train)")
    assert users_line(RAISED.replace("/home/me/", "/home/me/clusterddp/")) == "train.py:40 (step)"  # a folder's name
    order = "Every rank must call the same collectives in the same order"
    where = "(rank 1 in train.py:52 (train), rank 0 in train.py:40 (step))"
    texts = {1: CRASHED, 0: RAISED}
    assert different_calls(GLOO, texts) == f"the ranks called different collectives {where}. {order}"
    assert different_calls(GLOO, {1: CRASHED, 0: ""}) == f"the ranks called different collectives. {order}"
    late = f"the ranks waited in different calls {where}. One was late, or they called different collectives"
    assert different_calls(RAISED, texts) == late
    assert different_calls(RAISED, {1: RAISED, 0: RAISED}) == ""
    assert different_calls("ValueError: boom", texts) == ""


def test_the_box_of_a_crash_in_mismatched_collectives_says_what_to_do(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.attempt_logs(0).mkdir(parents=True)
    (run.attempt_logs(0) / "rank-1.err").write_text(f"terminate called\n  what(): {GLOO}\n{CRASHED}")
    failure = RankEnd(1, "n1", End.DIED, 1.0, error="killed by signal 6 (SIGABRT)")
    other = RankEnd(0, "n0", End.EXCEPTION, 1.1, error="RuntimeError: Connection reset", traceback=RAISED)
    box = failure_text(run, 0, FirstFailure(failure, [other], 4), 2.0)
    said = " ".join(line.strip("|").strip() for line in box.splitlines())
    assert "the ranks called different collectives (rank 1 in train.py:52 (train), rank 0 in train.py:40" in said, box


def test_a_box_names_the_log_that_has_the_reason(tmp_path: Path) -> None:
    """Some programs write errors to their stdout."""
    run = RunDirectory(tmp_path / "run")
    run.attempt_logs(0).mkdir(parents=True)
    out, err = (run.attempt_logs(0) / f"rank-1.{kind}" for kind in ("out", "err"))
    out.write_text("Error: no such data set: mnits\n")
    err.write_text("\n")
    failure = RankEnd(1, "n1", End.EXIT, 1.0, error="exit code 3")
    box = failure_text(run, 0, FirstFailure(failure), 2.0)
    assert f"log: {out}" in box and "Error: no such data set: mnits" in box
    err.write_text("Traceback: here\n")
    assert f"log: {err}" in failure_text(run, 0, FirstFailure(failure), 2.0)


@pytest.mark.parametrize(("printed", "repeated"), [(RAISED, False), ("closed its stderr\n", True)])
def test_a_box_below_a_ranks_output_repeats_only_what_is_not_there(
    tmp_path: Path, printed: str, repeated: bool
) -> None:
    """The script may have closed its stderr."""
    run = RunDirectory(tmp_path)
    run.create()
    (run.attempt_logs(run.create_attempt()) / "rank-0.err").write_text(f"a warning\n{printed}last words\n")
    first = FirstFailure(RankEnd(0, "n1", End.EXCEPTION, 1.0, error="ValueError: x", traceback=RAISED))
    assert (RAISED.splitlines()[0] in failure_text(run, 0, first, 2.0, above=True)) is repeated
    assert RAISED.splitlines()[0] in failure_text(run, 0, first, 2.0)
