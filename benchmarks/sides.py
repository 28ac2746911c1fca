"""Sides that take turns in processes of their own: ranks on this machine, each of which runs a benchmark's module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from tests.ddp import free_port

T = TypeVar("T")
REQUEST = "BENCHMARK_REQUEST"


def run_ranks(module: str, request: Mapping[str, Any], ranks: int = 1, **environment: str) -> Any:
    """Runs ``python -m module`` as so many ranks; returns what ``answered`` writes in rank 0."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer.json"
        asked = {**request, "ranks": ranks, "port": port}
        common = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment}
        processes = []
        for rank in range(ranks):
            words = json.dumps([str(result), {**asked, "rank": rank}])
            processes.append(subprocess.Popen([sys.executable, "-m", module], env={**common, REQUEST: words}))
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            sys.exit(f"{module}: the processes ended with {codes}")
        return json.loads(result.read_text())


def answered(measure: Callable[..., Any]) -> bool:
    """Whether this is such a process. If so, ``measure`` has got the request, ``rank``, ``ranks`` and ``port``."""
    if REQUEST not in os.environ:
        return False
    result, asked = json.loads(os.environ.pop(REQUEST))
    figures = measure(**asked)
    if asked["rank"] == 0:
        Path(result).write_text(json.dumps(figures))
    return True


def join(rank: int, ranks: int, port: int) -> None:
    """The process group of these ranks."""
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=300))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def rotated(sides: Sequence[T], number: int) -> list[T]:
    """The order changes, so that no side always follows the same one."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def bytes_read() -> int:
    """The bytes that this process has got from read() and the like so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def files_of(path: Path) -> list[Path]:
    """The files in a folder, or the file itself."""
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def drop_from_cache(path: Path) -> None:
    """A file, or the files of a folder."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
