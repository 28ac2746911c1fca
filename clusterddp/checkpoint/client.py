"""Rank 0's side of a save: copies the state and has the writer process make the copy durable."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.snapshot import Snapshot
from clusterddp.checkpoint.state import pack, tensor_facts
from clusterddp.errors import Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.process import module_command
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import signals

#: Seconds that a clean end waits for the writer to leave.
LEAVE_S = 5.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is committed: of which step, how large the file is, and since when (CLOCK_MONOTONIC)."""

    step: int
    bytes: int
    at: float


class NotSaved(Exception):
    """A save failed for want of space, by an I/O error or with its writer; what was there before is untouched.

    ``metrics``: whether it is the metrics that could not be made durable.
    """

    def __init__(self, step: int, reason: str, metrics: bool = False) -> None:
        super().__init__(reason)
        self.step, self.metrics = step, metrics


class CheckpointClient:
    """The snapshot and its writer. One save at a time: not before ``result`` has told of one is the next begun."""

    def __init__(self, directory: RunDirectory, attempt: int, keep: Keep, device: torch.device) -> None:
        self._first = {"run": str(directory), "attempt": attempt, "keep": dataclasses.asdict(keep)}
        self._snapshot = Snapshot(device, directory.private)
        self._writer: subprocess.Popen[bytes] | None = None
        self._requests: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._sent = threading.Event()
        self._sent.set()
        threading.Thread(target=self._send, name="snapshot", daemon=True).start()
        self._step: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way whose result was not taken yet."""
        return self._step is not None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Gets memory for a state like this one, and the writer, so that the first save is as quick as any.

        Raises CheckpointError when there is not enough memory, or when the state is none that can be saved.
        """
        self._snapshot.prepare(tensor_facts(pack(state)[1]))
        self._start()

    def save(self, step: int, state: Mapping[str, Any], facts: Mapping[str, str], urgent: bool) -> None:
        """Copies the state; when this returns, training may go on. ``urgent``: someone will wait for the result."""
        plain, tensors = pack(state)
        self._snapshot.take(tensors)
        self._start()
        self._step = step
        facts = {"step": str(step), "attempt": str(self._first["attempt"]), **facts}
        self._sent.wait()  # for what a writer that is gone was to be told
        self._sent.clear()
        # With all that is to be freed: each tensor that goes away here may let the sender take the interpreter.
        self._requests.put((step, plain, facts, urgent, state, tensors))

    def hurry(self) -> None:
        """From now on someone waits for the save that is under way."""
        self._sent.wait()
        self._say({"hurry": True})

    def result(self, wait: bool) -> Saved | None:
        """What came of the save; None while it is under way, or when there is none.

        Raises NotSaved when it failed, Superseded when a newer attempt exists.
        """
        if self._step is None:
            return None
        if wait:
            self._sent.wait()
        try:
            line = self._replies.readline() if wait else self._peek()
        except BlockingIOError:
            return None
        except ConnectionResetError:
            line = b""
        step, self._step = self._step, None
        if not line.endswith(b"\n"):
            raise NotSaved(step, f"the process that writes it has ended (exit code {self._end_writer()})")
        answer = json.loads(line)
        if "superseded" in answer:
            raise Superseded(answer["superseded"])
        if "failed" in answer:
            raise NotSaved(step, answer["failed"], "metrics" in answer)
        return Saved(answer["step"], answer["bytes"], answer["at"])

    def close(self) -> None:
        """Lets the writer finish what it is at, and go."""
        if self._writer is not None:
            self._sent.wait()
            self._requests.put(None)
            self._socket.shutdown(socket.SHUT_WR)
            try:
                self._writer.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                pass  # A slow disk: it ends by itself when it is done.

    def _start(self) -> None:
        if self._writer is not None:
            return
        self._socket, other = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        memory = self._snapshot.file
        command = [*module_command("clusterddp.checkpoint.writer"), str(other.fileno()), str(memory)]
        with other, signals.blocked():
            self._writer = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(), memory))
        self._say(self._first)

    def _end_writer(self) -> int:
        """Gives up a writer that is gone; the next save starts another. Its exit code."""
        assert self._writer is not None
        self._sent.wait()
        self._socket.close()
        code, self._writer = self._writer.wait(), None
        return code

    def _send(self) -> None:
        """Describes each save to the writer once the snapshot is there; in a thread, as JSON takes its time."""
        while (request := self._requests.get()) is not None:
            step, plain, facts, urgent, *taken = request
            try:
                beginning = file_format.head(self._snapshot.described, plain, facts)
                self._snapshot.wait()
                size = self._snapshot.nbytes
                self._say({"step": step, "beginning": len(beginning), "size": size, "urgent": urgent}, beginning)
            except Exception:  # such as a CUDA error in the copy: who waits must not wait for ever
                traceback.print_exc()
                self._socket.shutdown(socket.SHUT_RDWR)
            finally:
                del request, taken
                self._sent.set()

    def _say(self, message: Mapping[str, Any], rest: bytes = b"") -> None:
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode() + rest)
        except OSError:
            pass  # The writer is gone, which `result` tells.

    def _peek(self) -> bytes:
        """The answer, if it is there: without a look at the clock, a lock or a thread, as this is asked every step."""
        if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return b""
        return self._replies.readline()
