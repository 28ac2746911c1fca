"""The checks of a node: its clock, devices, shared folder and network, each with its result and what to do about it.

The clocks of two hosts are compared over a TCP connection. A device must compute correctly. An all-reduce over the
process group must give the right sum, and is timed. The functions that need torch import it.

For a folder that all nodes must share, the checks are its file system, the time of a durable write, and whether the
files of other nodes appear. Files are looked up by name. On NFS a listing may be a minute old, but a new name is always
requested.
"""

from __future__ import annotations

import os
import re
import socket
import socketserver
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import DeviceError
from clusterddp.hostlist import ranges, ranks_in
from clusterddp.rundir.files import write_atomically

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


#: The states of a check, the best one first.
OK, WARNING, FAILED = STATES = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Check:
    """One row: ``found`` in words, ``advice`` for the user if it is not ok, and ``values``, the same as figures."""

    name: str
    state: str
    found: str
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For output and for messages."""
        values = {"values": dict(self.values)} if self.values else {}
        return {"name": self.name, "state": self.state, "found": self.found, "advice": self.advice, **values}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Check:
        """What ``as_json`` gave. Raises KeyError for anything else."""
        state = value["state"] if value["state"] in STATES else FAILED
        found, advice = str(value["found"]), str(value.get("advice", ""))
        return cls(str(value["name"]), state, found, advice, dict(value.get("values", {})))


def ok(name: str, found: str, **values: Any) -> Check:
    """A check that found no problem."""
    return Check(name, OK, found, values=values)


def warning(name: str, found: str, advice: str, **values: Any) -> Check:
    """A check that found a possible problem."""
    return Check(name, WARNING, found, advice, values)


def failed(name: str, found: str, advice: str, **values: Any) -> Check:
    """A check that found a problem that prevents a run."""
    return Check(name, FAILED, found, advice, values)


def worst(checks: Iterable[Check]) -> str:
    """The worst state among them, or ok without checks."""
    return max((check.state for check in checks), key=STATES.index, default=OK)


def guarded(name: str, advice: str, check: Callable[[], Check]) -> Check:
    """The result of ``check``. If it raises an exception, a failed one with the exception's message."""
    try:
        return check()
    except Exception as error:
        return failed(name, " ".join(f"{type(error).__name__}: {error}".split())[:500], advice)


#: The difference in seconds above which a check warns. At twice of it, Slurm may refuse a requeued job.
MOST_S = 1.0
EXCHANGES = 5
_TIMEOUT_S = 10.0
_TIME = struct.Struct("!d")


class _Handler(socketserver.BaseRequestHandler):
    """Answers each byte with the time."""

    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(_TIMEOUT_S)
        try:
            while self.request.recv(1):
                self.request.sendall(_TIME.pack(time.time()))
        except OSError:  # the other side disconnected or does not answer
            pass


