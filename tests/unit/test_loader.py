"""Which samples come when: positions, seeks, tails, randomness, workers."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from clusterddp.data.loader import EvalLoader, Loader
from clusterddp.data.sample_order import Sequential, Shuffled
from clusterddp.data.samplers import Loaders, chosen
from clusterddp.data.training_loader import training_loader
from clusterddp.errors import CheckpointError
from tests.wording import raises


class Numbers(Dataset[Any]):
    def __init__(self, length: int, pause: float = 0.0) -> None:
        self.length, self.pause = length, pause

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        time.sleep(self.pause)
        return index, float(torch.rand(())), random.random()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def loader(length: int = 10, batch_size: int = 3, rank: int = 0, ranks: int = 1, **options: Any) -> Loader:
    options = {"order": Shuffled(), "seed": 1, **options}
    return Loader(Numbers(length), batch_size, rank=rank, world_size=ranks, **options)


def take(source: Loader, count: int, step: int = 0) -> list[Any]:
    batches = source.batches(step)
    try:
        return [[column.tolist() for column in batch] for batch in itertools.islice(batches, count)]
    finally:
        batches.close()  # type: ignore[attr-defined]


def test_any_step_is_found_at_once_and_is_the_same() -> None:
    whole = take(loader(), 12)
    assert take(loader(), 5, step=7) == whole[7:]
    take(loader(), 1, step=10**9)  # by going through all steps before it would outlast the test's timeout


def test_any_number_of_ranks_shares_the_global_batch_evenly() -> None:
    def indices(ranks: int, batch_size: int) -> list[list[int]]:
        per_rank = [take(loader(batch_size=batch_size, rank=rank, ranks=ranks), 5) for rank in range(ranks)]
        return [[i for rank in per_rank for i in rank[step][0]] for step in range(5)]

    assert indices(1, 6) == indices(2, 3) == indices(3, 2)
    assert [len(batch) for batch in indices(1, 6)] == [6] * 5


def test_a_dataset_smaller_than_the_global_batch_is_repeated() -> None:
    (batch,) = take(loader(length=4, batch_size=10), 1)
    assert sorted(batch[0]) == sorted([*range(4), *range(4), *batch[0][8:]])


def test_a_samples_randomness_is_the_same_in_any_worker_and_new_in_every_epoch() -> None:
    none, two = take(loader(), 7), take(loader(num_workers=2), 7)
    assert none == two
    drawn = [dict(zip(batch[0], batch[1], strict=True)) for batch in none]
    first = {index: value for batch in drawn[:3] for index, value in batch.items()}
    assert all(first.get(index) != value for batch in drawn[4:] for index, value in batch.items())


def test_loading_in_this_process_leaves_the_users_generators_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    batches = loader().batches(0)
    before = torch.default_generator.initial_seed()
    next(batches)
    assert before == torch.default_generator.initial_seed()
    batches.close()  # type: ignore[attr-defined]
    assert random.random() == expected[1]


@pytest.mark.parametrize("seeds_steps", [True, False])
def test_a_batch_is_not_kept_while_the_next_is_made(seeds_steps: bool) -> None:
    """Its memory is used again: twice as much does not fit into the CPU's cache."""
    last: list[weakref.ref[torch.Tensor]] = []
    kept: list[bool] = []

    class Looking(Numbers):
        def __getitem__(self, index: int) -> tuple[int, float, float]:
            kept.extend(batch() is not None for batch in last)
            return super().__getitem__(index)

    batches = Loader(Looking(9), 3, order=Shuffled(), seed=1, rank=0, world_size=1).batches(0, seeds_steps)
    for _ in range(3):
        last[:] = [weakref.ref(next(batches)[0])]
    assert len(kept) == 6 and not any(kept)


def test_epochs_and_steps() -> None:
    data = loader(length=10, batch_size=3)
    assert len(data) == data.steps_in(1) == 4 and data.steps_in(3) == 10
    assert [data.epoch(step) for step in (0, 3, 4, 6)] == [0, 0, 1, 1]
    assert [step for step in range(10) if data.ends_epoch(step)] == [3, 6, 9]


