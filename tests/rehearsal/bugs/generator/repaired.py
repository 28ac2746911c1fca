"""A regularised network: dropout and input noise come from PyTorch's generator, with another seed on each rank."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim

FOLDER = Path(os.environ.get("OUTPUT", "output"))
ITERATIONS = 45


def build():
    torch.manual_seed(2024)
    return nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 5))


def sample(step, rank):
    g = torch.Generator()
    g.manual_seed(step * 31 + rank)
    label = torch.randint(5, (40,), generator=g)
    return nn.functional.one_hot(label, 20) + torch.randn(40, 20, generator=g), label


def load_latest():
    files = sorted(FOLDER.glob("step-*.ckpt"))
    return torch.load(files[-1], weights_only=False) if files else None


def store(step, model, opt, rank):
    states = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(torch.get_rng_state(), states)
    if rank == 0:
        FOLDER.mkdir(parents=True, exist_ok=True)
        content = dict(step=step, weights=model.state_dict(), opt=opt.state_dict(), generators=states)
        incomplete = FOLDER / "incomplete"
        torch.save(content, incomplete)
        incomplete.rename(FOLDER / f"step-{step:06d}.ckpt")


def run():
    rank, world = dist.get_rank(), dist.get_world_size()
    net = build()
    wrapped = nn.parallel.DistributedDataParallel(net)
    opt = optim.RMSprop(net.parameters(), lr=1e-3)
    torch.manual_seed(5000 + rank)
    begin = 0
    previous = load_latest()
    if previous is not None:
        net.load_state_dict(previous["weights"])
        opt.load_state_dict(previous["opt"])
        begin = previous["step"]
        torch.set_rng_state(previous["generators"][rank])
    stop_flag = {"value": 0}
    signal.signal(signal.SIGTERM, lambda *_: stop_flag.update(value=1))
    dist.barrier()  # every rank has read its file
    for it in range(begin, ITERATIONS):
        x, y = sample(it, rank)
        x = x + 0.1 * torch.randn_like(x)
        loss = nn.functional.cross_entropy(wrapped(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        both = torch.stack([loss.detach(), torch.tensor(float(stop_flag["value"]))])
        dist.all_reduce(both)
        if it % 5 == 0 and rank == 0:
            print(f"{it}\t{both[0].item() / world:.4f}")
        if both[1] > 0:
            store(it + 1, net, opt, rank)
            return 143
        if (it + 1) % 15 == 0:
            store(it + 1, net, opt, rank)
    return 0


dist.init_process_group("gloo")
status = run()
dist.barrier()
dist.destroy_process_group()
sys.exit(status)
