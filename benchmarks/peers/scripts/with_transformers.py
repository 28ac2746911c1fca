"""Hugging Face Trainer: "Trainer", section "Checkpoints" (huggingface.co/docs/transformers/trainer), started with
torchrun as in examples/pytorch/README.md. It does not handle Slurm: sbatch --requeue."""

import torch.nn.functional as F
from common import BATCH, LR, SAVE_STEPS, SEED, STEPS, TIMEOUT_S, Net, train_set
from steplog import finish, steplog
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, images, labels):
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Log(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        steplog(state.global_step - 1)


set_seed(SEED)
arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=STEPS,
    per_device_train_batch_size=BATCH,
    learning_rate=LR,
    lr_scheduler_type="constant",
    save_strategy="steps",
    save_steps=SAVE_STEPS,
    save_total_limit=2,
    use_cpu=True,
    ddp_backend="gloo",
    ddp_timeout=TIMEOUT_S,
    seed=SEED,
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
data = [{"images": images, "labels": labels} for images, labels in train_set]
model = Digits()
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Log()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("checkpoints") is not None)
finish(model.net)
