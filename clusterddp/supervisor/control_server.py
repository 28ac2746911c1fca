"""The supervisor's side of the control channel. ``worker/control_channel.py`` has the ranks' side and the protocol.

Each request of the user comes over its own connection (``runs/request_client.py``).

``Outbox`` keeps the lines for connections that cannot take them at once, and sends them later, without waiting.
"""

from __future__ import annotations

import errno
import hmac
import json
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clusterddp.codec import Misfit, read
from clusterddp.errors import LauncherEnvironmentError
from clusterddp.history import codec
from clusterddp.history.beginnings import Rejoined
from clusterddp.history.event import EVENTS, Reported, Unread
from clusterddp.messages.orders import Connect, Order, Stop, order_line
from clusterddp.messages.reports import REPORTS, Hello, Joined, Serving
from clusterddp.messages.requests import (
    REQUESTS,
    LastAnswer,
    News,
    Refused,
    UserRequest,
    answer_line,
    read_request,
)
from clusterddp.reporter import counted, say
from clusterddp.rundir.schemas import EVENT, is_text, schema_error
from clusterddp.supervisor.attempt_state import Report
from clusterddp.version import __version__
from clusterddp.worker.control_channel import LONGEST_LINE, encoded, keep_alive, send_line

#: The most bytes that are kept for a connection, unless a single line is longer.
MOST_BYTES = 1 << 16
#: How often a connection is tried again whose peer is falling silent, or whose kernel has no memory, in seconds.
RETRY_S = 0.5
#: This many unanswered keepalive probes in a row mean that a peer is falling silent. One may just be in flight.
_FALLING_SILENT = 2


def listen(host: str = "", backlog: int | None = None) -> socket.socket:
    """A listening socket with a free port. Without a host, at all addresses of this node, IPv4 and IPv6."""
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, 0), backlog=backlog)
    return socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)


class Outbox:
    """Sends lines over non-blocking connections that ``selector`` has for reading. Not thread-safe.

    Most lines are taken by the kernel at once. The others are kept, in their order, and sent when the connection is
    writable (``on_writable``), or answers again (``retry``). A line that is already kept is not added a second time.
    A connection that breaks loses what is kept for it. The next read of it shows that it broke.
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


# Limits for strangers: connections that have not sent the token yet, which a rank does at once.
_LONGEST_HELLO = 4096
_HELLO_S = 10.0
#: At any time; as many as there are ranks if these are more, because all of them may connect at once.
_MOST_STRANGERS, _FEWEST_STRANGERS = 256, 16
#: Connections that are accepted before others are read again.
_ACCEPTED = 256
#: File descriptors reserved for the rest of the supervisor: logs, the run's files, Slurm's commands.
_OWN_DESCRIPTORS = 64
#: Pause before the next accept if no file descriptor is left.
_NO_DESCRIPTOR_S = 0.1
#: The errors of a connection whose peer does not respond.
_SILENT = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH))
_LAST_WORDS_S = 1.0
#: The longest time for which reports that have already arrived are read after that.
_MOST_WORDS_S = 10.0
#: The most requests of the user that are answered at a time, and how long one may take to read its answer, in seconds.
_MOST_CLIENTS, _READ_S = 16, 10.0
#: How deep the values of an event may be nested. The writer of the history is recursive.
_MOST_NESTED = 32


@dataclass
class _Peer:
    """A connection. ``rank`` and ``client`` are None until it has sent the token."""

    connection: socket.socket
    address: str
    deadline: float
    rank: int | None = None
    client: int | None = None
    """The number of the user's request that came over it."""
    pending: bytes = b""
    skipping: bool = False
    """Whether the line being received is too long and will be skipped."""


