"""The verdict on an attempt, and why the ranks were told to stop: the decisions alone, as tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.failures.exit_status import ExitStatus, in_order, of_tasks
from clusterddp.messages.reports import End
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.run_states import Cause, read_cause
from clusterddp.supervisor.attempt_progress import Progress, doubt, progress
from clusterddp.supervisor.verdict import Action, RankEnd, judge
from tests.histories import view

NOW = 1_000_000.0


def job(
    state: str, preempt_time: float | None = None, end_time: float | None = NOW + 9000, reason: str = "None"
) -> JobInfo:
    return JobInfo("41", state, reason, "n[1-2]", 0, preempt_time, end_time)


@pytest.mark.parametrize(
    ("info", "cause"),
    [
        (job("RUNNING", preempt_time=NOW), Cause.PREEMPTED),
        (job("CONFIGURING", preempt_time=NOW), Cause.PREEMPTED),
        (job("COMPLETING", preempt_time=NOW), Cause.PREEMPTED_WITHOUT_GRACE),
        (job("PENDING"), Cause.PREEMPTED_WITHOUT_GRACE),
        (job("COMPLETING"), Cause.CANCELLED),
        (job("CANCELLED"), Cause.CANCELLED),
        (None, Cause.UNKNOWN),
        (job("NODE_FAIL"), Cause.ENDED_OTHERWISE),
        (job("COMPLETING", reason="NodeDown"), Cause.ENDED_OTHERWISE),
        (job("CANCELLED"), Cause.CANCELLED),
        (job("RUNNING", end_time=NOW + 130), Cause.TIME_LIMIT),
        (job("RUNNING", end_time=NOW + 9000), Cause.NONE),
        (job("RUNNING", end_time=None), Cause.NONE),
        (job("TIMEOUT"), Cause.TIMED_OUT),
        (job("RUNNING", preempt_time=NOW, end_time=NOW + 10), Cause.PREEMPTED),
    ],
)
def test_the_controllers_answers_are_interpreted_as_slurm_was_seen_to_behave(
    info: JobInfo | None, cause: Cause
) -> None:
    """Each row was seen on 22.05.8."""
    assert read_cause(info, restarts=0, notice_s=120, grace_s=lambda: 0, now=NOW) is cause


def end(what: str, rank: int = 0, lost_at: float = 1.0, **values: object) -> RankEnd:
    return RankEnd(rank, f"n{rank}", End(what), lost_at, used_clusterddp=True, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "exit_code", "cause", "action"),
    [
        (["done", "done"], 0, Cause.PREEMPTED, Action.COMPLETE),
        (["stopped", "stopped"], 0, Cause.PREEMPTED, Action.AGAIN),
        (["stopped", "stopped"], 0, Cause.TIME_LIMIT, Action.AGAIN),
        (["stopped", "stopped"], 0, Cause.PREEMPTED_WITHOUT_GRACE, Action.LEAVE_TO_SLURM),
        (["stopped", "stopped"], 0, Cause.REQUEUED, Action.LEAVE_TO_SLURM),
        (["stopped", "stopped"], 0, Cause.CANCELLED, Action.CANCEL),
        (["stopped", "stopped"], 0, Cause.NONE, Action.LEAVE),
        (["stopped", "stopped"], 0, Cause.INTERRUPTED, Action.LEAVE),
        (["stopped", "stopped"], 0, Cause.TIMED_OUT, Action.AGAIN),
        (["stopped", "stopped"], 1, Cause.SUPERSEDED, Action.LEAVE),
        (["died", "exception"], 143, Cause.PREEMPTED, Action.AGAIN),
        (["died", "died"], 143, Cause.CANCELLED, Action.CANCEL),
        (["exception", "died"], 1, Cause.NONE, Action.FAIL),
        (["exception", "died"], 1, Cause.INTERRUPTED, Action.LEAVE),
        (["done", "exit"], 3, Cause.NONE, Action.FAIL),
        (["done", "done"], 139, Cause.NONE, Action.COMPLETE),  # a crash while the interpreter shut down
        (["done", "done"], 3, Cause.NONE, Action.FAIL),
        (["stopped", "done"], 0, Cause.PREEMPTED, Action.AGAIN),
        (["done", "dismissed"], 1, Cause.NONE, Action.RESTART),  # the node of a rank that was done was lost
    ],
)
def test_the_verdict_follows_from_the_ranks_and_the_controller(
    ends: list[str], exit_code: int, cause: Cause, action: Action
) -> None:
    """Completed means that every rank exited without being stopped; requeued only as the controller says."""
    assert judge([end(what, rank) for rank, what in enumerate(ends)], exit_code, True, lambda: cause).action is action


@pytest.mark.parametrize(
    ("told", "used_clusterddp", "cause", "expected"),
    [
        (False, True, Cause.NONE, Cause.BY_SCRIPT),
        (True, True, Cause.NONE, Cause.NONE),  # a signal, of which Slurm knows nothing
        (False, False, Cause.NONE, Cause.NONE),  # the same before all ranks had joined
        (False, True, Cause.CANCELLED, Cause.CANCELLED),
        (True, True, Cause.INTERRUPTED, Cause.INTERRUPTED),
    ],
)
def test_a_stop_without_a_request_is_the_scripts(
    told: bool, used_clusterddp: bool, cause: Cause, expected: Cause
) -> None:
    """It has called run.stop() or requeue()."""
    ends = [replace(end("stopped", rank), used_clusterddp=used_clusterddp) for rank in (0, 1)]
    assert judge(ends, 0, told, lambda: cause).cause is expected


def test_a_completed_run_does_not_query_the_controller() -> None:
    """Finished work stays finished, whatever Slurm reports."""

    def ask() -> Cause:
        raise AssertionError("asked")

    assert judge([end("done")], 0, True, ask).action is Action.COMPLETE


def test_exit_0_after_a_notice_is_stopped_not_done_for_a_script_without_clusterddp() -> None:
    """Its own TERM handler may have saved and exited with 0; without a notice it is done."""
    plain = [RankEnd(0, "n1", End.DONE, 1.0)]
    assert judge(plain, 0, True, lambda: Cause.PREEMPTED).action is Action.AGAIN
    assert judge(plain, 0, True, lambda: Cause.NONE).action is Action.COMPLETE


def test_a_crash_near_the_time_limit_is_a_crash_unless_the_ranks_were_told_to_stop() -> None:
    """Before any progress an exception of the script ends the run, and a kill restarts it, whatever the clock says."""
    ends = [end("exception", 0)]
    assert judge(ends, 1, False, lambda: Cause.TIME_LIMIT).action is Action.FAIL
    assert judge(ends, 1, True, lambda: Cause.TIME_LIMIT).action is Action.AGAIN
    killed = [end("died", 0)]
    assert judge(killed, 137, False, lambda: Cause.TIME_LIMIT).action is Action.RESTART
    assert judge(killed, 137, True, lambda: Cause.TIME_LIMIT).action is Action.AGAIN


@pytest.mark.parametrize(("age_s", "cause"), [(5, Cause.ENDED_IN_GRACE), (25, Cause.PREEMPTED_WITHOUT_GRACE)])
def test_a_job_that_ends_before_its_grace_does_was_scancelled(age_s: float, cause: Cause) -> None:
    """Slurm ends a grace late, never early; and what may be a scancel is never run again. The answer may come late."""
    ending = replace(job("COMPLETING", preempt_time=NOW - age_s), end_time=NOW)
    assert read_cause(ending, restarts=0, notice_s=120, grace_s=lambda: 20, now=NOW + 60) is cause


def test_a_time_limit_within_a_grace_is_no_scancel() -> None:
    """Slurm then ends the grace at the time limit. The run was taken for cancelled, and never ran again."""
    ended = replace(job("COMPLETING", preempt_time=NOW - 5), end_time=NOW, run_time_s=3600.0, time_limit_s=3600.0)
    assert read_cause(ended, 0, 90.0, lambda: 20.0, NOW) is Cause.PREEMPTED_WITHOUT_GRACE


def test_a_cancelled_job_is_cancelled_however_long_it_has_run() -> None:
    """Jobs may run beyond their limit, by OverTimeLimit, and a supervisor whose node stood still asks late."""
    cancelled = replace(job("CANCELLED"), run_time_s=3601.0, time_limit_s=3600.0)
    assert read_cause(cancelled, 0, 90.0, lambda: 0.0, NOW) is Cause.CANCELLED


def test_a_later_start_of_the_same_job_is_not_this_attempts_cause() -> None:
    """Slurm requeued the job already: the record that is read is about the next start."""
    later = JobInfo("41", "RUNNING", "None", "n3", 1, None, NOW + 9000)
    assert read_cause(later, restarts=0, notice_s=120, grace_s=lambda: 0, now=NOW) is Cause.PREEMPTED_WITHOUT_GRACE


@pytest.mark.parametrize("info", [job("PENDING"), replace(job("COMPLETING"), restarts=1)])
def test_a_requeue_without_a_preemption_is_recognised_where_preemptions_have_a_grace(info: JobInfo) -> None:
    """By `scontrol requeue`: the record does not say why, and a preemption would have been announced (22.05.8)."""
    for grace_s, cause in ((20, Cause.REQUEUED), (math.inf, Cause.REQUEUED), (0, Cause.PREEMPTED_WITHOUT_GRACE)):
        assert read_cause(info, restarts=0, notice_s=120, grace_s=lambda: grace_s, now=NOW) is cause  # noqa: B023


def test_the_first_failure_is_the_one_whose_connection_broke_first() -> None:
    """Rank 1 raised; rank 0's lost connection is its consequence, whatever the ranks' order."""
    ends = [end("exception", 0, lost_at=5.0, error="RuntimeError: connection closed"), end("exception", 1, lost_at=4.0)]
    verdict = judge(ends, 1, True, lambda: Cause.NONE)
    assert verdict.first_failure is not None
    assert verdict.first_failure.rank == 1


def test_the_users_own_exception_comes_before_a_lost_connection_at_the_same_moment() -> None:
    """Its own connection to the supervisor and its peers' to it break at once, and arrive in any order."""
    peer = end("exception", 0, lost_at=4.0, error="RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed")
    own = end("exception", 1, lost_at=4.01, error="ValueError: bad label")
    verdict = judge([peer, own], 1, False, lambda: Cause.NONE)
    assert verdict.action is Action.FAIL
    assert verdict.first_failure == own


