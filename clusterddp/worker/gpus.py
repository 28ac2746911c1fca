"""What a rank's GPUs do, by NVIDIA's management library (NVML), through nvidia-ml-py (extra ``gpu``). No torch.

``start`` begins a thread in the rank that reports figures every minute and each Xid at once. Without the package, a
driver or a GPU, it reports nothing. Two cheap queries per second and GPU release the GIL while the driver answers.

``node_facts`` are facts about a node and its GPUs that may make a rank slow, in words.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterddp import protocol
from clusterddp.environment import RankEnvironment
from clusterddp.messages import reports
from clusterddp.process import cpu_ticks

#: Xids that mean a fault of the GPU, its memory or its links, and count against the node.
#: https://docs.nvidia.com/deploy/xid-errors
HARDWARE: Mapping[int, str] = {
    48: "an uncorrectable memory error",
    62: "the GPU's internal controller halted",
    64: "a faulty row of its memory could not be replaced",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "an uncorrectable memory error, contained in one process",
    95: "an uncorrectable memory error in several processes",
    119: "the GPU's system processor (GSP) timed out",
    120: "the GPU's system processor (GSP) failed",
    140: "an unrecovered memory error",
}
#: Xids that a faulty kernel of the script raises, too.
OF_KERNELS: Mapping[int, str] = {
    13: "a kernel failed",
    31: "a kernel accessed an invalid address",
    43: "a kernel was stopped after an error",
}
_THROTTLES: Mapping[int, str] = {
    0x08: "a hardware slowdown",  # nvmlClocksEventReasonHwSlowdown
    0x20: "heat",  # SwThermalSlowdown
    0x40: "heat",  # HwThermalSlowdown
    0x80: "a power brake",  # HwPowerBrakeSlowdown
}
#: Seconds between two samples of the GPUs.
SAMPLE_S = 1.0


class GpuLost(Exception):
    """The driver has lost the GPU."""

    def __str__(self) -> str:
        return "the driver has lost the GPU"


class Gpu:
    """A GPU. What it does not support is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        #: That of /dev/nvidiaN, which a cgroup does not renumber.
        self.number: int | None = self._ask("nvmlDeviceGetMinorNumber")

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                raise GpuLost from error
            return None

    def busy(self) -> int | None:
        """The percentage of the last moment (up to a second) in which a kernel ran."""
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)

    def throttles(self) -> list[str]:
        """Why its clock is reduced now, other than to its usual power limit."""
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return list(dict.fromkeys(words for bit, words in _THROTTLES.items() if reasons & bit))

    def celsius(self) -> int | None:
        """Its temperature."""
        degrees: int | None = self._ask("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU)
        return degrees

    def memory(self) -> int | None:
        """The percentage of its memory that is in use, by any process."""
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return round(100 * memory.used / memory.total) if memory is not None and memory.total else None

    def watts(self) -> int | None:
        """The power that it draws."""
        power = self._ask("nvmlDeviceGetPowerUsage")
        return None if power is None else round(power / 1000)

    def memory_errors(self) -> int | None:
        """Uncorrectable (ECC) errors since the driver was loaded."""
        kind, counter = self.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.nvml.NVML_VOLATILE_ECC
        errors: int | None = self._ask("nvmlDeviceGetTotalEccErrors", kind, counter)
        return errors

    def problems(self) -> list[str]:
        """What should be looked at before it is used for training."""
        found = [f"its clock is reduced by {words}" for words in self.throttles()]
        if errors := self.memory_errors():
            found.append(f"{errors} uncorrectable memory error{'' if errors == 1 else 's'} since the driver was loaded")
        _, _, pending, failed = self._ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
        if failed:
            found.append("a faulty row of its memory could not be replaced")
        elif pending:
            found.append("a faulty row of its memory will be replaced at its next reset")
        return found

    def facts(self) -> list[str]:
        """Its clock, why that is reduced, and its temperature, in words."""
        name, sm = f"GPU {self.number}", self.nvml.NVML_CLOCK_SM
        clock, most = self._ask("nvmlDeviceGetClockInfo", sm), self._ask("nvmlDeviceGetMaxClockInfo", sm)
        found = [] if clock is None else [f"{name} runs at {clock} of {most} MHz"]
        found += [f"{name} is slowed down by {words}" for words in self.throttles()]
        return found if (celsius := self.celsius()) is None else [*found, f"{name} has {celsius} °C"]


def library() -> Any | None:
    """The module ``pynvml`` once it has found a driver. None without either."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def identified(identity: str) -> Gpu | None:
    """The GPU that torch names so (``distributed/devices.py``: its UUID, or its PCI address and the host)."""
    if (nvml := library()) is None:
        return None
    address, _, host = identity.partition(" on ")
    names = [address] if host else [f"GPU-{identity}", f"MIG-{identity}"]
    return next((gpu for name in names if (gpu := _named(nvml, name)) is not None), None)


def visible(environ: Mapping[str, str], local_rank: int, local_world_size: int) -> list[Gpu]:
    """A rank's GPUs by CUDA_VISIBLE_DEVICES, as far as that tells before CUDA is initialized."""
    if (nvml := library()) is None:
        return []
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(nvml.nvmlDeviceGetCount())] if listed is None else listed.split(",")
    found = [gpu for name in names if (gpu := _named(nvml, name.strip())) is not None]
    each = len(found) // local_world_size
    return found[local_rank * each : (local_rank + 1) * each] if each else found  # Slurm gave each rank its own


