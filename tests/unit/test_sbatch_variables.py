"""What sbatch takes from SBATCH_*, and what the job definition overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import resources
from clusterddp.slurm.batch import array_script, batch_script
from clusterddp.slurm.sbatch_variables import overridden


def script(**values: Any) -> str:
    job = Job(**{"name": "x", "script": "x.py", "gpus_per_node": 2, "device": "cpu", **values})
    return batch_script(job, RunDirectory("runs/x"), Path("/home"))


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("SBATCH_PARTITION", {"partition": "low"}),
        ("SBATCH_TIMELIMIT", {"time_s": 60}),
        ("SBATCH_ACCOUNT", {"account": "a"}),
        ("SBATCH_QOS", {"qos": "q"}),
        ("SBATCH_CONSTRAINT", {"constraint": "c"}),
        ("SBATCH_RESERVATION", {"reservation": "r"}),
        ("SBATCH_JOB_NAME", {"name": "y"}),
        ("SBATCH_MEM_PER_NODE", {"mem": "1G"}),
        ("SBATCH_MEM_PER_CPU", {"mem": "1G"}),
        ("SBATCH_MEM_PER_NODE", {"sbatch": {"mem-per-cpu": "1G"}}),
        ("SBATCH_CPUS_PER_GPU", {"cpus_per_task": 2}),
        ("SBATCH_GPUS", {"device": "cuda"}),
        ("SBATCH_GPUS_PER_TASK", {"device": "cuda"}),
        ("SBATCH_GPUS_PER_NODE", {"device": "cuda", "gpu_request": "gres"}),
        ("SBATCH_GRES", {"device": "cuda"}),
        ("SBATCH_EXCLUSIVE", {"sbatch": {"exclusive": True}}),
        ("SBATCH_WCKEY", {"sbatch": {"wckey": "w"}}),
        ("SBATCH_REQ_SWITCH", {"sbatch": {"switches": "1"}}),
        ("SBATCH_NO_KILL", {"spare_nodes": 1}),
    ],
)
def test_what_the_job_definition_states_overrides_the_environment(variable: str, values: dict[str, Any]) -> None:
    """Also another way to ask for the same, which sbatch would refuse or add."""
    assert overridden([variable], script(**values)) == {variable}
    if variable != "SBATCH_JOB_NAME":  # a script always has a name
        assert overridden([variable], script()) == set()


def test_a_run_has_one_job_that_is_requeued_with_its_own_log() -> None:
    """An array would start the run twice, and sbatch would wait for the end of the job before it prints the id."""
    ours = {"SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_NO_REQUEUE", "SBATCH_REQUEUE", "SBATCH_SIGNAL"}
    ours |= {"SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_OPEN_MODE"}
    others = {"SBATCH_ACCOUNT", "SBATCH_HINT", "SBATCH_EXPORT", "SLURM_CLUSTERS", "PATH"}
    assert overridden(ours | others, script()) == ours
    job = Job(name="x", script="x.py", gpus_per_node=2, device="cpu")
    assert "SBATCH_ARRAY_INX" in overridden(ours, array_script(job, Path("s/arrays/0"), 2, None, Path("/home")))


def test_sbatch_does_not_see_an_overridden_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job and its resubmissions do not either."""
    sbatch, file = tmp_path / "sbatch", tmp_path / "job.sbatch"
    sbatch.write_text('#!/bin/sh\n[ -z "$SBATCH_PARTITION$SBATCH_WAIT" ] && [ "$SBATCH_ACCOUNT" = a ] && echo 41\n')
    sbatch.chmod(0o755)
    file.write_text(script(partition="low"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in {"SBATCH_PARTITION": "high", "SBATCH_WAIT": "1", "SBATCH_ACCOUNT": "a"}.items():
        monkeypatch.setenv(name, value)
    assert slurm.submit(file) == "41"


def test_the_plan_says_what_sbatch_applies_and_what_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may have forgotten the variables."""
    job = Job(name="x", script="x.py", gpus_per_node=2, device="cpu", partition="low")
    monkeypatch.setenv("SBATCH_PARTITION", "high")
    assert not any("also apply" in remark for remark in resources.variables_of_sbatch(job))
    assert any("SBATCH_PARTITION=high" in remark for remark in resources.variables_of_sbatch(job))
    monkeypatch.setenv("SBATCH_ACCOUNT", "a")
    applied, ignored = resources.variables_of_sbatch(job)
    assert "SBATCH_ACCOUNT=a" in applied and "SBATCH_PARTITION" not in applied and "SBATCH_ACCOUNT" not in ignored


def test_the_plan_does_not_show_the_secrets_that_sbatch_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are pasted into issues."""
    job = Job(name="x", script="x.py", gpus_per_node=2, device="cpu")
    monkeypatch.setenv("SBATCH_EXPORT", "ALL,HF_TOKEN=hf_abc,OMP_NUM_THREADS=2,WANDB_API_KEY=wb==1")
    (remark,) = resources.variables_of_sbatch(job)
    assert "hf_abc" not in remark and "wb" not in remark and "OMP_NUM_THREADS=2" in remark and "HF_TOKEN=" in remark
