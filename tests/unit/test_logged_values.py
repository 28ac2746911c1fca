"""``run.log()``: values are those at the call, lines wait for GPUs and other ranks, and no step waits for either."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from clusterddp.history.steps import NotFinite
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.schemas import METRICS
from clusterddp.training.log_reduction import Receiver, Sender, decoded, encoded, reduce_values
from clusterddp.training.logged_values import DeviceCopies, Logged, Values
from clusterddp.training.loop import Run
from clusterddp.training.metrics import Metrics, _Line
from tests.waiting import wait_until
from tests.wording import raises


class OnGpu(torch.Tensor):
    """A tensor of the CPU that claims to be on a GPU."""

    is_cuda = True


class Event:
    """Of a stand-in for a stream: passes when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.passed = self.waited = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waited |= not self.passed
        self.passed = True


class Gpu:
    """The values of steps from a GPU whose events have not passed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.allocated = 0
        self.values = Values(copies=DeviceCopies(self._allocate, self._record))

    def step(self, value: float | torch.Tensor, **others: Any) -> Logged:
        self.values.add({"loss": torch.as_tensor(value).as_subclass(OnGpu), **others})
        return self.values.take()

    def _allocate(self, dtype: torch.dtype) -> list[torch.Tensor]:
        self.allocated += 2
        return [torch.empty((), dtype=dtype) for _ in range(2)]

    def _record(self, device: torch.device) -> Event:
        self.events.append(Event())
        return self.events[-1]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What was said since the last call."""
    return lambda: [line.removeprefix("clusterddp: ") for line in capsys.readouterr().err.splitlines()]


@pytest.fixture
def open_metrics(tmp_path: Path) -> Any:
    opened = []

    def open_(report: Callable[..., None] = lambda *_, **__: None) -> Metrics:
        opened.append(Metrics(tmp_path / "metrics.jsonl", 0, report))
        return opened[-1]

    yield open_
    for metrics in opened:
        metrics.close(clean=False)


def written(tmp_path: Path, name: str = "loss") -> list[Any]:
    found = list(read_lines(tmp_path / "metrics.jsonl", METRICS))
    assert [line["step"] for line in found] == list(range(len(found)))
    return [line.get(name) for line in found]


# --- values at the call


def test_a_tensor_that_the_script_changes_after_the_call_was_logged_as_it_was() -> None:
    total = torch.tensor(1.5, requires_grad=True)
    values, gpu = Values(), Gpu()
    values.add({"total": total})
    on_gpu = torch.tensor(2.5, dtype=torch.bfloat16)
    late = gpu.step(on_gpu)
    with torch.no_grad():
        total.add_(1)
        on_gpu.add_(1)
    assert values.take().numbers() == {"total": 1.5}
    assert late.numbers() == {"loss": 2.5}


def test_the_last_call_counts_and_says_whether_a_name_is_reduced() -> None:
    for keeps_own in (True, False):
        values = Values(keeps_own)
        values.add({"loss": 1.0, "lr": 0.1}, reduce="mean")
        values.add({"lr": 0.2, "own": 3.0})
        logged = values.take()
        assert logged.reduced == {"loss": "mean"}
        assert logged.values == {"loss": 1.0, **({"lr": 0.2, "own": 3.0} if keeps_own else {})}
    with raises(ValueError):
        values.add({"loss": 1.0}, reduce=0.5)  # type: ignore[arg-type]


# --- lines wait for a GPU


def test_a_step_waits_for_no_gpu_and_lines_keep_their_order(tmp_path: Path, open_metrics: Any) -> None:
    gpu, metrics = Gpu(), open_metrics()
    for step in range(3):
        metrics.add(step, gpu.step(step / 2, lr=0.1))
    metrics.add(3, Logged({"loss": 9.0}))
    assert written(tmp_path) == [] and metrics.pending
    gpu.events[1].passed = True
    metrics.take_arrived()
    metrics.drain()
    assert written(tmp_path) == []  # the line of step 0 is first
    gpu.events[0].passed = True
    metrics.drain()  # by another thread, which does not ask the GPU
    assert written(tmp_path) == []
    metrics.take_arrived()
    metrics.drain()
    assert written(tmp_path) == [0.0, 0.5]
    gpu.events[2].passed = True
    metrics.add(4, Logged({"loss": 8.0}))
    assert written(tmp_path) == [0.0, 0.5, 1.0, 9.0, 8.0] and not metrics.pending
    assert written(tmp_path, "lr") == [0.1, 0.1, 0.1, None, None]
    assert not any(event.waited for event in gpu.events)
    assert gpu.allocated == 4  # two of the three slots that were in use are used again
    assert [gpu.step(7.0).numbers()["loss"] for _ in range(5)] == [7.0] * 5 and gpu.allocated == 4


