"""``history/`` and ``protocol.py`` list what the code really writes and reads: events, messages, variables."""

from __future__ import annotations

import ast
import json
import queue
import re
import socket
from pathlib import Path
from typing import Any, get_args

import pytest

from clusterddp import errors, protocol
from clusterddp.history.codec import listed
from clusterddp.history.event import EVENTS
from clusterddp.messages import orders
from clusterddp.messages.reports import Joined, Serving
from clusterddp.supervisor import control_server
from clusterddp.worker import control_channel
from tests.histories import fields

PACKAGE = Path(__file__).resolve().parents[2] / "clusterddp"
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_field_hides_what_every_line_has() -> None:
    for kind in EVENTS.values():
        assert not fields(listed(kind))[1] & {"time", "attempt", "event"}


def test_the_messages_of_the_control_channel_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that joins, one that is refused, an event and an order."""
    sent: list[dict[str, Any]] = []
    heard: list[object] = []

    def encoded(message: dict[str, Any]) -> bytes:
        sent.append(message)
        return (json.dumps(message) + "\n").encode()

    for module in (control_channel, control_server):
        monkeypatch.setattr(module, "encoded", encoded)
    server = control_server.ControlServer(
        "token",
        control_server.Handlers(lambda rank, report: heard.append(report)),
        "127.0.0.1",
        1,
    )
    server.tell(term_notice_s=20.0)
    channel = control_channel.ControlChannel.join(f"127.0.0.1:{server.port}", "token", 0, 20001, 5.0)
    assert channel is not None
    with pytest.raises(errors.LauncherEnvironmentError):
        control_channel.ControlChannel.join(f"127.0.0.1:{server.port}", "token", 7, None, 5.0)
    orders_heard: queue.Queue[orders.Order] = queue.Queue()
    channel.listen(lambda: None, orders_heard.put)
    every: list[orders.Order] = [
        orders.Stop("preemption"),
        orders.Explain(1.5, 600),
        orders.RecordFlight("a hang"),
        orders.WriteStacks(300.0),
        orders.SendStacks(1),
        orders.Save(2),
        orders.CountSteps(3),
        orders.Commit(3),
        orders.Commit(4, "rank 1 exited"),
        orders.Leave("node n2 was lost"),
    ]
    for order in every:
        server.broadcast(order)
    assert [orders_heard.get(timeout=10) for _ in every] == every
    channel.send(Serving())
    assert orders_heard.get(timeout=10) == orders.Connect()
    assert {type(order) for order in every} | {orders.Connect} == set(get_args(orders.Order))
    channel.close()
    server.close()
    hello, answer, _, refusal, *_ = sent
    assert hello.keys() == fields(protocol.HELLO)[0] and answer.keys() == fields(protocol.ANSWER)[1]
    assert refusal.keys() == {protocol.REFUSAL}
    assert heard == [Joined(socket.gethostname())]


def test_every_variable_is_named_once() -> None:
    """Elsewhere in the code only its constant is used."""
    variables = {str(value) for value in vars(protocol).values() if isinstance(value, protocol.Variable)}
    for path, tree in SOURCES.items():
        literals = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        named = {text for text in literals if re.fullmatch(r"CLUSTERDDP_\w+", text)}
        assert named == (variables if path.name == "protocol.py" else set()), path
        mentioned = {name for text in literals for name in re.findall(r"CLUSTERDDP_[A-Z0-9_]+", text)}
        assert mentioned <= variables, path
    assert set(protocol.FOR_RANKS) <= variables


def test_an_exit_code_is_written_as_its_name() -> None:
    """Other than 0, 1 and 2, and where nothing can be imported yet."""
    codes = {errors.INTERNAL_ERROR, errors.STOPPED, errors.INTERRUPTED, errors.BROKEN_PIPE}
    for path, tree in SOURCES.items():
        literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int}
        assert not literals & codes or path.name in ("errors.py", "main.py"), (path, literals & codes)