@pytest.mark.parametrize(
    ("failure", "action"),
    [
        (RankEnd(1, "n1", End.DIED, 1.0, used_clusterddp=True), Action.RESTART),
        (RankEnd(1, "n1", End.LOST, 1.0), Action.RESTART),
        *[
            (RankEnd(1, "n1", End.EXCEPTION, 1.0, error=error, used_clusterddp=True), action)
            for error, action in [
                ("torch.distributed.DistBackendError: NCCL error in: ...", Action.RESTART),
                ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", Action.RESTART),
                ("AcceleratorError: CUDA error: device-side assert triggered", Action.FAIL),
                ("RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer", Action.RESTART),
                ("ConnectionResetError: [Errno 104] Connection reset by peer", Action.RESTART),
                ("ValueError: the connection closed by peer is mentioned", Action.FAIL),
                ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Action.FAIL),
                ("CheckpointError: no checkpoint of this run can be read", Action.FAIL),
            ]
        ],
        (RankEnd(1, "n1", End.EXIT, 1.0, exit_code=3), Action.FAIL),
    ],
)
def test_before_any_progress_only_failures_from_outside_the_script_restart(failure: RankEnd, action: Action) -> None:
    """What the controller ends is not restarted in the job that is being ended."""
    assert judge([failure], 1, False, lambda: Cause.NONE).action is action
    assert judge([failure], 1, True, lambda: Cause.CANCELLED).action is not Action.RESTART


