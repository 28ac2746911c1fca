"""No process of a run imports from the folder that it is started in: others may write there, as in /tmp."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.jobdef.job import Job
from clusterddp.process import module_command
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.recording import recorded
from clusterddp.slurm.batch import batch_script
from tests.waiting import story

#: What one of our processes or another imports, from the standard library, from packages, and our own package.
PLANTED = (
    *("yaml", "json", "runpy", "argparse", "signal", "socket", "threading", "tempfile", "mmap", "zlib", "secrets"),
    *("numpy", "torch", "submitit", "cloudpickle", "rich", "clusterddp"),
)
TRAIN = """
import os, sys
import torch
import beside
import clusterddp

print(sys.path[0], os.getcwd())
ctx = clusterddp.init()
run = ctx.run(model=torch.nn.Linear(1, 1), loader=ctx.loader(torch.ones(8, 1), batch_size=1))
for _ in run.steps(2):
    pass
"""
LAUNCHING = """
import clusterddp

def rank():
    import os
    return os.environ["RANK"]

print(clusterddp.launch(rank, local=True, device="cpu", run_dir={run!r}).result())
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with another user's modules, of which each leaves its name when it is executed."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in PLANTED:
        seen = str(tmp_path / "seen")
        (folder / f"{name}.py").write_text(f"open({seen!r}, 'a').write({name!r} + ' ')\nraise ImportError('planted')\n")
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    own = tmp_path / "own"
    own.mkdir()
    return own


def start(shared: Path, *command: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        list(map(str, command)), cwd=shared, env=environment, capture_output=True, text=True, timeout=120
    )
    seen = shared.with_name("seen")
    assert not seen.exists(), f"imported: {seen.read_text()}\n{done.stderr}"
    return done


def test_loop_supervisor_rank_and_writer_import_nothing_from_the_folder_they_are_started_in(
    shared: Path, own: Path
) -> None:
    """A local run with a checkpoint. The script's own folder comes first on its path, and it runs where it was told."""
    (own / "train.py").write_text(TRAIN)
    (own / "beside.py").touch()
    run = RunDirectory(own / "run")
    words = ("submit", own / "train.py", "--local", "--device", "cpu", "--run-dir", run)
    done = start(shared, *module_command("clusterddp"), *words)
    assert done.returncode == 0, done.stderr + story(run)
    assert (run.attempt_logs(0) / "rank-0.out").read_text() == f"{own} {shared}\n"
    assert [path.name[:17] for path in run.checkpoints.iterdir()] == ["step-000000000002"]


def test_a_function_is_called_by_processes_that_import_nothing_from_there(shared: Path, own: Path) -> None:
    """Nor does the process that is left behind to run it."""
    run = RunDirectory(own / "run")
    (own / "launching.py").write_text(LAUNCHING.format(run=str(run)))
    done = start(shared, sys.executable, own / "launching.py")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr + story(run)


def test_the_batch_script_starts_a_supervisor_that_imports_nothing_from_there(shared: Path, own: Path) -> None:
    """It runs until it reads Slurm's variables."""
    run, job = RunDirectory(own / "run"), Job(name="net", module="net", device="cpu")
    with recorded(run, job, created=True):
        run.batch_script.write_text(batch_script(job, run, shared))
    done = start(shared, "bash", run.batch_script)
    assert (done.returncode, "SLURM_JOB_ID is not set" in done.stderr) == (1, True), done.stderr


def test_a_module_is_found_in_the_folder_of_the_submission(own: Path) -> None:
    """As by `python -m`."""
    (own / "net.py").write_text("import beside\nprint(__name__)\n")
    (own / "beside.py").touch()
    run = RunDirectory(own / "run")
    words = ("submit", "-m", "net", "--local", "--device", "cpu", "--run-dir", run)
    done = start(own, *module_command("clusterddp"), *words)
    assert (done.returncode, (run.attempt_logs(0) / "rank-0.out").read_text()) == (0, "__main__\n"), done.stderr
