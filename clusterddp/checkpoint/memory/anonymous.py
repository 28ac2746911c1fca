"""Memory that processes share, as a file without a name, and how much is free. Without torch."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clusterddp.errors import CheckpointError
from clusterddp.reporter import say

SHARED_MEMORY = Path("/dev/shm")


def anonymous_file(purpose: str, size: int, folders: Sequence[Path] = ()) -> tuple[int, str]:
    """A memfd, else an unlinked file in /dev/shm, else in one of ``folders``: its descriptor and a description.

    An unlinked file has ``size`` bytes already, a memfd none. A memfd does not count towards the limit of /dev/shm, and
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
            say(f"{purpose} is {used} ({'; '.join(reasons)})")
            return found, used
    raise CheckpointError(f"cannot allocate shared memory for {purpose}: {'; '.join(reasons)}")


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


def free_memory() -> int:
    """Bytes that this process can still allocate: the machine's available memory, limited by its cgroups."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0":
            free = min(free, left_in_cgroups(Path("/sys/fs/cgroup"), name, "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            free = min(free, left_in_cgroups(Path("/sys/fs/cgroup/memory"), name, *names))
    return free


def left_in_cgroups(root: Path, name: str, limit: str, used: str) -> int:
    """The bytes that a cgroup and its parents still allow; the page cache counts as free."""
    left = 1 << 62
    folder = root / name.lstrip("/")
    while folder != root.parent:
        try:
            most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            pass  # the root has no limits, and a container may hide the host's names
        else:
            if most != "max":
                cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
                left = min(left, int(most) - now + cache)
        folder = folder.parent
    return max(0, left)
