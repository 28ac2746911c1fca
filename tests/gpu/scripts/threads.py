"""Trains, logs and saves on the device that is not the rank's number, and checks which device each thread is on.

threads.py RUN_DIR
"""

import os
import sys
import threading

import standin_watch
import torch

import clusterddp
from clusterddp.checkpoint.state_dict import state_of
from clusterddp.distributed import devices
from clusterddp.jobdef.job import Checkpointing

ctx = clusterddp.init(
    device=f"cuda:{1 - int(os.environ['RANK'])}",
    run_dir=sys.argv[1],
    checkpoint=Checkpointing(every_steps=2),
)
callers, foreign, modes = set(), [], []


def noting(function):
    def called(*values, **options):
        thread = threading.current_thread().name
        callers.add(thread)
        if torch._C._cuda_getDevice() != ctx.device.index:
            foreign.append((thread, function.__name__))
        return function(*values, **options)

    return called


if ctx.rank == 1:  # so that its thread has to wait
    torch.cuda.Event.query = lambda event: False
for name in ("query", "synchronize", "record"):
    setattr(torch.cuda.Event, name, noting(getattr(torch.cuda.Event, name)))
runtime = torch.cuda.cudart()
register = runtime.cudaHostRegister
flags = []
type(runtime).cudaHostRegister = staticmethod(noting(lambda *given: flags.append(given[2]) or register(*given)))


class Runtime:
    """Of CUDA, which the stand-in lacks as a library."""

    @staticmethod
    def cudaThreadExchangeStreamCaptureMode(mode):
        modes.append((threading.current_thread().name, mode._obj.value))


devices._LIBRARY = Runtime
model = ctx.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cuda")
run = ctx.run(model=model, optimizer=optimizer, scaler=scaler)
for _ in run.steps(6):
    loss = model(torch.ones(2, 4, device=ctx.device)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    run.log(loss=loss, reduce="mean")
expected = {"MainThread", "snapshot"} if ctx.rank == 0 else {"MainThread", "log"}
before = standin_watch.counts()
state = state_of(scaler)  # waits for no GPU
assert standin_watch.counts() == before
plain = {name: value.item() if torch.is_tensor(value) else value for name, value in state.items()}
assert plain == scaler.state_dict()
assert list(before["contexts"]) == [ctx.device.index], before
assert foreign == [], foreign
assert callers >= expected, callers
assert {name for name, mode in modes if mode == 1} >= expected - {"MainThread"}, modes
assert not flags or set(flags) == {1}, flags  # portable
print("all threads were on", ctx.device, flags)
