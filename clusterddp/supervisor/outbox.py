"""Lines for connections that cannot take them at once, sent as soon as they can, without waiting."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque

#: The most bytes that are kept for a connection, unless a single line is longer.
MOST_BYTES = 1 << 16
#: How often a connection is tried again whose peer is falling silent, or whose kernel has no memory, in seconds.
RETRY_S = 0.5
#: This many unanswered keepalive probes in a row mean that a peer is falling silent. One may just be in flight.
_FALLING_SILENT = 2


class Outbox:
    """Sends lines over non-blocking connections that ``selector`` has for reading. Not thread-safe.

    Most lines are taken by the kernel at once. The others are kept, in their order, and sent when the connection is
    writable (``on_writable``), or answers again (``retry``). A line that is already kept is not added a second time.
    A connection that breaks loses what is kept for it; the next read of it shows that it broke.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._kept: dict[socket.socket, deque[bytes]] = {}  # the first of them may be the rest of a line
        self._watched: set[socket.socket] = set()  # those of them that the selector has for writing, too
        self._paused: set[socket.socket] = set()  # those of them that are tried again after RETRY_S
        self._retry_at = 0.0

    def send(self, connection: socket.socket, line: bytes) -> bool:
        """Sends a line, now or later. Returns False, and drops it, if too much is kept already."""
        if (kept := self._kept.get(connection)) is None:
            self._kept[connection] = deque([line])
            self._push(connection)
        elif line not in kept:
            if sum(map(len, kept)) + len(line) > MOST_BYTES:
                return False
            kept.append(line)
        return True

    def on_writable(self, connection: socket.socket) -> None:
        """Sends what the connection takes now that it is writable."""
        if connection in self._kept and not self._push(connection):
            self._pause(connection)  # writable, but full: asking the selector again would not wait

    def retry(self) -> None:
        """Sends what the paused connections take, every RETRY_S."""
        if not self._paused or time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + RETRY_S
        for connection in list(self._paused):
            self._push(connection)

    @property
    def retry_s(self) -> float | None:
        """How soon to call ``retry``. None if that is not needed."""
        return max(0.0, self._retry_at - time.monotonic()) if self._paused else None

    def forget(self, connection: socket.socket) -> None:
        """The connection is about to be closed."""
        self._kept.pop(connection, None)
        self._paused.discard(connection)
        self._watch(connection, False)

    def _push(self, connection: socket.socket) -> bool:
        """Sends what the connection takes. Returns False if it has no room at all."""
        lines, took = self._kept[connection], False
        try:
            # With data in flight to a peer that is falling silent, the kernel would begin to count again.
            if unanswered_probes(connection) >= _FALLING_SILENT:
                self._pause(connection)
                return True
            while lines:
                sent = connection.send(lines[0])
                took = True
                if sent < len(lines[0]):
                    lines[0] = lines[0][sent:]
                else:
                    lines.popleft()
        except BlockingIOError:
            self._paused.discard(connection)
            self._watch(connection, True)
            return took
        except OSError:
            pass  # broken
        self.forget(connection)
        return True

    def _pause(self, connection: socket.socket) -> None:
        if not self._paused:
            self._retry_at = time.monotonic() + RETRY_S
        self._paused.add(connection)
        self._watch(connection, False)

    def _watch(self, connection: socket.socket, writing: bool) -> None:
        """Has the selector report when the connection is writable, or no longer."""
        if writing == (connection in self._watched):
            return
        (self._watched.add if writing else self._watched.discard)(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        self._selector.modify(connection, events, self._selector.get_key(connection).data)


def unanswered_probes(connection: socket.socket) -> int:
    """The number of unanswered keepalive probes: tcpi_probes, the fourth byte of linux/tcp.h's tcp_info."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)[3]