EIO = end("exception", 1, error="OSError: [Errno 5] Input/output error", exception="OSError", step=1200,
    traceback='''Traceback:
  File "/home/me/train.py", line 12, in main
    batch = read(path)
  File "/home/me/lib/python3.11/site-packages/torch/x.py", line 3, in read
OSError: [Errno 5] Input/output error''')  # fmt: skip


@pytest.mark.parametrize(
    ("progress", "action", "because"),
    [
        (Progress(steps=40), Action.RESTART, "the attempt had completed 40 steps"),
        (Progress(steps=0), Action.FAIL, ""),
        (Progress(steps=0, seconds=9000.0), Action.FAIL, ""),
        (Progress(steps=None, seconds=61.0), Action.RESTART, "the attempt had run for 61 s"),
        (Progress(steps=None, seconds=59.0), Action.FAIL, ""),
        (Progress(steps=0, earlier=True), Action.RESTART, "an earlier attempt had made progress"),
        (Progress(steps=40, last_failure="OSError at train.py:12 (main), step 1199"), Action.RESTART, None),
        (Progress(steps=40, last_failure="OSError at train.py:13 (main), step 1200"), Action.RESTART, None),
        (Progress(steps=40, last_failure="ValueError at train.py:12 (main), step 1200"), Action.RESTART, None),
        (Progress(steps=40, last_failure="OSError at train.py:12 (main), step 1200"), Action.FAIL,
         "the previous attempt failed with the same exception at the same line and step"),
    ],
)  # fmt: skip
def test_an_exception_restarts_all_ranks_after_progress_unless_it_repeats(
    progress: Progress, action: Action, because: str | None
) -> None:
    """Whatever its type. The job's own end takes precedence, and an unreachable controller restarts nothing."""
    verdict = judge([EIO], 1, False, lambda: Cause.NONE, progress)
    assert verdict.action is action
    assert because in (None, verdict.because)
    if action is Action.FAIL:
        assert verdict.reason == EIO.sentence() + (f". Not restarted, because {because}" if because else "")
    else:
        assert judge([EIO], 1, False, lambda: Cause.PREEMPTED, progress).action is Action.AGAIN
        assert judge([EIO], 1, False, lambda: Cause.UNKNOWN, progress).action is Action.LEAVE