def test_a_checkpoint_has_all_lines_before_it_and_waits_for_no_later_step(tmp_path: Path, open_metrics: Any) -> None:
    reported: list[Any] = []
    gpu, metrics = Gpu(), open_metrics(reported.append)
    for step, value in enumerate((1.0, math.nan, 3.0)):
        metrics.add(step, gpu.step(value))
    assert reported == []
    metrics.settle(2, 0.0)
    assert written(tmp_path) == [1.0, "NaN"] and [event.waited for event in gpu.events] == [True, True, False]
    assert reported == [NotFinite(step=1, metrics={"loss": "NaN"}, count=1)]


def test_only_so_many_steps_wait_for_a_gpu(tmp_path: Path, open_metrics: Any) -> None:
    gpu, metrics = Gpu(), open_metrics()
    metrics.most_pending = 3
    for step in range(5):
        metrics.add(step, gpu.step(float(step)))
    assert written(tmp_path) == [0.0, 1.0] and [event.waited for event in gpu.events] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_the_lines_of_a_failed_gpu_are_reported_as_lost(
    tmp_path: Path, open_metrics: Any, said: Callable[[], list[str]]
) -> None:
    gpu, metrics = Gpu(), open_metrics()
    for step in range(3):
        metrics.add(step, gpu.step(float(step)))
    gpu.events[0].passed = True

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    gpu.events[1].synchronize = fail  # type: ignore[method-assign]
    metrics.close(clean=False)
    assert said() == ["could not write the metrics of the last 2 steps: CUDA error: an illegal memory access"]
    assert written(tmp_path) == [0.0]


# --- reduction


@pytest.mark.parametrize(
    ("how", "values", "result"),
    [("mean", [0.1] * 10, 0.1), ("mean", [1e16, 1.0, -1e16], 1 / 3), ("sum", [1, 2.5], 3.5), ("min", [2.0, -1.0], -1.0),
     ("max", [2.0, -1.0], 2.0), ("max", [2.0, math.nan], math.nan), ("mean", [math.inf, -math.inf], math.nan),
     ("mean", [1e308, 1e308], math.inf), ("mean", [math.nan, 1.0], math.nan), ("sum", [math.inf, 1.0], math.inf)],
)  # fmt: skip
def test_values_are_reduced_to_the_nearest_float_in_any_order(how: str, values: Any, result: float) -> None:
    for order in itertools.islice(itertools.permutations(values), 6):
        found = reduce_values(how, order)
        assert found == result or (math.isnan(found) and math.isnan(result))


def test_a_chunk_keeps_all_bits_and_is_cut_where_it_would_be_too_large() -> None:
    rows = [(step, {"a b": ("mean", step / 3), "c": ("max", math.inf)}) for step in range(1201) if step != 7]
    chunks = encoded(rows, 1300)
    parts = [decoded(chunk.encode()) for chunk in chunks]
    assert len(chunks) > 2 and [row for part, _ in parts for row in part] == rows
    assert [through for _, through in parts] == [*(part[0][0] for part, _ in parts[1:]), 1300]
    assert decoded(encoded([], 5)[0].encode()) == ([], 5)


class Quick(Sender):
    """One that waits for nothing."""

    period_s = idle_s = 0.01


class QuickReceiver(Receiver):
    period_s = 0.01


