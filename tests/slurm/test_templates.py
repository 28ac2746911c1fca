"""The templates in slurm/, submitted as they stand: preempted with a grace of 20 s, and with a training that fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import events_of
from tests.waiting import story, wait_for_outcome, wait_for_step

FOLDS, STEPS, EVERY = 2, 400, 100


def submit(cluster: Cluster, template: list[str], runs: Path, **variables: object) -> str:
    """Submits a template, after the options that fit it to the test cluster; returns the job id."""
    exported = {"DEVICE": "cpu", "PYTHON": cluster.python, **variables}
    options = ["--partition=low", "--cpus-per-task=1", f"--output={runs}/job-%j.log"]
    options += [f"--export=ALL,{','.join(f'{name}={value}' for name, value in exported.items())}"]
    return cluster.run(["sbatch", "--parsable", *options, *template], cwd=cluster.source).stdout.strip()


def check_each_step_once(run: RunDirectory, steps: int) -> None:
    assert sorted(line["step"] for line in read_lines(run.metrics_file)) == list(range(steps)), story(run)


# test_main_job.py has a template that is preempted, ranks/test_launchers.py torchrun.
@pytest.mark.product
def test_torchrun_on_every_node_survives_a_preemption(cluster: Cluster, runs: Path) -> None:
    """torchrun forwards TERM to the ranks, which stop together and save."""
    run = RunDirectory(runs / "run")
    script = ["tests/scripts/train.py", "--steps", "200", "--pause", "0.02"]
    template = ["--gpus-per-node=1", "slurm/torchrun.sbatch", *script]
    job_id = submit(cluster, template, runs, RUN=run.path, PYTHONPATH=cluster.source)
    wait_for_step(run, 20)
    cluster.preempt(seconds=0.1)
    assert wait_for_outcome(run) == "completed", story(run)
    assert cluster.wait_job(job_id, {"COMPLETED"})["Restarts"] == "1"
    (requeued,) = events_of(run, "requeued")
    assert requeued["cause"] == "preempted", story(run)
    check_each_step_once(run, 200)
    assert "finished at step 200" in (run.attempt_logs(1) / "rank-0.out").read_text()


@pytest.mark.product
@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_torchruns_template_ends_with_the_exit_code_of_the_rank_that_failed_first(
    cluster: Cluster, runs: Path, end: str, code: int
) -> None:
    """torchrun's own would be 1. No requeue, though the script might do better a second time."""
    script = runs / "fails.py"
    script.write_text(f"import os, signal, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)\n")
    job_id = submit(cluster, ["--gpus-per-node=1", "slurm/torchrun.sbatch", str(script)], runs, RUN=runs / "run")
    ended = cluster.wait_job(job_id, {"FAILED"})
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{code}:0", "0")


@pytest.mark.product
def test_of_an_array_only_the_preempted_member_is_requeued(cluster: Cluster, runs: Path) -> None:
    """Folds in run directories and on nodes of their own, each with its best checkpoint; the last loses its node."""
    template = [
        f"--array=0-{FOLDS - 1}",
        "--exclusive",
        "slurm/array.sbatch",
        "jobs/digits_folds.yaml",
        "--steps",
        str(STEPS),
        "--eval-every",
        str(EVERY),
    ]
    array = submit(cluster, template, runs, RUNS=runs)
    members = [RunDirectory(runs / f"fold-{fold}") for fold in range(FOLDS)]
    nodes = {fold: cluster.wait_job(f"{array}_{fold}", {"RUNNING"})["NodeList"] for fold in range(FOLDS)}
    preempted = FOLDS - 1
    wait_for_step(members[preempted], 60)
    high = ["--partition=high", "--exclusive", f"--nodelist={nodes[preempted]}", "--output=/dev/null"]
    cluster.run(["sbatch", *high, "--wrap=sleep 0.1"])
    for fold, run in enumerate(members):
        assert wait_for_outcome(run) == "completed", story(run)
        assert run.attempts() == ([0, 1] if fold == preempted else [0]), story(run)
        assert len(events_of(run, "requeued")) == (fold == preempted)
        check_each_step_once(run, STEPS)
        check_best_checkpoint(run)
        images = len(range(fold, 1797, FOLDS))
        assert f", {images} images, 1 ranks" in (run.attempt_logs(run.attempts()[-1]) / "rank-0.out").read_text()
    ended = [cluster.wait_job(f"{array}_{fold}", {"COMPLETED"}) for fold in range(FOLDS)]
    assert [job["Restarts"] for job in ended] == [str(int(fold == preempted)) for fold in range(FOLDS)]


