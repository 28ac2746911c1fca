"""Predicts the next value of a chaotic map. One file per checkpoint; the newest one is resumed."""

import os
import re
import signal
import sys

import torch
import torch.distributed as dist

CKPT_DIR = "ckpt"
N_STEPS = 48
SAVE_FREQ = 8


def newest():
    steps = [int(m.group(1)) for m in map(re.compile(r"state_(\d+)\.pt$").match, os.listdir(CKPT_DIR)) if m]
    return max(steps, default=None)


def path_of(step):
    return f"{CKPT_DIR}/state_{step}.pt"


def save(state, step):
    torch.save(state, path_of(step))


def series(step, rank):
    x = torch.rand(64, generator=torch.Generator().manual_seed(step * 1009 + rank))
    values = [x]
    for _ in range(5):
        values.append(3.9 * values[-1] * (1 - values[-1]))
    return torch.stack(values[:-1], dim=1), values[-1].unsqueeze(1)


class Stop:
    requested = False

    @classmethod
    def handler(cls, *_):
        cls.requested = True


def main():
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    core = torch.nn.Sequential(torch.nn.Linear(5, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(core)
    optim = torch.optim.NAdam(core.parameters(), lr=5e-3)
    step = 0
    latest = newest()
    if latest is not None:
        state = torch.load(path_of(latest))
        core.load_state_dict(state["core"])
        optim.load_state_dict(state["optim"])
        step = latest
    dist.barrier()
    while step < N_STEPS:
        x, y = series(step, rank)
        loss = (ddp(x) - y).abs().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        stop = torch.tensor(1.0 if Stop.requested else 0.0)
        dist.all_reduce(stop)
        if rank == 0 and (stop > 0 or step % SAVE_FREQ == 0):
            save({"core": core.state_dict(), "optim": optim.state_dict()}, step)
        if stop > 0:
            return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, Stop.handler)
    dist.init_process_group("gloo")
    os.makedirs(CKPT_DIR, exist_ok=True)
    code = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(code)
