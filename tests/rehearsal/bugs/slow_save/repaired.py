"""Super-resolution of short signals. Every checkpoint is also copied to the archive, which is slow."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

LOCAL, ARCHIVE = "scratch", "archive"
STEPS, INTERVAL = 40, 20
ARCHIVE_SECONDS = 4.0  # a tape robot or an object store

interrupted = [False]


def interrupt(*_):
    interrupted[0] = True


def copy_to_archive(path):
    """Copies the file in parts, at the speed of the archive."""
    with open(path, "rb") as file:
        content = file.read()
    target = os.path.join(ARCHIVE, "checkpoint.pt")
    parts = 40
    with open(target + ".part", "wb") as file:
        for part in range(parts):
            file.write(content[len(content) * part // parts : len(content) * (part + 1) // parts])
            time.sleep(ARCHIVE_SECONDS / parts)
    os.replace(target + ".part", target)


def save(model, optimizer, step):
    path = os.path.join(LOCAL, "checkpoint.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
    os.replace(path + ".new", path)
    if not interrupted[0]:
        copy_to_archive(path)


def main():
    signal.signal(signal.SIGTERM, interrupt)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for folder in (LOCAL, ARCHIVE):
        os.makedirs(folder, exist_ok=True)
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(1, 16, 5, padding=2), torch.nn.ReLU(), torch.nn.Upsample(scale_factor=4),
        torch.nn.Conv1d(16, 1, 5, padding=2),
    )  # fmt: skip
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    if os.path.exists(os.path.join(LOCAL, "checkpoint.pt")):
        checkpoint = torch.load(os.path.join(LOCAL, "checkpoint.pt"))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
    dist.barrier()

    while step < STEPS:
        t = torch.linspace(0, 1, 64)
        frequency = 1 + 9 * torch.rand(16, 1, 1, generator=torch.Generator().manual_seed(rank + 50 * step))
        fine = torch.sin(6.28 * frequency * t)
        loss = F.mse_loss(parallel(fine[..., ::4]), fine)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        seen = torch.tensor(interrupted, dtype=torch.int32)
        dist.all_reduce(seen)
        if rank == 0 and (seen.item() or step % INTERVAL == 0):
            save(model, optimizer, step)
        if seen.item():
            return 143
    return 0


if __name__ == "__main__":
    result = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(result)
