"""A GAN: two models and two optimizers in one run. The generator learns eight points on a circle."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clusterddp


def points(samples=4096):
    """Eight Gaussians on the unit circle: (samples, 2)."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.randint(8, (samples,), generator=generator) * (2 * math.pi / 8)
    center = torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(center + 0.05 * torch.randn(samples, 2, generator=generator))


def mlp(inputs, outputs, width=64):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2),
        nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=128, help="per rank")
    args = parser.parse_args()

    ctx = clusterddp.init()
    generator, discriminator = ctx.wrap(mlp(16, 2)), ctx.wrap(mlp(2, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    run = ctx.run(
        generator=generator,  # the names are yours
        discriminator=discriminator,
        optimizers={"generator": generator_optimizer, "discriminator": discriminator_optimizer},
        loader=ctx.loader(points(), batch_size=args.batch_size),
    )
    for (real,) in run.steps(args.steps):
        real = real.to(ctx.device)
        fake = generator(torch.randn(len(real), 16, device=ctx.device))

        # One forward for real and fake samples: one backward, and one exchange of gradients.
        real_score, fake_score = discriminator(torch.cat([real, fake.detach()])).chunk(2)
        discriminator_loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
        discriminator_optimizer.zero_grad()
        discriminator_loss.backward()
        discriminator_optimizer.step()

        # The discriminator is frozen: only the generator's gradients are exchanged between ranks.
        discriminator.requires_grad_(False)
        generator_loss = F.softplus(-discriminator(fake)).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        discriminator.requires_grad_(True)
        run.log(generator_loss=generator_loss, discriminator_loss=discriminator_loss)

    with torch.no_grad():
        radius = generator.module(torch.randn(1000, 16, device=ctx.device)).norm(dim=1).mean()
    ctx.print(f"the generated points are at {radius:.2f} from the center on average, and the real ones at 1.00")


if __name__ == "__main__":
    main()
