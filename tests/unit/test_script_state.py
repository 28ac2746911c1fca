"""What a script gives to ``ctx.run()``: parts, values, and state that each rank has for itself. No ranks."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from clusterddp.checkpoint.packing import pack, unpack
from clusterddp.checkpoint.state_dict import load_state, state_of
from clusterddp.data.external_loader import NoLoader
from clusterddp.distributed.wrapping import optimizers
from clusterddp.errors import CheckpointError
from clusterddp.history.codec import sentence
from clusterddp.training.module_attributes import ModuleAttributes
from clusterddp.training.script_state import PerRank, Values, by_name
from clusterddp.training.step_state import BeforeStep
from tests.wording import raises


def group(rank: int = 0, ranks: int = 1) -> Any:
    return SimpleNamespace(rank=rank, world_size=ranks, control_device=torch.device("cpu"))


class Numbers:
    """An environment that can be shared out among ranks."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:
        self.numbers = [number for state in states for number in state["numbers"]][rank::world_size]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand(3, generator=one).tolist()),
        (lambda: numpy.random.default_rng(1), lambda one: one.normal(size=3).tolist()),
        (lambda: numpy.random.Generator(numpy.random.MT19937(1)), lambda one: one.normal(size=3).tolist()),
        (lambda: numpy.random.RandomState(1), lambda one: one.normal(size=3).tolist()),
        (lambda: random.Random(1), lambda one: [one.gauss(0, 1) for _ in range(3)]),
    ],
    ids=["torch", "numpy", "MT19937", "RandomState", "random"],
)
def test_random_generators_continue_where_they_were(make: Any, draw: Any) -> None:
    """Of torch, numpy and Python, which give them no ``state_dict``."""
    one, other = make(), make()
    draw(one)
    saved = PerRank(one, group())
    saved.gather()
    wanted = draw(one)
    PerRank(other, group()).restore(saved.progress())
    assert draw(other) == wanted


def test_the_states_are_copies() -> None:
    """What the ranks do after the save does not change it."""
    numbers = Numbers(1, 2)
    own = PerRank({"env": numbers}, group())
    own.gather()
    numbers.numbers.append(3)
    assert own.progress() == {"per_rank": [{"env": {"numbers": [1, 2]}}]}


def test_too_large_states_are_refused_with_their_size_and_the_remedy() -> None:
    """On all ranks, before anything is sent."""
    own = PerRank({"buffer": torch.nn.Linear(1000, 1000)}, group())
    own.most_bytes = 1_000_000
    with raises(CheckpointError):
        own.gather()


def test_a_state_beyond_half_of_the_limit_is_told_once_with_its_size() -> None:
    """Before it is refused."""
    numbers = Numbers(*range(1000))
    own = PerRank({"env": numbers}, group())
    own.most_bytes = 1_000_000
    own.gather()
    assert own.near_limit(7) is None
    numbers.numbers += [1_000_000] * 60_000
    own.gather()
    near = own.near_limit(7)
    assert near is not None and near.names == ["env"] and 500_000 < near.bytes < 1_000_000
    assert own.near_limit(7) is None
    said = sentence(replace(near, bytes=612_000_000, limit=2**30))
    assert said and "state of all ranks (env) takes 612 MB, more than half of the limit of 1,074 MB" in said


