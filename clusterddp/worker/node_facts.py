"""What may make a rank slow: facts about its node and its GPUs, in words. Linux. No torch."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from clusterddp import protocol
from clusterddp.process import cpu_ticks
from clusterddp.worker import gpus

#: For how long processes are watched, in seconds, how many are named, and from how much of a CPU on.
LOOK_S, NAMED, LEAST = 1.0, 3, 0.2


def find() -> list[str]:
    """The GPUs' clocks and temperatures where NVML is there, the load, and the busiest processes of other jobs."""
    found: list[str] = []
    with suppress(gpus.GpuLost):
        found += [fact for gpu in (gpus.current.gpus if gpus.current else []) for fact in gpu.facts()]
    found.append(f"The load is {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs")
    if others := _busiest():
        found.append(f"Other processes: {', '.join(others)}")
    return found


def _busiest() -> list[str]:
    before, began = cpu_ticks(), time.monotonic()
    time.sleep(LOOK_S)
    per_cpu = os.sysconf("SC_CLK_TCK") * (time.monotonic() - began)
    used = {pid: (ticks - before[pid]) / per_cpu for pid, ticks in cpu_ticks().items() if pid in before}
    busy = sorted((pid for pid, share in used.items() if share >= LEAST), key=lambda pid: -used[pid])
    return [f"{_name(pid)} (process {pid}) {100 * used[pid]:.0f}% of a CPU" for pid in busy if not _ours(pid)][:NAMED]


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "unknown"


def _ours(pid: int) -> bool:
    """Whether it belongs to this run, of which processes of other users never are."""
    mark = f"{protocol.RUN_DIR}={os.environ.get(protocol.RUN_DIR)}".encode()
    with suppress(OSError):
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
