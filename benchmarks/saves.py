"""What a save costs training: ``python -m benchmarks.saves [--quick]`` (``make bench-saves``), 8 minutes.

For each state a process is started in which the savers take turns:

- Stall: from the call of the saver to its return, between steps of about 10 ms. The limit is what no saver can do
  without: the same state_dict() calls, as tensors may be others than last time, and a copy of the tensors within memory
  (one call of torch for all of them). Both alternate; the ratio is that of neighbours.
- Training time lost while the save is written: the time of the steps from the end of the stall until the saver is done
  (and of at least 20), less what as many steps take by those right before and after. The limit is the CPU time of our
  writer process, divided by the cores. "No save" is the same without a save: what the noise of the machine makes of 0.
  Measured beside three trainings: one on one thread less than the machine has cores, one on all cores, and one on all
  cores whose training thread sleeps for half of each step, while torch's other threads spin.
- The same with an empty loop in place of the save, which uses as much CPU time at the writer's priority: what such
  training loses to any other process. As its threads wait for each other, a delay of one delays all.

Bars: the stall at most 1.15 times the limit, or 0.5 ms above it, whichever is more; the time lost at most the writer's
CPU time by the cores, and at most 1.15 times what the empty loop costs training on all cores.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, rows, sides
from benchmarks.savers import (
    CALLS_AND_COPY,
    EMPTY_LOOP,
    SAVERS,
    AsyncProcess,
    CallsAndCopy,
    Copy,
    EmptyLoop,
    Ours,
    Saver,
    Torchsnapshot,
    Trainer,
    beside_training,
    make_small_tensors,
    make_training,
    make_transformer,
    milliseconds,
    state_of,
    tensors_of,
)
from clusterddp.checkpoint.memory_blocks import free_memory

STALL_BAR, STALL_MORE_MS, LOST_BAR, LOOP_BAR = 1.15, 0.5, 1.0, 1.15
CORES = len(os.sched_getaffinity(0))
CORE_FREE, ALL_CORES, HALF_WAITING = "a core free", "all cores", "all cores, half waiting"
#: Tensors that async_save in a process can send: it would take all descriptors, and every saver would fail.
MOST_DESCRIPTORS = 5000
#: Seconds of each part of a case, and repetitions that are made even if they take longer.
PART_S, QUICK_PART_S, LEAST = 25.0, 6.0, 3
#: Memory that a case takes, in states: training, the snapshot, a copy and what is written of two files; and with the
#: other savers.
STATES, STATES_WITH_PEERS = 6, 10
PEERS: list[type[Saver]] = [*(one for one in SAVERS if not issubclass(one, (Copy, Ours))), Torchsnapshot]
LIMIT_IS = CALLS_AND_COPY
#: Series of the figures, besides those of savers.
NO_SAVE, CPU = "no save", "writer's CPU"
Training = tuple[torch.nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A state, and how often it is saved: pairs of ours and the limit, rounds beside training, rounds of all savers.

    ``quick``: pairs and rounds with --quick; without pairs, the case is left out. On a loaded machine, each part ends
    once its time is over.
    """

    name: str
    bytes: int
    make: Callable[[], Training]
    pairs: int
    beside: int
    peers: int
    quick: tuple[int, int] = (0, 0)


CASES = [
    Case("10 MB", 10_000_000, partial(make_training, 10_000_000), 80, 20, 5, (40, 6)),
    Case("400 MB", 400_000_000, partial(make_training, 400_000_000), 20, 6, 3, (8, 0)),
    Case("2 GB", 2_000_000_000, partial(make_training, 2_000_000_000), 8, 3, 0),
    Case("10,000 small tensors", 5_000_000, partial(make_small_tensors, 10_000), 50, 10, 3, (20, 0)),
    Case("transformer and its AdamW", 300_000_000, partial(make_transformer, 8, 512), 25, 8, 3, (10, 0)),
]


class NoSave(Saver):
    name = NO_SAVE

    def begin(self) -> None:
        pass


# ---- one process that saves


def measured(name: str, threads: int, folder: str, rank: int, ranks: int, port: int, **how: Any) -> dict[str, Any]:
    """Seconds of the case of this name, in a process of its own."""
    # async_save in a process takes a descriptor for each tensor.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    torch.set_num_threads(threads)
    sides.join(rank, ranks, port)
    (case,) = (case for case in CASES if case.name == name)
    return measure(case, folder=Path(folder), **how)


