"""The control channel between the supervisor and its ranks, over real sockets on loopback."""

from __future__ import annotations

import errno
import json
import queue
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.history.beginnings import Phase
from clusterddp.history.steps import Result
from clusterddp.history.stops import Finishing, Signal
from clusterddp.messages import orders
from clusterddp.messages.reports import Connecting, End, Left, Serving
from clusterddp.supervisor import control_server
from clusterddp.supervisor.control_server import ControlServer, Handlers
from clusterddp.worker import control_channel
from clusterddp.worker.control_channel import ControlChannel
from clusterddp.worker.rank import obey
from clusterddp.worker.rank_process import RankProcess
from tests.connections import accepted_at, break_connection, connection_to
from tests.reports import fields_of
from tests.wording import raises, says

TOKEN = "secret of this attempt"


class Heard:
    """What a server received, as queues that a test can wait on."""

    def __init__(self, ranks: int | None = None) -> None:
        self.events: queue.Queue[tuple[int, str, dict[str, Any]]] = queue.Queue()
        self.lost: queue.Queue[tuple[int, bool]] = queue.Queue()
        hear = lambda rank, report: self.events.put((rank, *fields_of(report)))  # noqa: E731
        lose = lambda rank, silent: self.lost.put((rank, silent))  # noqa: E731
        self.server = ControlServer(TOKEN, Handlers(hear, lose), "127.0.0.1", ranks)
        self.address = f"127.0.0.1:{self.server.port}"


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.server.close()


def join(heard: Heard, rank: int, port: int | None = None, token: str = TOKEN) -> ControlChannel:
    link = ControlChannel.join(heard.address, token, rank, port, timeout=10)
    assert link is not None
    return link


def test_every_rank_learns_rank_0s_store_in_any_order_of_joining(heard: Heard) -> None:
    """Rank 1 joins before rank 0: it waits, and both get the port that rank 0 chose."""
    answers: queue.Queue[ControlChannel] = queue.Queue()
    early = threading.Thread(target=lambda: answers.put(join(heard, 1)))
    early.start()
    assert heard.events.get(timeout=10)[:2] == (1, "joined")
    links = [join(heard, 0, port=12345), answers.get(timeout=10), join(heard, 2)]
    assert [(link.store_host, link.store_port) for link in links] == [("127.0.0.1", 12345)] * 3


def test_a_rank_that_still_waits_for_rank_0_is_told_to_exit(heard: Heard) -> None:
    """Its error says so, rather than that another service answered."""
    said: queue.Queue[str] = queue.Queue()

    def wait() -> None:
        with pytest.raises(LauncherEnvironmentError) as error:
            join(heard, 1)
        said.put(str(error.value))

    threading.Thread(target=wait).start()
    assert heard.events.get(timeout=10)[:2] == (1, "joined")
    heard.server.broadcast(orders.Leave("rank 2 (n1) is gone"))
    assert said.get(timeout=10) == "stopped before all ranks had joined: rank 2 (n1) is gone"


def test_a_stop_does_not_replace_the_answer_that_a_rank_waits_for(heard: Heard) -> None:
    """A rank that has joined before rank 0 has nothing to stop yet; it is signalled as well."""
    ports: queue.Queue[int] = queue.Queue()

    def wait() -> None:
        channel = join(heard, 1)
        ports.put(channel.store_port)

    threading.Thread(target=wait).start()
    assert heard.events.get(timeout=10)[:2] == (1, "joined")
    heard.server.broadcast(orders.Stop("preemption"))
    join(heard, 0, port=1)
    assert ports.get(timeout=10) == 1


def test_the_answer_has_what_the_supervisor_already_knows(heard: Heard) -> None:
    """A rank that was answered before knows of no notice, and has no deadline."""
    early = join(heard, 0, port=1)
    heard.server.tell(term_notice_s=20)
    assert [early.term_notice_s, join(heard, 1).term_notice_s] == [None, 20]


