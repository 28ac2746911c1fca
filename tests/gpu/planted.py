"""Faults put into the code for GPUs on purpose, and the tests on stand-in devices that find them.

``python -m tests.gpu.planted`` plants each in a copy of this checkout, runs its tests there, and writes the table of
docs/measurements/gpu-faults.md; ``python -m tests.gpu.planted 3 7`` runs and prints some of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "measurements" / "gpu-faults.md"
#: Of these, the tests have to find so many.
LEAST = 17
ASYNCHRONY, EXACT = "test_asynchrony.py", "test_exact_resume.py"
CHECKPOINTS, LOADERS, WRAPPING = "test_checkpoints.py", "test_loaders.py", "test_wrapping.py"


@dataclass(frozen=True)
class Fault:
    """``old`` occurs once in the file below clusterddp/, and is replaced by ``new``. ``test``: of tests/gpu."""

    what: str
    file: str
    old: str
    new: str
    test: str = ASYNCHRONY


FAULTS = [
    Fault(
        "a batch's memory is not recorded on the stream that reads it",
        "data/device.py",
        "tensor.record_stream(current)",
        "tensor.requires_grad_(False)",
    ),
    Fault(
        "the step does not wait for the copies of its batch",
        "data/device.py",
        "current.wait_event(copying.done)",
        "current.query()",
    ),
    Fault(
        "the event after a batch's copies is on another stream",
        "data/device.py",
        "done.record(self._stream)",
        "done.record(torch.cuda.default_stream(self._device))",
    ),
    Fault(
        "the event is recorded before a batch's copies",
        "data/device.py",
        "moved = mapped(batch, copied)\n",
        "early = self._stream.record_event()\n            moved = mapped(batch, copied)\n            "
        "return Copying(moved, tensors, early)\n",
    ),
    Fault(
        "batches are copied to device 0 on every rank",
        "data/device.py",
        "tensor.to(self._device, non_blocking=True)",
        'tensor.to("cuda:0", non_blocking=True)',
    ),
    Fault(
        "a tensor on a device is pinned",
        "data/device.py",
        "tensor.pin_memory() if _is_on_host(tensor) else tensor",
        "tensor.pin_memory()",
        LOADERS,
    ),
    Fault(
        "the writer gets the snapshot before the copies are complete",
        "checkpoint/snapshot.py",
        "copied.synchronize()",
        "copied.query()",
    ),
    Fault(
        "the event after the snapshot's copies is on another stream",
        "checkpoint/snapshot.py",
        "torch.cuda.current_stream(device).record_event(",
        "torch.cuda.Stream(device).record_event(",
    ),
    Fault(
        "the snapshot is copied on a stream that does not wait for the step",
        "checkpoint/snapshot.py",
        "with torch.no_grad():\n            torch._foreach_copy_(",
        "with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(self._device) if on_gpus else None):\n"
        "            torch._foreach_copy_(",
    ),
    Fault(
        "the snapshot's memory is pinned for one device only",
        "checkpoint/snapshot.py",
        "size, _PORTABLE)",
        "size, 0)",
        CHECKPOINTS,
    ),
    Fault(
        "the thread that waits for the snapshot stays on device 0",
        "checkpoint/client.py",
        'device_thread(device, self._send, name="snapshot")',
        'threading.Thread(target=self._send, name="snapshot", daemon=True)',
        CHECKPOINTS,
    ),
    Fault(
        "the thread that sends logged values stays on device 0",
        "training/log/reduction.py",
        'device_thread(device, self._run, name="log")',
        'threading.Thread(target=self._run, name="log", daemon=True)',
    ),
    Fault(
        "the threads beside the training one stay on device 0",
        "distributed/device_threads.py",
        "torch.cuda.set_device(device)",
        "torch.cuda.is_available()",
    ),
    Fault(
        "a logged number is read without waiting for its copy",
        "training/log/values.py",
        "self._event.synchronize()\n        number",
        "self._event.query()\n        number",
    ),
    Fault(
        "the training thread waits for logged numbers",
        "training/log/values.py",
        "return self._event.query()",
        "return True",
    ),
    Fault(
        "a logged number is copied with the host waiting",
        "training/log/values.py",
        "slot.copy_(tensor.detach().reshape(()), non_blocking=True)",
        "slot.copy_(tensor.detach().reshape(()))",
    ),
    Fault(
        "the pinned memory of a logged number is used again too early",
        "training/log/values.py",
        "slot = free.pop()",
        "slot = free[-1]",
    ),
    Fault(
        "an image is written before its copy is complete",
        "training/log/media.py",
        "return Medium(medium.kind, medium.name, copy, medium.channels_first, event)",
        "return Medium(medium.kind, medium.name, copy, medium.channels_first)",
    ),
    Fault(
        "the marks of step times are recorded on device 0",
        "training/timing.py",
        "event.record(torch.cuda.current_stream(self._device))",
        "event.record(torch.cuda.current_stream(0))",
    ),
    Fault(
        "only device 0's generator is seeded",
        "data/randomness.py",
        "torch.cuda.default_generators[device.index or 0].manual_seed(seed)",
        "torch.cuda.default_generators[0].manual_seed(seed)",
        LOADERS,
    ),
]


def planted(fault: Fault, copy: Path) -> str:
    """The name of the test that found it, and how; empty if none did."""
    file = copy / "clusterddp" / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} times, instead of once:\n{fault.old}")
    file.write_text(text.replace(fault.old, fault.new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/gpu/{fault.test}"]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600, check=False)
    finally:
        file.write_text(text)
    if done.returncode == 0:
        return ""
    test = re.search(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    if test is None:
        raise SystemExit(done.stdout + done.stderr)
    return f"{fault.test}::{test[1]}: {symptom(done.stdout)}"


def symptom(output: str) -> str:
    """How a test failed, in a few words: the stand-in's own, an error's, or what the test compared."""
    lines = [line.removeprefix("E").strip() for line in output.splitlines() if line.startswith("E")]
    lines = [line for line in lines if "Connection closed by peer" not in line]  # the other rank has failed
    patterns = (
        r"stand-in: (.*)",
        r"(?:RuntimeError|TypeError|NameError|torch\.\w+Error): (.*)",
        r"(assert .*)",
        r"AssertionError: (.+)",
        r"(.+)",
    )
    found = [match[1] for pattern in patterns for line in lines if (match := re.search(pattern, line))]
    return re.sub(r"\s+", " ", found[0])[:140] if found else "it failed"


def main() -> None:
    """Plants the faults that are named by number, or all."""
    chosen = [int(number) for number in sys.argv[1:]] or list(range(1, len(FAULTS) + 1))
    rows = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        (copy / "build").symlink_to(REPOSITORY / "build")
        for number in chosen:
            fault, began = FAULTS[number - 1], time.monotonic()
            found = planted(fault, copy)
            rows.append((number, fault, found))
            print(f"{number}. {fault.what}: {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
    count = sum(bool(found) for _, _, found in rows)
    print(f"{count} of {len(rows)} found")
    if len(rows) == len(FAULTS):
        PAGE.write_text(page(rows, count))
        sys.exit(count < LEAST)


def page(rows: list[tuple[int, Fault, str]], count: int) -> str:
    """The measurement's page."""
    import torch

    lines = [
        "# Faults put into the code for GPUs on purpose",
        "",
        f"`make test-gpu-faults` plants {len(rows)} faults, one after another, in a copy of the source, and runs the "
        f"tests on stand-in devices there (tests/gpu/planted.py). They found {count} of them, with torch "
        f"{torch.__version__} on {os.cpu_count()} CPU cores. The stand-in cannot show races between kernels of one "
        "step, nor what only a GPU's own timing brings about.",
        "",
        "| | planted | in | found by | how |",
        "|---|---|---|---|---|",
    ]
    for number, fault, found in rows:
        test, _, how = found.partition(": ")
        cell = f"`{test}`" if found else "**not found**"
        lines.append(f"| {number} | {fault.what} | clusterddp/{fault.file} | {cell} | {how.replace('|', '/')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
