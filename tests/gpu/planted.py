"""Faults put into the code for GPUs on purpose, and the tests on stand-in devices that find them.

``python -m tests.gpu.planted`` plants each in a copy of this checkout, runs its tests there, which must pass without a
fault, and writes RESULTS.json and RESULTS.md here. ``python -m tests.gpu.planted 3 7`` runs some of them; the others
keep their last result.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("RESULTS.json")
#: Of these, the tests have to find so many.
LEAST = 17
ASYNCHRONY, EXACT = "test_asynchrony.py", "test_exact_resume.py"
CHECKPOINTS, LOADERS, WRAPPING = "test_checkpoints.py", "test_loaders.py", "test_wrapping.py"
GRAPHS, SHARDED = "test_graphs.py", "test_sharded.py"


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
        "data/loader.py",
        "tensor.record_stream(current)",
        "tensor.requires_grad_(False)",
    ),
    Fault(
        "the step does not wait for the copies of its batch",
        "data/loader.py",
        "current.wait_event(copying.done)",
        "current.query()",
    ),
    Fault(
        "the event after a batch's copies is on another stream",
        "data/loader.py",
        "done.record(self._stream)",
        "done.record(torch.cuda.default_stream(self._device))",
    ),
    Fault(
        "the event is recorded before a batch's copies",
        "data/loader.py",
        "moved = mapped(batch, copied)\n",
        "early = self._stream.record_event()\n            moved = mapped(batch, copied)\n            "
        "return Copying(moved, tensors, early)\n",
    ),
    Fault(
        "batches are copied to device 0 on every rank",
        "data/loader.py",
        "tensor.to(self._device, non_blocking=True)",
        'tensor.to("cuda:0", non_blocking=True)',
    ),
    Fault(
        "a tensor on a device is pinned",
        "data/loader.py",
        "pinned(tensor) if _is_on_host(tensor) else tensor",
        "tensor.pin_memory()",
        LOADERS,
    ),
    Fault(
        "the writer gets the snapshot before the copies are complete",
        "checkpoint/client.py",
        "copied.synchronize()",
        "copied.query()",
    ),
    Fault(
        "the event after the snapshot's copies is on another stream",
        "checkpoint/client.py",
        "(event, stream.record_event(blocking_event()))",
        "(event, torch.cuda.Stream(stream.device).record_event(blocking_event()))",
    ),
    Fault(
        "the snapshot is copied on a stream that does not wait for the step",
        "checkpoint/client.py",
        "with torch.no_grad():\n            torch._foreach_copy_(",
        "with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(self._device) if on_gpus else None):\n"
        "            torch._foreach_copy_(",
    ),
    Fault(
        "the snapshot's memory is pinned for one device only",
        "distributed/devices.py",
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
        "training/log_reduction.py",
        'device_thread(device, self._run, name="log")',
        'threading.Thread(target=self._run, name="log", daemon=True)',
    ),
    Fault(
        "the threads beside the training one stay on device 0",
        "distributed/devices.py",
        "torch.cuda.set_device(device)",
        "torch.cuda.is_available()",
    ),
    Fault(
        "a logged number is read without waiting for its copy",
        "training/logged_values.py",
        "self._event.synchronize()\n        number",
        "self._event.query()\n        number",
    ),
    Fault(
        "the training thread waits for logged numbers",
        "training/logged_values.py",
        "return self._event.query()",
        "return True",
    ),
    Fault(
        "a logged number is copied with the host waiting",
        "training/logged_values.py",
        "slot.copy_(tensor.detach().reshape(()), non_blocking=True)",
        "slot.copy_(tensor.detach().reshape(()))",
    ),
    Fault(
        "the pinned memory of a logged number is used again too early",
        "training/logged_values.py",
        "slot = free.pop()",
        "slot = free[-1]",
    ),
    Fault(
        "the marks of step times are recorded on device 0",
        "training/step_timing.py",
        "self._stream = torch.cuda.current_stream(self._device)",
        "self._stream = torch.cuda.current_stream(0)",
    ),
    Fault(
        "only device 0's generator is seeded",
        "data/randomness.py",
        "return torch.cuda.default_generators if torch.cuda.is_initialized() else ()",
        "return torch.cuda.default_generators[:1] if torch.cuda.is_initialized() else ()",
        EXACT,
    ),
    Fault(
        "a replay of an optimizer's step does not count",
        "distributed/torch_patches.py",
        "for optimizer in _optimizers_in.get(graph, ()):",
        "for optimizer in ():",
        GRAPHS,
    ),
    Fault(
        "the host does not wait for a device that is behind",
        "distributed/devices.py",
        "for event in self._steps[0].values():",
        "for event in ():",
    ),
    Fault(
        "restored tensors stay on the host",
        "checkpoint/state_copies.py",
        "device = devices.get(name) or _saved_device(tensor)",
        "device = tensor.device",
        CHECKPOINTS,
    ),
    Fault(
        "the snapshot of shards is copied on a stream that does not wait for the step",
        "checkpoint/client.py",
        "with torch.no_grad():\n            torch._foreach_copy_(",
        "with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(self._device) if on_gpus else None):\n"
        "            torch._foreach_copy_(",
        SHARDED,
    ),
    Fault(
        "the writer gets the snapshot of shards before the copies are complete",
        "checkpoint/client.py",
        "copied.synchronize()",
        "copied.query()",
        SHARDED,
    ),
]


def check(fault: Fault) -> None:
    """Ends with an error if the code that the fault changes is not there."""
    count = (REPOSITORY / "clusterddp" / fault.file).read_text().count(fault.old)
    if count != 1:
        raise SystemExit(f"clusterddp/{fault.file} has this {count} times; expected once:\n{fault.old}")


def tested(file: str, copy: Path) -> subprocess.CompletedProcess[str]:
    """pytest on a file of tests/gpu in the copy, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600, check=False)


