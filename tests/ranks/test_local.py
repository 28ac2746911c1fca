"""``submit --local``: the main job without Slurm, with real signals and input at the terminal."""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.main import main
from clusterddp.errors import UNCONFIRMED
from clusterddp.jobdef.job import Job
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import local
from clusterddp.runs.progress_display import Progress
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.controller import give_notice
from tests.cli import clusterddp
from tests.cluster.system import Process
from tests.histories import check_history
from tests.preempted import attempt
from tests.preempting import preempting
from tests.runs_on_disk import outcome_of
from tests.waiting import differing, final_state, preempt_local, story, wait_for_step, wait_until
from tests.wording import says

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 120
SHAPE = ["--device", "cpu", "--nodes", "2", "--gpus", "1"]
TRAINING = ["tests/scripts/train.py", *SHAPE]


def start(run: RunDirectory, *options: str, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "clusterddp.submit", "--local", "--run-dir", str(run), *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes)


def submit(run: RunDirectory, *options: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    process = start(run, *options)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


CATCHES = """
import os
import signal
import torch
from torch.utils.data import TensorDataset
import clusterddp
from tests.descent import Descent

ctx = clusterddp.init()
model = torch.nn.Linear(1, 1)
run = ctx.run(model=model, optimizer=Descent(model), loader=ctx.loader(TensorDataset(torch.ones(8, 1)), batch_size=1))
try:
    for _ in run.steps(9):
        if run.step == 3 and ctx.attempt == 0:
            run.stop("by the test")
except:
    print("saving something")
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory(tmp_path_factory.mktemp("local") / "uninterrupted")
    attempt(run, [REPOSITORY / TRAINING[0], "--steps", STEPS]).expect(0)
    return run


def whole(pause_s: float) -> list[str]:
    """The script's arguments for all steps."""
    return ["--", "--steps", str(STEPS), "--pause", str(pause_s)]


def check_same(run: RunDirectory, reference: RunDirectory) -> None:
    assert [line["step"] for line in read_lines(run.metrics_file)] == list(range(STEPS)), story(run)
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in reference.metrics()]
    check_history(run.events())
    assert differing(final_state(run), final_state(reference)) == []


@pytest.mark.product  # unit/test_decide.py and test_attempt.py have the limit
def test_a_run_saves_and_fails_as_soon_as_its_gpu_hours_are_used_up(tmp_path: Path) -> None:
    """It was looked at between attempts only, and this one would have trained for minutes."""
    run, limit = RunDirectory(tmp_path / "run"), ["--set", "limits.gpu_hours=0.008"]
    done = submit(run, *TRAINING, *limit, "--", "--steps", "9000", "--pause", "0.05")
    outcome = outcome_of(run)
    assert done.returncode == 1 and outcome is not None, done.stderr
    assert (outcome["state"], outcome["attempts"]) == ("failed", 1) and "limits.gpu_hours" in outcome["reason"]
    saved = [event["step"] for event in run.events() if event["event"] == "checkpoint"]
    assert saved[-1:] == ([outcome["step"]] if run.metrics() else [])  # none if the imports took all of the time
    assert len(run.metrics()) < 9000


