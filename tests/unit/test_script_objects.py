"""Digests of a script's values and states, without processes."""

from __future__ import annotations

import argparse
from typing import Any

import numpy
import pytest
import torch

from clusterddp.training import script_objects
from clusterddp.training.script_objects import _summed, of_part, of_value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        ([torch.tensor([1.0, 2.0]), "a"], [torch.tensor([1.0, 2.0]), "b"]),
        (numpy.array([1, 2]), numpy.array([1, 2], dtype=numpy.int32)),
        ({"a": [1, 2]}, {"a": [12]}),
        (["ab", "c"], ["a", "bc"]),
        ("x" * 99, "x" * 98 + "y"),
        (argparse.Namespace(a=[1]), argparse.Namespace(a=[2])),
    ],
)
def test_contents_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert of_value(one) != of_value(other)


def test_equal_contents_have_equal_digests() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    assert of_value(values) == of_value(values.t().contiguous().t())
    assert of_value({"b", "a"}) == of_value({"a", "b"})
    assert of_value(torch.tensor(0.1, dtype=torch.float64)) == of_value(0.1) == "0.1"
    assert of_value(argparse.Namespace(a=values)) == of_value(argparse.Namespace(a=values.clone()))


@pytest.mark.parametrize("size", [3, 8, 20])
def test_a_sum_in_place_of_a_hash_tells_tensors_apart_by_each_element(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for tensors of a GPU, in pieces of 8 elements."""
    monkeypatch.setattr(script_objects, "_SUMMED", 8)
    values = torch.arange(size) + 2**62
    sums = {_summed(values)} | {_summed(torch.where(torch.arange(size) == n, 0, values)) for n in range(size)}
    swapped = torch.cat((values[-1:], values[1:-1], values[:1]))
    assert len(sums | {_summed(swapped)}) == size + 2
    assert _summed(values.clone()) == _summed(values)


def test_states_have_a_digest_for_each_entry() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.5, momentum=0.9)
    found = of_part(optimizer)
    assert found["param_groups[0].lr"] == "0.5"
    assert list(of_part(torch.nn.Linear(2, 1)))[:2] == ["weight", "bias"]
