"""The ranks' device, backend, store and process group: chosen by pure functions, opened and closed by one object."""

from __future__ import annotations

import hashlib
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # Its default arguments keep the group there is when it's imported, as DDP imports it.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from clusterddp.environment import Launcher, RankEnvironment
from clusterddp.errors import DeviceError, LauncherEnvironmentError
from clusterddp.reporter import say

#: Seconds that rank 0, which holds the store, waits for the others to leave before it does.
LEAVE_TIMEOUT_S = 30.0
#: Whether gloo takes another timeout once the group is up: torch 2.9 does, torch 2.4 ignores it.
GLOO_TIMEOUT_CHANGES = hasattr(dist.ProcessGroup, "set_timeout")
_OWNER, _LEFT, _ALL_LEFT = "clusterddp/owner", "left", "left/all"


def choose_devices(
    asked: str | None,
    local_rank: int,
    local_world_size: int,
    visible_gpus: int,
    host: str,
    launcher: Launcher,
    per_rank: int = 1,
) -> tuple[torch.device, ...]:
    """The devices of a rank, ``per_rank`` of them. ``asked`` is "cpu", "cuda", an explicit "cuda:N" (the first), or
    None: a GPU if any is visible.

    Slurm may have given each task devices of its own: then no more are visible, and they begin at index 0. More than
    that are taken by local rank. Without GPUs they are all the CPU. Raises DeviceError when CUDA is asked for and
    absent, or has fewer devices than the ranks need.
    """
    if asked is None:
        asked = "cuda" if visible_gpus else "cpu"
    device = torch.device(asked)
    if device.type != "cuda":
        return (device,) * per_rank
    if not visible_gpus:
        raise DeviceError(
            f"device {asked} was asked for, but no GPU is visible on node {host}; ask for GPUs (--gpus-per-node), "
            "install a torch with CUDA, or say --device cpu"
        )
    needed = local_world_size * per_rank
    if device.index is not None:
        first = device.index
    elif visible_gpus == per_rank and launcher == "slurm":
        first = 0
    elif visible_gpus < needed:
        giver = "Slurm gave" if launcher == "slurm" else "there are"
        raise DeviceError(f"needs {_gpus(needed)} on node {host}, {giver} {visible_gpus}")
    else:
        first = local_rank * per_rank
    return tuple(torch.device("cuda", index) for index in range(first, first + per_rank))


def choose_backend(asked: str | None, device: torch.device) -> str:
    """NCCL between GPUs, gloo between CPUs, or as asked; one that cannot work here is an error."""
    if asked == "nccl" and device.type != "cuda":
        raise DeviceError(f"backend nccl needs a GPU per rank, but the device is {device}; leave it out, or gloo")
    if asked is not None and not _available(asked):
        raise DeviceError(
            f"backend {asked}: this torch was built without it; leave it out for gloo on CPUs, NCCL on GPUs"
        )
    return asked or ("nccl" if device.type == "cuda" else "gloo")


def _available(backend: str) -> bool:
    """One backend, or one per device type as in "cpu:gloo,cuda:nccl"; torch 2.4's own check knows the former alone."""
    return all(dist.is_backend_available(part.rpartition(":")[2]) for part in backend.split(","))


def devices_of(environment: RankEnvironment, asked: str | None, per_rank: int) -> tuple[torch.device, ...]:
    """``choose_devices`` for this process, as its visible devices are now. CUDA_VISIBLE_DEVICES is left alone."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    place = environment.local_rank, environment.local_world_size
    return choose_devices(asked, *place, visible, socket.gethostname(), environment.launcher, per_rank)


@dataclass(frozen=True)
class StoreAddress:
    """Where the attempt's store is, and what tells it from a stranger's.

    ``token`` is known to the attempt's ranks alone. ``agent`` says that torchrun's agent holds the store, not rank 0.
    ``owner``: whose it is, in words, for those who come to the wrong one.
    """

    host: str
    port: int
    token: str
    agent: bool = False
    owner: str = "another run"

    @property
    def digest(self) -> str:
        """The token's fingerprint: a store shows what it holds to anyone who connects."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:16]


