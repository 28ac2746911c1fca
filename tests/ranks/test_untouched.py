"""Training scripts without a line of clusterddp: their saves are protected, their steps seen, their hangs found."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from clusterddp.errors import UNCONFIRMED
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import read_timings
from clusterddp.training import script_steps
from clusterddp.training.script_steps import MOVED_ON, ScriptSteps
from clusterddp.worker.rank_process import RankProcess
from tests.cli import clusterddp
from tests.histories import check_history
from tests.preempting import preempting
from tests.ranks.test_local import submit
from tests.runs_on_disk import outcome_of
from tests.waiting import story

AS_FOUND = str(Path(__file__).parents[1] / "scripts" / "as_found.py")
SHAPE = ["--device", "cpu", "--gpus", "2"]
ALONE = """
import os
import torch
import torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for _ in range(3):
    optimizer.step()
dist.destroy_process_group()
"""
STEPS = """
import torch
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for step in range(3):
    optimizer.step()
"""
HELPERS = """
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
import torch

def train(results):
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    results["trained"] = True

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    helpers = [fork.Process(target=time.sleep, args=(1000,)), subprocess.Popen([sys.executable, sys.argv[1]])]
    helpers[0].start()
    for helper in helpers:
        os.kill(helper.pid, signal.SIGTERM)
    helpers[0].join()
    helpers[1].wait()
    pool = ProcessPoolExecutor(1, mp_context=fork)
    pool.submit(abs, -1).result()
    manager = fork.Manager()
    results = manager.dict()
    trainer = fork.Process(target=train, args=(results,))
    trainer.start()
    trainer.join()
    print("trained", results["trained"])
"""
KILLED = """
import os
import signal
import sys
import torch

