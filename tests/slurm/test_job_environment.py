"""What a job gets from the shell, from `setup:` and from `env:`, as docs/guide/environment.md has it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.waiting import story, wait_for_outcome

SCRIPT = """
import json, os, sys
names = ("SHELL_ONLY", "SETUP_ONLY", "BOTH", "OMP_NUM_THREADS")
print(json.dumps({**{name: os.environ.get(name) for name in names}, "cwd": os.getcwd(), "path": sys.path[0],
                  "executable": sys.executable}))
"""


def test_ranks_of_all_nodes_have_the_shells_setups_and_jobs_environment(cluster: Cluster, runs: Path) -> None:
    """A line of setup that fails does not stop the job; `env:` wins; ranks work where the job was submitted."""
    folder, run = runs / "script", RunDirectory(runs / "run")
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(
        "script: train.py\nnodes: 2\ndevice: cpu\npartition: low\ncpus_per_task: 1\n"
        "setup: ['export SETUP_ONLY=setup BOTH=setup', 'false']\nenv: {BOTH: env}\n"
    )
    command = ["env", "SHELL_ONLY=shell", "BOTH=shell", cluster.python, "-m", "clusterddp.submit", folder / "job.yaml"]
    cluster.run([*command, "--run-dir", run.path], cwd=cluster.source)
    assert wait_for_outcome(run) == "completed", story(run)
    seen = [json.loads((run.attempt_logs(0) / f"rank-{rank}.out").read_text()) for rank in range(2)]
    variables = {"SHELL_ONLY": "shell", "SETUP_ONLY": "setup", "BOTH": "env", "OMP_NUM_THREADS": "1"}
    expected = {**variables, "cwd": str(cluster.source), "path": str(folder), "executable": str(cluster.python)}
    assert seen == [expected, expected]


def test_ranks_of_a_job_without_the_shells_environment_have_their_own(cluster: Cluster, runs: Path) -> None:
    """Slurm passes ``--export=NONE`` of sbatch on to srun, and the ranks did not know their supervisor."""
    folder, run = runs / "script", RunDirectory(runs / "run")
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(
        "script: train.py\nnodes: 2\ndevice: cpu\npartition: low\ncpus_per_task: 1\nenv: {BOTH: env}\n"
        "sbatch: {export: NONE}\n"
    )
    command = ["env", "SHELL_ONLY=shell", cluster.python, "-m", "clusterddp.submit", folder / "job.yaml"]
    cluster.run([*command, "--run-dir", run.path], cwd=cluster.source)
    assert wait_for_outcome(run) == "completed", story(run)
    seen = [json.loads((run.attempt_logs(0) / f"rank-{rank}.out").read_text()) for rank in range(2)]
    assert [(one["SHELL_ONLY"], one["BOTH"]) for one in seen] == [(None, "env")] * 2


def test_an_option_that_srun_does_not_know_fails_the_run_in_srun_s_words(cluster: Cluster, runs: Path) -> None:
    """Once, and neither a rank nor a node is to blame."""
    run = RunDirectory(runs / "run")
    options = ["--nodes", "2", "--gpus", "1", "--device", "cpu", "-p", "low", "-c", "1", "--run-dir", run.path]
    refused = ["--set", "srun.container-image=none", "-m", "clusterddp.digits"]
    cluster.run([cluster.python, "-m", "clusterddp.submit", *options, *refused], cwd=cluster.source)
    assert wait_for_outcome(run) == "failed", story(run)
    (failed,) = (event for event in run.events() if event["event"].endswith("_failed"))
    assert failed["event"] == "launch_failed" and any("--container-image" in line for line in failed["lines"])
    shown = cluster.run([cluster.python, "-m", "clusterddp", "logs", run.path]).stdout
    everything = cluster.run([cluster.python, "-m", "clusterddp", "logs", run.path, "--rank", "all"]).stdout
    assert all("unrecognized option '--container-image=none'" in text for text in (shown, everything))


def test_what_was_asked_for_overrides_the_variables_of_sbatch(cluster: Cluster, runs: Path) -> None:
    """Whatever they say, there is one job, and the command does not wait for it. What was not asked for applies."""
    run = RunDirectory(runs / "run")
    (runs / "train.py").write_text("import clusterddp; clusterddp.init()")
    exported = {"PARTITION": "nowhere", "TIMELIMIT": "1", "ARRAY_INX": "0-1", "WAIT": "1", "MEM_PER_CPU": "90000"}
    command: list[object] = ["env", *(f"SBATCH_{name}={value}" for name, value in exported.items()), "SBATCH_COMMENT=x"]
    command += ["SBATCH_NO_REQUEUE=1", "SBATCH_ACCOUNT=nobodys", "SBATCH_HINT=nomultithread"]
    command += [cluster.python, "-m", "clusterddp.submit", runs / "train.py", "--device", "cpu", "-p", "low", "-t", "7"]
    command += ["-A", "ddp", "-c", "1", "--mem", "100M", "--sbatch", "hold=true", "--run-dir", run.path]
    job = cluster.run(command, cwd=cluster.source).stdout.strip()
    shown = cluster.run(["squeue", "--noheader", "--me", "--array", "--format=%i %P %l %T"]).stdout.splitlines()
    assert [line.split() for line in shown if line.startswith(job)] == [[job, "low", "7:00", "PENDING"]]
    cluster.run(["scancel", job])


def test_nodes_that_do_not_reach_slurmdbd_need_not(cluster: Cluster, runs: Path) -> None:
    """SLURM_CLUSTERS makes every command ask slurmdbd for the cluster, also those of the job on its own cluster."""
    folder, run = runs / "script", RunDirectory(runs / "run")
    folder.mkdir()
    (folder / "train.py").write_text("import clusterddp; clusterddp.init()")
    shown = re.sub("(?m)^AccountingStorageHost=.*", "AccountingStorageHost=127.0.0.9", Path(cluster.conf).read_text())
    (folder / "slurm.conf").write_text(shown)
    setup = json.dumps([f"export SLURM_CONF={folder}/slurm.conf", "export SLURM_CLUSTERS=$SLURM_CLUSTER_NAME"])
    (folder / "job.yaml").write_text(
        f"script: train.py\ndevice: cpu\ngpus_per_node: 1\npartition: low\ncpus_per_task: 1\nsetup: {setup}\n"
    )
    command = [cluster.python, "-m", "clusterddp.submit", folder / "job.yaml"]
    cluster.run([*command, "--run-dir", run.path], cwd=cluster.source)
    assert wait_for_outcome(run) == "completed", story(run)
