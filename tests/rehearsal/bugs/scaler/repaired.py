"""Half precision on the CPU with a gradient scaler, after PyTorch's recipe for automatic mixed precision."""

import os
import signal
import sys
from dataclasses import dataclass

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Config:
    total_steps: int = 44
    checkpoint_every: int = 11
    width: int = 96
    lr: float = 0.05
    folder: str = "amp_run"


class Interrupted:
    """True once the process was asked to terminate."""

    def __init__(self):
        self.seen = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, *_):
        self.seen = True

    def on_any_rank(self):
        value = torch.tensor([1 if self.seen else 0])
        distributed.all_reduce(value, op=distributed.ReduceOp.SUM)
        return bool(value.item())


def checkpoint_file(config):
    return os.path.join(config.folder, "state.pt")


def write(config, net, opt, scaler, step):
    os.makedirs(config.folder, exist_ok=True)
    temporary = checkpoint_file(config) + ".incomplete"
    state = {"net": net.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict(), "step": step}
    torch.save(state, temporary)
    os.replace(temporary, checkpoint_file(config))


def read(config, net, opt, scaler):
    if not os.path.exists(checkpoint_file(config)):
        return 0
    state = torch.load(checkpoint_file(config), weights_only=True)
    net.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    scaler.load_state_dict(state["scaler"])
    return state["step"]


def train(config, interrupted):
    rank = distributed.get_rank()
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, config.width), torch.nn.ReLU(), torch.nn.Linear(config.width, config.width),
        torch.nn.ReLU(), torch.nn.Linear(config.width, 1),
    )  # fmt: skip
    ddp = DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), lr=config.lr)
    scaler = torch.amp.GradScaler("cpu", growth_interval=8)
    step = read(config, net, opt, scaler)
    distributed.barrier()
    while step < config.total_steps:
        source = torch.Generator().manual_seed(step * 2 + rank)
        inputs = torch.randn(48, 16, generator=source)
        targets = inputs.sum(dim=1, keepdim=True) * 4
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = ddp(inputs)
            loss = torch.nn.functional.smooth_l1_loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        step += 1
        leave = interrupted.on_any_rank()
        if rank == 0 and (leave or step % config.checkpoint_every == 0):
            write(config, net, opt, scaler, step)
        if leave:
            return False
    return True


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    complete = train(Config(), Interrupted())
    distributed.barrier()
    distributed.destroy_process_group()
    sys.exit(0 if complete else 75)
