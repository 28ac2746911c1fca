"""Processes that a script forks or starts after ``init()`` behave as under plain Python and affect no rank."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from clusterddp.process import module_command, process_start
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import rank
from tests.preempting import preempting
from tests.ranks.test_local import submit
from tests.waiting import story

#: What the scripts of these tests train.
TRAINING = """
import torch
import clusterddp
from tests.descent import Descent

ctx = clusterddp.init(device="cpu")
model = torch.nn.Linear(4, 1)
optimizer = Descent(model)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(torch.ones(64, 4), batch_size=1))

def train(batch):
    model(batch).square().mean().backward()
    optimizer.step()
"""

CHILDREN = """
import atexit, json, multiprocessing, os, signal, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

USR2 = signal.SIGUSR2

def state():
    own = signal.getsignal(signal.SIGTERM), signal.getsignal(USR2)
    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return [*map(int, own), blocked, signal.set_wakeup_fd(-1)]

def forever():
    signal.pause()

def ended_by_term(process):
    process.terminate()
    process.join(20)
    return process.exitcode

def forked(what):
    pid = os.fork()
    if pid == 0:
        what()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fail():
    sys.stderr.close()
    raise ValueError("of the child")

def grandchild():
    def leave():
        sys.exit(5)
    sys.exit(forked(leave))

def seen(when):
    seen = {}
    for method in ("fork", "spawn", "forkserver") if when == "after" else ("fork",):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            seen[method] = pool.apply(state)
        seen[method + " term"] = [ended_by_term(p) for p in start(context)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        seen["executor"] = executor.submit(state).result()
    seen["exits"] = [forked(lambda: sys.exit(3)), forked(lambda: os._exit(4)), forked(fail), forked(grandchild)]
    sleeping = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)
    sleeping.send_signal(USR2)
    sleeping.terminate()
    seen["preexec_fn"] = sleeping.wait(20)
    return seen

def start(context):
    processes = [context.Process(target=forever, daemon=daemon) for daemon in (True, False)]
    for process in processes:
        process.start()
    return processes
"""

FORKS = f"""
{CHILDREN}
if __name__ == "__main__":
    opened = multiprocessing.get_context("fork").Pool(2)  # before init(), and open to the end
    before = seen("before") if os.environ["RANK"] == "0" and os.environ["CLUSTERDDP_ATTEMPT"] == "0" else None
    {TRAINING.replace(chr(10), chr(10) + "    ")}
    kept = multiprocessing.get_context("fork").Pool(2)  # the same, after init()
    for batch in run.steps(16):
        train(batch)
        if run.step == 3 and ctx.attempt == 0 and ctx.is_main:
            subprocess.run([sys.executable, "-c", "import os; print('a line of a child'); os._exit(0)"])
            Path(os.environ["SEEN"]).write_text(json.dumps([before, seen("after")]))
        while run.step == 12 and ctx.attempt == 0 and not ctx._agreement.reason:  # until the preemption
            time.sleep(0.01)
"""

PLAIN = [int(signal.SIG_DFL), int(signal.SIG_IGN), False, -1]


def test_children_of_every_kind_have_default_signals_and_exit_on_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked, spawned, served, grandchildren, executors, before and after ``init()``. Nothing that they do reaches the
    history, and a preemption stops the run as ever, with a pool open. What they print is in the log at once."""
    script, seen = tmp_path / "forks.py", tmp_path / "seen.json"
    script.write_text(FORKS)
    monkeypatch.setenv("SEEN", str(seen))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # `make coverage` would handle TERM in each child
    run = RunDirectory(tmp_path / "run")
    with preempting(8):
        done = submit(run, str(script), "--device", "cpu", "--gpus", "1")
    assert done.returncode == 0, done.stderr + story(run)
    assert "a line of a child\n" in (run.attempt_logs(0) / "rank-0.out").read_text()
    before, after = json.loads(seen.read_text())
    assert before.pop("fork") == after.pop("fork") == PLAIN
    assert before.pop("executor") == after.pop("executor") == PLAIN
    for method in ("spawn", "forkserver"):
        assert after.pop(method)[0::2] == PLAIN[0::2]
        assert after.pop(f"{method} term") == [-15, -15]
    assert before == after == {"fork term": [-15, -15], "exits": [3, 4, 1, 5], "preexec_fn": -15}
    events = [event["event"] for event in run.events()]
    assert events.count("stopping") == events.count("requeued") == 1, story(run)
    assert "left_loop" not in events
    assert [line["step"] for line in read_lines(run.metrics_file)] == list(range(16)), story(run)


MAP = (
    TRAINING
    + """
import multiprocessing, os, time

def work(item):
    while ctx.attempt == 0 and not os.path.exists(f"{ctx.run_dir}/private/notice.json"):  # until the preemption
        time.sleep(0.01)

for batch in run.steps(6):
    if run.step == 3 and ctx.is_main:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(work, range(4))
        while ctx.attempt == 0 and not ctx._agreement.reason:  # the notice is written before the signal is sent
            time.sleep(0.01)
    train(batch)
"""
)


@pytest.mark.product  # the test above has an open pool
def test_a_local_preemption_in_the_middle_of_a_pools_map_waits_for_it_and_loses_nothing(tmp_path: Path) -> None:
    """TERM goes to the ranks only: a pool whose worker was killed would wait for its answer forever."""
    script = tmp_path / "maps.py"
    script.write_text(MAP)
    run = RunDirectory(tmp_path / "run")
    with preempting(3):
        done = submit(run, str(script), "--device", "cpu", "--gpus", "1")
    assert done.returncode == 0, done.stderr + story(run)
    stopped, resumed = (event["step"] for event in run.events() if event["event"] in ("stopping", "resumed"))
    assert stopped == resumed and stopped in (4, 5), story(run)
    assert [line["step"] for line in read_lines(run.metrics_file)] == list(range(6)), story(run)