def test_closing_reads_what_was_already_sent_even_when_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that waits for a slow disk, or for a CPU, while its time for that passes."""
    monkeypatch.setattr(control_server, "_LAST_WORDS_S", 0.0)
    free, heard = threading.Event(), queue.Queue[str]()
    hear = Handlers(lambda _, report: (free.wait(10), heard.put(fields_of(report)[0])))  # type: ignore[arg-type]
    server = ControlServer(TOKEN, hear, host="127.0.0.1")
    link = ControlChannel.join(f"127.0.0.1:{server.port}", TOKEN, 0, 1, timeout=10)
    assert link is not None
    link.send(Left(host="n1", end=End.DONE, traceback="x" * 100_000))  # more than is read at once
    link.close()
    server._wake_write.close()  # as close() does first
    free.set()
    server.close()
    assert [heard.get_nowait() for _ in range(2)] == ["joined", "left"]


def test_a_wrong_token_is_refused_and_learns_nothing(heard: Heard) -> None:
    """An unknown client is refused with a sentence; the run's ranks are not affected."""
    with raises(LauncherEnvironmentError):
        join(heard, 0, port=666, token="stranger")
    assert join(heard, 0, port=1).store_port == 1


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b"\xff\n", b'{"token": 1}\n'])
def test_malformed_input_is_dropped_and_the_server_continues(heard: Heard, words: bytes) -> None:
    """A port scanner, or another protocol, costs nothing."""
    with socket.create_connection(("127.0.0.1", heard.server.port)) as stranger:
        stranger.sendall(words)
        assert stranger.makefile("rb").read() == b""
    assert join(heard, 0, port=1).store_port == 1


def test_each_reason_to_stop_is_passed_on_once_also_those_from_before(heard: Heard) -> None:
    """A later one may leave less time."""
    link, reasons = join(heard, 0, port=1), list[str]()
    for reason in ("clusterddp stop", "clusterddp stop", "time limit"):
        link.stop(reason)
    link.on_stop(reasons.append)
    for reason in ("time limit", "preemption"):
        link.stop(reason)
    assert reasons == ["clusterddp stop", "time limit", "preemption"]


def test_a_commit_waits_until_the_supervisor_knows_that_all_ranks_have_made_its_step(heard: Heard) -> None:
    """Rank 0 asks again, as another rank may be a little behind."""
    link, answers = join(heard, 0, port=1), list[str | None]()
    process = RankProcess(link)
    link.listen(lambda: None, lambda order: obey(process, order))
    heard.events.get(timeout=10)  # joined
    for number, why_not in ((1, None), (2, "rank 1 (n2) exited")):
        asking = threading.Thread(target=lambda: answers.append(link.why_not_commit(7, lambda: False)))
        asking.start()
        for _ in range(2):
            while heard.events.get(timeout=10) != (0, "committing", {"question": number, "step": 7}):
                pass
        heard.server.broadcast(orders.Commit(0), (0,))  # of an earlier question
        heard.server.broadcast(orders.Commit(number, why_not), (0,))
        asking.join(10)
    assert answers == [None, "rank 1 (n2) exited"]
    assert link.why_not_commit(7, lambda: True) is None


def test_a_rank_counts_its_steps_for_a_commit_also_once_its_run_has_ended(heard: Heard) -> None:
    """Before it has a run, it has no answer, and is asked again."""
    link = join(heard, 0, port=1)
    heard.events.get(timeout=10)  # joined
    process = RankProcess(link)
    obey(process, orders.CountSteps(1))
    process.on_requests(control_channel.RunRequests(progress=lambda: (7, 5), save=lambda: None))
    obey(process, orders.CountSteps(2))
    process.on_requests(None)
    obey(process, orders.CountSteps(3))
    assert [heard.events.get(timeout=10)[2] for _ in range(2)] == [{"question": n, "step": 7} for n in (2, 3)]


