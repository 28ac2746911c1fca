"""A repository's own submitit launcher submits with clusterddp once CLUSTERDDP_SUBMITIT is set, without a change."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import UncompletedJobError

from clusterddp.errors import UsageError
from clusterddp.integrations.submitit import ClusterddpExecutor, job_values
from clusterddp.jobdef.load import load_resolved
from clusterddp.rundir.run_directory import RunDirectory
from tests.waiting import preempt_local, story, wait_until
from tests.wording import raises

LAUNCHER = Path(__file__).resolve().parents[1] / "scripts" / "submitit_launcher.py"


def undisturbed(style: str, ranks: int, epochs: int = 6) -> float:
    """The launchers' training, in one process."""
    weight = 0.0
    for epoch in range(epochs):
        weight = 0.5 * weight + (sum(rank + 1 + epoch for rank in range(ranks)) if style == "files" else epoch)
    return weight


def waiting(folder: Path, attempt: int, ranks: int) -> list[int]:
    """The processes that wait for a disturbance in an attempt, in the order of ranks; empty unless all do."""
    found = sorted(folder.glob(f"here-{attempt}-*"), key=lambda path: int(path.name.split("-")[2]))
    return [int(path.name.split("-")[3]) for path in found] if len(found) == ranks else []


@pytest.mark.parametrize(("style", "ranks"), [("files", 2), ("folder", 1)])
def test_a_launcher_that_is_disturbed_ends_as_undisturbed(style: str, ranks: int, tmp_path: Path) -> None:
    """The newest rank is killed in the first attempt, the second is preempted: checkpoint() is called on rank 0 both
    times, and its file to meet in is a new one. The output folder, named by the job id, stays the same."""
    runs = tmp_path / "runs"
    command = [sys.executable, str(LAUNCHER), style, str(tmp_path / "%j"), "--ngpus", str(ranks), "--wait"]
    environ = {**os.environ, "CLUSTERDDP_SUBMITIT": "local", "CLUSTERDDP_RUNS": str(runs)}
    name = "paper-train-0" if style == "folder" else "paper-0"
    run, folder = RunDirectory(runs / name), tmp_path / name
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as launcher:
        os.kill(wait_until(lambda: waiting(folder, 0, ranks), "attempt 0")[-1], signal.SIGKILL)
        wait_until(lambda: waiting(folder, 1, ranks), f"attempt 1\n{story(run)}")
        preempt_local(run)
        said, _ = launcher.communicate(timeout=100)
    begin, weight = 4, undisturbed(style, ranks)
    assert said.splitlines() == [
        f"Submitted job_id: {name}",
        f"Results: {json.dumps([[begin, weight]] * ranks)} COMPLETED True {ranks}",
        f"Paths: {folder} {run.attempt_logs(2)}/rank-0.out",
    ], story(run)
    assert [event["event"] for event in run.events()].count("requeued") == 1
    attempts = [run.attempt_logs(number) / "rank-0.out" for number in range(3)]
    assert [path.read_text().count("Requeuing") for path in attempts] == [0, 2, 0]
    assert (folder / f"{name}_run").readlink() == run.path
    job = load_resolved(run.job_file)
    assert (job.device, job.gpus_per_node, job.time_s, job.timeouts.notice_s) == ("cpu", ranks, 600, 120)
    assert (job.mem, job.sbatch) == ("1GB" if style == "files" else "0", {"comment": "of a paper"})


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, {"time": 5, "gpus_per_node": 1, "device": "cpu"}),
        (
            {"job_name": "mae", "time": 4320, "nodes": 2, "ntasks_per_node": 8, "gpus_per_node": 8, "cpus_per_task": 10}
            | {"mem": "320GB", "partition": "learn", "signal_delay_s": 120, "constraint": "volta32gb", "comment": "x"},
            {"job_name": "mae", "time": 4320, "nodes": 2, "gpus_per_node": 8, "cpus_per_task": 10, "mem": "320GB"}
            | {"partition": "learn", "timeouts": {"notice_s": 120}, "constraint": "volta32gb"}
            | {"sbatch": {"comment": "x"}},
        ),
        (
            {"ntasks_per_node": 2, "gpus_per_node": "a100:8", "mem": "0GB", "time": "3-0", "exclusive": False},
            {"time": "3-0", "gpus_per_node": "a100:8", "gpus_per_rank": 4, "mem": "0"},
        ),
        (
            {"additional_parameters": {"reservation": "r", "mail-type": "FAIL", "qos": "q"}, "exclusive": True}
            | {"srun_args": ["--cpu-bind=none", "--overlap"], "setup": ["module load x"], "mem_per_cpu": "4G"},
            {"time": 5, "gpus_per_node": 1, "device": "cpu", "reservation": "r", "qos": "q", "setup": ["module load x"]}
            | {"sbatch": {"mail-type": "FAIL", "exclusive": True, "mem-per-cpu": "4G"}}
            | {"srun": {"cpu-bind": "none", "overlap": True}},
        ),
    ],
)
def test_submitits_parameters_become_keys_of_a_job(parameters: dict[str, Any], expected: dict[str, Any]) -> None:
    """Those of AutoExecutor have been translated for Slurm by submitit. Without a time, submitit means 5 minutes."""
    assert job_values(parameters) == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"teardown": ["rm x"], "use_srun": False, "srun_args": ["-v"]},
        {"array_parallelism": 2},
        {"ntasks_per_node": 3, "gpus_per_node": 8},
        {"gpus_per_task": 1},
        {"new_in_submitit": 1},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_parameters_without_a_counterpart_are_named(parameters: dict[str, Any]) -> None:
    """Before anything is submitted."""
    with raises(UsageError):
        job_values(parameters, submissions=3)


