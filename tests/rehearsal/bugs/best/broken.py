"""Linear regression with large steps. The model with the best validation loss is kept in best.pt."""

import os
import signal
import sys

import torch
import torch.distributed as dist


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        value = (model(x) - y).square().mean().item()
    model.train()
    return value


def atomic_save(content, path):
    torch.save(content, f"{path}.saving")
    os.replace(f"{path}.saving", path)


class Preempted(Exception):
    pass


def train():
    rank = dist.get_rank()
    preempted = torch.zeros((), dtype=torch.int32)
    signal.signal(signal.SIGTERM, lambda *_: preempted.fill_(1))

    torch.manual_seed(3)
    truth = torch.randn(24, 1)
    val_x = torch.randn(200, 24)
    val_y = val_x @ truth + torch.randn(200, 1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)

    step, best = 0, float("inf")
    if os.path.exists("ckpt/latest.pt"):
        saved = torch.load("ckpt/latest.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    elif rank == 0:
        os.makedirs("ckpt", exist_ok=True)
    dist.barrier()

    def checkpoint():
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        atomic_save(state, "ckpt/latest.pt")

    while step < 60:
        g = torch.Generator().manual_seed(77 * step + rank)
        x = torch.randn(16, 24, generator=g)
        y = x @ truth + torch.randn(16, 1, generator=g)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        step += 1

        if rank == 0 and step % 4 == 0:
            score = validate(model.module, val_x, val_y)
            if score < best:
                best = score
                atomic_save({"model": model.module.state_dict(), "step": step, "score": score}, "ckpt/best.pt")
        anyone = preempted.clone()
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
        if rank == 0 and (anyone or step % 12 == 0):
            checkpoint()
        if anyone:
            raise Preempted


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train()
        code = 0
    except Preempted:
        code = 143
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(code)
