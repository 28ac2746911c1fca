"""What a checkpoint costs: ``python -m benchmarks.checkpoint`` (``make bench-checkpoint``), about 12 minutes.

A model of 20 layers and its Adam state (160 tensors) of three sizes, saved by this project, torch.save + fsync,
torch's async_save (by a thread; by a process with shared staging), Lightning and accelerate, and next to them the
limit: as many bytes written and synced. ``benchmarks.saves`` has what training loses beside them.

- Until durable: training waits from the call on until the file is durable, and in our case read back and verified.
  Lightning and accelerate sync nothing: their files are synced afterwards for them, which this counts. All take turns
  in the same processes, and the first round of each is left out: a disk may take several times as long for blocks never
  written before. Everybody keeps the last file until the next one is there, so that all come by such blocks alike.
- The restore is measured in 1, 4 and 8 gloo ranks, the file out of the page cache, from when all ranks are there until
  all have the state. Bytes read are rchar in /proc/self/io of all ranks (files read through a mapping are not in it),
  by the size of the checkpoint.

Bars: until durable at most 1.5 times the raw write; bytes read 1.0 times the file; the trainer's peak memory grows by
at most 2.2 times the state.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import report, rows, sides
from benchmarks.savers import (
    OURS,
    RAW,
    SAVERS,
    Accelerate,
    AsyncProcess,
    Copy,
    Lightning,
    Ours,
    Raw,
    Saver,
    TorchSave,
    make_training,
    milliseconds,
    state_of,
    tensors_of,
)
from clusterddp.checkpoint.memory_blocks import free_memory
from clusterddp.checkpoint.restore import restore
from clusterddp.checkpoint.store import Checkpoint, Checkpoints
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory

DURABLE_BAR, READ_BAR, MEMORY_BAR = 1.5, 1.01, 2.2
#: READ_BAR: once the file, and what a rank reads of /proc and of sockets.
#: Memory that the savers of a state take, in states.
STATES = 10


@dataclass(frozen=True)
class Size:
    """A state of about so many bytes, and how often it is measured."""

    name: str
    bytes: int
    starts: int
    rounds: int
    restores: int


SIZES = [
    Size("10 MB", 10_000_000, starts=3, rounds=7, restores=5),
    Size("400 MB", 400_000_000, starts=3, rounds=4, restores=3),
    Size("2 GB", 2_000_000_000, starts=2, rounds=3, restores=1),
]
RANKS = [1, 4, 8]


# ---- one process that saves


def measure_saves(size: Size, folder: str, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """All savers in turn, ``size.rounds`` times; seconds until durable, by saver."""
    sides.join(rank, ranks, port)
    model, optimizer = make_training(size.bytes)
    savers: list[Saver] = [make(Path(folder), model, optimizer) for make in SAVERS if not issubclass(make, Copy)]
    savers.append(Raw(Path(folder), Copy(Path(folder), model, optimizer).flat))
    figures: dict[str, list[float]] = {saver.name: [] for saver in savers}
    for number in range(-1, size.rounds):
        for saver in sides.rotated(savers, number):
            saver.next_path(number + 1)
            figures[saver.name] += [paused(saver)] if number >= 0 else []
        report.say(f"{size.name}: round {number + 1} of {size.rounds}")
    for saver in savers:
        saver.close()
    dist.destroy_process_group()
    return {"durable": figures, "files": {saver.name: str(saver.path) for saver in savers}}


def paused(saver: Saver) -> float:
    """The seconds until a save is durable while training waits for it."""
    saver.urgent = True
    started = time.perf_counter()
    saver.begin()
    saver.end()
    return time.perf_counter() - started


def measure_memory(size: Size, folder: str, **_: int) -> dict[str, Any]:
    """By how much the trainer's peak memory grows by three saves, and what the writer has, in bytes."""
    model, optimizer = make_training(size.bytes)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("self", "VmHWM")
    saver = Ours(Path(folder), model, optimizer)
    for step in range(3):
        saver.next_path(step)
        paused(saver)
    grown = memory("self", "VmHWM") - before
    writer = {field: memory(saver.writer, field) for field in ("VmHWM", "RssAnon")}
    state_bytes = sum(tensor.nbytes for tensor in tensors_of(state_of(model, optimizer)))
    saver.close()
    return {"trainer_growth": grown, "writer": writer, "state_bytes": state_bytes}


def memory(process: int | str, field: str) -> int:
    """A field of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# ---- ranks that restore


def measure_restores(size: Size, files: Mapping[str, str], rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Seconds, and bytes read by the checkpoint's, of each kind of restore. Collective."""
    sides.join(rank, ranks, port)
    names = [OURS, TorchSave.name, AsyncProcess.name, Lightning.name, Accelerate.name]
    figures: dict[str, Any] = {name: {"seconds": [], "read": []} for name in names}
    for _ in range(size.restores):
        for name in names:
            path = Path(files[name])
            now = restore_of(name, path, size, rank)
            if rank == 0:
                sides.drop_from_cache(path)
            gc.collect()
            dist.barrier()
            read_before, started = sides.bytes_read(), time.perf_counter()
            now()
            read = sides.bytes_read() - read_before
            dist.barrier()
            seconds = time.perf_counter() - started
            total = torch.tensor([read])
            dist.all_reduce(total)
            figures[name]["seconds"].append(seconds)
            figures[name]["read"].append(int(total) / size_of(path))
            del now
    dist.destroy_process_group()
    return figures


