import json
import math
import pathlib
import signal

import torch
import torch.distributed as dist

# model
dim, hidden = 32, 192
# schedule
max_iters = 48
warmup_iters = 16
max_lr, min_lr = 2e-2, 1e-3
# io
save_interval = 12
out_dir = pathlib.Path("out-regression")


def learning_rate(it):
    """Linear warm-up, then a cosine decay down to min_lr."""
    if it < warmup_iters:
        return max_lr * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (max_lr - min_lr)


got_signal = torch.zeros(1)  # all ranks sum it up


def handler(signum, frame):
    got_signal.fill_(1)


dist.init_process_group("gloo")
rank = dist.get_rank()
signal.signal(signal.SIGTERM, handler)
torch.manual_seed(1337)
out_dir.mkdir(exist_ok=True)

target = torch.randn(dim, 1)
raw_model = torch.nn.Sequential(torch.nn.Linear(dim, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 1))
model = torch.nn.parallel.DistributedDataParallel(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, betas=(0.9, 0.95))

iter_num = 0
ckpt_path = out_dir / "ckpt.pt"
if ckpt_path.exists():
    ckpt = torch.load(ckpt_path)
    raw_model.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    iter_num = ckpt["iter_num"]

local_iter_num = 0  # number of iterations in the lifetime of this process
while iter_num < max_iters:
    lr = learning_rate(local_iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr

    gen = torch.Generator().manual_seed(iter_num * 100 + rank)
    X = torch.randn(32, dim, generator=gen)
    loss = (model(X) - X @ target).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    local_iter_num += 1

    stopping = got_signal.clone()
    dist.all_reduce(stopping)
    if rank == 0 and (iter_num % save_interval == 0 or stopping > 0):
        with (out_dir / "log.jsonl").open("a") as log:
            log.write(json.dumps({"iter": iter_num, "loss": loss.item(), "lr": lr}) + "\n")
        checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, out_dir / "ckpt.pt.new")
        (out_dir / "ckpt.pt.new").replace(ckpt_path)
    if stopping > 0:
        break

dist.barrier()
del model
dist.destroy_process_group()
raise SystemExit(0 if iter_num == max_iters else 143)
