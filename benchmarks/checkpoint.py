"""What a checkpoint costs: ``python -m benchmarks.checkpoint`` (``make bench-checkpoint``), about 15 minutes.

A model of 20 layers and its Adam state (160 tensors) of three sizes, saved by this project, torch.save + fsync, torch's
async_save (by a thread; by a process with shared staging), Lightning and accelerate, and next to them the limits: the
same tensors copied within memory (once more after the state_dict() calls that any saver begins with), and as many bytes
written and synced. For each size, processes are started in which all of them take turns:

- Stall: from the call of the saver to its return, between steps of about 10 ms on all cores. The first save of each
  process is told apart from the later ones.
- Train time lost: the steps from the call on, until the saver says that it is done (and at least 20), less what as many
  steps take by those timed right before and right after.
- Until durable: training waits from the call on until the file is durable, and in our case read back and verified.
  Lightning and accelerate sync nothing: their files are synced afterwards for them, which only this column counts.
  The first round of each process is left out: a disk may take several times as long for blocks never written before.
  Everybody keeps the last file until the next one is there, so that all of them come by such blocks alike.

The restore is measured in 1, 4 and 8 gloo ranks, the file out of the page cache, from when all ranks are there until
all have the state. Bytes read are rchar in /proc/self/io of all ranks (files read through a mapping are not in it), by
the size of the checkpoint.

Bars, on medians: the stall at most 1.3 times the copy; until durable at most 1.5 times the raw write; bytes read 1.0
times the file; the trainer's peak memory grows by at most 2.2 times the state.
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

from benchmarks import report, sides
from benchmarks.savers import (
    CALLS_AND_COPY,
    COPY,
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
    Trainer,
    make_training,
    state_of,
    tensors_of,
)
from clusterddp.checkpoint.memory.anonymous import free_memory
from clusterddp.checkpoint.restore import restore
from clusterddp.checkpoint.store import Checkpoint, Checkpoints
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory

STALL_BAR, DURABLE_BAR, READ_BAR, MEMORY_BAR = 1.3, 1.5, 1.0, 2.2
#: What the bytes read may exceed the file by and still count as once: what a rank reads of /proc, and of sockets.
READ_MARGIN = 0.01
LEAST_STEPS = 20
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
    """All savers in turn, ``size.rounds`` times; seconds by saver."""
    sides.join(rank, ranks, port)
    model, optimizer = make_training(size.bytes)
    savers = [make(Path(folder), model, optimizer) for make in SAVERS]
    copy = savers[0]
    assert isinstance(copy, Copy)
    savers.append(Raw(Path(folder), copy.flat))
    trainer = Trainer()
    figures: dict[str, Any] = {saver.name: {"stall": [], "lost": [], "durable": []} for saver in savers}
    for number in range(size.rounds):
        for saver in sides.rotated(savers, number):
            saver.next_path(2 * number)
            stall, lost, durable = beside_training(saver, trainer)
            figures[saver.name]["stall"].append(stall)
            figures[saver.name]["lost"].append(lost)
            if not saver.in_background:
                figures[saver.name]["durable"].append(durable)
        for saver in sides.rotated([saver for saver in savers if saver.in_background], number):
            saver.next_path(2 * number + 1)
            figures[saver.name]["durable"].append(paused(saver))
        sides.say(f"{size.name}: round {number + 1} of {size.rounds}")
    for saver in savers:
        saver.close()
    dist.destroy_process_group()
    return {
        "seconds": figures,
        "files": {saver.name: str(saver.path) for saver in savers if not isinstance(saver, Copy)},
        "state_bytes": len(copy.flat),
        "tensors": len(tensors_of(state_of(model, optimizer))),
        "step_ms": 1000 * trainer.seconds_per_step(100),
    }


def beside_training(saver: Saver, trainer: Trainer) -> tuple[float, float, float]:
    """The seconds that a save blocks training, that training lost by it, and that it took when training waits for it.

    The last is of savers that work in the foreground only.
    """
    saver.urgent = False
    before = trainer.seconds_per_step(LEAST_STEPS)
    steps, started = 0, time.perf_counter()
    saver.begin()
    stall = time.perf_counter() - started
    while steps < LEAST_STEPS or not saver.done():
        trainer.step()
        steps += 1
    seconds = time.perf_counter() - started
    ending = time.perf_counter()
    saver.end()
    durable = stall + time.perf_counter() - ending
    after = trainer.seconds_per_step(LEAST_STEPS)
    return stall, seconds - steps * (before + after) / 2, durable


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
            sides.say(f"{size.name}: saves, process {number + 1} of {size.starts}")
            start = call("saves", size, folder=folder)
            files = start.pop("files")
            figures["starts"].append(start)
            for count in ranks if number == size.starts - 1 else []:
                if count * 2.2 * size.bytes > free_memory():
                    figures["restores"][str(count)] = {}  # a rank has the data and the tensors made of it
                    continue
                sides.say(f"{size.name}: restores in {count} ranks")
                figures["restores"][str(count)] = call("restores", size, count, files=files)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        sides.say(f"{size.name}: memory")
        figures["memory"] = call("memory", size, folder=folder)
    return figures


def of_saver(figures: Mapping[str, Any], name: str, what: str, first: bool | None = None) -> list[float]:
    """A saver's seconds; of the first save in each process, of the later ones, or of all."""
    series = [start["seconds"][name][what] for start in figures["starts"]]
    part = {None: slice(None), True: slice(1), False: slice(1, None)}[first]
    return [value for values in series for value in values[part]]


