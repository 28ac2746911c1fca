"""Sequence tagging with a slow evaluation: each validation sentence is decoded one token after another."""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--eval-every", type=int, default=24)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--out", default="tagger")

STOP = False


def stop_soon(signum, frame):
    global STOP
    STOP = True


def should_stop():
    t = torch.tensor(int(STOP))
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t)


class Tagger(nn.Module):
    def __init__(self, vocabulary=50, tags=6):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.rnn = nn.GRU(32, 48, batch_first=True)
        self.out = nn.Linear(48, tags)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def sentences(seed, count=12, length=9):
    tokens = torch.randint(50, (count, length), generator=torch.Generator().manual_seed(seed))
    return tokens, (tokens + tokens.roll(1, dims=1)) % 6


def decode(model, tokens):
    time.sleep(0.025)  # the beam search of the real model
    return model(tokens).argmax(dim=-1)


@torch.no_grad()
def evaluate(model, rank, sentences_per_rank=160):
    """The accuracy over all ranks, or None if the job has to stop."""
    model.eval()
    right = torch.zeros(2)
    for number in range(sentences_per_rank):
        tokens, tags = sentences(10_000 + 2 * number + rank, count=1)
        right += torch.tensor([(decode(model, tokens) == tags).sum(), tags.numel()])
    model.train()
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop_soon)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Tagger()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done, evaluated = 0, 0
    accuracies = {}
    path = os.path.join(args.out, "checkpoint.pt")
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done, evaluated, accuracies = saved["done"], saved["evaluated"], saved["accuracies"]
    os.makedirs(args.out, exist_ok=True)

    def save():
        if rank == 0:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict())
            state.update(done=done, evaluated=evaluated, accuracies=accuracies)
            torch.save(state, path + ".writing")
            os.replace(path + ".writing", path)

    while True:
        if done % args.eval_every == 0 and done > evaluated:
            accuracy = evaluate(model, rank)
            accuracies[done], evaluated = accuracy, done
            if rank == 0:
                print(f"step {done}: accuracy {accuracy:.3f}", flush=True)
        if done == args.steps:
            break
        tokens, tags = sentences(2 * done + rank)
        loss = nn.functional.cross_entropy(parallel(tokens).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        if should_stop():
            save()
            return 143
        if done % args.save_every == 0:
            save()
    return 0


if __name__ == "__main__":
    code = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(code)
