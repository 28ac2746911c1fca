"""A small character-level GPT, trained on the sources of Python's standard library, which every machine has.

It has the parts of a real training: gradient accumulation with one reduction per step, bfloat16 on GPUs, a cosine
schedule with warm-up, gradient clipping, optional torch.compile, and a loss on held-out text.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import clusterddp


def load_text(most=2_000_000):
    """The standard library's modules, joined by name, as a tensor of bytes (uint8): the first ``most`` bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:most]), dtype=torch.uint8)


class Blocks(Dataset):
    """Pieces of ``length`` characters of a text, one after the other, and the same shifted by one: (length,) int64."""

    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index):
        piece = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


class Layer(nn.Module):
    """Causal attention and a feed-forward part, each with a residual connection: (samples, length, width)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """From characters (samples, length) to logits of the next ones (samples, length, 256)."""

    def __init__(self, length, width, layers, heads):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters):
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.layers(self.token(characters) + self.position(places)))


def loss_of(ctx, model, characters, following):
    """The mean loss over the piece, in nats per character."""
    with torch.autocast("cuda", torch.bfloat16, enabled=ctx.device.type == "cuda"):
        logits = model(characters.to(ctx.device))
    return F.cross_entropy(logits.float().flatten(0, 1), following.to(ctx.device).flatten())


@torch.no_grad()
def evaluate(ctx, model, loader):
    """The loss on all of the held-out text, over all ranks."""
    total, count = 0.0, 0
    for characters, following in loader:
        total += loss_of(ctx, model, characters, following).item() * following.numel()
        count += following.numel()
    return ctx.all_reduce_sum(total) / ctx.all_reduce_sum(float(count))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="samples that a rank takes at a time")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--length", type=int, default=64, help="characters of a sample")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    ctx = clusterddp.init()
    text = load_text()
    end = len(text) * 95 // 100
    train, held_out = Blocks(text[:end], args.length), Blocks(text[end:], args.length)
    model = ctx.wrap(GPT(args.length, args.width, args.layers, args.heads))
    forward = torch.compile(model) if args.compile else model  # DDP inside, so that it overlaps with the backward
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = max(1, args.steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * s / args.steps))
    )
    loader = ctx.loader(train, batch_size=args.batch_size)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
    for batch in run.steps(args.steps):
        losses = []
        for characters, following in run.micro(batch):  # pieces; DDP reduces the gradients with the last one
            loss = loss_of(ctx, forward, characters, following)
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=torch.stack(losses).mean(), norm=norm, lr=scheduler.get_last_lr()[0])
        scheduler.step()

    loss = evaluate(ctx, model.module, ctx.eval_loader(held_out, batch_size=64))
    ctx.print(f"held-out loss {loss:.3f} nats per character ({loss / math.log(2):.2f} bits), {ctx.world_size} ranks")


if __name__ == "__main__":
    main()
