"""The ranks' devices, backend, store and process group: chosen by pure functions, opened and closed by one object."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # Its default arguments keep the group that exists when it is first imported (by DDP).
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from clusterddp.environment import RankEnvironment
from clusterddp.errors import DeviceError, LauncherEnvironmentError
from clusterddp.reporter import say

#: For waits without a timeout, which torch's stores lack.
NO_TIMEOUT = timedelta(days=3650)
#: Seconds that rank 0, which holds the store, waits for the other ranks before it exits.
LEAVE_TIMEOUT_S = 30.0
#: Whether gloo's timeout can change after the group has started: in torch 2.9 it can, torch 2.4 ignores it.
GLOO_TIMEOUT_CHANGES = hasattr(dist.ProcessGroup, "set_timeout")
#: Whether TCPStore supports ``master_listen_fd``: its libuv backend does since torch 2.8.
TAKES_SOCKET = torch.__version__ >= (2, 8)  # type: ignore[operator]
#: The entries of NCCL's flight recorder: torch 2.11's default. torch 2.4 to 2.10 record nothing by default.
FLIGHT_RECORDS = 2000
TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"
_OWNER, _LEFT, _ALL_LEFT = "clusterddp/owner", "left", "left/all"
_GPU_NAME = "gpu name"
_CONNECTED, _ALL_CONNECTED = "connected", "connected/all"
#: A rank's connections with rank 0's store, the most with other libraries' too, and the files that it opens besides.
_STORE_CONNECTIONS, _MOST_CONNECTIONS, _OWN_FILES = 2, 4, 256


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

    If Slurm bound each task to its own GPUs, exactly ``per_rank`` are visible, from index 0; otherwise the local rank
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
        whole = f"; with --local, the job needs {needs} GPUs on this machine" if local else ""
        raise DeviceError(
            f"device {asked} requested, but node {host} has none of the GPUs that CUDA_VISIBLE_DEVICES={named} "
            f"lists{whole}"
        )
    if not visible_gpus:
        hidden = ", because CUDA_VISIBLE_DEVICES is empty" if named == "" else ""
        raise DeviceError(
            f"device {asked} requested, but no GPU is visible on node {host}{hidden}; request GPUs (--gpus-per-node), "
            "install a torch with CUDA, or use --device cpu"
        )
    if device.index is not None:
        first = device.index
    elif visible_gpus == per_rank and slurm:
        first = 0
    elif visible_gpus < needed:
        gpus = "1 GPU" if needed == 1 else f"{needed} GPUs"
        raise DeviceError(f"needs {gpus} on node {host}, {'Slurm gave' if slurm else 'there are'} {visible_gpus}")
    else:
        first = environment.local_rank * per_rank
    return tuple(torch.device("cuda", index) for index in range(first, first + per_rank))


def choose_backend(asked: str | None, device: torch.device) -> str:
    """gloo for CPUs, and for GPUs NCCL, with gloo for tensors on the CPU; or as asked. DeviceError for one that cannot
    work here.
    """
    if asked == "nccl" and device.type != "cuda":
        raise DeviceError(f"backend nccl needs a GPU per rank, but the device is {device}; leave it out, or use gloo")
    # One backend, or one per device type as in "cpu:gloo,cuda:nccl"; torch 2.4's own check knows only the former.
    if asked is not None and not all(dist.is_backend_available(one.rpartition(":")[2]) for one in asked.split(",")):
        raise DeviceError(
            f"backend {asked}: this torch was built without it; leave it out for gloo on CPUs, NCCL on GPUs"
        )
    return asked or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def backend_of(backend: str, device_type: str) -> str:
    """Which backend communicates tensors of a kind of device: of one name, or of several as ``choose_backend``'s."""
    for one in backend.split(","):
        kind, _, name = one.rpartition(":")
        if kind in ("", device_type):
            return name
    return ""


