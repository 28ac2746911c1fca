"""The ranks of benchmarks/steady_state.py: blocks of steps of a run with everything on, or of a bare DDP loop.

Each connects to ADDRESS, says who it is, and makes the blocks of steps that it is told to make.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EVALUATED_EVERY = 16, 100


class Blocks:
    """Begins and ends blocks between two steps, and counts what they took."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 0
        self._counter: Instructions | None = None
        #: Seconds that each step waits, as a step on a GPU does.
        self.pause = 0.0

    def over(self) -> bool:
        """Between two steps: ends a block and waits for the next one. True when there is no more."""
        if self._left:
            self._left -= 1
            return False
        if self._counter is not None or self.pause:
            self._connection.send(self._ended())
        self._counter, self.pause = None, 0.0
        command = self._connection.recv()
        if command is None:
            return True
        dist.barrier()
        self._left, self.pause = command["steps"] - 1, command["pause"]
        if command["count"]:
            self._counter = Instructions()
        self._before = now()
        return False

    def _ended(self) -> dict[str, float]:
        found = {name: after - self._before[name] for name, after in now().items()}
        if self._counter is not None:
            found["instructions"] = self._counter.end()
        return found


def now() -> dict[str, float]:
    return {
        "process": time.process_time(),
        "thread": time.thread_time(),
        "wall": time.perf_counter(),
    }


class Instructions:
    """The Python instructions that this thread executes, of any library, apart from the loop's own frame."""

    def __init__(self) -> None:
        self._count = 0
        sys.settrace(self._on_call)

    def end(self) -> int:
        sys.settrace(None)
        return self._count

    def _on_call(self, frame: Any, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_event

    def _on_event(self, _frame: Any, event: str, _argument: Any) -> Any:
        self._count += event == "opcode"
        return self._on_event


def made(layers: int) -> tuple[torch.nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))
    return model, TensorDataset(torch.randn(4096, 64))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if blocks.pause:
        time.sleep(blocks.pause)
    return loss


def bare(blocks: Blocks, layers: int) -> None:
    """A loop as in torch's DDP tutorial."""
    module, dataset = made(layers)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler, drop_last=True)
    for (batch,) in endless(loader, sampler):
        if blocks.over():
            break
        step(model, optimizer, batch, blocks)


def endless(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def ours(blocks: Blocks, layers: int) -> None:
    """The same as a run: logging, timing, the watchdog, saves, the best checkpoint, values of the script."""
    import clusterddp

    with clusterddp.init() as ctx:
        module, dataset = made(layers)
        model = ctx.wrap(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = ctx.loader(dataset, batch_size=BATCH)
        progress = {"samples": 0}
        run = ctx.run(model=model, optimizer=optimizer, loader=loader, best="accuracy", script_state=progress)
        for (batch,) in run.steps(10**9):
            if blocks.over():
                run.finish()
                continue
            if run.every(steps=EVALUATED_EVERY):
                run.log(accuracy=0.5)
            loss = step(model, optimizer, batch, blocks)
            progress["samples"] += BATCH
            run.log(loss=loss, reduce="mean")
            run.log(lr=0.01, grad_norm=loss)


def main() -> None:
    """Who it is, ``ours`` or ``bare``, and the layers of its model."""
    address, who, layers = sys.argv[1:]
    torch.set_num_threads(1)
    if who == "bare":
        dist.init_process_group("gloo")
    with Client(address) as connection:
        connection.send((who, int(os.environ["RANK"])))
        {"ours": ours, "bare": bare}[who](Blocks(connection), int(layers))
    if who == "bare":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
