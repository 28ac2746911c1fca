"""Samples are the same as if each were seeded, whether they draw random numbers always, sometimes or never."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, default_collate

from clusterddp.data import randomness, seeding
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Shuffled
from clusterddp.data.seeding import Batch, SeededSamples
from tests.wording import raises

DRAWS: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "torch": lambda: float(torch.rand(())),
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.normal()),
}


class Drawing(Dataset[Any]):
    """Sample i draws by ``kinds[i]``. ``reads``: the indices that were read."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.reads.append(index)
        return index, DRAWS[self.kinds[index]]()


class Batched(Drawing):
    """With torch's way to read a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Failing(Drawing):
    """Sample 2 cannot be read."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        found = super().__getitem__(index)
        if index == 2:
            raise LookupError("sample 2")
        return found


def drawing_collate(samples: list[Any]) -> Any:
    return default_collate(samples), random.random(), float(torch.rand(())), float(np.random.random())


def columns(samples: list[tuple[int, int]]) -> Batch:
    return tuple(zip(*samples, strict=True))


def seeded(dataset: Drawing, seed: int, samples: list[tuple[int, int]]) -> list[Any]:
    """The reference: each sample after seeding all generators."""
    found = []
    for sample in samples:
        randomness.seed_all(randomness.hash32("sample", seed, *sample))
        found.append(dataset[sample[1]])
    return found


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    batched=st.booleans(),
)
def test_samples_and_the_state_for_collate_fn_are_those_of_seeding_each(
    kinds: list[str], sizes: list[int], batched: bool
) -> None:
    samples = iter([(epoch, index) for epoch in range(30) for index in range(len(kinds))])
    read = SeededSamples((Batched if batched else Drawing)(kinds), 7, drawing_collate)
    for size in sizes:
        batch = list(itertools.islice(samples, size))
        with randomness.preserved():
            found, after = read.__getitems__(columns(batch)), randomness.states()
            assert found == seeded(Drawing(kinds), 7, batch)
            assert randomness.equal(after, randomness.states())


def test_the_generators_are_seeded_for_a_collate_fn_of_the_script_only() -> None:
    """torch's draws nothing, and seeding takes longer than a cheap batch."""
    seeds: list[int] = []
    given: list[dict[str, Any]] = [{}, {"collate_fn": lambda _: torch.initial_seed()}]
    for options in given:
        loader = Loader(Drawing(["nothing"] * 4), 2, order=Shuffled(), seed=1, rank=0, world_size=1, **options)
        with randomness.preserved():
            next(loader.batches(0, seeds_steps=True))
            seeds.append(torch.initial_seed())
    assert seeds[0] != seeds[1]
    assert seeds[0] == seeding.FIXED


def test_samples_that_draw_nothing_are_read_once_and_of_others_only_the_first_twice() -> None:
    for kind, reads in (("nothing", [0, 1, 2, 3, 4]), ("random", [0, 0, 1, 2, 3, 4])):
        dataset = Drawing([kind] * 5)
        read = SeededSamples(dataset, 7)
        with randomness.preserved():
            read.__getitems__(columns([(0, index) for index in range(3)]))
            read.__getitems__(columns([(0, index) for index in (3, 4)]))
        assert dataset.reads == reads


def test_a_dataset_that_reads_whole_batches_is_asked_for_them() -> None:
    asked: list[list[int]] = []

    class Noted(Batched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return super().__getitems__(indices)

    with randomness.preserved():
        SeededSamples(Noted(["nothing"] * 5), 7).__getitems__(columns([(0, index) for index in range(5)]))
    assert asked == [[0], [1, 2, 3, 4]]


def test_an_error_of_a_sample_is_raised_whether_it_draws_or_not() -> None:
    for kind in ("nothing", "torch"):
        read = SeededSamples(Failing([kind] * 4), 7)
        with randomness.preserved(), raises(LookupError):
            read.__getitems__(columns([(0, index) for index in range(4)]))


def test_a_dataset_that_seeds_the_generators_itself_is_noticed() -> None:
    class Seeding(Drawing):
        def __getitem__(self, index: int) -> tuple[int, float]:
            torch.manual_seed(5)
            return super().__getitem__(index)

    dataset = Seeding(["nothing"] * 3)
    with randomness.preserved():
        SeededSamples(dataset, 7).__getitems__(columns([(0, index) for index in range(3)]))
    assert dataset.reads == [0, 0, 1, 2]


def take(workers: int, kinds: list[str], steps: range, progress: dict[str, Any] | None = None) -> list[Any]:
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": drawing_collate, "persistent_workers": workers > 1}
    options |= {"prefetch_factor": 3} if workers > 1 else {}
    loader = Loader(Drawing(kinds), 3, order=Shuffled(), seed=1, rank=0, world_size=1, **options)
    if progress is not None:
        loader.restore(progress)
    batches = loader.batches(steps.start)
    try:
        return [repr(batch) for batch in itertools.islice(batches, len(steps))]
    finally:
        batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["nothing", "some", "numpy"])