def devices_of(environment: RankEnvironment, asked: str | None, per_rank: int) -> tuple[torch.device, ...]:
    """``choose_devices`` for this process and its visible devices. CUDA_VISIBLE_DEVICES stays as it is, unless it lists
    several MIG devices."""
    named, host = os.environ.get("CUDA_VISIBLE_DEVICES"), socket.gethostname()
    own = None if named is None or asked == "cpu" else own_mig_device(environment, per_rank, named, host)
    if own is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = own
    visible = visible_gpus()
    if own is not None and visible == 1:
        return (torch.device("cuda", 0),)
    return choose_devices(environment, asked, per_rank, visible, host, named)


def visible_gpus() -> int:
    """How many GPUs this process can use. torch before 2.6 also counts those that ROCR_VISIBLE_DEVICES hides; HIP's own
    count does not."""
    if not torch.cuda.is_available():
        return 0
    if torch.version.hip and "ROCR_VISIBLE_DEVICES" in os.environ:
        return int(torch._C._cuda_getDeviceCount())
    return torch.cuda.device_count()


def own_mig_device(environment: RankEnvironment, per_rank: int, named: str, host: str) -> str | None:
    """The rank's own of the several MIG devices that CUDA_VISIBLE_DEVICES lists; None if it lists anything else.

    CUDA shows a process only the first MIG device of the list, so that all ranks of a node would use that one. Raises
    DeviceError if the node has too few for its ranks.
    """
    devices = [one.strip() for one in named.split(",")]
    if len(devices) < 2 or not all(one.startswith("MIG-") for one in devices):
        return None
    if per_rank > 1:
        raise DeviceError(
            f"gpus_per_rank is {per_rank}, but node {host} has MIG devices, of which a process can use only one: leave "
            "gpus_per_rank out"
        )
    if len(devices) < environment.local_world_size:
        raise DeviceError(f"needs {environment.local_world_size} GPUs on node {host}, there are {len(devices)} (MIG)")
    return devices[environment.local_rank]


def gpu_identity(device: torch.device) -> str:
    """Equal for two ranks, of any nodes, if they see the same GPU: its UUID, or with torch 2.4, which has none, its PCI
    address and host. DeviceError if CUDA does not tell."""
    properties = torch.cuda.get_device_properties(device)
    if hasattr(properties, "uuid"):
        return str(properties.uuid)
    platform = "hip" if torch.version.hip else "cuda"
    library = ctypes.CDLL(str(TORCH_LIBRARIES / f"libc10_{platform}.so"))  # linked against the runtime in use
    address = ctypes.create_string_buffer(32)
    name = f"{platform}DeviceGetPCIBusId"
    if error := getattr(library, name)(address, len(address), device.index):
        raise DeviceError(f"cannot identify GPU {device}: {name} returned error {error}")
    return f"{address.value.decode()} on {socket.gethostname()}"


