"""Loaders that clusterddp did not make: their passes, states, look-ahead, and batches that are read again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from clusterddp.checkpoint import transfer
from clusterddp.data.training_loader import TrainingLoader, training_loader
from clusterddp.errors import CheckpointError
from tests.letters import Letters
from tests.packages import require
from tests.wording import raises, says


def group(rank: int = 0, ranks: int = 1) -> Any:
    store = SimpleNamespace(compare_set=lambda key, expected, desired: desired.encode())
    return SimpleNamespace(rank=rank, world_size=ranks, control_device=torch.device("cpu"), store=store)


class Plain:
    """Five batches per pass and no state; what it draws belongs to the batch."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.started.append(epoch)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(5).tolist()
        for number in order:
            yield number, random.random(), float(np.random.rand())


def made(loader: Any, progress: dict[str, Any] | None = None, **of_group: int) -> TrainingLoader:
    found = training_loader(loader, group(**of_group), 1)
    if progress is not None:
        found.restore(progress)
    return found


def checkpoint(of: TrainingLoader, step: int, ranks: int = 1) -> dict[str, Any]:
    of.gather()
    return {**of.progress(step), "world_size": ranks}


def nothing() -> None:
    pass


def take(loader: TrainingLoader, step: int, count: int) -> list[Any]:
    """As the loop does: each step is seeded, and draws."""
    batches = loader.batches(step, nothing)
    found = []
    for number in range(step, step + count):
        found.append(next(batches))
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(number)
        torch.rand(number)
    batches.close()  # type: ignore[attr-defined]
    return found


# --- without a state


@pytest.mark.parametrize("stop", [0, 3, 5, 7, 12])
def test_batches_of_a_loader_without_a_state_are_read_again_and_are_the_same(stop: int) -> None:
    """Whatever the script draws meanwhile."""
    whole = take(made(Plain()), 0, 17)
    assert {batch[0] for batch in whole[:5]} == set(range(5)) and whole[:5] != whole[5:10]
    stopped = made(Plain())
    assert take(stopped, 0, stop) == whole[:stop]
    torch.rand(7)
    assert take(made(Plain(), checkpoint(stopped, stop)), stop, 17 - stop) == whole[stop:]


def test_each_sample_is_augmented_with_random_numbers_of_its_own() -> None:
    """torch's loader, which draws them in this process, over two passes."""

    class Augmented(Dataset[tuple[float, ...]]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, _: int) -> tuple[float, ...]:
            return float(torch.rand(())), random.random(), float(np.random.rand())

    batches = take(made(DataLoader(Augmented(), 2, collate_fn=list)), 0, 6)
    for drawn in zip(*itertools.chain(*batches), strict=True):
        assert len(set(drawn)) == 12


def test_it_says_how_long_reading_again_took_and_what_to_use_instead(capfd: pytest.CaptureFixture[str]) -> None:
    stopped = made(Plain())
    says(capfd.readouterr().err)
    take(stopped, 0, 7)
    assert capfd.readouterr().err == ""
    resumed = made(Plain(), checkpoint(stopped, 7))
    take(resumed, 7, 3)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and "Reading its first 7 batches again took 0.0 s. ctx.loader() resumes" in said[1]
    assert resumed.inexact == ["Plain has no state, so a resume is exact only if it repeats its batches"]
    take(made(Plain(), rank=1, ranks=2), 0, 1)
    assert capfd.readouterr().err == "", "only rank 0"


