"""How sides are measured: in turns, in processes of their own, by what each takes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tests.ddp import free_port

K = TypeVar("K")
T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = REPOSITORY / "benchmarks" / "scripts"
REQUEST = "BENCHMARK_REQUEST"
#: Rounds that are made even if the time is over.
LEAST = 2


def in_turns(
    sides: Mapping[K, Callable[[], T]], rounds: int, *, warm_up: int = 1, seconds: float = math.inf
) -> dict[K, list[T]]:
    """What each side gives, round by round.

    The first rounds, which fill caches, are left out; none is begun after ``seconds``.
    """
    found: dict[K, list[T]] = {name: [] for name in sides}
    deadline = time.monotonic() + seconds
    for number in range(-warm_up, rounds):
        if number >= LEAST and time.monotonic() > deadline:
            break
        for name in rotated(list(sides), number):
            value = sides[name]()
            found[name] += [value] if number >= 0 else []
    return found


def rotated(sides: Sequence[T], number: int) -> list[T]:
    """The order changes, so that no side always follows the same one, and a drift of the machine is on no side."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def seconds(do: Callable[[], Any]) -> float:
    """That a call takes."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


# ---- processes


@dataclass(frozen=True)
class Cost:
    """What a process and its children took; ``memory``: the largest resident set of one of them, in bytes."""

    wall_s: float
    cpu_s: float
    memory: int


def cost_of(start: Callable[[], subprocess.Popen[Any]]) -> Cost:
    """Of a process, from its start to its end; exits if it fails."""
    began = time.monotonic()
    process = start()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{process.args!r}: exit code {process.returncode}")
    return Cost(time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def of_python(*words: object) -> Cost:
    """What this interpreter takes with these arguments."""
    command = [sys.executable, *map(str, words)]
    return cost_of(lambda: subprocess.Popen(command, stdout=subprocess.DEVNULL))


def local_run(script: Path, folder: Path, ranks: int, *arguments: object, options: Sequence[object] = ()) -> list[str]:
    """The command of a run on this machine's CPUs, in FOLDER/run. ``arguments``: the script's."""
    run = [sys.executable, "-m", "clusterddp", "submit", script, "--local", "--run-dir", folder / "run"]
    shape = ["--device", "cpu", "--gpus", ranks, "--set", "progress_interval=off", *options]
    return list(map(str, [*run, *shape, "--", *arguments]))


def torchrun_variables(rank: int, ranks: int, port: int, threads: int) -> dict[str, str]:
    """The environment of a rank on this machine that a launcher like torchrun starts."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
    place = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**os.environ, **place, **{name: str(value) for name, value in numbers.items()}}


def run_ranks(module: str, request: Mapping[str, Any], ranks: int = 1, **environment: str) -> Any:
    """Runs ``python -m module`` as so many ranks; returns what ``answered`` writes in rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer.json"
        asked = {**request, "ranks": ranks, "port": free_port()}
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
    import torch.distributed as dist  # here, as the memory of a process is a lower bound of ``cost_of`` its children's

    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=300))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


# ---- what a process has taken so far


def memory(process: int | str, field: str) -> int:
    """A field of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def bytes_read() -> int:
    """The bytes that this process has got from read() and the like so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def drop_from_cache(file: Path) -> None:
    """A file's pages, from the kernel's cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1000 * value for value in seconds]
