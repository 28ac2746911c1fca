"""What saving and loading a sharded model costs: ``python -m benchmarks.sharded``, at most 8 minutes; ``--quick``, 3.

A model of 1,000 weights that ``fully_shard`` has sharded over 4 gloo ranks of this host, and its Adam: 3,000 sharded
tensors and 1,000 counters, 2 GB, or as much of it as memory allows. In turns, in the same processes, on a local disk:

- Stall: from the call of the saver to its return, on the slowest rank. The limit is what no saver can do without: the
  same state_dict() calls, and a copy of the rank's shards within memory. The other savers are ``dcp.save``, and
  ``dcp.async_save`` in a thread and in a process.
- Until durable: until the saver is done. ``dcp.save`` syncs its files, too.
- Load: from when all ranks are there until all have loaded. clusterddp: ``restore_sharded``, which verifies all
  bytes, then ``load_state`` of both into an optimizer without state. torch: ``dcp.load`` into the tensors of a model
  and an optimizer that has its state, then ``load_state_dict`` of the optimizer, for its groups. The files are in the
  page cache.
- Memory: by how much the peak of a rank grows with its first saves, and in a load into an optimizer without state, by
  the size of its shards.

Bars: the stall at most 1.15 times the limit, or 0.5 ms above it; the load at most 1.0 times dcp.load; memory of at most
1.2 times the shards.
"""

from __future__ import annotations

import gc
import itertools
import logging
import resource
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import common, sides
from benchmarks.savers import CALLS_AND_COPY, OURS, AsyncProcess, AsyncThread, Saver, state_of, take_step, tensors_of
from benchmarks.saves import STALL_BAR, STALL_MORE_MS, reset_peak
from clusterddp.checkpoint.host_memory import free_memory
from clusterddp.checkpoint.sharded.client import ShardClient
from clusterddp.checkpoint.sharded.restore import restore_sharded
from clusterddp.checkpoint.sharded.sharding import Sharding, local
from clusterddp.checkpoint.state_dict import load_state
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory
from tests.markdown import table

RANKS, WEIGHTS, BYTES, QUICK_BYTES = 4, 1000, 2_000_000_000, 500_000_000
#: Memory that this takes, in states: training, our snapshot, the copy, the stagers of torch, and files in the cache.
STATES = 7
LOAD_BAR, MEMORY_BAR = 1.0, 1.2
DCP_LOAD = "dcp.load"
TEXT = """# A sharded model beside torch.distributed.checkpoint

4 gloo ranks on one host save and load 3,000 sharded tensors, in turns with torch. The limit of a stall is the calls of
`state_dict()` and a copy of the rank's shards within memory."""


# ---- one of the ranks