@pytest.fixture(scope="module")
def stopped_twice(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Preempted, then interrupted with Ctrl-C and continued by the same command."""
    run = RunDirectory(tmp_path_factory.mktemp("stopped") / "run")
    with preempting(20):
        process = start(run, *TRAINING, *whole(0.02))
    wait_until(lambda: 1 in run.attempts(), "the second attempt")
    wait_until(lambda: any(line["attempt"] == 1 for line in read_lines(run.metrics_file)), "its first step")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert re.search(r"attempt 0: preempted at step (\d+)\. Checkpoint \1 is saved\. The job is requeued", said), said
    how = f"Continue with: clusterddp submit --local --run-dir {run}"
    assert process.returncode == 130 and how in said
    status = clusterddp("status", run)
    assert how in status.stdout
    assert run.outcome() is None
    done = submit(run)
    assert done.returncode == 0, done.stderr
    assert re.search(r"attempt 2: resumed from step \d+, repeating 0 steps", done.stderr)
    return run


def test_a_preempted_and_interrupted_run_is_the_uninterrupted_one(
    stopped_twice: RunDirectory, uninterrupted: RunDirectory
) -> None:
    """Three attempts, no step twice, the same bits."""
    assert outcome_of(stopped_twice) == {
        "state": "completed", "step": STEPS, "attempts": 3, "reason": "all ranks finished",
    }  # fmt: skip
    check_same(stopped_twice, uninterrupted)


def test_the_end_of_an_attempt_is_awaited_not_looked_for(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command takes no CPU while it waits, and ends at once."""
    run.create()
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(3)\n")  # the supervisor ends as it starts
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = Job(name="x", module="x", device="cpu")
    with Progress(run, None) as progress:
        assert local.LocalRun(run, job, progress_s=600.0).loop(progress) == 3


def test_ctrl_c_before_the_ranks_have_started_stops_the_run(run: RunDirectory, tmp_path: Path) -> None:
    """The supervisor tells them: they are still importing, and the signal reached none of them."""
    script = tmp_path / "endless.py"
    script.write_text("import threading\nthreading.Event().wait()\n")
    process = start(run, str(script), "--device", "cpu", "--gpus", "2")
    wait_until((run.logs / "supervisor.log").exists, "the supervisor to be started")
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert f"Continue with: clusterddp submit --local --run-dir {run}" in err
    assert run.outcome() is None


@pytest.mark.product  # test_first_failure.py has the box and the restart in place, test_hangs.py the bits after one
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_all_ranks_restart_in_place(
    run: RunDirectory, uninterrupted: RunDirectory, rank: int
) -> None:
    """From the newest checkpoint, in the same supervisor; no bit differs in the end."""
    process = start(run, *TRAINING, "--set", "checkpoint.every=20 steps", *whole(0.02))
    wait_until(lambda: any(run.checkpoints.glob("step-*")), "a checkpoint", timeout=60)
    (victim,) = [pid for pid in ranks_of(run) if variable(pid, "RANK") == str(rank)]
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (failed,) = (event for event in run.events() if event["event"] == "rank_failed")
    assert (failed["attempt"], failed["rank"]) == (0, rank) and "SIGKILL" in failed["error"], failed
    assert f"rank {rank} " in err and "first failure" not in err  # the box has it
    assert "Restarting all ranks in place" in err
    assert re.search(r"attempt 1: resumed from step \d+", err)
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in uninterrupted.metrics()]
    assert differing(final_state(run), final_state(uninterrupted)) == []


def ranks_of(run: RunDirectory) -> list[int]:
    """The ranks themselves, not the children that they forked."""
    pids = {pid for pid, command in commands_of(run).items() if b"clusterddp.worker" in command}
    return [pid for pid in pids if (process := Process.of(pid)) and process.parent() not in pids]


def variable(pid: int, name: str) -> str:
    """The environment that a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(pair.partition("=")[2] for pair in pairs if pair.startswith(f"{name}="))


def test_a_killed_local_command_leaves_no_process_and_the_run_continues(run: RunDirectory) -> None:
    """Its supervisor and ranks exit with it. A second start is refused before, and continues the run afterwards."""
    process = start(run, *TRAINING, "--", "--steps", "100000")
    wait_for_step(run, 10)
    second = submit(run)
    assert second.returncode == 1
    assert re.search(r"held by process \d+ on this machine", second.stderr)
    process.kill()
    process.communicate()
    wait_until(lambda: not commands_of(run), "all processes of the run to be gone")
    assert submit(run, "--change", "--", "--steps", "60").returncode == 0, story(run)
    assert len(run.metrics()) == 60


def commands_of(run: RunDirectory) -> dict[int, bytes]:
    """The command lines of the processes whose environment or command line names the run directory."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environ, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(run).encode() in environ + command:
                found[int(entry.name)] = command
    return found


PLAIN = ["tests/scripts/plain_ddp.py", "--device", "cpu", "--nodes", "2", "--gpus", "1"]


