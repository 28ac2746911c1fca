"""Autoencoder with callbacks, in the manner of the larger training frameworks."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist


class ModelCheckpoint:
    """Saves last.ckpt every few steps and when the run is asked to stop."""

    def __init__(self, dirpath, every_n_train_steps):
        self.dirpath, self.every = Path(dirpath), every_n_train_steps

    def save(self, trainer):
        if trainer.rank == 0:
            self.dirpath.mkdir(parents=True, exist_ok=True)
            torch.save(trainer.state(), self.dirpath / "writing")
            os.replace(self.dirpath / "writing", self.dirpath / "last.ckpt")

    def on_train_batch_end(self, trainer):
        if trainer.global_step % self.every == 0:
            self.save(trainer)

    def on_stop(self, trainer):
        self.save(trainer)


class Trainer:
    def __init__(self, max_steps, callbacks):
        self.max_steps, self.callbacks = max_steps, callbacks
        self.rank, self.global_step, self.interrupted = dist.get_rank(), 0, False
        signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, *_):
        self.interrupted = True

    def _interrupted_anywhere(self):
        answers = [False] * dist.get_world_size()
        dist.all_gather_object(answers, self.interrupted)
        return any(answers)

    def state(self):
        return {
            "global_step": self.global_step,
            "state_dict": self.model.state_dict(),
            "optimizer_states": [self.optimizer.state_dict()],
        }

    def fit(self, model, optimizer, ckpt_path):
        self.model, self.optimizer = model, optimizer
        if os.path.exists(ckpt_path):
            checkpoint = torch.load(ckpt_path, map_location="cpu")
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer_states"][0])
            self.global_step = checkpoint["global_step"]
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        while self.global_step < self.max_steps:
            g = torch.Generator().manual_seed(1 + 2 * self.global_step + self.rank)
            x = torch.randn(32, 8, generator=g) @ torch.eye(8, 40)
            loss = torch.nn.functional.mse_loss(ddp(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.global_step += 1
            if self._interrupted_anywhere():
                for callback in self.callbacks:
                    callback.on_stop(self)
                return False
            for callback in self.callbacks:
                callback.on_train_batch_end(self)
        return True


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    autoencoder = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 40))
    adam = torch.optim.Adam(autoencoder.parameters(), lr=1e-3)
    trainer = Trainer(max_steps=48, callbacks=[ModelCheckpoint("lightning_logs/checkpoints", every_n_train_steps=8)])
    completed = trainer.fit(autoencoder, adam, ckpt_path="lightning_logs/checkpoints/last.ckpt")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if completed else 143)
