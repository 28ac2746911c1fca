"""The stand-in devices themselves: what tests on them rely on. Each test is one process with several devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.conftest import GPUs


def start(check: Callable[[], None], **variables: str) -> subprocess.Popen[str]:
    """Runs a function of this file in a process of its own."""
    code = f"from {check.__module__} import {check.__name__} as check; check()"
    environ = {**os.environ, **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ)


def run(check: Callable[[], None], **variables: str) -> str:
    """Runs it to its end, and returns what it printed."""
    process = start(check, **variables)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def faults() -> None:
    import threading

    import standin_watch
    import torch

    on = [torch.ones(4, device=f"cuda:{index}") for index in range(6)]

    def forward() -> object:
        return on[0].mul(2)

    on[0].mul(2)
    forward()  # after: 1
    forward()
    for call in (forward, lambda: on[0].sum().item(), lambda: torch.cuda.synchronize(0), torch.cuda.Event().record):
        said = error_of(call)
        assert said.startswith("AcceleratorError: CUDA error: device-side assert triggered\nSearch for"), said
        assert "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n" in said
    assert Path(os.environ["ONCE"]).exists()
    del on[0]  # freeing memory raises nothing
    standin_watch.fail("illegal", 1)
    assert "an illegal memory access was encountered" in error_of(lambda: torch.ones(4, device="cuda:1"))
    said = error_of(lambda: on[1].view(2, 2) @ on[1].view(2, 2))
    assert said.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total"), said
    on[1].view(2, 2) @ on[1].view(2, 2)  # once
    assert "Tried to allocate 8.00 GiB" in error_of(lambda: torch.empty(2 << 30, device="cuda:2"))

    hung = on[2]
    torch.cuda.set_device(3)  # the query of an event needs the current device
    standin_watch.fail("hang", 3)
    later = hung.mul(2)
    event = torch.cuda.current_stream(3).record_event()
    assert not event.query() and not torch.cuda.current_stream(3).query()
    side = torch.cuda.Stream(3)
    assert side.query()
    side.wait_event(event)
    assert not side.query()
    waiting = threading.Thread(target=later.sum().item, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    on[3].mul(2).sum().item()  # other devices compute

    standin_watch.fail("ecc", 4, lose=True)
    assert "uncorrectable ECC error encountered" in error_of(on[3].sum)
    sys.stdout.flush()
    standin_watch.fail("launch", 5, watchdog=True)


def test_devices_fail_as_asked(gpus: GPUs, tmp_path: Path) -> None:
    """Sticky errors, out of memory, a kernel that never ends, NCCL's watchdog, a device that is lost afterwards."""
    once, state = tmp_path / "once", tmp_path / "state"
    planned: list[dict[str, Any]] = [
        {"kind": "assert", "rank": 3, "attempt": 0, "op": "aten::mul", "inside": "forward", "after": 1},
        {"kind": "oom", "op": "aten::mm"},
        {"kind": "illegal", "rank": 4},
    ]
    planned[0]["once"] = str(once)
    gpus(6, faults=json.dumps(planned), state=str(state))
    process = start(faults, RANK="3", CLUSTERDDP_ATTEMPT="0", ONCE=str(once))
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGABRT, err
    assert err.startswith("terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0")
    assert "unspecified launch failure" in err
    assert "5 RuntimeError: CUDA error: invalid device ordinal" in run(lost)


def lost() -> None:
    import torch

    print(torch.cuda.device_count(), error_of(lambda: torch.ones(1, device="cuda:5")))


def holds() -> None:
    import torch

    kept = torch.empty(3 << 28, device="cuda:1")
    print(torch.cuda.mem_get_info(1)[0] >> 20, len(kept), flush=True)
    sys.stdin.readline()


def looks() -> None:
    import torch

    for _ in range(int(os.environ["LOOKS"])):
        print(torch.cuda.mem_get_info(1)[0] >> 20, flush=True)
        if os.environ["LOOKS"] == "1":
            continue
        while torch.cuda.mem_get_info(1)[0] >> 20 == 1024:
            pass


def test_processes_share_the_memory_of_a_device(gpus: GPUs, tmp_path: Path) -> None:
    """What another process uses is not free, nor, for a while, what a killed one used."""
    gpus(2, state=str(tmp_path), held_s="0.5")
    holder = start(holds)
    assert holder.stdout is not None
    assert holder.stdout.readline().split()[0] == "1024"
    assert run(looks, LOOKS="1") == "1024\n"
    holder.kill()
    holder.communicate()
    assert run(looks, LOOKS="2") == "1024\n4096\n"
