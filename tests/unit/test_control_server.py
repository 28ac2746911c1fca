"""Orders to ranks that cannot take them at once, over real sockets on loopback."""

from __future__ import annotations

import json
import queue
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from clusterddp.codec import Misfit
from clusterddp.history.beginnings import Phase
from clusterddp.history.event import EVENTS, Reported
from clusterddp.messages.orders import Order, RecordFlight, Stop, read_order
from clusterddp.messages.requests import Refused, read_answer
from clusterddp.supervisor import control_server
from clusterddp.supervisor.control_server import ControlServer, Handlers, Outbox, read_report
from clusterddp.worker.control_channel import ControlChannel, send_line
from tests.connections import accepted_from
from tests.histories import whole
from tests.reports import fields_of
from tests.waiting import wait_until

TOKEN, WAIT_S = "secret of this attempt", 20


def little_room(connection: socket.socket) -> socket.socket:
    """Before it connects. Segments are small, too: their sender waits for room for half of one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    return connection


class Pair:
    """A connection with little room on its way from ``ours`` to ``theirs``, and an outbox for it."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.outbox = Outbox(self.selector)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            self.theirs = little_room(socket.socket())
            self.theirs.settimeout(WAIT_S)
            self.theirs.connect(listener.getsockname())
            self.ours, _ = listener.accept()
        self.ours.setblocking(False)
        self.selector.register(self.ours, selectors.EVENT_READ)

    def fill(self) -> list[bytes]:
        """Sends different lines until some are kept."""
        lines: list[bytes] = []
        while self.selector.get_key(self.ours).events == selectors.EVENT_READ:
            assert len(lines) < 1000, "lines are lost"
            lines.append(b"line %d %s\n" % (len(lines), b"." * 99))
            assert self.outbox.send(self.ours, lines[-1])
        return lines

    def close(self) -> None:
        self.outbox.forget(self.ours)
        for each in (self.ours, self.theirs, self.selector):
            each.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_slow_reader_gets_every_line_whole_and_in_order(pair: Pair) -> None:
    lines = pair.fill()
    for number in range(50):
        lines.append(b"later %d %s\n" % (number, b"." * 99))
        assert pair.outbox.send(pair.ours, lines[-1])
    received = b""
    while len(received) < sum(map(len, lines)):
        received += pair.theirs.recv(4096)
        for key, mask in pair.selector.select(0):
            assert (key.fileobj, mask) == (pair.ours, selectors.EVENT_WRITE)
            pair.outbox.on_writable(pair.ours)
    assert received == b"".join(lines)
    assert pair.selector.get_key(pair.ours).events == selectors.EVENT_READ
    assert pair.outbox.retry_s is None


def test_a_line_that_is_kept_is_not_added_again_and_there_is_a_limit(pair: Pair) -> None:
    """The order to stop is repeated until a rank has confirmed it."""
    pair.fill()
    for _ in range(10_000):
        assert pair.outbox.send(pair.ours, b'{"stop": "preemption"}\n')
    assert sum(map(len, pair.outbox._kept[pair.ours])) < 1000
    assert not pair.outbox.send(pair.ours, b"." * control_server.MOST_BYTES)
    assert pair.outbox.send(pair.ours, b'{"leave": "rank 2 (n1) failed"}\n')


