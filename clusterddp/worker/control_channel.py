"""The control channel from a rank to its supervisor: one TCP connection per rank, JSON lines, standard library only.

This is the rank's end. The supervisor's is ``supervisor/control_server.py``. Their messages are in ``messages/``.

- Rendezvous: each rank sends the attempt's token and gets the address of rank 0's store. Rank 0 chooses and reserves
  the port. The address is the peer address of its connection, so no host name is resolved. The supervisor announces
  when the store is open, because torch retries a closed port with a backoff of up to a minute.
- Events: ranks report them. Only the supervisor writes the history.
- Orders: the supervisor asks ranks to stop at a step boundary, to exit at once, to write torch's flight record before
  it ends a hang, and, for the user, to save or to send their stacks.
- Commits: rank 0 asks before each checkpoint whether every rank has made its step, because a script that catches the
  error of its collective continues with weights that are not synchronized. Whether all are connected would not tell: a
  killed process closes its connections one after another, and a process that it has forked may hold this one open.
- Failure detection: if the connection breaks and the rank does not reconnect at once, the rank is lost. If it becomes
  silent, the rank's node is lost.

Files in the run directory are too slow for this: on NFS a new file can be invisible to other nodes for a minute.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from clusterddp import protocol
from clusterddp.codec import Misfit, plain
from clusterddp.errors import LauncherEnvironmentError
from clusterddp.messages.orders import Commit, Leave, Order, read_order
from clusterddp.messages.reports import Committing, Report, report_line
from clusterddp.reporter import say

#: Maximum size of a message in bytes. The sender truncates or drops a longer one, and the receiver skips it. The
#: connection and later messages are not affected.
LONGEST_LINE = 1 << 20
#: Characters to which each text in a message that is too long is truncated.
_CLIPPED = 4000
#: Seconds for which a rank tries to reconnect after its connection broke. If the supervisor has exited, its port is
#: closed. If it is only blocked by a slow disk, its answer may take up to SILENCE_S.
REJOIN_S = 1.0
#: How many recent events a rank keeps, to resend those that a broken connection lost: some minutes' worth.
_KEPT = 256
#: When the supervisor closes the connection without an answer, too many unauthenticated connections may have displaced
#: this one: at least this many attempts to join, after pauses that double from the first to the longest, in seconds.
_TRIES, _PAUSE_S, _LONGEST_PAUSE_S = 5, 0.2, 5.0
#: A separate generator, because the module's own one belongs to the script.
_jitter = random.Random()
#: How often a rank that waits for its answer looks whether to give up.
_POLL_S = 0.5
#: The same for rank 0's question before a commit, which a stop of all ranks answers, too.
_ANSWER_POLL_S = 0.02
#: After how long the question is repeated, for ranks that are a little behind: at first, and at most, as it doubles.
_ASK_AGAIN_S, _LONGEST_ASK_AGAIN_S = 0.1, 1.0
#: A dead or disconnected node closes no connection. The kernel breaks it after this many seconds of silence, so a
#: shorter network failure has no effect.
SILENCE_S = 15
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 5,
    socket.TCP_USER_TIMEOUT: 1000 * SILENCE_S,  # the same for unacknowledged data, which keepalive does not cover
}


#: The supervisor's answer, as far as ranks use it; see ``ControlChannel``.
Answer: TypeAlias = "tuple[str, int, float | None, bool, int]"


@dataclass(frozen=True)
class RunRequests:
    """The user's requests that the run in this process serves, from any thread.

    ``progress`` returns how many steps are done and the newest checkpoint's step. ``save`` has the next step boundary
    save.
    """

    progress: Callable[[], tuple[int, int | None]]
    save: Callable[[], None]


class ControlChannel:
    """A rank's connection. ``store_host`` and ``store_port``: the address of rank 0's store.

    ``term_notice_s``: seconds from TERM to KILL, None if unknown. ``answer``: these, whether that store is open, and
    how many of this rank's events the supervisor received before the connection broke. ``heard``: the bytes that
    followed.
    """

    def __init__(self, connection: socket.socket, answer: Answer, heard: bytes) -> None:
        self.store_host, self.store_port, self.term_notice_s, is_open, self._known = answer
        #: Set when rank 0's store accepts connections, or when the supervisor becomes unreachable.
        self.store_open = threading.Event()
        if is_open:
            self.store_open.set()
        self._connection, self._heard = connection, heard
        #: This host's address on the network to the supervisor.
        self.local_address: str = connection.getsockname()[0]
        self._said = self._known  # before an ``exec``, or none
        self._last: deque[bytes] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._closed = False
        #: Reconnects as the same rank, within the given seconds.
        self._again: Callable[[float], ControlChannel | None] = lambda _: None
        self._stops: list[str] = []
        self._on_stop: Callable[[str], None] | None = None
        self._stopping = threading.Lock()
        #: Writes torch's flight record, in bounded time.
        self.write_flight_record: Callable[[], None] = lambda: None
        #: Carries out the user's requests; None without a run.
        self.run: RunRequests | None = None
        #: How many steps this rank has made. None before it has a run.
        self.steps_made: Callable[[], int] | None = None
        self._questions = 0
        self._answers: SimpleQueue[Commit] = SimpleQueue()
        self._unreachable = threading.Event()
        #: torchrun's, as this rank got them.
        self.variables: Mapping[str, str] = {}

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
        """Joins the supervisor at ``host:port`` and waits up to ``timeout`` seconds for the address of rank 0's store.

        ``port``: the port of the store on rank 0, None on other ranks. ``process``: identifies this process, also after
        an ``exec``; by default nothing but this object is the same rank. Returns None once ``give_up``, which is polled
        twice a second, returns True. Raises LauncherEnvironmentError.
        """
        process = process or secrets.token_hex(16)  # identifies a rank that reconnects
        host_name, pid = socket.gethostname(), os.getpid()
        hello = {"token": token, "rank": rank, "port": port, "host": host_name, "pid": pid, "process": process}
        return cls._join(address, hello, timeout, give_up)

    @classmethod
    def _join(
        cls, address: str, hello: Mapping[str, Any], timeout: float, give_up: Callable[[], bool]
    ) -> ControlChannel | None:
        if (answered := _greet(address, hello, timeout, give_up)) is None:
            return None
        connection, line = answered
        connection.settimeout(None)
        keep_alive(connection)
        answer, _, more = line.partition(b"\n")
        channel = cls(connection, _answer(answer, address), more)
        channel._again = lambda timeout: cls._join(address, hello, timeout, lambda: channel._closed)
        return channel

    def listen(self, on_lost: Callable[[], None], on_order: Callable[[Order], None]) -> None:
        """Starts a thread that passes the supervisor's orders to ``on_order``. Calls ``on_lost`` once when the
        supervisor is unreachable."""
        threading.Thread(target=self._listen, args=(on_lost, on_order), name="control channel", daemon=True).start()

    def _listen(self, on_lost: Callable[[], None], on_order: Callable[[Order], None]) -> None:
        self._hear(on_order)
        while not self._closed and self._rejoin():
            self._hear(on_order)
        self.store_open.set()
        self._unreachable.set()
        if not self._closed:
            on_lost()

    def _rejoin(self) -> bool:
        """Reconnects after the connection broke while both ends live (a firewall dropped its state). Returns whether it
        did.

        Events that the supervisor did not receive are sent again.
        """
        try:
            again = self._again(REJOIN_S)
        except (OSError, LauncherEnvironmentError):
            return False
        if again is None:
            return False
        if again.store_open.is_set():
            self.store_open.set()
        with self._lock:
            self._connection.close()
            self._connection, self._heard = again._connection, again._heard
            missing = self._said - again._known
            with suppress(OSError):  # broken again
                for line in list(self._last)[-missing:] if missing > 0 else []:
                    self._connection.sendall(line)
        return True

    def _hear(self, on_order: Callable[[Order], None]) -> None:
        """Passes on orders until the connection breaks."""
        rest = b""
        with suppress(OSError):
            for data in chain([self._heard], iter(lambda: self._connection.recv(4096), b"")):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    _obey(line, on_order)
                if len(rest) > LONGEST_LINE:
                    break

    def on_stop(self, act: Callable[[str], None] | None) -> None:
        """Calls ``act`` once with each reason for which the supervisor orders a stop. At once if it already has."""
        with self._stopping:
            self._on_stop = act
            if act is not None:
                for reason in self._stops:
                    act(reason)

    def stop(self, reason: str) -> None:
        """The supervisor ordered a stop."""
        with self._stopping:
            if reason in self._stops:
                return
            if self._on_stop is not None:
                self._on_stop(reason)
            self._stops.append(reason)

    def why_not_commit(self, step: int, is_certain: Callable[[], bool]) -> str | None:
        """Asks whether every rank has made ``step``, and waits until all have (None), or one is lost (the reason).

        Also None if the supervisor is unreachable, because training continues without it, and as soon as
        ``is_certain``, which is polled, returns True. For one thread at a time.
        """
        self._questions += 1
        ask_at, pause_s = -math.inf, _ASK_AGAIN_S
        while not is_certain() and not self._unreachable.is_set():
            if (now := time.monotonic()) >= ask_at:
                ask_at, pause_s = now + pause_s, min(2 * pause_s, _LONGEST_ASK_AGAIN_S)
                self.send(Committing(question=self._questions, step=step))
            with suppress(Empty):
                answer = self._answers.get(timeout=_ANSWER_POLL_S)
                if answer.question == self._questions:
                    return answer.why_not
        return None

    def answer(self, answer: Commit) -> None:
        """The supervisor's answer to that question."""
        self._answers.put(answer)

    def close(self) -> None:
        """Closes the connection of this process. A forked child's close leaves the parent's open."""
        self._closed = True
        self._connection.close()

    def send(self, report: Report) -> None:
        """Ignores errors, because training continues without a supervisor."""
        if (line := _short_line(report_line(report))) is None:
            return
        with self._lock, suppress(OSError):
            self._last.append(line)
            self._said += 1
            self._connection.sendall(line)


