"""The line between the supervisor and its ranks: one TCP connection per rank, JSON lines, standard library only.

It carries three things. At the start every rank says hello with the attempt's token, and is told where rank 0's store
is (rank 0 chose and holds the port; its address is the one it was seen under, so that no name is ever looked up).
While it runs, ranks report events, which the supervisor alone writes into the history. When it breaks, the rank is
gone.

A file in the run directory would not do for this: on NFS a new file may stay invisible on other nodes for a minute.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import LauncherEnvironmentError

ADDRESS_VARIABLE = "CLUSTERDDP_SUPERVISOR"
TOKEN_VARIABLE = "CLUSTERDDP_TOKEN"
_LONGEST_LINE = 1 << 20
# A peer whose cable is cut sends no goodbye: after about 30 s of silence the kernel calls the connection broken.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
_LAST_WORDS_S = 1.0


@dataclass
class _Peer:
    """A connection that the supervisor holds; ``rank`` is None until it has shown the token."""

    connection: socket.socket
    address: str
    rank: int | None = None
    pending: bytearray = field(default_factory=bytearray)


class LinkServer:
    """The supervisor's end. Answers hellos once rank 0's address is known, and hands every event to ``on_event``.

    ``on_event(rank, event, values)`` and ``on_lost(rank)`` are called from the server's own thread, one at a time.
    """

    def __init__(
        self,
        token: str,
        on_event: Callable[[int, str, Mapping[str, Any]], None],
        on_lost: Callable[[int], None] = lambda _rank: None,
        host: str = "",
    ) -> None:
        self._token, self._on_event, self._on_lost = token, on_event, on_lost
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, _Peer] = {}
        self._store: dict[str, Any] | None = None
        self._told: dict[str, Any] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="link", daemon=True)
        self._thread.start()

    def tell(self, **values: Any) -> None:
        """Ranks that are greeted from now on hear this, too."""
        self._told = {**self._told, **values}

    def close(self) -> None:
        """Hears out ranks that have ended, at most for a second (a node may be cut off), then drops all connections."""
        self._wake_write.close()
        self._thread.join()

    def _serve(self) -> None:
        deadline: float | None = None
        while deadline is None or (self._peers and time.monotonic() < deadline):
            for key, _ in self._selector.select(timeout=0.1 if deadline else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    deadline = time.monotonic() + _LAST_WORDS_S
                    self._selector.unregister(self._wake_read)
                else:
                    self._receive(self._peers[key.fileobj])  # type: ignore[index]
        for peer in self._peers.values():
            peer.connection.close()
        self._listener.close()
        self._wake_read.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # reset by the peer, or no file descriptor left: it will try again, or is named as lost
            return
        _keep_alive(connection)
        connection.setblocking(False)
        self._peers[connection] = _Peer(connection, address[0])
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.pending += data
        *lines, rest = bytes(peer.pending).split(b"\n")
        peer.pending = bytearray(rest)
        if not all(self._handle(peer, line) for line in lines) or not data or len(rest) > _LONGEST_LINE:
            self._drop(peer)

    def _handle(self, peer: _Peer, line: bytes) -> bool:
        """Whether the peer may stay."""
        try:
            message = json.loads(line)
            if peer.rank is None:
                trusted = hmac.compare_digest(str(message["token"]), self._token)
                return trusted and self._greet(peer, int(message["rank"]), message)
            event = message.pop("event")
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        self._on_event(peer.rank, event, message)
        return True

    def _greet(self, peer: _Peer, rank: int, hello: Mapping[str, Any]) -> bool:
        peer.rank = rank
        if rank == 0:
            self._store = {"host": peer.address, "port": int(hello["port"])}
        if self._store is not None:
            waiting = self._peers.values() if rank == 0 else [peer]
            for known in waiting:
                if known.rank is not None:
                    with suppress(OSError):  # gone meanwhile: its connection reads as ended next
                        _send_line(known.connection, {**self._told, **self._store})
        self._on_event(rank, "joined", {"host": hello["host"], "pid": hello["pid"], "address": peer.address})
        return True

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        del self._peers[peer.connection]
        peer.connection.close()
        if peer.rank is not None:
            self._on_lost(peer.rank)


class Link:
    """A rank's end of the line. ``store_host`` and ``store_port`` say where rank 0's store is, or will be.

    ``term_notice_s``: the seconds from a TERM to a KILL, None where the supervisor does not know.
    """

    def __init__(
        self, connection: socket.socket, store_host: str, store_port: int, term_notice_s: float | None = None
    ) -> None:
        self._connection = connection
        self.term_notice_s = term_notice_s
        self._lock = threading.Lock()
        self._closed = False
        self.store_host, self.store_port = store_host, store_port

    @classmethod
    def join(
        cls,
        address: str,
        token: str,
        rank: int,
        port: int | None,
        timeout: float,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Link | None:
        """Says hello to the supervisor at ``host:port`` and waits, at most ``timeout`` seconds, for rank 0's address.

        ``port`` is rank 0's own choice for its store, None on every other rank. None when ``give_up`` says so, which is
        asked twice a second.
        """
        host, _, supervisor_port = address.rpartition(":")
        hello = {"token": token, "rank": rank, "port": port, "host": socket.gethostname(), "pid": os.getpid()}
        connection = _connect(host, int(supervisor_port), timeout)
        try:
            _send_line(connection, hello)
            line = _receive_line(connection, timeout, give_up)
        except OSError as error:
            raise LauncherEnvironmentError(
                f"rank {rank} reached the supervisor at {address}, but rank 0 did not say where its store is "
                f"within {timeout:.0f} s ({error})"
            ) from error
        if line is None:
            connection.close()
            return None
        if not line:
            raise LauncherEnvironmentError(f"the supervisor at {address} is not this attempt's: it refused the token")
        connection.settimeout(None)
        _keep_alive(connection)
        store = json.loads(line)
        return cls(connection, store["host"], store["port"], store.get("term_notice_s"))

    @property
    def local_address(self) -> str:
        """This host's address on the network that the supervisor was reached by."""
        address: str = self._connection.getsockname()[0]
        return address

    def on_lost(self, act: Callable[[], None]) -> None:
        """Calls ``act`` in a thread of its own when the supervisor is gone, or cut off."""
        threading.Thread(target=self._await_loss, args=(act,), name="link", daemon=True).start()

    def _await_loss(self, act: Callable[[], None]) -> None:
        try:
            while self._connection.recv(4096):
                pass  # The supervisor says nothing after its first answer.
        except OSError:
            pass
        if not self._closed:
            act()

    def close(self) -> None:
        """Leaves the supervisor."""
        self._closed = True
        self._connection.close()

    def send(self, event: str, **values: Any) -> None:
        """Reports an event. A supervisor that is gone is no reason to stop training: the failure is swallowed."""
        try:
            with self._lock:
                _send_line(self._connection, {"event": event, **values})
        except OSError:
            pass


#: The link of this process, set by the rank shim; None in a process that no supervisor started.
current: Link | None = None


def report(event: str, **values: Any) -> None:
    """Reports an event to the supervisor, if there is one."""
    if current is not None:
        current.send(event, **values)


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connects, again and again for ``timeout`` seconds: a node's network may come up late."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                raise LauncherEnvironmentError(
                    f"no supervisor answers at {host}:{port} after {timeout:.0f} s ({error}); "
                    "the nodes of a job must be able to reach its first node"
                ) from error
            time.sleep(0.2)


def _receive_line(connection: socket.socket, timeout: float, give_up: Callable[[], bool]) -> bytes | None:
    """The first line that comes (empty: the peer left without one); None when given up. Raises OSError in the end."""
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
    return data


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())