class ProcessGroup:
    """The default process group of torch.distributed and its store; every attempt has a store of its own."""

    def __init__(
        self, environment: RankEnvironment, device: torch.device, backend: str, address: StoreAddress, start_s: float
    ) -> None:
        self.rank, self.world_size = environment.rank, environment.world_size
        self.device, self.backend = device, backend
        self._start_s = start_s
        self._tcp, self._address = self._open(address)
        #: The attempt's corner of the store, for the main thread.
        self.store = PrefixStore(self._address.digest, self._tcp)
        #: A connection of its own, for a thread that will wait there as long as it takes. All ranks open theirs before
        #: any is through: the thread that serves torch's store looks up the name of whoever connects (seen to take 10 s
        #: where reverse DNS is slow) and serves nobody meanwhile. That must not happen when a stop is being agreed on.
        self.watched = self._connect()
        self._refuse_shared_gpu(socket.gethostname())
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=start_s),
            device_id=device if backend == "nccl" else None,  # NCCL then connects now, not in the first step.
        )

    @property
    def collective_device(self) -> torch.device:
        """Where a tensor must be to go through a collective."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def shorten_timeout(self, step_s: float) -> None:
        """From now on a collective that is not done within ``step_s`` seconds is an error: start-up is over."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=step_s))
        ignored = "gloo" in self.backend and not GLOO_TIMEOUT_CHANGES and step_s < self._start_s
        if ignored and self.rank == 0 and self.world_size > 1:
            words = f"a collective that never completes fails after {self._start_s:g} s, not {step_s:g} s"
            say(
                f"torch {torch.__version__} cannot change gloo's timeout after the start: {words}; "
                "torch 2.9 and newer can"
            )

    def close(self) -> None:
        """Leaves, rank 0 last: its store must outlive the others. Bounded; not to be called after an error."""
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
            pass  # A rank has been lost on its way out; its end is recorded elsewhere, and there is nobody to wait for.

    def _open(self, address: StoreAddress) -> tuple[TCPStore, StoreAddress]:
        if self.world_size == 1:
            store = TCPStore("127.0.0.1", 0, 1, is_master=True)
            return store, StoreAddress("127.0.0.1", store.port, address.token)
        owns = self.rank == 0 and not address.agent
        where = f"rank 0's store at {address.host}:{address.port}"
        started = time.monotonic()
        try:
            store = TCPStore(
                address.host,
                address.port,
                is_master=owns,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._start_s),
            )
            if owns:
                store.set(_OWNER, f"{address.digest} {address.owner}")
            mark = address.digest if address.agent else store.get(_OWNER).decode(errors="replace")
        except RuntimeError as error:
            doing = "open" if owns else "reach"
            raise LauncherEnvironmentError(
                f"rank {self.rank} could not {doing} {where} ({time.monotonic() - started:.0f} s): {error}"
            ) from error
        digest, _, owner = mark.partition(" ")
        if digest != address.digest:
            raise LauncherEnvironmentError(
                f"rank {self.rank} of {address.owner} found another run's store at {address.host}:{address.port}, "
                f"which belongs to {ascii(owner)[1:-1][:200] or 'nobody knows whom'}: two runs have chosen the same "
                "MASTER_PORT; leave it unset, or give each its own"
            )
        return store, address

    def _connect(self) -> Store:
        place = self._address.host, self._address.port
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self._start_s))
        store.set_timeout(timedelta(days=3650))
        return PrefixStore(self._address.digest, store)

    def _refuse_shared_gpu(self, host: str) -> None:
        """NCCL needs a GPU for each rank, and says 'Duplicate GPU detected' at best when two ranks share one."""
        if self.backend != "nccl" or self.world_size == 1:
            return
        mine = str(torch.cuda.get_device_properties(self.device).uuid)
        holder = self.store.compare_set(f"gpu/{mine}", "", str(self.rank)).decode()
        if holder != str(self.rank):
            raise DeviceError(
                f"ranks {holder} and {self.rank} see the same single GPU on node {host}; ask for one per rank "
                "(--gpus-per-node, without --gpu-bind)"
            )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
