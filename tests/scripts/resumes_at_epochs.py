"""As the examples of torchvision and timm: it resumes at the beginning of an epoch, and has three lines of clusterddp.

``resumes_at_epochs.py EPOCHS BATCH...``: in attempt N it waits after the Nth of these batches, counted over all epochs,
for a file ``go-N``. Each rank prints the samples of each step, which takes two batches. It starts over if a file
``forget`` is there. Attempt 1 has a context.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import clusterddp

LAST = "last.pt"


def main():
    epochs, *waits = map(int, sys.argv[1:])
    attempt = int(os.environ["CLUSTERDDP_ATTEMPT"])
    if attempt == 1:
        clusterddp.init()
    else:
        dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    first = 0
    if os.path.exists(LAST) and not os.path.exists("forget"):
        state = torch.load(LAST)
        first, weight.data = state["epoch"], state["weight"]
    dist.barrier()  # rank 0 writes that file again
    sampler = DistributedSampler(range(40), shuffle=True)
    loader = DataLoader(range(40), batch_size=2, sampler=sampler)
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        held = []
        assert len(clusterddp.continue_epoch(loader)) == len(loader)  # as progress bars ask for it
        for number, batch in clusterddp.continue_epoch(enumerate(loader)):
            held += batch.tolist()
            (weight * batch.float().sum()).backward()
            if number % 2 == 1:
                dist.all_reduce(weight.grad)
                optimizer.step()
                optimizer.zero_grad()
                print(f"epoch {epoch} trained on {held}", flush=True)
                held = []
            if waits[attempt : attempt + 1] == [epoch * len(loader) + number]:
                print("it waits", flush=True)
                while not os.path.exists(f"go-{attempt}"):
                    time.sleep(0.01)
            if clusterddp.stop_requested():
                save(epoch, weight)
                clusterddp.requeue(saved=LAST)
        save(epoch + 1, weight)
    if attempt != 1:
        dist.destroy_process_group()


def save(epoch, weight):
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "weight": weight.data}, LAST)


main()
