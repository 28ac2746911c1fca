"""Rank 0's side of a save: copies the state into a snapshot, which the writer process then saves.

The snapshot is a copy of the state in memory shared with the writer, so that training continues during a save.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy
import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.file_format import LONGEST_HEADER, Tensor, offsets
from clusterddp.checkpoint.host_memory import anonymous_file, free_memory
from clusterddp.checkpoint.packing import TORCH_DTYPES, Layout, Packed, tensor_facts
from clusterddp.distributed.devices import blocking_event, device_thread, pin_memory, unpin_memory
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.process import module_command, oom_kills
from clusterddp.reporter import in_words, say, what_failed
from clusterddp.rundir.files import held_descriptor
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import signals

#: Bytes of the largest tensor that is copied together with others. torch copies large ones on all cores.
SMALL = 1 << 16
#: The kernel's limit (IOV_MAX) of one call.
MOST_VECTORS = 1024
_LIBC = ctypes.CDLL(None, use_errno=True)


class Snapshot:
    """An anonymous file in memory (memfd) of the state's size, which does not count towards the limit of /dev/shm.

    If memfd_create is not permitted (seccomp, an old kernel), an unlinked file in /dev/shm is used, or in ``folder`` if
    /dev/shm is too small.

    With a GPU, the memory is pinned, and the copies are queued after the step's kernels without blocking the CPU. The
    kernels of the next step wait for them, because any of these could overwrite what is being copied. If CUDA cannot
    pin the memory, the CPU waits for each copy.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device, self._folder = device, folder
        #: The file's descriptor, valid after ``prepare`` or ``take``.
        self.file = -1
        self._map: mmap.mmap | None = None
        self._pinned = self._warned = False
        self._memory = torch.empty(0, dtype=torch.uint8)
        #: The header entries of the tensors that the memory is laid out for, and their total size in bytes.
        self.described, self.nbytes = file_format.described([]), 0
        self._views: list[torch.Tensor] = []
        #: What the memory is laid out for.
        self._layout: Layout | None = None
        self._small = _SmallCopies([], [])
        #: Of each GPU: the events before the copies and behind them.
        self._copied: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._preparing: threading.Thread | None = None

    def prepare(self, packed: Packed) -> None:
        """Allocates memory for tensors like these in the background, so that the first save is also fast.

        Raises CheckpointError if the machine does not have enough memory.
        """
        tensors = tensor_facts(packed.tensors)
        self._reserve(tensors)
        self._preparing = device_thread(self._device, self._try_resize, args=(packed.layout, tensors), name="snapshot")
        self._preparing.start()

    def take(self, packed: Packed) -> None:
        """Copies the tensors. Copies from GPUs are complete after ``wait``."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if packed.layout != self._layout:
            tensors = tensor_facts(packed.tensors)
            self._reserve(tensors)
            self._resize(packed.layout, tensors)
        sources = list(packed.tensors.values())
        on_gpus = self._device.type == "cuda"
        views = self._views
        if not on_gpus and self._small.copy(self.file, packed.addresses):
            views = [views[place] for place in self._small.others]
            sources = [sources[place] for place in self._small.others]
        if not sources:
            return
        # Each copy runs on the current stream of its source GPU.
        devices = {source.device for source in sources if source.device.type == "cuda"} if on_gpus else ()
        streams = [torch.cuda.current_stream(device) for device in devices]
        begun = [stream.record_event(blocking_event()) for stream in streams]
        with torch.no_grad():
            torch._foreach_copy_(views, sources, non_blocking=on_gpus)
        self._copied = [
            (event, stream.record_event(blocking_event())) for event, stream in zip(begun, streams, strict=True)
        ]

    def wait(self) -> float:
        """Waits until all copies are complete. Returns for how many seconds the GPUs made them, instead of training."""
        for _, copied in self._copied:
            copied.synchronize()
        return max((begun.elapsed_time(copied) / 1000 for begun, copied in self._copied), default=0.0)

    def close(self) -> None:
        """Frees the memory, once no copy is on its way. CUDA refuses to pin addresses again that were only unmapped."""
        if self._preparing is not None:
            self._preparing.join()
        self._release()
        if self.file >= 0:  # the memory is freed with the last descriptor
            os.close(self.file)
            self.file = -1

    def _try_resize(self, layout: Layout, tensors: list[Tensor]) -> None:
        with suppress(CheckpointError):  # `take` tries again and raises it
            self._resize(layout, tensors)

    def _resize(self, layout: Layout, tensors: list[Tensor]) -> None:
        places, size = offsets(tensors)
        if size > len(self._memory):
            self._grow(size)
        self._views = [
            self._memory[start : start + tensor.nbytes].view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)
            for start, tensor in zip(places, tensors, strict=True)
        ]
        self._small = _SmallCopies(tensors, places)
        self._layout = layout
        self.described, self.nbytes = file_format.described(tensors), size

    def _reserve(self, tensors: list[Tensor]) -> None:
        """Opens the file. Raises CheckpointError if there is not enough memory."""
        size = offsets(tensors)[1]
        more, free = size - len(self._memory), free_memory()
        if more > free:
            raise CheckpointError(
                f"the snapshot of the state needs {more / 2**30:.1f} GiB of memory, but {free / 2**30:.1f} GiB are "
                "free on this node. Request more (--mem), or use fewer ranks or loader workers per node"
            )
        if self.file < 0:
            self.file, self._kind = anonymous_file("the snapshot", size, [self._folder])

    def _grow(self, size: int) -> None:
        self._release()
        try:
            os.posix_fallocate(self.file, 0, size)
        except OSError as error:
            need = f"the snapshot of the state needs {size / 2**30:.1f} GiB of memory"
            raise CheckpointError(f"{need}: {error.strerror} ({self._kind}, to which `ulimit -f` applies)") from error
        self._map = mmap.mmap(self.file, size)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._memory.zero_()  # touches every page now, without the GIL
        if self._device.type == "cuda":
            code = pin_memory(self._memory.data_ptr(), size)
            self._pinned = not code
            if code and not self._warned:
                self._warned = True
                say(
                    f"could not pin {size / 2**30:.1f} GiB for the snapshot of the state (CUDA error {code}). "
                    "Training waits while a save copies the state from the GPU"
                )

    def _release(self) -> None:
        if self._pinned:
            unpin_memory(self._memory.data_ptr())
            self._pinned = False
        self._views, self._layout, self._memory, self._map = [], None, torch.empty(0, dtype=torch.uint8), None


class _SmallCopies:
    """Copies the small tensors of a layout, as many as the kernel takes in each system call.

    ``copy_`` takes 0.5 us per tensor however small it is, which for thousands of tensors is most of a save.
    """

    def __init__(self, layout: Sequence[Tensor], places: Sequence[int]) -> None:
        sizes = [tensor.nbytes for tensor in layout]
        self._places = sorted((at for at, size in enumerate(sizes) if 0 < size <= SMALL), key=places.__getitem__)
        #: The positions of all other tensors in the layout.
        self.others = [at for at, size in enumerate(sizes) if size > SMALL]
        #: A ``struct iovec`` for each.
        self._vectors = numpy.zeros((len(self._places), 2), numpy.uintp)
        self._vectors[:, 1] = [sizes[at] for at in self._places]
        #: Of each call: its first tensor, how many follow each other in the file, their offset and their size.
        self._calls: list[list[int]] = []
        end = -1
        for number, at in enumerate(self._places):
            if places[at] != end or self._calls[-1][1] == MOST_VECTORS:
                self._calls.append([number, 0, places[at], 0])
            self._calls[-1][1] += 1
            self._calls[-1][3] += sizes[at]
            end = places[at] + sizes[at]

    def copy(self, file: int, addresses: Sequence[int]) -> bool:
        """Writes the tensors at these addresses (of the whole layout) to the snapshot's file.

        Returns False if an address is 0 (``Packed.addresses``), or if the kernel could not read from one.
        """
        if not self._places:
            return True
        write = getattr(_LIBC, "pwritev", None)
        small = list(map(addresses.__getitem__, self._places))
        if write is None or 0 in small:
            return False
        self._vectors[:, 0] = small
        start = self._vectors.ctypes.data
        for first, count, offset, size in self._calls:
            place = ctypes.c_void_p(start + first * self._vectors.strides[0])
            if write(file, place, count, ctypes.c_long(offset)) != size:
                return False
        return True


#: Seconds that ``close`` waits for the writer to exit.
EXIT_S = 5.0


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: its step, the file's size in bytes, and when it was committed (CLOCK_MONOTONIC, s).

    ``deleted``: the steps of older checkpoints that were deleted because the disk was full. ``checksum``: of the file
    of one rank of a sharded model.
    """

    step: int
    bytes: int
    at: float
    deleted: tuple[int, ...] = ()
    checksum: int = 0


