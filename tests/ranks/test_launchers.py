"""The commands of docs/guide/launchers.md that start ranks on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import scrub
from tests import ddp, launchers
from tests.ddp import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = "On one machine"
SMALL = "tests/scripts/small.py"
MPIRUN = [
    *"mpirun --allow-run-as-root --oversubscribe --bind-to none".split(),
    *"--mca plm isolated --mca oob_tcp_if_include lo".split(),
]


def execute(*command: str, **variables: str) -> str:
    """What a launcher prints; it must end with 0."""
    # torch's store looks up the name of every client, and one lost answer of a DNS server would cost 5 s.
    dns = {"RES_OPTIONS": "timeout:1 attempts:1"}
    environ = {**scrub(os.environ), **dns, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_two_ranks(run: RunDirectory, *launcher: str, starts: tuple[int, ...] = (0,)) -> None:
    """Each start makes two steps, from where the one before has stopped, on both ranks."""
    for first in starts:
        output = execute(*launcher, SMALL, str(run), str(first + 2))
        assert sorted(line for line in output.splitlines() if line.startswith("rank ")) == [
            f"rank {rank} of 2, local {rank}, from step {first}" for rank in range(2)
        ]
    assert [line["step"] for line in run.metrics()] == list(range(2 * len(starts)))


@pytest.mark.parametrize("starts", [(0,), pytest.param((0, 2), marks=pytest.mark.product)])
def test_torchrun(run: RunDirectory, starts: tuple[int, ...]) -> None:
    """With a rendezvous of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    check_two_ranks(run, *launcher, starts=starts)


@pytest.mark.product  # the guide has each of these three, and is tested below
def test_the_old_launch_module_with_its_local_rank_argument(run: RunDirectory) -> None:
    """torch.distributed.launch adds ``--local-rank`` to the script's arguments."""
    port = f"--master-port={free_port()}"
    check_two_ranks(run, sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2", port)


@pytest.mark.product
def test_torch_multiprocessing_spawn(run: RunDirectory) -> None:
    """jobs/spawn.py, which is written to be copied."""
    check_two_ranks(run, sys.executable, "jobs/spawn.py", "2", starts=(0, 2))


def test_no_launcher_at_all(run: RunDirectory) -> None:
    """One process is one rank."""
    for first, last in ((0, 4), (4, 6)):
        alone = ddp.run_alone(REPOSITORY / SMALL, run, last, folder=run.path.with_name("out"))
        assert f"rank 0 of 1, local 0, from step {first}" in alone.output(0)
    assert [line["step"] for line in run.metrics()] == list(range(6))


@pytest.mark.product
def test_openmpi(run: RunDirectory) -> None:
    """mpirun, without mpi4py: only its variables are read."""
    require_mpirun()
    check_two_ranks(run, *MPIRUN, "-n", "2", sys.executable)


def require_mpirun() -> None:
    if shutil.which("mpirun") is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("mpirun not found: apt-get install openmpi-bin")


#: These have tests of their own, clusterddp in test_jobs.py; here they are part of the full product. So is spawn, whose
#: variables unit/test_environment.py has.
TESTED = ("clusterddp", "torchrun", "torch.distributed.launch", "none (one rank)", "torch.multiprocessing.spawn")
CASES = [pytest.param(*case, marks=[pytest.mark.product] * (case[0] in TESTED)) for case in launchers.cases(HERE)]


@pytest.mark.parametrize(("launcher", "job"), CASES)
def test_a_job_has_the_same_results_under_every_launcher(tmp_path: Path, launcher: str, job: str) -> None:
    """The command is that in the launcher's row."""
    command = launchers.commands(HERE)[launcher]
    port = str(free_port())
    programs = {
        "python": [sys.executable],
        "clusterddp": [sys.executable, "-m", "clusterddp"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "--master-port=PORT": [f"--master-port={port}"],
        "mpirun": MPIRUN,
    }
    if "mpirun" in command:
        require_mpirun()
    own = {"MASTER_PORT": port} if "as-torchrun" in command else {}
    said = execute(*launchers.words(command, job, tmp_path, programs), CLUSTERDDP_RUNS=str(tmp_path), **own)
    launchers.check_result(job, 1 if launcher == "none (one rank)" else 2, said)


def test_the_tables_list_all_supported_launchers() -> None:
    """A missing or malformed row would not be tested."""
    text = (REPOSITORY / "docs" / "guide" / "launchers.md").read_text()
    assert text.count(" ARGS` |") == len(launchers.commands(HERE)) + len(launchers.commands("On Slurm")) == 11
    assert {job for _, job in launchers.cases(HERE)} == set(launchers.ARGUMENTS)
