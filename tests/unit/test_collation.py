"""The faster way of making a batch makes the same as torch's."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from clusterddp.data.batches import collation
from clusterddp.data.batches.collation import collated, is_torchs
from clusterddp.data.batches.rows import Rows

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


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def told(value: Any) -> Any:
    """Types, values and dtypes of all parts."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.shape, value.stride(), bytes_of(value)
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


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3, 2), (5, 1, 4, 4), (5, 3, 1, 1), (5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32], ids=str)
def test_rows_of_tensors_are_what_torch_makes_of_the_samples(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    numbers = torch.arange(5 * 48)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    dataset = TensorDataset(numbers, torch.arange(5))
    rows = Rows.of(dataset)
    assert rows is not None
    for indices in ((3,), (4, 0, 0, 2)):
        found, expected = rows.batch(indices), default_collate([dataset[index] for index in indices])
        assert told(found) == told(expected)
        assert [one.stride() for one in found or ()] == [one.stride() for one in expected]


def test_rows_laid_out_in_another_way_are_left_to_torch() -> None:
    images = torch.zeros(4, 3, 8, 8).to(memory_format=torch.channels_last)
    for tensor in (images, torch.zeros(4, requires_grad=True), torch.zeros(4, dtype=torch.complex64)):
        assert Rows.of(TensorDataset(torch.zeros(4), tensor)) is None
    assert Rows.of([torch.zeros(4)]) is None
    assert Rows.of(type("Own", (TensorDataset,), {})(torch.zeros(4))) is None


def test_a_dataset_that_gets_other_tensors_is_read_by_its_samples() -> None:
    dataset = TensorDataset(torch.zeros(4))
    rows = Rows.of(dataset)
    assert rows is not None
    assert rows.batch([1]) is not None
    dataset.tensors = (torch.ones(4),)
    assert rows.batch([1]) is None


LARGE = collation._LARGE // 4  # floats
READ: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.full((LARGE,), 1.0 * i),
    "tuple": lambda i: (torch.full((2, LARGE // 2), 1.0 * i), i, torch.tensor([i])),
    "dict": lambda i: {"image": torch.full((LARGE,), 1.0 * i), "name": str(i), "label": i},
    "another layout at last": lambda i: torch.full((2, LARGE), i) if i < 4 else torch.full((2, 2 * LARGE), i)[:, ::2],
    "another type at last": lambda i: (torch.full((LARGE,), 1.0 * i, dtype=torch.float64 if i == 4 else None), i),
    "no tensor at last": lambda i: (torch.full((LARGE,), 1), i) if i < 4 else [torch.full((LARGE,), 1), i],
    "other keys": lambda i: {"a": torch.full((LARGE,), 1), **({"b": i} if i == 2 else {})},
}
LAID_OUT: dict[str, Callable[[int], Any]] = {
    "transposed": lambda i: (torch.arange(LARGE).view(2, -1).t() + i, i),
    "images in channels_last": lambda i: torch.full((2, 3, 4, LARGE), i).to(memory_format=torch.channels_last),
}
NO_BATCH: dict[str, Callable[[int], Any]] = {
    "another shape": lambda i: (torch.zeros(LARGE + (i == 3)), i),
    "another length": lambda i: (torch.zeros(LARGE), i) if i < 3 else (torch.zeros(LARGE),),
    "no key": lambda i: {"a": torch.zeros(LARGE), **({"b": i} if i < 3 else {})},
}


def joined(make: Callable[[int], Any]) -> Any:
    return collated(collation.joined(map(make, range(5)), 5))


@pytest.mark.parametrize("kind", READ)
def test_a_batch_that_is_made_while_samples_are_read_is_that_of_torch(kind: str) -> None:
    samples = [READ[kind](i) for i in range(5)]
    assert collation.has_large(samples[0])
    assert told(joined(READ[kind])) == told(default_collate(samples)) == told(collated(samples))


@pytest.mark.parametrize("kind", LAID_OUT)
def test_samples_that_are_not_contiguous_are_laid_out_as_by_torch(kind: str) -> None:
    samples = [LAID_OUT[kind](i) for i in range(3)]
    assert not collation.has_large(samples[0]) and told(collated(samples)) == told(default_collate(samples))


@pytest.mark.parametrize("kind", NO_BATCH)
def test_samples_that_differ_while_they_are_read_are_the_same_error(kind: str) -> None:
    errors = []
    for make in (lambda of: default_collate([*map(of, range(5))]), joined):
        with pytest.raises((RuntimeError, KeyError)) as caught:
            make(NO_BATCH[kind])
        errors.append(repr(caught.value))
    assert errors[0] == errors[1]


def test_only_alike_samples_with_a_large_tensor_are_made_into_a_batch_while_they_are_read() -> None:
    assert not collation.has_large((torch.zeros(4), 1)) and not collation.has_large(1)
    assert not collation.has_large((torch.zeros(LARGE, requires_grad=True),))
    kinds = [type(collation.joined(map(make, range(5)), 5)) for make in (READ["tuple"], READ["other keys"])]
    assert kinds == [collation.Joined, list]
