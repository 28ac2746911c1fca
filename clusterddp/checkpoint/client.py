"""Rank 0's side of a save: copies the state into the snapshot, which the writer process then saves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.save_plan import Packer
from clusterddp.checkpoint.snapshot import Snapshot
from clusterddp.distributed.devices import device_thread
from clusterddp.errors import Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.process import module_command
from clusterddp.reporter import in_words, what_failed
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import signals

#: Seconds that ``close`` waits for the writer to exit.
EXIT_S = 5.0


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: its step, the file's size in bytes, and when it was committed (CLOCK_MONOTONIC, s).

    ``deleted``: the steps of older checkpoints that were deleted because the disk was full.
    """

    step: int
    bytes: int
    at: float
    deleted: tuple[int, ...] = ()


class NotSaved(Exception):
    """A save failed: no space, an I/O error, or the writer died. Earlier checkpoints are not affected.

    ``metrics``: whether the metrics could not be synced. ``deleted``: as of ``Saved``, which freed too little.
    """

    def __init__(self, step: int, reason: str, metrics: bool = False, deleted: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.step, self.metrics, self.deleted = step, metrics, deleted


class CheckpointClient:
    """The snapshot and the writer process. One save at a time: take the result before the next save."""

    def __init__(self, directory: RunDirectory, attempt: int, keep: Keep, device: torch.device) -> None:
        self._first = {"run": str(directory), "attempt": attempt, "keep": dataclasses.asdict(keep)}
        self._snapshot = Snapshot(device, directory.private)
        self._pack = Packer()
        self._writer: subprocess.Popen[bytes] | None = None
        self._requests: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._sent = threading.Event()
        self._sent.set()
        self._sending = device_thread(device, self._send, name="snapshot")
        self._sending.start()
        self._step: int | None = None
        #: Why the save was not sent to the writer.
        self._refused: NotSaved | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in progress, or its result was not taken yet."""
        return self._step is not None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocates memory for a state like this one and starts the writer, so that the first save is also fast.

        Raises CheckpointError if there is not enough memory, or if the state cannot be saved.
        """
        self._snapshot.prepare(self._pack(state).layout)
        with suppress(OSError):  # the first save tries again
            self._start()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        facts: Mapping[str, str],
        urgent: bool,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Copies the state, after which training may continue.

        ``urgent``: the caller will wait for the result. ``before``: called in a separate thread before the writer
        starts. It may wait, and raise NotSaved.
        """
        packed = self._pack(state)
        self._snapshot.take(packed.layout, packed.tensors, packed.addresses)
        self._step = step
        try:
            self._start()
        except OSError as error:  # too many processes or too little memory at the moment
            self._snapshot.wait()
            self._refused = NotSaved(step, f"could not start the checkpoint writer ({what_failed(error)})")
            return
        facts = {"step": str(step), "attempt": str(self._first["attempt"]), **facts}
        self._sent.wait()  # for a request to a writer that has exited
        self._sent.clear()
        # The thread also frees the state, because each tensor freed here could pass the GIL to it.
        self._requests.put((step, packed, facts, urgent, before, state))

    def result(self, wait: bool) -> Saved | None:
        """The result of the save. None while it is in progress, or if there is none. ``wait`` raises its priority.

        Raises NotSaved if it failed, Superseded if a newer attempt exists.
        """
        if self._step is None:
            return None
        if wait:
            self._sent.wait()
        if self._refused is not None:
            refused, self._refused, self._step = self._refused, None, None
            raise refused
        if wait:
            self._say({"hurry": True})
        try:
            line = self._replies.readline() if wait else self._peek()
        except BlockingIOError:
            return None
        except ConnectionResetError:
            line = b""
        step, self._step = self._step, None
        if not line.endswith(b"\n"):
            raise NotSaved(step, f"the checkpoint writer {self._end_writer()}")
        answer = json.loads(line)
        if "superseded" in answer:
            raise Superseded(answer["superseded"])
        deleted = tuple(answer.get("deleted", ()))
        if "failed" in answer:
            raise NotSaved(step, answer["failed"], "metrics" in answer, deleted)
        return Saved(answer["step"], answer["bytes"], answer["at"], deleted)

    def close(self) -> None:
        """Ends the thread, and lets the writer finish and exit."""
        self._requests.put(None)
        self._sending.join()  # a save that was not sent yet comes first
        if self._writer is not None:
            self._socket.shutdown(socket.SHUT_WR)
            try:
                self._writer.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                pass  # of a slow disk: the writer exits when it has finished

    def free(self) -> None:
        """Frees the snapshot's memory after ``close()``, for a process that continues and saves elsewhere."""
        self._snapshot.close()

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

    def _end_writer(self) -> str:
        """Reaps a writer that has exited, and returns how. The next save starts a new one."""
        assert self._writer is not None
        self._sent.wait()
        self._socket.close()
        writer, self._writer = self._writer, None
        try:
            os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
            known = True
        except ChildProcessError:  # Popen would have 0
            known = False
        code = writer.wait()
        if not known:
            return "has exited, and its exit code was taken by the script (os.wait(), or SIGCHLD ignored)"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, probably out of memory"
        return f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"

    def _send(self) -> None:
        """Sends each save to the writer once the snapshot is complete, in a thread, because JSON takes time."""
        while (request := self._requests.get()) is not None:
            step, packed, facts, urgent, before, state = request
            try:
                beginning = file_format.head_of(self._snapshot.described, packed.state_literal(), facts)
                self._snapshot.wait()
                if before is not None:
                    before()
                size = self._snapshot.nbytes
                self._say({"step": step, "beginning": len(beginning), "size": size, "urgent": urgent}, beginning)
            except NotSaved as error:
                self._refused = error
            except Exception as error:  # such as a CUDA error in the copy: ``result`` must not wait for an answer
                traceback.print_exc()
                self._refused = NotSaved(step, f"could not take the snapshot ({in_words(error)})")
            finally:
                del request, packed, state, before
                self._sent.set()

    def _say(self, message: Mapping[str, Any], rest: bytes = b"") -> None:
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode() + rest)
        except OSError:
            pass  # the writer has exited; `result` reports it

    def _peek(self) -> bytes:
        """The answer if it has arrived. Called every step, so it uses no clock, lock or thread."""
        if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return b""
        return self._replies.readline()