def measure(case: Case, pairs: int, beside: int, peers: int, part_s: float, folder: Path) -> dict[str, Any]:
    """The same. ``part_s``: of each part, at most."""
    model, optimizer = case.make()
    ours, limit = Ours(folder, model, optimizer), CallsAndCopy(folder, model, optimizer)
    pair: list[Saver] = [ours, limit]
    trainer, step = Trainer(), itertools.count()
    stalls: dict[str, list[float]] = {ours.name: [], limit.name: []}
    cpu: dict[str, list[float]] = {ours.name: [], limit.name: []}
    deadline = time.monotonic() + part_s
    for number in range(pairs + 1):
        if number > LEAST and time.monotonic() > deadline:
            break
        for saver in sides.rotated(pair, number):
            stall, used = alternating(saver, trainer, next(step))
            if number:  # the first save is not like the others
                stalls[saver.name].append(stall)
                cpu[saver.name].append(used)
    lost = {}
    if beside:
        savers = [ours, NoSave(folder, model, optimizer), EmptyLoop(folder, model, optimizer)]
        trainings = {ALL_CORES: trainer, HALF_WAITING: Trainer(waits=True)}
        lost = {name: beside_saves(savers, one, beside, step, part_s) for name, one in trainings.items()}
        if (threads := torch.get_num_threads()) > 1:
            torch.set_num_threads(threads - 1)
            lost[CORE_FREE] = beside_saves(savers, Trainer(), beside, step, part_s)
            torch.set_num_threads(threads)
        savers[-1].close()
    ours.close()
    return {
        "stall": stalls,
        "cpu": cpu,
        "lost": lost,
        "peers": measure_peers(folder / "peers", model, optimizer, trainer, peers, part_s) if peers else {},
        "tensors": len(tensors_of(state_of(model, optimizer))),
        "bytes": sum(tensor.nbytes for tensor in tensors_of(state_of(model, optimizer))),
        "cores": CORES,
    }


def alternating(saver: Saver, trainer: Trainer, step: int) -> tuple[float, float]:
    """The stall of one save, after a step, and the CPU time that this thread uses in it."""
    saver.next_path(step)
    trainer.step()
    started, used = time.perf_counter(), time.thread_time()
    saver.begin()
    stall, used = time.perf_counter() - started, time.thread_time() - used
    saver.end()
    return stall, used


def beside_saves(
    savers: Sequence[Saver], trainer: Trainer, number: int, step: Iterator[int], part_s: float
) -> dict[str, list[float]]:
    """Seconds that training loses after the stall, by saver, and of the writer's CPU time."""
    found: dict[str, list[float]] = {**{saver.name: [] for saver in savers}, CPU: []}
    deadline = time.monotonic() + part_s
    for turn in range(number):
        if turn >= LEAST and time.monotonic() > deadline:
            break
        for saver in sides.rotated(savers, turn):
            saver.next_path(next(step))
            if isinstance(saver, EmptyLoop):
                saver.cpu_s = found[CPU][-1]
            before = cpu_of_writer(saver)
            stall, lost = beside_training(saver, trainer)
            found[saver.name].append(lost - stall)
            if isinstance(saver, Ours):
                found[CPU].append(cpu_of_writer(saver) - before)
    return found


def cpu_of_writer(saver: Saver) -> float:
    """The CPU seconds of all threads of our writer so far, also of those that have ended; 0 for other savers."""
    if not isinstance(saver, Ours):
        return 0.0
    return time.clock_gettime(~saver.writer << 3 | 2)  # as clock_getcpuclockid(3) makes it


def measure_peers(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, trainer: Trainer, rounds: int, part_s: float
) -> dict[str, Any]:
    """What the other savers take, and we among them; those that are installed. "failed": why one cannot save this."""
    folder.mkdir()
    savers: list[Saver] = []
    kinds: list[type[Saver]] = [CallsAndCopy, Ours, *PEERS]
    refused: dict[str, Any] = {}
    if len(tensors_of(state_of(model, optimizer))) > MOST_DESCRIPTORS:
        kinds.remove(AsyncProcess)
        refused[AsyncProcess.name] = {"failed": "left out: it needs a file descriptor for each tensor"}
    for kind in kinds:
        try:
            savers.append(kind(folder, model, optimizer))
        except ModuleNotFoundError as error:
            report.say(f"{kind.name} is left out: {error}")
    found: dict[str, Any] = {saver.name: {"stall": [], "lost": []} for saver in savers}
    found |= refused
    deadline = time.monotonic() + part_s
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() > deadline:
            break
        for saver in sides.rotated(list(savers), number):
            try:
                saver.next_path(number)
                stall, lost = beside_training(saver, trainer)
            except Exception as error:  # of another project: one that cannot save this state is a result
                savers.remove(saver)
                found[saver.name] = {"failed": f"{type(error).__name__}: {error}"}
                continue
            if number:
                found[saver.name]["stall"].append(stall)
                found[saver.name]["lost"].append(lost)
    for saver in savers:
        saver.close()
    return found


# ---- around it


def too_large(case: Case, with_peers: bool, free: float) -> str | None:
    """Why a case is left out, if so many bytes of memory are free."""
    needed = (STATES_WITH_PEERS if with_peers and case.peers else STATES) * case.bytes
    return None if needed < free else f"{case.name} ({needed / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free)"