def check_best_checkpoint(run: RunDirectory) -> None:
    """That of the step with the best macro-F1 (the newest such) is there, beside the last one.

    A preemption in an evaluation after a step cuts it off: that step has no score.
    """
    scores = {line["step"] + 1: line["f1"] for line in run.metrics() if "f1" in line}
    stopped = {event["step"] for event in events_of(run, "stopping")}
    assert set(range(EVERY, STEPS + 1, EVERY)) - stopped <= set(scores) <= set(range(EVERY, STEPS + 1, EVERY)), scores
    best = max(scores, key=lambda step: (scores[step], step))
    kept = {int(path.name.split(".")[0].removeprefix("step-")) for path in run.checkpoints.glob("step-*")}
    assert kept == {best, STEPS}, story(run)


@pytest.mark.product
def test_an_arrays_member_ends_with_its_own_trainings_exit_code(cluster: Cluster, runs: Path) -> None:
    """The script of member 1 exits with 7, that of member 0 completes."""
    script = runs / "seven.py"
    script.write_text("import os, sys\nsys.exit(7 * int(os.environ['SLURM_ARRAY_TASK_ID']))\n")
    array = submit(cluster, ["--array=0-1", "slurm/array.sbatch", str(script), "--lr", "1"], runs, RUNS=runs)
    assert cluster.wait_job(f"{array}_0", {"COMPLETED"})["ExitCode"] == "0:0"
    assert cluster.wait_job(f"{array}_1", {"FAILED"})["ExitCode"] == "7:0"


#: For each runtime, a program that records its arguments, and what they must be.
APPTAINER = """#!/bin/bash
echo "$@" >> {log}
while [ "$1" != python3 ]; do shift; done
shift
exec {python} "$@"
"""
SRUN_WITH_PYXIS = """#!/bin/bash
echo "$@" >> {log}
for word; do
    [[ $word == --container-* ]] && continue
    [[ $word == python3 ]] && word={python}
    words+=("$word")
done
exec {srun} "${{words[@]}}"
"""
IN_IMAGE = {
    "apptainer": "exec --pwd {folder} train.img",
    "pyxis": "--container-image=train.img --container-mounts={folder}:{folder} --container-workdir={folder}",
}


@pytest.mark.product
@pytest.mark.parametrize(("runtime", "program"), [("apptainer", "apptainer"), ("pyxis", "srun")])
def test_the_container_template_starts_the_ranks_and_nothing_else_in_the_image_and_survives_a_preemption(
    cluster: Cluster, runs: Path, runtime: str, program: str
) -> None:
    """With stand-ins, preempted once: neither Apptainer nor pyxis is installed."""
    log = runs / "words"
    stand_in = runs / program
    text = APPTAINER if runtime == "apptainer" else SRUN_WITH_PYXIS
    stand_in.write_text(
        text.format(log=log, python=cluster.python, srun=shutil.which("srun", path=cluster.search_path))
    )
    stand_in.chmod(0o755)
    run = RunDirectory(runs / "run")
    variables = {"RUN": run.path, "RUNTIME": runtime, "IMAGE": "train.img", "PATH": f"{runs}:{cluster.search_path}"}
    shape = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "slurm/container.sbatch"]
    job_id = submit(cluster, [*shape, "jobs/digits.py", "--steps", "300"], runs, **variables)
    wait_for_step(run, 100)
    cluster.preempt(seconds=0.1)
    assert wait_for_outcome(run) == "completed", story(run)
    assert cluster.wait_job(job_id, {"COMPLETED"})["Restarts"] == "1"
    check_each_step_once(run, 300)
    said = log.read_text().splitlines()
    assert len(said) == (4 if runtime == "apptainer" else 2)
    words = f"{IN_IMAGE[runtime].format(folder=cluster.source)} python3 -u -c import sys;"
    assert all(words in line for line in said), said
