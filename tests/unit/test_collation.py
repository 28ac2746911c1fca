"""The faster way of making a batch makes the same as torch's."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from clusterddp.data.collation import collated, is_torchs

Pair = namedtuple("Pair", "one two")
MAKE: dict[str, Callable[[int], Any]] = {
    "tensors": lambda i: (torch.full((2, 3), i), torch.tensor(i)),
    "tensor and number": lambda i: (torch.tensor([1.0 * i]), i),
    "text, float, array": lambda i: (str(i), 0.5 * i, np.full(2, i)),
    "nested": lambda i: ((torch.tensor(i), (i, i)), {"a": torch.tensor([i])}),
    "list": lambda i: [torch.tensor(i), i],
    "dict": lambda i: OrderedDict(a=torch.tensor(i), b=i),
    "named": lambda i: Pair(torch.tensor(i), i),
    "tensor": lambda i: torch.tensor([i]),
    "number": lambda i: i,
    "empty": lambda _: (),
    "a parameter": lambda i: (torch.nn.Parameter(torch.tensor([1.0 * i])),),
}


def told(value: Any) -> Any:
    """Types, values and dtypes of all parts."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return type(value), {key: told(one) for key, one in value.items()}
    return (type(value), [told(one) for one in value]) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kind", MAKE)
def test_a_batch_is_that_of_torch(kind: str) -> None:
    for count in (1, 4):
        samples = [MAKE[kind](i) for i in range(count)]
        assert told(collated(samples)) == told(default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.zeros(2), 1), (torch.zeros(3), 1)],
        [(1, 2), (1, 2, 3)],
        [(1, 2), 1],
        [(object(),)],
    ],
    ids=["shapes", "lengths", "no tuple", "an object"],
)
def test_what_makes_no_batch_is_the_same_error(samples: list[Any]) -> None:
    errors = []
    for make in (default_collate, collated):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            make(samples)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_functions_that_a_script_has_registered_with_torch_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_torchs(None) and is_torchs(default_collate) and not is_torchs(list)
    monkeypatch.setitem(default_collate_fn_map, object, lambda batch, **_: batch)
    assert not is_torchs(None)
