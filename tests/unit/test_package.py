"""Ranks with another interpreter than the submission's, such as that of an image."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef.job import Job
from clusterddp.rundir.package import write_package
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.launcher import rank_command, srun_command, with_python

IMAGE: dict[str, str | bool] = {"container-image": "train.sqsh"}


def test_any_python_imports_clusterddp_from_the_run_directory(run: RunDirectory, tmp_path: Path) -> None:
    """Without site-packages. The shim of a rank needs the standard library alone, and job definitions are YAML."""
    write_package(run)
    code = "import clusterddp.worker.rank, clusterddp.jobdef.load, yaml; print(clusterddp.__file__, yaml.__file__)"
    environ = {"PYTHONPATH": str(run.package_file)}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.count(f"{run.package_file}/") == 2


@pytest.mark.parametrize(
    ("job", "python"),
    [
        (Job("x", script="/x.py"), sys.executable),
        (Job("x", script="/x.py", python="/env/bin/python"), "/env/bin/python"),
        (Job("x", script="/x.py", srun=IMAGE), "python3"),
        (Job("x", script="/x.py", srun={"environment": "pytorch"}), "python3"),
        (Job("x", script="/x.py", srun={"environment": "pytorch"}, python="python"), "python"),
        (Job("x", script="/x.py", srun={"container-image": False}), sys.executable),
    ],
)
def test_in_an_image_nothing_of_the_hosts_interpreter_is_assumed(job: Job, python: str) -> None:
    """The package comes from the run directory, too."""
    command = rank_command(job, False, Path("/run/package.zip"))
    assert command[0] == python
    assert ("/run/package.zip" in command[3]) is (python != sys.executable)


def test_variables_of_the_job_definition_take_precedence_over_those_of_a_pyxis_image(tmp_path: Path) -> None:
    """By their names, in addition to those that the user gives."""
    job = Job("x", script="/x.py", env={"LR": "1", "TOKEN": "2"}, srun=IMAGE | {"container-env": "PATH,LR"})
    assert "--container-env=PATH,LR,TOKEN" in srun_command(job, tmp_path)
    assert "--container-env=" not in " ".join(srun_command(Job("x", script="/x.py", env=job.env), tmp_path))
    assert "--container-env=" not in " ".join(srun_command(Job("x", script="/x.py", srun=IMAGE), tmp_path))


def test_a_variable_in_python_is_that_of_the_node() -> None:
    """One that is not set is an error, rather than a path from the root folder."""
    job, environ = Job("x", script="/x.py", python="${BASE}/$NAME/bin/python"), {"BASE": "/tmp", "NAME": "env"}
    assert with_python(job, environ).python == "/tmp/env/bin/python"
    with pytest.raises(JobDefinitionError, match="NAME is not set"):
        with_python(job, {"BASE": "/tmp"})
