"""A rank whose script ends at once, while another one still connects."""

from __future__ import annotations

from pathlib import Path

from tests import ddp

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