def test_a_second_loop_continues_where_the_first_ended_and_repeats_a_step_that_was_left(
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole = take(made(Plain()), 0, 12)
    loader = made(Plain())
    capfd.readouterr()
    assert take(loader, 0, 4) + take(loader, 4, 4) == whole[:8]
    assert capfd.readouterr().err == "", "nothing was read again"
    assert take(loader, 7, 5) == whole[7:]


def test_the_loader_its_sampler_and_its_dataset_are_told_the_number_of_the_pass() -> None:
    plain = Plain()
    take(made(plain), 0, 11)
    assert plain.started == [0, 1, 2]
    data = list(range(20))
    shares: Any = [DistributedSampler(data, num_replicas=2, rank=rank, seed=0) for rank in (0, 1)]  # type: ignore[arg-type]
    passes = [take(made(DataLoader(data, 5, sampler=share)), 0, 4) for share in shares]  # type: ignore[arg-type]
    for number in (0, 1):
        of_pass = [batch.tolist() for batches in passes for batch in batches[2 * number : 2 * number + 2]]
        assert sorted(itertools.chain(*of_pass)) == data
    assert passes[0][0].tolist() != passes[0][2].tolist()


def test_a_loader_with_persistent_workers_is_read_again_for_a_step_that_was_left() -> None:
    loader = made(DataLoader(list(range(10)), 1, num_workers=1, persistent_workers=True))  # type: ignore[arg-type]
    assert [int(batch) for batch in take(loader, 0, 4) + take(loader, 3, 9)] == [*range(4), *range(3, 10), 0, 1]


def test_a_shuffled_data_loader_is_read_again() -> None:
    data = torch.arange(12)

    def loader() -> Any:
        return DataLoader(data, 4, shuffle=True)  # type: ignore[arg-type]

    whole = [batch.tolist() for batch in take(made(loader()), 0, 6)]
    stopped = made(loader())
    take(stopped, 0, 4)
    assert [batch.tolist() for batch in take(made(loader(), checkpoint(stopped, 4)), 4, 2)] == whole[4:]


def test_the_run_can_stop_while_batches_are_read_again() -> None:
    stopped = made(Plain())
    take(stopped, 0, 7)
    calls: list[int] = []

    def stop_at_the_fourth() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    resumed = made(Plain(), checkpoint(stopped, 7))
    with pytest.raises(KeyboardInterrupt):
        next(resumed.batches(7, stop_at_the_fourth))
    whole = take(made(Plain()), 0, 9)
    assert take(made(Plain(), checkpoint(resumed, 7)), 7, 2) == whole[7:]


def test_a_stop_before_the_step_repeats_its_batch() -> None:
    """As in an evaluation: the batch is handed out, and the step not made."""
    whole = take(made(Plain()), 0, 9)
    loader = made(Plain())
    take(loader, 0, 5)
    assert take(made(Plain(), checkpoint(loader, 4)), 4, 2) == whole[4:6]


@pytest.mark.parametrize(
    ("started_with", "now", "ranks"),
    [
        (Plain, Plain, 2),
        (Letters, Plain, 1),
        (Plain, Letters, 1),
        (Letters, Letters, 2),
    ],
)
def test_a_resume_with_another_loader_is_refused(started_with: Any, now: Any, ranks: int) -> None:
    saved = checkpoint(made(started_with()), 0)
    with raises(CheckpointError):
        made(now(), saved, ranks=ranks)


def test_what_is_no_iterable_is_refused_and_what_ends_is_reported() -> None:
    with raises(TypeError):
        made(5)
    with raises(ValueError):
        take(made(iter([1, 2])), 0, 3)


# --- the end of a pass


@pytest.mark.parametrize("kind", [Plain, Letters])
def test_the_last_batch_of_a_pass_is_known_and_a_resume_repeats_nothing(kind: Any) -> None:
    """By the next batch, which is fetched only if the script asks; the state that is saved is the one before."""
    whole = take(made(kind()), 0, 12)
    loader = made(kind())
    batches = loader.batches(0, nothing)
    ends, found = [], []
    for step in range(12):
        found.append(next(batches))
        ends += [loader.ends_epoch(step), loader.ends_epoch(step)]
        saved = checkpoint(loader, step + 1)
        resumed = made(kind(), saved)
        if step < 11:
            assert next(resumed.batches(step + 1, nothing)) == whole[step + 1]
    assert found == whole
    assert [step for step in range(12) if ends[2 * step]] == [4, 9] and ends[::2] == ends[1::2]


def test_a_batch_that_was_fetched_early_belongs_to_the_next_loop() -> None:
    loader = made(Letters())
    batches = loader.batches(0, nothing)
    assert next(batches) == "a" and not loader.ends_epoch(0)
    batches.close()  # type: ignore[attr-defined]
    assert checkpoint(loader, 1)["loaders"] == [{"place": 1}]
    assert next(loader.batches(1, nothing)) == "b"


def test_the_end_of_a_pass_is_unknown_before_the_first_batch() -> None:
    with raises(RuntimeError):
        made(Letters()).ends_epoch(0)


# --- with a state, on other ranks


class Elastic(Letters):
    """One state for all ranks, as MosaicML's StreamingDataLoader has it."""

    def load_state_dicts(self, states: list[Any], rank: int, world_size: int) -> None:
        assert (len(states), rank, world_size) == (1, 1, 2)
        self.load_state_dict(states[0])


def test_a_loader_that_takes_over_the_states_of_other_ranks_continues_on_any_number() -> None:
    stopped = made(Elastic())
    take(stopped, 0, 3)
    resumed = made(Elastic(), checkpoint(stopped, 3), rank=1, ranks=2)
    assert take(resumed, 3, 2) == ["d", "e"]


def test_a_state_with_tensors_is_restored_as_a_copy() -> None:
    class Tensors(Letters):
        def state_dict(self) -> dict[str, Any]:
            return {"place": torch.tensor(self.place), "order": torch.arange(5)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state["order"].zero_()
            self.place = int(state["place"])

    stopped = made(Tensors())
    take(stopped, 0, 2)
    saved = checkpoint(stopped, 2)
    assert take(made(Tensors(), saved), 2, 2) == ["c", "d"]
    assert saved["loaders"][0]["order"].tolist() == [0, 1, 2, 3, 4]


def test_what_has_not_changed_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    send = transfer._gather_bytes
    monkeypatch.setattr(transfer, "_gather_bytes", lambda own, *rest: sizes.append(len(own)) or send(own, *rest))
    gathering = transfer.Gathering(torch.device("cpu"))
    large = torch.arange(1000)
    for place in (1, 2, 2):
        (found,) = gathering({"place": place, "order": large}) or []
        assert found["place"] == place and torch.equal(found["order"], large)
    described = sizes[0]
    assert sizes == [described, 8000, described, 0, 0, 0]
    (found,) = gathering({"place": 2, "order": large + 1}) or []
    assert found["order"][0] == 1 and sizes[6:] == [0, 8000]


# --- the libraries themselves


def stateful(data: Any, batch_size: int, **options: Any) -> Any:
    require("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size, **options)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_torchdatas_loader_has_the_samplers_order_of_the_pass_also_after_a_resume(stop: int, workers: int) -> None:
    """As DataLoader with that sampler."""
    data = list(range(16))

    def loader(kind: Any) -> TrainingLoader:
        share: Any = DistributedSampler(data, num_replicas=2, rank=1, seed=3)  # type: ignore[arg-type]
        return made(kind(data, 2, sampler=share, num_workers=workers, persistent_workers=workers > 0))

    whole = [batch.tolist() for batch in take(loader(DataLoader), 0, 12)]
    assert whole[:4] != whole[4:8] != whole[8:]
    stopped = loader(stateful)
    assert [batch.tolist() for batch in take(stopped, 0, stop)] == whole[:stop]
    resumed = loader(stateful)
    resumed.restore(checkpoint(stopped, stop))
    assert [batch.tolist() for batch in take(resumed, stop, 12 - stop)] == whole[stop:]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("ends", [[3, 9], [5, 7], [4, 10]])
def test_later_loops_with_torchdatas_loader_continue_as_a_resume_does(ends: list[int], options: Any) -> None:
    """At any place in a pass of five batches, and if the end of the pass was asked for."""

    def loader() -> TrainingLoader:
        return made(stateful(list(range(5)), 1, **options))

    loops, saved = loader(), checkpoint(made(stateful(list(range(5)), 1)), 0)
    found = []
    for begin, end in itertools.pairwise([0, *ends, 12]):
        found += [int(batch) for batch in take(loops, begin, end - begin)]
        if end == ends[0]:
            loops.ends_epoch(end - 1)
            saved = checkpoint(loops, end)
    assert found == [step % 5 for step in range(12)]
    resumed = loader()
    resumed.restore(saved)
    assert [int(batch) for batch in take(resumed, ends[0], 12 - ends[0])] == found[ends[0] :]


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        yield from range(worker.id if worker else 0, 30, worker.num_workers if worker else 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_torchdatas_loader_continues_from_its_state(kind: str, workers: int) -> None:
    def loader() -> Any:
        data = Numbers() if kind == "iterable" else list(range(30))
        shuffled = torch.Generator().manual_seed(1) if kind == "map" else None
        return stateful(data, 4, shuffle=kind == "map", generator=shuffled, num_workers=workers)

    count = 12 if kind == "iterable" else 8  # torchdata 0.11 does not save the generator for the next pass
    whole = [batch.tolist() for batch in take(made(loader()), 0, count)]
    stopped = made(loader())
    batches = stopped.batches(0, nothing)
    for step in range(3):
        assert next(batches).tolist() == whole[step]
        assert not stopped.ends_epoch(step)
    saved = checkpoint(stopped, 3)
    batches.close()  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in take(made(loader(), saved), 3, count - 3)] == whole[3:]


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"n": 10 * shard + line} for line in range(10))


@pytest.mark.parametrize("stop", [5, 8])
@pytest.mark.parametrize("repeats", [False, True])
def test_hugging_faces_streaming_dataset_continues_from_its_state(repeats: bool, stop: int) -> None:
    """Its later passes are complete after a resume, because the dataset gets their numbers. Repeated, it has one."""
    require("datasets")
    import datasets

    def loader() -> Any:
        data = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2]})
        return stateful(data.repeat(None) if repeats else data, 5)

    whole = [batch["n"].tolist() for batch in take(made(loader()), 0, 18)]
    assert all(sorted(itertools.chain(*whole[step : step + 6])) == list(range(30)) for step in (0, 6, 12))
    stopped = made(loader())
    assert [batch["n"].tolist() for batch in take(stopped, 0, stop)] == whole[:stop]
    resumed = take(made(loader(), checkpoint(stopped, stop)), stop, 18 - stop)
    assert [batch["n"].tolist() for batch in resumed] == whole[stop:]
