"""A rank's device: which one it is, and whether it computes correctly. Functions import torch."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from clusterddp.checks.check import Check, failed, ok, warning
from clusterddp.errors import DeviceError

if TYPE_CHECKING:
    import torch

#: Rows and columns of the matrices, a multiple of PERIOD: 64 MiB in float32 on a GPU. On a CPU, and on a GPU with fewer
#: multiprocessors than FEW, as a part of one may have, they are smaller.
GPU_SIZE, CPU_SIZE, PERIOD, FEW = 4096, 512, 8, 8
GIB = 2**30
#: The fraction of a GPU's memory that should be free before training.
FREE = 0.9
REPLACE = "leave the node out with --exclude, and report it to the administrator"


def identify(device: torch.device) -> Check:
    """Checks the device. A GPU's memory must be free, because no other process should use it."""
    import torch

    from clusterddp.distributed.devices import gpu_identity

    if device.type != "cuda":
        return ok("device", f"CPU, {len(os.sched_getaffinity(0))} cores", cores=len(os.sched_getaffinity(0)))
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return judge_gpu(properties.name, gpu_identity(device), free, total, os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge_gpu(name: str, uuid: str, free: int, total: int, visible: str | None) -> Check:
    """From what torch says of a GPU, and CUDA_VISIBLE_DEVICES. Ranks with the same ``uuid`` (``gpu_identity``) share
    a GPU."""
    found = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    values = {"uuid": uuid, "free": free, "total": total, "visible": visible}
    if free < FREE * total:
        return warning(
            "device", found, "another process uses this GPU. Find it with nvidia-smi or rocm-smi on the node", **values
        )
    return ok("device", found, **values)


def health(device: torch.device) -> Check:
    """What NVIDIA's management library says of the GPU: errors of its memory, and a clock that is reduced."""
    from clusterddp.distributed.devices import gpu_identity
    from clusterddp.worker import gpus

    if gpus.library() is None:
        return ok("health", "GPU health unknown without nvidia-ml-py and NVIDIA's driver")
    gpu = None
    with suppress(DeviceError):  # torch cannot identify it
        gpu = gpus.identified(gpu_identity(device))
    if gpu is None:
        return ok("health", "GPU health unknown: NVML does not list this GPU")
    if problems := gpu.problems():
        return warning("health", f"GPU {gpu.number}: {', '.join(problems)}", "report it to the administrator")
    return ok("health", f"GPU {gpu.number} healthy")


def multiply(device: torch.device) -> Check:
    """Allocates matrices on the device, multiplies them and compares every element of the product.

    The matrices have ones and zeros in a pattern, whose product is known and exact, even in float16.
    """
    import torch

    types = (torch.float32, torch.float16) if device.type == "cuda" else (torch.float32,)
    many = device.type == "cuda" and torch.cuda.get_device_properties(device).multi_processor_count >= FEW
    size = GPU_SIZE if many else CPU_SIZE
    index = torch.arange(size, device=device)
    rows, columns = index[:, None], index[None, :]
    tile = torch.tensor(product_tile(size), device=device)
    for dtype in types:
        left, right = ((rows + columns) % 8 < 4).to(dtype), ((3 * rows + columns) % 8 < 4).to(dtype)
        wrong = int((left @ right != tile.to(dtype).repeat(size // PERIOD, size // PERIOD)).sum())
        if wrong:
            found = (
                f"{wrong:,} of {size * size:,} elements of a matrix product in {str(dtype).removeprefix('torch.')} are "
                "wrong"
            )
            return failed("compute", found, REPLACE)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ok("compute", "matrix products are correct")


def product_tile(size: int) -> list[list[int]]:
    """The first rows and columns of the product of ``multiply``'s matrices. It repeats with the same period."""
    period = range(PERIOD)
    left = [[(row + column) % 8 < 4 for column in period] for row in period]
    right = [[(3 * row + column) % 8 < 4 for column in period] for row in period]
    return [[size // PERIOD * sum(left[i][k] and right[k][j] for k in period) for j in period] for i in period]