def test_what_a_restart_would_only_repeat_fails_at_once() -> None:
    """A checkpoint that does not fit, also after progress; a preemption meanwhile continues the run as ever."""
    progress = Progress(steps=0, earlier=True)
    assert judge([replace(EIO, final=True)], 1, False, lambda: Cause.NONE, progress).action is Action.FAIL
    assert judge([replace(EIO, final=True)], 1, True, lambda: Cause.PREEMPTED, progress).action is Action.AGAIN


EXIT = end("exit", 1, error="exit code 3", exit_code=3, step=1200)


@pytest.mark.parametrize(
    ("failure", "progress", "action"),
    [
        (EXIT, Progress(), Action.FAIL),
        (EXIT, Progress(steps=40), Action.RESTART),
        (EXIT, Progress(steps=40, last_failure="exit code 3, step 1200"), Action.FAIL),
        (EXIT, Progress(steps=40, last_failure="exit code 3, step 1199"), Action.RESTART),
        (replace(EXIT, step=None), Progress(seconds=9000.0, last_failure="exit code 3"), Action.FAIL),
        (replace(EXIT, step=None), Progress(saved=True, last_failure="exit code 3"), Action.RESTART),
    ],
)
def test_sys_exit_with_an_error_restarts_like_an_exception(
    failure: RankEnd, progress: Progress, action: Action
) -> None:
    """Its line is unknown, so that only the code and the step tell whether it repeats."""
    verdict = judge([failure], 3, False, lambda: Cause.NONE, progress)
    assert verdict.action is action and verdict.exit_code == 3
    if progress.last_failure == failure.raised and action is Action.FAIL:
        because = "the previous attempt failed with the same exit code at the same step"
        words = f"rank 1 (n1) exited with code 3. Not restarted, because {because}"
        assert verdict.reason == words


def test_the_message_of_sys_exit_follows_its_code() -> None:
    assert replace(EXIT, exit_code=1, error="loss is NaN").words() == "exited with code 1: loss is NaN"


LACKING = end("exception", 1, error="DeviceError: the ranks on node n1 need 8 GPUs, but Slurm gave 7", lacks_gpus=True)
MEMORY = replace(EIO, error="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", step=None)


def test_a_node_with_too_few_gpus_is_at_fault_only_once_the_run_has_made_progress() -> None:
    """Before that the job asks for too many."""
    assert judge([LACKING], 1, False, lambda: Cause.NONE).action is Action.FAIL
    verdict = judge([LACKING], 1, False, lambda: Cause.NONE, Progress(earlier=True))
    assert verdict.action is Action.RESTART and LACKING.of_the_node and LACKING.lacks_gpus


def test_out_of_memory_before_the_first_step_of_a_later_attempt_passes() -> None:
    """The attempt before may still have held it: also the second time. It is not the node's fault."""
    again = Progress(steps=0, earlier=True, last_failure=MEMORY.raised)
    verdict = judge([MEMORY], 1, False, lambda: Cause.NONE, again)
    assert (verdict.action, verdict.because) == (
        Action.RESTART,
        "the previous attempt may still have held memory",
    )
    assert not MEMORY.of_the_node
    assert judge([MEMORY], 1, False, lambda: Cause.NONE, replace(again, steps=5)).action is Action.FAIL
    assert judge([MEMORY], 1, False, lambda: Cause.NONE).action is Action.FAIL
    without_steps = replace(again, steps=None, seconds=1200.0)  # such attempts are never counted as fruitless
    assert judge([MEMORY], 1, False, lambda: Cause.NONE, without_steps).action is Action.FAIL


