"""How a rank ended: from waitpid's status, srun's messages, and the error texts of the libraries. Pure functions.

``find`` knows the error texts of CUDA, HIP, NCCL, cuDNN, Triton, gloo and torch: whose fault each is, and its likely
cause. A text counts only in an exception of a type that these libraries raise, because a script's own errors may quote
it. The type alone says little: torch raises RuntimeError, AcceleratorError (from 2.8 on) or DistBackendError for most
of these errors. Under NCCL an asynchronous error of a device ends the process from torch's watchdog thread. ``find``
takes the first row whose pattern occurs in the text, so special cases come before general ones.
"""

from __future__ import annotations

import enum
import functools
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$", re.MULTILINE)
_LAUNCH = re.compile(r"^srun: error: tasks? ([\d,-]+) launch failed: (.+)$", re.MULTILINE)
#: slurmstepd's, for a memory cgroup of the step: 22.05 has `oom_kill event in`, 20.11 `oom-kill event(s) in`.
_OOM_KILL = re.compile(r"^slurmstepd\S*: error: Detected \d+ oom[-_]kill event", re.MULTILINE)
_EXITED = re.compile(r"Exited with exit code (\d+)")
#: The signals with which a launcher ends the peers of a failed rank.
KILLS = (signal.SIGKILL, signal.SIGTERM)
#: srun names signals as strsignal(3) does.
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


@dataclass(frozen=True)
class ExitStatus:
    """The end of a process, by a signal or with an exit code."""

    signal: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    """Whether Slurm reported that it was killed because memory ran out."""
    oom_kill: bool = False
    """Whether the kernel has killed a process for lack of memory that may have been this one."""
    first: bool = False
    """Whether the launcher reported its end before that of any other rank."""
    not_started: str = ""
    """Why it was not started; empty if it was."""

    @classmethod
    def of_code(cls, code: int) -> ExitStatus:
        """From ``os.waitstatus_to_exitcode``: negative for a signal."""
        return cls(signal=-code) if code < 0 else cls(exit_code=code)

    @property
    def by_itself(self) -> bool:
        """Whether it ended by itself, rather than being ended by its launcher like the peers of a failed rank.

        The order in which connections break is no evidence: Linux closes the newest sockets of a killed process first,
        so a peer in a collective may fail, and report it, earlier.
        """
        alone = self.first or self.out_of_memory or bool(self.not_started)
        return alone or self.signal not in (None, *KILLS)

    def words(self) -> str:
        """The end in words, for a message."""
        if self.not_started:
            return f"was not started: {self.not_started}"
        if self.out_of_memory:
            return "was killed because the job ran out of memory. Request more with --mem"
        if self.signal == signal.SIGKILL:
            return killed(self.oom_kill)
        if self.signal is not None:
            return f"was killed by signal {self.signal} ({_name(self.signal)})"
        return f"exited with code {self.exit_code} and no traceback, probably because of os._exit()"


def killed(oom_kill: bool) -> str:
    """The words for SIGKILL, which does not say who sent it. ``oom_kill``: whether the kernel killed a process."""
    likely = ", probably out of memory" if oom_kill else ". Unless you sent it, check whether memory ran out"
    return f"was killed by SIGKILL{likely}"


def in_order(exit_statuses: Mapping[int, ExitStatus]) -> dict[int, ExitStatus]:
    """The same, with ``first`` set in the first one."""
    return {rank: replace(death, first=number == 0) for number, (rank, death) in enumerate(exit_statuses.items())}


def of_tasks(messages: str) -> dict[int, ExitStatus]:
    """The ends of tasks, by rank, from srun's messages such as ``srun: error: n2: task 3: Killed``.

    Tasks that could not be started come first, then the order is that of the messages. A task's first one counts.
    """
    oom_kill = _OOM_KILL.search(messages) is not None
    exit_statuses = {
        rank: ExitStatus(not_started=why) for tasks, why in _LAUNCH.findall(messages) for rank in _numbers(tasks)
    }
    for tasks, what in _TASKS.findall(messages):
        if death := _death(what, oom_kill):
            for rank in _numbers(tasks):
                exit_statuses.setdefault(rank, death)
    return exit_statuses


