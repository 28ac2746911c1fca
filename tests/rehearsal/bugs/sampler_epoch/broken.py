"""Trains on an endless stream of shuffled batches."""

import os
import signal
import time

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

max_steps = 56
log_interval = 8
checkpoint_interval = 16
checkpoint_path = "./last_checkpoint.pth"


def stream(loader, sampler, epoch=0):
    """All batches of all epochs, each epoch in its own order."""
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def synthetic():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 10, generator=g)
    return TensorDataset(x, (x[:, :5].prod(dim=1) + x.sum(dim=1)).unsqueeze(1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    received = []
    signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))

    dataset = synthetic()
    sampler = DistributedSampler(dataset, seed=11)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    torch.manual_seed(11)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(10, 256), torch.nn.ELU(), torch.nn.Linear(256, 1))
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)

    step = 0
    try:
        checkpoint = torch.load(checkpoint_path)
    except FileNotFoundError:
        pass
    else:
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        step = checkpoint["step"]
        print(f"[{rank}] continuing at step {step}")
    dist.barrier()

    batches = stream(loader, sampler)
    for _ in range(step % len(loader)):  # seen before the interruption
        next(batches)

    start = time.perf_counter()
    finished = True
    while step < max_steps:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.huber_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % log_interval == 0:
            print(f"step {step} loss {loss:.4f} ({time.perf_counter() - start:.1f} s)")
        signalled = torch.tensor(len(received))
        dist.all_reduce(signalled)
        if rank == 0 and (signalled or step % checkpoint_interval == 0 or step == max_steps):
            torch.save(
                {
                    "step": step,
                    "model_state_dict": model.state_dict(),
                    "optimizer_state_dict": optimizer.state_dict(),
                },
                checkpoint_path + ".tmp",
            )
            os.replace(checkpoint_path + ".tmp", checkpoint_path)
        if signalled:
            finished = False
            break
    return finished


if __name__ == "__main__":
    complete = main()
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(0 if complete else 1)