class TimeServer(socketserver.ThreadingTCPServer):
    """Sends its host's time to every client, from a separate thread, until ``close``."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("", 0), _Handler)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.1,), name="clock", daemon=True).start()

    def close(self) -> None:
        """Stops answering."""
        self.shutdown()
        self.server_close()


def difference(host: str, port: int) -> tuple[float, float]:
    """Seconds by which this host's clock is ahead of a TimeServer's, and the round trip in seconds.

    The exchange with the shortest round trip counts. The difference is exact to half of that. Raises OSError.
    """
    measured = []
    with socket.create_connection((host, port), _TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(EXCHANGES):
            wall, started = time.time(), time.monotonic()
            connection.sendall(b"?")
            theirs = _receive(connection)
            trip = time.monotonic() - started
            measured.append((trip, wall + trip / 2 - theirs))
    trip, ahead = min(measured)
    return ahead, trip


def _receive(connection: socket.socket) -> float:
    data = b""
    while len(data) < _TIME.size:
        part = connection.recv(_TIME.size - len(data))
        if not part:
            raise ConnectionError("the time server closed the connection")
        data += part
    return float(_TIME.unpack(data)[0])


#: Rows and columns of the matrices, a multiple of PERIOD: 64 MiB in float32 on a GPU. On a CPU, and on a GPU with fewer
#: multiprocessors than FEW, as a part of one may have, they are smaller.
GPU_SIZE, CPU_SIZE, PERIOD, FEW = 4096, 512, 8, 8
GIB = 2**30
#: The fraction of a GPU's memory that should be free before training.
FREE = 0.9
REPLACE = "leave the node out with --exclude, and report it to the administrator"


def identify(device: torch.device) -> Check:
    """Checks the device. A GPU's memory must be free, because no other process should use it."""
    import torch

    from clusterddp.distributed.devices import gpu_identity

    if device.type != "cuda":
        return ok("device", f"CPU, {len(os.sched_getaffinity(0))} cores", cores=len(os.sched_getaffinity(0)))
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return judge_gpu(properties.name, gpu_identity(device), free, total, os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge_gpu(name: str, uuid: str, free: int, total: int, visible: str | None) -> Check:
    """From what torch says of a GPU, and CUDA_VISIBLE_DEVICES. Ranks with the same ``uuid`` (``gpu_identity``) share
    a GPU."""
    found = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    values = {"uuid": uuid, "free": free, "total": total, "visible": visible}
    if free < FREE * total:
        return warning(
            "device", found, "another process uses this GPU. Find it with nvidia-smi or rocm-smi on the node", **values
        )
    return ok("device", found, **values)


def health(device: torch.device) -> Check:
    """What NVIDIA's management library says of the GPU: errors of its memory, and a clock that is reduced."""
    from clusterddp.distributed.devices import gpu_identity
    from clusterddp.worker import gpus

    if gpus.library() is None:
        return ok("health", "GPU health unknown without nvidia-ml-py and NVIDIA's driver")
    gpu = None
    with suppress(DeviceError):  # torch cannot identify it
        gpu = gpus.identified(gpu_identity(device))
    if gpu is None:
        return ok("health", "GPU health unknown: NVML does not list this GPU")
    if problems := gpu.problems():
        return warning("health", f"GPU {gpu.number}: {', '.join(problems)}", "report it to the administrator")
    return ok("health", f"GPU {gpu.number} healthy")


#: Where Linux says which CPUs are next to a device.
PCI = Path("/sys/bus/pci/devices")
_BIND = (
    "memory of the other socket slows down copies to the GPU. Leave srun.distribution at its default, or bind ranks to "
    "CPUs in the order of the GPUs, with srun.cpu-bind and what the site's documentation says"
)


def locality(device: torch.device) -> Check:
    """Whether this rank's CPUs are next to its GPU."""
    from clusterddp.distributed.devices import pci_function

    try:
        name = pci_function(device)
        near = ranks_in((PCI / name / "local_cpulist").read_text())
    except (DeviceError, OSError, ValueError):  # as in a container or a virtual machine
        return ok("locality", "unknown which CPUs are next to the GPU")
    own = sorted(os.sched_getaffinity(0))
    if set(own) <= set(near):
        return ok("locality", "CPUs next to the GPU", own=own, near=near)
    found = f"this rank has the CPUs {ranges(own)}, but {ranges(near)} are next to its GPU {name}"
    return warning("locality", found, _BIND, own=own, near=near)


def multiply(device: torch.device) -> Check:
    """Allocates matrices on the device, multiplies them and compares every element of the product.

    The matrices have ones and zeros in a pattern, whose product is known and exact, even in float16.
    """
    import torch

    types = (torch.float32, torch.float16) if device.type == "cuda" else (torch.float32,)
    many = device.type == "cuda" and torch.cuda.get_device_properties(device).multi_processor_count >= FEW
    size = GPU_SIZE if many else CPU_SIZE
    index = torch.arange(size, device=device)
    rows, columns = index[:, None], index[None, :]
    tile = torch.tensor(product_tile(size), device=device)
    for dtype in types:
        left, right = ((rows + columns) % 8 < 4).to(dtype), ((3 * rows + columns) % 8 < 4).to(dtype)
        wrong = int((left @ right != tile.to(dtype).repeat(size // PERIOD, size // PERIOD)).sum())
        if wrong:
            found = (
                f"{wrong:,} of {size * size:,} elements of a matrix product in {str(dtype).removeprefix('torch.')} "
                f"{'is' if wrong == 1 else 'are'} wrong"
            )
            return failed("compute", found, REPLACE)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ok("compute", "matrix products are correct")


def product_tile(size: int) -> list[list[int]]:
    """The first rows and columns of the product of ``multiply``'s matrices. It repeats with the same period."""
    period = range(PERIOD)
    left = [[(row + column) % 8 < 4 for column in period] for row in period]
    right = [[(3 * row + column) % 8 < 4 for column in period] for row in period]
    return [[size // PERIOD * sum(left[i][k] and right[k][j] for k in period) for j in period] for i in period]


#: File systems that several hosts mount, and those that only one host has. Others are unknown.
SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "smb3", "panfs", "pvfs2", "orangefs"),
    *("afs", "wekafs", "glusterfs", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs", "fuse.quobyte", "quobyte", "dvs"),
    *(
        "ocfs2",
        "gfs2",
        "9p",
        "virtiofs",
        "daos",
        "fuse.daos",
        "fuse.dfuse",
        "fuse.beegfs",
        "fuse.moosefs",
        "fuse.cvmfs2",
    ),
    *("vastfs", "fuse.gcsfuse", "fuse.mount-s3", "fuse.s3fs", "fuse.goofys", "fhgfs", "stornext", "cvfs"),
}
LOCAL = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "vfat", "exfat", "ntfs"),
    *("tmpfs", "ramfs", "overlay", "squashfs", "iso9660", "devtmpfs", "fuse.squashfuse", "fuse.fuse-overlayfs"),
}
#: The number of durable writes to time, and the seconds of one above which a check warns.
WRITES, SLOW_S = 5, 1.0


@dataclass(frozen=True)
class Mount:
    """A line of the mount table: where, the file system's type, and what is mounted."""

    point: str
    kind: str
    source: str

    @property
    def shared(self) -> bool | None:
        """Whether other hosts can mount the same, or None if the type is unknown."""
        return self.kind in SHARED if self.kind in SHARED | LOCAL else None


def mount_of(path: Path, table: str) -> Mount | None:
    """The mount that holds an absolute, resolved path, from the text of /proc/self/mountinfo (proc(5))."""
    best: Mount | None = None
    for line in table.splitlines():
        before, dash, after = line.partition(" - ")
        here, there = before.split(), after.split()
        if not dash or len(here) < 5 or len(there) < 2:
            continue
        mount = Mount(_unescaped(here[4]), there[0], _unescaped(there[1]))
        # A later mount at the same place hides the earlier one.
        if Path(mount.point) in (path, *path.parents) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _unescaped(text: str) -> str:
    """Blanks and backslashes in the mount table are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def write_s(path: Path, content: str) -> float:
    """Seconds that a durable write of a small file takes (write, fsync, rename, fsync of the folder): the median.

    The file stays. Raises OSError.
    """
    seconds = []
    for _ in range(WRITES):
        started = time.monotonic()
        write_atomically(path, content, mode=0o600)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def unseen(files: Mapping[Path, str], timeout_s: float) -> list[Path]:
    """Waits until all files are here with their contents. Returns those that are not after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while left := [path for path, content in files.items() if not _holds(path, content)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def _holds(path: Path, content: str) -> bool:
    try:
        return path.read_text() == content
    except (OSError, UnicodeDecodeError):
        return False


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists, with symbolic links resolved."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return Path(os.path.realpath(path))


#: Folders that every host has for itself.
OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root")
MOUNTS = Path("/proc/self/mountinfo")


def only_here(places: Mapping[str, Path], mounts: Path = MOUNTS) -> list[str]:
    """Warnings about paths that probably only this host has. ``places``: the paths, each with its meaning."""
    table = mounts.read_text(errors="replace") if mounts.exists() else ""
    found: dict[str, list[str]] = {}
    for what, path in places.items():
        mount = mount_of(existing(Path(os.path.realpath(path))), table)
        if (own := own_place(path)) and (mount is None or not mount.shared):
            found.setdefault(own, []).append(f"{what} ({path})")
    return [
        f"{', '.join(names)}: usually each node has its own {own}, in which case the job fails at once. "
        "Use a folder that all nodes share"
        for own, names in found.items()
    ]


def own_place(path: Path) -> str | None:
    """The folder that every host has for itself and that a path is in, by its name or where it leads."""
    ways = (str(path), os.path.realpath(path))
    return next((top for top in OWN for way in ways if way.startswith(f"{top}/")), None)


#: Elements of the tensors, 4 bytes each: 64 MiB over NCCL, 4 MiB over gloo, 1 MiB if only the sum matters.
GPU_ELEMENTS, CPU_ELEMENTS, FEW_ELEMENTS = 2**24, 2**20, 2**18
REPETITIONS = 5


class NoAnswer(Exception):
    """An all-reduce did not end in time."""


def sum_is_right(device: torch.device, elements: int, timeout_s: float) -> bool:
    """Sums a tensor that differs between ranks and compares every element. Collective. Raises NoAnswer.

    The elements are small whole numbers, whose sum is exact in any order.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(elements, dtype=torch.float32, device=device).remainder_(7)
    tensor = pattern * weight(rank)
    finish(dist.all_reduce(tensor, async_op=True), timeout_s)
    return torch.equal(tensor, pattern * sum(map(weight, range(world_size))))


def weight(rank: int) -> int:
    """The factor of a rank's tensor. The sum of a thousand ranks is still exact in float32."""
    return rank % 64 + 1


def finish(work: dist.Work | None, timeout_s: float) -> None:
    """Waits for an asynchronous collective. Raises NoAnswer after ``timeout_s`` seconds, and the collective's error."""
    deadline = time.monotonic() + timeout_s
    while work is not None and not work.is_completed():
        if time.monotonic() > deadline:
            raise NoAnswer(f"an all-reduce did not end within {timeout_s:g} s")
        time.sleep(0.001)
    if work is not None:
        work.wait()


def bandwidth(device: torch.device, elements: int) -> float:
    """The bus bandwidth in bytes per second, as ``jobs/collectives.py`` reports it. 0 for a single rank. Collective."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    tensor = torch.zeros(elements, device=device)
    dist.all_reduce(tensor)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.monotonic()
    for _ in range(REPETITIONS):
        dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.monotonic() - started) / REPETITIONS
    return 2 * (ranks - 1) / ranks * 4 * elements / seconds