def test_an_exception_is_known_by_its_type_the_scripts_line_and_the_step() -> None:
    """Lines of libraries do not count; an exception outside of the loop has no step."""
    assert EIO.raised == "OSError at train.py:12 (main), step 1200"
    assert replace(EIO, step=None).raised == "OSError at train.py:12 (main)"
    assert end("died").raised is None
    assert end("exception", 1, error="KeyboardInterrupt: ").words() == "raised KeyboardInterrupt"


def history(*lines: tuple[int, float, str, dict[str, object]]) -> list[dict[str, object]]:
    return [{"attempt": attempt, "time": at, "event": event, **values} for attempt, at, event, values in lines]


def test_progress_is_read_from_the_history() -> None:
    """Steps of this attempt, its age, what earlier attempts have made, and what the last failure was."""
    first = history((0, 10.0, "started", {}), (0, 20.0, "training", {"step": 0}))
    assert progress(view(first), 0, 0, 30.0) == Progress(0, 20.0)
    assert progress(view(first), 0, 40, 30.0) == Progress(40, 20.0)
    assert progress(view(first[:1]), 0, None, 90.0) == Progress(None, 80.0)
    failed = history((0, 30.0, "rank_failed", {"step": 40, "raised": "OSError at a.py:1 (f), step 40"}))
    later = history((1, 50.0, "started", {}), (1, 60.0, "resumed", {"step": 35}))
    found = progress(view([*first, *failed, *later]), 1, 35, 61.0)
    assert found == Progress(0, 11.0, True, "OSError at a.py:1 (f), step 40", quickly=1)
    forked = history((0, 1.0, "forked", {"step": 500}), (1, 2.0, "started", {}), (1, 3.0, "resumed", {"step": 500}))
    assert progress(view(forked), 1, 500, 4.0) == Progress(0, 2.0)
    fell_back = history((0, 1.0, "checkpoint_damaged", {"step": 9}), (0, 2.0, "resumed", {"step": 5}))
    assert not progress(view([*fell_back, *history((1, 3.0, "started", {}))]), 1, None, 4.0).earlier
    plain = history((0, 0.0, "started", {}), (0, 70.0, "stopped", {"step": None}), (1, 80.0, "started", {}))
    assert progress(view(plain), 1, None, 81.0).earlier


def test_a_failure_counts_as_repeated_only_if_no_attempt_made_progress_since() -> None:
    """An exception outside of the loop has no step: the same one, days of training later, is another failure."""
    raised = "OSError at a.py:1 (setup)"
    failed = history(
        (0, 0.0, "started", {}), (0, 9.0, "training", {"step": 0}), (0, 10.0, "rank_failed", {"raised": raised})
    )
    short = history((1, 11.0, "started", {}), (1, 12.0, "resumed", {"step": 0}), (1, 13.0, "stopped", {"step": 0}))
    long = history((1, 11.0, "started", {}), (1, 12.0, "resumed", {"step": 0}), (1, 9e4, "stopped", {"step": 800}))
    for between, last in ((short, raised), (long, None)):
        events = [*failed, *between, *history((2, 9e4, "started", {}))]
        assert progress(view(events), 2, None, 9e4).last_failure == last


@pytest.mark.parametrize(
    ("death", "sentence"),
    [
        (None, "was killed or called os._exit(), and left no traceback"),
        (ExitStatus.of_code(-9), "was killed by SIGKILL. Unless you sent it, check whether memory ran out"),
        (ExitStatus(signal=9, oom_kill=True), "was killed by SIGKILL, probably out of memory"),
        (ExitStatus.of_code(-11), "was killed by signal 11 (SIGSEGV)"),
        (ExitStatus.of_code(-6), "was killed by signal 6 (SIGABRT)"),
        (ExitStatus.of_code(3), "exited with code 3 and no traceback, probably because of os._exit()"),
        (ExitStatus(out_of_memory=True), "was killed because the job ran out of memory. Request more with --mem"),
    ],
)
def test_a_rank_without_a_record_is_named_with_what_killed_it(death: ExitStatus | None, sentence: str) -> None:
    """SIGKILL leaves no traceback; the rank, its host and the signal are still named."""
    assert RankEnd.of(3, "n2", 1.0, None, death).sentence() == f"rank 3 (n2) {sentence}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("MemoryError: ", "ran out of memory: MemoryError"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried to "
         "allocate 9 bytes. Error code 12", "ran out of memory: RuntimeError: "),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "ran out of memory: OutOfMemoryError: "),
        ("ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
         "  File 'x'\nValueError: bad sample 7\n",
         "raised ValueError: Caught ValueError in DataLoader worker process 0. ... ValueError: bad sample 7"),
    ],
)  # fmt: skip
def test_an_exception_is_named_in_one_line(error: str, words: str) -> None:
    """Out of memory as such; a worker's own exception behind torch's."""
    assert end("exception", error=error).words().startswith(words)


