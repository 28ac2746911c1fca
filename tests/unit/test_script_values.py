"""The values of ``ctx.run(script_state=...)``, and what a checkpoint of the moment before a step has."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import numpy
import pytest
import torch

from clusterddp.checkpoint.state_dict import pack, unpack
from clusterddp.errors import CheckpointError
from clusterddp.training.module_attributes import ModuleAttributes
from clusterddp.training.run_state import BeforeStep
from clusterddp.training.script_state import Values


@dataclasses.dataclass
class Progress:
    best: float = math.inf
    history: list[float] = dataclasses.field(default_factory=list)


def saved(values: Values) -> Any:
    """As a checkpoint has them."""
    return unpack(*pack({"values": values.state_dict()}))["values"]


def test_a_dict_is_restored_in_place_with_its_types() -> None:
    given: dict[str, Any] = {"best": -math.inf, "mean": numpy.float64(0.1), "pair": (1, None), "text": "x", "on": True}
    found = saved(Values(given))
    now: dict[str, Any] = {"best": 0.0, "mean": 0.0, "new": 7}
    Values(now).load_state_dict(found)
    assert now == {**given, "new": 7}
    assert [type(now[name]) for name in given] == [type(value) for value in given.values()]


def test_a_dataclass_is_restored_in_place() -> None:
    given = Progress()
    Values(given).load_state_dict(saved(Values(Progress(0.5, [1.0, 0.5]))))
    assert given == Progress(0.5, [1.0, 0.5])


def test_a_saved_copy_does_not_follow_later_changes() -> None:
    given = {"history": [{"loss": 1.0}]}
    values = Values(given)
    found = values.state_dict()
    given["history"][0]["loss"] = 2.0
    assert found == {"history": [{"loss": 1.0}]}


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"a": [0, torch.ones(())]},
            r"script_state\['a'\]\[1\] is a torch.Tensor, expected numbers, .*\. Pass its .item\(\)",
        ),
        ({"a": {"b": {1, 2}}}, r"script_state\['a'\]\['b'\] is a set, expected"),
        ({"a": Colour.RED}, r"script_state\['a'\] is a .*Colour, expected"),
        ({"a": {1: 2}}, r"script_state\['a'\] has the key 1, expected text"),
        (Progress(history=[object()]), r"script_state.history\[0\] is an object"),  # type: ignore[list-item]
        (3, r"run\(script_state=3\): expected a dict or an instance of a dataclass, got an int"),
        ([1], "expected a dict or an instance of a dataclass, got a list"),
        (1, "got an int"),
        (Progress, "expected a dict or an instance of a dataclass, got a type"),
        (dataclasses.make_dataclass("Frozen", ["a"], frozen=True)(1), "Frozen is frozen"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Values(given)


def test_a_value_that_has_become_wrong_is_named_when_it_is_saved() -> None:
    given: dict[str, Any] = {"best": 0.0}
    values = Values(given)
    given["best"] = torch.zeros(())
    with pytest.raises(TypeError, match=r"script_state\['best'\] is a torch.Tensor"):
        values.state_dict()


def test_values_without_a_place_are_an_error() -> None:
    with pytest.raises(
        CheckpointError, match=r"the script's values best, patience, but ctx.run\(\) received no script_state="
    ):
        Values(None).load_state_dict({"best": 0.0, "patience": 1})
    with pytest.raises(
        CheckpointError, match="the checkpoint's script_state has 'worst', but Progress has no such field"
    ):
        Values(Progress()).load_state_dict({"worst": 0.0})
    Values(None).load_state_dict({})


class Counter:
    """A part of the user's own."""

    def __init__(self) -> None:
        self.count, self.buffer = 0, torch.zeros(1 << 20)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, **({"buffer": self.buffer} if self.count > 9 else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_the_state_before_a_step_has_what_an_evaluation_changed_since() -> None:
    """Schedulers, learning rates, values and small parts; not what a part of many bytes has."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    own, small, large = {"history": [1]}, Counter(), Counter()
    large.count = 10
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "small": small,
        "large": large,
    }
    before = BeforeStep(parts, Values(own), ModuleAttributes(parts))
    before.begin_step()
    before.keep()
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    own["history"].append(2)
    small.count = large.count = 11
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert before.values == {"history": [1]}
    assert before.state_of("optimizer")["param_groups"][0]["lr"] == 0.1
    assert before.state_of("optimizer")["param_groups"][0]["params"] == [0, 1]
    assert before.state_of("scheduler")["last_epoch"] == 0
    assert (before.state_of("small")["count"], before.state_of("large")["count"]) == (0, 11)
    before.begin_step()
    assert before.state_of("small")["count"] == 11
    assert before.values == {"history": [1, 2]}
