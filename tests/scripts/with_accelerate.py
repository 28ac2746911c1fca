"""A loop with accelerate under clusterddp: ``with_accelerate.py OUT MARKS``. Prints each step that it makes.

After the third it waits while MARKS/wait is there.
"""

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import clusterddp
from clusterddp.integrations.accelerate import newest_state, save_state

OUT, MARKS = sys.argv[1], Path(sys.argv[2])

ctx = clusterddp.init()
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
folder, step = newest_state(OUT)
if folder:
    accelerator.load_state(folder)
while step < 60:
    for (batch,) in accelerator.skip_first_batches(loader, step % len(loader)):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print("made step", step, flush=True)
        if step == 3:
            (MARKS / str(accelerator.process_index)).touch()
            while (MARKS / "wait").exists():
                time.sleep(0.05)
        time.sleep(0.05)
        stop = clusterddp.stop_requested()
        if stop or step % 25 == 0:
            save_state(accelerator, OUT, step)
        if stop:
            clusterddp.requeue()
        if step == 60:
            break
assert accelerator.num_processes == ctx.world_size
print("done at step", step, flush=True)