def judged(
    size: str, what: str, ours: Sequence[float], limit: Sequence[float], bar: float | None, margin: float = 0.0
) -> list[object]:
    """A line of the table of bars: the medians, their ratio, and whether that is within the bar, if there is one."""
    ratio = report.median(ours) / report.median(limit)
    judgement = ["-", "-"] if bar is None else [bar, report.verdict(ratio <= bar + margin)]
    return [size, what, report.median(ours), report.median(limit), ratio, *judgement]


def bars(size: str, figures: Mapping[str, Any]) -> list[list[object]]:
    """What is judged, for one size, in milliseconds and MB."""
    stall, copy, least = (of_saver(figures, name, "stall", first=False) for name in (OURS, COPY, CALLS_AND_COPY))
    durable, raw = (of_saver(figures, name, "durable", first=False) for name in (OURS, RAW))
    read = [ratio for restores in figures["restores"].values() if restores for ratio in restores[OURS]["read"]]
    grown, state = figures["memory"]["trainer_growth"], figures["memory"]["state_bytes"]
    return [
        judged(size, "stall / memory copy, ms", scaled(stall, 1e3), scaled(copy, 1e3), STALL_BAR),
        judged(size, f"the same / {CALLS_AND_COPY}, ms", scaled(stall, 1e3), scaled(least, 1e3), None),
        judged(size, "until durable / raw write + fsync, ms", scaled(durable, 1e3), scaled(raw, 1e3), DURABLE_BAR),
        judged(size, "bytes read by all ranks / the file", [max(read)], [1.0], READ_BAR, READ_MARGIN),
        judged(size, "growth of the trainer's peak / state, MB", [grown / 1e6], [state / 1e6], MEMORY_BAR),
    ]


def scaled(values: Sequence[float], factor: float) -> list[float]:
    return [factor * value for value in values]


def describe(sizes: Mapping[str, Any], left_out: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The report, and the figures with what follows from them."""
    rows = [row for name, figures in sizes.items() for row in bars(name, figures)]
    any_start = next(iter(sizes.values()))["starts"][0]
    missing = f"\nNot measured, for too little memory: {', '.join(left_out)}.\n" if left_out else ""
    text = f"""# What a checkpoint costs

{report.place()} Files on one local disk; steps of
{any_start["step_ms"]:.1f} ms on all cores; {any_start["tensors"]} tensors (a model and its Adam state). See
`benchmarks/checkpoint.py` for what is measured; milliseconds, medians, the worst in parentheses.

## Bars

{report.table(["state", "ours / limit", "ours", "limit", "ratio", "allowed", "bar"], rows)}

The first saves of each process are left out. The state_dict() calls precede every copy, because the tensors may have
changed; where they take long compared with the copy, no saver can meet the first bar. Until durable: Lightning and
accelerate do not sync what they write; for this column it is synced for them afterwards.
{missing}"""
    text += "\n".join(_tables(figures) for figures in sizes.values())
    return text, {
        "sizes": sizes,
        "met": {f"{row[0]}: {row[1]}": row[-1] == report.verdict(True) for row in rows if row[-1] != "-"},
    }


def _tables(figures: Mapping[str, Any]) -> str:
    names = list(figures["starts"][0]["seconds"])
    saves = [
        [
            name,
            _milliseconds(of_saver(figures, name, "stall", first=True)),
            _milliseconds(of_saver(figures, name, "stall", first=False)),
            _milliseconds(of_saver(figures, name, "lost")),
            _milliseconds([] if name in (COPY, CALLS_AND_COPY) else of_saver(figures, name, "durable", first=False)),
        ]
        for name in names
    ]
    restored = figures["restores"]
    restores = [
        [ranks, name, _milliseconds(one["seconds"]), max(one["read"])]
        for ranks, kinds in restored.items()
        for name, one in kinds.items()
    ]
    restores += [
        [ranks, "all", "not measured: too little memory", "-"] for ranks, kinds in restored.items() if not kinds
    ]
    memory = figures["memory"]
    state = memory["state_bytes"]
    return f"""
## A state of {state / 1e6:.0f} MB

{report.table(["saver", "stall, first", "stall, later", "train time lost", "until durable"], saves)}

{report.table(["ranks", "restore of", "until all have it", "bytes read / file"], restores)}

Memory: the trainer's peak grows by {memory["trainer_growth"] / state:.2f} states. The writer's peak is
{memory["writer"]["VmHWM"] / 1e6:.0f} MB, of which {memory["writer"]["RssAnon"] / 1e6:.0f} MB are private; the rest is
the snapshot, which it shares with the trainer, and the interpreter's files.
"""


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * report.median(seconds):.1f} ({1000 * report.worst(seconds):.1f})" if seconds else "-"


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
    report.write(options.out, "checkpoint-bench", *describe(figures, left_out))


if __name__ == "__main__":
    main()
