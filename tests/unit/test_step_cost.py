"""What clusterddp does in each step, counted in Python instructions, of which each run executes the same number.

A limit that is exceeded: is the work needed in each step, and by the training thread? If so, raise the limit, once
`make bench BENCH=steady-state` has shown what it costs. The limits are the counts of Python 3.11, as other versions
compile to other instructions; there they are a fifth higher.
"""

from __future__ import annotations

import gc
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import clusterddp
from clusterddp.checkpoint.gradients import Gradients
from clusterddp.data import randomness
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import AT_ONCE, Shuffled
from clusterddp.data.training_loader import training_loader
from clusterddp.training.log_reduction import Sender
from clusterddp.training.logged_values import Values
from clusterddp.training.step_timing import BATCH, SAMPLE_STEPS
from tests.instructions import Instructions

#: The first steps allocate and connect. Some work is done every BATCH or SAMPLE_STEPS steps.
WARM, STEPS = 40, math.lcm(BATCH, SAMPLE_STEPS)
SCALE = 1.0 if sys.version_info[:2] == (3, 11) else 1.2
TIMING, LOGGING, ALL = (SCALE * count for count in (515, 1005, 2150))
LOGGED_MODULES = ("training/log", "training/metrics.py", "training/saving.py", "training/best_checkpoint.py")
#: Of each sample that is read without workers, of a batch of them, and more of each sample that draws from torch.
SAMPLE_READ, BATCH_READ, SAMPLE_SEEDED = (SCALE * count for count in (19, 680, 63))
#: The memory that is held is compared after so many steps, once queues and statistics have their length.
GROWN_AFTER, GROWTH_STEPS = 400, 1600
#: On a rank other than 0.
LOGGING_ELSEWHERE = SCALE * 480


def per_step(instructions: Instructions, *modules: str) -> float:
    """The instructions of these modules, and of those whose names begin so, in each step."""
    counted = {name: count for name, count in instructions.by_module.items() if name.startswith(modules)}
    print({name: count / STEPS for name, count in counted.items() if count})
    return sum(counted.values()) / STEPS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Instructions:
    """What the steps of a run of one rank execute, which is rank 0's part."""
    with clusterddp.init(run_dir=tmp_path_factory.mktemp("cost") / "run", device="cpu") as ctx:
        model = ctx.wrap(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=4)
        run = ctx.run(model=model, optimizer=optimizer, loader=loader)
        with Instructions() as instructions:
            for (batch,) in run.steps(WARM + STEPS + 1):
                instructions.counting = WARM <= run.step < WARM + STEPS
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss, accuracy=0.5, reduce="mean")
                run.log(lr=0.1, grad_norm=loss)
    return instructions


def test_the_timing_of_a_step_takes_few_instructions(made: Instructions) -> None:
    assert TIMING / 2 < per_step(made, "training/step_timing.py") <= TIMING


def test_logging_four_values_takes_few_instructions(made: Instructions) -> None:
    """In two calls, one of them with ``reduce``; two values are tensors. With the decision whether to save."""
    assert LOGGING / 2 < per_step(made, *LOGGED_MODULES) <= LOGGING


def test_a_step_takes_few_instructions_of_clusterddp(made: Instructions) -> None:
    """All but the loader's, most of which are those of torch's DataLoader."""
    others = {name.partition("/")[0] for name in made.by_module} - {"data"}
    assert ALL / 2 < per_step(made, *others) <= ALL


def counted_gradients(layers: int) -> int:
    """The instructions that notice the gradients of three steps."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients({"model": model, "optimizer": optimizer}, world_size=1)
    with Instructions() as instructions:
        instructions.counting = True
        for _ in range(3):
            gradients.begin_step()
            model(torch.ones(1, 2)).sum().backward()
            gradients.stepped(optimizer)
    return instructions.by_module.total()


def test_a_model_with_more_parameters_takes_no_more_instructions_of_clusterddp() -> None:
    assert 0 < counted_gradients(layers=2) == counted_gradients(layers=50)


def test_the_memory_that_python_holds_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    """Counted in blocks of Python's allocator, of which nearly every object has one."""
    held = []
    with clusterddp.init(run_dir=tmp_path / "run", device="cpu") as ctx:
        model = ctx.wrap(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=4)
        progress = {"samples": 0}
        run = ctx.run(model=model, optimizer=optimizer, loader=loader, best="score", script_state=progress)
        for (batch,) in run.steps(GROWN_AFTER + GROWTH_STEPS + 1):
            if run.step in (GROWN_AFTER, GROWN_AFTER + GROWTH_STEPS):
                gc.collect()
                held.append(sys.getallocatedblocks())
            if run.every(steps=200):
                run.log(score=0.5)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress["samples"] += 4
            run.log(loss=loss, accuracy=0.5, reduce="mean")
    assert held[1] - held[0] < GROWTH_STEPS / 4


def test_logging_on_another_rank_takes_fewer() -> None:
    values, sender = Values(keeps_own=False), Sender(HashStore(), rank=1)
    loss = torch.tensor(0.5)
    with Instructions() as instructions:
        for step in range(WARM + STEPS):
            instructions.counting = step >= WARM
            values.add({"loss": loss, "accuracy": 0.5}, "mean")
            values.add({"lr": 0.1, "grad_norm": loss})
            sender.add(step, values.take(), now=False)
    sender.close()
    assert LOGGING_ELSEWHERE / 2 < per_step(instructions, "training/log") <= LOGGING_ELSEWHERE


class Drawing:
    """Samples that draw from torch's generator."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.rand(()),)


def batch_read(dataset: Any, batch_size: int) -> float:
    """The instructions of a batch, read without workers."""
    loader = Loader(dataset, batch_size, order=Shuffled(), seed=0, rank=1, world_size=2)
    batches = training_loader(loader, SimpleNamespace(rank=0, store=HashStore()), 0, True).batches(0, lambda: None)  # type: ignore[arg-type]
    together = AT_ONCE // batch_size
    with randomness.preserved(), Instructions() as instructions:
        for number in range(3 * together):
            instructions.counting = together <= number < 2 * together
            next(batches)
    return instructions.by_module.total() / together


def test_a_batch_without_workers_takes_few_instructions() -> None:
    """Drawing it from the order, watching the generators, and collating; to read a sample from a list takes none."""
    plain, drawing = [(torch.zeros(2), torch.zeros(()))] * 10**6, Drawing()
    small, large, seeded = batch_read(plain, 64), batch_read(plain, 1024), batch_read(drawing, 64)
    per_sample = (large - small) / (1024 - 64)
    assert SAMPLE_READ / 2 < per_sample <= SAMPLE_READ
    assert BATCH_READ / 2 < small - 64 * per_sample <= BATCH_READ
    assert SAMPLE_SEEDED / 2 < (seeded - small) / 64 <= SAMPLE_SEEDED
