"""Checks whether functions that train on a device can resume exactly: check_resume.py FOLDER"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from clusterddp.runs import resume_check
from clusterddp.runs.resume_check import compare
from tests.ranks.test_check_resume import TrialsHere


def train(ctx, generator=None):
    torch.manual_seed(1)
    model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)))
    optimizer = torch.optim.Adam(model.parameters())
    loader = ctx.loader(TensorDataset(torch.rand(20, 3)), batch_size=4)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for (x,) in run.steps(12):
        noise = torch.rand(4, 3, device=ctx.device, generator=generator)
        loss = model(x + noise).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)


def with_a_generator_that_is_not_saved(ctx):
    train(ctx, torch.Generator(ctx.device).manual_seed(2))


folder = Path(sys.argv[1])
for function in (train, with_a_generator_that_is_not_saved):
    (folder / function.__name__).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        made = compare(TrialsHere(function, folder / function.__name__, patch, "cuda"), 11)
    print(resume_check.failure(made) if made.differs else resume_check.success(made))