def flight_recorder(version: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that turns on NCCL's flight recorder in this torch; none if the user set one, or it is on anyway.

    torch 2.8 renamed it, and warns about the older name.
    """
    names = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    release = tuple(map(int, version.split(".")[:2]))
    if release >= (2, 11) or any(name in environ for name in names):
        return {}
    return {names[release >= (2, 8)]: str(FLIGHT_RECORDS)}


@dataclass(frozen=True)
class StoreAddress:
    """The address of the attempt's store, and what identifies it.

    ``token`` is known only to the attempt's ranks. ``agent``: torchrun's agent holds the store, rather than rank 0.
    ``owner`` describes the run, for another run that connects by mistake.
    """

    host: str
    port: int
    token: str
    agent: bool = False
    owner: str = "another run"

    @property
    def digest(self) -> str:
        """The token's fingerprint: anyone who connects to a store can read its contents."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:16]


def allow_connections(rank: int, world_size: int) -> None:
    """Raises this process's limit of open files if the connections of so many ranks need it.

    Rank 0 serves the store, to which each rank has two connections, and NCCL or gloo may open one more; with gloo each
    rank is connected with all others. LauncherEnvironmentError if rank 0 is not allowed as many as the store needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _MOST_CONNECTIONS * world_size + _OWN_FILES
    if hard != resource.RLIM_INFINITY and rank == 0 and hard < _STORE_CONNECTIONS * world_size + _OWN_FILES:
        raise LauncherEnvironmentError(
            f"{world_size:,} ranks need {_STORE_CONNECTIONS * world_size + _OWN_FILES:,} open files in rank 0, which "
            f"serves their store, but the limit on {socket.gethostname()} is {hard:,} (`ulimit -Hn`): ask for a higher "
            "one (LimitNOFILE of slurmd, or limits.conf), or use fewer ranks"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def listen_on_ipv4(address: StoreAddress) -> int | None:
    """Opens an IPv4 listening socket for the store and returns its descriptor, or None if the address is not IPv4.

    torch listens on a dual-stack socket, which reports 127.0.0.1 as ::ffff:127.0.0.1. /etc/hosts has no name for that
    address, so the store's only thread blocks on a reverse DNS lookup for each client. Raises OSError if the port is
    in use.
    """
    try:
        socket.inet_aton(address.host)
    except OSError:
        return None
    return socket.create_server(("", address.port)).detach()


class ProcessGroup:
    """The default process group of torch.distributed and its store. Each attempt has its own store.

    ``on_open`` is called on rank 0 when the store accepts connections. ``await_open(seconds)`` blocks the other ranks
    until then, and returns False on timeout. Without it, torch retries with exponential backoff from 0.5 s to 60 s
    (c10d/Backoff.hpp), and the last of many ranks connects seconds late.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        device: torch.device,
        backend: str,
        address: StoreAddress,
        start_s: float,
        on_open: Callable[[], None] = lambda: None,
        await_open: Callable[[float], bool] = lambda _: True,
    ) -> None:
        self.rank, self.world_size = environment.rank, environment.world_size
        self.device, self.backend = device, backend
        self._start_s, self._on_open, self._await_open = start_s, on_open, await_open
        if self.world_size > 1:
            allow_connections(self.rank, self.world_size)
        self._tcp, self._address = self._open(address)
        #: The attempt's namespace in the store, for the main thread.
        self.store = PrefixStore(self._address.digest, self._tcp)
        #: A separate connection for a thread that waits without a timeout. All ranks open theirs before training: the
        #: only thread of torch's store server resolves each new client's name (seen to take 10 s with slow reverse DNS)
        #: and serves nobody meanwhile, which must not happen while the ranks agree on a stop.
        self.watched = self._connect()
        self._refuse_shared_gpu(socket.gethostname())
        self._ranks_per_node = environment.local_world_size
        if device.type == "cuda":
            self.store.set(f"{_GPU_NAME}/{self.rank}", torch.cuda.get_device_properties(device).name)
        os.environ.update(flight_recorder(torch.__version__, os.environ))
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=start_s),
            device_id=device if self.over_nccl else None,  # NCCL then connects now rather than in the first step.
        )
        if self.world_size > 1 and self.store.add(_CONNECTED, 1) == self.world_size:
            self.store.set(_ALL_CONNECTED, "")

    @property
    def over_nccl(self) -> bool:
        """Whether the ranks' GPUs communicate by NCCL."""
        return self.device.type == "cuda" and backend_of(self.backend, "cuda") == "nccl"

    @property
    def collective_device(self) -> torch.device:
        """The device for collectives of a script's values, and of much data."""
        return self.device if self.over_nccl else torch.device("cpu")

    @property
    def control_device(self) -> torch.device:
        """The device for collectives that a stop needs: the CPU, because a GPU may have no memory left for them.

        A job that asks for the backend "nccl" alone has no other.
        """
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def hardware(self) -> dict[str, Any]:
        """What the order and precision of sums on GPUs depend on, on rank 0: how many ranks have which GPU, and the
        ranks of a node. Empty on CPUs."""
        if self.device.type != "cuda":
            return {}
        names = self.store.multi_get([f"{_GPU_NAME}/{rank}" for rank in range(self.world_size)])
        gpus = dict(sorted(Counter(name.decode() for name in names).items()))
        return {"gpus": gpus, "ranks_per_node": self._ranks_per_node}

    def shorten_timeout(self, step_s: float) -> None:
        """Start-up is over: from now on a collective that takes longer than ``step_s`` seconds fails."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=step_s))
        ignored = not self.over_nccl and "gloo" in self.backend and not GLOO_TIMEOUT_CHANGES and step_s < self._start_s
        if ignored and self.rank == 0 and self.world_size > 1:
            say(
                f"torch {torch.__version__} cannot change gloo's timeout after the start: a collective that never "
                f"completes fails after {self._start_s:g} s, not {step_s:g} s; torch 2.9 and newer can"
            )

    def close(self) -> None:
        """Leaves the group, rank 0 last, because it holds the store. Takes a bounded time; not for use after errors."""
        if self.world_size > 1:
            with suppress(RuntimeError):  # a rank failed while it connected, which is recorded elsewhere
                # gloo fails on a rank that still connects when another one closes its connections.
                self.store.wait([_ALL_CONNECTED], timedelta(seconds=LEAVE_TIMEOUT_S))
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.world_size == 1:
            return
        try:
            if self.store.add(_LEFT, 1) == self.world_size:
                self.store.set(_ALL_LEFT, "")
            if self.rank == 0:
                self.store.wait([_ALL_LEFT], timedelta(seconds=LEAVE_TIMEOUT_S))
        except RuntimeError:
            pass  # A rank failed while it exited, which is recorded elsewhere.

    def _open(self, address: StoreAddress) -> tuple[TCPStore, StoreAddress]:
        if self.world_size == 1:
            store = TCPStore("127.0.0.1", 0, 1, is_master=True)
            return store, StoreAddress("127.0.0.1", store.port, address.token)
        owns = self.rank == 0 and not address.agent
        where = f"rank 0's store at {address.host}:{address.port}"
        started = time.monotonic()
        if not owns and not address.agent and not self._await_open(self._start_s):
            raise LauncherEnvironmentError(
                f"rank 0 did not open its store at {address.host}:{address.port} within {self._start_s:g} s "
                "(`timeouts: {start_s: ...}`)"
            )
        try:
            store = self._tcp_store(address, owns)
            if owns:
                store.set(_OWNER, f"{address.digest} {address.owner}")
                self._on_open()
            mark = address.digest if address.agent else store.get(_OWNER).decode(errors="replace")
        except (OSError, RuntimeError) as error:
            doing = "open" if owns else "reach"
            raise LauncherEnvironmentError(
                f"rank {self.rank} could not {doing} {where} ({time.monotonic() - started:.0f} s): {error}"
            ) from error
        digest, _, owner = mark.partition(" ")
        if digest != address.digest:
            raise LauncherEnvironmentError(
                f"rank {self.rank} of {address.owner} found another run's store at {address.host}:{address.port}, "
                f"which belongs to {ascii(owner)[1:-1][:200] or 'an unknown owner'}: two runs use the same "
                "MASTER_PORT; leave it unset, or set a different one for each"
            )
        return store, address

    def _tcp_store(self, address: StoreAddress, is_master: bool) -> TCPStore:
        listener = listen_on_ipv4(address) if is_master and TAKES_SOCKET else None
        options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=self._start_s)}
        return TCPStore(address.host, address.port, is_master=is_master, master_listen_fd=listener, **options)

    def _connect(self) -> Store:
        store = self._tcp_store(self._address, is_master=False)
        store.set_timeout(NO_TIMEOUT)
        return PrefixStore(self._address.digest, store)

    def _refuse_shared_gpu(self, host: str) -> None:
        """NCCL needs one GPU per rank; with two ranks on one it fails with 'Duplicate GPU detected' at best."""
        if not self.over_nccl or self.world_size == 1:
            return
        mine = gpu_identity(self.device)
        holder = self.store.compare_set(f"gpu/{mine}", "", str(self.rank)).decode()
        if holder != str(self.rank):
            raise DeviceError(
                f"ranks {holder} and {self.rank} see the same single GPU on node {host}; request one GPU per rank "
                "(--gpus-per-node, without a --gpu-bind that gives several tasks the same one)"
            )