@pytest.mark.parametrize(("code", "name"), [(-11, "SIGSEGV"), (-37, "Real-time signal 3")])
def test_every_signal_has_a_name(code: int, name: str) -> None:
    """Also one that Python has none for."""
    assert ExitStatus.of_code(code).words() == f"was killed by signal {-code} ({name})"


def test_srun_tells_how_each_task_ended() -> None:
    """As seen on 22.05.8; what --kill-on-bad-exit did to the others comes after the first failure."""
    exit_statuses = of_tasks(
        """srun: error: n2: task 3: Segmentation fault (core dumped)
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-20T12:46:39 ***
srun: error: n2: task 2: Terminated
srun: error: n1: tasks 0-1,4: Killed
srun: error: n1: task 5: Out Of Memory
srun: error: n1: task 6: Exited with exit code 3
srun: error: n1: task 3: Killed
srun: Force Terminated StepId=1.0
"""
    )
    killed = ExitStatus(signal=9)
    assert exit_statuses == {
        3: ExitStatus(signal=11),
        2: ExitStatus(signal=15),
        0: killed,
        1: killed,
        4: killed,
        5: ExitStatus(out_of_memory=True),
        6: ExitStatus(exit_code=3),
    }


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd-n1: error: Detected 3 oom-kill event(s) in step 1.0 cgroup. Some of your processes may have been "
        "killed by the cgroup out-of-memory handler.",
    ],
)
def test_memory_is_the_likely_cause_of_a_kill_only_if_slurm_has_seen_it(line: str) -> None:
    """Then the node is not to blame. Anybody may send SIGKILL."""
    task = "srun: error: n1: task 0: Killed\n"
    (seen,), (unseen,) = of_tasks(f"{line}\n{task}").values(), of_tasks(task).values()
    ends = [RankEnd.of(0, "n1", 1.0, None, status) for status in (seen, unseen)]
    assert [(status.oom_kill, end.of_the_node) for status, end in zip((seen, unseen), ends, strict=True)] == [
        (True, False),
        (False, True),
    ]
    assert of_tasks(f"{line}\nsrun: error: n1: task 0: Segmentation fault\n") == {0: ExitStatus(signal=11)}


def test_a_task_that_could_not_be_launched_is_the_first_failure() -> None:
    """It was never heard of; the ranks that waited for it were killed."""
    exit_statuses = in_order(
        of_tasks("srun: error: n1: task 0: Killed\nsrun: error: task 1 launch failed: Slurmd could not connect IO\n")
    )
    waited, missing = (
        end("died", 0, lost_at=4.0, death=exit_statuses[0]),
        end("died", 1, float("inf"), death=exit_statuses[1]),
    )
    verdict = judge([waited, missing], 137, False, lambda: Cause.NONE)
    assert (verdict.first_failure, verdict.action) == (missing, Action.RESTART)
    assert exit_statuses[1].words() == "was not started: Slurmd could not connect IO"


def test_a_rank_that_is_killed_before_it_joins_comes_before_those_that_were_told_to_exit_for_it() -> None:
    """They joined, so that it seemed to be lost after them, and the run ended."""
    dismissed = end("dismissed", 0, lost_at=4.0, error="rank 1 (n1) exited")
    killed = end("died", 1, float("inf"), death=in_order({1: ExitStatus(signal=9), 0: ExitStatus(exit_code=1)})[1])
    verdict = judge([dismissed, killed], 137, False, lambda: Cause.NONE)
    assert (verdict.first_failure, verdict.action) == (killed, Action.RESTART)


