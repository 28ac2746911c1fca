"""submitit: docs/checkpointing.md and docs/mnist.py: a callable with checkpoint().

``python with_submitit.py`` submits.
"""

import os
from datetime import timedelta

import submitit
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import BATCH, EPOCHS, LR, PER_EPOCH, SAVE_EPOCHS, SEED, TIMEOUT_S, Net, train_set
from steplog import finish, steplog
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Training:
    def __call__(self):
        env = submitit.helpers.TorchDistributedEnvironment().export()
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        torch.manual_seed(SEED)
        model = DDP(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        sampler = DistributedSampler(train_set, seed=SEED)
        loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
        first_epoch = 0
        if os.path.exists("checkpoint.pt"):
            checkpoint = torch.load("checkpoint.pt", map_location="cpu")
            model.module.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            first_epoch = checkpoint["epoch"] + 1
        for epoch in range(first_epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for index, (images, labels) in enumerate(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steplog(epoch * PER_EPOCH + index)
            if env.rank == 0 and (epoch + 1) % SAVE_EPOCHS == 0:
                state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, "checkpoint.pt")
        finish(model.module)
        dist.destroy_process_group()

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="submitit")
    # The signal comes 30 s before the time limit, not 90 s: the limit is two minutes in one schedule.
    executor.update_parameters(timeout_min=30, nodes=2, tasks_per_node=2, slurm_signal_delay_s=30)
    print(executor.submit(Training()).job_id)
