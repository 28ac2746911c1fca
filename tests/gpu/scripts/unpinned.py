"""A run on a device whose runtime refuses to pin memory, which then keeps the error: unpinned.py RUN_DIR

Snapshots, batches and logged values are copied without it.
"""

import sys
import threading

import torch

import clusterddp
from clusterddp.distributed import devices
from clusterddp.jobdef.job import Checkpointing

INVALID = 1
last, calls = threading.local(), []


def refuse(what):
    def call(*given):
        calls.append(what)
        last.error = INVALID
        return INVALID

    return staticmethod(call)


class Runtime:
    """Of CUDA, which the stand-in lacks as a library."""

    @staticmethod
    def cudaGetLastError():
        found, last.error = getattr(last, "error", 0), 0
        return found


def not_pinned(tensor, *_):
    raise RuntimeError("CUDA error: invalid argument")


def kernel(*_):
    """As torch after each kernel."""
    assert Runtime.cudaGetLastError() == 0


class Seen:
    """Grows, so that each save needs more memory than the one before."""

    def __init__(self):
        self.tensors = []

    def state_dict(self):
        return {"tensors": self.tensors}

    def load_state_dict(self, state):
        self.tensors = state["tensors"]


ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=Checkpointing(every_steps=2))
runtime = type(torch.cuda.cudart())
runtime.cudaHostRegister, runtime.cudaHostUnregister = refuse("register"), refuse("unregister")
devices._LIBRARY, torch.Tensor.pin_memory = Runtime, not_pinned
samples = torch.utils.data.TensorDataset(torch.ones(16, 4))
model = ctx.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_pre_hook(kernel)
seen = Seen()
run = ctx.run(model=model, optimizer=optimizer, seen=seen, loader=ctx.loader(samples, batch_size=2, shuffle=False))
for (x,) in run.steps(6):
    model.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    seen.tensors.append(x)
    run.log(loss=loss)
assert "unregister" not in calls and (ctx.rank or calls.count("register") > 1), calls
kernel()
