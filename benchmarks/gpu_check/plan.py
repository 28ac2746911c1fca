"""All cases, the most valuable first: the time may not suffice for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.gpu_check import costs, devices, faults, pairs, training
from benchmarks.gpu_check.case import Case, Lab, Speeds

#: Of the machine that the page's bounds are for; every call measures its own.
ASSUMED = Speeds(start_s=8.0, copy=20.0, fill=1.0, disk=1.0)


def cases(ranks: int) -> list[Case]:
    """With NCCL on so many ranks, one per GPU."""
    sizes = sorted({1, ranks, *(2**power for power in range(10) if 2**power < ranks)})
    return [
        *(Case(f"start-{n}", "NCCL starts, and sums over all ranks", partial(training.start, ranks=n)) for n in sizes),
        Case("wrap", "eleven variants of ctx.wrap() have the right gradients", training.wrap),
        Case("folder", "CheckpointFolder restores the bits of the save, with and without NCCL", training.folder),
        Case("exact", "preempted, killed and preempted: the bits of an uninterrupted run", training.exact, 5, 20),
        Case(
            "snapshot", "checkpoints hold the state of their step while later steps change it", training.snapshot,
            1, 10, lambda sizes: 6 * sizes.megabytes / 1e3,
        ),
        Case("unsynchronized", "steps, logs and saves never wait for the device", costs.unsynchronized, 1, 10),
        Case("out-of-memory", "the error is blamed on the script, the restart completes", faults.out_of_memory, 2),
        Case("device-assert", "the same of a device-side assert", faults.device_assert, 2),
        Case("illegal-access", "the same of an illegal memory access", faults.illegal_access, 2),
        Case("nvml", "the GPUs' figures, the Xid of an invalid access, what the looks cost", faults.nvml, 3, 40),
        Case("hang-device", "a kernel that never ends: the rank is named, the run completes", _hang("device"), 2, 20),
        Case("collective", "NCCL behind an endless kernel ends by torch's timeout", faults.collective, 2, 30),
        Case("spinning", "a preemption while the device computes for 5 s loses no step", faults.spinning, 2, 10),
        Case(
            "held", "killed with 70 GB of device memory, the restart allocates 70 GB", faults.held, 2, 20,
            lambda sizes: sizes.held_gb / 100,
        ),
        Case("two-ranks", "two gloo ranks on one GPU: divergence, hang and restore", faults.two_ranks, 3, 20),
        Case("workers", "loader workers and a device that lags change no bit", training.workers, 3, 20),
        Case("graph", "CUDA graphs are captured in mode thread_local beside saves", _graph("thread_local"), 1, 10),
        Case("graph-global", "the same in torch's default mode", _graph("global"), 1, 10),
        Case("whole-step", "a CUDA graph of the whole step, stopped in an evaluation", devices.whole_step, 3),
        Case("tensor-lr", "a learning rate and steps on the device are restored there", devices.tensor_lr, 3),
        Case("lead", "the host is at most two steps ahead, and a stop waits for few", devices.lead, 1, 20),
        Case("unpinned", "where CUDA refuses to pin memory, saves continue", devices.unpinned),
        Case("fingerprints", "a comparison on a device with 90% of its memory in use", devices.fingerprints),
        Case("first-bucket", "two GPUs: the first bucket is ready as early as in plain DDP", pairs.first_bucket, 1, 10),
        Case("killed", "two GPUs: a rank dies during an all-reduce, the run completes", pairs.killed, 2, 20),
        Case("absent", "two GPUs: a rank never connects, the run completes in the next attempt", pairs.absent, 2, 40),
        Case("digits", "jobs/digits.yaml as it stands", training.digits, 2, 10),
        Case(
            "costs", "a step of 1,000 parameters beside DDP alone, a save beside torch's copies", costs.costs, 1, 90,
            lambda sizes: 2 * sizes.pairs * sizes.megabytes / 1e4,
        ),
        Case(
            "fast", "exact with channels_last, fused AdamW, capturable Adam, expandable segments", training.fast, 5, 20
        ),
        Case("exact-bfloat16", "exact with autocast", _exact("--amp", "bfloat16"), 5, 20),
        Case("exact-float16", "exact with autocast and GradScaler", _exact("--amp", "float16"), 5, 20),
        Case("suspended", "SIGSTOP for longer than each timeout, then SIGCONT", faults.suspended, 2, 30),
        Case(
            "reduce-overhead", "exact with torch.compile's CUDA graphs",
            _compiled("--mode", "reduce-overhead", graphs=True), 5, 60,
        ),
        Case("exact-compile", "exact with torch.compile", _compiled(), 5, 60),
        Case("hang-host", "a hang in Python: the rank is named", _hang("host"), 2, 15),
        Case(
            "large-state", "20 GB in 3,000 tensors: stall, seconds and memory beside torch.save and torch.load",
            costs.large_state, 2, 10, costs.large_state_moved,
        ),
        Case("exact-compile-bfloat16", "exact with torch.compile and autocast", _compiled("--amp", "bfloat16"), 5, 60),
    ]  # fmt: skip


def _hang(where: str) -> Callable[[Lab], tuple[str, dict[str, object]]]:
    return partial(faults.hang, where=where)


def _graph(mode: str) -> Callable[[Lab], tuple[str, dict[str, object]]]:
    return partial(costs.graph, mode=mode)


def _exact(*script: str) -> Callable[[Lab], tuple[str, dict[str, object]]]:
    return lambda lab: training.exact(lab, *script)


def _compiled(*script: str, graphs: bool = False) -> Callable[[Lab], tuple[str, dict[str, object]]]:
    return lambda lab: training.compiled(lab, *script, graphs=graphs)
