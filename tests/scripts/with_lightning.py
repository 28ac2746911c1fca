"""Lightning under clusterddp: ``with_lightning.py OUT MARKS``. Prints each step that it makes.

After the third it waits while MARKS/wait is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import clusterddp
from clusterddp.integrations.lightning import RankEnvironment, SaveAndRequeue

OUT, MARKS = sys.argv[1], Path(sys.argv[2])


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Telling(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        print("made step", trainer.global_step, flush=True)
        if trainer.global_step == 3:
            mark = MARKS / f".{trainer.global_rank}"
            mark.write_text(str(os.getpid()))
            mark.rename(MARKS / str(trainer.global_rank))
            while (MARKS / "wait").exists():
                time.sleep(0.05)
        time.sleep(0.05)


ctx = clusterddp.init()
stop = SaveAndRequeue(OUT)
trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=ctx.local_world_size,
    num_nodes=ctx.world_size // ctx.local_world_size,
    plugins=[RankEnvironment(ctx)],
    callbacks=[Telling(), stop],
    max_steps=60,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=2, shuffle=True)
trainer.fit(Net(), loader, ckpt_path=stop.newest_checkpoint)
assert trainer.world_size == ctx.world_size
print("done at step", trainer.global_step, flush=True)
