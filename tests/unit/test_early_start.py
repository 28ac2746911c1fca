"""Workers that start before the state is restored give the same batches, and see what the script changes later."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from clusterddp.data import early_start, randomness
from clusterddp.data.early_start import digest
from clusterddp.data.loader import Loader
from clusterddp.data.orders.plain import Shuffled
from clusterddp.data.training_loader import TrainingLoader, training_loader
from clusterddp.data.workers import close_workers
from tests.unit.test_loader import children
from tests.waiting import wait_until

LENGTH = 40


class Changing(Dataset[Any]):
    """What a script may change: an attribute, a list in it, a tensor, an array, another object."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scale, self.listed = folder, 1, [0]
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.transform = SimpleNamespace(shift=0)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        (self.folder / "read").touch()
        changed = self.scale + self.listed[0] + float(self.tensor[0]) + self.array[0] + self.transform.shift
        return index, changed, float(torch.rand(()))


def made(dataset: Any, workers: int = 2, **options: Any) -> TrainingLoader:
    size: dict[str, Any] = {"seed": 1, "rank": 0, "world_size": 1}
    loader = Loader(dataset, 3, order=Shuffled(), num_workers=workers, **size, **options)
    return training_loader(loader, SimpleNamespace(rank=0, store=dist.HashStore()), 1)  # type: ignore[arg-type, attr-defined]


def taken(loader: TrainingLoader, step: int, count: int = 5) -> list[Any]:
    batches = loader.batches(step, lambda: None)
    try:
        return [[column.tolist() for column in batch] for batch in itertools.islice(batches, count)]
    finally:
        batches.close()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    before = children()
    yield
    left = children() - before
    close_workers()
    assert not left


def test_the_first_batches_are_read_before_they_are_asked_for_and_are_the_same(tmp_path: Path) -> None:
    plain = made(Changing(tmp_path), 0)
    plain.skip(4, 2)
    progress, expected = plain.progress(20), taken(plain, 20)
    (tmp_path / "read").unlink()
    loader = made(Changing(tmp_path))
    with randomness.preserved() as before:
        loader.start(progress, 20)
        assert randomness.equal(before, randomness.states())
    wait_until((tmp_path / "read").exists, "a sample to be read")
    loader.restore(progress)
    assert taken(loader, 20) == expected
    assert taken(loader, 22, 3) == expected[2:], "a second loop starts workers again"


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset: setattr(dataset, "scale", 2),
        lambda dataset: dataset.listed.append(dataset.listed.pop() + 1),
        lambda dataset: dataset.tensor.add_(1),
        lambda dataset: dataset.array.__setitem__(0, 1),
        lambda dataset: setattr(dataset.transform, "shift", 1),
    ],
    ids=["attribute", "list", "tensor", "array", "object"],
)
def test_a_dataset_that_the_script_changes_later_is_read_as_it_is_then(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    dataset = Changing(tmp_path)
    loader = made(dataset)
    loader.start(loader.progress(7), 7)
    change(dataset)
    assert {value for batch in taken(loader, 7) for value in batch[1]} == {2}


def test_a_checkpoint_before_the_announced_one_is_resumed_at_its_own_place(tmp_path: Path) -> None:
    """The newest may turn out to be damaged."""
    plain = made(Changing(tmp_path), 0)
    whole = taken(plain, 0, 20)
    before = plain.progress(6)
    plain.skip(8, 3)
    loader = made(Changing(tmp_path))
    loader.start(plain.progress(9), 9)
    loader.restore(before)
    assert taken(loader, 6) == whole[6:11]


def test_what_cannot_be_compared_is_not_read_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    for make in (lambda: threading.Lock(), lambda: torch.zeros(10**7), lambda: np.zeros(10**7)):
        dataset = Changing(tmp_path)
        dataset.more = make()  # type: ignore[attr-defined]
        loader = made(dataset)
        loader.start(loader.progress(7), 7)
        assert children() == before
        assert len(taken(loader, 7)) == 5
    monkeypatch.setattr(early_start, "_MOST_BYTES", 1000)
    assert digest(list(range(100))) and not digest(list(range(1000))) and not digest(np.zeros((2, 100)).T[1:])


def test_nothing_starts_without_workers(tmp_path: Path) -> None:
    before = children()
    loader = made(Changing(tmp_path), 0)
    loader.start({}, 7)
    assert children() == before
