"""The host's memory for the bytes of a checkpoint: in blocks, shared between processes, and how much is free.

Each large tensor has a separate block, so that a part can keep it. Processes share memory through a file without a
name.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import pairwise
from pathlib import Path

import torch

from clusterddp.errors import CheckpointError
from clusterddp.reporter import say

#: Bytes of the smallest tensor with its own block. Copies of smaller ones cost little.
LARGE = 1 << 16
#: The most blocks, for the largest tensors, because a process may have 65,530 mappings (``vm.max_map_count``).
MOST = 1 << 12


class Blocks:
    """``size`` bytes, cut at both ends of each large span (start, stop). A block is freed once it is unused."""

    def __init__(self, spans: Iterable[tuple[int, int]], size: int, allocate: Callable[[int], mmap.mmap]) -> None:
        large = nlargest(MOST, (span for span in spans if span[1] - span[0] >= LARGE), lambda span: span[1] - span[0])
        cuts = sorted({0, size, *(end for span in large for end in span)})
        self._starts = cuts[:-1] or [0]
        self._blocks = [memoryview(allocate(stop - start)) for start, stop in pairwise(cuts)]
        self._large = set(large)

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory of these bytes, in order."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            block, first = self._blocks[number], self._starts[number]
            view = block[start - first : stop - first]
            yield view
            start, number = start + len(view), number + 1

    def bytes_of(self, start: int, stop: int) -> tuple[torch.Tensor, bool]:
        """These bytes as a tensor, and whether no other tensor shares them."""
        views = list(self.views(start, stop))
        if len(views) != 1:  # it overlaps with another one, in a different program's file
            return torch.frombuffer(bytearray().join(views), dtype=torch.uint8), True
        alone = (start, stop) in self._large and len(views[0]) == stop - start
        self._large.discard((start, stop))
        return torch.frombuffer(views[0], dtype=torch.uint8), alone


SHARED_MEMORY = Path("/dev/shm")


def anonymous_file(purpose: str, size: int, folders: Sequence[Path] = ()) -> tuple[int, str]:
    """A memfd, else an unlinked file in /dev/shm, else in one of ``folders``: its descriptor and a description.

    An unlinked file already has ``size`` bytes, a memfd none. A memfd does not count towards the limit of /dev/shm, and
    none of these outlives its processes. Raises CheckpointError if no place has room.
    """
    try:
        return _memfd("clusterddp"), "a memfd"
    except OSError as error:
        reasons = [f"memfd_create: {error.strerror}"]
    for place in (SHARED_MEMORY, *folders):
        try:
            with tempfile.TemporaryFile(dir=place, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
                found = os.dup(file.fileno())
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
        else:
            used = f"an unlinked file in {place}"
            say(f"{purpose} is {used} ({', '.join(reasons)})")
            return found, used
    raise CheckpointError(f"could not allocate shared memory for {purpose}: {', '.join(reasons)}")


def _memfd(name: str) -> int:
    """``os.memfd_create``, also for a Python that was built on a system without it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    descriptor = call(name.encode(), 1) if call else -1  # MFD_CLOEXEC
    if descriptor < 0:
        number = ctypes.get_errno() if call else errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return int(descriptor)


#: A limit of a cgroup and the bytes that count towards it. Above ``memory.high``, the kernel slows every allocation
#: down, so that a rank hardly moves. ``memsw`` also counts what is swapped out.
CGROUP_V1 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)
CGROUP_V2 = (("memory.max", "memory.current"), ("memory.high", "memory.current"))
#: What the kernel frees when a cgroup reaches its limit, by the names of cgroup v2.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


def free_memory() -> int:
    """Bytes that this process can still allocate: the machine's available memory, limited by its cgroups."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0":
            free = min(free, left_in_cgroups(Path("/sys/fs/cgroup"), name, CGROUP_V2))
        elif "memory" in controllers.split(","):
            free = min(free, left_in_cgroups(Path("/sys/fs/cgroup/memory"), name, CGROUP_V1))
    return free


def left_in_cgroups(root: Path, name: str, limits: Sequence[tuple[str, str]]) -> int:
    """The bytes that a cgroup and its parents still allow, where the page cache counts as free."""
    left = 1 << 62
    folder = root / name.lstrip("/")
    while folder != root.parent:
        for limit, used in limits:
            with suppress(OSError):  # the root has no limits, and a container may hide the host's names
                if (most := (folder / limit).read_text().strip()) != "max":
                    left = min(left, int(most) - int((folder / used).read_text()) + _reclaimable(folder))
        folder = folder.parent
    return max(0, left)


def _reclaimable(folder: Path) -> int:
    """The bytes of a cgroup and those below it that the kernel frees when it needs them.

    In v2 every figure is of all of them. In v1 only those that begin with ``total_`` are, and Slurm's tasks are below
    job that has the limit.
    """
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in _RECLAIMABLE)
