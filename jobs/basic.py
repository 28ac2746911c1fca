"""The smallest DDP training. Every step checks what DDP guarantees.

One process per rank, each with its part of the batch. After backward, all ranks have the same gradients, which are
those that one process would compute from the whole batch.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clusterddp


class ToyModel(nn.Sequential):
    """Two linear layers with a ReLU between them: (samples, 10) to (samples, 5)."""

    def __init__(self):
        super().__init__(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))


def check_gradients(ctx, model, inputs, targets):
    """Ends all ranks if their gradients differ, or are not those of the joined batch in one process."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    F.mse_loss(alone(ctx.gather(inputs)), ctx.gather(targets)).backward()
    for (name, parameter), (_, expected) in zip(model.module.named_parameters(), alone.named_parameters(), strict=True):
        of_ranks = ctx.gather(parameter.grad[None])
        for rank, gradient in enumerate(of_ranks):
            if not torch.equal(gradient, of_ranks[0]):
                raise SystemExit(f"the gradients of {name} on ranks 0 and {rank} differ. Is DDP's forward bypassed?")
        if not torch.allclose(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6):
            worst = (parameter.grad - expected.grad).abs().max()
            raise SystemExit(f"the gradient of {name} is not that of the joined batch (largest difference {worst:.3g})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=20, help="per rank")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="set by torch.distributed.launch, ignored")
    args = parser.parse_args()

    ctx = clusterddp.init()  # seeds all ranks equally, to create the same data and the same model
    dataset = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 5))
    model = ctx.wrap(ToyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ctx.loader(dataset, batch_size=args.batch_size)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for inputs, targets in run.steps(args.steps):
        inputs, targets = inputs.to(ctx.device), targets.to(ctx.device)
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        check_gradients(ctx, model, inputs, targets)
        optimizer.step()
        run.log(loss=loss)
    ctx.print(f"{args.steps} steps: the gradients of {ctx.world_size} ranks were equal, and those of the joined batch")


if __name__ == "__main__":
    main()