@pytest.mark.product  # slurm/test_main_job.py has the same on a real Slurm
def test_a_plain_script_preempted_is_run_again_and_resumes_from_its_own_file(run: RunDirectory, tmp_path: Path) -> None:
    """TERM has its default action in it; LOCAL_RANK is what it would be on two nodes."""
    own = tmp_path / "own.pt"
    process = start(run, *PLAIN, "--", str(own), "60", "0.1")
    logs = [run.attempt_logs(0) / f"rank-{rank}.out" for rank in range(2)]
    wait_until(lambda: all(log.exists() and "starts" in log.read_text() for log in logs), "all ranks", timeout=60)
    wait_until(own.exists, "its first own checkpoint", timeout=60)
    give_notice(run, Cause.PREEMPTED)
    os.killpg(os.getsid(ranks_of(run)[0]), signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search(
        r"attempt 0: preempted\. The attempt completed at least \d+ steps?\. The script restarts from", err
    ), err
    assert "attempt 1: completed after 2 attempts" in err
    assert outcome_of(run) == {"state": "completed", "step": None, "attempts": 2, "reason": "all ranks finished"}
    status = clusterddp("status", run)
    assert "state     completed: all ranks finished" in status.stdout
    assert re.search(r"steps     (at least \d+ in the last attempt|no steps recorded)", status.stdout), status.stdout
    again = submit(run)
    assert again.returncode == 0 and f"{run} has already completed" in again.stderr
    first, second = ((run.attempt_logs(attempt) / "rank-1.out").read_text() for attempt in (0, 1))
    assert "rank 1 (local 0) of 2 starts at step 0" in first
    assert re.search(r"rank 1 \(local 0\) of 2 starts at step [1-9]\d*", second)
    assert "rank 1 is done" in second


def test_an_exception_is_shown_with_its_rank_and_ends_the_run(run: RunDirectory, tmp_path: Path) -> None:
    """The first traceback, boxed; exit code 1; no second attempt."""
    script = tmp_path / "broken.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('the data is gone')\n")
    done = submit(run, str(script), "--device", "cpu", "--gpus", "2")
    assert done.returncode == 1
    assert re.search(r"\| rank 1 \(\S+\) raised ValueError: the data is gone", done.stderr), done.stderr
    assert 'broken.py", line 3' in done.stderr
    assert run.attempts() == [0]
    assert (outcome_of(run) or {})["state"] == "failed"


LOGS = """
import logging
import sys

logging.basicConfig(level=logging.INFO)
logging.info("epoch 0 begins")
try:
    1 // 0
except ZeroDivisionError:
    logging.exception("a batch is skipped")
sys.stderr.write("\\r 10%\\r 50%\\r100%\\n")
"""


@pytest.mark.parametrize("ending", ["raise ValueError('the data is gone')", "sys.exit('the data is gone')"])
def test_what_rank_0_logs_to_stderr_is_shown_and_no_line_twice(run: RunDirectory, tmp_path: Path, ending: str) -> None:
    """The box is below its output, which ends with the error, and does not repeat a traceback."""
    (script := tmp_path / "logs.py").write_text(f"{LOGS}{ending}\n")
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1")
    shown, logged = done.stderr.splitlines(), (run.attempt_logs(0) / "rank-0.err").read_text()
    for line in ("INFO:root:epoch 0 begins", "ERROR:root:a batch is skipped", "    1 // 0", "100%"):
        assert shown.count(line) == 1, done.stderr
    assert logged.splitlines()[-1] in shown[: shown.index(next(line for line in shown if line.startswith("+--")))]
    naming = [line for line in shown if "the data is gone" in line]
    boxed = [line for line in naming if line.startswith("| ")]
    assert len(boxed) == 1 and naming.index(boxed[0]) == 1 + ("raise" in ending), done.stderr


def test_the_ranks_of_a_local_run_see_no_variable_of_a_job_around_it(run: RunDirectory, tmp_path: Path) -> None:
    """Repositories take a process for a task of Slurm if there is SLURM_PROCID, and its place from there."""
    script = tmp_path / "place.py"
    script.write_text(
        "import os\n"
        "places = [name for name in sorted(os.environ) if name.startswith(('SLURM', 'PMI', 'OMPI', 'SUBMITIT'))]\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], places)\n"
    )
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"}
    task |= {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}
    task |= {"PMI_RANK": "3", "PMI_SIZE": "8", "PMIX_RANK": "3", "SUBMITIT_EXECUTOR": "slurm"}
    process = start(run, str(script), "--device", "cpu", "--gpus", "2", env={**os.environ, **task})
    _, said = process.communicate(timeout=100)
    printed = [(run.attempt_logs(0) / f"rank-{rank}.out").read_text() for rank in (0, 1)]
    assert printed == ["0 2 []\n", "1 2 []\n"], said