def test_a_change_since_the_place_for_an_evaluation_is_noticed() -> None:
    """Without such a place in the step, it is not known."""
    numbers = Numbers(1, 2)
    own = PerRank({"env": numbers}, group())
    assert own.changed() and not PerRank(None, group()).changed()
    own.keep()
    assert not own.changed()
    numbers.numbers.append(3)
    assert own.changed()
    own.keep()
    own.begin_step()
    assert own.changed()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_part_that_can_be_split_continues_on_another_number_of_ranks(ranks: int) -> None:
    """Fewer and more."""
    progress = {"per_rank": [{"env": {"numbers": [1, 2, 3]}}, {"env": {"numbers": [4, 5, 6]}}]}
    found = []
    for rank in range(ranks):
        env = Numbers()
        PerRank({"env": env}, group(rank, ranks)).restore(progress)
        found += env.numbers
    assert sorted(found) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("progress", "given"),
    [
        ({}, {"env": Numbers()}),
        ({"per_rank": [{"env": {}}]}, None),
        ({"per_rank": [{"env": {}}]}, {"env": Numbers()}),
        ({"per_rank": [{"gen": {}}, {"gen": {}}]}, {"gen": torch.Generator()}),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(progress: Any, given: Any) -> None:
    """With the names on both sides."""
    with raises(CheckpointError):
        PerRank(given, group()).restore(progress)


# --- The parts of a run: their names, what is refused, and a run without a loader


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(1, 1)


def test_members_of_lists_tuples_and_dicts_are_parts_by_their_place() -> None:
    """Nested ones too; modules that hold modules are one part, and None is left out."""
    a, b, c, whole = layer(), layer(), layer(), torch.nn.ModuleDict({"x": layer()})
    named = by_name({"nets": [a, {"b": b}], "pair": (c, None), "whole": whole, "scheduler": None})
    assert named == {"nets.0": a, "nets.1.b": b, "pair.0": c, "whole": whole}


@pytest.mark.parametrize(
    "given",
    [
        {"env": 3},
        {"nets": [layer(), "b"]},
        {"nets": {1: layer()}},
        {"nets": {"a.b": layer()}},
    ],
)
def test_a_part_without_a_state_or_a_name_is_refused(given: dict[str, Any]) -> None:
    """The message names it."""
    with raises(TypeError):
        by_name(given)


def test_without_a_loader_steps_are_numbers_and_epochs_are_not_available() -> None:
    """Each error says what to use instead."""
    none = NoLoader()
    assert list(itertools.islice(none.batches(7), 3)) == [7, 8, 9]
    for what in (lambda: none.epoch(0), lambda: none.ends_epoch(0), lambda: none.steps_in(2)):
        with raises(TypeError):
            what()


@pytest.mark.parametrize("progress", [{"dataset_length": 5}, {"loaders": []}])
def test_a_run_that_started_with_a_loader_needs_it(progress: dict[str, Any]) -> None:
    """The order of its samples would be lost silently."""
    with raises(CheckpointError):
        NoLoader().restore(progress)


def test_optimizers_of_other_libraries_are_recognized() -> None:
    """They step and zero gradients; schedulers only step, and modules may have methods of any name."""

    class Foreign:
        def step(self) -> None: ...
        def zero_grad(self) -> None: ...

    optimizer = torch.optim.SGD(layer().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module = layer()
    module.step = Foreign().step  # type: ignore[assignment]
    parts = {"a": Foreign(), "b": optimizer, "c": scheduler, "d": module, "optimizer": scheduler}
    assert list(optimizers(parts)) == ["a", "b", "optimizer"]


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    """torch takes it, with the hyperparameters of the other kind. One option more or less is a version's."""
    parameters = [torch.nn.Parameter(torch.ones(2))]
    adam, sgd = torch.optim.Adam(parameters, lr=0.5), torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(adam, 1.0, total_steps=9)
    with raises(ValueError):
        load_state(sgd, adam.state_dict())
    state = adam.state_dict()
    del state["param_groups"][0]["amsgrad"]
    fresh = torch.optim.Adam(parameters)
    load_state(fresh, state)
    assert fresh.param_groups[0]["lr"] == adam.param_groups[0]["lr"]


def test_the_state_of_a_scaler_that_is_off_is_empty() -> None:
    """As of a script that has an option for float16: the scaler has no tensors then, and torch 2.13's no such names."""
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    assert state_of(scaler) == {}
    load_state(scaler, {})


# --- The values of ``ctx.run(script_state=...)``, and what a checkpoint of the moment before a step has


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
    "given",
    [
        {"a": [0, torch.ones(())]},
        {"a": {"b": {1, 2}}},
        {"a": Colour.RED},
        {"a": {1: 2}},
        Progress(history=[object()]),  # type: ignore[list-item]
        3,
        [1],
        1,
        Progress,
        dataclasses.make_dataclass("Frozen", ["a"], frozen=True)(1),
    ],
)
def test_a_value_that_cannot_be_saved_is_named(given: Any) -> None:
    with raises(TypeError):
        Values(given)


def test_a_value_that_has_become_wrong_is_named_when_it_is_saved() -> None:
    given: dict[str, Any] = {"best": 0.0}
    values = Values(given)
    given["best"] = torch.zeros(())
    with raises(TypeError):
        values.state_dict()


def test_values_without_a_place_are_an_error() -> None:
    with raises(CheckpointError):
        Values(None).load_state_dict({"best": 0.0, "patience": 1})
    with raises(CheckpointError):
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
