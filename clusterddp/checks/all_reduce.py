"""Whether an all-reduce over the process group gives the right sum, and how fast it is. Functions import torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

#: Elements of the tensors, 4 bytes each: 64 MiB over NCCL, 4 MiB over gloo, 1 MiB if only the sum matters.
GPU_ELEMENTS, CPU_ELEMENTS, FEW_ELEMENTS = 2**24, 2**20, 2**18
REPETITIONS = 5


class NoAnswer(ClusterddpError):
    """An all-reduce did not end in time."""


def sum_is_right(device: torch.device, elements: int, timeout_s: float) -> bool:
    """Sums a tensor that differs between ranks and compares every element. Collective. Raises NoAnswer.

    The elements are small whole numbers, whose sum is exact in any order.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(elements, dtype=torch.float32, device=device).remainder_(7)
    tensor = pattern * weight(rank)
    finish(dist.all_reduce(tensor, async_op=True), timeout_s)
    return torch.equal(tensor, pattern * sum(map(weight, range(world_size))))


def weight(rank: int) -> int:
    """The factor of a rank's tensor. The sum of a thousand ranks is still exact in float32."""
    return rank % 64 + 1


def finish(work: dist.Work | None, timeout_s: float) -> None:
    """Waits for an asynchronous collective. Raises NoAnswer after ``timeout_s`` seconds, and the collective's error."""
    deadline = time.monotonic() + timeout_s
    while work is not None and not work.is_completed():
        if time.monotonic() > deadline:
            raise NoAnswer(f"an all-reduce did not end within {timeout_s:g} s")
        time.sleep(0.001)
    if work is not None:
        work.wait()


def bandwidth(device: torch.device, elements: int) -> float:
    """The bus bandwidth in bytes per second, as ``bench collectives`` reports it. 0 for a single rank. Collective."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    tensor = torch.zeros(elements, device=device)
    dist.all_reduce(tensor)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.monotonic()
    for _ in range(REPETITIONS):
        dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.monotonic() - started) / REPETITIONS
    return 2 * (ranks - 1) / ranks * 4 * elements / seconds
