"""As nanoGPT: its own process group, and one checkpoint that is overwritten. TERM comes in the middle of a save.

The arguments: the folder, the number of steps, and in which step of the first attempt a save is interrupted.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import save
from torch.nn.parallel import DistributedDataParallel


class Stopped:
    """Sends the stop's signal while it is pickled."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return str, ()


def main():
    out_dir, max_iters, interrupted = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    master = dist.get_rank() == 0
    out_dir.mkdir(exist_ok=True)
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
            if iter_num == interrupted and os.environ["CLUSTERDDP_ATTEMPT"] == "0":
                state["config"] = Stopped()
            save(state, path)
    dist.destroy_process_group()


main()
