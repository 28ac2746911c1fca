"""accelerate: "Checkpointing" (huggingface.co/docs/accelerate/usage_guides/checkpoint) and its example
examples/by_feature/checkpointing.py: a folder per checkpoint, the newest one, skip_first_batches.

Started with torchrun, as "Launching Accelerate scripts" allows: on CPUs `accelerate launch` needs mpirun."""

import os
from datetime import timedelta

import torch
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from common import BATCH, EPOCHS, LR, PER_EPOCH, SAVE_STEPS, SEED, TIMEOUT_S, Net, train_set
from steplog import finish, steplog
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT_S))])
set_seed(SEED)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
overall_step = 0
os.makedirs("checkpoints", exist_ok=True)
folders = [entry for entry in os.scandir("checkpoints") if entry.is_dir()]
if folders:
    newest = max(folders, key=os.path.getctime)
    accelerator.load_state(newest.path)
    overall_step = int(newest.name.removeprefix("step_"))
for epoch in range(overall_step // PER_EPOCH, EPOCHS):
    loader.set_epoch(epoch)
    skipped = overall_step - epoch * PER_EPOCH
    for images, labels in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        steplog(overall_step)
        overall_step += 1
        if overall_step % SAVE_STEPS == 0:
            accelerator.save_state(f"checkpoints/step_{overall_step}")
finish(accelerator.unwrap_model(model))
accelerator.end_training()
