"""The bytes of a checkpoint file: what others can read, and that no damage goes unnoticed."""

from __future__ import annotations

import enum
import itertools
import json
import os
import struct
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.packing import DTYPES, Packed, pack, unpack
from clusterddp.errors import CheckpointError
from tests.checkpoint_files import content_of, file_bytes
from tests.wording import raises

STATE: dict[str, Any] = {
    "model": {"fc.weight": torch.randn(300, 7), "fc.bias": torch.zeros(0), "count": torch.tensor(5)},
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 300).t()}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": [0]}],
    },
    "other": {
        "numbers": [1, -(2**70), 0.1, float("inf"), float("-inf"), True, None],
        "milestones": Counter({30: 1, 80: 2}),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "keys": {("a", 1): "tuple", 2: "int", "$odd": b"\x00\xff"},
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "text": "π\n\ud800",
        "size": torch.Size([2, 3]),
        "long": -(3**9999),
        "scalars": [numpy.float64(0.1), numpy.float16(0.1), numpy.int8(3), numpy.uint64(2**64 - 1), numpy.bool_(True)],
        "arrays": [numpy.array(0.5), numpy.arange(6).reshape(2, 3)[:, ::-1], numpy.zeros((0, 3), dtype="uint8")],
    },
}


class Phase(enum.IntEnum):
    WARM_UP = 1


class Mode(str, enum.Enum):
    EVAL = "eval"


class Wrapper(torch.Tensor):
    """A tensor whose values are elsewhere, as with DTensor and torchao's quantized optimizers: its address is 0."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    __torch_dispatch__ = None  # type: ignore[assignment]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_bytes(file_bytes(content))
    return path


def test_a_state_is_restored_as_it_was(tmp_path: Path) -> None:
    assert same(content_of(written(tmp_path / "file", STATE)), STATE)
    read = content_of(written(tmp_path / "nan", {"best": float("nan")}))
    assert read["best"] != read["best"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_restored(tmp_path: Path, dtype: Any) -> None:
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    read = content_of(written(tmp_path / "file", {"odd": torch.ones(3, dtype=torch.uint8), "model": tensor}))["model"]
    assert read.dtype == dtype and torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_the_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    """By its published layout: header, entries without gaps, names, dtypes and shapes; no reader of ours."""
    data = written(tmp_path / "file", STATE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans[0][0] == 0 and spans[-1][1] == len(data) - 8 - length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    entry = header["model.fc.weight"]
    start, stop = entry["data_offsets"]
    weight = torch.frombuffer(bytearray(data[8 + length + start : 8 + length + stop]), dtype=torch.float32)
    assert entry["dtype"] == "F32" and torch.equal(weight.reshape(entry["shape"]), STATE["model"]["fc.weight"])


def test_tied_weights_are_there_once_and_stay_one(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    path = written(tmp_path / "file", {"model": {"embed": weight, "head": weight}})
    assert path.stat().st_size < 2 * weight.nbytes
    read = content_of(path)["model"]
    assert torch.equal(read["head"], weight) and read["head"].data_ptr() == read["embed"].data_ptr()


def test_only_the_same_view_of_the_same_memory_is_stored_once() -> None:
    memory, array = torch.randn(4), numpy.ones(2)
    different = {
        "whole": memory,
        "part": memory[:2],
        "rows": memory.view(2, 2),
        "integers": memory.view(torch.int32),
        "every_other": memory[::2],
        "empty": [torch.ones(0), torch.ones(0)],
        "arrays": [torch.from_numpy(array), torch.from_numpy(array)],
    }
    plain, tensors = pack({"a": different, "b": {"whole": memory.detach(), "rows": memory.view(2, 2)}})
    assert list(tensors) == [
        *(f"a.{name}" for name in ("whole", "part", "rows", "integers", "every_other")),
        *("a.empty.0", "a.empty.1", "a.arrays.0", "a.arrays.1"),
    ]
    assert plain["b"] == {"whole": {"$tensor": "a.whole"}, "rows": {"$tensor": "a.rows"}}


@pytest.mark.parametrize("tensor", [torch.randn(4, 5, 5, 3).permute(0, 3, 1, 2), torch.randn(2, 3).t()])
def test_the_order_of_dimensions_in_memory_is_restored(tmp_path: Path, tensor: Any) -> None:
    """A fused optimizer pairs a parameter with its state by address, whatever the strides of both."""
    state = {"one": tensor, "again": tensor, "other": tensor[:1].clone()}
    read = content_of(written(tmp_path / "file", state))
    assert same(read, state) and read["one"].stride() == tensor.stride() and read["again"] is read["one"]


def test_names_that_meet_in_the_header_are_kept_apart(tmp_path: Path) -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "checksums": torch.tensor(3)}
    assert same(content_of(written(tmp_path / "file", state)), state)


def test_the_plain_state_shares_nothing_with_the_live_one() -> None:
    one = torch.ones(())
    live: dict[str, Any] = {"groups": [{"lr": 1.0}], "moments": {"a": one}, "versions": {"a": 1}}
    packed = Packed(live)
    live["groups"][0]["lr"] = 2.0
    live["moments"]["b"] = live["versions"]["b"] = 2
    plain = packed.plain()
    assert live["moments"] == {"a": one, "b": 2}
    assert unpack(plain, packed.tensors) == {"groups": [{"lr": 1.0}], "moments": {"a": one}, "versions": {"a": 1}}


@pytest.mark.parametrize(
    "value",
    [
        Path("x"),
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2).to_sparse(),
        torch.ones(2, 2).to_sparse_csr(),
        torch.ones(0, device="meta"),
        torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(1)]),
        Wrapper(torch.ones(2)),
        torch.nn.LazyLinear(2).weight,
        Phase.WARM_UP,
        Mode.EVAL,
        numpy.datetime64("2030-01-01"),
        numpy.timedelta64(1, "ns"),
        numpy.str_("text"),
        numpy.longdouble(1),
        numpy.array(["text"]),
        numpy.ones(2, dtype=">f4"),
    ],
)
def test_a_state_that_cannot_be_held_is_named_with_its_place(value: Any) -> None:
    with raises(CheckpointError):
        pack({"ema": {"decay": value}})


def test_a_state_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with raises(CheckpointError):
        pack({"a": endless})


@pytest.mark.parametrize("place", [0, 100, 5_000_000, -1, None])
def test_what_reads_back_otherwise_than_it_was_written_does_not_count(tmp_path: Path, place: Any) -> None:
    """The header, the data and the checksums, altered or truncated after they were written; None is a good disk."""
    data, beginning = memoryview(bytes(9_000_000)), file_format.head(file_format.described([]), {}, {})
    later = lambda work: work  # noqa: E731
    with open(tmp_path / "file", "x+b", buffering=0) as file:
        writing = file_format.write(file.fileno(), beginning, data, later)
        with pytest.raises(StopIteration) as done:
            while True:
                next(writing)
        check = done.value.value
        if place is not None:
            size = (tmp_path / "file").stat().st_size
            os.pwrite(file.fileno(), b"\xff", place % size)
            with raises(file_format.Damaged):
                check()
            os.ftruncate(file.fileno(), place % size)
            with raises(file_format.Damaged):
                check()
        else:
            check()


def test_a_file_cut_off_anywhere_is_detected(tmp_path: Path) -> None:
    data = file_bytes({"model": torch.randn(5000), "step": 3})
    path = tmp_path / "file"
    for length in [*range(0, len(data), 4096), *range(40), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(file_format.Damaged):
            file_format.read(path)
        with pytest.raises(file_format.Damaged):
            file_format.verify(path)


def test_a_flipped_bit_anywhere_is_detected(tmp_path: Path) -> None:
    """Every byte of the header's length, the header and the check sums, and some of the data."""
    data = file_bytes({"model": torch.randn(5000), "step": 3})
    (length,) = struct.unpack("<Q", data[:8])
    path = tmp_path / "file"
    for place in [*range(8 + length), *range(8 + length, len(data) - 64, 997), *range(len(data) - 64, len(data))]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(file_format.Damaged):
            file_format.verify(path)