@dataclass(frozen=True)
class Handlers:
    """What a control server calls: from its own thread, one at a time."""

    on_report: Callable[[int, Report], None]
    """With a rank, and what it reports."""
    on_lost: Callable[[int, bool], None] = lambda _rank, _silent: None
    """With a rank whose connection broke, and whether it is silent: its node does not respond."""
    on_request: Callable[[int, UserRequest], None] = lambda *_: None
    """With a user's request, and its number, for ``answer``."""
    failed: Callable[[BaseException], None] | None = None
    """With an error that ends the server's thread. None leaves it to ``threading.excepthook``."""


class ControlServer:
    """Answers ranks once rank 0's address is known, and passes their events to the handlers.

    ``ranks``: the number of ranks. None for any number. Each may join once, and rejoin (event ``rejoined``) after its
    connection broke, but not after its node was silent, because it may have been declared lost.

    The time for a message does not grow with the number of ranks, except for one to all of them and rank 0's first.
    Raises LauncherEnvironmentError if this process may not open a file descriptor per rank.
    """

    def __init__(self, token: str, handlers: Handlers, host: str = "", ranks: int | None = None) -> None:
        self._token, self._handlers, self._ranks = token, handlers, ranks
        self._most_strangers = _most_strangers(ranks)
        # All ranks may connect at once. Beyond net.core.somaxconn they wait until their kernel tries again.
        self._listener = listen(host, backlog=max(4096, ranks or 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, _Peer] = {}
        self._joined: dict[int, _Peer] = {}  # peers by rank
        self._strangers: dict[socket.socket, _Peer] = {}  # peers without a rank, the oldest first
        self._strangers_from: Counter[str] = Counter()  # how many of them each address has
        self._clients: dict[int, _Peer] = {}  # peers whose request is not answered yet
        self._requests_made = 0
        self._taken: dict[int, Any] = {}  # the process that joined as a rank; None: it may not rejoin
        self._known: Counter[int] = Counter()  # how many events each rank has reported
        self._store: dict[str, Any] | None = None
        self._welcome: dict[str, Any] = {}
        self._requests: deque[Callable[[], None]] = deque()  # of other threads
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._outbox = Outbox(self._selector)
        self._thread = threading.Thread(target=self._work, name="link", daemon=True)
        self._thread.start()

    def tell(self, **values: Any) -> None:
        """Adds values to the answer that each rank gets when it joins from now on."""
        self._request(lambda: self._welcome.update(values))

    def broadcast(self, order: Order, ranks: Collection[int] | None = None) -> None:
        """Sends an order to these ranks, or to all, if they have joined.

        Never waits. A rank that cannot take it at once gets it as soon as it can.
        """
        self._request(lambda: self._send_to_all(order, ranks))

    def answer(self, client: int, answer: News | LastAnswer) -> None:
        """Answers a request. The last answer closes its connection. Never waits."""
        self._request(lambda: self._answer(client, answer))

    def _request(self, act: Callable[[], None]) -> None:
        """Has the server's thread do something at once. Has no effect after ``close``."""
        self._requests.append(act)
        with suppress(OSError):
            self._wake_write.send(b".")

    def _send_to_all(self, order: Order, ranks: Collection[int] | None) -> None:
        if self._store is None and isinstance(order, Stop):
            return  # all wait for rank 0's address, or the order to exit; USR2 asks them to stop
        line = encoded(order_line(order))
        for rank in list(self._joined) if ranks is None else ranks:
            if (peer := self._joined.get(rank)) is not None and not self._outbox.send(peer.connection, line):
                say(f"rank {rank} is not reading from its connection. Dropped a message to this rank: {line[:200]!r}")

    def close(self) -> None:
        """Reads the last reports of ranks that have exited, then closes all connections.

        Waits at most a second, because a node may be cut off. Reports that have arrived by then are read.
        """
        self._wake_write.close()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            if self._handlers.failed is None:
                raise
            self._handlers.failed(error)

    def _serve(self) -> None:
        deadline: float | None = None
        while deadline is None or self._joined:
            over_s = -1.0 if deadline is None else time.monotonic() - deadline
            ready = self._selector.select(self._wait_s(deadline))
            if over_s >= 0 and (over_s >= _MOST_WORDS_S or not any(map(self._of_rank, ready))):
                break
            self._carry_out_requests()
            for key, mask in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    if not self._wake_read.recv(4096):
                        deadline = time.monotonic() + _LAST_WORDS_S
                        self._selector.unregister(self._wake_read)
                    self._carry_out_requests()  # also those whose wake-up came since, and was read with the first
                elif (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    if mask & selectors.EVENT_WRITE:
                        self._outbox.on_writable(peer.connection)
                    if mask & selectors.EVENT_READ:
                        self._receive(peer)
            self._outbox.retry()
            self._drop_slow()
        self._listener.close()  # first, so that a rank whose connection breaks cannot reconnect
        for peer in self._peers.values():
            peer.connection.close()
        self._wake_read.close()
        self._selector.close()

    def _wait_s(self, deadline: float | None) -> float | None:
        """How long to wait for events at most, because the deadlines of strangers' connections wake no thread."""
        look_s = 0.1 if deadline else _HELLO_S / 10 if self._strangers else None
        return min((seconds for seconds in (look_s, self._outbox.retry_s) if seconds is not None), default=None)

    def _carry_out_requests(self) -> None:
        """Carries them out in order with the ranks that join."""
        while self._requests:
            self._requests.popleft()()

    def _of_rank(self, ready: tuple[selectors.SelectorKey, int]) -> bool:
        peer = self._peers.get(ready[0].fileobj)  # type: ignore[call-overload]
        return peer is not None and peer.rank is not None

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # reset by the peer, or no file descriptor left; a rank retries
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room()
                return
            connection.setblocking(False)
            try:
                keep_alive(connection)
            except OSError:  # already reset
                connection.close()
                continue
            host = str(address[0]).removeprefix("::ffff:")  # as an IPv6 socket shows an IPv4 address
            peer = _Peer(connection, host, time.monotonic() + _HELLO_S)
            self._peers[connection] = self._strangers[connection] = peer
            self._strangers_from[peer.address] += 1
            self._selector.register(connection, selectors.EVENT_READ)
            self._carry_out_requests()
            self._receive(peer)  # a rank that had to wait has sent its first message
            if len(self._strangers) > self._most_strangers:
                self._displace()

    def _displace(self) -> None:
        """Closes the oldest connection from the address with the most strangers, unless its first message is there.

        A node has few ranks, so a flood from a different node displaces none of them. A rank that a flood from its own
        node displaces joins again.
        """
        ((crowd, _),) = self._strangers_from.most_common(1)
        oldest = next(peer for peer in self._strangers.values() if peer.address == crowd)
        self._receive(oldest)
        if oldest.connection in self._strangers:
            self._drop(oldest)

    def _drop_slow(self) -> None:
        """Closes the strangers' connections that have sent no first message in time."""
        now = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers.values()))).deadline <= now:
            self._drop(oldest)

    def _make_room(self) -> None:
        """No descriptor is left. Closes half of the strangers' connections, and never accepts as many again."""
        self._most_strangers = max(1, len(self._strangers) // 2)  # a rank is one, too, until its first message is read
        for peer in list(self._strangers.values())[: -self._most_strangers]:
            self._drop(peer)
        time.sleep(_NO_DESCRIPTOR_S)  # the listener stays readable

    def _recognize(self, peer: _Peer) -> None:
        """No longer counts a connection as a stranger's: it has sent the token, or is closed."""
        if self._strangers.pop(peer.connection, None) is not None:
            self._strangers_from[peer.address] -= 1
            if not self._strangers_from[peer.address]:
                del self._strangers_from[peer.address]

    def _receive(self, peer: _Peer) -> None:
        silent = False
        try:
            data = peer.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            data, silent = b"", error.errno in _SILENT
        *lines, peer.pending = (peer.pending + data).split(b"\n")
        stays = all(self._handle(peer, line) for line in lines)
        if stays and peer.rank is not None and len(peer.pending) > LONGEST_LINE:
            peer.skipping, peer.pending = True, b""
        if not stays or not data or (peer.rank is None and len(peer.pending) > _LONGEST_HELLO):
            self._drop(peer, silent)

    def _handle(self, peer: _Peer, line: bytes) -> bool:
        """Whether to keep the connection. A rank's is always kept: it would reconnect and send the line again."""
        if peer.rank is not None:
            self._hear(peer.rank, None if peer.skipping else line)
            peer.skipping = False
            return True
        if peer.client is not None or len(line) > _LONGEST_HELLO:
            return False
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not (isinstance(message, dict) and is_text(message.get("token"))):
            return False
        if not hmac.compare_digest(message["token"].encode(errors="replace"), self._token.encode()):
            if type(message.get("rank")) is int:  # it would try again, like one that was displaced
                _refuse(peer, "its token is not this attempt's")
            return False
        if "request" in message:
            return self._take(peer, message)
        try:
            hello = read(Hello, message)
        except Misfit as error:
            _refuse(peer, str(error))
            return False
        return self._greet(peer, hello)

    def _hear(self, rank: int, line: bytes | None) -> None:
        """Passes a rank's report on. ``line`` is None if it was too long. Malformed reports are skipped."""
        self._known[rank] += 1
        try:
            report = read_report(rank, line)
        except Misfit as error:
            say(f"skipped a malformed report from rank {rank}: {error}")
            return
        if isinstance(report, Serving):
            self._open_store(rank)
        else:
            self._handlers.on_report(rank, report)

    def _open_store(self, rank: int) -> None:
        if rank == 0 and self._store is not None:
            self._store["open"] = True  # for ranks that reconnect
            self._send_to_all(Connect(), None)

    def _take(self, peer: _Peer, message: Mapping[str, Any]) -> bool:
        """Takes a request from any process with the token, which only the user can read."""
        if len(self._clients) >= _MOST_CLIENTS:
            _answer_at_once(peer, f"{_MOST_CLIENTS} other requests have not been answered yet. Try again later")
            return False
        try:
            request = read_request(message)
        except Misfit as error:
            _answer_at_once(
                peer, f"this job's clusterddp {__version__} supports {', '.join(REQUESTS)}. Refused: {error}"
            )
            return False
        self._requests_made += 1
        peer.client = self._requests_made
        self._recognize(peer)
        self._clients[peer.client] = peer
        self._handlers.on_request(peer.client, request)
        return True

    def _answer(self, client: int, answer: News | LastAnswer) -> None:
        """Sends what the connection takes at once. A thread sends the rest of a long last answer."""
        peer = self._clients.get(client)
        if peer is None:  # the user did not wait for the answer
            return
        data = encoded(answer_line(answer))
        with suppress(OSError):
            data = data[peer.connection.send(data) :]
        if isinstance(answer, News):
            return
        if data:
            threading.Thread(target=_send_rest, args=(peer.connection.dup(), data), name="answer", daemon=True).start()
        self._drop(peer)

    def _greet(self, peer: _Peer, hello: Hello) -> bool:
        rank = hello.rank
        if refusal := self._refusal(hello):
            _refuse(peer, refusal)
            return False
        back = rank in self._taken
        if (old := self._joined.pop(rank, None)) is not None:
            old.rank = None  # broken, which was not noticed here
            self._drop(old)
        peer.rank = rank
        self._joined[rank] = peer
        self._taken[rank] = hello.process
        self._recognize(peer)
        first = rank == 0 and not back
        if first:
            self._store = {"host": peer.address, "port": hello.port, "open": False}
        if self._store is not None:
            for joined in self._joined if first else [rank]:
                answer = {**self._welcome, **self._store, "known": self._known[joined]}
                self._outbox.send(self._joined[joined].connection, encoded(answer))
        again = Rejoined(rank=rank, host=hello.host, pid=hello.pid, address=peer.address)
        self._handlers.on_report(rank, again if back else Joined(hello.host))
        return True

    def _refusal(self, hello: Hello) -> str | None:
        """Why this rank may not join. None if it may."""
        rank, port = hello.rank, hello.port
        if rank < 0 or (self._ranks is not None and rank >= self._ranks):
            return f"there is no rank {rank}" + (
                "" if self._ranks is None else f" in a run of {counted(self._ranks, 'rank')}"
            )
        if rank in self._taken and (hello.process is None or self._taken[rank] != hello.process):
            return f"rank {rank} has already joined"
        if rank == 0 and not (port is not None and 0 < port < 65536):
            return f"rank 0's port: expected a number from 1 to 65535, got {port!r}"
        return None

    def _drop(self, peer: _Peer, silent: bool = False) -> None:
        self._outbox.forget(peer.connection)
        self._selector.unregister(peer.connection)
        del self._peers[peer.connection]
        self._recognize(peer)
        self._clients.pop(peer.client or 0, None)
        peer.connection.close()
        if peer.rank is not None:
            del self._joined[peer.rank]
            if silent:
                self._taken[peer.rank] = None
            self._handlers.on_lost(peer.rank, silent)


def read_report(rank: int, line: bytes | None) -> Report:
    """What a rank reports in a line, which is None if it was too long. Raises Misfit, also for what no rank reports: it
    runs the user's code, which might report that a node was lost, or that the run is completed."""
    if line is None or len(line) > LONGEST_LINE:
        raise Misfit(f"it is longer than {LONGEST_LINE:,} bytes")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Misfit(f"{error!r}") from error
    name = values.get("event") if isinstance(values, dict) else None
    if not isinstance(name, str):
        raise Misfit(f"it has no event: {line[:60]!r}")
    if (kind := REPORTS.get(name)) is not None:
        report: Report = read(kind, values)
        return report
    if not issubclass(EVENTS.get(name, Unread), Reported):
        raise Misfit(f"ranks report no {name!r:.60}")
    if not _nests_within(values, _MOST_NESTED):
        raise Misfit(f"{name}: its values are nested more than {_MOST_NESTED} deep")
    own = {"time": 0.0, "attempt": 0, "event": name, "rank": rank}
    event = own | values | own
    if wrong := schema_error(event, EVENT):
        raise Misfit(f"{name}: {wrong}")
    return codec.read(event)


def _nests_within(value: Any, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(levels > 0 and _nests_within(item, levels - 1) for item in items)


def _send_rest(connection: socket.socket, data: bytes) -> None:
    with connection, suppress(OSError):  # the user stopped reading
        connection.settimeout(_READ_S)
        connection.sendall(data)


def _answer_at_once(peer: _Peer, why: str) -> None:
    """Refuses a user's request."""
    with suppress(OSError):
        peer.connection.send(encoded(answer_line(Refused(why))))


def _refuse(peer: _Peer, why: str) -> None:
    """Refuses a rank that wants to join."""
    with suppress(OSError):
        send_line(peer.connection, {"refused": why})


def _most_strangers(ranks: int | None) -> int:
    """How many strangers leave enough file descriptors for the ranks and the rest of this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(_MOST_STRANGERS, ranks or 0)
    if limit == resource.RLIM_INFINITY:
        return most
    needed = (ranks or 0) + _OWN_DESCRIPTORS + _FEWEST_STRANGERS
    if needed > limit:
        raise LauncherEnvironmentError(
            f"the supervisor needs {needed:,} open files for {counted(ranks or 0, 'rank')}, but the limit here is "
            f"{limit:,} (`ulimit -Hn`). Ask the administrator for a higher one (LimitNOFILE of slurmd, or "
            "limits.conf), or use fewer ranks"
        )
    return min(most, limit - _OWN_DESCRIPTORS - (ranks or 0))
