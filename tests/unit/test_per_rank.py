"""State that each rank has for itself, without ranks: generators, sizes, other numbers of ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from clusterddp.checkpoint import transfer
from clusterddp.errors import CheckpointError
from clusterddp.events import sentence
from clusterddp.training.script_state import PerRank


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


def test_too_large_states_are_refused_with_their_size_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, before anything is sent."""
    monkeypatch.setattr(transfer, "MOST_BYTES", 1_000_000)
    own = PerRank({"buffer": torch.nn.Linear(1000, 1000)}, group())
    with pytest.raises(
        CheckpointError,
        match=r"the per-rank state of all 1 ranks \(buffer\) takes 4 MB, but a checkpoint holds at most 1 MB of it. "
        r"Leave out of state_dict\(\) .* such as a replay buffer's newest entries",
    ):
        own.gather()


def test_a_state_beyond_half_of_the_limit_is_told_once_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is refused."""
    monkeypatch.setattr(transfer, "MOST_BYTES", 1_000_000)
    numbers = Numbers(*range(1000))
    own = PerRank({"env": numbers}, group())
    own.gather()
    assert own.near_limit() is None
    numbers.numbers += [1_000_000] * 60_000
    own.gather()
    near = own.near_limit()
    assert near is not None and near["names"] == ["env"] and 500_000 < near["bytes"] < 1_000_000
    assert own.near_limit() is None
    said = sentence({"event": "per_rank_grows", "attempt": 0, "step": 7, **near, "bytes": 612_000_000, "limit": 2**30})
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
    ("progress", "given", "message"),
    [
        ({}, {"env": Numbers()}, r"ctx.run\(per_rank=...\) received env, but the checkpoint has nothing"),
        (
            {"per_rank": [{"env": {}}]},
            None,
            "received nothing, but the checkpoint has env. Pass the parts",
        ),
        ({"per_rank": [{"env": {}}]}, {"env": Numbers()}, "the checkpoint does not fit per_rank env: KeyError"),
        (
            {"per_rank": [{"gen": {}}, {"gen": {}}]},
            {"gen": torch.Generator()},
            r"the state of gen for 2 ranks, but the world size is now 1. Use 2 ranks, or give gen a method",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(progress: Any, given: Any, message: str) -> None:
    """With the names on both sides."""
    with pytest.raises(CheckpointError, match=message):
        PerRank(given, group()).restore(progress)
