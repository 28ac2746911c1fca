"""A script that makes its own process group, as nearly all public training repositories do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.distributed.process_group import ProcessGroup
from tests import ddp

SCRIPT = """
import random, sys, torch, clusterddp
import torch.distributed as dist
from tests.stops import request_stop
from datetime import timedelta
from torch.distributed import init_process_group  # before clusterddp.init(), as most scripts
first = sys.argv[1] == "first"
random.seed(7)
torch.manual_seed(7)
if first:
    init_process_group("gloo", timeout=timedelta(seconds=77))
ctx = clusterddp.init()
assert dist.is_initialized()  # also for a library that looks
if not first:
    of_init = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    del of_init
    init_process_group("gloo", timeout=timedelta(seconds=77))
own = dist.group.WORLD
assert random.getstate() == random.Random(7).getstate()  # nothing was seeded
assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())
assert ctx.all_reduce_sum(ctx.rank) == 1
ctx._group.shorten_timeout(1.0)
assert own._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
try:
    dist.init_process_group("gloo")
except ValueError as error:
    print("torch:", error, flush=True)
for step in range(10_000):
    dist.all_reduce(torch.ones(1))
    if step == 3 and ctx.rank == 1:
        request_stop(ctx)
    if clusterddp.stop_requested():
        print("stopped at", step, flush=True)
        break
assert dist.group.WORLD is own
ctx._close(clean=True, restore_handlers=True)
assert dist.group.WORLD is own  # the script destroys what it has made
del own
dist.destroy_process_group()
"""


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_script_makes_its_own_group_before_or_after_init(when: str, tmp_path: Path) -> None:
    """It is used as it is, is not closed, and nothing is seeded; all ranks still stop after the same step."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ranks = ddp.run(script, when, ranks=2, folder=tmp_path / "out")
    stops = {line for rank in (0, 1) for line in ranks.output(rank).splitlines() if line.startswith("stopped at")}
    assert len(stops) == 1, ranks.text()
    # Only once: a script that makes two groups itself gets an error.
    assert ranks.text().count("torch: trying to initialize the default process group twice!") == 2


SEEDED = """
import random, torch, clusterddp
import torch.distributed as dist
ctx = clusterddp.init()
torch.manual_seed(5)
dist.init_process_group("gloo")
assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())
dist.destroy_process_group()
"""


def test_a_seed_that_the_script_sets_between_init_and_its_group_stays(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SEEDED)
    ddp.run(script, ranks=1, folder=tmp_path / "out")


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("nccl", "cuda"),
        ("cuda:nccl", "cuda"),
    ],
)
def test_values_of_the_run_travel_over_a_backend_that_the_group_has(backend: str, device: str) -> None:
    """A script's own group often has NCCL alone."""
    group = object.__new__(ProcessGroup)
    group.device, group.backend = torch.device("cuda", 0), backend
    assert group.control_device.type == device
