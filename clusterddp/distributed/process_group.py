"""The ranks' backend, process group and store.

Pure functions choose the backend, and one object opens and closes the group. Rank 0 serves the store, which also works
without a process group.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from clusterddp.distributed.devices import gpu_identity, live_graphs, pci_address
from clusterddp.distributed.torch_patches import SecondGroup
from clusterddp.environment import RankEnvironment
from clusterddp.errors import DeviceError, LauncherEnvironmentError
from clusterddp.process import at_exit
from clusterddp.reporter import say

#: For waits without a timeout, which torch's stores lack.
NO_TIMEOUT = timedelta(days=3650)
#: Seconds that rank 0, which holds the store, waits for the other ranks before it exits.
LEAVE_TIMEOUT_S = 30.0
#: Whether TCPStore supports ``master_listen_fd``: its libuv backend does since torch 2.8.
TAKES_SOCKET = torch.__version__ >= (2, 8)  # type: ignore[operator]
_OWNER, _LEFT, _ALL_LEFT = "clusterddp/owner", "left", "left/all"
#: A rank's connections with rank 0's store, the most with other libraries' too, and the files that it opens besides.
_STORE_CONNECTIONS, _MOST_CONNECTIONS, _OWN_FILES = 2, 4, 256


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
        """The token's fingerprint, because any process that connects to a store can read its contents."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:16]


def allow_connections(rank: int, world_size: int) -> None:
    """Raises this process's limit of open files if the connections of this many ranks need it.

    Rank 0 serves the store, to which each rank has two connections, and NCCL or gloo may open one more. With gloo each
    rank is connected with all others. Raises LauncherEnvironmentError if rank 0 may not open as many as the store
    needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _MOST_CONNECTIONS * world_size + _OWN_FILES
    if hard != resource.RLIM_INFINITY and rank == 0 and hard < _STORE_CONNECTIONS * world_size + _OWN_FILES:
        raise LauncherEnvironmentError(
            f"rank 0 needs {_STORE_CONNECTIONS * world_size + _OWN_FILES:,} open files for the store of {world_size:,} "
            f"ranks, but the limit on {socket.gethostname()} is {hard:,} (`ulimit -Hn`). Ask the administrator for a "
            "higher one (LimitNOFILE of slurmd, or limits.conf), or use fewer ranks"
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


class AttemptStore:
    """A rank's connections to its attempt's store, of which there is one per attempt. Made by all ranks.

    ``on_open`` is called on rank 0 when the store accepts connections. ``await_open(seconds)`` blocks the other ranks
    until then, and returns False on timeout. Without it, torch retries with exponential backoff from 0.5 s to 60 s
    (c10d/Backoff.hpp), and the last of many ranks connects seconds late.

    The port is MASTER_PORT, at which a script's own ``init_process_group`` also opens a store, in the same process.
    torch's and this one are "multi-tenant", so that the second uses the server of the first.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        address: StoreAddress,
        start_s: float,
        on_open: Callable[[], None] = lambda: None,
        await_open: Callable[[float], bool] = lambda _: True,
    ) -> None:
        self.rank, self.world_size = environment.rank, environment.world_size
        self.start_s, self._on_open, self._await_open = start_s, on_open, await_open
        if self.world_size > 1:
            allow_connections(self.rank, self.world_size)
        self._tcp, self._address = self._open(address)
        #: The attempt's namespace in the store, for the main thread.
        self.store = PrefixStore(self._address.digest, self._tcp)
        #: A separate connection for a thread that waits without a timeout. All ranks open theirs before training,
        #: because the only thread of torch's store server resolves the name of each new client and blocks meanwhile.
        #: That took 10 s with slow reverse DNS, and must not happen while the ranks agree on a stop.
        self.watched = self._connect()

    def close(self) -> None:
        """Leaves the store, rank 0 last, because it holds it. Takes a bounded time. Not for use after errors."""
        if self.world_size == 1:
            return
        with suppress(RuntimeError):  # a rank failed while it exited, which is recorded elsewhere
            if self.store.add(_LEFT, 1) == self.world_size:
                self.store.set(_ALL_LEFT, "")
            if self.rank == 0:
                self.store.wait([_ALL_LEFT], timedelta(seconds=LEAVE_TIMEOUT_S))

    def _open(self, address: StoreAddress) -> tuple[TCPStore, StoreAddress]:
        if self.world_size == 1:
            store = TCPStore("127.0.0.1", 0, 1, is_master=True)
            return store, StoreAddress("127.0.0.1", store.port, address.token)
        owns = self.rank == 0 and not address.agent
        where = f"rank 0's store at {address.host}:{address.port}"
        started = time.monotonic()
        if not owns and not address.agent and not self._await_open(self.start_s):
            raise LauncherEnvironmentError(
                f"rank 0 did not open its store at {address.host}:{address.port} within {self.start_s:g} s "
                "(timeouts.start_s). Read rank 0's log"
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
                f"rank {self.rank} could not {doing} {where} (after {time.monotonic() - started:.0f} s): {error}"
            ) from error
        digest, _, owner = mark.partition(" ")
        if digest != address.digest:
            raise LauncherEnvironmentError(
                f"rank {self.rank} of {address.owner} found another run's store at {address.host}:{address.port}, "
                f"which belongs to {ascii(owner)[1:-1][:200] or 'an unknown owner'}. Two runs use the same "
                "MASTER_PORT. Leave it unset, or set a different one for each"
            )
        return store, address

    def _tcp_store(self, address: StoreAddress, is_master: bool) -> TCPStore:
        listener = None
        if is_master and TAKES_SOCKET:
            with suppress(OSError):  # the port is in use; torch reports it, unless this process serves the store there
                listener = listen_on_ipv4(address)
        options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=self.start_s)}
        options |= {"multi_tenant": True, "master_listen_fd": listener}
        return TCPStore(address.host, address.port, is_master=is_master, **options)

    def _connect(self) -> Store:
        store = self._tcp_store(self._address, is_master=False)
        store.set_timeout(NO_TIMEOUT)
        return PrefixStore(self._address.digest, store)