def test_evaluation_sees_each_sample_once_and_every_rank_has_as_many_stop_points() -> None:
    for length, ranks, batch_size in itertools.product((1, 2, 7, 8, 9), (1, 2, 3), (1, 2, 4)):
        seen, stops = [], []
        for rank in range(ranks):
            calls: list[int] = []
            source = EvalLoader(
                Numbers(length), batch_size, rank=rank, world_size=ranks, at_batch=partial(calls.append, 1)
            )
            batches = [batch[0].tolist() for batch in source]
            assert len(source) == len(batches)
            seen += [index for batch in batches for index in batch]
            stops.append(len(calls))
        assert sorted(seen) == list(range(length)) and len(set(stops)) == 1


def test_workers_ignore_the_stop_signals_and_end_with_their_loop() -> None:
    others = children()  # the test cluster's daemons, when all tests run
    source = Loader(Numbers(1000, pause=0.001), 4, order=Sequential(), seed=1, rank=0, world_size=1, num_workers=2)
    batches = source.batches(0)
    next(batches)
    workers = children() - others
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGUSR2)
    for _ in range(20):
        next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(workers) == 2 and not children() & workers


NOT_FORKED = """
import multiprocessing, os, signal, sys

from tests.unit.test_loader import Numbers
from clusterddp.data.loader import Loader
from clusterddp.data.samplers import chosen
from clusterddp.data.sample_order import Sequential

if __name__ == "__main__":
    options = {"order": Sequential(), "seed": 1, "rank": 0, "world_size": 1, "num_workers": 2}
    batches = Loader(Numbers(1000), 4, multiprocessing_context=sys.argv[1], **options).batches(0)
    next(batches)
    workers = [worker.pid for worker in multiprocessing.active_children()]
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    made = [next(batches) for _ in range(20)]
    batches.close()
    print(f"{len(workers)} workers, {len(made)} batches")
"""


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.product), "forkserver"])
def test_workers_that_are_not_forked_ignore_a_term_too(method: str, tmp_path: Path) -> None:
    """In a process of its own: what Python starts for the first of them stays, and would hide the fault."""
    script = tmp_path / "workers.py"
    script.write_text(NOT_FORKED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == "2 workers, 20 batches\n", done.stdout + done.stderr


KILLED = """
import multiprocessing, os, signal, sys

from tests.unit.test_loader import Numbers
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Sequential

if __name__ == "__main__":
    options = {"order": Sequential(), "seed": 1, "rank": 0, "world_size": 1, "num_workers": 1}
    iterator = Loader(Numbers(1000), 4, multiprocessing_context=sys.argv[1], **options)._iterator(0)
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_end_when_their_rank_is_killed(method: str, tmp_path: Path) -> None:
    """Even if that happens while they start, as here."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as rank:
        assert rank.stdout is not None
        (worker,) = map(int, rank.stdout.readline().split())
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(worker)
            try:
                assert connection.wait([ended], 60), f"the {method} worker is still there"
            finally:
                signal.pidfd_send_signal(ended, signal.SIGKILL)
                os.close(ended)
    assert rank.returncode == -signal.SIGKILL


def test_a_stuck_worker_does_not_delay_the_end() -> None:
    others = children()
    source = Loader(
        Numbers(1000, pause=600), 4, order=Sequential(), seed=1, rank=0, world_size=1, num_workers=2, timeout=1
    )
    batches = source.batches(0)
    with pytest.raises(RuntimeError, match="timed out"):  # torch's words
        next(batches)
    assert not children() - others


def children() -> set[int]:
    """The living children of this process."""
    found = set()
    for path in os.listdir("/proc"):
        if path.isdecimal():
            try:
                fields = open(f"/proc/{path}/stat").read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(os.getpid()) and fields[0] != "Z":
                name = open(f"/proc/{path}/cmdline").read()
                if "rank_server" not in name and "resource_tracker" not in name:
                    found.add(int(path))
    return found


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Stream(), {}),
        (Numbers(0), {}),
        (Numbers(5), {"ordr": Shuffled()}),
        (Numbers(5), {"batch_size": 0}),
        (Numbers(5), {"drop_last": "no"}),
        (Numbers(5), {"pin_memory": 1}),
        (Numbers(5), {"persistent_workers": "yes", "num_workers": 1}),
    ],
)
def test_what_cannot_be_ordered_is_refused(dataset: Any, options: Any) -> None:
    with raises((TypeError, ValueError)):
        Loader(dataset, **{"batch_size": 2, "order": Shuffled(), "seed": 0, "rank": 0, "world_size": 1, **options})