def tell_of_child(environ: Mapping[str, str]) -> None:
    """Reports to the supervisor, from a process that a rank has started, that this process takes itself for a rank."""
    with suppress(OSError, KeyError, ValueError):  # the process also prints the message to its standard error
        host, _, port = environ[protocol.SUPERVISOR].rpartition(":")
        address = host or environ["SLURM_LAUNCH_NODE_IPADDR"], int(port)
        with socket.create_connection(address, timeout=SILENCE_S) as connection:
            send_line(connection, {"token": environ[protocol.TOKEN], "request": "child"})


def _short_line(message: Mapping[str, Any]) -> bytes | None:
    """A message as one line. None, with a warning on stderr, if it is too long even with truncated texts."""
    try:
        line = encoded(message)
        if len(line) > LONGEST_LINE:
            clipped = {name: clip(value, _CLIPPED) for name, value in message.items() if isinstance(value, str)}
            line = encoded({**message, **clipped})
        if len(line) <= LONGEST_LINE:
            return line
        problem = f"it has {len(line):,} bytes, but the limit is {LONGEST_LINE:,}"
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"it cannot be written as JSON ({error})"
    say(f"dropped the event {message.get('event')!r}, because {problem}")
    return None


def encoded(message: Mapping[str, Any]) -> bytes:
    """A message as one line."""
    return (json.dumps(message, default=plain) + "\n").encode()


