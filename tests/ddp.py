"""Starts real gloo ranks on this machine, and gathers what they left."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.worker.rank import reserve_port
from tests.gpu import build

REPOSITORY = Path(__file__).parent.parent
#: What all ranks that have exited used, with the processes that they waited for.
cpu_seconds = 0.0


@dataclass
class Rank:
    """One rank, a process forked by ``rank_server``."""

    pid: int
    devices: int = 0
    code: int | None = None

    def poll(self) -> int | None:
        global cpu_seconds
        if self.code is None:
            self.code, used = _ask({"poll": self.pid}, self.devices)
            cpu_seconds += used
        return self.code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass
class Ranks:
    """Processes that run one script as the ranks of a world; ``run`` and ``start`` make them."""

    processes: list[Rank]
    outputs: list[Path]
    #: Holds the port of rank 0's store.
    held: socket.socket
    codes: list[int] = field(default_factory=list)

    def signal(self, rank: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.processes[rank].send_signal(number)

    def wait(self, timeout: float = 60) -> Ranks:
        """Waits for all; kills them after the timeout."""
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > deadline:
                for process in self.processes:
                    process.send_signal(signal.SIGPROF)
                time.sleep(1)  # rank_server.py makes that print the stacks
                for process in self.processes:
                    process.send_signal(signal.SIGKILL)
                raise AssertionError(f"ranks still run after {timeout} s:\n{self.text()}")
            time.sleep(0.01)
        self.codes = [process.poll() or 0 for process in self.processes]
        self.held.close()
        return self

    def wait_for(self, rank: int, text: str, timeout: float = 60) -> None:
        """Waits until a rank has printed ``text``."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            assert time.monotonic() < deadline, f"{text!r} not seen:\n{self.text()}"
            assert self.processes[rank].poll() is None, f"rank {rank} ended before {text!r}:\n{self.text()}"
            time.sleep(0.01)

    def output(self, rank: int) -> str:
        return self.outputs[rank].read_text()

    def text(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(len(self.outputs)))

    def expect(self, *codes: int) -> Ranks:
        """Waits, and checks that every rank ended with one of ``codes``."""
        self.wait()
        assert all(code in codes for code in self.codes), f"{self.codes}\n{self.text()}"
        return self


def start(script: Path, *arguments: object, ranks: int, folder: Path, devices: int = 0, **environment: str) -> Ranks:
    """Starts ``script`` as ``ranks`` ranks of one node, with so many stand-in devices; outputs go to ``folder``."""
    held = reserve_port(None)  # until the ranks have ended: other tests choose ports from the same range
    port = str(held.getsockname()[1])
    environments = [
        environment_of(rank, ranks, port) | standin_environment(devices) | environment for rank in range(ranks)
    ]
    return _start(script, arguments, environments, folder, held, devices)


def run(script: Path, *arguments: object, ranks: int, folder: Path, devices: int = 0, **environment: str) -> Ranks:
    """``start``, and every rank must end with 0."""
    return start(script, *arguments, ranks=ranks, folder=folder, devices=devices, **environment).expect(0)


def run_alone(script: Path, *arguments: object, folder: Path) -> Ranks:
    """Runs ``script`` as one process that no launcher has started; it must end with 0."""
    return _start(script, arguments, [_clean_environment()], folder, reserve_port(None)).expect(0)


def _start(
    script: Path,
    arguments: Sequence[object],
    environments: Sequence[dict[str, str]],
    folder: Path,
    held: socket.socket,
    devices: int = 0,
) -> Ranks:
    folder.mkdir(parents=True, exist_ok=True)
    processes, outputs = [], []
    for rank, environment in enumerate(environments):
        output = folder / f"{time.monotonic_ns()}-{rank}.out"
        output.touch()
        argv = [str(script), *map(str, arguments)]
        request = {"start": {"argv": argv, "env": environment, "output": str(output)}}
        processes.append(Rank(_ask(request, devices), devices))
        outputs.append(output)
    return Ranks(processes, outputs, held)


@functools.cache
def _server(devices: int) -> subprocess.Popen[str]:
    """One for the whole test session and each number of devices; it ends with it, as its input does."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "rank_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment_of(0, 1, "0") | standin_environment(devices),
        text=True,
    )


def _ask(request: dict[str, Any], devices: int) -> Any:
    server = _server(devices)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def free_port() -> int:
    """One that no other program gets until it is used: the kernel gives none to those who ask for any from there."""
    with reserve_port(None) as held:
        return int(held.getsockname()[1])


def environment_of(rank: int, ranks: int, port: str) -> dict[str, str]:
    """A clean environment with torchrun's names."""
    return {
        **_clean_environment(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def standin_environment(devices: int) -> dict[str, str]:
    """What turns on so many stand-in devices; empty for none."""
    if not devices:
        return {}
    found = build.environment(devices)
    return {**found, "PYTHONPATH": f"{found['PYTHONPATH']}:{REPOSITORY}"}


def _clean_environment() -> dict[str, str]:
    """Without the variables of a surrounding job."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # torch's store looks up the name of every client, and one lost answer of a DNS server would cost 5 s.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