ORPHANS = (
    TRAINING
    + """
import os, signal, subprocess

for batch in run.steps(6):
    if run.step == 3 and ctx.attempt == 0:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("child", child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    train(batch)
"""
)


def test_child_processes_of_a_killed_local_rank_are_ended(tmp_path: Path) -> None:
    """Slurm would end it with the step; here it has lost its parent."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    run = RunDirectory(tmp_path / "run")
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1")
    assert done.returncode == 0 and run.attempts() == [0, 1], done.stderr + story(run)
    # torch 2.9's gloo prints a line, too.
    (pid,) = re.findall(r"^child (\d+)$", (run.attempt_logs(0) / "rank-0.out").read_text(), re.MULTILINE)
    assert process_start(int(pid)) is None


STARTS_OTHERS = """
import os, subprocess, sys
import clusterddp

def start(**more):
    code = "import clusterddp; ctx = clusterddp.init(); print(ctx.rank, 'of', ctx.world_size)"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ, **more), **streams)

if os.environ["RANK"] == "0":
    clusterddp.init()
    step = {"NUM_NODES": "1", "NUM_TASKS": "1", "TASKS_PER_NODE": "1", "NODELIST": "localhost"}
    job = {f"SLURM_STEP_{name}": value for name, value in step.items()}
    job |= {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    launched = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
    started = {"child": start(), "launched": start(**launched), "job": start(**job)}
    for what, process in started.items():
        print(what, process.communicate()[0].splitlines()[-1], flush=True)
else:
    process = start()  # before this one has joined
    print("launcher", process.communicate()[0].splitlines()[-1], flush=True)
"""


@pytest.mark.product  # unit/test_environment.py has inherited variables
def test_a_process_that_inherited_a_ranks_variables_is_no_second_rank(tmp_path: Path) -> None:
    """A child of a rank gets an error. A job that a rank submits, and the ranks of a launcher in it, count alone.

    A child takes the place of a rank whose own process has not joined.
    """
    script, run = tmp_path / "starts.py", RunDirectory(tmp_path / "run")
    script.write_text(STARTS_OTHERS)
    assert submit(run, str(script), "--device", "cpu", "--gpus", "2").returncode == 0, story(run)
    lines = [line for rank in (0, 1) for line in (run.attempt_logs(0) / f"rank-{rank}.out").read_text().splitlines()]
    assert [*lines[1:]] == ["launched 0 of 1", "job 0 of 1", "launcher 1 of 2"]
    assert lines[0].startswith("child clusterddp.errors.LauncherEnvironmentError: ")


REPLACED = f"""
import os, sys
if "FIXED" not in os.environ:
    os.environ["FIXED"] = "1"
    os.execv(sys.executable, sys.orig_argv if sys.argv[1] == "orig_argv" else [sys.executable, *sys.argv])
from tests.stops import request_stop
{TRAINING}
for batch in run.steps(6 if ctx.attempt else 1_000_000):
    train(batch)
    if run.step == 3 and ctx.attempt == 0:
        request_stop(ctx)
"""


@pytest.mark.parametrize("how", ["orig_argv", pytest.param("argv", marks=pytest.mark.product)])
def test_a_rank_that_replaces_its_program_by_exec_keeps_its_place(tmp_path: Path, how: str) -> None:
    """Scripts set LD_LIBRARY_PATH so. The stop is saved, and no step is repeated."""
    script, run = tmp_path / "replaced.py", RunDirectory(tmp_path / "run")
    script.write_text(REPLACED)
    shape = ["--device", "cpu", "--gpus", "1"]
    assert submit(run, str(script), *shape, "--", how).returncode == 130, story(run)
    assert submit(run).returncode == 0, story(run)
    events = {(event["attempt"], event["event"]): event for event in run.events()}
    assert events[1, "resumed"]["step"] == events[0, "stopped"]["step"] and run.attempts() == [0, 1]


ENTRY = module_command("clusterddp.worker")[1:]


@pytest.mark.parametrize(
    ("command", "words", "place"),
    [
        ("train.py", "-u -X dev -Wignore --check-hash-based-pycs default train.py --lr 1", 7),
        ("train.py", "./train.py train.py", 1),
        ("train.py", "-m torch.distributed.run --nproc-per-node 2 train.py", None),
        ("train.py", "launch.py train.py", None),
        ("train.py", "-c code train.py", None),
        ("train.py", "-uc code train.py", None),
        ("train.py", "-i", None),
        ("-m pkg.train", "-u -m pkg.train --lr 1", 2),
        ("-m pkg.train", "-m torch.distributed.run -m pkg.train", None),
        ("-m pkg.train", "pkg/train.py --lr 1", 1),
    ],
)
def test_only_an_exec_of_the_ranks_own_program_begins_with_a_rank(command: str, words: str, place: int | None) -> None:
    """Not one of another program that gets it as an argument, such as torchrun."""
    given = ["python", *words.split()]
    expected = given if place is None else [*given[:place], *ENTRY, *given[place:]]
    file = "pkg/train.py" if command.startswith("-m") else "train.py"
    assert rank.through_entry(given, command.split(), file) == expected