#: Whether gloo's timeout can change after the group has started: in torch 2.9 it can, torch 2.4 ignores it.
GLOO_TIMEOUT_CHANGES = hasattr(dist.ProcessGroup, "set_timeout")
#: The entries of NCCL's flight recorder: torch 2.11's default. torch 2.4 to 2.10 record nothing by default.
FLIGHT_RECORDS = 2000
_GPU_NAME = "gpu name"
_CONNECTED, _ALL_CONNECTED = "connected", "connected/all"


def choose_backend(asked: str | None, device: torch.device) -> str:
    """gloo for CPUs, and for GPUs NCCL, with gloo for tensors on the CPU, unless one is requested. Raises DeviceError
    for one that cannot work here.
    """
    if asked == "nccl" and device.type != "cuda":
        raise DeviceError(f"backend nccl needs a GPU per rank, but the device is {device}. Omit backend, or use gloo")
    # One backend, or one per device type as in "cpu:gloo,cuda:nccl". torch 2.4's own check supports only the former.
    if asked is not None and not all(dist.is_backend_available(one.rpartition(":")[2]) for one in asked.split(",")):
        raise DeviceError(
            f"backend {asked}: this build of torch does not support it. Omit backend to use gloo on CPUs and NCCL on "
            "GPUs"
        )
    return asked or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def backend_of(backend: str, device_type: str) -> str:
    """Which backend communicates tensors of a kind of device: of one name, or of several as ``choose_backend``'s.

    Empty if there is none, as for tensors on the CPU with NCCL.
    """
    for one in backend.split(","):
        kind, _, name = one.rpartition(":")
        if kind == device_type or (kind == "" and (name != "nccl" or device_type == "cuda")):
            return name
    return ""


