"""The snapshot of a save has the same bytes, whether the kernel copies small tensors together or torch copies each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoint import client
from clusterddp.checkpoint.client import Snapshot
from clusterddp.checkpoint.packing import Packed


class NoLibc:
    """A libc that lacks ``pwritev``."""


class Libc:
    """One whose ``pwritev`` fails, or writes less than it should."""

    def __init__(self, result: int) -> None:
        self.pwritev = lambda *_: result


def bytes_in_snapshot(folder: Path, state: Any) -> bytes:
    """What a snapshot has after two saves of a state."""
    taken = Snapshot(torch.device("cpu"), folder)
    for _ in range(2):
        taken.take(Packed(state))
    return os.pread(taken.file, taken.nbytes, 0)


def small_and_large() -> dict[str, Any]:
    """More small tensors than one system call copies, of several sizes of elements, among large and empty ones."""
    torch.manual_seed(0)
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.int8
    small = [torch.randn(1 + number % 37).to(dtypes[number % 4]) for number in range(3 * client.MOST_VECTORS)]
    return {
        "small": small,
        "large": [torch.randn(20_000) for _ in range(3)],
        "none": torch.ones(0),
        "one": torch.ones(()),
    }


@pytest.mark.parametrize("libc", [NoLibc(), Libc(-1), Libc(5)], ids=["no pwritev", "EFAULT", "short"])
def test_small_tensors_copied_together_are_the_same_bytes(
    libc: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses with EFAULT for the memory of a GPU."""
    state, by_torch = small_and_large(), list[int]()
    copy_all = torch._foreach_copy_

    def counted(views: list[torch.Tensor], *rest: Any, **how: Any) -> None:
        by_torch.append(len(views))
        copy_all(views, *rest, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    together = bytes_in_snapshot(tmp_path, state)
    monkeypatch.setattr(client, "_LIBC", libc)
    assert bytes_in_snapshot(tmp_path, state) == together
    everything = len(state["small"]) + 5
    assert by_torch == [3, 3, everything, everything]


@pytest.mark.parametrize(
    ("tensor", "saved"),
    [
        (torch.tensor([1 + 2j]).conj().imag, [-2.0]),
        (torch.tensor([1 + 2j]).conj(), [1.0, -2.0]),
        (torch.arange(6.0).reshape(2, 3).t(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]),
        (torch.arange(6.0)[::2], [0.0, 2.0, 4.0]),
    ],
    ids=["negated", "conjugate", "transposed", "every other"],
)
def test_a_tensor_whose_bytes_in_memory_are_others_is_copied_by_torch(
    tensor: torch.Tensor, saved: list[float], tmp_path: Path
) -> None:
    assert bytes_in_snapshot(tmp_path, {"tensor": tensor}) == torch.tensor(saved).numpy().tobytes()


@pytest.mark.parametrize(
    "after",
    [
        {"b": torch.ones(2, 3), "a": torch.zeros(6)},
        {"a": torch.zeros(6), "c": torch.ones(2, 3)},
        {"a": torch.zeros(6), "b": torch.ones(3, 2)},
        {"a": torch.zeros(6, dtype=torch.int32), "b": torch.ones(2, 3)},
        {"a": torch.zeros(6)},
    ],
    ids=["order", "name", "shape", "dtype", "number"],
)
def test_a_layout_that_changed_since_the_last_save_is_noticed(after: dict[str, torch.Tensor], tmp_path: Path) -> None:
    taken = Snapshot(torch.device("cpu"), tmp_path)
    taken.take(Packed({"a": torch.zeros(6), "b": torch.ones(2, 3)}))
    taken.take(Packed(after))
    fresh = Snapshot(torch.device("cpu"), tmp_path)
    fresh.take(Packed(after))
    assert taken.described == fresh.described
    assert os.pread(taken.file, taken.nbytes, 0) == os.pread(fresh.file, fresh.nbytes, 0)
