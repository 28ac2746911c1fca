"""Ranks that restore checkpoints 1 and 2 in FOLDER in some CASE: ``python restoring.py FOLDER CASE``.

Prints the step that each restore came to, and fails if what it loaded is not the state of that step.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from clusterddp.checkpoint import file_format, host_memory
from clusterddp.checkpoint import restore as restoring
from clusterddp.checkpoint.restore import CheckpointFolder, restore
from clusterddp.checkpoint.state_dict import load_state
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.distributed import collectives
from clusterddp.distributed.collectives import _AT_ONCE, broadcast_json
from clusterddp.errors import CheckpointError
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory

CPU = torch.device("cpu")
RANK = int(os.environ["RANK"])


def training(step: int) -> tuple[torch.nn.Module, torch.optim.Adam]:
    """A model and its optimizer after so many steps; their state takes three chunks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 700)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(step):
        model(torch.ones(1000)).sum().backward()
        optimizer.step()
    return model, optimizer


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all tensors."""
    moments = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    return [tensor.clone() for tensor in (*model.state_dict().values(), *moments)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def attempt(folder: Path) -> tuple[Any, torch.nn.Module, torch.optim.Adam]:
    """Restores, and loads what was found into a model of its own; the content is as rank 0's file says."""
    checkpoints = Checkpoints(RunDirectory(folder), 0, Keep()) if RANK == 0 else None
    model, optimizer = training(0)
    untouched = bits(model, optimizer)
    try:
        found = restore(checkpoints, CPU)
    except CheckpointError as error:
        assert same(bits(model, optimizer), untouched)
        print("refused:", error, flush=True)
        return None, model, optimizer
    assert found is not None and same(bits(model, optimizer), untouched)
    content, (_, step) = found
    load_state(model, content["model"])
    load_state(optimizer, content["optimizer"])
    assert same(bits(model, optimizer), bits(*training(step)))
    print("step", step, flush=True)
    return content, model, optimizer


def whole(folder: Path) -> None:
    attempt(folder)
    assert "memfd:clusterddp" not in Path("/proc/self/maps").read_text()


def damaged(folder: Path) -> None:
    """A byte of each part of the newest file in turn, then of both files."""
    older, newer = sorted((folder / "checkpoints").iterdir())
    size = newer.stat().st_size
    for place in (100, size - 3, *(size - 200 - number * file_format.CHUNK for number in range(3))):
        flip(newer, place)
        attempt(folder)
        flip(newer, place)
    flip(newer, size - 200)
    flip(older, size // 2)
    attempt(folder)
    flip(newer, size - 200)
    flip(older, size // 2)


def flip(path: Path, place: int) -> None:
    dist.barrier()
    if RANK == 0:
        with open(path, "r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
    dist.barrier()


def kept(folder: Path) -> None:
    """A rank that keeps a tensor of the content, and writes to it, changes no other rank's."""
    content, model, optimizer = attempt(folder)
    before = bits(model, optimizer)
    weight = content["model"]["weight"]
    expected = weight.clone()
    dist.barrier()
    if RANK == 0:
        weight.zero_()
    dist.barrier()
    assert RANK == 0 or torch.equal(weight, expected)
    assert same(bits(model, optimizer), before)
    for tensor in optimizer.state_dict()["state"][0].values():
        tensor.add_(RANK)
    dist.barrier()
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before[3] + RANK)


def twice(folder: Path) -> None:
    """An optimizer may keep what was read, but not a second one, and a tensor that stays keeps no other's memory."""
    content, model, optimizer = attempt(folder)
    other = torch.optim.Adam(model.parameters())
    load_state(other, content["optimizer"])
    before = bits(model, optimizer)
    for entry in other.state_dict()["state"].values():
        for tensor in entry.values():
            tensor.zero_()
    assert same(bits(model, optimizer), before)
    weight = optimizer.state[model.weight]["exp_avg"]
    assert content["optimizer"]["state"][0]["exp_avg"].data_ptr() == weight.data_ptr()
    assert weight.data_ptr() % 64 == 0 and weight.untyped_storage().nbytes() == weight.nbytes


def counted(folder: Path) -> None:
    """The collectives of a restore."""
    calls: list[str] = []
    for name in ("broadcast", "gather", "all_gather", "all_reduce", "barrier"):
        setattr(dist, name, counting(name, calls))
    checkpoints = Checkpoints(RunDirectory(folder), 0, Keep()) if RANK == 0 else None
    assert restore(checkpoints, CPU) is not None
    print(" ".join(calls), flush=True)


def counting(name: str, calls: list[str]) -> Callable[..., Any]:
    real = getattr(dist, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return real(*arguments, **named)

    return call


def lengths(_: Path) -> None:
    """JSON that just fits into the first message, that just does not, and that takes two long ones."""
    for length in (0, _AT_ONCE - 2, _AT_ONCE - 1, 3 * _AT_ONCE):
        text = "a" * length
        assert broadcast_json(text if RANK == 0 else None, CPU) == text
    print("the same", flush=True)


class Progress:
    """A part with a tensor and without."""

    def __init__(self, step: int) -> None:
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._step, "pair": (1, 2), "gradients": {"a": torch.ones(2)}}

    def load_state_dict(self, _: dict[str, Any]) -> None: ...


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def without_memfd(folder: Path) -> None:
    os.memfd_create = refuse  # type: ignore[assignment]
    attempt(folder)


def small_shared_memory(folder: Path) -> None:
    os.posix_fallocate = refuse
    without_memfd(folder)


def stranger(folder: Path) -> None:
    """A rank that may not open what the first rank of its host has made."""
    if RANK == 1:
        restoring.open_memory = lambda *_: None
    attempt(folder)


def little_memory(folder: Path) -> None:
    collectives.own_host = lambda: RANK
    restoring.free_memory = lambda: 1000 if RANK == 1 else 1 << 40
    attempt(folder)


def two_hosts(folder: Path) -> None:
    collectives.own_host = lambda: RANK // 2
    damaged(folder)


def own_hosts(folder: Path) -> None:
    collectives.own_host = lambda: RANK
    attempt(folder)


def killed(folder: Path) -> None:
    """Rank 0 is killed when half of the data is there, in a file that has, or would have, a name."""
    os.memfd_create = refuse  # type: ignore[assignment]
    real = file_format.write_at

    def write(file: int, data: memoryview, position: int) -> None:
        if position > file_format.CHUNK:
            assert str(host_memory.SHARED_MEMORY) in os.readlink(f"/proc/self/fd/{file}")
            os.kill(os.getpid(), signal.SIGKILL)
        real(file, data, position)

    file_format.write_at = write
    attempt(folder)


def save(folder: Path) -> None:
    with CheckpointFolder(folder) as checkpoints:
        checkpoints.restore()
        for step in (1, 2):
            model, optimizer = training(step)
            checkpoints.save(step, model=model, optimizer=optimizer, progress=Progress(step))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    globals()[sys.argv[2]](Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()
