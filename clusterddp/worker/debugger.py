"""``breakpoint()`` in a rank without a terminal: pdb over a socket of its node, for a client on that node.

With ``submit --debug RANK`` one rank waits in ``breakpoint()`` until ``clusterddp shell --attach`` connects, from a
step of the job on the same node. The socket has a name in Linux's abstract namespace, which needs no file system, and
takes connections only from the rank's user. When the connection ends, the rank waits for the next one.
"""

from __future__ import annotations

import hashlib
import os
import pdb
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from clusterddp.entry import exit_with
from clusterddp.reporter import say
from clusterddp.rundir.run_directory import RunDirectory

#: Seconds between two looks for a rank that waits in ``breakpoint()``.
RANK_CHECK_S = 0.2
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def socket_name(run: RunDirectory, attempt: int, rank: int) -> str:
    """The address of a rank's debugger."""
    place = f"{run.path.resolve()}/{attempt}/{rank}"
    return f"\0clusterddp-debugger-{hashlib.sha256(place.encode()).hexdigest()[:32]}"


def install(run: RunDirectory, attempt: int, rank: int) -> None:
    """From now on ``breakpoint()`` waits for a client."""
    terminal = _Terminal(socket_name(run, attempt, rank), f"clusterddp shell {run.quoted} --rank {rank} --attach")
    debugger: list[pdb.Pdb] = []

    def stop(*_: Any, **__: Any) -> None:
        if not debugger:
            debugger.append(pdb.Pdb(stdin=terminal, stdout=terminal))  # type: ignore[arg-type]  # it reads and writes
        terminal.place = _place(sys._getframe(1))
        debugger[0].set_trace(sys._getframe(1))

    sys.breakpointhook = stop


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class _Terminal:
    """The input and output of pdb."""

    encoding = "utf-8"

    def __init__(self, name: str, how: str) -> None:
        self._name, self._how = name, how
        self.place = ""
        self._server: socket.socket | None = None
        self._client: socket.socket | None = None
        self._lines: Any = None
        #: The last output, such as a prompt, for the next client.
        self._last = ""

    def readline(self) -> str:
        """A line of the client. Waits for a client if there is none."""
        while True:
            if self._client is None:
                self._accept()
            with suppress(OSError):
                if line := self._lines.readline():
                    return str(line)
            self._client = None

    def write(self, text: str) -> None:
        """Writes to the client, if there is one."""
        self._last = text
        if self._client is not None:
            with suppress(OSError):
                self._client.sendall(text.encode())

    def flush(self) -> None:
        """Has no effect, because ``write`` has no buffer."""

    def isatty(self) -> bool:
        """Whether pdb may use colours."""
        return False

    def _accept(self) -> None:
        if self._server is None:
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(self._name)
            self._server.listen()
        say(f"waiting in breakpoint() at {self.place}. Attach with: {self._how}")
        while self._client is None:
            client, _ = self._server.accept()
            if _peer(client)[1] == os.geteuid():
                self._client, self._lines = client, client.makefile("r", encoding="utf-8", errors="replace")
        self.write(f"> breakpoint() at {self.place}\n" if self._last.endswith("\n") else self._last)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


# --- the client, on the same node


def attach(run: RunDirectory, attempt: int, rank: int) -> int:
    """Connects this terminal with a rank's debugger until the rank ends, or the user detaches with Ctrl-D."""
    connection = _connect(run, attempt, rank)
    if connection is None:
        return 1
    pid, uid = _peer(connection)
    if uid != os.geteuid():
        say(f"the debugger of rank {rank} belongs to user {uid}")
        return 1

    def show_output() -> None:
        with suppress(OSError):
            while data := connection.recv(4096):
                os.write(1, data)
        os.write(1, b"\n")
        say(f"rank {rank} has exited")
        os._exit(0)

    threading.Thread(target=show_output, daemon=True).start()
    while True:
        try:
            if not (line := sys.stdin.readline()):
                break
            connection.sendall(line.encode())
        except KeyboardInterrupt:  # while the rank runs, pdb stops it; at the prompt, it drops the line
            os.kill(pid, signal.SIGINT)
        except OSError:
            time.sleep(RANK_CHECK_S)  # the other thread prints the reason
    say(f"detached. Rank {rank} will wait in its next breakpoint()")
    return 0


def _connect(run: RunDirectory, attempt: int, rank: int) -> socket.socket | None:
    """Waits for the rank's ``breakpoint()``. None if it has ended."""
    say(f"waiting for breakpoint() in rank {rank}. In the debugger, Ctrl-C interrupts the rank and Ctrl-D detaches")
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(socket_name(run, attempt, rank))
        except ConnectionRefusedError:
            connection.close()
            if run.rank_record(attempt, rank).exists():
                say(f"rank {rank} has exited without reaching breakpoint()")
                return None
            time.sleep(RANK_CHECK_S)
        else:
            return connection


if __name__ == "__main__":
    exit_with(lambda: attach(RunDirectory(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