def call(case: Case, quick: bool, with_peers: bool, threads: int, part_s: float, scratch: Path) -> dict[str, Any]:
    """The figures of a case, from a process of its own."""
    pairs, beside = case.quick if quick else (case.pairs, case.beside)
    how: dict[str, Any] = {"pairs": pairs, "beside": beside, "peers": case.peers if with_peers else 0}
    how |= {"threads": threads, "part_s": QUICK_PART_S if quick else part_s}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        request = {"name": case.name, "folder": folder, **how}
        figures: dict[str, Any] = sides.run_ranks("benchmarks.saves", request, ACCELERATE_USE_CPU="true")
        return figures


def rows_of(name: str, figures: Mapping[str, Any]) -> list[rows.Row]:
    """What is judged of a case."""
    found = []
    for what, words in (("stall", "stall"), ("cpu", "CPU time of the training thread in the stall")):
        ours, limit = (milliseconds(figures[what][saver]) for saver in (Ours.name, CALLS_AND_COPY))
        relative = report.median(limit) * (STALL_BAR - 1) > STALL_MORE_MS
        bar = {"allowed": STALL_BAR} if relative else {"more": STALL_MORE_MS}
        found.append(rows.paired(f"save, {name}: {words}", "ms", ours, limit, LIMIT_IS, **bar))
    for training, seconds in figures["lost"].items():
        row = f"save, {name}: training time lost ({training})"
        cores = figures["cores"]
        found.append(lost_row(row, seconds, CPU, cores, f"the writer's CPU time by {cores} cores", LOST_BAR))
        if training == ALL_CORES:
            row += ", beside an empty loop"
            found.append(lost_row(row, seconds, EMPTY_LOOP, 1, "an empty loop of as much CPU time", LOOP_BAR))
    return found


def lost_row(
    name: str, seconds: Mapping[str, Sequence[float]], limit: str, cores: int, limit_is: str, bar: float
) -> rows.Row:
    """Time lost to the write, less what is lost without one, by one of the other series and the cores.

    A resample's limit may be 0 or less, so the verdict is based on the difference to what the bar allows.
    """
    draw = random.Random(0)

    def figures(drawn: Callable[[Sequence[float]], Sequence[float]]) -> tuple[float, float]:
        ours, none, least = (1000 * report.median(drawn(seconds[key])) for key in (Ours.name, NO_SAVE, limit))
        return ours - none, (least if limit == CPU else least - none) / cores

    drawn = [figures(lambda values: draw.choices(values, k=len(values))) for _ in range(rows.RESAMPLES)]
    ours, least = figures(lambda values: values)
    low, high = rows.interval([one / other for one, other in drawn if other > 0])
    met = rows.within(0.0, *rows.interval([one - bar * other for one, other in drawn]))
    return rows.Row(name, "ms", ours, least, limit_is, ours / least, low, high, bar, met)


def tables(cases: Mapping[str, Any]) -> dict[str, str]:
    """Medians in milliseconds: the time that training loses, and other savers beside ours."""
    series = [Ours.name, EMPTY_LOOP, NO_SAVE, CPU]
    lost = [
        [name, training, *(report.median(milliseconds(seconds[what])) for what in series)]
        for name, figures in cases.items()
        for training, seconds in figures["lost"].items()
    ]
    found = {"Training time lost while a save is written": report.table(["state", "training", *series], lost)}
    for name, figures in cases.items():
        lines = [
            [saver, *(one.get("failed") or report.median(milliseconds(one[what])) for what in ("stall", "lost"))]
            for saver, one in figures["peers"].items()
        ]
        if lines:
            head = ["saver", "stall, ms", "training time lost with the stall, ms"]
            found[f"Other savers: {name}"] = report.table(head, lines)
    return found


def main() -> None:
    """The command line; also what each of the processes runs."""
    if sides.answered(measured):
        return
    parser = report.parser(__doc__, "at most 2 minutes: without 2 GB and other savers")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--seconds", type=float, default=PART_S, help="of each part of a case (default: %(default)g)")
    parser.add_argument("--threads", type=int, default=CORES, help="of torch (default: all cores, %(default)d)")
    parser.add_argument("--memory", type=float, default=math.inf, help="to use at most, in GB (default: what is free)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="the folder to save in")
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES
        if case.name in (options.cases or [case.name]) and not (options.quick and not case.quick[0])
    ]
    with_peers, free = not (options.quick or options.without_peers), min(free_memory(), 1e9 * options.memory)
    left_out = [words for case in chosen if (words := too_large(case, with_peers, free))]
    cases: dict[str, Any] = {}
    for case in chosen:
        if too_large(case, with_peers, free):
            continue
        report.say(case.name)
        cases[case.name] = call(case, options.quick, with_peers, options.threads, options.seconds, options.scratch)
        found = [row.as_json() for name, figures in cases.items() for row in rows_of(name, figures)]
        text = f"""# What a save costs training

One process, CPU tensors, {options.threads} threads of torch, files on one local disk; see `benchmarks/saves.py` for
what is measured. Not measured, for too little memory: {", ".join(left_out) or "none"}."""
        report.write(options.out, "saves", text, {"rows": found, "cases": cases}, tables=tables(cases))


if __name__ == "__main__":
    main()