class NotSaved(Exception):
    """A save failed: no space, an I/O error, or the writer died. Earlier checkpoints are not affected.

    ``metrics``: whether the metrics could not be synced. ``disk``: whether a disk that is full, read-only or broken is
    the reason, so that a later save may succeed. ``deleted``: as of ``Saved``, which freed too little. ``full``: the
    error number of a full disk or a used-up quota, for which a rank of a sharded model other than 0 can make no room.
    """

    def __init__(
        self,
        step: int,
        reason: str,
        metrics: bool = False,
        deleted: tuple[int, ...] = (),
        disk: bool = False,
        full: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.step, self.metrics, self.deleted, self.disk, self.full = step, metrics, deleted, disk, full


class CheckpointClient:
    """The snapshot and the writer process. One save at a time: take the result before the next save."""

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        keep: Keep,
        device: torch.device,
        rank: int | None = None,
        pack: Callable[[Mapping[str, Any]], Packed] = Packed,
    ) -> None:
        """``rank``: of one that writes a part of each checkpoint. None if this process writes all of it."""
        self._first = {"run": str(directory), "attempt": attempt, "keep": dataclasses.asdict(keep), "rank": rank}
        self._pack = pack
        self._folder = directory.path
        self._snapshot = Snapshot(device, directory.private)
        self._writer: subprocess.Popen[bytes] | None = None
        self._requests: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._sent = threading.Event()
        self._sent.set()
        self._sending = device_thread(device, self._send, name="snapshot")
        self._sending.start()
        self._step: int | None = None
        #: The seconds that the copies of the newest save took on the GPUs, once its result is known.
        self.copied_s = 0.0
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
        self._snapshot.prepare(self._pack(state))
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
        self._snapshot.take(packed)
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

    def commit_manifest(self, step: int, manifest: bytes) -> None:
        """Has the writer commit a sharded checkpoint. ``result`` returns the outcome."""
        self._step = step
        self._say({"step": step, "manifest": True, "beginning": len(manifest)}, manifest)

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
            raise NotSaved(step, answer["failed"], "metrics" in answer, deleted, "disk" in answer, answer.get("full"))
        return Saved(answer["step"], answer["bytes"], answer["at"], deleted, answer.get("checksum", 0))

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
        self._oom_kills = oom_kills()
        folder = held_descriptor(self._folder)
        given = (other.fileno(), memory, *([] if folder is None else [folder]))
        with other, signals.blocked():
            self._writer = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=given)
        self._say({**self._first, "folder": folder})

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
            from clusterddp.failures.exit_status import killed

            return killed(oom_kills() > self._oom_kills)
        return f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"

    def _send(self) -> None:
        """Sends each save to the writer once the snapshot is complete, in a thread, because JSON takes time."""
        while (request := self._requests.get()) is not None:
            step, packed, facts, urgent, before, state = request
            try:
                beginning = file_format.head(self._snapshot.described, packed.plain(), {**facts, **packed.facts})
                if len(beginning) > LONGEST_HEADER:
                    raise NotSaved(
                        step,
                        f"the names and plain values of the state take {len(beginning) / 1e6:.0f} MB, but a "
                        f"checkpoint's header is limited to {LONGEST_HEADER / 1e6:.0f} MB. Store long lists of numbers "
                        "as tensors",
                    )
                self.copied_s = self._snapshot.wait()
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
