"""What a save costs training: ``python -m benchmarks.saves [--quick]``, 8 minutes.

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

- Until a save is durable, while training waits for it: beside as many bytes written and synced. Our file is read back
  and verified in it, and what Lightning and accelerate leave in the kernel's cache is synced for them.
- The other savers, in turns with ours and those limits. ``--quick`` is without them and without the last part.

Bars: the stall at most 1.15 times the limit, or 0.5 ms above it, whichever is more; the time lost at most the writer's
CPU time by the cores, and at most 1.15 times what the empty loop costs training on all cores; durable within 1.5 times
the raw write; a peak of the trainer's memory that grows by at most 2.2 times the state.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, sides
from benchmarks.savers import (
    CALLS_AND_COPY,
    EMPTY_LOOP,
    OURS,
    PEERS,
    RAW,
    CallsAndCopy,
    EmptyLoop,
    Ours,
    Raw,
    Saver,
    Trainer,
    beside_training,
    make_small_tensors,
    make_training,
    make_transformer,
    state_of,
    tensors_of,
    until_durable,
)
from benchmarks.sides import in_turns, milliseconds
from clusterddp.checkpoint.host_memory import free_memory
from tests.markdown import table

STALL_BAR, STALL_MORE_MS, LOST_BAR, LOOP_BAR, DURABLE_BAR, MEMORY_BAR = 1.15, 0.5, 1.0, 1.15, 1.5, 2.2
CORES = len(os.sched_getaffinity(0))
CORE_FREE, ALL_CORES, HALF_WAITING = "a core free", "all cores", "all cores, half waiting"
#: Seconds of each part of a case.
PART_S, QUICK_PART_S = 25.0, 6.0
#: Memory that a case takes, in states: training, the snapshot, a copy and what is written of two files; and with the
#: other savers.
STATES, STATES_WITH_PEERS = 6, 10
#: A state of fewer bytes has no bar for memory: what each tensor takes besides its values is more.
SMALL = 9_000_000
#: Series of the figures, besides those of savers.
NO_SAVE, CPU = "no save", "writer's CPU"
TEXT = """# What a save costs training

One process saves CPU tensors to a local disk while it trains. The limit of a stall is the calls of `state_dict()` and a
copy within memory; the time lost is the difference to the same steps without a save."""


@dataclass(frozen=True)
class Case:
    """A state, and how often it is saved: pairs of ours and the limit, rounds beside training, rounds of all savers.

    ``quick``: pairs and rounds with --quick; without pairs, the case is left out. On a loaded machine, each part ends
    once its time is over.
    """

    name: str
    bytes: int
    make: Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]]
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


def in_process(name: str, quick: bool, folder: str, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """The seconds of the case of this name; memory in bytes."""
    # async_save in a process takes a descriptor for each tensor.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sides.join(rank, ranks, port)
    (case,) = (case for case in CASES if case.name == name)
    (pairs, beside), part_s = (case.quick, QUICK_PART_S) if quick else ((case.pairs, case.beside), PART_S)
    model, optimizer = case.make()
    make: Callable[[type[Saver]], Saver] = lambda kind: kind(Path(folder), model, optimizer)  # noqa: E731
    step, before = itertools.count(), reset_peak()
    ours = make(Ours)
    for _ in range(3):
        ours.next_path(next(step))
        until_durable(ours)
    figures: dict[str, Any] = {"growth": sides.memory("self", "VmHWM") - before, "cores": CORES, "lost": {}}
    limit, trainer = make(CallsAndCopy), Trainer()
    stalls = {saver.name: partial(stall_of, saver, trainer, step) for saver in (ours, limit)}
    found = in_turns(stalls, pairs, seconds=part_s)
    for place, what in enumerate(("stall", "cpu")):
        figures[what] = {name: [one[place] for one in times] for name, times in found.items()}
    figures["bytes"] = sum(tensor.nbytes for tensor in tensors_of(state_of(model, optimizer)))
    if beside:
        savers = [ours, make(NoSave), make(EmptyLoop)]
        trainings = {ALL_CORES: trainer, HALF_WAITING: Trainer(waits=True)}
        figures["lost"] = {name: lost_beside(savers, one, beside, step, part_s) for name, one in trainings.items()}
        if CORES > 1:
            torch.set_num_threads(CORES - 1)
            figures["lost"][CORE_FREE] = lost_beside(savers, Trainer(), beside, step, part_s)
            torch.set_num_threads(CORES)
        savers[-1].close()
    peers = {} if quick or not case.peers else measure_peers(make, ours, limit, trainer, step, case.peers, part_s)
    ours.close()
    return {**figures, "peers": peers}


def reset_peak() -> int:
    """The peak of this process's memory from now on starts at what is returned."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return sides.memory("self", "VmHWM")


