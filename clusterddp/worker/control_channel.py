"""The control channel from a rank to its supervisor: one TCP connection per rank, JSON lines, standard library only.

This is a rank's end of it; the supervisor's is ``supervisor/control_server.py``.

It carries four things. At the start every rank says hello with the attempt's token, and is told where rank 0's store
is (rank 0 chose and holds the port; its address is the one it was seen under, so that no name is ever looked up).
While it runs, ranks report events, which the supervisor alone writes into the history, and the supervisor may tell them
to stop, or to exit at once. When it breaks, and the rank does not connect again at once, the rank is lost; when it
falls silent, the rank's node is.

A file in the run directory would not do for this: on NFS a new file may stay invisible on other nodes for a minute.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.reporter import say

#: Bytes of a message, at most. A longer one is clipped or dropped by its sender, and skipped by its receiver: the
#: connection stays, with what comes after it.
LONGEST_LINE = 1 << 20
#: Characters of each text that a message is clipped to when it is too long.
_CLIPPED = 4000
#: For how many seconds a rank whose connection broke tries to reach its supervisor again. Where the supervisor is gone,
#: nobody listens at its port. One that is there may be waiting for a slow disk: its answer is waited for as long
#: as for any word of its node.
REJOIN_S = 1.0
#: How many of its last events a rank keeps, to say again what a broken connection has swallowed: some minutes' worth.
_KEPT = 256
#: How often a rank that was turned away without a word tries again: a flood of strangers may have pushed it out.
_TRIES = 5
#: A peer whose node is dead or cut off sends no goodbye: after so long a silence the kernel breaks the connection.
#: A cable that is plugged in again within that breaks nothing.
SILENCE_S = 15
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 5,
    socket.TCP_USER_TIMEOUT: 1000 * SILENCE_S,  # the same where an event is on its way, which keepalive does not see
}


class ControlChannel:
    """A rank's end of the line. ``store_host`` and ``store_port`` say where rank 0's store is, or will be.

    ``term_notice_s``: the seconds from a TERM to a KILL, None where the supervisor does not know. ``known``: how many
    events of this rank the supervisor has, from before its connection broke.
    """

    def __init__(
        self,
        connection: socket.socket,
        store_host: str,
        store_port: int,
        term_notice_s: float | None = None,
        known: int = 0,
        heard: bytes = b"",
    ) -> None:
        self._connection, self._heard = connection, heard
        self.term_notice_s = term_notice_s
        self._known, self._said = known, 0
        self._last: deque[bytes] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._closed = False
        #: Joins again as the same rank, at most for so many seconds.
        self._again: Callable[[float], ControlChannel | None] = lambda _: None
        self.store_host, self.store_port = store_host, store_port
        self._stop: str | None = None
        self._on_stop: Callable[[str], None] | None = None
        self._stopping = threading.Lock()

    @classmethod
    def join(
        cls,
        address: str,
        token: str,
        rank: int,
        port: int | None,
        timeout: float,
        give_up: Callable[[], bool] = lambda: False,
        process: str | None = None,
    ) -> ControlChannel | None:
        """Says hello to the supervisor at ``host:port`` and waits, at most ``timeout`` seconds, for rank 0's address.

        ``port`` is rank 0's own choice for its store, None on every other rank. None when ``give_up`` says so, which is
        asked twice a second. ``process``: what the supervisor knows a rank by that joins once more.
        """
        host, _, supervisor_port = address.rpartition(":")
        process = process or secrets.token_hex(16)
        known = {"rank": rank, "port": port, "host": socket.gethostname(), "pid": os.getpid(), "process": process}
        hello = {"token": token, **known}
        for attempt in range(_TRIES):
            connection = _connect(host, int(supervisor_port), timeout if attempt == 0 else 5.0)
            try:
                send_line(connection, hello)
                line = _receive_line(connection, max(timeout, SILENCE_S), give_up)
            except ConnectionError:
                line = b""
            except OSError as error:
                raise LauncherEnvironmentError(
                    f"rank {rank} reached the supervisor at {address}, but rank 0 did not say where its store is "
                    f"within {timeout:.0f} s ({error})"
                ) from error
            if line:
                break
            connection.close()
            if line is None:
                return None
            time.sleep(0.2)
        else:
            raise LauncherEnvironmentError(f"the supervisor at {address} is not this attempt's: it refused the token")
        connection.settimeout(None)
        keep_alive(connection)
        answer, _, more = line.partition(b"\n")
        link = cls(connection, *_answer(answer, address), more)
        link._again = lambda timeout: cls.join(address, token, rank, port, timeout, lambda: link._closed, process)
        return link

    @property
    def local_address(self) -> str:
        """This host's address on the network that the supervisor was reached by."""
        address: str = self._connection.getsockname()[0]
        return address

    def listen(self, on_lost: Callable[[], None], on_words: Callable[[Mapping[str, Any]], None]) -> None:
        """In a thread of its own: ``on_words`` gets what the supervisor says to all ranks, and ``on_lost`` is called
        when it is gone, or cut off."""
        threading.Thread(target=self._listen, args=(on_lost, on_words), name="link", daemon=True).start()

    def _listen(self, on_lost: Callable[[], None], on_words: Callable[[Mapping[str, Any]], None]) -> None:
        self._hear(on_words)
        while not self._closed and self._rejoin():
            self._hear(on_words)
        if not self._closed:
            on_lost()

    def _rejoin(self) -> bool:
        """Whether a connection that broke, while both ends live, could be made anew: a device between them forgot it.

        Events that did not get through are said again.
        """
        try:
            again = self._again(REJOIN_S)
        except (OSError, LauncherEnvironmentError):
            return False
        if again is None:
            return False
        with self._lock:
            self._connection.close()
            self._connection, self._heard = again._connection, again._heard
            missing = self._said - again._known
            with suppress(OSError):  # broken again
                for line in list(self._last)[-missing:] if missing > 0 else []:
                    self._connection.sendall(line)
        return True

    def _hear(self, on_words: Callable[[Mapping[str, Any]], None]) -> None:
        """Until the connection breaks."""
        rest = b""
        with suppress(OSError):
            for data in chain([self._heard], iter(lambda: self._connection.recv(4096), b"")):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    words = _words(line)
                    if words:
                        on_words(words)
                if len(rest) > LONGEST_LINE:
                    break

    def on_stop(self, act: Callable[[str], None] | None) -> None:
        """``act`` is called once, with the reason, when the supervisor says to stop; at once if it has said so."""
        with self._stopping:
            self._on_stop = act
            if act is not None and self._stop is not None:
                act(self._stop)

    def stop(self, reason: str) -> None:
        """The supervisor says to stop."""
        with self._stopping:
            if self._stop is None and self._on_stop is not None:
                self._on_stop(reason)
            self._stop = self._stop or reason

    def forget(self) -> None:
        """In a forked child: the connection is its parent's, and stays open there."""
        self._closed = True
        self._connection.close()

    def close(self) -> None:
        """Leaves the supervisor."""
        self._closed = True
        self._connection.close()

    def send(self, event: str, **values: Any) -> None:
        """Reports an event. A supervisor that is gone is no reason to stop training: the failure is swallowed."""
        message = {"event": event, **values}
        line = _encoded(message)
        if line is None:
            return
        with self._lock, suppress(OSError):
            self._last.append(line)
            self._said += 1
            self._connection.sendall(line)


