"""Common errors of DDP scripts: each message of the guide's table is caused here by the mistake beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import IterableDataset

from clusterddp import environment
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Shuffled
from clusterddp.distributed.devices import choose_devices
from clusterddp.distributed.process_group import choose_backend
from tests import ddp
from tests.cli import clusterddp

PAGE = (ddp.REPOSITORY / "docs" / "guide" / "debugging.md").read_text()
TEXT = PAGE[PAGE.index("## Common mistakes") :].partition("\n## ")[0]
TABLE = re.findall(r"^\| `([^`]+)`", TEXT, re.MULTILINE)


def submitted(folder: Path, body: str, *options: str) -> str:
    """The output of a script under ``submit --local``, and of a submission that fails."""
    (folder / "script.py").write_text(body)
    environ = {"PYTHONPATH": str(ddp.REPOSITORY)}
    words = ["submit", "script.py", "--local", "--run-dir", "run", *options]
    done = clusterddp(*words, cwd=folder, env=environ, code=None)
    assert done.returncode != 0, done.stderr
    return done.stderr + "".join(log.read_text() for log in (folder / "run" / "logs").rglob("rank-*.err"))


def started(folder: Path, body: str, ranks: int = 2, **variables: Any) -> str:
    """The output of ranks that fail."""
    (folder / "script.py").write_text(body)
    return ddp.start(folder / "script.py", ranks=ranks, folder=folder / "out", **variables).expect(1).text()


TORN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
path = os.environ["CLUSTERDDP_RUN_DIR"] + "/checkpoint.pt"
if os.environ["LOCAL_RANK"] == "0":  # on each node
    if dist.get_rank() == 0:
        torch.save({"weights": torch.zeros(1000)}, path)
    dist.barrier()
    if dist.get_rank() == 1:  # in the middle of its own save
        whole = open(path, "rb").read()
        with open(path, "wb") as file:
            file.write(whole[:2000])
    dist.barrier()
    torch.load(path)
"""


def saved_on_every_node(folder: Path) -> str:
    return submitted(folder, TORN, "--device", "cpu", "--nodes", "2", "--gpus", "1")


def cuda_without_gpus(folder: Path) -> str:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    return submitted(folder, "import clusterddp; clusterddp.init()")


def more_ranks_than_gpus(folder: Path) -> str:
    return refusal(
        lambda: choose_devices(environment.RankEnvironment(0, 0, 8, 8, 0, (), None, None, "slurm"), "cuda", 1, 4, "n1")
    )


SHARED = """
import os, clusterddp
from clusterddp.distributed.process_group import claim_gpu
ctx = clusterddp.init(device="cpu")
try:  # init() itself asks with NCCL alone, which needs a GPU
    claim_gpu(ctx._group.store, ctx.rank, "GPU-0", False, "n1")
except clusterddp.errors.DeviceError as error:
    print(error, flush=True)
ctx.all_reduce_sum(1.0)  # both have asked
os._exit(1)
"""


def one_gpu_for_two_ranks(folder: Path) -> str:
    return started(folder, SHARED)


def a_store_of_another_run(folder: Path) -> str:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("clusterddp/owner", "another run")
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(store.port)}
    return started(folder, "import clusterddp; clusterddp.init(device='cpu')", ranks=1, **place)


def a_job_script_without_srun(folder: Path) -> str:
    return refusal(lambda: environment.read({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}))


ALONE = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.new_group(timeout=datetime.timedelta(seconds=2))
if dist.get_rank() == 0:
    dist.all_reduce(torch.zeros(1), group=group)
dist.barrier()
"""


def a_collective_on_one_rank_only(folder: Path) -> str:
    return started(folder, ALONE)


def data_without_an_index(folder: Path) -> str:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(9))

    options = {"order": Shuffled(), "seed": 0, "rank": 0, "world_size": 1, "global_batch": None}
    return refusal(lambda: Loader(Stream(), 1, **options))  # type: ignore[arg-type]


def the_same_run_with_other_arguments(folder: Path) -> str:
    begun = 'import os; open(os.environ["CLUSTERDDP_RUN_DIR"] + "/model.pt", "w"); raise SystemExit(1)'
    submitted(folder, begun, "--device", "cpu", "--", "--lr", "0.1")
    return submitted(folder, "", "--device", "cpu", "--", "--lr", "0.2")


def weights_of_the_wrapper(folder: Path) -> str:
    saved = {f"module.{name}": value for name, value in torch.nn.Linear(1, 1).state_dict().items()}
    return refusal(lambda: torch.nn.Linear(1, 1).load_state_dict(saved))


def a_breakpoint_without_a_terminal(folder: Path) -> str:
    return submitted(folder, "breakpoint()\nprint('next')", "--device", "cpu")


def a_backend_that_torch_lacks(folder: Path) -> str:
    return refusal(lambda: choose_backend("mpi", torch.device("cpu")))


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        act()
    return str(caught.value)


#: In the order of the table.
MISTAKES = [
    cuda_without_gpus, more_ranks_than_gpus, one_gpu_for_two_ranks, a_collective_on_one_rank_only, saved_on_every_node,
    weights_of_the_wrapper, a_store_of_another_run, a_job_script_without_srun, data_without_an_index,
    the_same_run_with_other_arguments, a_breakpoint_without_a_terminal, a_backend_that_torch_lacks,
]  # fmt: skip


def test_every_row_has_a_message_and_a_mistake_that_causes_it() -> None:
    assert len([row for row in TEXT.splitlines() if row.startswith("|")]) - 2 == len(TABLE) == len(MISTAKES)


@pytest.mark.parametrize(("message", "mistake"), list(zip(TABLE, MISTAKES, strict=True)))
def test_the_mistake_is_answered_with_the_message(message: str, mistake: Callable[[Path], str], tmp_path: Path) -> None:
    assert message in mistake(tmp_path)