class Kills:
    def __reduce__(self):
        if os.environ["CLUSTERDDP_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return str, ()

folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
print("found", *sorted(os.listdir(folder)))
for epoch in range(len(os.listdir(folder)), 3):
    torch.save({"epoch": epoch, "last": Kills() if epoch == 2 else None}, f"{folder}/epoch-{epoch}.pt")
"""


def as_found(run: RunDirectory, *options: str, script: tuple[str, ...] = (), ranks: int = 1) -> tuple[int, str]:
    """The exit code, and what the command printed to standard error."""
    folder = ("--", "--out", f"{run}/out", *script)
    done = submit(run, AS_FOUND, "--device", "cpu", "--gpus", str(ranks), *options, *folder)
    check_history(run.events())
    return done.returncode, done.stderr


RESUMES = ("--set", "resume.checkpoint={run_dir}/out/model-*.pt", "--set", 'resume.args=[--resume, "{checkpoint}"]')


def test_a_script_that_accepts_its_checkpoint_and_ignores_it_is_not_said_to_resume(run: RunDirectory) -> None:
    """It trains to the end each time. The steps before the preemption are lost, and the end is not confirmed."""
    with preempting("^step 9$"):
        code, said = as_found(run, *RESUMES, script=("--ignores", "--wait", "0:11"))
    assert code == UNCONFIRMED, said
    (unread,) = [event for event in run.events() if event["event"] == "not_read"]
    (made,) = [event["made"] for event in run.events() if event["event"] == "requeued"]  # at the last heartbeat
    assert (unread["attempt"], unread["file"], unread["redone"]) == (1, "out/model-8.pt", made), story(run)
    assert "own_checkpoint_read" not in {event["event"] for event in run.events()}
    assert "resumed from" not in said
    outcome = outcome_of(run) or {}
    assert (outcome["state"], outcome["confirmed"]) == ("completed", False)
    (listed,) = json.loads(clusterddp("list", run, "--json").stdout)
    assert (listed["steps_made"], listed["steps_repeated"]) == (12, made)
    status = clusterddp("status", run).stdout
    assert re.search(rf"^steps +at least 12 in the last attempt, at least {made} repeated$", status, re.MULTILINE)
    assert re.search(rf"goodput \d+%, at least {made} steps? repeated$", status, re.MULTILINE), status


@pytest.mark.parametrize(
    "way",
    ["named", pytest.param("found", marks=pytest.mark.product), pytest.param("searches", marks=pytest.mark.product)],
)
def test_a_resume_is_recorded_once_the_script_has_read_its_checkpoint(run: RunDirectory, way: str) -> None:
    """Whether the script gets its name or looks for it, and also if it looks for a learning rate first."""
    resume, script = (RESUMES[:2], ("--finds",)) if way == "found" else (RESUMES, ("--searches",) * (way == "searches"))
    with preempting("^step 9$"):
        code, said = as_found(run, *resume, script=(*script, "--wait", "0:11"))
    assert code == 0, said
    read = [(event["attempt"], event["file"]) for event in run.events() if event["event"] == "own_checkpoint_read"]
    assert read == [(1, "out/model-8.pt")], story(run)
    assert "attempt 1: resumed from out/model-8.pt" in said


@pytest.mark.parametrize("mark", [(), pytest.param(("--set", "done={log: ^ends}"), marks=pytest.mark.product)])
def test_an_old_result_in_the_output_folder_is_no_training(
    run: RunDirectory, tmp_path: Path, mark: tuple[str, ...]
) -> None:
    """The script loads it, has no step left, prints its last line and exits with code 0."""
    old = tmp_path / "model-12.pt"
    torch.save({"weight": torch.full((1,), 12.0), "step": 12}, old)
    os.utime(old, (1e9, 1e9))
    resume = ("--set", f"resume.checkpoint={tmp_path}/model-*.pt")
    code, said = as_found(run, *resume, *mark, script=("--finds", "--out", str(tmp_path)))
    assert code == UNCONFIRMED, said
    assert "starts at step 12" in (run.attempt_logs(0) / "rank-0.out").read_text()
    assert [event["file"] for event in run.events() if event["event"] == "own_checkpoint_read"] == [str(old)]
    outcome = outcome_of(run) or {}
    assert (outcome["state"], outcome["confirmed"], outcome["attempts"]) == ("completed", False, 1)


@pytest.mark.product  # test_script_outcomes.py has a second exit without the mark
@pytest.mark.parametrize(
    ("script", "attempts", "code"),
    [
        (("--ignores",), 2, UNCONFIRMED),
        pytest.param((), 2, UNCONFIRMED, marks=pytest.mark.product),
        pytest.param(("--stops", "4", "--says", "all"), 3, 0, marks=pytest.mark.product),
    ],
)
def test_a_second_exit_without_the_mark_ends_the_run_unless_it_got_further(
    run: RunDirectory, script: tuple[str, ...], attempts: int, code: int
) -> None:
    """The first script trains again, the second has no step left, and the third stops after a third of its steps."""
    ended, said = as_found(run, *RESUMES, "--set", "done={log: 'ends .* all'}", script=script)
    outcome = outcome_of(run) or {}
    assert (ended, outcome["state"], outcome["attempts"]) == (code, "completed", attempts), said
    assert outcome.get("confirmed", True) is (code == 0)


@pytest.mark.product  # unit/test_script_checkpoints.py passes over files
def test_half_of_a_set_of_files_is_passed_over_once_the_script_has_failed_with_it(run: RunDirectory) -> None:
    """The newest model has no optimizer beside it."""
    code, said = as_found(run, *RESUMES, script=("--pairs", "--half", "0:8"))
    assert code == 0, said
    given = [event["file"] for event in run.events() if event["event"] == "own_resume"]
    assert given == ["out/model-8.pt", "out/model-4.pt"], story(run)
    assert "Not used: out/model-8.pt: the script failed with it" in said
    assert "starts at step 4" in (run.attempt_logs(2) / "rank-0.out").read_text()


@pytest.mark.product  # test_first_failure.py restarts after an exception
def test_an_exception_after_steps_that_were_seen_restarts_the_ranks(run: RunDirectory) -> None:
    """Although it came within a minute, and before the first checkpoint."""
    code, said = as_found(run, *RESUMES, script=("--raises", "0:3"))
    assert code == 0, said
    assert (outcome_of(run) or {})["attempts"] == 2
    assert re.search(r"restarting all ranks in place, because the attempt had completed \d+ steps?", said), said


OWN_RANKS = """
import multiprocessing, os, signal, sys
import torch

def train(rank, kills):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for epoch in range(16):
        if kills and rank == 1 and epoch == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()

if __name__ == "__main__":
    method, joins, kills = sys.argv[1], sys.argv[2] == "joins", sys.argv[3] == "kills"
    context = multiprocessing.get_context(method)
    ranks = [context.Process(target=train, args=(rank, kills), name=f"trainer-{rank}") for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks if joins else ():
        one.join()
    helper = context.Process(target=signal.pause)
    helper.start()
    helper.terminate()
    helper.join()
"""


@pytest.mark.parametrize(
    ("method", "joins", "kills"),
    [
        ("fork", "joins", "kills"),
        pytest.param("fork", "leaves", "no", marks=pytest.mark.product),
        pytest.param("fork", "leaves", "kills", marks=pytest.mark.product),
        pytest.param("spawn", "joins", "kills", marks=pytest.mark.product),
        pytest.param("spawn", "leaves", "no", marks=pytest.mark.product),
        pytest.param("forkserver", "joins", "kills", marks=pytest.mark.product),
    ],
)
def test_a_process_of_the_script_that_was_killed_is_named_and_the_end_is_not_confirmed(
    run: RunDirectory, tmp_path: Path, method: str, joins: str, kills: str
) -> None:
    """One that the script has ended is not. Without a death, the steps in these processes confirm the end."""
    script = tmp_path / "own_ranks.py"
    script.write_text(OWN_RANKS)
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1", "--", method, joins, kills)
    died = [(event["process"], event["code"]) for event in run.events() if event["event"] == "child_died"]
    assert died == ([("trainer-1", -9)] if kills == "kills" else []), story(run)
    assert done.returncode == (UNCONFIRMED if kills == "kills" else 0), done.stderr
    assert ("process trainer-1 (pid " in str((outcome_of(run) or {})["reason"])) is (kills == "kills")
    check_history(run.events())


def test_a_script_that_lists_its_folder_does_not_find_what_a_killed_save_has_left(
    run: RunDirectory, tmp_path: Path
) -> None:
    script, out = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(KILLED)
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1", "--set", "steps=off", "--", str(out))
    assert done.returncode == 0, done.stderr
    assert (run.attempt_logs(1) / "rank-0.out").read_text() == "found epoch-0.pt epoch-1.pt\n", story(run)
    assert len(list(out.iterdir())) == 3


def test_a_stop_in_the_middle_of_the_only_checkpoints_save_loses_nothing(run: RunDirectory, tmp_path: Path) -> None:
    """TERM ends rank 1 at once, and rank 0 after the save. The run resumes from it; status tells what it knows."""
    out = tmp_path / "out"
    with preempting("a slow save begins"):
        done = submit(run, "tests/scripts/like_nanogpt.py", *SHAPE, "--", str(out), "40", "25")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"attempt 0: preempted\. The attempt completed at least \d+ steps?\. The script restarts from",
        done.stderr,
    ), done.stderr
    assert f"Resuming training from {out} at iter 26" in (run.attempt_logs(1) / "rank-0.out").read_text(), story(run)
    assert torch.load(out / "ckpt.pt", weights_only=False)["iter_num"] == 40
    assert [path.name for path in out.iterdir()] == ["ckpt.pt"]
    check_history(run.events())
    assert [event["attempt"] for event in run.events() if event["event"] == "steps_seen"] == [0, 1]
    assert [one.made for one in read_timings(run).intervals if one.attempt == 1] == [14]
    status = clusterddp("status", run).stdout
    assert re.search(r"^steps +at least 14 in the last attempt$", status, re.MULTILINE), status
    assert re.search(r"ETTR \d+% of .*, repeated steps unknown$", status, re.MULTILINE), status
    assert re.search(r"^\S+ +completed +\+14 ", clusterddp("list", run).stdout, re.MULTILINE)


@pytest.mark.product  # unit/test_step_log.py has patterns
def test_a_pattern_for_the_step_that_matches_no_line_is_told(run: RunDirectory, tmp_path: Path) -> None:
    (script := tmp_path / "steps.py").write_text(STEPS)
    done = submit(run, str(script), "--device", "cpu", "--set", r"steps.log=nothing (\d+)")
    assert done.returncode == 0, done.stderr
    assert r"no line of rank 0's output matched `steps: {log: 'nothing (\\d+)'}` in attempt 0" in done.stderr


# test_hangs.py has a rank that is named, unit/test_step_log.py the steps of a log.
@pytest.mark.product
def test_a_hang_of_an_untouched_script_is_named_and_its_steps_are_those_of_its_log(run: RunDirectory) -> None:
    """It has several optimizers, and the step is in what rank 0 prints to standard error."""
    limits = [
        "--set",
        "watchdog={step_s: 1, start_s: 2}",
        "--set",
        r"steps.log=step: (\d+)/",
        "--set",
        "preflight=false",
    ]
    done = submit(run, "tests/scripts/like_gan.py", *SHAPE, *limits, "--", "30", "19")
    assert done.returncode == 0, done.stderr
    events = run.events()
    check_history(events)
    hung = next(event for event in events if event["event"] == "hung")
    assert hung["rank"] == 1 and "step" not in hung, hung
    assert re.match(r"rank 1 \(\S+\) has been stuck at step 40 of this attempt for ", hung["what"]), hung
    assert "The others wait in" in hung["what"], hung
    begun = [(event["attempt"], event["step"], event.get("redone")) for event in events if event["event"] == "training"]
    assert begun == [(0, 0, None), (1, 0, 20)], story(run)
    assert (outcome_of(run) or {})["step"] == 30
    assert "completed at step 30: all ranks finished" in clusterddp("status", run).stdout
    assert [one.made for one in read_timings(run).intervals if one.attempt == 1] == [60]


def test_steps_are_those_of_the_optimizer_that_steps_first() -> None:
    """Until it is gone, or another one has stepped very often without it. Steps in other threads are not looked at."""
    steps = ScriptSteps(RankProcess(), torch.device("cpu"))
    first, second, third = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(3))
    for optimizer in (first, second, second, third) * 3:
        steps.on_optimizer_step(optimizer)
    assert steps.steps == 3
    for _ in range(MOVED_ON - 2):
        steps.on_optimizer_step(second)
    assert steps.steps == 3
    for optimizer in (second, second, first) * 3:
        steps.on_optimizer_step(optimizer)
    assert steps.steps == 3 + 6
    del second, optimizer
    steps.on_optimizer_step(first)
    assert steps.steps == 10
    thread = threading.Thread(target=steps.on_optimizer_step, args=(first,))
    thread.start()
    thread.join()
    assert steps.steps == 10
    steps.close()


def test_a_script_with_a_context_has_no_hook(process: RankProcess) -> None:
    """A context counts its own steps. The hook is removed with an error of ours, too: the script goes on."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    process.optimizers.begin()
    optimizer.step()
    assert script_steps.current(process).steps == 1
    script_steps.hand_over(process)
    optimizer.step()
    assert process.steps is None and not _global_optimizer_post_hooks
    process.optimizers.begin()
    script_steps.current(process).on_optimizer_step = lambda _: 1 / 0  # type: ignore[method-assign,assignment]
    optimizer.step()
    assert not _global_optimizer_post_hooks
    script_steps.hand_over(process)


def test_ranks_that_train_apart_are_told_and_their_steps_are_still_seen(run: RunDirectory, tmp_path: Path) -> None:
    """As a script that asks MPI for its rank, where no mpirun has started it: each of its ranks is alone."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = submit(run, str(script), *SHAPE)
    assert done.returncode == 0, done.stderr
    assert "rank 0 trains alone, without a process group, but the run has 2 ranks" in done.stderr, done.stderr
    assert [one.made for one in read_timings(run).intervals] == [3]
    assert "apart" not in {event["event"] for event in run.events() if event.get("rank") != 0}


def test_processes_that_the_script_or_python_ends_are_no_trainers(run: RunDirectory, tmp_path: Path) -> None:
    """A helper that gets a signal of ``os.kill``, an idle pool and the server of a ``Manager``, which Python ends at
    exit: the run neither waits for these nor doubts that it is done."""
    script, helper = tmp_path / "helpers.py", tmp_path / "helper.py"
    script.write_text(HELPERS)
    helper.write_text("import time; time.sleep(1000)")
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1", "--", str(helper))
    assert done.returncode == 0, done.stderr
    assert {"child_died", "child_step"} & {event["event"] for event in run.events()} == {"child_step"}
