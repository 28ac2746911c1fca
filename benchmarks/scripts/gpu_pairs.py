"""Ranks of the cases in gpu_check/pairs.py: ``gpu_pairs.py MODE FILE``, under ``submit --local``.

"overlap": rank 0 writes when the first bucket is ready, as a share of the backward, under DDP and under ctx.wrap().
"killed": in the first attempt, rank 1 is killed while rank 0 waits in an all-reduce for it. "absent": in the first
attempt, rank 1 never joins the others.
"""

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import clusterddp

MODE, FILE = sys.argv[1], Path(sys.argv[2])
WIDTH, HALF, REPETITIONS, STEPS = 512, 8, 33, 8
FIRST = not FILE.with_suffix(".begun").exists()

if MODE == "absent" and FIRST and os.environ["RANK"] == "1":
    FILE.with_suffix(".begun").touch()
    torch.distributed.init_process_group = lambda *_, **__: time.sleep(3600)
ctx = clusterddp.init(seed=1)


class DecoderFirst(torch.nn.Module):
    """Registers first what it uses last."""

    def __init__(self):
        super().__init__()
        self.decoder, self.encoder = (
            torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(HALF)) for _ in range(2)
        )

    def forward(self, x):
        for layer in (*self.encoder, *self.decoder):
            x = layer(x).tanh()
        return x


class Timed:
    """When each bucket of a model is ready. On a device, by its own clock."""

    def __init__(self, model):
        self._model, self._at, self.shares = model, [], []
        model.register_comm_hook(None, self._ready)

    def _ready(self, _, bucket):
        self._at.append(self._now())
        done = torch.futures.Future(devices=[ctx.device] if ctx.device.type == "cuda" else None)
        done.set_result(bucket.buffer())
        return done

    def _now(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def backward(self, x):
        loss = self._model(x).square().mean()
        self._at.clear()
        began = self._now()
        loss.backward()
        ended = self._now()
        torch.cuda.synchronize()
        self.shares.append(began.elapsed_time(self._at[0]) / began.elapsed_time(ended))


def overlap():
    options = {"bucket_cap_mb": 2}
    sides = {
        "DDP": Timed(DistributedDataParallel(DecoderFirst().to(ctx.device), **options)),
        "ours": Timed(ctx.wrap(DecoderFirst(), **options)),
    }
    x = torch.randn(256, WIDTH, device=ctx.device)
    for number in range(REPETITIONS):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            sides[name].backward(x)
    if ctx.rank == 0:
        # The first backward is not like the others: buckets are made again after it.
        FILE.write_text(json.dumps({name: statistics.median(side.shares[3:]) for name, side in sides.items()}))


def train():
    model = ctx.wrap(DecoderFirst())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = ctx.run(model=model, optimizer=optimizer)
    for _ in run.steps(STEPS):
        loss = model(torch.randn(4, WIDTH, device=ctx.device)).square().mean()
        if MODE == "killed" and FIRST and run.step == 3 and ctx.rank == 1:
            FILE.with_suffix(".begun").touch()
            time.sleep(1)  # rank 0 is in the all-reduce by then
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


overlap() if MODE == "overlap" else train()
