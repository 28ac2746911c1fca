"""As nanoGPT: its own process group, one checkpoint that is overwritten, TERM ends it.

The arguments: the folder, the number of steps, and the step of the first attempt whose save takes until rank 1 is gone.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import save
from torch.nn.parallel import DistributedDataParallel


class Slow:
    """Takes as long to be saved as rank 1 exists."""

    def __init__(self, peer):
        self.peer = peer

    def __reduce__(self):
        print("a slow save begins", flush=True)
        while os.path.exists(f"/proc/{self.peer}"):
            time.sleep(0.01)
        return str, ()


def main():
    out_dir, max_iters, slow = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    master = dist.get_rank() == 0
    out_dir.mkdir(exist_ok=True)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    path = out_dir / "ckpt.pt"
    first = 0
    if path.exists():
        checkpoint = torch.load(path, weights_only=False)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["iter_num"]
        print(f"Resuming training from {out_dir} at iter {first}", flush=True)
    for iter_num in range(first, max_iters):
        for _ in range(2):  # accumulates gradients
            model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if master:
            print(f"iter {iter_num}: loss 0.5", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num + 1}
            if iter_num == slow and os.environ["CLUSTERDDP_ATTEMPT"] == "0":
                state["config"] = Slow(pids[1])
            save(state, path)
    dist.destroy_process_group()


main()
