"""PyTorch's tutorial "Fault-tolerant Distributed Training with torchrun" (beginner/ddp_series_fault_tolerance), and
"Multinode Training" (intermediate/ddp_series_multinode): a snapshot of the model and the number of epochs.

In the tutorial rank 0 of each node saves to its own disk; here the disk is shared, and only rank 0 saves.
"""

import os
from datetime import timedelta

import torch
import torch.nn.functional as F
from common import BATCH, EPOCHS, LR, PER_EPOCH, SAVE_EPOCHS, SEED, TIMEOUT_S, Net, train_set
from steplog import finish, steplog
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.global_rank = int(os.environ["RANK"])
        self.model = model
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model)

    def _load_snapshot(self, snapshot_path):
        snapshot = torch.load(snapshot_path, map_location="cpu")
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _save_snapshot(self, epoch):
        torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, self.snapshot_path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for index, (source, targets) in enumerate(self.train_data):
            self._run_batch(source, targets)
            steplog(epoch * PER_EPOCH + index)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch)


def main():
    init_process_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(SEED)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=DistributedSampler(train_set, seed=SEED))
    trainer = Trainer(model, loader, optimizer, SAVE_EPOCHS, "snapshot.pt")
    trainer.train(EPOCHS)
    finish(trainer.model.module)
    destroy_process_group()


if __name__ == "__main__":
    main()
