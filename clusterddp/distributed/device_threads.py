"""Threads beside the one that trains, which may ask or wait for a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

#: ``cudaStreamCaptureModeThreadLocal``, of the enumeration in driver_types.h; HIP's has the same value.
_THREAD_LOCAL = 1
_EXCHANGES = ("cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode")
_LIBRARY: Any = ctypes.CDLL(None)  # torch loads the runtime of its GPUs with global symbols


def device_thread(
    device: torch.device | None, target: Callable[..., None], *, name: str, args: tuple[Any, ...] = ()
) -> threading.Thread:
    """A daemon thread, not started yet, that may use events and pinned memory of the device.

    A thread begins on device 0, and its first call of CUDA would open a context there: half a gigabyte of another
    rank's GPU. While another thread captures a CUDA graph in the usual mode, "global", such calls are errors that end
    the capture, unless their own thread says that only its own captures concern it.
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
