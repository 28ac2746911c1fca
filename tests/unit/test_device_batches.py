"""How batches get to a GPU: which operations are queued on which stream, in which order. No GPU is needed."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from clusterddp.data import loader as device_module
from clusterddp.data.loader import EvalLoader, Loader, ToDevice, mapped, to_device
from clusterddp.data.sample_order import Sequential

Pair = namedtuple("Pair", ["x", "y"])
CUDA = torch.device("cuda:1")


class FakeGpu:
    """Notes what is queued, by stream. Its tensors are those of the CPU; any call that would wait is missing."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current: Any = "main"

    def Stream(self, device: torch.device) -> FakeStream:
        assert device == CUDA
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == CUDA
        return FakeStream(self, self.current)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class FakeStream:
    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_event(self, event: FakeEvent) -> None:
        self.gpu.log.append((self.name, "wait", event.number))


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.number = gpu, sum(entry[1] == "event" for entry in gpu.log)

    def record(self, stream: FakeStream) -> None:
        self.gpu.log.append((stream.name, "event", self.number))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(device_module.torch.cuda, name, getattr(fake, name))

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        assert device == CUDA and non_blocking
        fake.log.append((fake.current, "copy", int(tensor.flatten()[0])))
        return tensor.clone()

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        fake.log.append((stream.name, "uses", int(tensor.flatten()[0])))

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return fake


def test_a_batch_is_copied_on_the_side_stream_and_awaited_by_the_scripts(gpu: FakeGpu) -> None:
    copies = ToDevice(CUDA)
    begun = copies.begin((torch.tensor([1]), {"y": torch.tensor([2])}))
    assert gpu.log == [("side", "copy", 1), ("side", "copy", 2), ("side", "event", 0)]
    gpu.current = "script's"
    copies.take(begun)
    assert gpu.log[3:] == [("script's", "wait", 0), ("script's", "uses", 1), ("script's", "uses", 2)]


def order(gpu: FakeGpu, ahead: bool) -> list[Any]:
    """Which batches were read, copied and handed out, in order."""
    seen: list[Any] = []

    def read() -> Iterator[torch.Tensor]:
        for number in range(4):
            seen.append(("read", number))
            yield torch.tensor([number])

    for batch in ToDevice(CUDA).each(read(), ahead):
        seen.append(("step", int(batch[0])))
    return seen


def test_with_workers_a_batch_is_copied_a_step_ahead_but_the_first_step_waits_for_no_second_one(gpu: FakeGpu) -> None:
    read, step = "read", "step"
    assert order(gpu, ahead=True) == [
        *((read, 0), (step, 0)),
        *((read, 1), (read, 2), (step, 1)),
        *((read, 3), (step, 2), (step, 3)),
    ]


def test_without_workers_nothing_is_read_ahead(gpu: FakeGpu) -> None:
    assert order(gpu, ahead=False) == [entry for number in range(4) for entry in (("read", number), ("step", number))]


def test_tensors_in_any_nest_are_copied_and_other_objects_stay() -> None:
    one = torch.ones(1)
    packed = pack_sequence([torch.ones(2)])
    batch: list[Any] = [Pair(one, "text"), OrderedDict(a=(one, 3)), packed, None, [{"deep": [one]}]]
    moved = mapped(batch, lambda tensor: tensor + 1)
    assert isinstance(moved[0], Pair) and moved[0].x == 2 and moved[0].y == "text"
    assert type(moved[1]) is OrderedDict and moved[1]["a"] == (torch.tensor([2.0]), 3)
    assert moved[2] is packed and moved[3] is None and moved[4][0]["deep"][0] == 2
    assert batch[1]["a"][0] is one, "the batch itself was changed"


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


def test_the_loaders_hand_out_batches_on_the_device(gpu: FakeGpu) -> None:
    training = Loader(Numbers(), 2, order=Sequential(), seed=0, rank=0, world_size=1, device=CUDA)
    batches = training.batches(1)
    assert next(batches).tolist() == [2, 3]
    assert gpu.log == [("side", "copy", 2), ("side", "event", 0), ("main", "wait", 0), ("main", "uses", 2)]
    batches.close()  # type: ignore[attr-defined]
    gpu.log.clear()
    evaluation = EvalLoader(Numbers(), 4, rank=0, world_size=1, at_batch=lambda: None, device=CUDA)
    assert [batch.tolist() for batch in evaluation] == [[0, 1, 2, 3], [4, 5]]
    assert [entry[:2] for entry in gpu.log] == [
        ("side", "copy"),
        ("side", "event"),
        ("main", "wait"),
        ("main", "uses"),
    ] * 2


def test_on_a_cpu_there_is_nothing_to_copy() -> None:
    assert to_device(torch.device("cpu")) is None and to_device(None) is None
