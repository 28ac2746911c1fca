"""Hugging Face's Trainer under clusterddp: ``with_transformers.py OUT MARKS``. Prints each step that it makes.

After the third it waits while MARKS/wait is there.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import clusterddp
from clusterddp.integrations.transformers import SaveAndRequeue, newest_checkpoint

OUT, MARKS = sys.argv[1], Path(sys.argv[2])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        output = self.layer(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 64), "labels": torch.tensor([index / 32])}


class Telling(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("made step", state.global_step, flush=True)
        if state.global_step == 3:
            (MARKS / str(args.process_index)).touch()
            while (MARKS / "wait").exists():
                time.sleep(0.05)
        time.sleep(0.05)


ctx = clusterddp.init()
arguments = TrainingArguments(
    OUT, max_steps=60, per_device_train_batch_size=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
)
trainer = Trainer(Net(), arguments, train_dataset=Numbers(), callbacks=[Telling(), SaveAndRequeue()])
trainer.train(resume_from_checkpoint=newest_checkpoint(OUT))
assert trainer.args.world_size == ctx.world_size
print("done at step", trainer.state.global_step, flush=True)
