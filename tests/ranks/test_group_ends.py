"""Gloo's threads end before the interpreter does: one that frees its work after that aborts the process.

On a busy machine that was one process in twenty; whether a thread is left can be seen in each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.slurm.commands import scrub
from tests.ddp import REPOSITORY, free_port

SHOWING_THREADS = """
import atexit, pathlib, runpy, sys, torch.distributed as dist

def show(when):
    print(when, {path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")})

def destroy_process_group(destroy=dist.destroy_process_group):
    destroy()
    show("destroyed:")

dist.destroy_process_group = destroy_process_group
atexit.register(show, "at the end:")  # first, and so called last
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WRAPPED = """
import torch, clusterddp
{begin}
    model = ctx.wrap(torch.nn.Linear(4, 1))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
"""


def shown(*script: str) -> dict[str, str]:
    """Its threads, by when it had them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "CLUSTERDDP_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHOWING_THREADS, *script],
        cwd=REPOSITORY,
        env={**scrub(os.environ), **place, **one},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": {" in line)


@pytest.mark.parametrize(
    "begin",
    ["ctx = clusterddp.init()\nif True:", pytest.param("with clusterddp.init() as ctx:", marks=pytest.mark.product)],
)
def test_a_model_that_the_script_keeps_does_not_keep_the_group(tmp_path: Path, begin: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRAPPED.format(begin=begin))
    assert "gloo" not in shown(str(script))["at the end"]


@pytest.mark.parametrize("job", ["checkpoint", pytest.param("model_parallel", marks=pytest.mark.product)])
def test_a_plain_job_ends_its_group_itself(tmp_path: Path, job: str) -> None:
    arguments = ["--folder", str(tmp_path)] if job == "checkpoint" else []
    assert "gloo" not in shown(f"jobs/{job}.py", "--steps", "2", *arguments)["destroyed"]
