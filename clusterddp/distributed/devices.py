"""A rank's devices: their choice, threads that use a GPU beside the training, and memory that a killed process
holds."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from clusterddp.environment import RankEnvironment
from clusterddp.errors import DeviceError
from clusterddp.reporter import in_words, say

#: ``cudaStreamCaptureModeThreadLocal``, of the enumeration in driver_types.h; HIP's has the same value.
_THREAD_LOCAL = 1
_EXCHANGES = ("cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode")
_LAST_ERRORS = ("cudaGetLastError", "hipGetLastError")
#: ``cudaHostRegisterPortable``: pinned for all of a rank's GPUs, not only for the first.
_PORTABLE = 1
_DRIVER = "libcuda.so.1"
_LIBRARY: Any = ctypes.CDLL(None)  # torch loads the runtime of its GPUs with global symbols
TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"
_FEWER = "Request more GPUs, or use fewer ranks per node"


def devices_of(environment: RankEnvironment, asked: str | None, per_rank: int) -> tuple[torch.device, ...]:
    """``choose_devices`` for this process and its visible devices. CUDA_VISIBLE_DEVICES stays as it is, unless it lists
    several MIG devices."""
    named, host = os.environ.get("CUDA_VISIBLE_DEVICES"), socket.gethostname()
    own = None if named is None or asked == "cpu" else own_mig_device(environment, per_rank, named, host)
    if own is not None:
        if _driver_has_started() and environment.local_rank > 0:  # CUDA has chosen the first of the list
            raise DeviceError(
                f"rank {environment.rank} must use the MIG device {own} on node {host}, but the script has used CUDA "
                "before clusterddp.init(), and CUDA then reads CUDA_VISIBLE_DEVICES only once. Call "
                "clusterddp.init() before anything that asks for GPUs, such as torch.cuda.is_available()"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = own
    visible = visible_gpus()
    if own is not None and visible == 1:
        return (torch.device("cuda", 0),)
    return choose_devices(environment, asked, per_rank, visible, host, named)


def choose_devices(
    environment: RankEnvironment,
    asked: str | None,
    per_rank: int,
    visible_gpus: int,
    host: str,
    named: str | None = None,
) -> tuple[torch.device, ...]:
    """The ``per_rank`` devices of a rank. ``asked`` is "cpu", "cuda", "cuda:N" (the first one), or None: a GPU if any
    is visible.

    If Slurm bound each task to its own GPUs, exactly ``per_rank`` are visible, from index 0. Otherwise the local rank
    selects them. On a CPU all are the same device. ``named`` is CUDA_VISIBLE_DEVICES. Raises DeviceError when CUDA is
    requested but absent, or has fewer GPUs than the ranks need.
    """
    if asked is None:
        asked = "cuda" if visible_gpus else "cpu"
    device = torch.device(asked)
    if device.type != "cuda":
        return (device,) * per_rank
    needed, slurm = environment.local_world_size * per_rank, environment.launcher == "slurm"
    if not visible_gpus and named:
        local = environment.launcher == "local" and environment.world_size > environment.local_world_size
        needs = environment.world_size * per_rank
        advice = "Install a CUDA build of torch, check nvidia-smi or rocm-smi there, or use --device cpu"
        raise DeviceError(
            f"device {device} requested, but torch sees none of the GPUs that CUDA_VISIBLE_DEVICES={named} lists on "
            f"node {host}. {f'With --local, the job needs {needs} GPUs on this machine' if local else advice}"
        )
    if not visible_gpus:
        hidden = ", because CUDA_VISIBLE_DEVICES is empty" if named == "" else ""
        raise DeviceError(
            f"device {device} requested, but no GPU is visible on node {host}{hidden}. Request GPUs (--gpus-per-node), "
            "install a CUDA build of torch, or use --device cpu",
            lacks_gpus=True,
        )
    if device.index is not None:
        first = device.index
    elif visible_gpus == per_rank and slurm:
        first = 0
    elif visible_gpus < needed:
        gpus = "1 GPU" if needed == 1 else f"{needed} GPUs"
        found = f"Slurm gave {visible_gpus}" if slurm else f"torch sees {visible_gpus}"
        raise DeviceError(f"the ranks on node {host} need {gpus}, but {found}. {_FEWER}", lacks_gpus=True)
    else:
        first = environment.local_rank * per_rank
    return tuple(torch.device("cuda", index) for index in range(first, first + per_rank))


def own_mig_device(environment: RankEnvironment, per_rank: int, named: str, host: str) -> str | None:
    """The rank's own of the several MIG devices that CUDA_VISIBLE_DEVICES lists. None if it lists anything else.

    CUDA shows a process only the first MIG device of the list, so that all ranks of a node would use that one. Raises
    DeviceError if the node has too few for its ranks.
    """
    devices = [one.strip() for one in named.split(",")]
    if len(devices) < 2 or not all(one.startswith("MIG-") for one in devices):
        return None
    if per_rank > 1:
        raise DeviceError(
            f"gpus_per_rank is {per_rank}, but node {host} has MIG devices, of which a process can use only one. Omit "
            "gpus_per_rank"
        )
    if len(devices) < environment.local_world_size:
        needed = f"the ranks on node {host} need {environment.local_world_size} GPUs"
        few = f"{needed}, but CUDA_VISIBLE_DEVICES lists {len(devices)} MIG devices. {_FEWER}"
        raise DeviceError(few, lacks_gpus=True)
    return devices[environment.local_rank]


#: ``CUDA_ERROR_NOT_INITIALIZED``.
_NOT_INITIALIZED = 3


def _driver_has_started() -> bool:
    """Whether CUDA's driver was initialized in this process. torch knows only its own part of that."""
    try:
        count = ctypes.CDLL(_DRIVER).cuDeviceGetCount
    except (OSError, AttributeError):  # no driver
        return False
    return bool(count(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def visible_gpus() -> int:
    """How many GPUs this process can use. torch before 2.6 also counts those that ROCR_VISIBLE_DEVICES hides. HIP's own
    count does not."""
    if not torch.cuda.is_available():
        return 0
    if torch.version.hip and "ROCR_VISIBLE_DEVICES" in os.environ:
        return int(torch._C._cuda_getDeviceCount())
    return torch.cuda.device_count()


def gpu_identity(device: torch.device) -> str:
    """Equal for two ranks, of any nodes, if they see the same GPU: its UUID, or its PCI address and host.

    torch 2.4 has no UUID, and ROCm gives zeros for AMD GPUs without one. Raises DeviceError if CUDA gives neither.
    """
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return uuid if uuid.strip("0-\0") else pci_address(device)


def pci_function(device: torch.device) -> str:
    """The name of a GPU in /sys/bus/pci/devices, such as ``0000:3b:00.0``. Raises DeviceError if CUDA does not give
    it."""
    known: Any = torch.cuda.get_device_properties(device)
    if hasattr(known, "pci_bus_id"):  # not in older releases of torch
        return f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    return pci_address(device).partition(" ")[0].lower()


def pci_address(device: torch.device) -> str:
    """The PCI address and host of a GPU, which the MIG devices of one GPU share. Raises DeviceError if CUDA does not
    give it."""
    platform = "hip" if torch.version.hip else "cuda"
    library = ctypes.CDLL(str(TORCH_LIBRARIES / f"libc10_{platform}.so"))  # linked against the runtime in use
    address = ctypes.create_string_buffer(32)
    name = f"{platform}DeviceGetPCIBusId"
    if error := getattr(library, name)(address, len(address), device.index):
        raise DeviceError(f"could not identify GPU {device}: {name} returned error {error}")
    return f"{address.value.decode()} on {socket.gethostname()}"


def device_thread(
    device: torch.device | None, target: Callable[..., None], *, name: str, args: tuple[Any, ...] = ()
) -> threading.Thread:
    """A daemon thread, not started yet, that may use events and pinned memory of the device.

    A thread begins on device 0, and its first call of CUDA would open a context there, which takes half a gigabyte of
    another rank's GPU. While a different thread captures a CUDA graph in the usual mode, "global", such calls are
    errors that end the capture, unless their thread has set the mode "thread local".
    """

    def run() -> None:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
            mode = ctypes.c_int(_THREAD_LOCAL)
            for exchange in _EXCHANGES:
                if hasattr(_LIBRARY, exchange):
                    getattr(_LIBRARY, exchange)(ctypes.byref(mode))
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


#: How many steps the host may be ahead of its GPUs. With 2, the GPU has a whole step queued whenever the host begins
#: another one, so that it idles only where the host takes longer than a step. A stop waits for no more than these steps
#: before the state is copied. CUDA itself lets the host queue about a thousand kernels, which are as many steps if each
#: is one CUDA graph.
MOST_AHEAD = 2


class Lead:
    """Keeps the host at most MOST_AHEAD steps ahead of the GPUs."""

    def __init__(self) -> None:
        self._steps: deque[dict[torch.cuda.Stream, torch.cuda.Event]] = deque({} for _ in range(MOST_AHEAD + 1))

    def limit(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """Call it between two steps, with the streams of the steps' work. Waits for the step MOST_AHEAD before."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._steps.rotate(-1)
        events = self._steps[-1]
        for stream in streams:
            if stream not in events:
                events[stream] = blocking_event()
            events[stream].record(stream)
        for event in self._steps[0].values():
            event.synchronize()


def blocking_event() -> torch.cuda.Event:
    """An event with a time, on which a waiting thread sleeps. With other events, it keeps a core busy."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def pin_memory(address: int, size: int) -> int:
    """Pins memory of this process. Returns CUDA's error code, which is 0 if the memory is pinned now."""
    return _cleared(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))  # type: ignore[no-untyped-call]


def unpin_memory(address: int) -> None:
    """The inverse of ``pin_memory``."""
    _cleared(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


def _cleared(result: Any) -> int:
    """The error code of a call of CUDA's runtime. CUDA also keeps it for this thread, and torch would raise it after
    the next kernel, as if that had failed."""
    if code := int(result):
        for last_error in _LAST_ERRORS:
            if hasattr(_LIBRARY, last_error):
                getattr(_LIBRARY, last_error)()
    return code


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in pinned memory, from which and to which copies need no waiting, or as it is if CUDA refuses that."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        _warn_unpinned(in_words(error))
        return tensor


@functools.cache  # once
def _warn_unpinned(why: str) -> None:
    say(f"could not pin memory ({why}). Copies to and from the GPU hold up the training")


def live_graphs() -> list[torch.cuda.CUDAGraph]:
    """The CUDA graphs of this process, torch.compile's among them."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [found for found in gc.get_objects() if issubclass(type(found), torch.cuda.CUDAGraph)]


#: The driver frees the memory of a killed process within seconds, or after its last kernel.
PATIENCE_S = 60.0
#: Seconds between two looks at the free memory.
MEMORY_CHECK_S = 0.5
GIB = 2**30


def wait_until_free(devices: Sequence[torch.device], wanted: int, patience_s: float = PATIENCE_S) -> bool:
    """Waits until each device has ``wanted`` free bytes, as the attempt before used. False after ``patience_s``.

    Does not wait for more than a device has: the attempt before ran on larger ones.
    """
    if any(wanted > torch.cuda.mem_get_info(device)[1] for device in devices):
        return True
    deadline, said = time.monotonic() + patience_s, False
    while (least := min((torch.cuda.mem_get_info(device)[0], str(device)) for device in devices))[0] < wanted:
        free = f"{least[0] / GIB:.2f} GiB are free on {least[1]}, but the previous attempt used {wanted / GIB:.2f} GiB"
        if time.monotonic() > deadline:
            say(f"{free}. Continuing anyway after {patience_s:.0f} s. Find other processes with nvidia-smi or rocm-smi")
            return False
        if not said:
            say(f"{free}. Waiting")
            said = True
        time.sleep(MEMORY_CHECK_S)
    return True


_FUNCTIONS = (torch.sqrt, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sin, torch.cos, torch.tanh, torch.erf)


def settle_vector_functions() -> None:
    """Calls each function once, in this thread.

    MKL (2024.2, in torch 2.13) stores the number of the CPU's type in its first call, and then replaces it by its own
    numbering, without a lock. A thread that reads the number in between gets a wrong row of the table of kernels, and
    its part of the first result has errors of up to 3e-4. AdamW's first step after
    a start or a resume then differed from that of other ranks.
    """
    for dtype in (torch.float32, torch.float64):
        values = torch.full((8,), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(values)
