"""Lines of a history as events, and events as lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterddp.history.beginnings import NotUsed, Resumed, Started
from clusterddp.history.codec import decode, encode, listed, sentence
from clusterddp.history.ends import Requeued
from clusterddp.history.event import EVENTS, Unread
from clusterddp.history.failures import RankFailed
from clusterddp.rundir.json_lines import parse
from clusterddp.rundir.schemas import EVENT
from tests.simulation import product
from tests.simulation.history import History, drawn

RECORDED = Path(__file__).resolve().parents[1] / "soaked" / "events.jsonl"
START = {"time": 7.5, "attempt": 1, "event": "started"}
STARTED = {**START, "nodes": "n1", "ranks": 2, "code": {"commit": None}, "changed": ["a.py"], "spares": ["n2"]}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda item: st.lists(item, max_size=3) | st.dictionaries(st.text(max_size=5), item, max_size=3),
    max_leaves=5,
)


@st.composite
def lines(draw: st.DrawFn) -> dict[str, Any]:
    """Lines with any values in an event's fields, and with others."""
    event = draw(st.sampled_from([*EVENTS, "from_the_future"]))
    names = [name.rstrip("?") for name in listed(EVENTS[event]).split()] if event in EVENTS else []
    chosen = draw(st.lists(st.sampled_from([*names, "rank", "others", "order", "new"]), unique=True))
    return {"time": 1.0, "attempt": 0, "event": event, **{name: draw(JSON) for name in chosen}}


def lines_of(history: History) -> list[str]:
    """The lines of a simulated run's history that are whole."""
    node = history.disk.nodes.get(str(history.run.events_file))
    return [line.decode() + "\n" for line in (node.data if node else b"").split(b"\n")[:-1] if parse(line, EVENT)[0]]


def written(line: str) -> str:
    """A line, read and written again."""
    return json.dumps(encode(decode(json.loads(line)))) + "\n"


def test_a_recorded_history_is_written_again_byte_for_byte() -> None:
    for line in RECORDED.read_text().splitlines(keepends=True):
        assert written(line) == line


def test_every_event_of_a_recorded_history_is_read() -> None:
    """Its fields have the types of its class, and it has no others."""
    for line in RECORDED.read_text().splitlines():
        event = decode(json.loads(line))
        assert not isinstance(event, Unread) and event.others == {}, event


def test_every_event_of_simulated_histories_is_read_and_written_again() -> None:
    found = set()
    with product.installed():
        for seed in range(20):
            history = History(drawn(seed))
            history.play()
            for line in lines_of(history):
                assert written(line) == line
                event = decode(json.loads(line))
                assert not isinstance(event, Unread) and event.others == {}, event
                found.add(event.name)
            history.take_apart()
    assert len(found) >= 15


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lines())
def test_any_line_is_written_again_as_it_was(line: dict[str, Any]) -> None:
    """Also one that is damaged, or of another version."""
    assert json.dumps(encode(decode(line))) == json.dumps(line)
    sentence(decode(line))


def test_a_line_has_the_types_of_its_class() -> None:
    event = decode({**STARTED, "rank": 3})
    assert event == Started(
        time=7.5, attempt=1, rank=3, nodes="n1", ranks=2, code={"commit": None}, changed=("a.py",), spares=("n2",)
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.time = 8.0  # type: ignore[misc]


def test_unknown_fields_and_events_are_kept() -> None:
    event = decode({**STARTED, "colour": "red"})
    assert isinstance(event, Started) and event.others == {"colour": "red"}
    event = decode({"time": 7.5, "attempt": 1, "event": "painted", "colour": "red"})
    assert isinstance(event, Unread) and (event.event, event.others) == ("painted", {"colour": "red"})
    assert event.sentence() is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", "2"),
        ("ranks", True),
        ("ranks", 2.0),
        ("ranks", None),
        ("ranks", 10**400),
        ("seen", 10**400),
        ("nodes", None),
        ("changed", "a.py"),
        ("changed", [1]),
        ("code", []),
        ("restarts", "1"),
    ],
)
def test_an_event_with_a_value_of_another_type_is_not_read_as_one(field: str, value: object) -> None:
    event = decode(line := {**STARTED, field: value})
    assert isinstance(event, Unread) and encode(event) == line
    assert sentence(decode(line)) == "attempt 1: started"


def test_a_missing_field_is_none_if_it_may_be_none() -> None:
    """Or has its default. Any other makes the event one that is not read."""
    end = {"time": 7.5, "attempt": 1, "event": "requeued", "reason": "preempted", "cause": "preempted"}
    event = decode(end)
    assert isinstance(event, Requeued) and event.step is None and event.file is None and encode(event) == end
    assert isinstance(decode({**end, "cause": None}), Unread) and isinstance(decode(START), Unread)


def test_a_new_event_has_no_fields_with_their_defaults() -> None:
    failed = RankFailed(time=7.5, attempt=1, rank=0, host="n1", error="killed", step=3)
    line = {"time": 7.5, "attempt": 1, "event": "rank_failed", "rank": 0, "host": "n1", "error": "killed", "step": 3}
    assert encode(failed) == line and list(encode(failed)) == list(line)
    assert encode(Resumed(time=7.5, attempt=1, step=3, parent={"step": 3, "attempt": 0}, inexact=["a"]))["inexact"]


def test_a_value_of_any_type_keeps_it() -> None:
    line = {"time": 7.5, "attempt": 1, "event": "not_used", "what": "a", "given": [1], "because": "b"}
    assert isinstance(decode(line), NotUsed) and (sentence(decode(line)) or "").startswith(
        "attempt 1: a: [1] is not used"
    )
