"""The user's hook: what it is told, and that it delays and changes nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef.job import Job, Limits
from clusterddp.jobdef.load import from_values, load_resolved
from clusterddp.process import descendants, process_start
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.attempt_state import Notice, Stop
from clusterddp.supervisor.hook import Hook, hook_event
from clusterddp.supervisor.main import supervise
from tests.fake_slurm import FakeController, FakeRanks, RanksHere
from tests.histories import event_of, happened
from tests.unit.test_attempt import JOB, STOPPED
from tests.waiting import wait_until
from tests.wording import raises, says


def telling(run: RunDirectory, job: Job = JOB) -> Job:
    """The job with a hook that writes down what it is told, and where."""
    command = f"cat >> {run.path}/told; echo $CLUSTERDDP_RUN_DIR $CLUSTERDDP_ATTEMPT"
    return dataclasses.replace(job, hook=("/bin/sh", "-c", command))


def told(run: RunDirectory) -> list[dict[str, Any]]:
    path = run.path / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_that_completes_tells_its_hook_before_the_supervisor_exits(run: RunDirectory) -> None:
    """With the line of the history, and the run in the environment."""
    ranks = FakeRanks(run, {"end": "done"})
    assert supervise(run, telling(run), lambda *_: ranks, FakeController(Cause.NONE)) == 0
    (line,) = told(run)
    assert line | {"time": 0} == {
        "time": 0,
        "attempt": 0,
        "event": "completed",
        "step": None,
        "attempts": 1,
        "reason": "all ranks finished",
        "run": str(run),
        "job_name": "x",
    }
    assert run.hook_log.read_text() == f"{run} 0\n"


class Preempting(FakeController):
    """It says that the job is being preempted as soon as it is asked."""

    def notice(self) -> Notice:
        return Notice(None, Stop.PREEMPTION)


def test_a_preemption_is_told_once_and_while_the_ranks_still_run(run: RunDirectory) -> None:
    """As soon as the controller confirms it; the requeue that follows is the same event."""

    class Saving(FakeRanks):
        def wait(self) -> int:
            wait_until(lambda: told(run), "the hook to be told while the ranks save")
            return super().wait()

    controller = Preempting(Cause.PREEMPTED)
    number = run.create_attempt()
    code = Attempt(run, telling(run), number, Saving(run, STOPPED), controller).supervise()
    assert (code, controller.asked) == (controller.again_code, ["requeue"])
    (line,) = told(run)
    assert (line["event"], line["job"], line["attempt"]) == ("preempted", "41", 0)


def test_a_limit_that_ends_a_run_before_its_next_attempt_is_told_as_a_failure(run: RunDirectory) -> None:
    """No ranks are started any more."""
    happened(run, {"time": 1.0, "attempt": 0, "event": "requeued", "cause": "preempted"})
    job = telling(run, dataclasses.replace(JOB, limits=Limits(attempts=1)))
    supervise(run, job, lambda *_: FakeRanks(run, STOPPED), FakeController(Cause.NONE))
    assert [line["event"] for line in told(run)] == ["failed"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo oh; exit 3", "hook failed with exit code 3 ('completed'). Its output is in "),
        ("kill -KILL $$", "hook was killed by signal 9 ('completed'). Its output is in "),
        ("sleep 600 & echo $! > $CLUSTERDDP_RUN_DIR/pid; wait", "hook timed out after 0 s ('completed'). "),
        (None, "could not call the hook for 'completed': No such file or directory (/nowhere/notify)"),
    ],
)
def test_a_hook_that_fails_changes_nothing_about_the_run(
    run: RunDirectory,
    command: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a message in the job's log; one that does not end is killed, with its children."""
    monkeypatch.setattr(Hook, "timeout_s", 0.3)
    job = dataclasses.replace(JOB, hook=("/bin/sh", "-c", command) if command else ("/nowhere/notify",))
    assert supervise(run, job, lambda *_: FakeRanks(run, {"end": "done"}), FakeController(Cause.NONE)) == 0
    assert said in capsys.readouterr().err
    if (run.path / "pid").exists():
        child = int((run.path / "pid").read_text())
        wait_until(lambda: process_start(child) is None, "the hook's child to be killed")