def test_a_connection_that_is_writable_and_takes_nothing_is_tried_again_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the kernel has no memory: the selector would return at once, for ever."""
    lines = pair.fill()
    pair.outbox.on_writable(pair.ours)
    assert pair.selector.get_key(pair.ours).events == selectors.EVENT_READ
    assert pair.outbox.retry_s is not None and 0 < pair.outbox.retry_s <= control_server.RETRY_S
    received = b""
    monkeypatch.setattr(control_server, "RETRY_S", 0.0)
    pair.outbox._retry_at = 0.0
    while len(received) < sum(map(len, lines)):
        received += pair.theirs.recv(4096)
        pair.outbox.retry()
        if pair.selector.get_key(pair.ours).events != selectors.EVENT_READ:
            pair.outbox.on_writable(pair.ours)
    assert received == b"".join(lines)


def test_a_broken_connection_keeps_nothing(pair: Pair) -> None:
    pair.fill()
    pair.theirs.close()  # with unread data: a reset
    pair.selector.select(WAIT_S)
    pair.outbox.on_writable(pair.ours)
    assert not pair.outbox._kept and pair.selector.get_key(pair.ours).events == selectors.EVENT_READ


def test_a_rank_that_reads_late_delays_no_other_and_gets_the_order_to_stop() -> None:
    """It is one of thousands, on a node whose memory is short: the server skipped it before, or tore a line."""
    events: queue.Queue[tuple[int, str]] = queue.Queue()
    hear = Handlers(lambda rank, report: events.put((rank, fields_of(report)[0])))
    server = ControlServer(TOKEN, hear, host="127.0.0.1", ranks=2)
    slow, quick = socket.socket(), socket.create_connection(("127.0.0.1", server.port))
    with little_room(slow), quick:
        slow.connect(("127.0.0.1", server.port))
        for rank, connection in enumerate((quick, slow)):
            connection.settimeout(WAIT_S)
            port = 1 if rank == 0 else None
            send_line(connection, {"token": TOKEN, "rank": rank, "port": port, "host": "n1", "pid": 7, "process": "a"})
            assert events.get(timeout=WAIT_S) == (rank, "joined")
        reader = quick.makefile("rb")
        sent: list[Order] = [RecordFlight(f"{number} {'.' * 990}") for number in range(60)]
        sent.append(Stop("preemption"))
        with accepted_from(slow) as served:
            served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for order in sent:
            server.broadcast(order)
        assert json.loads(reader.readline())["port"] == 1  # the answer to its hello
        assert [read_order(json.loads(reader.readline())) for _ in sent] == sent
        wait_until(lambda: len(server._outbox._kept) == 1, "only the late rank to have lines left", WAIT_S)
        send_line(quick, {"event": "notified", "reason": "preemption"})
        assert events.get(timeout=WAIT_S) == (0, "notified")
        late = slow.makefile("rb")
        late.readline()
        assert [read_order(json.loads(late.readline())) for _ in sent] == sent
        reader.close()
        late.close()
    server.close()


BEAT = {"event": "alive", "count": 90, "step": 89, "age_s": 610.0}


@pytest.mark.parametrize(
    "report",
    [
        7,
        {"step": 7},
        {"event": None},
        {"event": "checkpoint", "step": 7},
        {"event": "checkpoint", "step": 7, "blocked_s": 0.1, "durable_s": "soon", "bytes": 1},
        {"event": "progress", "step": -1, "steps": 7},
        {"event": "of a later version", "step": "7"},
        {"event": "result", "step": 7, "values": json.loads("[" * 600 + "]" * 600)},
        {"event": "left", "host": "n1"},
        {"event": "left", "host": "n1", "end": "bored"},
        {"event": "stacks", "request": 7, "place": "x", "threads": [{}]},
        {"event": "gpu", "figures": [1, 2]},
        {"event": "alive"},
        {**BEAT, "device": [90]},
        {**BEAT, "device": ["90", "own", 1.0]},
        {**BEAT, "collectives": [["0", 1]]},
        {**BEAT, "timing": 7},
        {**BEAT, "timing": [1, 2.0]},
        {**BEAT, "timing": [1.5, 0, 0, 0, 0]},
        {**BEAT, "timing": [1, "2", 0, 0, 0]},
        {**BEAT, "timing": [1, 2, 0, 0, 0], "timing_age_s": "2"},
    ],
)
def test_a_report_of_an_unexpected_form_is_refused(report: object) -> None:
    """The server skips it, and says so."""
    with pytest.raises(Misfit):
        read_report(0, json.dumps(report).encode())


def test_a_report_is_of_the_rank_whose_connection_it_came_over_and_of_this_attempt() -> None:
    """Whatever else it says. The decisions and the history's view count on it."""
    report = read_report(3, b'{"event": "phase", "phase": "training", "rank": 5, "attempt": 7, "time": 9e10}')
    assert isinstance(report, Phase) and (report.rank, report.attempt, report.time) == (3, 0, 0.0)


def test_a_rank_reports_what_ranks_report_alone() -> None:
    """A rank runs the user's code. Each event that only the supervisor adds would be taken for its own."""
    accepted = set()
    for name, kind in EVENTS.items():
        with suppress(Misfit):
            assert isinstance(read_report(0, json.dumps(whole({"event": name})).encode()), kind)
            accepted.add(name)
    added = {"completed", "failed", "requeued", "node_lost", "rank_failed", "hung", "started", "excluded", "rejoined"}
    assert accepted == {name for name, kind in EVENTS.items() if issubclass(kind, Reported)}
    assert not accepted & added and {"checkpoint", "stopping", "gpu_fault"} <= accepted


def test_an_error_in_what_handles_a_report_is_no_malformed_report() -> None:
    """It ended as one in the log, and the supervisor missed the report."""
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def fail(rank: int, report: object) -> None:
        raise TypeError("of the supervisor itself")

    server = ControlServer(TOKEN, Handlers(fail, failed=errors.put), host="127.0.0.1", ranks=1)
    channel = ControlChannel.join(f"127.0.0.1:{server.port}", TOKEN, 0, 20001, 5.0)
    assert isinstance(errors.get(timeout=10), TypeError)
    assert channel is not None
    channel.close()
    server.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"request": "dance"},
        {"request": None},
        {"request": "requeue", "values": {"nodes": "n1"}},
        {"request": "drain", "values": {}},
        {"request": "drain", "values": {"node": ["n1"]}},
        {"request": "stacks", "values": {"ranks": 3}},
        {"request": "save", "values": [1]},
    ],
)
def test_a_request_of_an_unexpected_form_is_refused_with_a_reason(request_: dict[str, object]) -> None:
    """An older supervisor, too, says that it does not know what a newer command asks for."""
    asked: queue.SimpleQueue[object] = queue.SimpleQueue()
    take = Handlers(lambda *_: None, on_request=lambda *request: asked.put(request))
    server = ControlServer(TOKEN, take, host="127.0.0.1", ranks=2)
    with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rb") as lines:
        connection.settimeout(WAIT_S)
        send_line(connection, {"token": TOKEN, **request_})
        assert isinstance(read_answer(json.loads(lines.readline())), Refused) and lines.readline() == b""
    server.close()
    assert asked.empty()
