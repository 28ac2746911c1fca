"""Simulated ranks: ``python -m benchmarks.scale.stubs``, many connections in one process, with the real protocol.

Requests are JSON lines on stdin, answers JSON lines on stdout. The ranks do what ``worker/rank.py`` does with its
connection: join, send heartbeats, confirm a stop, answer with stacks, leave when they are told to.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from clusterddp.worker.control_channel import keep_alive

PORT, FRAMES = 29_000, 30
#: The first pause before a rank whose connection was closed without an answer joins again.
PAUSE_S = 0.2


@dataclass
class Stub:
    """One rank's connection."""

    rank: int
    connection: socket.socket
    joined: bool = False
    pending: bytes = b""
    tries: int = 0


@dataclass
class Counts:
    """What the ranks of this process have seen and sent."""

    joined: int = 0
    displaced: int = 0
    lost: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)


class Stubs:
    """The simulated ranks of this process."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._stubs: dict[int, Stub] = {}
        self._strangers: list[socket.socket] = []
        self._again: list[tuple[float, int, int]] = []  # when, rank, tries
        self._hello: Callable[[int], dict[str, Any]] = lambda _: {}
        self._address = ("127.0.0.1", 0)
        self._beat_s, self._next_beat, self._beaten = 0.0, 0.0, 0
        self.counts = Counts()

    def serve(self) -> None:
        """Carries out requests until the end of the input."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is not None:
                    self._receive(key.data)
                    continue
                if not (data := os.read(sys.stdin.fileno(), 65536)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    ((name, values),) = json.loads(line).items()
                    print(json.dumps(getattr(self, f"do_{name}")(**values)), flush=True)
            self._join_again()
            self._beat()

    def _wait_s(self) -> float | None:
        due = [self._again[0][0]] if self._again else []
        due += [self._next_beat] if self._beat_s else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    # --- requests

    def do_join(self, port: int, token: str, first: int, count: int) -> dict[str, Any]:
        """Connects all ranks as fast as it can."""
        self._address = ("127.0.0.1", port)
        node = lambda rank: f"n{rank // 8:05}"  # noqa: E731
        self._hello = lambda rank: {
            "token": token,
            "rank": rank,
            "port": PORT if rank == 0 else None,
            "host": node(rank),
            "pid": 1000 + rank,
            "process": f"{rank:032x}",
        }
        for rank in range(first, first + count):
            self._connect(rank, 0)
        return {}

    def do_flood(self, port: int, count: int) -> dict[str, Any]:
        """Strangers connect and say nothing; earlier ones are closed."""
        for stranger in self._strangers:
            stranger.close()
        self._strangers = []
        for _ in range(count):
            with suppress(OSError):
                self._strangers.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        return {"open": len(self._strangers)}

    def do_beat(self, every_s: float) -> dict[str, Any]:
        """Each rank sends a heartbeat every so many seconds, evenly spread; 0 ends that."""
        self._beat_s, self._next_beat = every_s, time.monotonic()
        return {}

    def do_fail(self, rank: int) -> dict[str, Any]:
        """Breaks a rank's connection, as a kill does; when."""
        self._close(self._stubs[rank])
        return {"at": time.time()}

    def do_leave(self) -> dict[str, Any]:
        """Breaks all connections."""
        for stub in list(self._stubs.values()):
            self._close(stub)
        return {}

    def do_counts(self) -> dict[str, Any]:
        """What has been counted so far."""
        of = self.counts
        seen = {"joined": of.joined, "displaced": of.displaced, "lost": of.lost, "open": len(self._stubs)}
        return {**seen, "sent": of.sent, "sent_bytes": of.sent_bytes, "heard": of.heard}

    # --- connections

    def _connect(self, rank: int, tries: int) -> None:
        connection = socket.socket()
        # Linux has some 28,000 ports per pair of addresses: a process of stubs has its own address.
        connection.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        connection.bind((f"127.0.{1 + rank // 8 // 250}.{1 + rank // 8 % 250}", 0))
        connection.connect(self._address)
        keep_alive(connection)
        stub = Stub(rank, connection, tries=tries)
        self._stubs[rank] = stub
        self._selector.register(connection, selectors.EVENT_READ, stub)
        self._send(stub, "hello", self._hello(rank))
        connection.setblocking(False)

    def _close(self, stub: Stub) -> None:
        self._selector.unregister(stub.connection)
        stub.connection.close()
        del self._stubs[stub.rank]

    def _send(self, stub: Stub, kind: str, message: dict[str, Any]) -> None:
        data = (json.dumps(message) + "\n").encode()
        self.counts.sent[kind] += 1
        self.counts.sent_bytes[kind] += len(data)
        with suppress(ConnectionError):
            stub.connection.setblocking(True)
            stub.connection.sendall(data)
            stub.connection.setblocking(False)

    def _receive(self, stub: Stub) -> None:
        try:
            data = stub.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            assert error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT), error
            data = b""
        if not data:
            self._close(stub)
            if stub.joined:
                self.counts.lost += 1
            else:
                self.counts.displaced += 1
                pause_s = min(5.0, PAUSE_S * 2**stub.tries) * random.uniform(0.5, 1.5)
                self._again.append((time.monotonic() + pause_s, stub.rank, stub.tries + 1))
                self._again.sort()
            return
        *lines, stub.pending = (stub.pending + data).split(b"\n")
        for line in lines:
            self._hear(stub, json.loads(line))

    def _join_again(self) -> None:
        while self._again and self._again[0][0] <= time.monotonic():
            _, rank, tries = self._again.pop(0)
            self._connect(rank, tries)

    def _hear(self, stub: Stub, message: dict[str, Any]) -> None:
        if not stub.joined:
            assert "host" in message, message
            stub.joined = True
            self.counts.joined += 1
            self.counts.heard["answer"] += 1
            return
        order = message["order"]
        self.counts.heard[order] += 1
        end = {"rank": stub.rank, "host": f"n{stub.rank // 8:05}", "started": 1.0, "used_clusterddp": True}
        if order == "stop":
            self._send(stub, "notified", {"event": "notified", "reason": message["reason"]})
            if stub.rank == 0:
                self._send(stub, "stopping", {"event": "stopping", "step": 7, "reason": message["reason"]})
            self._send(stub, "left", {"event": "left", **end, "end": "stopped", "step": 7, "reason": message["reason"]})
            self._close(stub)
        elif order == "send_stacks":
            frames = [f"/home/user/project/module_{number}.py:{number} (function_{number})" for number in range(FRAMES)]
            threads = [{"name": name, "frames": frames} for name in ("MainThread", "heartbeat", "agreement")]
            place = "the all_reduce of backward" if stub.rank % 512 else "data.py:88 (read)"
            self._send(
                stub, "stacks", {"event": "stacks", "request": message["request"], "place": place, "threads": threads}
            )
        elif order == "leave":
            self._send(stub, "left", {"event": "left", **end, "end": "dismissed", "error": message["why"]})
            self._close(stub)

    def _beat(self) -> None:
        """The heartbeats that are due: of all ranks in turn, once per period."""
        if not self._beat_s or (now := time.monotonic()) < self._next_beat:
            return
        ranks = sorted(self._stubs)
        share = max(1, len(ranks) // 50)
        for rank in [ranks[(self._beaten + number) % len(ranks)] for number in range(share)] if ranks else ():
            self._send_beat(self._stubs[rank])
        self._beaten += share
        self._next_beat = now + self._beat_s * share / max(1, len(ranks))

    def _send_beat(self, stub: Stub) -> None:
        own_s = round(random.uniform(0.08, 0.09), 6)
        beat = {"event": "alive", "count": 100, "step": 99, "age_s": 0.0, "allowed_s": 600.0, "own_s": own_s}
        self._send(stub, "alive", {**beat, "step_s": 0.1, "timing": [100, 1.25, 8.5, 0.25, None]})


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    Stubs().serve()