def clip(text: str, longest: int) -> str:
    """A text of at most about ``longest`` characters: the beginning and the end of a longer one."""
    if (left_out := len(text) - longest) <= 0:
        return text
    return f"{text[: longest // 2]} ... [{left_out:,} characters left out] ... {text[len(text) - longest // 2 :]}"


def _obey(line: bytes, on_order: Callable[[Order], None]) -> None:
    """Carries out an order. An error, such as a thread that cannot be started, must not hide later orders."""
    if (order := _order(line)) is None:
        return
    try:
        on_order(order)
    except Exception as error:
        say(f"could not carry out the supervisor's request {order!r:.200}: {error!r}")


def _order(line: bytes) -> Order | None:
    """The order in a line. None for anything else, such as an order of another version."""
    try:
        return read_order(json.loads(line))
    except (ValueError, RecursionError, Misfit):
        return None


def _answer(line: bytes, address: str) -> Answer:
    """The supervisor's answer, for ControlChannel. Raises LauncherEnvironmentError."""
    try:
        answer = json.loads(line)
        if "refused" in answer:
            raise LauncherEnvironmentError(f"the supervisor at {address} refused this rank: {answer['refused']}")
        if isinstance(order := _order(line), Leave):
            raise LauncherEnvironmentError(f"stopped before all ranks had joined: {order.why}")
        notice = answer.get("term_notice_s")
        notice_s = None if notice is None else float(notice)
        return str(answer["host"]), int(answer["port"]), notice_s, bool(answer["open"]), int(answer["known"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise LauncherEnvironmentError(
            f"{address} is not a clusterddp supervisor. It answered {line[:80]!r}"
        ) from error


def _greet(
    address: str, hello: Mapping[str, Any], timeout: float, give_up: Callable[[], bool]
) -> tuple[socket.socket, bytes] | None:
    """A connection to the supervisor and its answer. None after ``give_up``."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    attempts = 0
    while True:
        connection = _connect(host, int(port), timeout if attempts == 0 else 5.0)
        attempts += 1
        try:
            send_line(connection, hello)
            line = _receive_line(connection, max(timeout, SILENCE_S), give_up)
        except ConnectionError:
            line = b""
        except OSError as error:
            raise LauncherEnvironmentError(
                f"rank {hello['rank']} reached the supervisor at {address}, but rank 0 did not join within "
                f"{timeout:.0f} s ({error}). Read rank 0's log"
            ) from error
        if line:
            return connection, line
        connection.close()
        if attempts >= _TRIES and time.monotonic() > deadline:
            raise LauncherEnvironmentError(
                f"{address} closed rank {hello['rank']}'s connection {attempts} times without an answer. The "
                "supervisor has too many other connections, or this is not a clusterddp supervisor"
            )
        # After random pauses, because other displaced ranks also join again.
        longest_s = max(_PAUSE_S, min(_LONGEST_PAUSE_S, timeout / _TRIES))
        pause_s = min(longest_s, _PAUSE_S * 2 ** min(attempts - 1, 10)) * _jitter.uniform(0.5, 1.5)
        if line is None or _gives_up(pause_s, give_up):
            return None


def _gives_up(seconds: float, give_up: Callable[[], bool]) -> bool:
    """Waits this many seconds. Returns whether ``give_up`` became true."""
    until = time.monotonic() + seconds
    while not (given_up := give_up()) and (left_s := until - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left_s))
    return given_up


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connects, retrying for ``timeout`` seconds, because a node's network may come up late.

    On the loopback interface a refusal is final, because a local run's supervisor listens before it starts its ranks.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic()))
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and host.startswith("127."):
                raise LauncherEnvironmentError(
                    f"the supervisor at {host}:{port} has exited. Read its log in the run directory, which is "
                    "logs/supervisor.log with --local and otherwise the newest logs/job-*.log"
                ) from error
            if time.monotonic() > deadline:
                raise LauncherEnvironmentError(
                    f"could not connect to the supervisor at {host}:{port} within {timeout:.0f} s ({error}). Every "
                    "node of a job must be able to reach its first node. Check the network and firewalls"
                ) from error
            time.sleep(0.2)


def _receive_line(connection: socket.socket, timeout: float, give_up: Callable[[], bool]) -> bytes | None:
    """The first line and what was received with it. Empty if the peer closed without one, None after ``give_up``.

    Raises TimeoutError after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    connection.settimeout(_POLL_S)
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
            raise LauncherEnvironmentError(
                f"the answer to a rank has no newline, so it is not from a clusterddp supervisor: {data[:80]!r}..."
            )
    return data


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel break the connection after ``SILENCE_S`` without a packet from the peer, and send lines at once.

    Without TCP_NODELAY a second small line waits 40 ms for the acknowledgement of the first.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends one message."""
    connection.sendall(encoded(message))