def stall_of(saver: Saver, trainer: Trainer, step: itertools.count[int]) -> tuple[float, float]:
    """The stall of one save, after a step, and the CPU time that this thread uses in it."""
    saver.next_path(next(step))
    saver.urgent = False
    trainer.step()
    started, used = time.perf_counter(), time.thread_time()
    saver.begin()
    stall, used = time.perf_counter() - started, time.thread_time() - used
    saver.end()
    return stall, used


def lost_beside(
    savers: Sequence[Saver], trainer: Trainer, rounds: int, step: itertools.count[int], part_s: float
) -> dict[str, list[float]]:
    """Seconds that training loses after the stall, by saver, and of the writer's CPU time."""
    cpu: list[float] = []

    def lost(saver: Saver) -> float:
        saver.next_path(next(step))
        if isinstance(saver, EmptyLoop):
            saver.cpu_s = cpu[-1]
        before = saver.cpu_of_writer() if isinstance(saver, Ours) else 0.0
        stall, lost = beside_training(saver, trainer)
        if isinstance(saver, Ours):
            cpu.append(saver.cpu_of_writer() - before)
        return lost - stall

    found = in_turns({saver.name: partial(lost, saver) for saver in savers}, rounds, warm_up=0, seconds=part_s)
    return {**found, CPU: cpu}


def measure_peers(
    make: Callable[[type[Saver]], Saver],
    ours: Saver,
    limit: Saver,
    trainer: Trainer,
    step: itertools.count[int],
    rounds: int,
    part_s: float,
) -> dict[str, Any]:
    """Of each saver that is installed and can save this: the stall, the training time lost, and until it is durable."""
    savers, failures = [ours, limit, make(Raw)], dict[str, str]()
    for kind in PEERS:
        try:
            savers.append(make(kind))
        except (ImportError, ValueError) as error:
            failures[kind.name] = str(error)

    def turn(saver: Saver) -> tuple[float, float, float] | None:
        if saver.name in failures:
            return None
        try:
            saver.next_path(next(step))
            stall, lost = beside_training(saver, trainer)
            saver.next_path(next(step))
            return stall, lost, until_durable(saver)
        except Exception as error:  # of another project: one that cannot save this state is a result
            failures[saver.name] = f"{type(error).__name__}: {error}"
            return None

    found = in_turns({saver.name: partial(turn, saver) for saver in savers}, rounds, seconds=part_s)
    for saver in savers[1:]:
        saver.close()
    return {**found, **failures}


# ---- around it


def too_large(case: Case, with_peers: bool, free: float) -> str | None:
    """Why a case is left out, if so many bytes of memory are free."""
    needed = (STATES_WITH_PEERS if with_peers and case.peers else STATES) * case.bytes
    return None if needed < free else f"{case.name} ({needed / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free)"


def measure(quick: bool, cases: list[str] | None) -> common.Found:
    chosen = [case for case in CASES if case.name in (cases or [case.name]) and (case.quick[0] or not quick)]
    left_out = {case: words for case in chosen if (words := too_large(case, not quick, free_memory()))}
    figures = {}
    for case in chosen:
        if case not in left_out:
            common.say(case.name)
            with tempfile.TemporaryDirectory() as folder:
                request = {"name": case.name, "quick": quick, "folder": folder}
                figures[case.name] = sides.run_ranks("benchmarks.saves", request, ACCELERATE_USE_CPU="true")
    found = [row for name, one in figures.items() for row in rows_of(name, one)]
    where = f"without {'; '.join(left_out.values())}" if left_out else ""
    return common.Found({"cases": figures}, found, where, peers_tables(figures))


