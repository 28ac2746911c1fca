"""Faults of the stand-in devices on request, and what they count. A test script may ``import standin_watch``.

**Faults.** STANDIN_CUDA_FAULTS is a list in JSON, or the path of a file with it. A fault is an object with a ``kind``:

- ``assert``, ``illegal``, ``launch``, ``ecc``, ``unknown``: a sticky error. The kernel itself returns; from then on
  every call of the process that needs the device raises torch.AcceleratorError with the text of CUDA.
- ``oom``: the kernel, or the allocation, raises torch.OutOfMemoryError, once.
- ``hang``: a kernel that never ends. The host goes on until it waits for the device: a value, a copy to the host, a
  synchronization. Queries of events and streams stay false. Collectives queued behind it never complete.

and when it happens, all of which have to be so:

- ``rank``, ``attempt``: in the process with this RANK and CLUSTERDDP_ATTEMPT.
- ``op``: at a kernel whose name contains it (``aten::convolution``, ``nccl::allreduce``, ``allocate``).
- ``inside``: while a Python function of this name, or one in a file whose name ends so, is on the thread's stack.
- ``after``: not at the first so many kernels of which the above is true.
- ``when``: once this file exists.
- ``once``: only if this file does not exist; it is written when the fault happens.

and what else happens: ``lose``: the device is missing in processes that start later (needs STANDIN_CUDA_STATE);
``watchdog``: the process is aborted with the message of NCCL's watchdog.

A script needs no list: ``standin_watch.fail("assert")`` has its current device fail now.

**A machine's devices.** STANDIN_CUDA_STATE names a folder that the processes of a machine share, by host name. With it,
free memory is what all of them leave, and ``lose_device(folder, device)`` takes a device away from processes that start
later. With STANDIN_CUDA_HELD_S, the memory of a process that ended without its exit handlers stays in use for so many
seconds after another process first missed it.

**Hosts that do not wait for collectives.** A collective of the backend nccl is complete when the host continues. With
STANDIN_CUDA_PATIENCE_S, a host that waited so long for one continues without it, as it would with NCCL, and waits for
ever where it next needs the device.

**Missing synchronization.** Each kernel is checked against the streams and events that order it (order.h). One that
uses memory which another stream may still use raises RuntimeError: "stand-in: stream 0 of device 0 reads memory that
stream 1 of device 0 writes, and did not wait for it". If memory is freed while a stream other than its own may use it,
and record_stream was not called, the next kernel raises that. Freed memory is filled with 0xFF (NaN, -1) when its own
stream gets there, and handed out again at once.

**Counters.** ``counts()`` has the devices on which this process has a context, and where it opened each; how often the
host waited for a device, also for what was complete already, except for an event; and the races. With ``tracing()``
there is a stack for each wait. STANDIN_CUDA_COUNTS names a folder in which each process writes them at its exit, with
the stacks of all waits: ``rank-0.<pid>.json``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _standin

_STICKY = {
    "assert": (710, "cudaErrorAssert", "device-side assert triggered"),
    "illegal": (700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    "launch": (719, "cudaErrorLaunchFailure", "unspecified launch failure"),
    "ecc": (214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
    "unknown": (999, "cudaErrorUnknown", "unknown error"),
}
#: The physical numbers of this process's devices.
_visible: list[int] = []
_faults: list[dict[str, Any]] = []
_contexts: dict[int, str] = {}
_waits: list[dict[str, Any]] = []
_races: list[str] = []


def text(kind: str) -> str:
    """What torch says after this error."""
    _, name, words = _STICKY[kind]
    return (
        f"CUDA error: {words}\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


def fail(kind: str, device: int | None = None, *, lose: bool = False, watchdog: bool = False) -> str | None:
    """Makes a device of this process fail; the current one by default. Returns "oom" for that kind, which the caller
    of ``_standin`` raises."""
    device = _standin.device() if device is None else device
    if lose:
        lose_device(os.environ["STANDIN_CUDA_STATE"], _visible[device])
    if watchdog:
        _abort(kind)
    if kind == "oom":
        return kind
    if kind == "hang":
        _standin.hang(device)
    else:
        _standin.break_device(device, _STICKY[kind][0], text(kind))
    return None


def _abort(kind: str) -> None:
    rank = os.environ.get("RANK", "0")
    says = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: "
    lines = f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {says}{text(kind)}"
    sys.stderr.write(lines)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGABRT)


def folder_of_host(state: str) -> Path:
    """Where the processes of this machine keep what they share."""
    folder = Path(state, socket.gethostname())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def lose_device(state: str, device: int) -> None:
    """Takes a device, by its physical number, away from processes of this machine that start later."""
    folder_of_host(state).joinpath(f"lost-{device}").touch()


def present(devices: int) -> list[int]:
    """The physical numbers of the machine's devices that are not lost."""
    state = os.environ.get("STANDIN_CUDA_STATE")
    folder = folder_of_host(state) if state else None
    return [one for one in range(devices) if folder is None or not (folder / f"lost-{one}").exists()]


