"""What clusterddp does in each step, counted in Python instructions, of which each run executes the same number.

A limit that is exceeded: is the work needed in each step, and by the training thread? If so, raise the limit, once
`make bench-step-timing` has shown what it costs. The limits are the counts of Python 3.11, as other versions compile
to other instructions; there they are a fifth higher.
"""

from __future__ import annotations

import math
import sys
from collections import Counter

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import clusterddp
from clusterddp.training.log.reduction import Sender
from clusterddp.training.log.values import Values
from clusterddp.training.timing import BATCH, SAMPLE_STEPS
from tests.instructions import Instructions

#: The first steps allocate and connect. Some work is done every BATCH or SAMPLE_STEPS steps.
WARM, STEPS = 40, math.lcm(BATCH, SAMPLE_STEPS)
SCALE = 1.0 if sys.version_info[:2] == (3, 11) else 1.2
TIMING, LOGGING, ALL = (SCALE * count for count in (515, 1115, 2775))
LOGGED_MODULES = ("training/log/", "training/metrics.py", "training/saving.py")
#: On a rank other than 0.
LOGGING_ELSEWHERE = SCALE * 518


def per_step(instructions: Instructions, *modules: str) -> float:
    """The instructions of these modules, and of folders of modules, in each step."""
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
    assert TIMING / 2 < per_step(made, "training/timing.py") <= TIMING


def test_logging_four_values_takes_few_instructions(made: Instructions) -> None:
    """In two calls, one of them with ``reduce``; two values are tensors. With the decision whether to save."""
    assert LOGGING / 2 < per_step(made, *LOGGED_MODULES) <= LOGGING


def test_a_step_takes_few_instructions_of_clusterddp(made: Instructions) -> None:
    """All but the loader's, most of which are those of torch's DataLoader."""
    others = {name.partition("/")[0] for name in made.by_module} - {"data"}
    assert ALL / 2 < per_step(made, *others) <= ALL


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
    assert LOGGING_ELSEWHERE / 2 < per_step(instructions, "training/log/") <= LOGGING_ELSEWHERE


def test_the_count_includes_what_a_module_calls_and_leaves_a_debuggers_trace_function_alone() -> None:
    """Otherwise a call of another library would cost nothing."""
    before = sys.gettrace()
    counts: Counter[str] = Counter()
    for values in ({"a": 1.0}, {"a": 1.0, "b": torch.tensor(1.0)}):
        with Instructions() as instructions:
            instructions.counting = True
            Values().add(values)
        counts[str(len(values))] = instructions.by_module["training/log/values.py"]
    assert 20 < counts["1"] < counts["2"] < 20 * counts["1"]
    assert sys.gettrace() is before