def _named(nvml: Any, name: str) -> Gpu | None:
    """By UUID, PCI address or index. Of a part of a GPU (MIG), the whole GPU."""
    try:
        if name.startswith(("GPU-", "MIG-")):
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        elif name.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(name)
        if name.startswith("MIG-"):
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except nvml.NVMLError:
        return None
    return Gpu(nvml, handle)


class Xids:
    """The Xids of GPUs from now on, each once per GPU."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._nvml = gpus[0].nvml
        self._set: Any = None
        with suppress(self._nvml.NVMLError):  # some drivers have no events
            self._set = self._nvml.nvmlEventSetCreate()
        self._known: set[tuple[int | None, int]] = set()
        #: A lost GPU does not tell its number.
        self._numbers = {_address(gpu.handle): gpu.number for gpu in gpus}
        for gpu in gpus:
            with suppress(self._nvml.NVMLError):  # some GPUs have no events
                self._nvml.nvmlDeviceRegisterEvents(gpu.handle, self._nvml.nvmlEventTypeXidCriticalError, self._set)

    def next(self, seconds: float) -> tuple[int | None, int] | None:
        """The number of a GPU and its Xid, as soon as there is one. None after so many seconds."""
        began = time.monotonic()
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._set, int(1000 * seconds))
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise GpuLost from error
            if error.value != self._nvml.NVML_ERROR_TIMEOUT:  # it did not wait
                time.sleep(max(0.0, seconds - (time.monotonic() - began)))
            return None
        found = self._numbers.get(_address(event.device)), int(event.eventData)
        if found in self._known:
            return None
        self._known.add(found)
        return found


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


class GpuWatch:
    """Watches a rank's GPUs in a thread, and reports to the supervisor.

    ``find`` returns the GPUs, ``report`` sends an event, ``node`` is the name of the rank's node. Figures are sent
    after ``first_s`` seconds, and then every ``every_s``.
    """

    def __init__(
        self,
        find: Callable[[], list[Gpu]],
        report: Callable[[reports.Report], None],
        node: str,
        first_s: float = 10.0,
        every_s: float = 60.0,
    ) -> None:
        self._find, self._report, self._node = find, report, node
        self._first_s, self._every_s = first_s, every_s
        self._changed = threading.Event()
        self.gpus: list[Gpu] = []
        threading.Thread(target=self._watch, name="gpus", daemon=True).start()

    def use(self, identities: Sequence[str]) -> None:
        """CUDA is initialized: from now on these GPUs are watched."""
        self._find = lambda: [gpu for one in identities if (gpu := identified(one)) is not None]
        self._changed.set()

    def _watch(self) -> None:
        try:
            while library() is not None:
                self.gpus = self._find()
                if self.gpus:
                    self._watch_these()
                self._changed.wait()
                self._changed.clear()
        except GpuLost as error:
            self._report_fault(str(error), True)

    def _watch_these(self) -> None:
        """Until the GPUs change."""
        xids, due = Xids(self.gpus), time.monotonic() + self._first_s
        busy: list[float] = []
        throttled: list[float] = []
        while not self._changed.is_set():
            if (found := xids.next(SAMPLE_S)) is not None:
                self._tell(*found)
                continue  # more may be there already, and a GPU that is lost ends this
            for gpu in self.gpus:
                if (percent := gpu.busy()) is not None:
                    busy.append(percent)
                throttled.append(100.0 * bool(gpu.throttles()))
            if time.monotonic() >= due:
                self._report(reports.Gpu(figures=self._figures(busy, throttled)))
                due, busy, throttled = time.monotonic() + self._every_s, [], []

    def _tell(self, number: int | None, xid: int) -> None:
        what = HARDWARE.get(xid) or OF_KERNELS.get(xid) or "see NVIDIA's list of Xids"
        self._report_fault(what, xid in HARDWARE, number, xid)

    def _report_fault(self, what: str, hardware: bool, gpu: int | None = None, xid: int | None = None) -> None:
        from clusterddp.history.failures import GpuFault  # few runs need it

        self._report(GpuFault(host=self._node, what=what, hardware=hardware, gpu=gpu, xid=xid))

    def _figures(self, busy: Sequence[float], throttled: Sequence[float]) -> reports.Figures:
        """Those of ``rundir/timing.py``'s GPU_FIGURES."""
        memory, watts, celsius, errors = (
            [value for gpu in self.gpus if (value := ask(gpu)) is not None]
            for ask in (Gpu.memory, Gpu.watts, Gpu.celsius, Gpu.memory_errors)
        )
        return (
            round(sum(busy) / len(busy)) if busy else None,
            max(memory, default=None),
            round(sum(watts) / len(watts)) if watts else None,
            max(celsius, default=None),
            round(sum(throttled) / len(throttled)),
            sum(errors) if errors else None,
        )


