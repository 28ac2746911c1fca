"""A small policy-gradient run that keeps its logs and checkpoints in one folder per experiment."""

import argparse
import csv
import os
import signal
import sys

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--name", default="bandit")
parser.add_argument("--updates", type=int, default=50)
parser.add_argument("--checkpoint-every", type=int, default=10)


def experiment_folder(args):
    """The same on all ranks."""
    name = [os.path.join("runs", args.name)]
    dist.broadcast_object_list(name, src=0)
    if dist.get_rank() == 0:
        os.makedirs(name[0], exist_ok=True)
    dist.barrier()
    return name[0]


def play(policy, update, rank):
    g = torch.Generator().manual_seed(update * 17 + rank)
    context = torch.randn(64, 12, generator=g)
    distribution = torch.distributions.Categorical(logits=policy(context))
    action = torch.multinomial(distribution.probs.detach(), 1, generator=g).squeeze(1)
    reward = (context[:, :4].argmax(dim=1) == action).float()
    return -(distribution.log_prob(action) * (reward - 0.25)).mean(), reward.mean()


def main():
    args = parser.parse_args()
    quitting = []
    signal.signal(signal.SIGTERM, lambda *_: quitting.append(1))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = experiment_folder(args)
    checkpoint = os.path.join(folder, "checkpoint.pt")

    torch.manual_seed(6)
    policy = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    update = 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        update = state["update"]
    dist.barrier()

    interrupted = False
    while update < args.updates and not interrupted:
        loss, reward = play(ddp, update, rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update += 1
        summary = torch.tensor([reward, float(len(quitting))])
        dist.all_reduce(summary)
        interrupted = summary[1].item() > 0
        if rank == 0 and (interrupted or update % args.checkpoint_every == 0):
            with open(os.path.join(folder, "progress.csv"), "a", newline="") as f:
                csv.writer(f).writerow([update, f"{summary[0].item() / dist.get_world_size():.3f}"])
            state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "update": update}
            torch.save(state, checkpoint + ".tmp")
            os.replace(checkpoint + ".tmp", checkpoint)
    return interrupted


if __name__ == "__main__":
    preempted = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(143 if preempted else 0)
