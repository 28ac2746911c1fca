"""The training that each behaviour is tried in: ``training.py BEHAVIOUR [--steps N] [--pause SECONDS]``.

torch is imported in ``main`` alone: processes that are started by spawn or forkserver import this file again.
"""

from __future__ import annotations

import argparse
import time

import behaviours


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", help="or several: first+second")
    parser.add_argument("--steps", type=int, default=behaviours.STEPS)
    parser.add_argument("--pause", type=float, default=behaviours.PAUSE_S, help="seconds in each step")
    args = parser.parse_args()
    behaviour = behaviours.behaviour(args.behaviour)
    behaviour.before_init()

    import torch
    from torch.utils.data import TensorDataset

    import clusterddp

    ctx = clusterddp.init()
    behaviour.after_init(ctx)
    torch.manual_seed(0)
    model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(200, 8)
    loader = ctx.loader(TensorDataset(data, data.mean(1, keepdim=True)), batch_size=4, **behaviour.loader)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    behaviour.before_loop(run)

    def steps() -> None:
        for x, y in run.steps(args.steps):

            def update(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                loss = (model(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)

            behaviour.step(update, run)
            time.sleep(args.pause)

    behaviour.train(steps)
    behaviour.after_loop()


if __name__ == "__main__":
    main()