def flight_recorder(version: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that turns on NCCL's flight recorder in this torch. Empty if the user set one, or it is already on.

    torch 2.8 renamed it, and warns about the older name.
    """
    names = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    release = tuple(map(int, version.split(".")[:2]))
    if release >= (2, 11) or any(name in environ for name in names):
        return {}
    return {names[release >= (2, 8)]: str(FLIGHT_RECORDS)}


def nccl_settings(version: str, deterministic: bool) -> dict[str, str]:
    """The variables for NCCL that the user has not set, before this torch makes a group. ``deterministic``: whether it
    uses deterministic algorithms.
    """
    release = tuple(map(int, re.findall(r"\d+", version)[:3]))
    settings = {}
    if (2, 6, 0) <= release < (2, 7, 1):
        # With a device_id, torch 2.6.0 to 2.7.0 use NCCL's non-blocking mode, in which collectives sometimes hang.
        # torch 2.7.1 uses it no more (https://github.com/pytorch/pytorch/pull/154055).
        settings["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "0"
    if deterministic:
        # Sums in NVSwitches differ between calls (https://github.com/NVIDIA/nccl/issues/1497). Newer torch sets
        # NCCL_ALGO=^NVLS itself, which still allows NVLSTree between nodes.
        settings["NCCL_NVLS_ENABLE"] = "0"
    return settings


def claim_gpu(store: Store, rank: int, gpu: str, mig: bool, host: str) -> None:
    """NCCL needs one GPU per rank. With two ranks on one it fails with 'Duplicate GPU detected' at best.

    ``gpu`` identifies it, ``mig``: the ranks have parts of GPUs. Raises DeviceError if another rank has claimed it.
    """
    holder = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if holder == str(rank):
        return
    if mig:
        raise DeviceError(
            f"ranks {holder} and {rank} have MIG devices of the same GPU on node {host}, but NCCL connects only "
            "different GPUs. Set backend: gloo, or use one MIG device of each GPU"
        )
    raise DeviceError(
        f"ranks {holder} and {rank} see the same single GPU on node {host}. Request one GPU per rank "
        "(--gpus-per-node, without a --gpu-bind that gives several tasks the same one)"
    )


class ProcessGroup:
    """The default process group of torch.distributed, and the attempt's store.

    If the script has made a group, that one is used as it is. If it makes one later, that one replaces the group made
    here. The script destroys its own group, and sets its timeout.
    """

    def __init__(
        self, environment: RankEnvironment, device: torch.device, backend: str, attempt_store: AttemptStore
    ) -> None:
        self.rank, self.world_size = environment.rank, environment.world_size
        self.device, self.backend = device, backend
        self._start_s = attempt_store.start_s
        #: Called when the script makes a group after this one.
        self.on_replaced: Callable[[], None] = lambda: None
        #: Whether the default group is the script's own.
        self.of_script = dist.is_initialized()
        self._second: SecondGroup | None = None
        self.attempt_store = attempt_store
        #: See ``AttemptStore``.
        self.store = attempt_store.store
        self._ranks_per_node = environment.local_world_size
        if self.of_script:
            self.backend = dist.get_backend_config()
        else:
            self._make()
        if device.type == "cuda":
            self.store.set(f"{_GPU_NAME}/{self.rank}", torch.cuda.get_device_properties(device).name)

    def _make(self) -> None:
        if self.over_nccl and self.world_size > 1:
            # MIG devices have different UUIDs, but NCCL identifies a GPU by its PCI address.
            mig = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
            mine = pci_address(self.device) if mig else gpu_identity(self.device)
            claim_gpu(self.store, self.rank, mine, mig, socket.gethostname())
        os.environ.update(flight_recorder(torch.__version__, os.environ))
        if self.over_nccl:
            for name, value in nccl_settings(torch.__version__, torch.are_deterministic_algorithms_enabled()).items():
                os.environ.setdefault(name, value)
        dist.init_process_group(
            self.backend,
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self._start_s),
            device_id=self.device if self.over_nccl else None,  # NCCL connects now rather than in the first step.
        )
        if self.world_size > 1 and self.store.add(_CONNECTED, 1) == self.world_size:
            self.store.set(_ALL_CONNECTED, "")
        self._second = SecondGroup(before=self._destroy, made=self._take_over)

    def _destroy(self) -> None:
        if self.world_size > 1:
            with suppress(RuntimeError):  # a rank failed while it connected, which is recorded elsewhere
                # gloo fails on a rank that still connects when a different one closes its connections.
                self.store.wait([_ALL_CONNECTED], timedelta(seconds=LEAVE_TIMEOUT_S))
        if dist.is_initialized():
            dist.destroy_process_group()

    def _take_over(self) -> None:
        self.of_script, self.backend = True, dist.get_backend_config()
        self.on_replaced()

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

        A job with only the backend "nccl", and a script with a group of only NCCL, have no other device.
        """
        return torch.device("cpu") if backend_of(self.backend, "cpu") else self.device

    def hardware(self) -> dict[str, Any]:
        """The hardware that determines the order and precision of sums on GPUs, on rank 0: how many ranks have which
        GPU, and the ranks of a node. Empty on CPUs."""
        if self.device.type != "cuda":
            return {}
        names = self.store.multi_get([f"{_GPU_NAME}/{rank}" for rank in range(self.world_size)])
        gpus = dict(sorted(Counter(name.decode() for name in names).items()))
        return {"gpus": gpus, "ranks_per_node": self._ranks_per_node}

    @property
    def may_use_nvls(self) -> bool:
        """Whether NCCL may sum in NVSwitches (NVLS, from Hopper on) although torch is in deterministic mode: the group
        was made before that, or the user set the variable. False for a script's own group, for which torch sets
        another variable. Sums of two ranks have no order.
        """
        return (
            self.over_nccl
            and not self.of_script
            and self.world_size > 2
            and torch.are_deterministic_algorithms_enabled()
            and not torch.version.hip
            and torch.cuda.get_device_capability(self.device) >= (9, 0)
            and os.environ.get("NCCL_NVLS_ENABLE") != "0"
            and "NCCL_ALGO" not in os.environ
        )

    def shorten_timeout(self, step_s: float) -> None:
        """Start-up is over, and from now on a collective that takes longer than ``step_s`` seconds fails. A script's
        own group keeps its timeout."""
        if self.of_script:
            return
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=step_s))
        ignored = not self.over_nccl and "gloo" in self.backend and not GLOO_TIMEOUT_CHANGES and step_s < self._start_s
        if ignored and self.rank == 0 and self.world_size > 1:
            say(
                f"torch {torch.__version__} cannot change gloo's timeout after the start, so a collective that hangs "
                f"times out after {self._start_s:g} s, not {step_s:g} s. torch 2.9 and newer can change it"
            )

    def close(self, *, ending: bool) -> None:
        """Leaves the group, if it was made here, and the store. Takes a bounded time. Not for use after errors.

        ``ending``: the script has ended. Otherwise it may still replay a CUDA graph, and the group stays until its end
        if there is one.
        """
        if self._second is not None:
            self._second.allow()
        if not self.of_script:
            if self.over_nccl and not ending and live_graphs():
                at_exit(self._end)
            else:
                self._end()
        self.attempt_store.close()

    def _end(self) -> None:
        if self.over_nccl:
            for graph in live_graphs():  # NCCL waits until each graph with a collective is destroyed
                graph.reset()
        self._destroy()