LATE = """
import pathlib
import sys
import time

import torch

import clusterddp

ctx = clusterddp.init()
folder, attempt = pathlib.Path(sys.argv[1]), ctx.attempt
if attempt == 1:
    (folder / f"ready-{ctx.rank}").touch()
    while '"attempt": 1, "event": "signal"' not in (ctx.run_dir / "events.jsonl").read_text():
        time.sleep(0.05)
model = ctx.wrap(torch.nn.Linear(1, 1))
run = ctx.run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(6):
    if attempt == 0 and step == 3:
        run.stop("a stop in between")
"""


@pytest.mark.product
def test_a_preemption_while_the_model_is_built_does_not_wait_for_the_restore(run: RunDirectory, tmp_path: Path) -> None:
    """The attempt ends at ``ctx.run()``, and its predecessor's checkpoint stays the newest."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    command = (str(script), "--device", "cpu", "--gpus", "2")
    first = submit(run, *command, "--", str(tmp_path))
    process = start(run, *command, "--", str(tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks")
    preempt_local(run)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, (first.stderr, err)
    restored = [event["attempt"] for event in run.events() if event.get("phase") == "restoring"]
    assert restored == [0, 2], story(run)
    ended = [(event["attempt"], event["event"], event["step"]) for event in run.events() if "cause" in event]
    assert ended == [(0, "stopped", 3), (1, "requeued", None)], story(run)
    assert [event["step"] for event in run.events() if event["event"] == "resumed"] == [3]


@pytest.mark.product  # slurm/test_script_process.py has the same on a real Slurm
def test_a_rank_that_saves_after_a_notice_outlives_its_peers(run: RunDirectory) -> None:
    """Rank 1 dies of the TERM; rank 0's own save takes longer than the peers of a failed rank have otherwise."""
    process = start(run, "tests/scripts/saving_alone.py", "--device", "cpu", "--gpus", "2", "--", "8")
    wait_until(lambda: len(list(run.path.glob("ready-*"))) == 2, "both ranks")
    preempt_local(run)
    _, err = process.communicate(timeout=120)
    assert process.returncode == UNCONFIRMED, err  # attempt 1 finds the file and exits at once
    assert (run.path / "own.txt").read_text() == "first half, second half"
    assert [event["event"] for event in run.events() if "cause" in event] == ["requeued"]
    assert run.attempts() == [0, 1]


@pytest.mark.parametrize("code", [75, 130])
def test_a_training_that_fails_with_any_exit_code_is_over(run: RunDirectory, tmp_path: Path, code: int) -> None:
    """75 also requests another attempt, and 130 is the exit code of an interrupted run."""
    script = tmp_path / "fails.py"
    script.write_text(f"raise SystemExit({code})\n")
    done = submit(run, str(script), "--device", "cpu")
    assert done.returncode == code
    assert f"| rank 0 ({socket.gethostname()}) exited with code {code}" in done.stderr
    assert "continue with" not in done.stderr
    assert run.attempts() == [0]
    assert (outcome_of(run) or {})["state"] == "failed"


def test_a_script_that_catches_the_stop_and_runs_to_its_end_is_not_completed(run: RunDirectory) -> None:
    """By a bare ``except:``, in the first attempt; the second makes the other steps."""
    script = run.path.with_name("catches.py")
    script.write_text(CATCHES)
    stopped = submit(run, str(script), "--device", "cpu")
    assert stopped.returncode == 130 and "Checkpoint 3 is saved. The run is stopped" in stopped.stderr
    assert [event["cause"] for event in run.events() if event["event"] == "stopped"] == [Cause.BY_SCRIPT.value]
    assert submit(run).returncode == 0
    assert (outcome_of(run) or {}) == {"state": "completed", "step": 9, "attempts": 2, "reason": "all ranks finished"}
    said = (run.attempt_logs(0) / "rank-0.err").read_text()
    assert "the script caught clusterddp.Stopped. The run is stopped, not completed" in said


