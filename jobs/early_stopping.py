"""Early stopping: the run ends once the loss on held-out data has not improved for some evaluations in a row."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import clusterddp


@torch.no_grad()
def evaluate(ctx, model, loader):
    """The mean loss over all ranks. Every rank gets the same number and makes the same decision."""
    total, count = 0.0, 0
    for inputs, targets in loader:
        total += F.mse_loss(model(inputs.to(ctx.device)), targets.to(ctx.device), reduction="sum").item()
        count += len(inputs)
    return ctx.all_reduce_mean(total / count, weight=count)


def noisy_data(samples, seed):
    """A linear function of 40 inputs, and so much noise that a model of few samples overfits."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 40, generator=generator)
    noise = torch.randn(samples, 1, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].sum(1, keepdim=True) + 2 * noise)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="at most")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--patience", type=int, default=4, help="evaluations without an improvement")
    args = parser.parse_args()

    ctx = clusterddp.init()
    model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = ctx.loader(noisy_data(64, seed=1), batch_size=8)
    held_out = ctx.eval_loader(noisy_data(256, seed=2), batch_size=128)
    progress = {"best": float("inf"), "since_best": 0}  # saved with the run, and restored in place
    run = ctx.run(model=model, optimizer=optimizer, loader=loader, script_state=progress, best="-held_out_loss")
    for inputs, targets in run.steps(args.steps):
        # The place for an evaluation: a stop within it saves the state before the step, and a resume repeats it.
        if run.every(steps=args.eval_every):
            held_out_loss = evaluate(ctx, model.module, held_out)
            run.log(held_out_loss=held_out_loss)
            progress["since_best"] = 0 if held_out_loss < progress["best"] else progress["since_best"] + 1
            progress["best"] = min(held_out_loss, progress["best"])
            if progress["since_best"] >= args.patience:
                run.finish()  # this step is the last one
        loss = F.mse_loss(model(inputs.to(ctx.device)), targets.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    ctx.print(f"ended after {run.step} of {args.steps} steps, best held-out loss {progress['best']:.4f}")


if __name__ == "__main__":
    main()