class World:
    """Rank 0's metrics and receiver, and the other ranks' senders, in threads of one process."""

    def __init__(self, metrics: Metrics, ranks: int) -> None:
        self.store, self.metrics, self.ranks = HashStore(), metrics, ranks
        self.receiver = metrics.receiver = QuickReceiver(self.store, ranks, metrics.drain)
        self.senders = {rank: Quick(self.store, rank) for rank in range(1, ranks)}

    def log(self, rank: int, step: int, reduced: dict[str, float], how: str = "mean", now: bool = False) -> None:
        logged = Logged(dict(reduced), dict.fromkeys(reduced, how))
        if rank == 0:
            self.metrics.add(step, logged)
        else:
            self.senders[rank].add(step, logged, now)

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()


@pytest.fixture
def world(open_metrics: Any) -> Any:
    made = World(open_metrics(), 3)
    yield made
    made.close()


def test_the_mean_of_all_ranks_is_written_wherever_chunks_are_cut(tmp_path: Path, world: World) -> None:
    values = {(rank, step): (rank + 1) / (step + 3) for rank in range(3) for step in range(40)}
    for step in range(40):
        for rank in (2, 0, 1):
            world.log(rank, step, {"loss": values[rank, step]}, now=step % (rank + 5) == 0)
    for sender in world.senders.values():
        sender.flush()
    world.metrics.settle(40, 60)
    assert written(tmp_path) == [math.fsum(values[rank, step] for rank in range(3)) / 3 for step in range(40)]
    assert world.store.num_keys() == 1  # nothing is left of the chunks


def test_a_line_waits_for_the_slowest_rank_and_later_lines_wait_behind_it(tmp_path: Path, world: World) -> None:
    world.log(0, 0, {"loss": 1.0})
    world.metrics.add(1, Logged({"loss": 5.0}))
    world.log(1, 0, {"loss": 4.0}, now=True)
    world.senders[1].flush()
    world.metrics.drain()
    assert written(tmp_path) == []
    world.log(2, 0, {"loss": 7.0}, now=True)
    wait_until(lambda: written(tmp_path) == [4.0, 5.0], "both lines", 10)


def test_a_rank_that_logs_nothing_is_left_out_and_named(
    tmp_path: Path, world: World, said: Callable[[], list[str]]
) -> None:
    """Of one step, of all steps, and of all names."""
    world.senders[2].add(0, Logged(), now=False)
    world.log(0, 0, {"loss": 1.0, "mine": 1.0})
    world.log(1, 0, {"loss": 2.0, "theirs": 4.0})
    world.metrics.settle(1, 60)
    assert written(tmp_path) == [1.5] and written(tmp_path, "theirs") == [4.0] and written(tmp_path, "mine") == [1.0]
    assert sorted(said()) == sorted(
        f"{ranks} of 3 ranks did not call run.log({name}=..., reduce=...) in step 0, so the value is reduced over the "
        "other ranks. Make this call on every rank"
        for name, ranks in {"loss": "rank 2", "mine": "ranks 1, 2", "theirs": "ranks 0, 2"}.items()
    )
    world.log(0, 1, {"loss": 1.0})
    for rank in (1, 2):
        world.log(rank, 1, {"loss": 1.0}, how="mean")
    world.metrics.settle(2, 60)
    assert said() == []


def test_a_rank_that_hangs_is_not_waited_for_without_end(
    tmp_path: Path, world: World, said: Callable[[], list[str]]
) -> None:
    for step in range(3):
        world.log(0, step, {"loss": 1.0})
        world.log(1, step, {"loss": 2.0})
    world.metrics.settle(2, 0.3)
    assert written(tmp_path) == [1.5, 1.5]
    assert said()[0] == (
        "rank 2 did not send the values of run.log(reduce=...) for steps 0 to 1 within 0.3 s, so they are reduced over "
        "the other ranks"
    )
    for step in range(3):  # it was only slow
        world.log(2, step, {"loss": 6.0})
    world.metrics.settle(3, 60)
    assert written(tmp_path) == [1.5, 1.5, 3.0]


def test_values_that_arrive_when_the_time_is_over_count(said: Callable[[], list[str]]) -> None:
    """The thread has taken them, and has not yet looked which steps are complete."""
    receiver = Receiver(HashStore(), 3, lambda: None)
    receiver._through = {1: 4, 2: 4}
    receiver.wait(3, 0.0)
    assert receiver.has(3) and not receiver.has(4) and said() == []


