"""Lightning: "Run on an on-prem cluster (advanced)", section "Enable auto wall-time resubmissions"
(lightning.ai/docs/pytorch/stable/clouds/cluster_advanced.html), and ``ckpt_path="last"`` of Trainer.fit."""

import signal
from datetime import timedelta

import lightning as L
import torch
import torch.nn.functional as F
from common import BATCH, LR, SAVE_STEPS, SEED, STEPS, TIMEOUT_S, Net, train_set
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from steplog import finish, steplog
from torch.utils.data import DataLoader


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR)


class Log(Callback):
    def on_train_batch_end(self, trainer, *_):
        steplog(trainer.global_step - 1)


L.seed_everything(SEED, workers=True)
model = Digits()
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    num_nodes=2,
    strategy=DDPStrategy(timeout=timedelta(seconds=TIMEOUT_S)),
    plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=SAVE_STEPS, save_last=True), Log()],
    max_steps=STEPS,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(train_set, batch_size=BATCH, shuffle=True), ckpt_path="last")
if trainer.global_step >= STEPS:
    finish(model.net)
