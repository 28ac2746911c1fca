"""The batch script is a pure function of the job and the run directory."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from submitit import SlurmExecutor

from clusterddp.jobdef.job import Job, Timeouts
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands
from clusterddp.slurm.batch import batch_script, submit

GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --account=vision
#SBATCH --chdir=/work
#SBATCH --comment='two words'
#SBATCH --cpus-per-task=4
#SBATCH --error=/runs/net-0/logs/job-%j.log
#SBATCH --exclusive
#SBATCH --gpus-per-node=a100:8
#SBATCH --job-name=net
#SBATCH --mem=64G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/runs/net-0/logs/job-%j.log
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@30
#SBATCH --time=1-00:00:00

# setup
trap '' TERM
module load cuda

# command
export SUBMITIT_EXECUTOR=slurm
exec /venv/bin/python -u -c 'import sys; sys.path = [*filter(None, sys.path)]; import runpy; \
runpy.run_module("clusterddp.supervisor", None, "__main__", True)' /runs/net-0
"""


def script(job: Job, run: str = "/runs/net-0") -> str:
    return batch_script(job, RunDirectory(run), Path("/work"))


def test_the_whole_script_is_as_a_cluster_engineer_would_write_it() -> None:
    """TERM is ignored before srun exists, the supervisor replaces the shell, nothing hides its exit code."""
    job = Job(
        name="net", script="/work/net.py", nodes=2, gpus_per_node=8, gpu_type="a100", time_s=86400, partition="gpu",
        account="vision", mem="64G", cpus_per_task=4, setup=("module load cuda",), python="/venv/bin/python",
        sbatch={"comment": "two words", "exclusive": True, "hold": False},
    )  # fmt: skip
    assert script(job).rstrip("\n") + "\n" == GOLDEN


def test_an_expedited_requeue_is_requested_of_sbatch() -> None:
    text = script(Job(name="net", script="/net.py", expedite_requeue=True))
    assert "#SBATCH --requeue=expedite\n" in text


def test_the_script_needs_no_slurm_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what submitit's private method is used for, with the arguments that all allowed versions take."""
    monkeypatch.setenv("PATH", str(tmp_path))
    text = script(Job(name="net", script="/net.py"), run=str(tmp_path / "net-0"))
    assert list(tmp_path.iterdir()) == []
    assert text.index("trap '' TERM") < text.index("exec ") and "srun" not in text
    assert list(inspect.signature(SlurmExecutor._make_submission_file_text).parameters) == ["self", "command", "uid"]


def test_cpu_jobs_request_no_gpu_and_a_missing_limit_is_left_to_the_partition() -> None:
    """submitit's default would be five minutes."""
    text = script(Job(name="net", script="/net.py", device="cpu", gpus_per_node=4))
    assert "gpus" not in text
    assert "--time" not in text
    assert "--ntasks-per-node=4" in text


def test_a_rank_with_several_gpus_is_one_task() -> None:
    """All of the node's GPUs are requested, and every task sees them all."""
    text = script(Job(name="net", script="/net.py", gpus_per_node=8, gpus_per_rank=2))
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --ntasks-per-node=4\n" in text
    assert "gpus-per-task" not in text and "gpu-bind" not in text


@pytest.mark.parametrize(
    ("gpu_type", "other", "gres"),
    [("a100", {}, "gpu:a100:8"), (None, {"gres": "nvme:1"}, "gpu:8,nvme:1"), (None, {"gres": False}, "gpu:8")],
)
def test_gpus_are_requested_as_the_site_expects(gpu_type: str | None, other: dict[str, str | bool], gres: str) -> None:
    """By --gres, beside other resources of the job definition; the script has no --gpus-per-node then."""
    job = Job(name="net", script="/net.py", gpus_per_node=8, gpu_type=gpu_type, gpu_request="gres", sbatch=other)
    text = script(job)
    assert f"#SBATCH --gres={gres}\n" in text and "gpus" not in text


def test_a_range_of_nodes_is_slurms_to_choose_from() -> None:
    """Also for the job's later starts, and for a resubmission, which take the same script.

    The tasks of the fewest nodes would be a limit on the number of nodes.
    """
    job = Job(name="net", script="/net.py", nodes=4, min_nodes=2, gpus_per_node=8, cpus_per_task=3)
    text = script(job)
    assert "#SBATCH --nodes=2-4\n" in text
    assert "#SBATCH --cpus-per-task=24\n" in text
    assert "ntasks" not in text


@pytest.mark.parametrize(("time_s", "notice"), [(120, 15), (86400, 30), (None, 30)])
def test_slurms_own_warning_is_a_late_fallback_and_leaves_a_short_limit_its_time(
    time_s: int | None, notice: int
) -> None:
    """With a limit of two minutes, a warning two minutes before the end would come at the start."""
    job = Job(name="net", script="/net.py", time_s=time_s, timeouts=Timeouts(notice_s=120))
    assert f"--signal=USR2@{notice}\n" in script(job)


def test_a_folder_with_blanks_and_quotes_stays_one_word() -> None:
    """Shell words are quoted."""
    text = script(Job(name="net", script="/net.py", python="/a b/python"), run="/runs/it's mine")
    assert text.splitlines()[-1].startswith("exec '/a b/python' -u -c ")
    assert """'/runs/it'"'"'s mine'""" in text


def test_a_job_excludes_the_nodes_of_its_definition_and_those_to_avoid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch's option replaces the line of the script."""
    given: list[str] = []
    monkeypatch.setattr(commands, "submit", lambda script, *options, timeout_s: given.extend(options))
    submit(Job(name="net", script="/net.py", exclude="n[1-2]"), RunDirectory(tmp_path), tmp_path, ["n3"])
    assert given == ["--exclude=n[1-2],n3"]