#: Prints which executor AutoExecutor takes.
WHICH = """
import submitit, sys
sys.argv = ["which"]
executor = submitit.AutoExecutor(folder="x", **eval(sys.stdin.read()))
print(type(executor._executor).__name__)
"""


@pytest.mark.parametrize(
    ("variable", "given", "expected"),
    [
        (None, {}, "LocalExecutor"),
        ("0", {}, "LocalExecutor"),
        (None, {"cluster": "clusterddp"}, "set CLUSTERDDP_SUBMITIT=1 and leave out `cluster`"),
        ("1", {}, "ClusterddpExecutor"),
        ("1", {"cluster": "slurm", "slurm_max_num_timeout": 3}, "ClusterddpExecutor"),
        ("local", {"cluster": "local"}, "LocalExecutor"),
        ("yes", {}, "CLUSTERDDP_SUBMITIT='yes': expected 1 (a Slurm job) or local"),
    ],
)
def test_only_who_asks_for_it_gets_clusterddps_executor(
    variable: str | None, given: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Without the variable, submitit behaves as if clusterddp were not installed; no Slurm is here."""
    environ = {name: value for name, value in os.environ.items() if name != "CLUSTERDDP_SUBMITIT"}
    environ |= {"PATH": "/nowhere"} | ({"CLUSTERDDP_SUBMITIT": variable} if variable else {})
    command = [sys.executable, "-c", WHICH]
    done = subprocess.run(command, input=repr(given), cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert expected in done.stdout + done.stderr


def test_an_array_is_a_run_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`map_array` and `executor.batch()`. A job knows its state and exception, also in another process, and is
    cancelled with its run."""
    monkeypatch.setenv("CLUSTERDDP_SUBMITIT", "local")
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    executor = ClusterddpExecutor(tmp_path / "jobs")
    executor.update_parameters(job_name="inverse", time=10)
    jobs = executor.map_array(inverse, [4, 0])
    assert [job.job_id for job in jobs] == ["inverse-0", "inverse-1"]
    assert jobs[0].result() == 0.25 and jobs[0].exception() is None
    copy = pickle.loads(pickle.dumps(jobs[1]))
    copy.wait()
    assert (copy.state, copy.done(), copy.submission().args) == ("FAILED", True, (0,))
    assert "ZeroDivisionError" in str(copy.exception()) and "ZeroDivisionError" in copy.stderr()
    assert "about to divide by 0" in copy.stdout()
    with executor.batch():
        waits = executor.submit(inverse, -1)
    assert waits.state == "RUNNING" and not waits.done()
    waits.cancel()
    assert waits.state == "CANCELLED"
    with raises(UncompletedJobError):
        waits.result()


def inverse(number: int) -> float:
    """Never returns for a negative number."""
    print("about to divide by", number, flush=True)
    if number < 0:
        threading.Event().wait()
    return 1 / number
