"""The line between the supervisor and its ranks: one TCP connection per rank, JSON lines, standard library only.

It carries four things. At the start every rank says hello with the attempt's token, and is told where rank 0's store
is (rank 0 chose and holds the port; its address is the one it was seen under, so that no name is ever looked up).
While it runs, ranks report events, which the supervisor alone writes into the history, and the supervisor may tell them
to leave. When it breaks, the rank is gone; when it falls silent, the rank's node is.

A file in the run directory would not do for this: on NFS a new file may stay invisible on other nodes for a minute.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from clusterddp.errors import LauncherEnvironmentError

ADDRESS_VARIABLE = "CLUSTERDDP_SUPERVISOR"
TOKEN_VARIABLE = "CLUSTERDDP_TOKEN"
_LONGEST_LINE = 1 << 20
# What a stranger may use up: whoever connects is one until it has shown the token, which a rank does at once.
_LONGEST_HELLO = 4096
_HELLO_S = 30.0
_MOST_STRANGERS = 256
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
#: How the kernel says it.
_SILENT = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH))
_LAST_WORDS_S = 1.0


@dataclass
class _Peer:
    """A connection that the supervisor holds; ``rank`` is None until it has shown the token."""

    connection: socket.socket
    address: str
    deadline: float
    rank: int | None = None
    pending: bytearray = field(default_factory=bytearray)


class LinkServer:
    """The supervisor's end. Answers hellos once rank 0's address is known, and hands every event to ``on_event``.

    ``on_event(rank, event, values)`` and ``on_lost(rank, silent)`` are called from the server's own thread, one at a
    time. ``silent``: the rank did not end, it is its node that does not answer.
    ``ranks``: how many there are, None where any number may join. Each may join once.
    """

    def __init__(
        self,
        token: str,
        on_event: Callable[[int, str, Mapping[str, Any]], None],
        on_lost: Callable[[int, bool], None] = lambda _rank, _silent: None,
        host: str = "",
        ranks: int | None = None,
    ) -> None:
        self._token, self._on_event, self._on_lost, self._ranks = token, on_event, on_lost, ranks
        self._listener = socket.create_server((host, 0), backlog=4096)  # a thousand ranks come at once
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, _Peer] = {}
        self._strangers: dict[socket.socket, _Peer] = {}  # those of the peers without a rank, the oldest first
        self._taken: set[int] = set()
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

    def say(self, **words: Any) -> None:
        """Every rank that has joined hears this now. Never waits: who cannot be reached at once does not hear it."""
        for peer in list(self._peers.values()):
            if peer.rank is not None:
                with suppress(OSError):
                    _send_line(peer.connection, words)

    def close(self) -> None:
        """Hears out ranks that have ended, at most for a second (a node may be cut off), then drops all connections."""
        self._wake_write.close()
        self._thread.join()

    def _serve(self) -> None:
        deadline: float | None = None
        while deadline is None or (len(self._peers) > len(self._strangers) and time.monotonic() < deadline):
            for key, _ in self._selector.select(timeout=0.1 if deadline else self._until_next_deadline()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    deadline = time.monotonic() + _LAST_WORDS_S
                    self._selector.unregister(self._wake_read)
                elif (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    self._receive(peer)
            self._drop_slow_strangers()
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
        connection.setblocking(False)
        try:
            _keep_alive(connection)
        except OSError:  # reset already
            connection.close()
            return
        peer = _Peer(connection, address[0], time.monotonic() + _HELLO_S)
        self._peers[connection] = self._strangers[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(next(iter(self._strangers.values())))

    def _until_next_deadline(self) -> float | None:
        """Seconds until the oldest stranger is to be dropped; None when there is none."""
        oldest = next(iter(self._strangers.values()), None)
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic())

    def _drop_slow_strangers(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._strangers.values() if peer.deadline <= now]:
            self._drop(peer)

    def _receive(self, peer: _Peer) -> None:
        silent = False
        try:
            data = peer.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            data, silent = b"", error.errno in _SILENT
        peer.pending += data
        *lines, rest = bytes(peer.pending).split(b"\n")
        peer.pending = bytearray(rest)
        stays = all(self._handle(peer, line) for line in lines)
        if not stays or not data or len(rest) > (_LONGEST_HELLO if peer.rank is None else _LONGEST_LINE):
            self._drop(peer, silent)

    def _handle(self, peer: _Peer, line: bytes) -> bool:
        """Whether the peer may stay."""
        if peer.rank is None and len(line) > _LONGEST_HELLO:
            return False
        try:
            message = json.loads(line)
            if peer.rank is None:
                trusted = hmac.compare_digest(str(message["token"]).encode(), self._token.encode())
                return trusted and self._greet(peer, message)
            event = str(message.pop("event"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        try:
            self._on_event(peer.rank, event, message)
        except (ValueError, KeyError, TypeError, AttributeError):  # not what the event should hold
            print(f"clusterddp: rank {peer.rank} reported {event!r} in a way that cannot be understood:", flush=True)
            traceback.print_exc()
        return True

    def _greet(self, peer: _Peer, hello: Mapping[str, Any]) -> bool:
        rank, port = hello["rank"], hello["port"]
        refusal = self._refusal(rank, port)
        if refusal is not None:
            with suppress(OSError):
                _send_line(peer.connection, {"refused": refusal})
            return False
        peer.rank = rank
        self._taken.add(rank)
        del self._strangers[peer.connection]
        if rank == 0:
            self._store = {"host": peer.address, "port": port}
        if self._store is not None:
            waiting = self._peers.values() if rank == 0 else [peer]
            for known in waiting:
                if known.rank is not None:
                    with suppress(OSError):  # gone meanwhile: its connection reads as ended next
                        _send_line(known.connection, {**self._told, **self._store})
        self._on_event(rank, "joined", {"host": str(hello["host"]), "pid": hello["pid"], "address": peer.address})
        return True

    def _refusal(self, rank: Any, port: Any) -> str | None:
        """Why this rank may not join; None when it may."""
        if type(rank) is not int or rank < 0 or (self._ranks is not None and rank >= self._ranks):
            return f"there is no rank {rank}" + ("" if self._ranks is None else f" among {self._ranks} ranks")
        if rank in self._taken:
            return f"rank {rank} has joined already"
        if rank == 0 and not (type(port) is int and 0 < port < 65536):
            return f"rank 0's port is {port!r}: expected a number from 1 to 65535"
        return None

    def _drop(self, peer: _Peer, silent: bool = False) -> None:
        self._selector.unregister(peer.connection)
        del self._peers[peer.connection]
        self._strangers.pop(peer.connection, None)
        peer.connection.close()
        if peer.rank is not None:
            self._on_lost(peer.rank, silent)


class Link:
    """A rank's end of the line. ``store_host`` and ``store_port`` say where rank 0's store is, or will be.

    ``term_notice_s``: the seconds from a TERM to a KILL, None where the supervisor does not know.
    """

    def __init__(
        self,
        connection: socket.socket,
        store_host: str,
        store_port: int,
        term_notice_s: float | None = None,
        heard: bytes = b"",
    ) -> None:
        self._connection, self._heard = connection, heard
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
        for attempt in range(_TRIES):
            connection = _connect(host, int(supervisor_port), timeout if attempt == 0 else 5.0)
            try:
                _send_line(connection, hello)
                line = _receive_line(connection, timeout, give_up)
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
        _keep_alive(connection)
        answer, _, more = line.partition(b"\n")
        return cls(connection, *_answer(answer, address), more)

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
        rest = b""
        with suppress(OSError):
            for data in chain([self._heard], iter(lambda: self._connection.recv(4096), b"")):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    on_words(json.loads(line))
        if not self._closed:
            on_lost()

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


def _answer(line: bytes, address: str) -> tuple[str, int, float | None]:
    """The store's host and port, and the notice, in the supervisor's first answer. Raises LauncherEnvironmentError."""
    try:
        answer = json.loads(line)
        if "refused" in answer:
            raise LauncherEnvironmentError(f"the supervisor at {address} refuses this rank: {answer['refused']}")
        if "leave" in answer:
            raise LauncherEnvironmentError(f"told to leave before all ranks were there: {answer['leave']}")
        notice = answer.get("term_notice_s")
        return str(answer["host"]), int(answer["port"]), None if notice is None else float(notice)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise LauncherEnvironmentError(
            f"what answers at {address} is no supervisor of clusterddp's: it said {line[:80]!r}"
        ) from error


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
        if len(data) > _LONGEST_LINE:
            raise LauncherEnvironmentError(f"what answers instead of the supervisor sends no line: {data[:80]!r}")
    return data


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())