def start(visible: list[int]) -> None:
    """Called once, when a process begins to use the devices."""
    _visible[:] = visible
    planned = os.environ.get("STANDIN_CUDA_FAULTS", "")
    if planned:
        _faults.extend(json.loads(planned if planned.lstrip().startswith("[") else Path(planned).read_text()))
        for fault in _faults:
            unknown = fault.keys() - {*"kind rank attempt op inside after when once lose watchdog".split()}
            if unknown or fault["kind"] not in {*_STICKY, "oom", "hang"}:
                raise ValueError(f"STANDIN_CUDA_FAULTS: {fault} has an unknown kind or key")
    _standin.observe(_observed, bool(_faults))
    if state := os.environ.get("STANDIN_CUDA_STATE"):
        held_s = float(os.environ.get("STANDIN_CUDA_HELD_S") or 0)
        for index, number in enumerate(visible):
            _standin.share(index, str(folder_of_host(state) / f"memory-{number}"), held_s)
    atexit.register(_stop)
    # A task that ends later frees its tensors with Python's lock, which ends its thread, and so the process.
    atexit.register(_standin.finish)
    if "STANDIN_CUDA_COUNTS" in os.environ:
        _standin.trace_waits(True)


def counts() -> dict[str, Any]:
    """``contexts``: for each device with one, the thread and the frames that opened it. ``waits``: their number.
    ``races``: what is wrong with each, and where."""
    return {"contexts": dict(_contexts), "waits": _standin.waits(), "races": list(_races)}


@contextlib.contextmanager
def tracing() -> Iterator[list[dict[str, Any]]]:
    """Fills the list with the waits of all threads: ``name``, ``device``, ``thread``, ``stack`` (innermost first)."""
    first = len(_waits)
    found: list[dict[str, Any]] = []
    _standin.trace_waits(True)
    try:
        yield found
    finally:
        _standin.trace_waits("STANDIN_CUDA_COUNTS" in os.environ)
        found.extend(_waits[first:])


def _stop() -> None:
    if folder := os.environ.get("STANDIN_CUDA_COUNTS"):
        written = {**counts(), "visible": _visible, "traced": _waits}
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"rank-{os.environ.get('RANK', 'none')}.{os.getpid()}.json").write_text(json.dumps(written))
    _standin.observe(None, False)
    _standin.unshare()


def _stack() -> list[str]:
    """``file:line function`` of the thread's frames, innermost first, without those of this file."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found


def _observed(what: str, name: str, device: int) -> str | None:
    if what == "kernel":
        for fault in _faults:
            if not fault.get("over") and _due(fault, name):
                fault["over"] = True
                return fail(fault["kind"], device, lose=fault.get("lose", False), watchdog=fault.get("watchdog", False))
    elif what == "race":
        _races.append(f"{name} {_stack()}")
    elif what == "context":
        _contexts[device] = f"{threading.current_thread().name}: {_stack()}"
    else:
        _waits.append({"name": name, "device": device, "thread": threading.current_thread().name, "stack": _stack()})
    return None


def _due(fault: dict[str, Any], name: str) -> bool:
    for key, variable in (("rank", "RANK"), ("attempt", "CLUSTERDDP_ATTEMPT")):
        if key in fault and str(fault[key]) != os.environ.get(variable):
            return False
    if fault.get("op", "") not in name or ("when" in fault and not Path(fault["when"]).exists()):
        return False
    if "inside" in fault and not any(_is_in(frame, fault["inside"]) for frame in _stack()):
        return False
    fault["seen"] = fault.get("seen", 0) + 1
    if fault["seen"] <= fault.get("after", 0):
        return False
    if "once" in fault:
        try:
            os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            fault["over"] = True
            return False
    return True


def _is_in(frame: str, name: str) -> bool:
    place, _, function = frame.rpartition(" ")
    return function == name or place.rpartition(":")[0].endswith(name)
