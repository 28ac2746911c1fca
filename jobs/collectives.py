"""Every collective of torch.distributed: checks its result, and measures its time and bandwidth over sizes.

Bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the algorithm bandwidth is
S / t, and the bus bandwidth that times a factor for n ranks, so that it compares with the links' speed for any n:

    all_reduce                                             2 (n - 1) / n
    all_gather, reduce_scatter, all_to_all, gather, scatter  (n - 1) / n
    broadcast, reduce, send and receive                            1

S is the size of a rank's buffer in bytes, the larger one if it sends and receives different amounts. t is the time
from a barrier until the slowest rank is done, divided by the repetitions.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import clusterddp


class Prepared(NamedTuple):
    """One rank's part in a collective. ``output`` equals ``expected`` after the first call. None: no output."""

    call: Callable[[], object]
    output: torch.Tensor | None = None
    expected: torch.Tensor | None = None


# Each function prepares a collective for this rank of n. ``of(r)`` makes rank r's buffer, of a multiple of n elements.


def send_recv(rank, n, of):
    """Each even rank sends to the next rank."""
    if rank % 2:
        output = torch.zeros_like(of(rank))
        return Prepared(lambda: dist.recv(output, rank - 1), output, of(rank - 1))
    mine = of(rank)
    return Prepared(lambda: dist.send(mine, rank + 1) if rank + 1 < n else None)


def isend_irecv(rank, n, of):
    """A ring: every rank sends to the next one, in one batch, because NCCL could deadlock with two separate calls."""
    mine, output = of(rank), torch.zeros_like(of(rank))
    before, after = (rank - 1) % n, (rank + 1) % n

    def call():
        both = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, output, before)]
        for request in dist.batch_isend_irecv(both):
            request.wait()

    return Prepared(call, output, of(before))


def broadcast(rank, _, of):
    buffer = of(rank)
    return Prepared(lambda: dist.broadcast(buffer, 0), buffer, of(0))


