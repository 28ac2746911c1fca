"""Reinforcement learning: every rank plays its own environments, whose state is saved and restored for every rank.

Advantage actor-critic (A2C) on CartPole (Barto, Sutton and Anderson, 1983; the constants are those of Gymnasium).
"""

import argparse
import math

import torch
from torch import nn

import clusterddp


class CartPoles:
    """``count`` carts, each with a pole that falls unless the cart is pushed left or right in time."""

    def __init__(self, count, generator):
        self.generator = generator
        self.state = self._start(count)  # position, velocity, angle, angular velocity

    def _start(self, count):
        return torch.rand(count, 4, generator=self.generator) * 0.1 - 0.05

    def step(self, actions):
        """Pushes the carts for 0.02 s. Returns which poles have fallen; those carts start again."""
        x, v, angle, turn = self.state.unbind(1)
        push = (actions * 20.0 - 10.0 + 0.05 * turn**2 * angle.sin()) / 1.1
        turning = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        moving = push - 0.05 * turning * angle.cos() / 1.1
        moved = torch.stack([x + 0.02 * v, v + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning], 1)
        fallen = (moved[:, 0].abs() > 2.4) | (moved[:, 2].abs() > math.radians(12))
        self.state = torch.where(fallen[:, None], self._start(len(moved)), moved)
        return fallen

    def state_dict(self):
        return {"carts": self.state}

    def load_state_dict(self, state):
        self.state = state["carts"]


@torch.no_grad()
def play(policy, carts, device, length=32):
    """A rollout: observations (length + 1, carts, 4), actions and fallen poles (length, carts)."""
    observations, actions, fallen = [carts.state], [], []
    for _ in range(length):
        probabilities = policy(observations[-1].to(device))[:, :2].softmax(1).cpu()
        actions.append(torch.multinomial(probabilities, 1, generator=carts.generator)[:, 0])
        fallen.append(carts.step(actions[-1]))
        observations.append(carts.state)
    return [torch.stack(tensors).to(device) for tensors in (observations, actions, fallen)]


def loss_of(outputs, actions, fallen):
    """The loss of policy and value from the outputs at all observations, with a reward of 1 per push."""
    log_probabilities, values = outputs[:-1, :, :2].log_softmax(2), outputs[:, :, 2]
    returns, following = [], values[-1].detach()
    for t in reversed(range(len(actions))):
        following = 1 + 0.99 * following * ~fallen[t]
        returns.append(following)
    advantage = torch.stack(returns[::-1]) - values[:-1]
    chosen = log_probabilities.gather(2, actions[:, :, None])[:, :, 0]
    entropy = -(log_probabilities.exp() * log_probabilities).sum(2)
    return (advantage**2 / 2 - chosen * advantage.detach() - 0.01 * entropy).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    ctx = clusterddp.init()
    model = ctx.wrap(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)))  # two logits and the value
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1000 * ctx.seed + ctx.rank)  # a different seed on each rank
    carts = CartPoles(16, generator)
    run = ctx.run(model=model, optimizer=optimizer, per_rank={"carts": carts, "generator": generator})
    for _ in run.steps(args.steps):  # without a loader, the numbers of the steps
        observations, actions, fallen = play(model.module, carts, ctx.device)
        loss = loss_of(model(observations), actions, fallen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falls = ctx.all_reduce_mean(fallen.float().mean())  # run.log() keeps rank 0's values: this is the mean
        run.log(loss=loss, falls=falls)
    _, _, fallen = play(model.module, carts, ctx.device)
    falls = ctx.all_reduce_mean(fallen.float().mean())
    ctx.print(f"{falls:.2%} of the pushes let a pole fall")


if __name__ == "__main__":
    main()
