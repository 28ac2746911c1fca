"""What the surrounding job of ``submit --here`` has requested: its script's header, its variables, its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.errors import SlurmError
from clusterddp.jobdef.load import from_values
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.allocation import Options, as_allocated, header_of, requested, write_script
from clusterddp.slurm.batch import batch_script
from tests.fake_slurm import FakeSlurm

SCRIPT = """#!/bin/bash
# a comment, and no option: #SBATCH --mem=1
#SBATCH -p gpu -N2
#SBATCH --constraint "a100|h100"   # either
#SBATCH --licenses=fs:2 --comment='first try'
#SBATCH --exclusive
#SBATCH --time 1:00:00
#SBATCH --gpus-per-node=8
#SBATCH --array=0-3 --dependency=singleton --no-requeue --export=NONE -W
##SBATCH --qos=none

module load cuda
#SBATCH --qos=late
"""
HEADER: Options = {
    "partition": "gpu",
    "constraint": "a100|h100",
    "licenses": "fs:2",
    "comment": "first try",
    "exclusive": True,
    "time": "1:00:00",
    "gpus-per-node": "8",
}
RECORD = (
    "JobId=7 JobName=train UserId=me(1000) GroupId=me(1000) MCS_label=N/A Account=vision QOS=normal JobState=RUNNING "
    "Restarts=0 RunTime=00:00:01 TimeLimit={time} TimeMin=N/A Partition=low ReqNodeList=(null) ExcNodeList=n9 "
    "Features=(null) OverSubscribe={shared} Licenses=(null) Network=(null) Command=/me/job.sh Partition=x WorkDir=/me "
    "Power= TresPerNode={gres} \n"
)


def record(time: str = "01:00:00", shared: str = "OK", gres: str = "gres:gpu:8") -> str:
    return RECORD.format(time=time, shared=shared, gres=gres)


def test_the_header_ends_at_the_first_command_and_lacks_what_was_for_one_job() -> None:
    assert header_of(SCRIPT) == HEADER


def test_what_the_job_has_takes_precedence_over_the_header() -> None:
    """``sbatch -p low -t 10 -A vision --gres=gpu:2 --mem=64G job.sh``; the rest of the header stays."""
    environ = {"SLURM_JOB_PARTITION": "low", "SLURM_JOB_ACCOUNT": "vision", "SLURM_MEM_PER_NODE": "65536"}
    header: Options = {**HEADER, "mem-per-cpu": "4G"}
    assert requested(header, environ, record("00:10:00", "NO", "gres/gpu:2")) == {
        **{name: value for name, value in HEADER.items() if name != "gpus-per-node"},
        "partition": "low",
        "account": "vision",
        "time": "00:10:00",
        "mem": "65536",
        "gres": "gpu:2",
        "exclude": "n9",
    }


@pytest.mark.parametrize(
    ("header", "gres"),
    [
        ({"gpus-per-node": "a100:8"}, "gres:gpu:a100:8"),
        ({"gres": "gpu:8"}, "gres:gpu:8"),
        ({"gres": "nvme:1", "gpus-per-node": "8"}, "gres/gpu:8,gres/nvme:1"),
    ],
)
def test_gpus_keep_the_option_that_requested_them(header: Options, gres: str) -> None:
    """Some sites refuse ``--gres``, others ``--gpus-per-node``."""
    assert requested(header, {}, record(gres=gres)).items() >= header.items()


def test_a_time_limit_that_slurm_shortened_is_not_the_next_jobs() -> None:
    header: Options = {"time": "2-0", "time-min": "4:00:00"}
    assert requested(header, {}, record("04:00:00")).items() >= header.items()


@pytest.mark.parametrize("plugin", [True, False], ids=["chosen by the site", "of the command line"])
def test_a_partition_that_the_site_refuses_by_name_is_left_to_the_site(
    run: RunDirectory, fake_slurm: FakeSlurm, plugin: bool
) -> None:
    """A plugin routes the job, and refuses its own partitions. Elsewhere the partition is the user's."""

    def test_only(*words: str) -> str:
        if plugin and "--partition=gpu_internal" in Path(words[-1]).read_text():
            raise SlurmError("allocation failure: Unspecified error")
        return ""

    header = SCRIPT.replace("-p gpu ", "-q regular ")
    fake_slurm |= {
        "scontrol show job": record(),
        "scontrol write batch_script": header,
        "sbatch --test-only": test_only,
    }
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "gpu_internal", "SLURM_JOB_QOS": "gpu_regular"}
    job = from_values({"module": "clusterddp.digits", "nodes": 2, "constraint": "of-a-configuration-file"})
    jobs = as_allocated(job, environ)
    write_script(run, *(batch_script(each, run, Path("/me")) for each in jobs))
    script = run.batch_script.read_text()
    assert ("#SBATCH --partition=gpu_internal" in script) is not plugin
    assert f"#SBATCH --qos={'regular' if plugin else 'gpu_regular'}\n" in script
    assert {"#SBATCH --licenses=fs:2", "#SBATCH --exclusive", "#SBATCH --export=ALL"} <= {*script.splitlines()}
    assert "of-a-configuration-file" not in script


def test_an_allocation_of_salloc_has_no_header(fake_slurm: FakeSlurm) -> None:
    """What it shows is then all that is known."""
    fake_slurm |= {"scontrol show job": record(), "scontrol write batch_script": ""}
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "low"}
    shown, in_header = as_allocated(from_values({"module": "clusterddp.digits"}), environ)
    assert shown.sbatch["partition"] == "low" and shown.time_text == "0-01:00:00"
    assert "partition" not in in_header.sbatch
