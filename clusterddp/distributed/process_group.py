"""The ranks' devices, backend and process group: chosen by pure functions, opened and closed by one object."""

from __future__ import annotations

import ctypes
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # Its default arguments keep the group that exists when it is first imported (by DDP).
from torch._C._distributed_c10d import PrefixStore

from clusterddp.distributed.second_group import SecondGroup
from clusterddp.distributed.store import LEAVE_TIMEOUT_S, AttemptStore
from clusterddp.environment import RankEnvironment
from clusterddp.errors import DeviceError
from clusterddp.reporter import say

#: Whether gloo's timeout can change after the group has started: in torch 2.9 it can, torch 2.4 ignores it.
GLOO_TIMEOUT_CHANGES = hasattr(dist.ProcessGroup, "set_timeout")
#: The entries of NCCL's flight recorder: torch 2.11's default. torch 2.4 to 2.10 record nothing by default.
FLIGHT_RECORDS = 2000
TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"
_GPU_NAME = "gpu name"
_CONNECTED, _ALL_CONNECTED = "connected", "connected/all"


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


class ProcessGroup:
    """The default process group of torch.distributed, and the attempt's store.

    If the script has made a group, that one is used as it is. If it makes one later, that one takes the place of the
    group made here. Whoever made a group destroys it, and decides its timeout.
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
        self._refuse_shared_gpu(socket.gethostname())
        os.environ.update(flight_recorder(torch.__version__, os.environ))
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
                # gloo fails on a rank that still connects when another one closes its connections.
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

        A job that asks for the backend "nccl" alone, and a script with a group of NCCL alone, have no other.
        """
        without_cpu = self.backend == "nccl" or not backend_of(self.backend, "cpu")
        return self.device if without_cpu else torch.device("cpu")

    def hardware(self) -> dict[str, Any]:
        """What the order and precision of sums on GPUs depend on, on rank 0: how many ranks have which GPU, and the
        ranks of a node. Empty on CPUs."""
        if self.device.type != "cuda":
            return {}
        names = self.store.multi_get([f"{_GPU_NAME}/{rank}" for rank in range(self.world_size)])
        gpus = dict(sorted(Counter(name.decode() for name in names).items()))
        return {"gpus": gpus, "ranks_per_node": self._ranks_per_node}

    def shorten_timeout(self, step_s: float) -> None:
        """Start-up is over: from now on a collective that takes longer than ``step_s`` seconds fails. A group of the
        script's own keeps its timeout."""
        if self.of_script:
            return
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=step_s))
        ignored = not self.over_nccl and "gloo" in self.backend and not GLOO_TIMEOUT_CHANGES and step_s < self._start_s
        if ignored and self.rank == 0 and self.world_size > 1:
            say(
                f"torch {torch.__version__} cannot change gloo's timeout after the start: a collective that never "
                f"completes fails after {self._start_s:g} s, not {step_s:g} s; torch 2.9 and newer can"
            )

    def close(self) -> None:
        """Leaves the group, if it was made here, and the store. Takes a bounded time; not for use after errors."""
        if self._second is not None:
            self._second.allow()
        if not self.of_script:
            self._destroy()
        self.attempt_store.close()

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
