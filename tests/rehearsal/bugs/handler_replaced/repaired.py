"""Quantile regression; progress goes to the laboratory's run log."""

import os
import signal
import sys

import runlog
import torch
import torch.distributed as dist

TARGET_STEPS = 45
SAVE_EACH = 15
save_path = os.path.join("save", "quantiles.tar")
asked_to_stop = False


def ask_to_stop(signum, frame):
    global asked_to_stop
    asked_to_stop = True


def pinball(prediction, target, quantiles):
    error = target - prediction
    return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = runlog.init(project="quantiles", enabled=rank == 0)
    signal.signal(signal.SIGTERM, ask_to_stop)

    torch.manual_seed(77)
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    module = torch.nn.Sequential(torch.nn.Linear(6, 128), torch.nn.Softplus(), torch.nn.Linear(128, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    finished_steps = 0
    if os.path.exists(save_path):
        restored = torch.load(save_path)
        module.load_state_dict(restored["module"])
        optimizer.load_state_dict(restored["optimizer"])
        finished_steps = restored["finished_steps"]
    elif rank == 0:
        os.makedirs("save", exist_ok=True)
    dist.barrier()

    code = 0
    for step in range(finished_steps, TARGET_STEPS):
        g = torch.Generator().manual_seed(500 * rank + step)
        x = torch.randn(80, 6, generator=g)
        y = x.sum(dim=1, keepdim=True) + x[:, :1].exp() * torch.randn(80, 1, generator=g)
        loss = pinball(ddp(x), y, quantiles)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.log(step=step + 1, loss=loss.item())

        stop = torch.tensor(asked_to_stop).int()
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if rank == 0 and (stop or (step + 1) % SAVE_EACH == 0):
            content = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "finished_steps": step + 1}
            torch.save(content, save_path + "_")
            os.replace(save_path + "_", save_path)
        if stop:
            code = 128 + signal.SIGTERM
            break
    log.finish()
    return code


if __name__ == "__main__":
    exit_code = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(exit_code)
