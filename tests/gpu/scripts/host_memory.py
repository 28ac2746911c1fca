"""Saves or restores a model and its optimizer, and prints the host memory that a restore needs.

host_memory.py RUN_DIR [NAME OF THE GPU]

In shares of the optimizer's state: what is resident and this process's own when the optimizer begins to load.
"""

import re
import sys
from pathlib import Path

import torch
from torch import nn

import clusterddp


def own_memory():
    """Without that of the pretend devices."""
    resident = 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    return resident - torch.cuda.memory_allocated()


if sys.argv[2:]:
    torch.cuda.get_device_properties(0).__class__.name = property(lambda _: sys.argv[2], lambda *_: None)
ctx = clusterddp.init(run_dir=sys.argv[1])
model = ctx.wrap(nn.Linear(1 << 11, 1 << 11))
optimizer = torch.optim.Adam(model.parameters())
size = 2 * sum(parameter.nbytes for parameter in model.parameters())
before = own_memory()


def report(*_):
    print("needs", (own_memory() - before) / size, flush=True)


optimizer.register_load_state_dict_pre_hook(report)
run = ctx.run(model=model, optimizer=optimizer)
for _ in run.steps(2):
    if run.step == 1 and ctx.attempt == 0:
        run.stop("saved")
    model(torch.ones(1, 1 << 11, device=ctx.device)).sum().backward()
    optimizer.step()
steps = {state["step"].device.type for state in optimizer.state.values()}
assert steps == {"cpu"} and optimizer.state[model.module.weight]["exp_avg"].device == ctx.device