def test_a_hook_that_is_slow_does_not_hold_the_nodes_of_a_preempted_job(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed at the bound: of what is left, Slurm would have to end the rest."""
    command = ("/bin/sh", "-c", "echo > $CLUSTERDDP_RUN_DIR/here; sleep 600")
    slow = Hook(run, dataclasses.replace(JOB, hook=command), 0, hurry=True)
    slow.handover_s = 0.05
    slow.call("preempted", {})
    wait_until((run.path / "here").exists, "the hook to run")
    slow.finish()
    wait_until(lambda: "hook preempted" not in [thread.name for thread in threading.enumerate()], "its thread to end")
    said = capsys.readouterr().err
    says(said)
    assert "hook failed" not in said


def test_a_running_hook_is_none_of_the_processes_that_a_local_run_ends(run: RunDirectory) -> None:
    """When its ranks have exited, they are killed."""
    os.mkfifo(run.path / "go")
    hook = Hook(run, dataclasses.replace(JOB, hook=("/bin/sh", "-c", f"echo > {run.path}/here; cat {run.path}/go")), 0)
    hook.call("resumed", {})
    wait_until((run.path / "here").exists, "the hook to run")
    assert not [command for command in descendants(os.getpid()).values() if str(run.path) in command]
    (run.path / "go").write_text("")
    hook.finish()


def test_a_hook_that_fails_while_local_ranks_run_is_reported(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher waits for its ranks alone, and leaves the hook's exit code to the hook."""
    os.mkfifo(run.path / "go")
    ranks = RanksHere(JOB)
    ranks.start(["/bin/cat", f"{run.path}/go"], {}, run.attempt_logs(run.create_attempt()))
    waiting = threading.Thread(target=ranks.wait, daemon=True)
    waiting.start()
    try:
        hook = Hook(run, dataclasses.replace(JOB, hook=("/bin/sh", "-c", "exit 3")), 0)
        hook.call("resumed", {})
        hook._calls[0][1].join(timeout=20)
    finally:
        ranks.kill()
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    says(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("event", "word"),
    [
        ({"event": "resumed"}, "resumed"),
        ({"event": "requeued", "cause": "preempted"}, "preempted"),
        ({"event": "requeued", "cause": "stopped before the time limit"}, None),
        ({"event": "resubmitted", "cause": "preempted"}, "preempted"),
        ({"event": "resubmitted", "cause": "time limit reached"}, None),
        ({"event": "stopped", "cause": "preempted without grace", "then": "requeued by Slurm"}, "preempted"),
        ({"event": "stopped", "cause": "preempted without grace", "then": "stopped"}, "stopped"),
        ({"event": "stopped", "cause": "interrupted"}, "stopped"),
        ({"event": "cancelled"}, "cancelled"),
        ({"event": "restarted"}, None),
        ({"event": "checkpoint"}, None),
    ],
)
def test_what_the_hook_is_told(event: dict[str, Any], word: str | None) -> None:
    """Neither a restart in place nor a time limit after which the run continues."""
    assert hook_event(event_of(event)) == word


def test_a_hook_is_a_list_of_words_or_a_line_for_the_shell(tmp_path: Path) -> None:
    """Both survive job.yaml."""
    line = from_values({"script": __file__, "hook": "curl -sd @- $URL"})
    assert line.hook == ("/bin/sh", "-c", "curl -sd @- $URL")
    words = from_values({"script": __file__}, overrides={"hook": f"[{sys.executable}, notify.py]"})
    assert words.hook == (sys.executable, "notify.py")
    for job in (line, words):
        (tmp_path / "job.yaml").write_text(job.to_yaml())
        assert load_resolved(tmp_path / "job.yaml").hook == job.hook
    assert "hook" not in from_values({"script": __file__, "job_name": "x"}).to_yaml().replace(__file__, "")
    with raises(JobDefinitionError):
        from_values({"script": __file__, "hook": []})