#: The channel of this process, set by ``worker/rank.py``; None in a process that no supervisor started.
current: ControlChannel | None = None


def _forget_in_child() -> None:
    global current
    if current is not None:
        current.forget()
        current = None


os.register_at_fork(after_in_child=_forget_in_child)


def report(event: str, **values: Any) -> None:
    """Reports an event to the supervisor, if there is one."""
    if current is not None:
        current.send(event, **values)


def _encoded(message: Mapping[str, Any]) -> bytes | None:
    """A message's line; None, which is said on standard error, when it cannot be sent even with its texts clipped."""
    try:
        line = _line(message)
        if len(line) > LONGEST_LINE:
            clipped = {name: clip(value, _CLIPPED) for name, value in message.items() if isinstance(value, str)}
            line = _line({**message, **clipped})
        problem = f"{len(line):,} bytes, and the limit is {LONGEST_LINE:,}" if len(line) > LONGEST_LINE else None
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"not JSON: {error}"
    if problem is not None:
        words = f"the report of {message.get('event')!r} is dropped ({problem})"
        say(words)
        return None
    return line


def _line(message: Mapping[str, Any]) -> bytes:
    return (json.dumps(message) + "\n").encode()


def clip(text: str, longest: int) -> str:
    """The beginning and the end of a text that is longer than ``longest`` characters."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    return f"{text[: longest // 2]} ... [{left_out:,} characters left out] ... {text[len(text) - longest // 2 :]}"


def _words(line: bytes) -> dict[str, Any]:
    """What the supervisor says in a line; nothing where that cannot be read, which is no reason to stop listening."""
    try:
        words = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}


def _answer(line: bytes, address: str) -> tuple[str, int, float | None, int]:
    """What the supervisor's first answer says, in the order of Link's arguments. Raises LauncherEnvironmentError."""
    try:
        answer = json.loads(line)
        if "refused" in answer:
            raise LauncherEnvironmentError(f"the supervisor at {address} refuses this rank: {answer['refused']}")
        if "leave" in answer:
            raise LauncherEnvironmentError(f"told to leave before all ranks were there: {answer['leave']}")
        notice = answer.get("term_notice_s")
        known = int(answer.get("known", 0))
        return str(answer["host"]), int(answer["port"]), None if notice is None else float(notice), known
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise LauncherEnvironmentError(
            f"what answers at {address} is no supervisor of clusterddp's: it said {line[:80]!r}"
        ) from error


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connects, retrying for ``timeout`` seconds: a node's network may come up late.

    On the loopback interface a refusal is final: a local run's supervisor listens before it starts its ranks.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic()))
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and host.startswith("127."):
                raise LauncherEnvironmentError(f"no supervisor listens at {host}:{port}: it has exited") from error
            if time.monotonic() > deadline:
                raise LauncherEnvironmentError(
                    f"no supervisor answers at {host}:{port} after {timeout:.0f} s ({error}); "
                    "the nodes of a job must be able to reach its first node"
                ) from error
            time.sleep(0.2)


def _receive_line(connection: socket.socket, timeout: float, give_up: Callable[[], bool]) -> bytes | None:
    """The first line that comes, and what came with it (empty: the peer left without one); None when given up.

    Raises OSError in the end.
    """
    deadline = time.monotonic() + timeout
    connection.settimeout(0.5)
    data = b""
    while b"\n" not in data:
        try:
            chunk = connection.recv(4096)
        except TimeoutError:
            if give_up():
                return None
            if time.monotonic() > deadline:
                raise
            continue
        if not chunk:
            return b""
        data += chunk
        if len(data) > LONGEST_LINE:
            raise LauncherEnvironmentError(f"what answers instead of the supervisor sends no line: {data[:80]!r}")
    return data


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel break the connection after ``SILENCE_S``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends one message."""
    connection.sendall(_line(message))
