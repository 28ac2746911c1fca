"""Physics-informed fit of a damped oscillator; the job's time is limited, so it saves itself on SIGTERM."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class OscillatorRun:
    steps = 48
    interval = 12
    file = "oscillator.ckpt"

    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(31)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 96), torch.nn.Tanh(), torch.nn.Linear(96, 96), torch.nn.Tanh(), torch.nn.Linear(96, 1)
        )
        self.control = dist.new_group()  # not in the way of the gradients
        self.optimizer = torch.optim.Adamax(self.net.parameters(), lr=4e-3)
        self.step = 0
        if os.path.exists(self.file):
            loaded = torch.load(self.file)
            self.net.load_state_dict(loaded["net"])
            self.optimizer.load_state_dict(loaded["optimizer"])
            self.step = loaded["step"]
        dist.barrier()
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def on_sigterm(self, signum, frame):
        dist.barrier(self.control)  # no rank is in the middle of a step
        self.save()
        dist.barrier(self.control)  # rank 0 has written the file
        os._exit(143)

    def save(self):
        if self.rank == 0:
            contents = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
            torch.save(contents, self.file + ".part")
            os.replace(self.file + ".part", self.file)

    def residual(self, model):
        g = torch.Generator().manual_seed(self.step * 3 + self.rank)
        t = torch.rand(64, 1, generator=g)
        u, later = model(torch.cat([t, t + 0.01])).chunk(2)
        exact = torch.exp(-t) * torch.cos(6 * t)
        return (u - exact).square().mean() + 0.01 * ((later - u) / 0.01).square().mean()

    def run(self):
        model = DDP(self.net)
        while self.step < self.steps:
            loss = self.residual(model)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % self.interval == 0:
                self.save()
        return 0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    status = OscillatorRun().run()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)
