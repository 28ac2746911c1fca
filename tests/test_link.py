"""The line between the supervisor and its ranks, over real sockets on loopback."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.link import Link, LinkServer

TOKEN = "secret of this attempt"


class Heard:
    """What a server was told, as queues that a test can wait on."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[int, str, dict[str, Any]]] = queue.Queue()
        self.lost: queue.Queue[int] = queue.Queue()
        self.server = LinkServer(TOKEN, lambda r, e, v: self.events.put((r, e, dict(v))), self.lost.put, "127.0.0.1")
        self.address = f"127.0.0.1:{self.server.port}"


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.server.close()


def join(heard: Heard, rank: int, port: int | None = None, token: str = TOKEN) -> Link:
    link = Link.join(heard.address, token, rank, port, timeout=10)
    assert link is not None
    return link


def test_every_rank_learns_rank_0s_store_whoever_comes_first(heard: Heard) -> None:
    """Rank 1 says hello before rank 0: it waits, and both get the port that rank 0 chose."""
    answers: queue.Queue[Link] = queue.Queue()
    early = threading.Thread(target=lambda: answers.put(join(heard, 1)))
    early.start()
    assert heard.events.get(timeout=10)[:2] == (1, "joined")
    links = [join(heard, 0, port=12345), answers.get(timeout=10), join(heard, 2)]
    assert [(link.store_host, link.store_port) for link in links] == [("127.0.0.1", 12345)] * 3


def test_what_the_supervisor_knows_by_then_is_in_the_answer(heard: Heard) -> None:
    """A rank that was answered before knows of no notice, and has no deadline."""
    early = join(heard, 0, port=1)
    heard.server.tell(term_notice_s=20)
    assert [early.term_notice_s, join(heard, 1).term_notice_s] == [None, 20]


def test_events_arrive_with_their_rank_and_values(heard: Heard) -> None:
    """What a rank sends is what the supervisor hears."""
    link = join(heard, 0, port=1)
    assert heard.events.get(timeout=10)[1] == "joined"
    link.send("checkpoint", step=7, bytes=100)
    assert heard.events.get(timeout=10) == (0, "checkpoint", {"step": 7, "bytes": 100})


def test_closing_hears_out_what_was_already_sent() -> None:
    """A rank's last words, sent just before it ends, are not dropped when the supervisor closes."""
    heard = Heard()
    link = join(heard, 0, port=1)
    for step in range(1000):
        link.send("checkpoint", step=step)
    link.close()
    heard.server.close()
    assert heard.events.qsize() == 1001


def test_a_wrong_token_is_refused_and_learns_nothing(heard: Heard) -> None:
    """A stranger is turned away with a sentence; the run's own ranks are not disturbed."""
    with pytest.raises(LauncherEnvironmentError, match="refused the token"):
        join(heard, 0, port=666, token="stranger")
    assert join(heard, 0, port=1).store_port == 1


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b"\xff\n", b'{"token": 1}\n'])
def test_nonsense_is_dropped_and_the_server_lives(heard: Heard, words: bytes) -> None:
    """A port scanner, or another protocol, costs nothing."""
    with socket.create_connection(("127.0.0.1", heard.server.port)) as stranger:
        stranger.sendall(words)
        assert stranger.makefile("rb").read() == b""
    assert join(heard, 0, port=1).store_port == 1


def test_a_rank_that_dies_is_noticed(heard: Heard) -> None:
    """The broken connection tells which rank is gone."""
    link = join(heard, 0, port=1)
    link.close()
    assert heard.lost.get(timeout=10) == 0


def test_sending_to_a_supervisor_that_is_gone_does_not_stop_training() -> None:
    """The rank goes on: losing the history's writer is no reason to lose the run."""
    heard = Heard()
    link = join(heard, 0, port=1)
    heard.server.close()
    for _ in range(100):
        link.send("checkpoint", step=1)


def test_a_rank_that_waits_for_the_others_gives_up_when_told_to(heard: Heard) -> None:
    """A stop signal that comes before all ranks are there must not wait for the last one."""
    told = threading.Event()
    timer = threading.Timer(0.1, told.set)
    timer.start()
    assert Link.join(heard.address, TOKEN, 1, None, timeout=60, give_up=told.is_set) is None


def test_no_supervisor_is_an_error_that_names_the_address() -> None:
    """The nodes' network is the likely cause, and the message says so."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LauncherEnvironmentError, match=f"127.0.0.1:{port}.*first node"):
        Link.join(f"127.0.0.1:{port}", TOKEN, 1, None, timeout=0.3)