def test_a_file_that_is_no_checkpoint_is_reported_as_unreadable(tmp_path: Path) -> None:
    for data in (b"", b"text that is no checkpoint", b"\xff" * 100, struct.pack("<Q", 2) + b"{}"):
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(file_format.Damaged):
            file_format.read(tmp_path / "file")


def liar(path: Path, change: Any) -> Path:
    """A file with a header that was changed, and check sums that are right."""
    content = file_bytes({"a": torch.zeros(3)})
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    head, data = struct.pack("<Q", len(text)) + text, content[8 + size : -8]
    path.write_bytes(head + data + b"".join(struct.pack("<I", zlib.crc32(part)) for part in (head, data)))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["a"].update(data_offsets=[0, 10**15]),
        lambda header: header["a"].update(data_offsets=[-4, 8]),
        lambda header: header["a"].update(data_offsets="x"),
        lambda header: header["a"].update(shape=[-3]),
        lambda header: header["a"].update(dtype=3),
        lambda header: header["checksums"].update(data_offsets=[0.0, 4.0]),
        lambda header: header["__metadata__"].update(state="["),
        lambda header: header["__metadata__"].update(state="[" * 99999),
        lambda header: header["__metadata__"].update(step=1),
        lambda header: header["__metadata__"].pop("state"),
    ],
)
def test_a_wrong_header_is_damage(tmp_path: Path, change: Any) -> None:
    """With correct checksums; no memory is allocated, and nothing crashes."""
    with pytest.raises(file_format.Damaged):
        file_format.read(liar(tmp_path / "x", change))


def test_the_tensor_that_is_not_within_the_data_is_named(tmp_path: Path) -> None:
    with raises(file_format.Damaged):
        file_format.read(liar(tmp_path / "x", lambda header: header["a"].update(data_offsets=[0, 10**15])))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["a"].update(shape=[10**12]),
        lambda header: header["a"].update(data_offsets=[0, 0], shape=[10**12]),
        lambda header: header["a"].update(dtype="F99"),
        lambda header: header["__metadata__"].update(state='{"$tensor": "b"}'),
        lambda header: header["__metadata__"].update(state='{"$tensor": ["a", [1, 0]]}'),
        lambda header: header["__metadata__"].update(state='{"$tensor": ["a"]}'),
        lambda header: header["__metadata__"].update(state='{"$dtype": "load"}'),
        lambda header: header["__metadata__"].update(state='{"$set": 1}'),
        lambda header: header["__metadata__"].update(state='{"$nothing": 1}'),
    ],
)
def test_a_state_that_does_not_fit_its_tensors_is_refused(tmp_path: Path, change: Any) -> None:
    """The file is whole, and something else wrote it."""
    with raises(CheckpointError):
        content_of(liar(tmp_path / "x", change))


def test_endless_brackets_are_not_a_header(tmp_path: Path) -> None:
    """Python's JSON parser raises another error for it."""
    (tmp_path / "x").write_bytes(struct.pack("<Q", 50_000) + b"[" * 60_000)
    with pytest.raises(file_format.Damaged):
        file_format.verify(tmp_path / "x")