def scatter(rank, n, of):
    output, pieces = torch.zeros_like(of(rank)[: len(of(rank)) // n]), list(of(0).chunk(n))
    return Prepared(lambda: dist.scatter(output, pieces if rank == 0 else None), output, pieces[rank])


def gather(rank, n, of):
    mine, buffer = of(rank).chunk(n)[rank].clone(), torch.zeros_like(of(rank))
    call = lambda: dist.gather(mine, list(buffer.chunk(n)) if rank == 0 else None)  # noqa: E731
    return Prepared(call, buffer, own_pieces(n, of)) if rank == 0 else Prepared(call)


def reduce(rank, n, of):
    buffer = of(rank)
    call = lambda: dist.reduce(buffer, 0)  # noqa: E731
    return Prepared(call, buffer, total(n, of)) if rank == 0 else Prepared(call)


def all_reduce(rank, n, of):
    buffer = of(rank)
    return Prepared(lambda: dist.all_reduce(buffer), buffer, total(n, of))


def all_gather(rank, n, of):
    mine, buffer = of(rank).chunk(n)[rank].clone(), torch.zeros_like(of(rank))
    return Prepared(lambda: dist.all_gather(list(buffer.chunk(n)), mine), buffer, own_pieces(n, of))


def reduce_scatter(rank, n, of):
    pieces, output = list(of(rank).chunk(n)), torch.zeros_like(of(rank).chunk(n)[0])
    return Prepared(lambda: dist.reduce_scatter(output, pieces), output, total(n, of).chunk(n)[rank])


def all_to_all(rank, n, of):
    pieces, buffer = list(of(rank).chunk(n)), torch.zeros_like(of(rank))
    expected = torch.cat([of(other).chunk(n)[rank] for other in range(n)])
    return Prepared(lambda: dist.all_to_all(list(buffer.chunk(n)), pieces), buffer, expected)


def barrier(*_):
    return Prepared(lambda: dist.barrier())


def subgroup(rank, n, of):
    """all_reduce among the even and among the odd ranks, at the same time. Every rank creates both groups."""
    groups = [dist.new_group(range(parity, n, 2)) for parity in (0, 1)]
    buffer, group = of(rank), groups[rank % 2]
    expected = torch.stack([of(other) for other in range(rank % 2, n, 2)]).sum(0)
    return Prepared(lambda: dist.all_reduce(buffer, group=group), buffer, expected)


def own_pieces(n, of):
    """Piece r of rank r's buffer, for all r, concatenated."""
    return torch.cat([of(rank).chunk(n)[rank] for rank in range(n)])


def total(n, of):
    return torch.stack([of(rank) for rank in range(n)]).sum(0)


COLLECTIVES = (
    *(send_recv, isend_irecv, broadcast, scatter, gather, reduce),
    *(all_reduce, all_gather, reduce_scatter, all_to_all, barrier, subgroup),
)


def bus_factor(collective, n):
    """The ratio of bus bandwidth to algorithm bandwidth. The larger one of the two subgroups counts."""
    if collective in (all_gather, reduce_scatter, all_to_all, gather, scatter):
        return (n - 1) / n
    if collective is subgroup:
        n = (n + 1) // 2
    return 2 * (n - 1) / n if collective in (all_reduce, subgroup) else 1


def buffers(length, device):
    """Makes each rank's buffer: no two ranks and no two pieces have the same values.

    Integers small enough for exact sums in float32, for up to 2,000 ranks.
    """
    return lambda rank: (torch.arange(length, device=device) % 1009 + 3 * rank).float()


def check(ctx, name, prepared):
    """Calls it once. Exits on all ranks if any output is wrong. Returns False if the backend lacks the collective."""
    try:
        prepared.call()
    except RuntimeError as error:
        if "support" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        ctx.print(f"{name:15} not supported by {dist.get_backend()} of torch {torch.__version__}: {reason}")
        return False
    right = prepared.output is None or torch.equal(prepared.output, prepared.expected)
    wrong = int(ctx.all_reduce_sum(float(not right)))
    if wrong:
        raise SystemExit(f"{name} is wrong on {wrong} of {ctx.world_size} ranks")
    return True


def measure(ctx, name, call, size, factor, repetitions):
    """Prints the slowest rank's time per call. Sums in place may overflow to infinity meanwhile, at no cost in time."""
    call()
    dist.barrier()
    synchronize(ctx)
    started = time.perf_counter()
    for _ in range(repetitions):
        call()
    synchronize(ctx)
    taken = float(ctx.gather(torch.tensor([time.perf_counter() - started])).max()) / repetitions
    bandwidth = size / taken / 1e9
    ctx.print(f"{name:15} {size:12} {taken * 1e6:12.1f} {bandwidth:12.4g} {bandwidth * factor:12.4g}")


def synchronize(ctx):
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()


def check_and_measure(ctx, collective, size, repetitions):
    """Checks and times one collective. ``size``: of each rank's buffer in bytes, rounded up to 4 x ranks."""
    length = -(-size // (4 * ctx.world_size)) * ctx.world_size
    prepared = collective(ctx.rank, ctx.world_size, buffers(length, ctx.device))
    if check(ctx, collective.__name__, prepared):
        factor = bus_factor(collective, ctx.world_size)
        measure(ctx, collective.__name__, prepared.call, 4 * length, factor, repetitions)


def measure_pairs(ctx, size, repetitions):
    """all_reduce among the ranks of each pair of nodes in turn: a slow link or node stands out."""
    nodes = ctx.gather(torch.tensor([ctx.node_rank])).tolist()
    for pair in itertools.combinations(sorted(set(nodes)), 2):
        ranks = [rank for rank, node in enumerate(nodes) if node in pair]
        group = dist.new_group(ranks)
        buffer = buffers(size // 4, ctx.device)(ctx.rank)
        call = (lambda: dist.all_reduce(buffer, group=group)) if ctx.rank in ranks else (lambda: None)  # noqa: B023
        factor = bus_factor(all_reduce, len(ranks))
        measure(ctx, f"nodes {pair[0]} and {pair[1]}", call, size // 4 * 4, factor, repetitions)
        if ctx.rank in ranks:
            dist.destroy_process_group(group)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**10, 2**16, 2**20, 2**24], help="in bytes")
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()

    ctx = clusterddp.init()
    if ctx.world_size < 2:
        raise SystemExit("needs at least 2 ranks, but there is 1. Use --gpus 2 or --nodes 2")
    ctx.print(f"{ctx.world_size} ranks, {dist.get_backend()}, torch {torch.__version__}, bandwidths as in nccl-tests")
    ctx.print(f"{'collective':15} {'bytes':>12} {'us':>12} {'algbw GB/s':>12} {'busbw GB/s':>12}")
    for collective in COLLECTIVES:
        for size in args.sizes if collective is not barrier else [0]:
            if clusterddp.stop_requested():
                clusterddp.requeue()  # restart from the beginning: one table should not mix two machines
            check_and_measure(ctx, collective, size, args.repetitions)
    measure_pairs(ctx, max(args.sizes), args.repetitions)
    ctx.print("all results are correct")


if __name__ == "__main__":
    main()
