"""The store that the ranks of an attempt share, which rank 0 serves. It works without a process group."""

from __future__ import annotations

import hashlib
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from clusterddp.environment import RankEnvironment
from clusterddp.errors import LauncherEnvironmentError

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