def rows_of(name: str, figures: Mapping[str, Any]) -> list[common.Row]:
    """What is judged of a case."""
    found = []
    for what, words in (("stall", "stall"), ("cpu", "CPU time of the training thread in the stall")):
        ours, limit = (milliseconds(figures[what][saver]) for saver in (OURS, CALLS_AND_COPY))
        relative = common.median(limit) * (STALL_BAR - 1) > STALL_MORE_MS
        bar = {"allowed": STALL_BAR} if relative else {"more": STALL_MORE_MS}
        found.append(common.paired(f"save, {name}: {words}", "ms", ours, limit, CALLS_AND_COPY, **bar))
    for training, seconds in figures["lost"].items():
        row = f"save, {name}: training time lost ({training})"
        cores = figures["cores"]
        found.append(lost_row(row, seconds, CPU, cores, f"the writer's CPU time / {cores} cores", LOST_BAR))
        if training == ALL_CORES:
            row += ", beside an empty loop"
            found.append(lost_row(row, seconds, EMPTY_LOOP, 1, "an empty loop that uses as much CPU time", LOOP_BAR))
    if figures["peers"]:
        ours, raw = (milliseconds([durable for *_, durable in figures["peers"][saver]]) for saver in (OURS, RAW))
        found.append(common.paired(f"checkpoint, {name}: until durable", "ms", ours, raw, RAW, allowed=DURABLE_BAR))
    row, grown, state = f"checkpoint, {name}: growth of the trainer's peak", figures["growth"], figures["bytes"]
    most = MEMORY_BAR if state >= SMALL else None
    return [*found, common.counted(row, "MB", grown / 1e6, state / 1e6, "the state", allowed=most)]


def lost_row(
    name: str, seconds: Mapping[str, Sequence[float]], limit: str, cores: int, limit_is: str, bar: float
) -> common.Row:
    """Time lost to the write, less what is lost without one, by one of the other series and the cores.

    A resample's limit may be 0 or less, so the verdict is based on the difference to what the bar allows.
    """
    draw = random.Random(0)

    def figures(drawn: Callable[[Sequence[float]], Sequence[float]]) -> tuple[float, float]:
        ours, none, least = (1000 * common.median(drawn(seconds[key])) for key in (OURS, NO_SAVE, limit))
        return ours - none, (least if limit == CPU else least - none) / cores

    drawn = [figures(lambda values: draw.choices(values, k=len(values))) for _ in range(common.RESAMPLES)]
    ours, least = figures(lambda values: values)
    low, high = common.interval([one / other for one, other in drawn if other > 0])
    met = common.within(0.0, *common.interval([one - bar * other for one, other in drawn]))
    return common.Row(name, "ms", ours, least, limit_is, ours / least, low, high, bar, met)


def peers_tables(cases: Mapping[str, Any]) -> dict[str, str]:
    """Medians in milliseconds, or why a saver has none."""

    def cells(times: str | list[list[float]]) -> list[object]:
        if isinstance(times, str):
            return [times]
        return [common.median(milliseconds(series)) for series in zip(*times, strict=True)]

    head = ["saver", "stall, ms", "training time lost with the stall, ms", "until durable, ms"]
    return {
        f"Other savers: {name}": table(head, [[saver, *cells(times)] for saver, times in one["peers"].items()])
        for name, one in cases.items()
        if one["peers"]
    }


if __name__ == "__main__":
    if not sides.answered(in_process):
        names = {"nargs": "+", "choices": [case.name for case in CASES], "help": "default: all"}
        common.main("saves", __doc__, TEXT, measure, "at most 2 minutes: without 2 GB and other savers", cases=names)