#: srun's reasons that come with an option, the environment or the job's size, and so come again (22.05.8).
_REFUSALS = re.compile(
    r"unrecognized (option|--)|[Ii]nvalid (option|--|MPI type|generic resource|\S+ specification|\S+ argument)"
    r"|^srun: fatal: |Failed to parse|Only allocated \d+ nodes? asked for|More processors requested than permitted"
    r"|Requested node configuration is not available|Memory required by task is not available|Task count specification"
    r"|cannot find mpi plugin|Unable to load any plugin|^/usr/bin/env: .*srun",
    re.MULTILINE,
)
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
#: The most of srun's lines that are kept, and of their characters.
MOST_LINES, LONGEST_LINE = 12, 400


@dataclass(frozen=True)
class LaunchFailure:
    """No rank was started. ``error``: why, in a sentence. ``lines``: what srun or the node's setup printed.
    ``refused``: whether the same would probably happen again. ``node``: the one at fault, or empty.
    ``lacks_interface``: it has none of the interfaces in ``interface``."""

    error: str
    lines: tuple[str, ...]
    refused: bool
    node: str = ""
    lacks_interface: bool = False


def launch_failure(messages: str, what: str = "the ranks") -> LaunchFailure:
    """From the messages of an srun that has failed before ``what`` started. The first error is its reason."""
    lines = [line[:LONGEST_LINE] for line in messages.splitlines() if line.strip()]
    said = [line.removeprefix("srun: ").removeprefix("error: ").strip() for line in lines]
    said = [line for line in said if not line.startswith("cluster configuration lacks")]  # a warning
    error = f"srun could not start {what}: {said[0] if said else 'it printed no reason'}"
    return LaunchFailure(error, tuple(lines[:MOST_LINES]), _REFUSALS.search(messages) is not None)


def failed_nodes(messages: str) -> list[str]:
    """The nodes that failed, by srun's messages. srun then kills the tasks on the others."""
    return list(dict.fromkeys(_NODE_FAILURE.findall(messages)))


def _death(what: str, oom_kill: bool) -> ExitStatus | None:
    if exited := _EXITED.fullmatch(what):
        return ExitStatus(exit_code=int(exited[1]))
    if what == "Out Of Memory":
        return ExitStatus(out_of_memory=True)
    number = _SIGNALS.get(what)
    return None if number is None else ExitStatus(signal=number, oom_kill=oom_kill and number == signal.SIGKILL)


def _name(number: int) -> str | None:
    """``SIGSEGV``, for example. Most real-time signals have only a description."""
    return next((known.name for known in signal.Signals if known == number), signal.strsignal(number))


