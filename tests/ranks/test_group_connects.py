"""Ranks that connect long before or after the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cli import clusterddp

SCRIPT = """
import os, time
import torch.distributed as dist
import clusterddp
from clusterddp.distributed import process_group

init, destroy, rank = dist.init_process_group, dist.destroy_process_group, int(os.environ["RANK"])

def connect(*values, **options):
    init(*values, **options)
    if rank == 0:
        time.sleep(1)
        options["store"].set("rank 0 has connected", "")

def close():
    if rank == 1:
        print("rank 0 has connected:", store.check(["rank 0 has connected"]))
    destroy()

process_group.dist.init_process_group, process_group.dist.destroy_process_group = connect, close
with clusterddp.init(device="cpu") as ctx:
    store = process_group.PrefixStore("group", ctx._group.store)
"""


def test_a_rank_keeps_its_connections_until_all_ranks_have_connected(tmp_path: Path) -> None:
    """gloo fails on a rank that still connects when another one closes its connections."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert "rank 0 has connected: True" in ddp.run(script, ranks=2, folder=tmp_path / "out").output(1)


EARLY = """
import os, sys, time
from pathlib import Path
import clusterddp
from clusterddp.distributed import process_group as store_module
from clusterddp.worker.rank_process import RankProcess

rank, (here, is_open), Store = int(os.environ["RANK"]), map(Path, sys.argv[1:]), store_module.TCPStore

def store(*values, is_master, **options):
    if is_master:
        while not here.exists():
            time.sleep(0.01)
        made = Store(*values, is_master=is_master, **options)
        is_open.touch()
        return made
    print("connects to an open store:", is_open.exists(), flush=True)
    return Store(*values, is_master=is_master, **options)

def await_store(process, seconds):
    here.touch()
    return wait(process, seconds)

store_module.TCPStore, wait, RankProcess.await_store = store, RankProcess.await_store, await_store
with clusterddp.init():
    pass
"""


@pytest.mark.product  # only how fast a run starts depends on it
def test_a_rank_that_comes_first_connects_once_rank_0s_store_is_open(tmp_path: Path) -> None:
    """torch would try at once and retry with backoff, which may last longer than rank 0 needs."""
    script, run = tmp_path / "early.py", RunDirectory(tmp_path / "run")
    script.write_text(EARLY)
    shape = ["--local", "--device", "cpu", "--gpus", 2, "--run-dir", run]
    clusterddp("submit", *shape, script, "--", tmp_path / "here", tmp_path / "open")
    said = (run.attempt_logs(0) / "rank-1.out").read_text()
    assert said.splitlines() == ["connects to an open store: True"] * 2  # its two connections