def restore_of(name: str, path: Path, size: Size, rank: int) -> Callable[[], object]:
    """What a rank does to have a saver's checkpoint; async_save's and accelerate's goes into the model at once."""
    if name == OURS:
        checkpoints = Checkpoints(RunDirectory(path.parents[1]), 1, Keep()) if rank == 0 else None
        return lambda: restore(checkpoints, torch.device("cpu"), damaged)
    if name == TorchSave.name:
        return lambda: torch.load(path, weights_only=True)
    if name == AsyncProcess.name:
        state = state_of(*make_training(size.bytes))
        return lambda: dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    if name == Lightning.name:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

        return lambda: TorchCheckpointIO().load_checkpoint(path, weights_only=True)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    accelerator.prepare(*make_training(size.bytes))
    return lambda: accelerator.load_state(str(path))


def damaged(checkpoint: Checkpoint, reason: str) -> None:
    sys.exit(f"{checkpoint.path} is damaged: {reason}")


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in sides.files_of(path))


# ---- around them


def call(name: str, size: Size, ranks: int = 1, **arguments: Any) -> Any:
    """What a ``measure_`` function returns in processes of its own; rank 0's answer."""
    request = {"name": name, "size": vars(size), **arguments}
    return sides.run_ranks("benchmarks.checkpoint", request, ranks, ACCELERATE_USE_CPU="true")


def measured(name: str, size: dict[str, Any], **request: Any) -> Any:
    """What one of those processes does."""
    measures: dict[str, Callable[..., Any]] = {"saves": measure_saves, "memory": measure_memory}
    return measures.get(name, measure_restores)(Size(**size), **request)


def measure(size: Size, scratch: Path, ranks: Sequence[int]) -> dict[str, Any]:
    """All figures of one size; the processes one after the other."""
    figures: dict[str, Any] = {"starts": [], "restores": {}}
    for number in range(size.starts):
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            report.say(f"{size.name}: saves, process {number + 1} of {size.starts}")
            start = call("saves", size, folder=folder)
            files = start.pop("files")
            figures["starts"].append(start)
            for count in ranks if number == size.starts - 1 else []:
                if count * 2.2 * size.bytes > free_memory():
                    figures["restores"][str(count)] = {}  # a rank has the data and the tensors made of it
                    continue
                report.say(f"{size.name}: restores in {count} ranks")
                figures["restores"][str(count)] = call("restores", size, count, files=files)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        report.say(f"{size.name}: memory")
        figures["memory"] = call("memory", size, folder=folder)
    return figures


def rows_of(size: str, figures: Mapping[str, Any]) -> list[rows.Row]:
    """What is judged, and the other savers beside the raw write."""
    durable: dict[str, list[float]] = {}
    for start in figures["starts"]:
        for saver, seconds in start["durable"].items():
            durable.setdefault(saver, []).extend(milliseconds(seconds))
    raw = durable.pop(RAW)
    found = []
    for saver, taken in durable.items():
        name = f"checkpoint, {size}: until durable{'' if saver == OURS else f', {saver}'}"
        found.append(rows.paired(name, "ms", taken, raw, RAW, allowed=DURABLE_BAR if saver == OURS else None))
    read = [ratio for restores in figures["restores"].values() if restores for ratio in restores[OURS]["read"]]
    grown, state = (figures["memory"][what] / 1e6 for what in ("trainer_growth", "state_bytes"))
    name = f"checkpoint, {size}: growth of the trainer's peak"
    return [
        *found,
        rows.counted(
            f"checkpoint, {size}: bytes read by all ranks", "files", max(read), 1.0, "the file", allowed=READ_BAR
        ),
        rows.counted(name, "MB", grown, state, "the state", allowed=MEMORY_BAR),
    ]


def restored(sizes: Mapping[str, Any]) -> str:
    """Medians in milliseconds."""
    lines = [
        [size, ranks, name, report.median(milliseconds(one["seconds"])), max(one["read"])]
        for size, figures in sizes.items()
        for ranks, kinds in figures["restores"].items()
        for name, one in kinds.items()
    ]
    return report.table(["state", "ranks", "restore of", "until all have it, ms", "bytes read / file"], lines)


def main() -> None:
    """The command line; also what each of the processes runs."""
    if sides.answered(measured):
        return
    parser = report.parser(__doc__, "10 MB in one process, two saves of each kind, restores in 1 and 4 ranks")
    parser.add_argument("--sizes", nargs="+", choices=[size.name for size in SIZES], help="default: all")
    parser.add_argument("--starts", type=int, help="processes per size (default: 3, and 2 of 2 GB)")
    parser.add_argument("--rounds", type=int, help="saves of each kind per process (default: 7, 4, 3)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="that restore")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="the folder to save in")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.starts, options.rounds, options.ranks = [SIZES[0].name], 1, 2, [1, 4]
    settings = {name: value for name in ("starts", "rounds") if (value := getattr(options, name)) is not None}
    chosen = [replace(size, **settings) for size in SIZES if size.name in (options.sizes or [size.name])]
    fits = [size for size in chosen if STATES * size.bytes < free_memory()]
    left_out = [size.name for size in chosen if size not in fits]
    figures = {size.name: measure(size, options.scratch, options.ranks) for size in fits}
    text = f"""# What a checkpoint costs

Files on one local disk; see `benchmarks/checkpoint.py` for what is measured. Not measured, for too little memory:
{", ".join(left_out) or "none"}."""
    found = [row.as_json() for name, one in figures.items() for row in rows_of(name, one)]
    tables = {"Restores": restored(figures)}
    report.write(options.out, "checkpoint-bench", text, {"rows": found, "sizes": figures}, tables=tables)


if __name__ == "__main__":
    main()