def start(
    environ: Mapping[str, str], ranks: RankEnvironment, report: Callable[[reports.Report], None], node: str
) -> GpuWatch | None:
    """Begins to watch this rank's GPUs. None if the package is not installed."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    return GpuWatch(lambda: visible(environ, ranks.local_rank, ranks.local_world_size), report, node)


def node_facts(watch: GpuWatch | None) -> list[str]:
    """Clocks and temperatures of the watched GPUs, the load, and the busiest processes of other jobs."""
    found: list[str] = []
    with suppress(GpuLost):
        found += [fact for gpu in (watch.gpus if watch else []) for fact in gpu.facts()]
    found.append(f"The load is {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs")
    if others := busiest_others():
        found.append(f"Other processes: {', '.join(others)}")
    return found


def busiest_others(seconds: float = 1.0, most: int = 3, least_cpu: float = 0.2) -> list[str]:
    """The processes of other jobs that use at least this much of a CPU in so many seconds, ``most`` of them."""
    before, began = cpu_ticks(), time.monotonic()
    time.sleep(seconds)
    per_cpu = os.sysconf("SC_CLK_TCK") * (time.monotonic() - began)
    used = {pid: (ticks - before[pid]) / per_cpu for pid, ticks in cpu_ticks().items() if pid in before}
    busy = sorted((pid for pid, share in used.items() if share >= least_cpu), key=lambda pid: -used[pid])
    others = [pid for pid in busy if not _ours(pid)]
    return [f"{_name(pid)} (process {pid}) {100 * used[pid]:.0f}% of a CPU" for pid in others[:most]]


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "unknown"


def _ours(pid: int) -> bool:
    """Whether it belongs to this run, of which processes of other users never are."""
    mark = f"{protocol.RUN_DIR}={os.environ.get(protocol.RUN_DIR)}".encode()
    with suppress(OSError):
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