def check_without_fault(file: str, copy: Path) -> None:
    """Ends with an error if the tests fail already, because they would then seem to find every fault."""
    done = tested(file, copy)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}{done.stderr}\ntests/gpu/{file} failed without a fault")


def planted(fault: Fault, copy: Path) -> str:
    """The test that found it, and how; empty if none did."""
    file = copy / "clusterddp" / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.old, fault.new))
    try:
        done = tested(fault.test, copy)
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
    if not found or found[0] == "AssertionError":
        found = re.findall(r"^>\s+(.*)", output, re.MULTILINE) or ["it failed"]
    return re.sub(r"\s+", " ", found[0])[:140]


def main() -> None:
    """Plants the faults that are named by number, or all."""
    chosen = [int(number) for number in sys.argv[1:]] or list(range(1, len(FAULTS) + 1))
    for fault in FAULTS:
        check(fault)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        (REPOSITORY / "build").mkdir(exist_ok=True)  # with the compiled stand-ins; a new checkout has none
        (copy / "build").symlink_to(REPOSITORY / "build")
        for file in dict.fromkeys(FAULTS[number - 1].test for number in chosen):
            check_without_fault(file, copy)
        for number in chosen:
            fault, began = FAULTS[number - 1], time.monotonic()
            results[fault.what] = found = planted(fault, copy)
            print(f"{number}. {fault.what}: {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
    results = {fault.what: results[fault.what] for fault in FAULTS if fault.what in results}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(results))
    count = sum(map(bool, results.values()))
    print(f"{count} of {len(FAULTS)} found")
    sys.exit(count < LEAST)


def page(results: Mapping[str, str]) -> str:
    """RESULTS.md."""
    import torch

    count = sum(map(bool, results.values()))
    lines = [
        "# Faults put into the code for GPUs on purpose",
        "",
        f"`make test-gpu-faults` plants {len(FAULTS)} faults, one after another, in a copy of the source and runs the "
        f"tests on stand-in devices there. The tests found {count} of {len(results)}, with torch {torch.__version__}.",
        "",
        "| | planted | in clusterddp/ | found by, in tests/gpu/ | how |",
        "|---|---|---|---|---|",
    ]
    for number, fault in enumerate(FAULTS, 1):
        test, _, how = results.get(fault.what, "not run").partition(": ")
        cells = (str(number), fault.what, fault.file, f"`{test}`" if test else "**nothing**", how.replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
