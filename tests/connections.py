"""The TCP connections of this process: to count them, or to break one as a network does."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress


def connection_to(port: int) -> socket.socket:
    """A duplicate of this process's only connection to a port."""
    (connection,) = (each.dup() for each in _connections() if each.getpeername()[1] == port)
    return connection


def accepted_from(peer: socket.socket) -> socket.socket:
    """A duplicate of the other end of a connection, which this process has accepted."""
    # socket.dup() would make both block.
    (number,) = (os.dup(each.fileno()) for each in _connections() if each.getpeername() == peer.getsockname())
    return socket.socket(fileno=number)


def accepted_at(port: int) -> int:
    """The number of connections that this process has accepted at a port."""
    return sum(each.getsockname()[1] == port for each in _connections())


def break_connection(port: int) -> None:
    """Ends this process's only connection to a port, for both sides."""
    with connection_to(port) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def break_others(port: int) -> None:
    """Ends all connections of this process, for both sides, but that to a port."""
    for connection in _connections():
        if connection.getpeername()[1] != port:
            connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """Duplicates, each open until the next."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family == socket.AF_INET and connection.getpeername():
                        yield connection
