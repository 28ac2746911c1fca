"""Denoises small vectors. The averaged weights are what is evaluated and published."""

import copy
import os
import signal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Vectors(Dataset):
    def __init__(self, n=320, dim=24):
        self.data = torch.randn(n, dim, generator=torch.Generator().manual_seed(99)).cumsum(dim=1)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        noise = torch.randn(24, generator=torch.Generator().manual_seed(i))
        return self.data[i] + 0.5 * noise, self.data[i]


class Trainer:
    save_every_batches = 7
    num_epochs = 5
    ema_decay = 0.95

    def __init__(self, save_dir="results/denoiser"):
        self.rank = int(os.environ["RANK"])
        self.save_dir = save_dir
        self.stop_requests = stop_requests = []
        signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(1))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 160), nn.SiLU(), nn.Linear(160, 24))
        self.ddp_model = nn.parallel.DistributedDataParallel(self.model)
        self.ema_model = copy.deepcopy(self.model).requires_grad_(False)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.dataset = Vectors()
        self.sampler = DistributedSampler(self.dataset)
        self.loader = DataLoader(self.dataset, batch_size=16, sampler=self.sampler)
        self.epoch = self.batches_done = 0

    @torch.no_grad()
    def update_ema(self):
        for averaged, current in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
            averaged.lerp_(current, 1 - self.ema_decay)

    def save(self, name="latest.pt"):
        if self.rank != 0:
            return
        os.makedirs(self.save_dir, exist_ok=True)
        target = os.path.join(self.save_dir, name)
        state = {"model": self.model.state_dict(), "opt": self.opt.state_dict(), "ema": self.ema_model.state_dict()}
        state["progress"] = (self.epoch, self.batches_done)
        torch.save(state, target + "~")
        os.replace(target + "~", target)

    def load(self, name="latest.pt"):
        source = os.path.join(self.save_dir, name)
        if os.path.exists(source):
            state = torch.load(source)
            self.model.load_state_dict(state["model"])
            self.ema_model.load_state_dict(state["ema"])
            self.opt.load_state_dict(state["opt"])
            self.epoch, self.batches_done = state["progress"]
        dist.barrier()

    def stop_everywhere(self):
        flags = torch.tensor([len(self.stop_requests)])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags[0])

    def fit(self):
        self.load()
        while self.epoch < self.num_epochs:
            self.sampler.set_epoch(self.epoch)
            for number, (noisy, clean) in enumerate(self.loader):
                if number < self.batches_done:
                    continue
                loss = nn.functional.mse_loss(self.ddp_model(noisy), clean)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
                self.update_ema()
                self.batches_done = number + 1
                if self.stop_everywhere():
                    self.save()
                    return 130
                if self.batches_done % self.save_every_batches == 0:
                    self.save()
            self.epoch, self.batches_done = self.epoch + 1, 0
        self.save()
        if self.rank == 0:
            torch.save(self.ema_model.state_dict(), os.path.join(self.save_dir, "ema_final.pt"))
        return 0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    exit_code = Trainer().fit()
    dist.destroy_process_group()
    raise SystemExit(exit_code)