def test_switches_are_true_or_false() -> None:
    """Else ``shuffle=0`` would shuffle."""
    of = Loaders()
    for make, name, value in ((of.loader, "shuffle", 0), (of.loader, "to_device", 1), (of.eval_loader, "to_device", 1)):
        with raises(TypeError) as refused:
            make(Numbers(5), 2, **{name: value})  # type: ignore[arg-type]
        assert f"{name} is {value}" in str(refused.value)


def test_an_evaluation_takes_no_order() -> None:
    with raises(TypeError):
        EvalLoader(Numbers(5), 1, rank=0, world_size=1, at_batch=lambda: None, order=Sequential())


def test_a_resume_keeps_the_global_batch_or_says_why_not() -> None:
    data = loader(batch_size=6, ranks=1)
    before = data.progress(0) | {"global_batch": 8}
    data.restore(before)
    assert data.global_batch == 8
    with raises(CheckpointError):
        data.restore(before | {"dataset_length": 11})
    with raises(CheckpointError):
        loader(ranks=3).restore(before)
    with raises(CheckpointError):
        loader(ranks=2, global_batch=12).restore(before)


def test_a_resume_keeps_the_order_or_says_why_not() -> None:
    now = loader()
    assert now.progress(0)["order"] == "shuffled-2"
    again = loader()
    again.restore(now.progress(4))
    assert take(again, 4) == take(now, 4)
    with raises(CheckpointError):
        loader(order=Sequential()).restore(now.progress(4))
    with raises(CheckpointError):
        loader(drop_last=True).restore(now.progress(4))


def test_drop_last_ends_each_epoch_at_a_whole_global_batch() -> None:
    data = loader(length=10, batch_size=3, drop_last=True)
    assert len(data) == data.steps_in(1) == 3 and data.steps_in(3) == 9
    assert [data.epoch(step) for step in (2, 3, 5, 6)] == [0, 1, 1, 2]
    assert [step for step in range(9) if data.ends_epoch(step)] == [2, 5, 8]
    batches = [batch[0] for batch in take(data, 9)]
    for epoch in range(3):
        seen = [index for batch in batches[3 * epoch : 3 * epoch + 3] for index in batch]
        assert len(set(seen)) == 9
    resumed = loader(batch_size=11, drop_last=True)
    with raises(ValueError):
        len(resumed)
    resumed.restore(data.progress(4))  # of a run with fewer ranks
    assert take(resumed, 1, step=4) == take(data, 1, step=4)


def test_two_orders_are_refused() -> None:
    with raises(TypeError):
        chosen(Numbers(2), 1, shuffle=True, order=Sequential())
    with raises(TypeError):
        chosen(Numbers(2), 1, order=[1, 0])  # type: ignore[arg-type]


def test_a_rank_with_another_dataset_is_named() -> None:
    """A script that has divided the samples among the ranks itself."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    group = [SimpleNamespace(rank=rank, store=store) for rank in (0, 1)]
    for rank in (0, 1):
        training_loader(loader(rank=rank, ranks=2), group[rank], 0)  # type: ignore[arg-type]
    with raises(ValueError):
        training_loader(loader(length=9, rank=1, ranks=2), group[1], 0)  # type: ignore[arg-type]


def test_a_given_global_batch_is_shared_for_any_batch_size() -> None:
    for ranks, share in ((1, 12), (2, 6), (4, 3)):
        data = loader(batch_size=5, ranks=ranks, global_batch=12)
        assert (data.global_batch, data.share, len(take(data, 1)[0][0])) == (12, share, share)
        data.restore(data.progress(0))
    with raises(ValueError):
        loader(ranks=5, global_batch=12)