def test_an_order_that_cannot_be_carried_out_hides_no_later_one(
    heard: Heard, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank whose listening thread died would miss every stop; a stop is carried out when it is told again."""
    link, obeyed = join(heard, 0, port=1), queue.Queue[Any]()
    failing = [RuntimeError("can't start new thread"), OSError("no memory")]

    def stop(reason: str) -> None:
        if failing:
            raise failing.pop()
        obeyed.put(f"stopped: {reason}")

    def obey(order: Any) -> None:
        if isinstance(order, orders.Stop):
            link.stop(order.reason)
        else:
            obeyed.put(order)

    link.on_stop(stop)
    link.listen(lambda: None, obey)
    for _ in range(3):
        heard.server.broadcast(orders.Stop("preemption"))
    heard.server.broadcast(orders.Save(1))
    assert [obeyed.get(timeout=10), obeyed.get(timeout=10)] == ["stopped: preemption", orders.Save(1)]
    says(capsys.readouterr().err)


def test_a_broken_connection_is_reopened(heard: Heard) -> None:
    """Both sides use the new connection; another process is still refused."""
    link = join(heard, 0, port=1)
    words: queue.Queue[object] = queue.Queue()
    link.listen(lambda: words.put("lost"), words.put)
    break_connection(heard.server.port)
    assert heard.lost.get(timeout=10) == (0, False)
    assert [heard.events.get(timeout=10)[:2] for _ in range(2)] == [(0, "joined"), (0, "rejoined")]
    heard.server.broadcast(orders.Leave("rank 5 hangs"))
    assert words.get(timeout=10) == orders.Leave("rank 5 hangs")
    link.send(Finishing(step=7))
    assert heard.events.get(timeout=10) == (0, "finishing", {"step": 7})
    with raises(LauncherEnvironmentError):
        join(heard, 0, port=1)


def test_all_ranks_learn_when_rank_0s_store_is_open(heard: Heard) -> None:
    """Those that have joined, and those that join later; only rank 0 has a store."""
    first, second = join(heard, 0, port=1), join(heard, 1)
    told: queue.Queue[Any] = queue.Queue()
    second.listen(lambda: None, told.put)
    second.send(Serving())
    second.send(Signal(signal="SIGTERM"))
    assert [heard.events.get(timeout=10)[1] for _ in range(3)] == ["joined", "joined", "signal"]
    assert not join(heard, 2).store_open.is_set()
    first.send(Serving())
    assert told.get(timeout=10) == orders.Connect()
    assert join(heard, 3).store_open.is_set()


def test_a_rank_whose_connection_broke_learns_that_the_store_is_open(heard: Heard) -> None:
    link = join(heard, 0, port=1)
    link.send(Serving())
    link.send(Signal(signal="SIGTERM"))  # the server is past the one before
    assert [heard.events.get(timeout=10)[1] for _ in range(2)] == ["joined", "signal"]
    break_connection(heard.server.port)
    link.listen(lambda: None, lambda _: None)  # does not set it
    assert link.store_open.wait(10)
    assert heard.events.get(timeout=10)[1] == "rejoined"


def test_a_rank_does_not_wait_for_a_store_that_nobody_will_tell_of() -> None:
    """Its supervisor has exited, or there is none."""
    heard = Heard()
    link = join(heard, 0, port=1)
    process = RankProcess(link)
    assert not process.await_store(0)
    link.listen(lambda: None, lambda _: None)
    heard.server.close()
    assert process.await_store(30)
    assert RankProcess().await_store(0)


def test_events_sent_while_disconnected_arrive_once_each_and_in_order(heard: Heard) -> None:
    link = join(heard, 0, port=1)
    link.send(Finishing(step=1))
    break_connection(heard.server.port)
    assert heard.lost.get(timeout=10) == (0, False)
    for step in (2, 3):
        link.send(Finishing(step=step))
    link.listen(lambda: None, lambda _: None)
    events = [heard.events.get(timeout=10) for _ in range(5)]
    assert [event for _, event, _ in events] == ["joined", "finishing", "rejoined", "finishing", "finishing"]
    assert [values["step"] for _, event, values in events if event == "finishing"] == [1, 2, 3]
    link.send(Finishing(step=4))
    assert heard.events.get(timeout=10) == (0, "finishing", {"step": 4})


def test_a_rank_waits_for_a_supervisor_that_is_busy_when_its_connection_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the history, on a slow disk: that is no reason to exit for the rank or its peers."""
    monkeypatch.setattr("clusterddp.worker.control_channel.REJOIN_S", 0.1)
    free, words = threading.Event(), queue.Queue[object]()

    def hear(rank: int, report: Any) -> None:
        event, _ = fields_of(report)
        words.put(event)
        if event == "finishing":
            free.wait(20)

    server = ControlServer(TOKEN, Handlers(hear), host="127.0.0.1")
    link = ControlChannel.join(f"127.0.0.1:{server.port}", TOKEN, 0, 1, timeout=10)
    assert link is not None
    link.listen(lambda: words.put("lost"), words.put)
    link.send(Finishing(step=7))
    assert [words.get(timeout=10) for _ in range(2)] == ["joined", "finishing"]
    break_connection(server.port)
    with pytest.raises(queue.Empty):
        words.get(timeout=1.5)
    free.set()
    assert words.get(timeout=10) == "rejoined"
    link.close()
    server.close()


def test_a_rank_whose_node_was_silent_cannot_reconnect(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been declared lost, and its run may continue elsewhere."""
    monkeypatch.setattr(control_server, "_SILENT", {errno.ECONNRESET})
    monkeypatch.setattr(control_channel.secrets, "token_hex", lambda _: "the same process")
    join_again = partial(ControlChannel.join, heard.address, TOKEN, 0, 1, timeout=10)
    link = join_again()
    assert link is not None
    with connection_to(heard.server.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets it
    link.close()
    assert heard.lost.get(timeout=10) == (0, True)
    with raises(LauncherEnvironmentError):
        join_again()


def test_a_rank_that_is_falling_silent_gets_its_orders_once_it_answers(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an order in flight the kernel would report 15 s later that its node does not answer: too late."""
    links = [join(heard, 0, port=1)]
    with connection_to(heard.server.port) as connection:
        first = connection.getsockname()
    links.append(join(heard, 1))
    words: queue.Queue[object] = queue.Queue()
    for link in links:
        link.listen(lambda: None, lambda said: words.put(said))
    asked: queue.Queue[object] = queue.Queue()

    def probes(connection: socket.socket) -> int:
        asked.put(connection.getpeername())
        return 0 if connection.getpeername() == first else 3

    monkeypatch.setattr(control_server, "unanswered_probes", probes)
    heard.server.broadcast(orders.Leave("node n2 lost"))
    assert words.get(timeout=10) == orders.Leave("node n2 lost")
    assert len({asked.get(timeout=10) for _ in links}) == 2
    heard.server.broadcast(orders.Leave("everyone"))
    assert words.get(timeout=10) == orders.Leave("everyone")
    assert words.empty()
    monkeypatch.undo()
    assert [words.get(timeout=10) for _ in range(2)] == [orders.Leave("node n2 lost"), orders.Leave("everyone")]


def test_a_report_that_is_too_long_is_dropped_alone(heard: Heard, capsys: pytest.CaptureFixture[str]) -> None:
    """Its texts are truncated, or it is dropped and named. The connection and later messages are not affected."""
    link = join(heard, 0, port=1)
    link.send(Left(host="n1", end=End.EXCEPTION, error="E" + "x" * 3_000_000 + "!"))
    link.send(Result(step=7, others={"predictions": [0.5] * 500_000}))
    link.send(Result(step=7, others={"value": object()}))
    link.send(Finishing(step=7))
    assert heard.events.get(timeout=10)[1] == "joined"
    _, event, values = heard.events.get(timeout=10)
    assert (event, values["error"][:2], values["error"][-2:]) == ("left", "Ex", "x!")
    assert "2,996,002 characters left out" in values["error"] and len(values["error"]) < 5000
    assert heard.events.get(timeout=10) == (0, "finishing", {"step": 7})
    said = capsys.readouterr().err.splitlines()
    assert re.search(r"dropped the event 'result', because it has 2,500,\d+ bytes, but the limit is 1,048,576", said[0])
    assert "dropped the event 'result', because it cannot be written as JSON (Object of type object" in said[1]
    assert heard.lost.empty()


@pytest.mark.parametrize("line", [b"x" * 3_000_000, b'{"event": "x", "v": "' + b"x" * (1 << 20) + b'"}', b"nonsense"])
def test_an_unreadable_line_of_a_rank_is_skipped_permanently(
    heard: Heard, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was dropped for it would join again and repeat it forever."""
    link = join(heard, 0, port=1)
    link.send(Finishing(step=1))
    with monkeypatch.context() as patch:
        patch.setattr(control_channel, "LONGEST_LINE", 1 << 30)
        patch.setattr(control_channel, "json", SimpleNamespace(dumps=lambda _: line.decode()))
        link.send(Finishing(step=0))
    link.send(Finishing(step=2))
    events = [heard.events.get(timeout=10) for _ in range(3)]
    assert [values.get("step") for _, _, values in events] == [None, 1, 2]
    assert heard.lost.empty()
    link.listen(lambda: None, lambda _: None)
    break_connection(heard.server.port)
    assert heard.events.get(timeout=10)[1] == "rejoined"
    link.send(Finishing(step=3))
    assert heard.events.get(timeout=10)[2] == {"step": 3}


def test_sending_to_a_supervisor_that_has_exited_does_not_stop_training() -> None:
    """The rank continues: losing the history's writer is no reason to lose the run."""
    heard = Heard()
    link = join(heard, 0, port=1)
    heard.server.close()
    for _ in range(100):
        link.send(Finishing(step=1))


def test_a_rank_that_waits_for_the_others_gives_up_when_told_to(heard: Heard) -> None:
    """A stop signal that comes before all ranks are there must not wait for the last one."""
    told = threading.Event()
    timer = threading.Timer(0.1, told.set)
    timer.start()
    assert ControlChannel.join(heard.address, TOKEN, 1, None, timeout=60, give_up=told.is_set) is None


def test_no_supervisor_is_an_error_that_names_the_address() -> None:
    """The nodes' network is the likely cause, and the message says so."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
    with raises(LauncherEnvironmentError) as refused:
        ControlChannel.join(f"0.0.0.0:{port}", TOKEN, 1, None, timeout=0.3)
    assert f"0.0.0.0:{port}" in str(refused.value)


def unread(connection: socket.socket) -> bytes:
    """All that the peer sends until it closes the connection, at most 10 s later."""
    connection.settimeout(10)
    try:
        return connection.makefile("rb").read()
    except ConnectionResetError:
        return b""


def test_unauthenticated_input_is_limited_in_size_and_depth(heard: Heard) -> None:
    """An endless line takes no memory; a thousand brackets would end the thread that reads from the ranks."""
    for words in (b"x" * 10_000, b"[" * 4000 + b"\n", b'{"token": "\\ud800"}\n', b'{"token": "\xc3\xa9"}\n'):
        with socket.create_connection(("127.0.0.1", heard.server.port)) as stranger:
            stranger.sendall(words)
            assert unread(stranger) == b""
    assert join(heard, 0, port=1).store_port == 1


def test_silent_unauthenticated_connections_are_dropped_in_time(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open connections would use up the supervisor's file descriptors; ranks stay as long as they live."""
    monkeypatch.setattr(control_server, "_HELLO_S", 0.2)
    rank = join(heard, 0, port=1)
    strangers = [socket.create_connection(("127.0.0.1", heard.server.port)) for _ in range(20)]
    strangers[0].sendall(b'{"tok')
    assert [unread(stranger) for stranger in strangers] == [b""] * 20
    rank.send(Connecting())
    assert [heard.events.get(timeout=10)[1] for _ in range(2)] == ["joined", "connecting"]
    assert heard.lost.empty()


def test_a_flood_of_unauthenticated_connections_keeps_no_rank_out(heard: Heard) -> None:
    """The oldest ones make room; the number of descriptors in use is bounded."""
    rank = join(heard, 0, port=1)
    flood = [socket.create_connection(("127.0.0.1", heard.server.port)) for _ in range(600)]
    late = join(heard, 1)
    assert late.store_port == 1
    assert unread(flood[0]) == b""
    assert accepted_at(heard.server.port) <= 256 + 2
    rank.send(Connecting())
    assert heard.lost.empty()
    for stranger in flood:
        stranger.close()


def test_a_flood_from_one_address_displaces_no_connection_from_another(heard: Heard) -> None:
    """A rank on a slow node may need a moment until it sends the token; meanwhile a port scanner runs elsewhere."""
    join(heard, 0, port=1)
    slow = socket.create_connection(("127.0.0.1", heard.server.port), source_address=("127.0.0.2", 0))
    flood = [socket.create_connection(("127.0.0.1", heard.server.port)) for _ in range(600)]
    assert unread(flood[0]) == b""
    control_channel.send_line(slow, {"token": TOKEN, "rank": 1, "port": None, "host": "n2", "pid": 7, "process": "a"})
    assert json.loads(slow.makefile("rb").readline())["port"] == 1
    assert [heard.events.get(timeout=10)[:2] for _ in range(2)] == [(0, "joined"), (1, "joined")]
    for connection in (slow, *flood):
        connection.close()


def test_a_rank_that_is_displaced_joins_again(heard: Heard) -> None:
    """Its connection is closed without an answer more than once, as by a flood from its own node."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        closed = 7

        def serve() -> None:
            for _ in range(closed):
                between.accept()[0].close()
            connection, _ = between.accept()
            connection.recv(4096)
            connection.sendall(b'{"host": "h", "port": 5, "open": true, "known": 0}\n')

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{between.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control_channel, "_PAUSE_S", 0.01)
            patch.setattr(control_channel, "_LONGEST_PAUSE_S", 0.02)
            channel = ControlChannel.join(address, TOKEN, 1, None, timeout=60)
    assert channel is not None and channel.store_port == 5


def test_too_few_file_descriptors_for_the_ranks_are_an_error_with_numbers() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from clusterddp.supervisor.control_server import ControlServer, Handlers
try:
    ControlServer("token", Handlers(lambda *_: None), host="127.0.0.1", ranks=200)
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.match(
        r"LauncherEnvironmentError the supervisor needs 280 open files for 200 ranks, but the limit here is 256", said
    )


def test_unauthenticated_connections_cannot_exhaust_the_file_descriptors() -> None:
    """With a hard limit of 256: the history and Slurm's commands still find some. Where something else has used up all
    of them, ranks join as soon as one is free."""
    code = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from clusterddp.supervisor.control_server import ControlServer, Handlers
hear = lambda rank, *_: print("rank", rank, flush=True)
server = ControlServer("secret of this attempt", Handlers(hear), host="127.0.0.1", ranks=4)
print(server.port, flush=True)
sys.stdin.readline()
held = [open("/dev/null") for _ in range(40)]
subprocess.run(["true"], check=True)
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    print("none left", flush=True)
sys.stdin.readline()
held.clear()
sys.stdin.readline()
server.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdin is not None and supervisor.stdout is not None
        address = ("127.0.0.1", int(supervisor.stdout.readline()))
        flood = [socket.create_connection(address) for _ in range(300)]
        assert ControlChannel.join(f"127.0.0.1:{address[1]}", TOKEN, 0, 1, timeout=10)
        assert supervisor.stdout.readline() == "rank 0\n"
        print(file=supervisor.stdin, flush=True)
        assert supervisor.stdout.readline() == "none left\n"
        flood += [socket.create_connection(address) for _ in range(300)]
        print(file=supervisor.stdin, flush=True)
        assert ControlChannel.join(f"127.0.0.1:{address[1]}", TOKEN, 1, None, timeout=10)
        assert supervisor.stdout.readline() == "rank 1\n"
        print(file=supervisor.stdin, flush=True)
        for stranger in flood:
            stranger.close()
    assert supervisor.returncode == 0


@pytest.mark.parametrize(
    ("rank", "port"),
    [
        (0, 2),
        (4, None),
        (-1, None),
        ("0", 2),
    ],
)
def test_an_impossible_rank_is_refused_with_a_reason(rank: Any, port: int | None) -> None:
    """Two processes under one number, or one too many: a launcher's mistake, which must not move rank 0's store."""
    heard = Heard(ranks=4)
    first = join(heard, 0, port=1)
    with raises(LauncherEnvironmentError):
        join(heard, rank, port)
    second = join(heard, 1)
    assert second.store_port == first.store_port == 1
    assert heard.lost.empty()
    heard.server.close()


def test_a_malformed_report_affects_no_other() -> None:
    """The thread that reads from the ranks survives what is no object, and an object without an event."""
    heard: queue.Queue[Any] = queue.Queue()
    hear = Handlers(lambda _, report: heard.put(fields_of(report)[1].get("phase")))
    server = ControlServer(TOKEN, hear, host="127.0.0.1")
    link = ControlChannel.join(f"127.0.0.1:{server.port}", TOKEN, 0, 1, timeout=10)
    assert link is not None
    for line in (b"[1]\n", b"{}\n", b"\xff\n", b"[" * 9999 + b"\n"):
        link._connection.sendall(line)
    link.send(Phase(phase="hello"))
    assert [heard.get(timeout=10) for _ in range(2)] == [None, "hello"]
    server.close()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400\n", b"[]\n", b"{}\n", b'{"host": 1, "port": "x"}\n', b"[" * 9999 + b"\n"]
)
def test_a_rank_that_reaches_another_service_quotes_its_answer(answer: bytes) -> None:
    """A port that another program has taken over."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            connection.recv(4096)
            connection.sendall(answer)
            connection.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with raises(LauncherEnvironmentError):
            ControlChannel.join(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, 1, None, timeout=10)


def test_a_request_whose_wake_up_is_read_with_the_one_before_is_carried_out_at_once(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the next message of any rank, so `clusterddp save` got its answer late, or never."""
    carry_out, carried_out = heard.server._carry_out_requests, threading.Event()
    late = [carried_out.set]

    def carry_out_and_ask_again() -> None:
        carry_out()
        if late:
            heard.server._request(late.pop())

    monkeypatch.setattr(heard.server, "_carry_out_requests", carry_out_and_ask_again)
    heard.server.broadcast(orders.Stop("preemption"))
    assert carried_out.wait(10)


def test_a_broadcast_reaches_every_rank(heard: Heard) -> None:
    """In a separate thread of the rank; the end of the connection is noticed after it."""
    links = [join(heard, 0, port=1), join(heard, 1)]
    words: queue.Queue[object] = queue.Queue()
    for link in links:
        link.listen(lambda: words.put("lost"), words.put)
    heard.server.broadcast(orders.Leave("rank 5 hangs"))
    assert [words.get(timeout=10), words.get(timeout=10)] == [orders.Leave("rank 5 hangs")] * 2
    heard.server.close()
    assert [words.get(timeout=10), words.get(timeout=10)] == ["lost"] * 2


@pytest.mark.parametrize("words", [b"nonsense", b"[]", b"3", b"[" * 9999, b"\xff", b""])
def test_a_rank_notices_its_supervisors_exit_after_any_message(words: bytes) -> None:
    """A line that was torn by a full buffer must not end the thread that would notice the loss."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            connection.recv(4096)
            answer = b'{"host": "h", "port": 1, "open": true, "known": 0}\n'
            connection.sendall(answer + words + b'\n{"order": "leave", "why": "x"}\n')
            other.close()
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        link = ControlChannel.join(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, 1, None, timeout=10)
        heard: queue.Queue[Any] = queue.Queue()
        assert link is not None
        link.listen(lambda: heard.put("lost"), heard.put)
        assert [heard.get(timeout=10) for _ in range(2)] == [orders.Leave("x"), "lost"]


@pytest.mark.timeout(20)
def test_a_local_rank_whose_supervisor_was_killed_before_it_joined_exits_at_once() -> None:
    """It was orphaned before it could ask the kernel to die with its parent, and would retry for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    with raises(LauncherEnvironmentError):
        ControlChannel.join(address, TOKEN, 1, None, timeout=600)