def test_workers_prefetch_and_persistence_change_nothing(kind: str) -> None:
    """With a collate_fn that draws, too, and from any step."""
    kinds = ["nothing", "nothing", "torch", "nothing", "random"] if kind == "some" else [kind] * 5
    whole = take(0, kinds, range(7))
    assert take(1, kinds, range(7)) == whole
    assert take(2, kinds, range(3, 7)) == whole[3:]


def test_only_generators_that_samples_draw_from_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three are only watched, in each batch; the third is seeded for each sample."""
    seeded: list[str] = []
    for generator, name in zip(seeding.ALL, ("torch", "random", "numpy"), strict=True):
        seed = generator.seed
        monkeypatch.setattr(generator, "seed", lambda number, seed=seed, name=name: (seed(number), seeded.append(name)))
    read = SeededSamples(Drawing(["nothing", "torch", "torch"]), 7)
    with randomness.preserved():
        read.__getitems__(columns([(0, 0)]))
        assert not seeded
        for epoch in (1, 2):
            read.__getitems__(columns([(epoch, index) for index in range(3)]))
    assert seeded == ["torch"] * 6


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Generators of two GPUs that the process uses, with offsets as Philox has."""
    found: list[Any] = [OnGpu(), OnGpu()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", found)
    return found


class OnGpu:
    def __init__(self) -> None:
        self.number = self.offset = 0

    def manual_seed(self, seed: int) -> None:
        self.number, self.offset = seed, 0

    def get_offset(self) -> int:
        return self.offset

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.number, self.offset])

    def set_state(self, state: torch.Tensor) -> None:
        self.number, self.offset = state.tolist()

    def draw(self) -> tuple[int, int]:
        self.offset += 4
        return self.number, self.offset


def test_every_gpu_is_seeded_and_its_state_kept(gpus: list[Any]) -> None:
    with randomness.preserved() as before:
        randomness.seed_all(5)
        assert [gpu.draw() for gpu in gpus] == [(5, 4)] * 2
        assert not randomness.equal(before, randomness.states())
        randomness.set_states(before)
        assert randomness.equal(before, randomness.states())
        gpus[1].draw()
        assert not randomness.equal(before, randomness.states())
    assert [gpu.offset for gpu in gpus] == [0, 0]


def test_samples_that_draw_on_a_gpu_have_their_own_numbers(gpus: list[Any]) -> None:
    """Also in a ``collate_fn``. In whatever order they are read."""

    class OnDevice(Drawing):
        def __getitem__(self, index: int) -> tuple[int, Any]:
            return index, gpus[1].draw() if self.kinds[index] == "gpu" else None

    def read(*batches: list[int]) -> list[Any]:
        samples = SeededSamples(OnDevice(["nothing", "gpu", "gpu"]), 7, lambda found: (found, gpus[0].draw()))
        with randomness.preserved():
            return [samples._collate(samples.__getitems__(columns([(0, i) for i in batch]))) for batch in batches]  # type: ignore[misc]

    (together, drawn), (alone, drawn_alone) = read([0, 1, 2], [2])
    assert together[0] == (0, None) and together[2] == alone[0] and drawn == drawn_alone
    assert together[1][1] != together[2][1]
    assert read([2], [1]) == [([together[2]], drawn), ([together[1]], read([1])[0][1])]


def test_a_worker_leaves_the_gpus_alone(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "get_worker_info", lambda: "a worker")
    samples = SeededSamples(Drawing(["nothing", "random"]), 7, drawing_collate)
    with randomness.preserved():
        gpus[0].draw()
        samples.__getitems__(columns([(0, 0), (0, 1)]))
        assert gpus[0].offset == 4


def test_each_step_of_a_run_has_the_seed_that_it_always_had() -> None:
    """Those of runs that began with older versions. Wherever an attempt begins, the seeds are the same."""
    seeds = list(itertools.islice(randomness.step_seeds(1234, 1, 0), 200))
    assert [seeds[step] for step in (0, 1, 63, 64, 130)] == [3302027049, 2903749142, 3642834570, 924190632, 3777112528]
    assert [next(randomness.step_seeds(1234, 1, step)) for step in range(200)] == seeds
