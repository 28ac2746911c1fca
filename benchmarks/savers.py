"""Who saves in ``benchmarks.saves``, what, and beside which training; what ``benchmarks.restore`` restores."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from clusterddp.checkpoint.client import CheckpointClient
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.checkpoint.writer import NICENESS
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory

LAYERS = 20
#: Tensors that async_save in a process can send: it would take all descriptors, and every saver would fail.
MOST_DESCRIPTORS = 5000
OURS, RAW = "clusterddp", "raw write + fsync"
CALLS_AND_COPY, EMPTY_LOOP = "state_dict() + memory copy", "empty loop"


# ---- the state, and training


def make_training(size: int) -> tuple[torch.nn.Module, torch.optim.Adam]:
    """A model and its optimizer whose state is about ``size`` bytes."""
    model, optimizer = make_untrained(size)
    take_step(model, optimizer)
    return model, optimizer


def make_small_tensors(number: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module with so many parameters of 1 KiB or less, two in each submodule."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(number // 2)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def make_transformer(layers: int, width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A transformer after a step of AdamW with its usual options."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    take_step(model, optimizer)
    return model, optimizer


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """After it, the optimizer has its state."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def make_untrained(size: int) -> tuple[torch.nn.Module, torch.optim.Adam]:
    """The same as when a script starts: the optimizer has no state yet."""
    torch.manual_seed(0)
    width = round((size / 12 / LAYERS) ** 0.5)
    # drawing random weights would take longer than most of what is measured
    layers = (torch.nn.utils.skip_init(torch.nn.Linear, width, width) for _ in range(LAYERS))
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    return model, torch.optim.Adam(model.parameters(), foreach=False)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    moments = [value for entry in state["optimizer"]["state"].values() for value in entry.values()]
    return [*state["model"].values(), *moments]


class Trainer:
    """Steps of about 10 ms, on as many threads as torch has."""

    def __init__(self, step_s: float = 0.010, waits: bool = False) -> None:
        """``waits``: the training thread sleeps for half of each step, as in a rank that waits for other ranks."""
        self._waits_s, step_s = (step_s / 2, step_s / 2) if waits else (0.0, step_s)
        self._matrix = torch.randn(400, 400) / 20
        self._products = 1
        for _ in range(5):
            self._products = max(1, round(self._products * step_s / (self.seconds_per_step(10) - self._waits_s)))

    def step(self) -> None:
        result = self._matrix
        for _ in range(self._products):
            result = torch.tanh(self._matrix @ result)
        if self._waits_s:
            time.sleep(self._waits_s)

    def seconds_per_step(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - started) / steps


# ---- the savers


class Saver:
    """Saves into files of its own in ``folder``; this one is done when ``begin`` returns."""

    name = ""
    #: Whether training will wait for the save that is begun next.
    urgent = False

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder = folder / self.name.replace(" ", "-")
        self.folder.mkdir(exist_ok=True)  # by each rank of a sharded model
        self.path = self.folder
        self._state: Callable[[], dict[str, Any]] = lambda: state_of(model, optimizer)

    def next_path(self, step: int) -> None:
        """Where to save this time. The last one stays until then, as it must; removing older ones is not timed."""
        for old in set(self.folder.iterdir()) - {self.path}:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        self.path = self.folder / str(step)

    def begin(self) -> None:
        """Saves, perhaps in the background while training continues."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether nothing is running in the background any more."""
        return True

    def end(self) -> None:
        """Waits until what was saved is durable."""

    def close(self) -> None: ...


class CallsAndCopy(Saver):
    """What a saver cannot do without: calls, as tensors may be others than last time, and a copy within memory."""

    name = CALLS_AND_COPY

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        sources = tensors_of(self._state())
        self.flat = torch.empty(sum(tensor.nbytes for tensor in sources), dtype=torch.uint8).fill_(1)
        parts = torch.split(self.flat, [tensor.nbytes for tensor in sources])
        self._copies = [part.view(t.dtype).view(t.shape) for part, t in zip(parts, sources, strict=True)]

    def begin(self) -> None:
        torch._foreach_copy_(self._copies, tensors_of(self._state()))


