"""The steps of a script without ``ctx.run()``: seen at torch's optimizers, or reported by the script's own calls.

torch calls a hook after each step of any optimizer. That is enough for heartbeats, step times and stragglers without a
line in the script. Where a step of the script begins, its number, and what else the script does between two steps
remain unknown. Steps are therefore counted from 0 in each attempt, and the watchdog allows an evaluation or a save of
the usual length anywhere (``Pace``).

Steps inside ``torch.compile`` or a replayed CUDA graph, in the backward pass, and in other processes are not seen.
"""

from __future__ import annotations

import gc
import os
import stat
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clusterddp.history.beginnings import Phase
from clusterddp.history.steps import Apart, Stalled, StepsSeen
from clusterddp.messages.reports import Alive
from clusterddp.process import at_exit, cancel_at_exit
from clusterddp.reporter import say
from clusterddp.training import settings
from clusterddp.training.heartbeat import WatchedSteps, begin_heartbeat
from clusterddp.training.step_timing import step_times
from clusterddp.worker import rank_process
from clusterddp.worker.rank_process import RankProcess

#: The counted optimizer is replaced by one that makes this many steps without it, because training has moved on.
MOVED_ON = 100
#: A script that resumes has read its checkpoint by this step. torch's distributed checkpoint makes one step of the
#: optimizer before it loads the optimizer's state (``_init_optim_state``).
LOADED = 2
#: By this one also a script has that looks for a learning rate first, which takes 100 steps in Lightning, fastai and
#: torch-lr-finder.
SEARCHED = 200


class ScriptSteps:
    """One per ``process`` (``current``). ``step_done`` and the hook are for the thread that trains."""

    def __init__(self, process: RankProcess, device: torch.device) -> None:
        self._process = process
        read = settings.of_rank(process)
        self._rank, self._world_size, self._device = read.ranks.rank, read.ranks.world_size, device
        #: Steps in this attempt, and calls of the hook.
        self.steps = self._boundaries = 0
        self._begun = False
        #: The script's process group, held until the process exits. A group of gloo that is freed waits for its thread,
        #: which may wait for the GIL that the freeing thread holds, to free a tensor (torch 2.13).
        self._group: dist.ProcessGroup | None = None
        self._leader: weakref.ref[Any] | None = None
        self._others: Counter[int] = Counter()
        self._thread = threading.get_ident()
        self._times = step_times(_ddp_modules(), device, read.ranks.world_size)
        if self._rank == 0:
            self._times.on_stall = lambda seconds: process.report(Stalled(seconds=seconds))
        watched = WatchedSteps(lambda: self._boundaries, lambda: self.steps, device, patient=True)
        self.heartbeat = begin_heartbeat(process, read, read.attempt or 0, watched)
        self.heartbeat.timed = self._add_to
        process.saves.around = self._saving
        at_exit(self.close)

    def by_calls(self) -> None:
        """From now on the script's calls of ``step_done`` are the steps, rather than those of optimizers."""
        self._process.optimizers.end()
        self.steps = 0

    def step_done(self) -> None:
        """A step of the script is done."""
        self._boundaries += 1
        self._count()

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped. Of several (GANs), the first one's steps count, as each has its turn in a step.

        A different one takes its place if the first was deleted, or has not stepped for long.
        """
        if threading.get_ident() != self._thread:
            return
        self._boundaries += 1
        leader = self._leader() if self._leader is not None else None
        if leader is optimizer:
            self._others.clear()
        elif leader is None or self._moved_on(optimizer):
            self._leader = weakref.ref(optimizer)
        else:
            return
        self._count()

    def _moved_on(self, optimizer: torch.optim.Optimizer) -> bool:
        self._others[id(optimizer)] += 1
        return self._others[id(optimizer)] > MOVED_ON

    def _count(self) -> None:
        self.steps += 1
        self._times.turn()
        if self.steps >= LOADED and (watch := self._process.resume_watch) is not None:
            watch.end(final=self.steps >= SEARCHED)
        if not self._begun:
            self._begun = True
            self._begin()

    def _begin(self) -> None:
        """The first step was seen."""
        self.heartbeat.begin()
        self._group = _group()
        if self._rank != 0:
            return
        size = 1 if self._group is None else self._group.size()
        if size != self._world_size:
            self._process.report(Apart(ranks=self._world_size, group=size))
        self._process.report(StepsSeen(out=_output_size(1), err=_output_size(2)))
        self._process.report(Phase(phase="training"))

    def _add_to(self, beat: Alive) -> Alive:
        """The same figures as for ``ctx.run()``, without the phases that a step of the script is not divided into."""
        beat = self._times.add_to(beat)
        assert beat.timing is not None
        steps, _data, own, wait, _save = beat.timing
        return replace(beat, timing=(steps, None, own, wait, None), made=self.steps)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """A save by ``torch.save`` is no part of a step, and no hang, however long it takes. One in a different thread
        does not hold up the training."""
        if threading.get_ident() != self._thread:
            yield
            return
        with self.heartbeat.pause(), self._times.aside():
            yield

    def close(self) -> None:
        """Reports the last figures at the end of the script."""
        self._process.optimizers.end()
        self._process.saves.around = nullcontext
        self._times.close()
        self.heartbeat.close()


def _group() -> dist.ProcessGroup | None:
    """The script's process group, if it has made one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _output_size(descriptor: int) -> int | None:
    """The size of an output file of this rank so far, in bytes. ``done: {log: ...}`` searches what follows."""
    with suppress(OSError):  # the script has closed it
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return None


def _ddp_modules() -> list[DistributedDataParallel]:
    """The script's DDP modules. Looks only at types, because looking at an object may run code of the script.

    Takes some 20 ms, once.
    """
    return [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]


def begun(process: RankProcess) -> ScriptSteps | None:
    """The steps of this process, if they are counted."""
    return process.steps if isinstance(process.steps, ScriptSteps) else None


def current(process: RankProcess, device: torch.device | None = None) -> ScriptSteps:
    """The steps of this process, which the first call begins to count. ``device``: where they run. None: on the GPU in
    use, if any."""
    if (steps := begun(process)) is None:
        if device is None:
            used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")
        process.steps = steps = ScriptSteps(process, device)
    return steps


def hand_over(process: RankProcess) -> None:
    """A context begins, which has its own heartbeat and counts the steps itself."""
    process.optimizers.end()
    if (steps := begun(process)) is not None:
        cancel_at_exit(steps.close)
        steps.close()
        process.steps = None


def on_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """For the hook."""
    process = rank_process.current()
    seen = begun(process) or current(process, _device(optimizer))
    if seen._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        process.optimizers.end()
        seen.heartbeat.rest()
        say("the optimizer's step is captured in a CUDA graph, whose replays are not counted. Use `steps: {log: ...}`")
        return
    seen.on_optimizer_step(optimizer)


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