def _numbers(ranges: str) -> list[int]:
    """``0-1,3`` as 0, 1, 3."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return [number for low, _, high in ends for number in range(int(low), int(high or low) + 1)]


class Blame(enum.Enum):
    """Whose fault an error probably is."""

    NODE = "node"  # a device, its driver, or the node
    NETWORK = "network"  # the node's network, or a peer's end that it did not recognize
    PEER = "peer"  # another rank has exited, failed or hung
    SCRIPT = "script"  # the script, its data or its environment


#: The types of exceptions in which the libraries' texts count: those of torch, of torch.compile, which wraps others, of
#: Triton, cupy and numba, and every one of C++, which has a namespace. "": the text has no type, as that which the ROCm
#: runtime prints before it aborts.
LIBRARIES = frozenset(
    "RuntimeError AcceleratorError OutOfMemoryError DistError DistBackendError DistNetworkError DistStoreError "
    "InductorError BackendCompilerFailed TorchRuntimeError OutOfResources CUDARuntimeError CUDADriverError CUBLASError "
    "NcclError CudaAPIError NVMLError_GpuIsLost".split()
) | {""}
_TYPE = re.compile(r"([\w.:]+?): ")


class ErrorText(NamedTuple):
    """A row of the table.

    ``pattern`` is a regular expression, searched in ``TYPE: MESSAGE``. ``source``: which software uses
    these words, and in which versions. ``types``: the exceptions in which they count. ``elsewhere``: a regular
    expression for tracebacks in which they do not.
    """

    pattern: str
    blame: Blame
    cause: str
    source: str
    out_of_memory: bool = False
    types: frozenset[str] = LIBRARIES
    elsewhere: str = ""


_CUDART = "cudaGetErrorString, CUDA 11 to 13; hipGetErrorString, ROCm 5 to 7"
_C10 = "torch 2.4 to 2.13, c10/cuda; 'HIP' for 'CUDA' in ROCm builds"
_NCCL = "ncclGetErrorString, NCCL 2.13 to 2.28 and RCCL; torch 2.4 to 2.13, NCCLUtils"
_WATCHDOG = "torch 2.4 to 2.13, ProcessGroupNCCL.cpp"
_DEVICE_MEMORY = "the device's memory is full. Use a smaller batch, or stop other processes that use this GPU"
_REMOTE = "another rank exited, failed or lost its network connection first"
#: Before the text of an error of the runtime or the driver.
_ERROR = r"((CUDA|HIP)( driver)? error|(Triton|CUDA|HIP) Error \[(CUDA|HIP)\]): (Code: \d+, Messsage: )?"
_KERNEL = "a kernel read or wrote outside its tensors. Find it with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer"

TABLE = (
    # Out of memory, which many libraries report in their own words.
    ErrorText(r"(CUDA|HIP) out of memory", Blame.SCRIPT, _DEVICE_MEMORY, f"{_C10}: the caching allocator", True),
    ErrorText(
        r"(CUDA|HIP|Triton|driver) [Ee]rror( \[(CUDA|HIP)\])?: out of memory|Cuda failure( 2)? '?out of memory",
        Blame.SCRIPT, _DEVICE_MEMORY, f"{_CUDART}; NCCL's 'Last error'; Triton 2 and 3", True,
    ),
    ErrorText(
        r"(CUBLAS|CUSOLVER|CUSPARSE|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED", Blame.SCRIPT, _DEVICE_MEMORY,
        "cuBLAS, cuSOLVER, cuSPARSE and hipBLAS by torch 2.4 to 2.13; cuDNN 8", True,
    ),
    ErrorText(r"^OutOfMemoryError\b", Blame.SCRIPT, _DEVICE_MEMORY, "torch 2.4 to 2.13, torch.OutOfMemoryError", True),
    ErrorText(
        r"ibv_\w+ failed with error Cannot allocate memory|ibv_\w+\([^\n]*failed: Cannot allocate memory", Blame.SCRIPT,
        "the limit of locked memory (ulimit -l), which InfiniBand needs, is too low in this job. Ask the administrator "
        "for an unlimited one", "NCCL 2.13 to 2.28, misc/ibvwrap.cc; UCX",
    ),
    ErrorText(
        r"^MemoryError\b|DefaultCPUAllocator: can't allocate memory|std::bad_alloc|Cannot allocate memory",
        Blame.SCRIPT,
        "the host's memory is full. Request more with --mem, or use fewer workers",
        "Python; torch 2.4 to 2.13, c10/core/impl/alloc_cpu.cpp; libstdc++; errno ENOMEM", True,
        LIBRARIES | {"MemoryError", "OSError"},
    ),
    # The script's errors in kernels. They are sticky: the process cannot use the device again.
    ErrorText(
        r"device-side assert triggered", Blame.SCRIPT,
        "an index is out of range in a kernel, often a label or a token id. Find it with CUDA_LAUNCH_BLOCKING=1",
        f"cudaErrorAssert: {_CUDART}",
    ),
    ErrorText(
        r"an illegal memory access was encountered|misaligned address|unspecified launch failure"
        r"|Memory access fault by GPU node",
        Blame.SCRIPT, _KERNEL, f"cudaErrorIllegalAddress and others: {_CUDART}; the ROCm runtime on stderr",
    ),
    ErrorText(
        r"no kernel image is available for execution|invalid device function|device kernel image is invalid"
        r"|NVIDIA driver on your system is too old|driver version is insufficient",
        Blame.SCRIPT, "this build of torch, or of an extension, does not support this GPU or its driver",
        f"cudaErrorNoKernelImageForDevice and others: {_CUDART}; torch/cuda/__init__.py, 2.4 to 2.13",
    ),
    ErrorText(
        _ERROR + r"[^\n]*(captur|graph update)", Blame.SCRIPT,
        "a call that a CUDA graph's capture does not allow, such as a synchronization",
        f"cudaErrorStreamCapture* and others: {_CUDART}",
    ),
    ErrorText(
        _ERROR + r"(invalid |operation not (permitted|supported)|initialization error|peer access is not supported"
        r"|context is destroyed|named symbol not found|the provided PTX|a PTX JIT|feature is not|driver shutting down)"
        r"|Cannot re-initialize CUDA in forked subprocess",
        Blame.SCRIPT, "an invalid call, for example after a fork, for a missing device, or with too large a grid",
        f"{_CUDART}; Triton 2 and 3; torch/cuda/__init__.py, 2.4 to 2.13",
    ),
    ErrorText(
        r"out of resource: (shared memory|tensor memory|threads)|too many (resources requested for|blocks in coop)",
        Blame.SCRIPT, "a kernel needs more threads, registers or shared memory than this GPU has",
        f"Triton 2 and 3, OutOfResources; cudaErrorLaunchOutOfResources: {_CUDART}",
    ),
    ErrorText(
        r"(CUBLAS|CUBLASLT|CUSOLVER|CUSPARSE|CUDNN|HIPBLAS)_STATUS_NOT_INITIALIZED", Blame.SCRIPT,
        "the device's memory is full, or an earlier kernel failed. Find that with CUDA_LAUNCH_BLOCKING=1",
        "cuBLAS, cuSOLVER, cuSPARSE, hipBLAS and cuDNN, by torch 2.4 to 2.13",
    ),
    ErrorText(
        r"CUDNN_STATUS_(NOT_SUPPORTED|BAD_PARAM|ARCH_MISMATCH|INVALID_VALUE)|CUBLAS_STATUS_(INVALID_VALUE|NOT_SUPPORTED)",
        Blame.SCRIPT, "the shapes, types or strides are not supported",
        "cuDNN 8 and 9, cuBLAS 11 to 13, by torch 2.4 to 2.13",
    ),
    # Another rank ended. The row comes before the device's: these texts quote each other.
    ErrorText(
        r"ncclRemoteError|remote process exited or there was a network error|Connection closed by remote peer",
        Blame.PEER, _REMOTE, _NCCL,
    ),
    ErrorText(
        r"NCCL communicator was aborted|[Oo]bserved (flight recorder |exception )?dump signal from (another|rank)",
        Blame.PEER, _REMOTE, _WATCHDOG,
    ),
    ErrorText(
        r"Watchdog caught collective operation timeout|Operation timed out after \d+ ms"
        r"|Aborting process on rank \d+ due to timeout", Blame.PEER,
        "a rank did not reach a collective in time. Look for a rank that hung or called a different "
        "collective", _WATCHDOG,
    ),
    ErrorText(
        r"gloo/transport/|[Gg]loo connectFullMesh failed", Blame.PEER, "a rank exited, or did not answer in time",
        "gloo, by torch 2.4 to 2.13: Connection closed by peer, Timed out waiting ... ms for recv operation",
    ),
    # NCCL's own errors.
    ErrorText(
        r"ncclInvalid(Usage|Argument)|NCCL error.*: invalid (usage|argument)|Duplicate GPU detected", Blame.SCRIPT,
        "an invalid NCCL call, such as two ranks on one GPU, or tensors of different sizes", _NCCL,
    ),
    ErrorText(
        r"ncclSystemError|unhandled system error|ncclInternalError|NCCL error.*: internal error", Blame.NETWORK,
        "a socket, InfiniBand or shared memory failed. Set NCCL_DEBUG=INFO to see which", _NCCL,
    ),
    # The device or its driver.
    ErrorText(
        r"No (CUDA|HIP) GPUs are available|no (CUDA|ROCm)-capable device is detected|Found no NVIDIA driver",
        Blame.NODE, "the node's GPUs or their driver failed, or the job has no GPUs",
        f"{_C10}; {_CUDART}; torch/csrc/cuda, 2.4 to 2.13",
    ),
    ErrorText(
        r"uncorrectable (ECC|NVLink) error|hardware stack error|the system is not yet initialized"
        r"|[Ff]allen off the bus|GPU is lost|Driver/library version mismatch|HW Exception by GPU node",
        Blame.NODE, "the GPU, its memory or its links have failed",
        f"{_CUDART}; NVML and the kernel's Xid 79 (NVIDIA 470 to 580); the ROCm runtime on stderr",
    ),
    ErrorText(
        r"is/are busy or unavailable", Blame.NODE, "another process holds the GPU, or it is in exclusive mode",
        f"cudaErrorDevicesUnavailable: {_CUDART}",
    ),
    ErrorText(
        r"(CUDA|HIP) unknown error|(CUDA|HIP) error: unknown error", Blame.NODE,
        "the driver has failed. Ask the administrator for the node's Xid messages", f"cudaErrorUnknown: {_C10}",
    ),
    ErrorText(
        r"(CUDA|HIP)( driver)? error: |Cuda failure|Triton Error \[|cuDNN error|MIOpen Error|hipError"
        r"|CUDNN_STATUS_|CUBLAS_STATUS_|HIPBLAS_STATUS_|^AcceleratorError: |unhandled cuda error"
        r"|ncclUnhandledCudaError",
        Blame.NODE, "the GPU or its driver reported an error",
        f"{_C10}; driver_api.h; ATen/cudnn and ATen/miopen; Triton 2 and 3",
    ),
    ErrorText(
        r"watchdog got stuck for \d+ seconds|watchdog thread has not made progress", Blame.NODE,
        "a call into the driver or NCCL did not return", f"{_WATCHDOG}, HeartbeatMonitor",
    ),
    ErrorText(r"NCCL error|RCCL error", Blame.NETWORK, "NCCL failed. Set NCCL_DEBUG=INFO for details", _NCCL),
    # Standard input.
    ErrorText(
        r"^BdbQuit|^EOFError: EOF when reading a line", Blame.SCRIPT,
        "breakpoint() has no terminal in a rank, nor has input(). Submit with --debug RANK to give one to this rank",
        "Python 3.11, bdb.py and input()", types=frozenset(("BdbQuit", "EOFError")),
    ),
    # Connections between ranks, and clusterddp's own.
    ErrorText(
        r"^DeviceError: the ranks on node", Blame.NODE,
        "a GPU of the node is missing, or the job needs more GPUs than it was given", "clusterddp",
        types=frozenset(("DeviceError",)),
    ),
    ErrorText(
        r"^DeviceError: device \S+ requested, but no GPU", Blame.NODE,
        "the node has no working GPU, or the job got none. To train on CPUs, add --device cpu", "clusterddp",
        types=frozenset(("DeviceError",)),
    ),
    ErrorText(
        r"^PreflightError: node ", Blame.NODE, "the node did not pass the preflight", "clusterddp",
        types=frozenset(("PreflightError",)),
    ),
    ErrorText(
        r"^PreflightError: ", Blame.PEER, "the nodes did not pass the preflight together", "clusterddp",
        types=frozenset(("PreflightError",)),
    ),
    ErrorText(
        r"EADDRINUSE|(errno: 98 - |\[Errno 98\] )?[Aa]ddress already in use", Blame.SCRIPT,
        "another process uses the port. Leave MASTER_PORT unset, and let the script choose free ports",
        "torch 2.4 to 2.13, TCPStore; Python", types=LIBRARIES | {"OSError"},
    ),
    ErrorText(
        r"^Dist(Backend|Network|Store)Error: |rank 0's store is unreachable", Blame.PEER, _REMOTE,
        "torch 2.4 to 2.13, TCPStore and the process groups; clusterddp", types=LIBRARIES | {"ClusterddpError"},
    ),
    ErrorText(
        r"^(_pickle\.|pickle\.)?UnpicklingError: Weights only load failed", Blame.SCRIPT,
        "the file contains Python objects, which torch.load refuses. If you trust the file, set `env: "
        "{TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD: \"1\"}` in the job definition", "torch 2.6 to 2.15, serialization.py",
        types=frozenset(("UnpicklingError",)),
    ),
    ErrorText(  # requests, redis and others have a ConnectionError of their own, without a number
        r"^Connection(Reset|Refused|Aborted)Error: \[Errno \d+\]|^BrokenPipeError: \[Errno \d+\]", Blame.PEER,
        "the other end closed the connection", "Python",
        types=frozenset(f"Connection{what}Error" for what in ("Reset", "Refused", "Aborted")) | {"BrokenPipeError"},
        elsewhere=r'File "[^"]*/((site|dist)-packages/(?!torch/|clusterddp/)|http/client\.py|urllib/|ssl\.py)',
    ),
)  # fmt: skip

_ROWS = [(re.compile(row.pattern), row) for row in TABLE]


@functools.lru_cache(maxsize=1024)  # many ranks may have the same error
def find(text: str, traceback: str = "") -> ErrorText | None:
    """The row of an error with this text, ``TYPE: MESSAGE``. None if there is none, as for the script's own errors."""
    named = _TYPE.match(text)
    kind = named[1].rpartition(".")[2] if named else ""
    rows = (row for pattern, row in _ROWS if ("::" in kind or kind in row.types) and pattern.search(text))
    return next((row for row in rows if not (row.elsewhere and re.search(row.elsewhere, traceback))), None)
