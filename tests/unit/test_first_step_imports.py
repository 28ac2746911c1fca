"""What a rank has imported at its first step: each module takes time in each rank, more so from a shared file system.

What the first step does not need is imported where it is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Other packages that ours import in addition to torch's own.
PACKAGES = {"yaml", "_yaml", "cloudpickle"}
#: What only some runs need, or other processes.
LATER = {
    "clusterddp.checks",
    "clusterddp.checkpoint.weights_file",
    "clusterddp.checkpoint.writer",
    "clusterddp.cli",
    "clusterddp.failures.exclusion",
    "clusterddp.failures.exit_status",
    "clusterddp.failures.hangs",
    "clusterddp.failures.node_memory",
    "clusterddp.failures.placement",
    "clusterddp.report",
    "clusterddp.slurm",
    "clusterddp.supervisor",
    "clusterddp.runs",
    "clusterddp.training.preflight",
    "clusterddp.training.script_objects",
    "rich",
    "submitit",
}
SCRIPT = """
import json, sys
import torch, torch._dynamo, torch.distributed, torch.utils.data
from torch.nn.parallel import DistributedDataParallel
before = set(sys.modules)
import clusterddp, clusterddp.worker.rank
ctx = clusterddp.init(run_dir=sys.argv[1], device="cpu")
model = ctx.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
for (batch,) in ctx.run(model=model, optimizer=optimizer, loader=loader).steps(1):
    model(batch).sum().backward()
    optimizer.step()
    print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The modules, in a rank that saves, in addition to what torch imports for DDP and an optimizer."""
    folder = tmp_path_factory.mktemp("imports")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "run")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[0])
    return found


def test_a_rank_has_imported_no_other_package_for_clusterddp(imported: list[str]) -> None:
    found = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert {name for name in found if not name.startswith("_cython")} - {"torch", "numpy", "clusterddp"} <= PACKAGES


def test_what_only_some_runs_need_is_not_imported(imported: list[str]) -> None:
    assert not {name for name in imported if name in LATER or any(name.startswith(f"{one}.") for one in LATER)}


def test_a_rank_starts_without_the_classes_of_all_events() -> None:
    """They take as long to import as half of the rest, in each rank, before its script begins."""
    code = "import sys, clusterddp.worker.rank; print('clusterddp.history.view' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
