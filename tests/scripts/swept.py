"""A small training with an argument to sweep; ``--lr 0`` raises in its third step."""

import argparse
import time

import torch
from torch.utils.data import TensorDataset

import clusterddp
from tests.descent import Descent

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
options = parser.parse_args()

ctx = clusterddp.init()
samples = torch.linspace(0, 1, 640).reshape(40, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = Descent(model, options.lr)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(TensorDataset(samples), batch_size=4))
for (x,) in run.steps(40):
    if options.lr == 0 and run.step == 2:
        raise ValueError("a learning rate of 0")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
    time.sleep(options.pause)
