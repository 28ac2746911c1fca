"""A pool of workers for preprocessing: whole batches of text become features in other processes."""

import argparse
import itertools
import multiprocessing
import random
import signal
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import clusterddp


class Lines(Dataset):
    """Lines of Python, and whether each has the word "self"."""

    def __init__(self):
        text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
        self.lines = [line.strip() for line in text.splitlines() if line.strip()]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index], float("self" in self.lines[index])


def features(line, seed):
    """Counts of character pairs, without a tenth of the characters. What is random depends on the arguments alone."""
    generator = random.Random(seed)
    kept = [ord(character) for character in line if generator.random() > 0.1]
    counts = [0.0] * 256
    for first, second in itertools.pairwise(kept):
        counts[(31 * first + second) % 256] += 1
    return counts


def ignore_stop_signals():
    """In a worker. Some clusters send TERM to all processes of a job; a pool that loses a worker may wait forever."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="per rank")
    args = parser.parse_args()

    # Before init(): a process with threads and a CUDA context should not be forked.
    pool = multiprocessing.get_context("fork").Pool(args.workers, initializer=ignore_stop_signals)
    ctx = clusterddp.init()
    model = ctx.wrap(torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(Lines(), batch_size=32))
    try:
        for lines, labels in run.steps(args.steps):
            seeds = torch.randint(2**31, (len(lines),)).tolist()  # torch is seeded from (seed, step, rank)
            inputs = torch.tensor(pool.starmap(features, zip(lines, seeds, strict=True)))
            outputs = model(inputs.to(ctx.device))[:, 0]
            loss = F.binary_cross_entropy_with_logits(outputs, labels.float().to(ctx.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    finally:  # also when a stop raises clusterddp.Stopped in the loop
        pool.close()
        pool.join()
    ctx.print(f"done after {run.step} steps")


if __name__ == "__main__":
    main()