def test_a_run_that_finishes_despite_ctrl_c_is_completed(run: RunDirectory, tmp_path: Path) -> None:
    """Its script ignores the signal: there is nothing to continue."""
    going, go = tmp_path / "going", tmp_path / "go"
    script = tmp_path / "deaf.py"
    script.write_text(
        "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(going)!r}).touch()\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.05)\n"
    )
    process = start(run, str(script), "--device", "cpu")
    wait_until(going.exists, "the script", timeout=60)
    process.send_signal(signal.SIGINT)
    wait_until(run.notice_file.exists, "the notice", timeout=60)
    go.touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "continue with" not in err
    assert (outcome_of(run) or {})["state"] == "completed"


@pytest.mark.parametrize(
    ("code", "words"), [(0, "attempt 0: completed after 1 attempt"), (3, "attempt 0: failed: rank 0 .*")]
)
def test_on_a_full_disk_the_end_is_reported_on_the_terminal(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """One sentence says that it could not be recorded; no traceback, and the training's exit code."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # `make coverage` could not write its data
    script = tmp_path / "fills.py"
    script.write_text(  # from now on the supervisor can write no byte into a file
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))\n"
        f"raise SystemExit({code})\n"
    )
    done = submit(run, str(script), "--device", "cpu")
    assert done.returncode == code
    assert re.search(f"\n{words}\n", done.stderr), done.stderr
    assert f"could not write {run.outcome_file} (File too large)" in done.stderr
    assert "could not write the history (File too large)" in done.stderr
    assert "Traceback" not in done.stderr
    assert run.outcome() is None


@pytest.mark.product  # the test above has a full disk, test_resume.py a TERM without a notice
def test_ctrl_c_saves_although_the_loop_cannot_write(run: RunDirectory) -> None:
    """On a full disk nobody can tell the supervisor why the ranks stop; the ranks save where they can."""
    process = start(run, *TRAINING, *whole(0.02))
    wait_for_step(run, 0)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"could not write {run.notice_file} (File too large)" in said
    assert re.search(r"at step (\d+)[,.].* Checkpoint \1 is saved\. The run is stopped", said, re.IGNORECASE), said


def test_debug_gives_the_rank_the_terminal(run: RunDirectory, tmp_path: Path) -> None:
    """breakpoint() stops in a real terminal, reads what is typed there, and continues; the other ranks skip it."""
    script = tmp_path / "debugged.py"
    script.write_text("answer = 41\nbreakpoint()\nprint('the answer is', answer)\n")
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "clusterddp.submit", "--local", "--debug", "--run-dir", str(run), str(script)]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--gpus", "2"], cwd=REPOSITORY, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown, other = b"", run.attempt_logs(0) / "rank-1.out"
    # One line for each prompt: what is typed ahead can be lost where readline switches the terminal's mode.
    lines = [b"answer += 1\n", b"c\n"]
    while b"the answer is 4" not in shown:
        try:
            shown += os.read(leader, 4096)
        except OSError:  # Linux's end of file on a terminal
            pytest.fail(f"the run ended with code {process.wait(timeout=60)} after showing {shown.decode()}")
        if b"(Pdb)" in shown:  # a person takes longer to answer than the other rank to get there
            wait_until(lambda: "the answer is 41" in other.read_text() or process.poll() is not None, "rank 1")
        if shown.count(b"(Pdb)") > 2 - len(lines) and lines:
            os.write(leader, lines.pop(0))
    assert b"the answer is 42" in shown
    process.wait(timeout=60)
    os.close(leader)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["no_such_script.py"], "script 'no_such_script.py' not found"),
        (["jobs/digits.yaml", "--device", "tpu"], "device"),
        (["jobs/digits.yaml", "--gpus", "2", "--debug", "7"], "--debug 7: the job has 4 ranks, numbered from 0"),
        (["jobs/digits.yaml", "--gpus", "2", "--debug", "-1"], "--debug -1: the job has 4 ranks, numbered from 0"),
        (["jobs/digits.yaml", "--run-dir", "README.md"], "--run-dir README.md is a file"),
        (["jobs/digits.yaml", "--lr", "0.1"], "--help`. Put the script's arguments after --"),
        (["jobs/digits.yaml", "--sbatch", "mem=1G"], "cannot be combined with --local"),
        (["jobs/digits.yaml", "--set", "nodes"], "--set nodes: expected KEY=VALUE"),
        (["jobs/digits.yaml", "--nodes", "1-2"], "requires global_batch, which is the number of samples per step"),
        (["jobs/digits.yaml", "--gpus", "50000"], "got 100000. Reduce --nodes or --gpus"),
        (["jobs/digits.yaml", "--nodes", "1-2", "--set", "global_batch=64"], "With --local, give one number"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    """Exit code 2, no traceback, no folder."""
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(SystemExit) as refused:  # in this process, which has imported what the command needs
        main(["submit", "--local", "--run-dir", str(tmp_path / "run"), *options])
    said = capsys.readouterr().err
    assert refused.value.code == 2
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.product  # test_common_errors.py has the message
def test_cuda_requested_and_absent_is_an_error_not_a_cpu_run(run: RunDirectory) -> None:
    """Never a silent CPU run."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    failed = submit(run, "jobs/digits.yaml", "--device", "cuda", "--nodes", "1", "--gpus", "2")
    assert failed.returncode == 1
    assert "GPU" in failed.stderr
    assert (outcome_of(run) or {})["state"] == "failed"


def test_without_slurm_on_path_submit_says_so_and_never_runs_locally(run: RunDirectory) -> None:
    """The likely remedies are named."""
    refused = clusterddp("submit", "jobs/digits.yaml", "--run-dir", run, env={"PATH": "/nowhere"}, code=None)
    assert refused.returncode != 0
    says(refused.stderr)
    assert "--local" in refused.stderr
    assert not run.path.exists()


@pytest.mark.product  # test_submit_again.py changes arguments
def test_a_completed_run_runs_again_only_with_changed_arguments(run: RunDirectory) -> None:
    """The same command again does nothing and succeeds; other arguments are refused, and --change applies them."""
    one_rank = [*TRAINING, "--nodes", "1"]
    assert submit(run, *one_rank, "--", "--steps", "5").returncode == 0
    again = submit(run, *one_rank, "--", "--steps", "5")
    assert again.returncode == 0
    says(again.stderr)
    assert run.attempts() == [0]
    assert clusterddp("wait", "--resubmit", run).stderr == f"{run}: completed at step 5: all ranks finished\n"
    refused = submit(run, *one_rank, "--", "--steps", "9")
    assert refused.returncode == 1
    assert "args" in refused.stderr
    assert "--change" in refused.stderr
    extended = submit(run, *one_rank, "--change", "--", "--steps", "9")
    assert extended.returncode == 0, extended.stderr
    assert (outcome_of(run) or {})["step"] == 9
    assert [line["step"] for line in run.metrics()] == list(range(9))


def test_preemptions_that_are_already_due_wait_for_the_attempts_ranks(run: RunDirectory) -> None:
    """TERM in an attempt's first milliseconds would end the shell of the local command, and the run with it. The last
    attempt takes a second, because a script that exits much sooner than before may not have trained."""
    script = run.path.with_name("waits_twice.py")
    script.write_text("import os, time\ntime.sleep(60 if int(os.environ['CLUSTERDDP_ATTEMPT']) < 2 else 1)\n")
    with preempting(0, 0.0):
        done = submit(run, str(script), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (outcome_of(run) or {})["attempts"] == 3
    assert done.stderr.count("preempted. No step was recorded. The job is requeued") == 2


def test_status_logs_and_cancel_work_without_slurm(stopped_twice: RunDirectory) -> None:
    """From the run's own files alone."""
    run = stopped_twice

    shown = clusterddp("status", run).stdout
    assert f"completed at step {STEPS}" in shown
    assert "attempts  3" in shown
    assert f"finished at step {STEPS}" in clusterddp("logs", run).stdout
    assert f"already completed at step {STEPS}" in clusterddp("cancel", run).stdout


def test_the_history_says_when_the_code_changed_between_attempts(run: RunDirectory, tmp_path: Path) -> None:
    """The script's hash is part of each attempt's record."""
    script = tmp_path / "edited.py"
    script.write_text("raise SystemExit(3)\n")
    assert submit(run, str(script), "--device", "cpu").returncode == 3
    script.write_text("print('mended')\n")
    done = submit(run)
    assert done.returncode == 0
    assert re.search(r"The code has changed since the last attempt: script \w+ -> \w+", done.stderr)
