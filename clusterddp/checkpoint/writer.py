"""The writer: a process without torch that saves the snapshots of a rank, and outlives the rank.

``python -m clusterddp.checkpoint.writer SOCKET MEMORY``, both file descriptors. The first line on the socket names the
run and the attempt. Each further line is a request, followed by the bytes that precede the data in the file. Each save
is answered with one line. A save runs at low priority while training continues, and at full priority once the rank
waits for it. When the rank has exited, the writer finishes the save in progress and exits.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.sharded.rank_files import RankFiles
from clusterddp.checkpoint.store import FULL, Checkpoints
from clusterddp.errors import Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.reporter import say
from clusterddp.rundir.files import create_file, hold_open, open_binary, unlink
from clusterddp.rundir.run_directory import RunDirectory

NICENESS = 10
#: Seconds between two looks whether the rank still runs.
RANK_CHECK_S = 1.0


def main() -> None:
    """Serves one rank."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the rank
    connection, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    writer = Writer(connection, memory)
    messages = Messages(connection)
    with suppress(EOFError):
        writer.begin(messages.next())
        while True:
            writer.handle(messages.next(), messages)
    writer.hurry()


class Messages:
    """Receives the rank's messages. EOFError once the rank has exited, even if its child holds the socket open."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._parent, self._data = connection, os.getppid(), bytearray()
        self._poll = select.poll()  # select() does not support descriptors above 1023
        self._poll.register(connection, select.POLLIN)

    def next(self) -> dict[str, Any]:
        """The next message."""
        while b"\n" not in self._data:
            self._receive()
        line, _, self._data = self._data.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        while len(self._data) < size:
            self._receive()
        taken, self._data = bytes(self._data[:size]), self._data[size:]
        return taken

    def _receive(self) -> None:
        data = b""
        while not self._poll.poll(1000 * RANK_CHECK_S):
            if os.getppid() != self._parent:
                raise EOFError
        with suppress(ConnectionResetError):  # the rank left an answer unread
            data = self._connection.recv(1 << 20)
        if not data:
            raise EOFError
        self._data += data


class Writer:
    """Makes one save at a time: a thread of low priority starts it, and the main thread finishes it if it is urgent.

    On a full disk or a used-up quota, the temporary file is deleted. ``_commit_with_room`` then deletes the oldest
    checkpoint that only ``keep.last`` keeps, but not the two newest (``Checkpoints.make_room``), and tries again. It
    gives up if there is none, or if all of them would not free enough space. For another rank of a sharded model, rank
    0 deletes it and repeats the save (``Saver._make_room``). After a success, rank 0 records the events ``room_made``
    and ``checkpoint``. Otherwise the answer is ``failed``, with the sizes and the newest checkpoint. Rank
    0 then records ``checkpoint_failed`` (``Saver._take_answer``), training continues, and the next save that is due
    tries again. If the ranks are stopping, they stop with the older checkpoint and say why. At the end of the training
    loop, the ranks keep the state in memory and retry (``Saver._retry``). If that does not help either,
    ``Run._complete`` raises LastSaveFailed, because the last state is not saved.

    Before each save, rank 0 writes the metrics up to its step, and makes room in the same way
    (``Saver._flush_metrics``). If that fails, the step is not saved. The lines of the metrics, and the events of the
    history (``History.pending``), stay in memory until they can be written. A script's own ``torch.save`` raises the
    error of the disk, and its old file stays, unless ``protect_saves`` is off (``worker/script_saves.py``).
    """

    def __init__(self, connection: socket.socket, memory: int) -> None:
        self._connection, self._memory = connection, memory
        self._map: mmap.mmap | None = None
        self._urgent = threading.Event()
        self._helper = ThreadPoolExecutor(1)
        self._helper.submit(os.getpid)  # starts its thread now, at full priority
        self._thread: threading.Thread | None = None
        self._work: Iterator[None] = iter(())

    def begin(self, first: dict[str, Any]) -> None:
        """Opens the run that the first message names."""
        directory = RunDirectory(first["run"])
        if first["folder"] is not None:
            hold_open(directory.path, first["folder"])
        self._checkpoints = Checkpoints(directory, first["attempt"], Keep(**first["keep"]))
        #: The files of a rank that writes a part of each checkpoint. None on a rank that writes all of it.
        self._rank_files = None if first["rank"] is None else RankFiles(self._checkpoints, first["rank"])
        self._metrics = directory.metrics_file

    def handle(self, request: dict[str, Any], messages: Messages) -> None:
        """Starts a save, or finishes the one in progress at full priority."""
        beginning = messages.take(request.get("beginning", 0))
        self.hurry()  # a save in progress, which is answered before the next one, but may still be deleting
        if "step" not in request:
            return
        if "manifest" in request:
            self._save_manifest(request["step"], beginning)
            return
        self._urgent.clear()
        self._work = self._save(request, beginning)
        if request["urgent"]:
            self.hurry()
            return
        self._thread = threading.Thread(target=self._work_slowly, args=(self._work,))
        self._thread.start()

    def hurry(self) -> None:
        """Finishes the save in progress in this thread."""
        self._urgent.set()
        if self._thread is not None:
            self._thread.join()
        for _ in self._work:
            pass

    def _work_slowly(self, work: Iterator[None]) -> None:
        """Works until the rank waits for the save. Once it is answered, ``self`` may refer to the next save."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # on Linux, of this thread alone
        try:
            while not self._urgent.is_set():
                if next(work, work) is work:
                    return
        except BaseException:  # the rank, which may wait for an answer, must see this process exit
            traceback.print_exc()
            os._exit(1)

    def _save(self, request: dict[str, Any], beginning: bytes) -> Iterator[None]:
        size = request["size"]
        deleted: list[int] = []
        try:
            written = yield from self._commit_with_room(request["step"], beginning, self._data(size), deleted)
            answer = {"step": request["step"], "at": time.monotonic(), **written}
        except Superseded as error:
            answer = {"superseded": str(error)}
        except file_format.Damaged as error:
            answer = {"failed": str(error)}
        except _MetricsNotSynced as error:
            answer = {"failed": str(error), "metrics": True, "disk": True}
        except OSError as error:
            answer = {"failed": self._checkpoints.why_not(error, len(beginning) + size), "disk": True}
            if error.errno in FULL and not self._is_first:
                answer["full"] = error.errno
        answer |= {"deleted": deleted} if deleted else {}
        awaited, committed = self._urgent.is_set(), "step" in answer and self._rank_files is None
        if committed and not awaited:
            self._delete_old()
        self._answer(answer)
        if committed and awaited:  # deleting takes time, for which the rank should not wait
            self._delete_old()

    def _save_manifest(self, step: int, manifest: bytes) -> None:
        """Commits a sharded checkpoint, all of whose files are durable."""
        assert self._rank_files is not None
        answer: dict[str, Any]
        try:
            size = self._rank_files.commit_manifest(step, manifest).size
            answer = {"step": step, "bytes": size, "at": time.monotonic()}
        except Superseded as error:
            answer = {"superseded": str(error)}
        except OSError as error:
            answer = {"failed": self._checkpoints.why_not(error, len(manifest)), "disk": True}
        self._answer(answer)
        if "step" in answer:
            self._delete_old()

    def _answer(self, answer: dict[str, Any]) -> None:
        try:
            self._connection.sendall((json.dumps(answer) + "\n").encode())
        except OSError:
            pass  # the rank has exited; the checkpoint is committed

    def _commit_with_room(
        self, step: int, beginning: bytes, data: memoryview, deleted: list[int]
    ) -> Generator[None, None, dict[str, int]]:
        """``_commit``. On a full disk deletes older checkpoints, and adds their steps to ``deleted``."""
        needed = len(beginning) + len(data)
        while True:
            try:
                return (yield from self._commit(step, beginning, data))
            except OSError as error:
                if not self._is_first or error.errno not in FULL:
                    raise
                if (room := self._checkpoints.make_room(needed, error.errno)) is None:
                    raise
                deleted.append(room)

    @property
    def _is_first(self) -> bool:
        """Whether this is the writer of rank 0."""
        return self._rank_files is None or self._rank_files.rank == 0

    def _commit(self, step: int, beginning: bytes, data: memoryview) -> Generator[None, None, dict[str, int]]:
        """Writes, verifies and commits the snapshot, chunk by chunk. Returns the file's size, and of a rank's own file
        its checksum."""
        temporary = (self._rank_files or self._checkpoints).temporary(step)
        try:
            with open(temporary, "x+b", buffering=0, opener=create_file) as file:
                try:
                    check = yield from file_format.write(file.fileno(), beginning, data, self._begin)
                    yield
                    # A failed fsync is never repeated on the same file: Linux marks its pages clean.
                    os.fsync(file.fileno())
                    check()
                finally:
                    self._helper.submit(int).result()  # the helper no longer uses this file
            try:
                if self._is_first:
                    with suppress(FileNotFoundError), open_binary(self._metrics) as file:  # rank 0 has written them
                        os.fsync(file.fileno())
            except OSError as error:
                raise _MetricsNotSynced(f"could not sync the metrics up to this step ({error.strerror})") from error
        except BaseException:
            unlink(temporary)
            raise
        if self._rank_files is not None:
            return asdict(self._rank_files.commit(temporary))
        return {"bytes": self._checkpoints.commit(temporary, step).size}

    def _data(self, size: int) -> memoryview:
        """The snapshot. It stays mapped between saves, because the first access to a page is slow."""
        if size == 0:
            return memoryview(b"")
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._memory, size, mmap.MAP_SHARED, mmap.PROT_READ)
        return memoryview(self._map)[:size]

    def _begin(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Works in this thread while training continues, in a helper if the rank waits. See ``file_format.Begin``."""
        return self._helper.submit(work).result if self._urgent.is_set() else file_format.begin_now(work)

    def _delete_old(self) -> None:
        """Deletes old checkpoints. Failures are retried after the next save."""
        try:
            self._checkpoints.delete_old()
        except Superseded:
            pass  # the next save reports it
        except OSError as error:
            say(f"could not delete an old checkpoint: {error}")


class _MetricsNotSynced(Exception):
    """The metrics before a checkpoint could not be synced, and rank 0 must write them again."""


if __name__ == "__main__":
    main()