def test_a_rank_that_is_killed_before_it_joins_comes_before_those_that_were_killed_for_it() -> None:
    """They joined after the order to exit was sent, and did not get it. Else the wrong node would count as suspect."""
    killed = in_order({1: ExitStatus(signal=9), 0: ExitStatus(signal=9)})
    ends = [RankEnd.of(rank, "n1", lost_at, None, killed[rank]) for rank, lost_at in ((0, 6.0), (1, math.inf))]
    failure = judge(ends, 137, False, lambda: Cause.NONE).first_failure
    assert failure is not None and failure.rank == 1


def test_a_rank_whose_record_cannot_be_read_keeps_how_its_process_ended(tmp_path: Path) -> None:
    """Else it seemed to have been killed after its peer, and the peer's name, node and error were shown."""
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.json").mkdir()  # EISDIR; a disk that fails gives EIO
    ends = [
        RankEnd.read(rank, "n1", lost_at, tmp_path / f"rank-{rank}.json", ExitStatus(signal=signum))
        for rank, lost_at, signum in ((0, 4.0, 9), (1, 4.1, 11))
    ]
    failure = judge(ends, 139, False, lambda: Cause.NONE).first_failure
    assert failure is not None and failure.rank == 1
    assert failure.error.startswith("was killed by signal 11 (SIGSEGV). Could not read its record: ")


def test_a_segfault_comes_before_the_kills_that_it_caused() -> None:
    """The launcher's KILL of a peer arrives within the jitter; so does the peer's word of a closed connection."""
    peer = end("exception", 0, lost_at=4.0, error="RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed")
    ended = end("died", 2, lost_at=4.1, death=ExitStatus(signal=9))
    crashed = end("died", 1, lost_at=4.2, death=ExitStatus(signal=11))
    verdict = judge([peer, crashed, ended], 139, False, lambda: Cause.NONE)
    assert verdict.first_failure == crashed
    assert verdict.others == (peer, ended)


@pytest.mark.parametrize("later_s", [0.01, 2.5])
def test_a_killed_rank_comes_before_the_peers_that_miss_it(later_s: float) -> None:
    """Its connection may break a moment after a peer has failed of it; the launcher saw it end first."""
    peer = end("exception", 0, lost_at=4.0, error="RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed")
    exit_statuses = in_order({1: ExitStatus(signal=9), 0: ExitStatus(exit_code=1), 2: ExitStatus(signal=9)})
    killed, ended = (end("died", rank, lost_at=4.0 + later_s, death=exit_statuses[rank]) for rank in (1, 2))
    assert judge([peer, killed, ended], 137, False, lambda: Cause.NONE).first_failure == killed


def ran(attempt: int, begin: float, end: float, last: str = "requeued", *more: str) -> list[dict[str, Any]]:
    """The events of an attempt whose script ran for so long."""
    names = [("phase", begin), *((name, begin) for name in more), ("phase", end), (last, end + 1)]
    events = [{"attempt": attempt, "event": name, "time": time} for name, time in names]
    return [event | {"phase": "ending" if event["time"] == end else "importing"} for event in events]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*ran(0, 0, 9, "completed")], None),
        ([*ran(0, 0, 100), *ran(1, 200, 209, "completed")], "after 9 s, less than a tenth of the 100 s of attempt 0"),
        ([*ran(0, 0, 100), *ran(1, 200, 211, "completed")], None),
        ([*ran(0, 0, 100), *ran(1, 200, 201, "completed"), *ran(2, 300, 301)], "of the 100 s of attempt 0"),
        ([*ran(0, 0, 100, "requeued", "training"), *ran(1, 200, 290)], "without completing a step"),
        ([*ran(0, 0, 100, "requeued", "training"), *ran(1, 200, 201, "requeued", "training")], None),
        ([{"attempt": 0, "event": "started", "time": 0}, *ran(1, 200, 201)], None),
        ([*ran(0, 0, 20, "failed"), *ran(1, 200, 201, "completed")], None),
        ([*ran(0, 0, 100, "failed"), *ran(1, 200, 201, "completed")], "of the 100 s of attempt 0"),
    ],
)  # fmt: skip
def test_exit_0_of_a_later_attempt_is_doubted_if_it_was_short_or_made_no_step(
    events: list[dict[str, Any]], words: str | None
) -> None:
    """Only of a script that ran before; an attempt that ended the same way says nothing."""
    found = doubt(view(events), events[-1]["attempt"])
    assert found is None if words is None else words in str(found)