class EmptyLoop(Saver):
    """Saves nothing. Instead, a process uses ``cpu_s`` seconds of CPU time at the writer's priority."""

    name = EMPTY_LOOP
    cpu_s = 0.0

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        command = [sys.executable, "-c", f"import os\nos.nice({NICENESS})\n{LOOP}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.begin()
        self.end()  # it has started

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%f\n" % self.cpu_s)
        self._process.stdin.flush()
        self._asked = True

    def done(self) -> bool:
        assert self._process.stdout is not None
        if self._asked and select.select([self._process.stdout], [], [], 0)[0]:
            self.end()
        return not self._asked

    def end(self) -> None:
        assert self._process.stdout is not None
        if self._asked:
            self._process.stdout.readline()
            self._asked = False

    def close(self) -> None:
        self._process.communicate()


LOOP = """
import sys, time
for line in sys.stdin:
    started = time.thread_time()
    while time.thread_time() - started < float(line):
        pass
    print(flush=True)
"""


class Raw(CallsAndCopy):
    """As many bytes, written and synced."""

    name = RAW

    def begin(self) -> None:
        data = memoryview(self.flat.numpy().data)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for start in range(0, len(data), 1 << 22):
            os.write(file, data[start : start + (1 << 22)])
        os.fsync(file)
        os.close(file)


class Ours(Saver):
    name = OURS

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        self._directory = RunDirectory(self.folder)
        self._directory.create()
        self._directory.metrics_file.touch()
        attempt = self._directory.create_attempt()
        Checkpoints(self._directory, attempt, Keep()).record_resume(None)
        self._checkpoint_client = CheckpointClient(self._directory, attempt, Keep(last=1), torch.device("cpu"))
        self._checkpoint_client.prepare(self._state())

    def cpu_of_writer(self) -> float:
        """The CPU seconds of all threads of the writer so far, also of those that have ended."""
        assert self._checkpoint_client._writer is not None
        return time.clock_gettime(~self._checkpoint_client._writer.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it

    def next_path(self, step: int) -> None:
        self._step = step
        self.path = self._directory.checkpoints / f"step-{step:012d}.attempt-0.safetensors"

    def begin(self) -> None:
        self._checkpoint_client.save(self._step, self._state(), {}, self.urgent)

    def done(self) -> bool:
        return not self._checkpoint_client.busy or self._checkpoint_client.result(wait=False) is not None

    def end(self) -> None:
        self._checkpoint_client.result(wait=True)

    def close(self) -> None:
        self._checkpoint_client.close()


class TorchSave(Saver):
    name = "torch.save + fsync"

    def begin(self) -> None:
        with open(self.path, "wb") as file:
            torch.save(self._state(), file)
            file.flush()
            os.fsync(file.fileno())


class AsyncThread(Saver):
    name = "async_save, thread"
    options: dict[str, Any] = {}

    def begin(self) -> None:
        self._future: Any = dcp.async_save(self._state(), checkpoint_id=self.path, **self.options)  # type: ignore[attr-defined]

    def done(self) -> bool:
        return bool(self._future.done())

    def end(self) -> None:
        self._future.result()


class AsyncProcess(AsyncThread):
    name = "async_save, process"

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        if len(tensors_of(self._state())) > MOST_DESCRIPTORS:
            raise ValueError("it needs a file descriptor for each tensor")
        shared = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(shared)
        self.options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self._stager}

    def close(self) -> None:
        self._stager.close()


class Lightning(Saver):
    name = "Lightning"

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

        self._io = TorchCheckpointIO()

    def begin(self) -> None:
        self._io.save_checkpoint(self._state(), self.path)

    def end(self) -> None:
        sync(self.folder)


class Accelerate(Saver):
    name = "accelerate"

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True)
        self._accelerator.prepare(model, optimizer)

    def begin(self) -> None:
        self._accelerator.save_state(str(self.path))

    def end(self) -> None:
        sync(self.path)


class Torchsnapshot(Saver):
    """Release 0.1.0 of 2022, the last one, works with torch 2.13. It syncs nothing."""

    name = "torchsnapshot"

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        from torchsnapshot import Snapshot

        self._take: Any = Snapshot.async_take
        self._parts = {"model": model, "optimizer": optimizer}

    def begin(self) -> None:
        self._pending: Any = self._take(str(self.path), self._parts)

    def done(self) -> bool:
        return bool(self._pending.done())

    def end(self) -> None:
        self._pending.wait()
        sync(self.path)


PEERS: list[type[Saver]] = [TorchSave, AsyncThread, AsyncProcess, Lightning, Accelerate, Torchsnapshot]


def sync(folder: Path) -> None:
    """Makes all files of a folder durable."""
    for path in [*folder.rglob("*"), folder]:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


#: Steps of training beside a save, and right before and after it.
LEAST_STEPS = 20


def beside_training(saver: Saver, trainer: Trainer) -> tuple[float, float]:
    """The seconds that a save blocks training, and that training lost by it."""
    saver.urgent = False
    before = trainer.seconds_per_step(LEAST_STEPS)
    steps, started = 0, time.perf_counter()
    saver.begin()
    stall = time.perf_counter() - started
    while steps < LEAST_STEPS or not saver.done():
        trainer.step()
        steps += 1
    seconds = time.perf_counter() - started
    saver.end()
    after = trainer.seconds_per_step(LEAST_STEPS)
    return stall, seconds - steps * (before + after) / 2


def until_durable(saver: Saver) -> float:
    """The seconds until a save is durable while training waits for it."""
    saver.urgent = True
    started = time.perf_counter()
    saver.begin()
    saver.end()
    return time.perf_counter() - started
