"""The cost of DDP: a step on 1, 2, 4, ... ranks, with and without DDP, at the same batch per rank.

alone     a step of the same model without DDP, on that many ranks at the same time, without communication
DDP       a step with DDP. on one rank, the difference from ``alone`` is DDP's overhead
exposed   how long a rank waits in backward after its last gradient: communication that is not overlapped
samples/s and efficiency    compared with that many times one rank alone

A time is the median of a rank's steps, and the longest of the ranks' medians.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import clusterddp


class Timing(NamedTuple):
    """The times of a step on ``ranks`` ranks, in milliseconds."""

    ranks: int
    alone: float
    ddp: float
    exposed: float

    def samples_per_s(self, batch_size):
        return self.ranks * batch_size / self.ddp * 1e3

    def efficiency(self, one):
        """The throughput as a part of the ideal one: ``ranks`` times that of ``one`` rank without DDP."""
        return one.alone / self.ddp


class Clock:
    """Measures time: with CUDA events on a GPU, which has not finished a step when the CPU has."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start, end):
        if not self.cuda:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)


class Net(nn.Sequential):
    """Linear layers, width x width."""

    def __init__(self, width, layers):
        super().__init__(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def measure(ctx, model, args):
    """The medians of a step, and of its backward after the last gradient, in milliseconds."""
    clock, optimizer = Clock(ctx.device), torch.optim.SGD(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(ctx.rank)
    inputs = torch.randn(args.batch_size, args.width, generator=own).to(ctx.device)
    gradient_times, steps, exposed = [], [], []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: gradient_times.append(clock.now()))
    for _ in range(args.warm_up + args.steps):
        gradient_times.clear()
        start = clock.now()
        loss = model(inputs).square().mean()
        loss.backward()
        after_backward = clock.now()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(clock.milliseconds(start, clock.now()))
        exposed.append(clock.milliseconds(gradient_times[-1], after_backward))
    return statistics.median(steps[args.warm_up :]), statistics.median(exposed[args.warm_up :])


def measure_on(ctx, ranks, args):
    """The timing on the first ``ranks`` ranks. The others wait."""
    group = dist.new_group(range(ranks))
    alone = ddp = exposed = weights = float("nan")
    if ctx.rank < ranks:
        alone, _ = measure(ctx, Net(args.width, args.layers).to(ctx.device), args)
        options = {"bucket_cap_mb": args.bucket_mb, "gradient_as_bucket_view": args.bucket_view}
        if args.static_graph:
            options |= {"static_graph": True, "all_used_once": True}
        model = ctx.wrap(Net(args.width, args.layers), process_group=group, **options)
        if args.bf16:
            model.register_comm_hook(group, bf16_compress_hook)
        dist.barrier(group)
        ddp, exposed = measure(ctx, model, args)
        weights = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
    of_ranks = ctx.gather(torch.tensor([[alone, ddp, exposed, weights]], dtype=torch.float64))[:ranks]
    if not (of_ranks[:, 3] == of_ranks[0, 3]).all():
        raise SystemExit(f"after the same steps, the weights of {ranks} ranks differ, so the times cannot be compared")
    return Timing(ranks, *of_ranks[:, :3].max(0).values.tolist())


def table(timings, batch_size):
    """The lines of the table."""
    one = timings[0]
    lines = [f"{'ranks':>5} {'alone ms':>10} {'DDP ms':>10} {'exposed ms':>10} {'samples/s':>10} {'efficiency':>10}"]
    for t in timings:
        rates = f"{t.samples_per_s(batch_size):10.0f} {t.efficiency(one):10.1%}"
        lines.append(f"{t.ranks:5} {t.alone:10.3f} {t.ddp:10.3f} {t.exposed:10.3f} {rates}")
    cost = f"{one.ddp - one.alone:.3f} ms of a step ({one.ddp / one.alone - 1:.1%})"
    return [*lines, f"on one rank DDP itself costs {cost}"]


def plot(timings, batch_size, path):
    """Throughput over ranks, with the ideal line. Needs matplotlib (pip install matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = [t.ranks for t in timings]
    ideal = [n * batch_size / timings[0].alone * 1e3 for n in ranks]
    plt.plot(ranks, [t.samples_per_s(batch_size) for t in timings], "o-", label="DDP")
    plt.plot(ranks, ideal, "--", label="one rank without DDP, times ranks")
    plt.xlabel("ranks")
    plt.ylabel("samples/s")
    plt.xticks(ranks)
    plt.legend()
    plt.savefig(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the timed ones")
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb")
    parser.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view")
    parser.add_argument("--static-graph", action="store_true", help="DDP's static_graph")
    parser.add_argument("--bf16", action="store_true", help="reduce the gradients as bfloat16")
    parser.add_argument("--plot", metavar="FILE", help="also draw throughput over ranks (needs matplotlib)")
    args = parser.parse_args()

    ctx = clusterddp.init()
    if args.bf16 and ctx.device.type != "cuda":
        raise SystemExit(f"--bf16 needs GPUs and NCCL, found {ctx.device}. DDP refuses that hook elsewhere")
    timings = []
    ranks = 1
    while ranks <= ctx.world_size:
        if clusterddp.stop_requested():
            clusterddp.requeue()  # restart from the beginning: one table must not mix times of two machines
        timings.append(measure_on(ctx, ranks, args))
        ranks *= 2
    ctx.print("\n".join(table(timings, args.batch_size)))
    if args.plot and ctx.is_main:
        plot(timings, args.batch_size, args.plot)


if __name__ == "__main__":
    main()
