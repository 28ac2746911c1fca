"""A stand-in for nvidia-ml-py: what its functions return is in the JSON file that NVML_STATE names.

``{"gpus": [{"uuid": "GPU-a", "pci": "0000:3B:00.0", "busy": 70, ...}], "xids": [[0, 79]]}``. A GPU with
``"lost": true`` raises NVML_ERROR_GPU_IS_LOST.

tests/unit/test_gpus.py compares the names with those of the real package.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 6, 10, 15
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 1, 0, 0, 1
nvmlEventTypeXidCriticalError = 8


class NVMLError(Exception):
    def __init__(self, value):
        self.value = value


_files = []


def _state():
    return json.loads(Path(_files[-1]).read_text())


def _figure(name, default=None):
    def get(handle, *_):
        gpu = _state()["gpus"][handle - 1]
        if gpu.get("lost"):
            raise NVMLError(NVML_ERROR_GPU_IS_LOST)
        if gpu.get(name, default) is None:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return gpu.get(name, default)

    return get


def nvmlInit():
    if "NVML_STATE" not in os.environ:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    _files.append(os.environ["NVML_STATE"])


def nvmlDeviceGetCount():
    return len(_state()["gpus"])


def _handle(name):
    def get(value):
        for number, gpu in enumerate(_state()["gpus"]):
            if (number if name == "index" else gpu.get(name)) == value:
                return number + 1
        raise NVMLError(NVML_ERROR_NOT_FOUND)

    return get


nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByUUID = _handle("index"), _handle("uuid")
nvmlDeviceGetHandleByPciBusId = _handle("pci")
nvmlDeviceGetMinorNumber = _figure("minor")
nvmlDeviceGetCurrentClocksThrottleReasons = _figure("reasons", 0)
nvmlDeviceGetTemperature = _figure("celsius")
nvmlDeviceGetPowerUsage = _figure("milliwatts")
nvmlDeviceGetTotalEccErrors = _figure("ecc")
nvmlDeviceGetRemappedRows = _figure("rows", [0, 0, 0, 0])
nvmlDeviceGetClockInfo, nvmlDeviceGetMaxClockInfo = _figure("clock"), _figure("most")


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return handle


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_figure("busy")(handle), memory=0)


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=_figure("used")(handle), total=100)


def nvmlEventSetCreate():
    return {"handles": [], "given": 0}


def nvmlDeviceRegisterEvents(handle, types, events):
    assert types == nvmlEventTypeXidCriticalError
    events["handles"].append(handle)


def nvmlEventSetWait_v2(events, milliseconds):
    until = time.monotonic() + milliseconds / 1000
    while time.monotonic() < until:
        own = [(gpu + 1, xid) for gpu, xid in _state().get("xids", []) if gpu + 1 in events["handles"]]
        if len(own) > events["given"]:
            events["given"] += 1
            device, xid = own[events["given"] - 1]
            return SimpleNamespace(device=device, eventData=xid)
        time.sleep(0.01)
    raise NVMLError(NVML_ERROR_TIMEOUT)