def make_training(size: int) -> tuple[torch.nn.Module, torch.optim.Adam]:
    """A sharded model and its optimizer, whose state is about ``size`` bytes on all ranks together."""
    width = round((size / 12 / WEIGHTS) ** 0.5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(WEIGHTS)]
    blocks = [torch.nn.Sequential(*layers[at : at + 10]) for at in range(0, WEIGHTS, 10)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    model = torch.nn.Sequential(*blocks)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.uniform_(local(parameter))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    take_step(model, optimizer)
    return model, optimizer


class CopyOfShards(Saver):
    name = CALLS_AND_COPY

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        sources = list(map(local, tensors_of(self._state())))
        self.flat = torch.empty(sum(tensor.nbytes for tensor in sources), dtype=torch.uint8).fill_(1)
        parts = torch.split(self.flat, [tensor.nbytes for tensor in sources])
        self._copies = [part.view(t.dtype).view(t.shape) for part, t in zip(parts, sources, strict=True)]

    def begin(self) -> None:
        torch._foreach_copy_(self._copies, list(map(local, tensors_of(self._state()))))


class Ours(Saver):
    name = OURS

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        self.directory = RunDirectory(self.folder)
        if dist.get_rank() == 0:
            self.directory.create()
            self.directory.metrics_file.touch()
            Checkpoints(self.directory, self.directory.create_attempt(), Keep()).record_resume(None)
        dist.barrier()
        self.client = ShardClient(self.directory, 0, Keep(last=1), group(), lambda *_: None)
        self.client.prepare(self._state())

    def next_path(self, step: int) -> None:
        self._step = step

    def begin(self) -> None:
        self.client.save(self._step, self._state(), {}, self.urgent)

    def end(self) -> None:
        self.client.result(wait=True)

    def close(self) -> None:
        self.client.close()
        self.client.free()


class Together(Saver):
    """Rank 0 removes the old folders, and all use the same path."""

    def next_path(self, step: int) -> None:
        if dist.get_rank() == 0:
            for old in set(self.folder.iterdir()) - {self.path}:
                shutil.rmtree(old)
        self.path = self.folder / str(step)


class DcpSave(Together):
    name = "dcp.save"

    def begin(self) -> None:
        dcp.save(self._state(), checkpoint_id=self.path)  # type: ignore[attr-defined]


class DcpThread(Together, AsyncThread):
    name = "dcp.async_save, thread"


class DcpProcess(Together, AsyncProcess):
    name = "dcp.async_save, process"


def group() -> Any:
    """What a save and a restore need of a ProcessGroup."""
    device, store = torch.device("cpu"), dist.distributed_c10d._get_default_store()
    own = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return SimpleNamespace(**own, device=device, control_device=device, store=store)


def slowest(seconds: float) -> float:
    """The longest time of all ranks. Collective."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def in_process(size: int, quick: bool, folder: str, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """All figures. Collective."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    torch.set_num_threads(1)
    sides.join(rank, ranks, port)
    logging.getLogger().setLevel(logging.WARNING)  # of async_save, which logs each step
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
    model, optimizer = make_training(size)
    shard = sum(local(tensor).nbytes for tensor in tensors_of(state_of(model, optimizer)))
    kinds: list[type[Saver]] = [CopyOfShards, DcpSave, *([] if quick else [DcpThread, DcpProcess])]
    step, before = itertools.count(1), reset_peak()
    savers: dict[str, Saver] = {OURS: Ours(Path(folder), model, optimizer)}
    for _ in range(2):
        save(savers[OURS], step)
    figures: dict[str, Any] = {"bytes": shard * ranks, "shard": shard, "growth": {}}
    figures["growth"]["save"] = slowest(sides.memory("self", "VmHWM") - before)
    savers |= {kind.name: kind(Path(folder), model, optimizer) for kind in kinds}
    turns = {name: partial(save, saver, step) for name, saver in savers.items()}
    figures["save"] = sides.in_turns({name: turns[name] for name in (OURS, CALLS_AND_COPY)}, 7 if quick else 15)
    figures["save"] |= sides.in_turns({name: turn for name, turn in turns.items() if name not in figures["save"]}, 2)
    ours, torch_folder = savers[OURS], savers["dcp.save"].path
    assert isinstance(ours, Ours)
    for saver in savers.values():
        saver.close()
    directory = ours.directory
    del ours, savers
    gc.collect()
    loads = {OURS: partial(load_ours, directory, model), DCP_LOAD: partial(load_dcp, torch_folder, model, optimizer)}
    figures["load"] = sides.in_turns(loads, 3 if quick else 5)
    loads.clear()
    del optimizer
    gc.collect()
    before = reset_peak()
    load_ours(directory, model)
    figures["growth"]["load"] = slowest(sides.memory("self", "VmHWM") - before)
    dist.destroy_process_group()
    return figures


def save(saver: Saver, step: itertools.count[int]) -> tuple[float, float]:
    """The stall of a save, and the seconds until it is done. Collective."""
    saver.next_path(next(step))
    saver.urgent = False
    dist.barrier()
    started = time.perf_counter()
    saver.begin()
    stall = time.perf_counter() - started
    saver.end()
    return slowest(stall), slowest(time.perf_counter() - started)


def load_ours(directory: RunDirectory, model: torch.nn.Module) -> tuple[float, float]:
    """Seconds until the state is read, and until it is loaded. Collective."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    checkpoints = Checkpoints(directory, 0, Keep()) if dist.get_rank() == 0 else None
    sharding = Sharding.of({"model": model}, dist.get_world_size())
    assert sharding is not None
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    found = restore_sharded(checkpoints, sharding, group(), lambda *_: None)
    assert found is not None
    read = time.perf_counter() - started
    load_state(model, found[0]["model"])
    load_state(optimizer, found[0]["optimizer"])
    return slowest(read), slowest(time.perf_counter() - started)


def load_dcp(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """The same."""
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    read = time.perf_counter() - started
    optimizer.load_state_dict(state["optimizer"])
    return slowest(read), slowest(time.perf_counter() - started)


# ---- around them


def measure(quick: bool) -> common.Found:
    size = QUICK_BYTES if quick else int(min(BYTES, free_memory() / STATES))
    common.say(f"{size / 1e9:.2g} GB in {RANKS} ranks")
    with tempfile.TemporaryDirectory() as folder:
        request = {"size": size, "quick": quick, "folder": folder}
        figures = sides.run_ranks("benchmarks.sharded", request, RANKS, MALLOC_MMAP_THRESHOLD_="131072")
    where = f"{figures['bytes'] / 1e9:.2g} GB in {RANKS} ranks"
    return common.Found({"figures": figures}, rows_of(figures), where, {"Savers": savers_table(figures["save"])})


def rows_of(figures: dict[str, Any]) -> list[common.Row]:
    """What is judged."""
    stall, load = figures["save"], figures["load"]
    ours, limit = (sides.milliseconds([one for one, _ in stall[name]]) for name in (OURS, CALLS_AND_COPY))
    relative = common.median(limit) * (STALL_BAR - 1) > STALL_MORE_MS
    bar = {"allowed": STALL_BAR} if relative else {"more": STALL_MORE_MS}
    rows = [common.paired("sharded save: stall", "ms", ours, limit, CALLS_AND_COPY, **bar)]
    for place, words in enumerate(("read", "read and loaded")):
        seconds, of_torch = ([one[place] for one in load[name]] for name in (OURS, DCP_LOAD))
        rows.append(common.paired(f"sharded load: {words}", "s", seconds, of_torch, DCP_LOAD, allowed=LOAD_BAR))
    for what, grown in figures["growth"].items():
        row, megabytes = f"sharded {what}: growth of a rank's peak", (grown / 1e6, figures["shard"] / 1e6)
        rows.append(common.counted(row, "MB", *megabytes, "its shards", allowed=MEMORY_BAR))
    return rows


def savers_table(savers: dict[str, list[list[float]]]) -> str:
    """Medians in milliseconds."""
    rows = [
        [name, *(common.median(sides.milliseconds(series)) for series in zip(*times, strict=True))]
        for name, times in savers.items()
    ]
    return table(["saver", "stall, ms", "until it is done, ms"], rows)


if __name__ == "__main__":
    if not sides.answered(in_process):
        common.main("sharded", __doc__, TEXT, measure, "at most 3 minutes: 0.5 GB, without async_save")