def test_the_thread_of_a_rank_asks_a_gpu_only_while_no_step_ends(tmp_path: Path, world: World) -> None:
    """It would make the capture of a CUDA graph fail. While the script evaluates, nothing else would ask."""
    world.senders[1].quiet_periods = 10**9
    gpu, asked = Gpu(), set[str]()

    def log(step: int) -> None:
        logged = gpu.step(2.0)
        logged.reduced["loss"] = "mean"
        event, query = gpu.events[-1], gpu.events[-1].query
        event.query = lambda: asked.add(threading.current_thread().name) or query()  # type: ignore[method-assign]
        world.senders[1].add(step, logged, now=False)
        world.log(0, step, {"loss": 2.0})
        world.log(2, step, {"loss": 2.0}, now=True)

    world.log(1, 0, {"loss": 2.0})  # the first one is passed on at once
    world.log(0, 0, {"loss": 2.0})
    world.log(2, 0, {"loss": 2.0}, now=True)
    log(1)
    gpu.events[0].passed = True
    log(2)
    later = itertools.count(3)

    def arrived() -> bool:
        """After one more step: one at which the thread is busy takes nothing."""
        world.senders[1].add(next(later), Logged(), now=False)
        return written(tmp_path) == [2.0, 2.0]

    wait_until(arrived, "the first two steps", 60)
    assert asked == {threading.current_thread().name}
    gpu.events[1].passed = True
    world.senders[1].quiet_periods = 2
    wait_until(lambda: written(tmp_path) == [2.0, 2.0, 2.0], "the step before an evaluation", 10)
    assert asked == {threading.current_thread().name, "log"}
    assert not any(event.waited for event in gpu.events)


def test_values_that_rank_0_does_not_reduce_are_dropped_with_a_warning(
    world: World, said: Callable[[], list[str]]
) -> None:
    world.senders[1].most_chunks, world.senders[1].most_steps = 2, 3
    for step in range(12):
        world.log(1, step, {"loss": 1.0})
        world.senders[1].flush()
    assert said() == [
        "rank 0 never called run.log(reduce=...), so values of other ranks are dropped. Call it on rank 0"
    ]
    assert world.store.num_keys() <= 2


def test_a_lost_store_ends_no_training(tmp_path: Path, open_metrics: Any, said: Callable[[], list[str]]) -> None:
    class Lost(HashStore):
        def check(self, keys: Any) -> bool:
            raise RuntimeError("connection reset")

    metrics = open_metrics()
    metrics.receiver = QuickReceiver(Lost(), 3, metrics.drain)
    metrics.add(0, Logged({"loss": 1.0}, {"loss": "mean"}))
    metrics.settle(1, 60)
    assert written(tmp_path) == [1.0] and "the store is unreachable" in said()[0]


def test_closing_leaves_no_thread_behind(tmp_path: Path, open_metrics: Any) -> None:
    before = threading.active_count()
    world = World(open_metrics(), 2)
    world.log(0, 0, {"loss": 1.0})
    world.log(1, 0, {"loss": 1.0})
    world.close()
    world.metrics.close()
    assert threading.active_count() == before
    assert written(tmp_path) == [1.0]


def test_one_rank_reduces_its_own_value(tmp_path: Path, open_metrics: Any) -> None:
    metrics = open_metrics()
    metrics.add(0, Logged({"loss": 3, "lr": 1}, {"loss": "mean"}))
    assert written(tmp_path) == [3.0] and written(tmp_path, "lr") == [1]


@pytest.mark.parametrize(("method", "given"), [(Run.log, {"loss": 0.5}), (Run.every, 1)])
def test_a_value_without_its_name_is_refused_with_an_example(method: Any, given: Any) -> None:
    with raises(TypeError):
        method(None, given)


def test_a_line_may_be_added_while_another_thread_goes_through_the_lines(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0, lambda *_, **__: None)

    class Adding(Logged):
        """Adds another line where the lines are gone through."""

        @property
        def reduced(self) -> dict[str, Any]:
            if not added:
                added.append(True)
                metrics.add(1, Logged({"loss": 2.0}))
            return {}

        @reduced.setter
        def reduced(self, _: object) -> None: ...

    added: list[bool] = []
    metrics._pending.append(_Line(0, 0.0, Adding({"loss": 1.0})))
    metrics.settle(2, 0)
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
